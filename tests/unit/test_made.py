"""Layers of one image must not contradict each other, and a faulty wheel is named."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from builder import made
from builder.errors import BuildError, FetchError
from builder.layers import PlannedLayer
from builder.lock import Wheel
from builder.oci import BuiltLayer
from builder.splice import Entry
from builder.splice import write as splice
from builder.store import Store
from tests.unit.test_wheel import NAME, pack

Make = Callable[[str, Mapping[str, str]], BuiltLayer]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    store = Store(tmp_path / "store")
    store.prepare()
    return store


@pytest.fixture
def make(store: Store) -> Make:
    """A layer of this name with these files: what is in them, or where they link to after an arrow."""

    def run(name: str, files: Mapping[str, str]) -> BuiltLayer:
        entries = [
            Entry(path=path, mode=0o777, link=text[2:])
            if text.startswith("->")
            else Entry(path=path, mode=0o755 if text.startswith("#!") else 0o644, content=text.encode())
            for path, text in files.items()
        ]
        inputs = f"sha256:{zlib.crc32(name.encode()):064x}"
        layer = PlannedLayer(kind="wheels", name=name, component="x", inputs=inputs)
        return made.remember(store, layer, lambda out: splice(entries, out))

    return run


@pytest.mark.parametrize(
    ("one", "two", "taken"),
    [
        ({"a/x": "1"}, {"a/y": "1"}, set()),
        ({"a/x": "1"}, {"a/x": "1"}, set()),
        ({"a/l": "->b"}, {"a/l": "->b"}, set()),
        ({"a/x": "1"}, {"a/xy/z": "1"}, {"a/b", "b"}),
        ({}, {}, {"a"}),
    ],
)
def test_layers_that_fit(store: Store, make: Make, one: dict[str, str], two: dict[str, str], taken: set[str]) -> None:
    made.check_paths(store, "image", [make("one", one), make("two", two)], taken)


@pytest.mark.parametrize(
    ("one", "two", "taken", "words"),
    [
        ({"a/x": "1"}, {"a/x": "2"}, set(), "one and two have different files for /a/x"),
        ({"a/x": "1!"}, {"a/x": "#!"}, set(), "one and two have different files for /a/x"),
        ({"a/l": "->b"}, {"a/l": "->c"}, set(), "one and two have different files for /a/l"),
        ({"a/x": "1"}, {}, {"a/x"}, "/a/x is in the os layer and in one"),
        ({"a": "1"}, {"a/x": "1"}, set(), "/a is a folder in two and something else in one"),
        ({"a/b/c": "1"}, {"a": "1"}, set(), "/a is a folder in one and something else in two"),
        ({"a": "->b"}, {"a/b/c": "1"}, set(), "/a is a folder in two and something else in one"),
        ({"lib64/x": "1"}, {}, {"lib64"}, "/lib64 is a folder in one and something else in the os layer"),
        ({"bin": "1"}, {}, {"bin/python"}, "/bin is a folder in the os layer and something else in one"),
    ],
)
def test_layers_that_do_not_fit(
    store: Store, make: Make, one: dict[str, str], two: dict[str, str], taken: set[str], words: str
) -> None:
    layers = [make("one", one), make("two", two)]
    with pytest.raises(BuildError) as raised:
        made.check_paths(store, "image", layers, taken)
    assert str(raised.value) == f"image: {words}"


@pytest.mark.parametrize(
    ("old", "new"), [(b"tiny = 1\n", b"tiny = 2\n"), (b"a/tiny.py", b"../x/y.py"), (b"PK\x05\x06", b"PK\x05\x07")]
)
def test_a_faulty_wheel_is_named_and_nothing_is_kept(store: Store, tmp_path: Path, old: bytes, new: bytes) -> None:
    content = pack({"a/tiny.py": b"tiny = 1\n"}, method=0).content.replace(old, new)
    path = tmp_path / "some.whl"
    path.write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    one = Wheel(component="x", name="tiny-pkg", version="1.0", file=NAME, size=len(content), sha256=sha256)
    layer = PlannedLayer(
        kind="wheels", name="x", component="x", inputs=f"sha256:{sha256}", wheels=(one,), python="3.11"
    )
    with pytest.raises(FetchError, match=f"^{NAME}: "):
        made.wheels(store, layer, [path])
    assert made.recall(store, layer) is None
    assert list((store.root / "tmp").iterdir()) == []
