"""Layers of one image must not conflict, and an invalid wheel is named."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.common.errors import BuildError, FetchError
from builder.index.wheels import Wheel
from builder.layers import stored_layers
from builder.layers.splice import Entry
from builder.layers.store import Store
from builder.plan.layer_order import PlannedLayer
from tests.unit.layers.test_wheel import NAME, pack

Make = Callable[[str, Mapping[str, str]], PlannedLayer]


@pytest.fixture
def make(store: Store) -> Make:
    """A layer with these files, given as content, or as an arrow and the target of a link."""

    def run(name: str, files: Mapping[str, str]) -> PlannedLayer:
        entries = [
            Entry(path=path, mode=0o777, link=text[2:])
            if text.startswith("->")
            else Entry(path=path, mode=0o755 if text.startswith("#!") else 0o644, content=text.encode())
            for path, text in files.items()
        ]
        inputs = f"sha256:{zlib.crc32(name.encode()):064x}"
        layer = PlannedLayer(kind="wheels", name=name, component="x", inputs=inputs)
        stored_layers.store_layer(store, layer, entries)
        return layer

    return run


# Few names, so that paths often agree, and one is often a folder of another.
PATHS = st.lists(st.sampled_from(["a", "b", "ab"]), min_size=1, max_size=3).map("/".join)
FILES = st.dictionaries(PATHS, st.tuples(st.sampled_from([0o644, 0o755]), st.integers(0, 1)), max_size=3)


@given(FILES, FILES, st.sets(PATHS, max_size=2))
def test_layers_conflict_if_a_path_has_two_files_or_is_a_file_and_a_folder(
    first: dict[str, tuple[int, int]], second: dict[str, tuple[int, int]], taken: set[str]
) -> None:
    """Wheels of one namespace may share a file."""
    paths = {*first, *second, *taken}
    is_conflict = (
        bool(taken & {*first, *second})
        or any(first[path] != second[path] for path in first.keys() & second.keys())
        or any(path.startswith(f"{other}/") for path in paths for other in paths)
    )
    layers = [(name, [[path, *file] for path, file in files.items()]) for name, files in (("1", first), ("2", second))]
    with pytest.raises(BuildError) if is_conflict else nullcontext():
        stored_layers.check_files("image", layers, taken)


def test_layers_may_share_equal_files_and_links(store: Store, make: Make) -> None:
    files = {"a/x": "1", "a/l": "->b"}
    stored_layers.check_paths(store, "image", [make("one", files), make("two", files)], {"b"})


@pytest.mark.parametrize(
    ("first", "second", "taken", "message"),
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
def test_a_conflict_names_both_layers_and_the_path(
    store: Store, make: Make, first: dict[str, str], second: dict[str, str], taken: set[str], message: str
) -> None:
    layers = [make("one", first), make("two", second)]
    with pytest.raises(BuildError) as raised:
        stored_layers.check_paths(store, "image", layers, taken)
    assert str(raised.value) == f"image: {message}"


@pytest.mark.parametrize(
    "change", [{"diff_id": 5}, {"diff_id": "sha256:x"}, {"unpacked": "many"}, {"unpacked": -1}, {"files": 1}]
)
def test_a_layer_with_a_damaged_record_is_made_again(make: Make, store: Store, change: dict[str, object]) -> None:
    layer = make("a", {"a/x": "1"})
    assert stored_layers.stored_layer(store, layer, None)
    store.put_record(layer.inputs, (store.get_record(layer.inputs) or {}) | change)
    assert stored_layers.stored_layer(store, layer, None) is None


@pytest.mark.parametrize(
    ("old", "new"), [(b"tiny = 1\n", b"tiny = 2\n"), (b"a/tiny.py", b"../x/y.py"), (b"PK\x05\x06", b"PK\x05\x07")]
)
def test_an_invalid_wheel_is_named_and_nothing_is_stored(store: Store, tmp_path: Path, old: bytes, new: bytes) -> None:
    content = pack({"a/tiny.py": b"tiny = 1\n"}, method=0).content.replace(old, new)
    path = tmp_path / "some.whl"
    path.write_bytes(content)
    sha256 = hashlib.sha256(content).hexdigest()
    file = Wheel(component="x", name="tiny-pkg", version="1.0", file=NAME, size=len(content), sha256=sha256)
    layer = PlannedLayer(
        kind="wheels", name="x", component="x", inputs=f"sha256:{sha256}", wheels=(file,), python="3.11"
    )
    with pytest.raises(FetchError, match=f"^{NAME}: "):
        stored_layers.store_wheels(store, layer, [path])
    assert stored_layers.stored_layer(store, layer, None) is None
    assert list((store.root / "tmp").iterdir()) == []
