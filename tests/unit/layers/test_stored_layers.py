"""Layers of one image must not conflict, and an invalid wheel is named."""

from __future__ import annotations

import hashlib
import io
import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.common.errors import BuildError, BuilderWarning, DamagedError, FetchError
from builder.index.wheels import Wheel
from builder.layers import estargz, splice, stored_layers
from builder.layers.estargz import TocEntry
from builder.layers.oci import Layer
from builder.layers.splice import Entry
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.layer_order import PlannedLayer
from builder.plan.plan import PlannedImage
from tests.unit.layers.test_wheel import NAME, other, pack

PathsOfLayer = tuple[PlannedLayer, tuple[TocEntry, ...]]


def planned(name: str, **fields: Any) -> PlannedLayer:
    """A layer of CUDA wheels, unless it has a `python`."""
    inputs = f"sha256:{zlib.crc32(name.encode()):064x}"
    return PlannedLayer(**{"kind": "wheels", "name": name, "component": "x", "inputs": inputs, **fields})


def layer_of(name: str, files: Mapping[str, str], **fields: Any) -> PathsOfLayer:
    """A layer with these files, given as content, or as an arrow and the target of a link."""
    entries = [
        Entry(path=path, mode=0o777, link=text[2:])
        if text.startswith("->")
        else Entry(path=path, mode=0o755 if text.startswith("#!") else 0o644, content=text.encode())
        for path, text in files.items()
    ]
    blob = io.BytesIO()
    splice.write_layer(entries, blob)
    return planned(name, **fields), estargz.read_toc(blob)


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
    layers = [
        (planned(name), [TocEntry(name=path, type="reg", mode=mode, size=size) for path, (mode, size) in files.items()])
        for name, files in (("1", first), ("2", second))
    ]
    with pytest.raises(BuildError) if is_conflict else nullcontext():
        stored_layers.check_paths("image", layers, taken)


def test_layers_may_share_equal_files_and_links() -> None:
    """Every layer has a table of contents, which differs, and the same file for snapshotters."""
    files = {"a/x": "1", "a/l": "->b", "a/large": "12345678" * (splice.MEMBER // 7)}
    layers = [layer_of("one", files), layer_of("two", {**files, "b/x": "2"})]
    assert [entry.type for entry in layers[0][1]] == ["reg", "symlink", "reg", "chunk", "reg"]
    stored_layers.check_paths("image", layers, {"c"})


def test_of_two_layers_of_a_variant_the_higher_one_has_the_file() -> None:
    """`mcap` and `mcap-protobuf-support` both have tests/test_writer.py: installers take the later one."""
    contents = {"one": "first", "two": "other"}
    layers = [
        layer_of(name, {f"tests/{file}.py": content for file in "abcd"}, python="3.11")
        for name, content in contents.items()
    ]
    assert stored_layers.check_paths("image", [*layers, layer_of("three", {"x": "1"}, python="3.11")], ()) == [
        "image: one and two have different files for /tests/a.py, /tests/b.py, /tests/c.py and 1 more; "
        "those of two are used"
    ]


@pytest.mark.parametrize(
    "fields",
    [{"python": ""}, {"is_foundation": True}, {"kind": "files"}],
    ids=["CUDA", "the framework", "the launcher"],
)
def test_files_of_the_framework_the_launcher_and_cuda_are_not_replaced(fields: dict[str, Any]) -> None:
    """Nor if a layer between them has an equal file."""
    one = layer_of("one", {"x": "1"}, **{"python": "3.11", **fields})
    two, three = (layer_of(name, {"x": name[1]}, python="3.11") for name in ("-1", "-2"))
    for layers in ([one, three], [three, one], [one, two, three]):
        with pytest.raises(BuildError):
            stored_layers.check_paths("image", layers, ())


@pytest.mark.parametrize(
    ("fields", "is_allowed"),
    [({}, True), ({"is_foundation": True}, False), ({"python": ""}, False)],
    ids=["a variant", "the framework", "CUDA"],
)
def test_two_wheels_with_one_path_in_one_layer(
    store: Store, tmp_path: Path, fields: dict[str, Any], is_allowed: bool
) -> None:
    packed = [pack({"t.py": b"1"}), other({"t.py": b"2"})]
    wheels = []
    for content in packed:
        (tmp_path / content.name).write_bytes(content.content)
        name, _, _ = content.name.partition("-")
        wheels.append(Wheel(component="x", name=name, version="2.0", file=content.name, size=1, sha256="0" * 64))
    paths = [tmp_path / wheel.file for wheel in wheels]
    layer = planned("small", **{"python": "3.11", "wheels": tuple(wheels), **fields})
    if not is_allowed:
        with pytest.raises(BuildError):
            stored_layers.store_wheels(store, layer, paths)
        return
    with pytest.warns(BuilderWarning) as warned:
        stored_layers.store_wheels(store, layer, paths)
    assert len(warned) == 1


def store_one(store: Store) -> Layer:
    return stored_layers.store_layer(store, planned("one"), [Entry(path="a", mode=0o644, content=b"1")])


@pytest.mark.parametrize("damage", ["missing", "without its end"])
def test_a_damaged_layer_of_the_store_is_named(store: Store, damage: str) -> None:
    layer = store_one(store)
    path = store.path(layer.digest)
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DamagedError) as raised:
        stored_layers.read_stored_toc(store, layer)
    assert raised.value.blob == layer.digest


LARGE = "a" * splice.MEMBER


@pytest.mark.parametrize(
    ("first", "second", "taken"),
    [
        ({"a/x": "1"}, {"a/x": "2"}, set()),
        ({"a/x": "1!"}, {"a/x": "#!"}, set()),
        ({"a/l": "->b"}, {"a/l": "->c"}, set()),
        ({"a": LARGE}, {"a": LARGE[:-1] + "b"}, set()),
        ({"a": LARGE + "a"}, {"a": LARGE + "b"}, set()),
        ({"a/x": "1"}, {}, {"a/x"}),
        ({"a": "1"}, {"a/x": "1"}, set()),
        ({"a/b/c": "1"}, {"a": "1"}, set()),
        ({"a": "->b"}, {"a/b/c": "1"}, set()),
        ({"lib64/x": "1"}, {}, {"lib64"}),
        ({"bin": "1"}, {}, {"bin/python"}),
    ],
)
def test_files_of_two_layers_that_conflict(first: dict[str, str], second: dict[str, str], taken: set[str]) -> None:
    with pytest.raises(BuildError):
        stored_layers.check_paths("image", [layer_of("one", first), layer_of("two", second)], taken)


@pytest.mark.parametrize(
    "change",
    [{"diff_id": 5}, {"diff_id": "sha256:x"}, {"unpacked": "many"}, {"unpacked": -1}, {"toc": "x"}, {"files": 1}],
)
def test_a_layer_with_a_damaged_record_is_made_again(store: Store, change: dict[str, object]) -> None:
    inputs, layer = planned("one").inputs, store_one(store)
    assert stored_layers.stored_layer(store, inputs) == layer
    store.put_record(inputs, layer.as_record() | change)
    assert stored_layers.stored_layer(store, inputs) is None


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
    with pytest.raises(FetchError):
        stored_layers.store_wheels(store, layer, [path])
    assert stored_layers.stored_layer(store, layer.inputs) is None
    assert list((store.root / "tmp").iterdir()) == []


CELL = "em-1.10-cu1210-py311-jupyter"


@pytest.fixture
def image(tiny: Project) -> PlannedImage:
    [planned] = plan.make_locked_plan(tiny, tiny.select([CELL])).images
    return replace(planned, file_components=("base", "jupyter"))


def put(project: Project, component: str, name: str, content: str = "x", mode: int = 0o644) -> Path:
    path = project.root / f"templates/{component}/files/{name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(mode)
    return path


def link(project: Project, component: str, name: str, target: str) -> None:
    path = put(project, component, name)
    path.unlink()
    path.symlink_to(target)


def entries(project: Project, image: PlannedImage, folders: tuple[str, ...] = ()) -> dict[str, Entry]:
    """By path, without the landmark, which is last: all files are prefetched."""
    files = stored_layers.read_component_files(project, image)
    *others, last = stored_layers.component_file_entries(files, folders)
    assert last is splice.PREFETCH
    assert len({entry.path for entry in others}) == len(others)
    return {entry.path: entry for entry in others}


def test_files_of_all_components_are_sorted_with_each_folder_before_its_contents(
    tiny: Project, image: PlannedImage
) -> None:
    """Links are kept whatever their target. Of two components with one path, the later one has it."""
    put(tiny, "base", "z/y/x")
    put(tiny, "base", "etc/file", "replaced")
    put(tiny, "jupyter", "etc/file", "text")
    put(tiny, "jupyter", "a")
    link(tiny, "base", "usr/lib/it.so.1", "/opt/it/lib/it.so.1")
    link(tiny, "base", "usr/lib/folder", "../share")
    link(tiny, "base", "etc/link", "replaced")
    link(tiny, "jupyter", "etc/link", "other")
    result = entries(tiny, image)
    paths = list(result)
    expected = {"etc/pip/constraints.txt": image.constraints.encode()}
    for component in image.file_components:
        top = tiny.root / f"templates/{component}/files"
        expected |= {path.relative_to(top).as_posix(): path.read_bytes() for path in top.rglob("*") if path.is_file()}
    assert {path: entry.content for path, entry in result.items() if entry.content is not None} == expected
    assert {path: (entry.mode, entry.link) for path, entry in result.items() if entry.link} == {
        "etc/link": (0o777, "other"),
        "usr/lib/folder": (0o777, "../share"),
        "usr/lib/it.so.1": (0o777, "/opt/it/lib/it.so.1"),
    }
    folders = [path for path, entry in result.items() if entry.content is None and not entry.link]
    assert {result[path].mode for path in folders} == {0o755}
    files = [path for path in paths if path not in folders]
    assert files == sorted(files)
    for number, path in enumerate(paths):
        parent = path.rpartition("/")[0]
        assert not parent or parent in paths[:number], path


@pytest.mark.parametrize(
    ("mode", "expected"), [(0o644, 0o644), (0o600, 0o644), (0o755, 0o755), (0o700, 0o755), (0o664, 0o644)]
)
def test_only_the_executable_bit_of_a_mode_counts(tiny: Project, image: PlannedImage, mode: int, expected: int) -> None:
    """The other bits depend on the umask during checkout."""
    put(tiny, "base", "usr/local/bin/it", mode=mode)
    assert entries(tiny, image)["usr/local/bin/it"].mode == expected


def test_a_component_without_files_of_its_own_adds_none(tiny: Project, image: PlannedImage) -> None:
    none = replace(image, file_components=(), wheels=())
    assert list(entries(tiny, none)) == ["etc", "etc/pip", "etc/pip/constraints.txt"]


@pytest.mark.parametrize("folder", ["workspace", "var/tmp", "home/user/.config"])
def test_a_file_in_a_folder_with_its_own_owner_or_mode_is_refused(
    tiny: Project, image: PlannedImage, folder: str
) -> None:
    """The layer would replace the folder with one that is 0755 root:root."""
    put(tiny, "base", f"{folder}/deep/it")
    with pytest.raises(BuildError):
        entries(tiny, image, folders=(folder, "tmp"))
    assert entries(tiny, image, folders=("tmp", f"{folder}/other", f"{folder}-2"))


def test_a_file_in_the_environment_keeps_the_mode_of_its_folders(tiny: Project, image: PlannedImage) -> None:
    put(tiny, "base", "opt/venv/lib/python/it")
    folders = ("opt/venv", "opt/venv/lib", "opt/venv/lib/python")
    result = entries(tiny, image, folders=folders)
    assert [result[folder].mode for folder in ("opt", *folders)] == [0o755, 0o775, 0o775, 0o775]


def test_a_file_below_a_link_of_another_component_is_refused(tiny: Project, image: PlannedImage) -> None:
    link(tiny, "base", "srv/data", "/elsewhere")
    put(tiny, "jupyter", "srv/data/file")
    with pytest.raises(BuildError):
        stored_layers.read_component_files(tiny, image)
