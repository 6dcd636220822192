"""Bundles: what is written, and that nothing is taken from a hostile one but layers of locks/layers.json."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from builder.common.console import View
from builder.common.errors import DamagedError, DiskError, FileError
from builder.common.files import digest_of_bytes
from builder.layers import images, oci, os_layer, stored_layers
from builder.layers.blobs import LAYER_TYPE
from builder.layers.bundle import load_bundle, write_bundle
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import Layer
from builder.layers.os_layer import OsLayer
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.layer_order import PlannedLayer
from builder.plan.plan import PlannedImage
from tests.fakes.engine import MemoryConsole
from tests.unit.layers.test_images import put_image

CELL = "qz-0.5-cu129-py311"
NAME = "org/qz:0.5"


@dataclass
class Sides:
    """A machine that made an image, `known` layers that both sides have, and the store of a closed network."""

    made: Store
    closed: Store
    known: KnownLayers
    image: PlannedImage
    contents: dict[str, bytes]  # of layers, by their inputs
    console: MemoryConsole
    file: Path

    def layer(self, planned: PlannedLayer) -> Layer:
        content = self.contents[planned.inputs]
        digest = digest_of_bytes(content)
        return Layer(digest=digest, diff_id=digest, size=len(content))

    def write(self, *, without: str = "") -> Path:
        """Writes a bundle of the image, without the layer with these inputs."""
        blobs = [content for inputs, content in self.contents.items() if inputs != without]
        stored = put_image(self.made, *blobs, name=NAME)
        sizes = images.blobs(self.made, stored.manifest.digest)
        write_bundle(self.file, self.made, {NAME: stored.manifest}, sizes, lambda _: None)
        return self.file

    def load(self) -> None:
        load_bundle(self.file, self.closed, [self.image], self.known, View(self.console))

    def loaded(self) -> set[str]:
        """The blobs in the closed network."""
        return {f"sha256:{path.name}" for path in (self.closed.root / "blobs/sha256").iterdir()}


@pytest.fixture
def sides(tiny: Project, tmp_path: Path) -> Sides:
    [image] = plan.make_locked_plan(tiny, tiny.select([CELL])).images
    stores = [Store(tmp_path / name) for name in ("made", "closed")]
    for store in stores:
        store.prepare()
    planned_layers = [layer for layer in image.layers if layer.kind != "files" or layer.compiled]
    assert {layer.kind for layer in planned_layers} == {"os", "wheels", "files"}
    sides = Sides(
        made=stores[0], closed=stores[1], known=KnownLayers(tiny.root), image=image, file=tmp_path / "images.tar",
        contents={layer.inputs: f"layer {layer.name}".encode() * 100 for layer in planned_layers},
        console=MemoryConsole(),
    )  # fmt: skip
    for planned in planned_layers:
        layer = sides.layer(planned)
        if planned.kind == "os":
            system = OsLayer(**vars(layer), created="2026-01-01T00:00:00Z", taken=(), folders=())
            sides.known.add_system(planned.inputs, system)
        else:
            sides.known.add(planned, layer)
    return sides


# ---- written


def test_a_bundle_is_an_image_layout_and_the_same_for_the_same_images(sides: Sides) -> None:
    first = sides.write().read_bytes()
    with tarfile.open(sides.file, "r:") as tar:
        files = {member.name: file.read() for member in tar if (file := tar.extractfile(member))}
        assert {(member.mode, member.uid, member.mtime) for member in tar} == {(0o644, 0, 0)}
    assert json.loads(files.pop("oci-layout")) == {"imageLayoutVersion": "1.0.0"}
    [manifest] = oci.read_index(files.pop("index.json")).items()
    assert manifest == (NAME, sides.made.images()[NAME])
    assert {digest_of_bytes(content) for content in files.values()} == {
        f"sha256:{name.removeprefix('blobs/sha256/')}" for name in files
    }
    assert set(images.blobs(sides.made, manifest[1].digest)) == {digest_of_bytes(each) for each in files.values()}
    assert sides.write().read_bytes() == first


@pytest.mark.parametrize(
    "damage", [lambda content: content[:-1], lambda content: content + b"x", lambda content: b"x" + content[1:]]
)
def test_a_damaged_blob_of_the_store_leaves_the_earlier_file(sides: Sides, damage: Callable[[bytes], bytes]) -> None:
    before = sides.write().read_bytes()
    manifest = sides.made.images()[NAME]
    sizes = images.blobs(sides.made, manifest.digest)
    path = sides.made.path(list(sizes)[-1])
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DamagedError, match="does not match its digest"):
        write_bundle(sides.file, sides.made, {NAME: manifest}, sizes, lambda _: None)
    assert sides.file.read_bytes() == before
    assert [each.name for each in sides.file.parent.glob("*.tmp*")] == []


def test_too_little_room_is_reported_before_anything_is_written(store: Store, tmp_path: Path) -> None:
    with pytest.raises(DiskError, match=r"images\.tar takes 1000000000\.0 GB, but its disk has "):
        write_bundle(tmp_path / "images.tar", store, {}, {digest_of_bytes(b""): 10**18}, lambda _: None)
    with pytest.raises(FileError, match=f"no such file or directory .{tmp_path}/no."):
        write_bundle(tmp_path / "no/images.tar", store, {}, {}, lambda _: None)


# ---- read


def test_what_the_build_needs_is_in_the_store_afterwards(sides: Sides) -> None:
    sides.write()
    sides.load()
    for planned in sides.image.layers:
        if planned.kind == "os":
            assert os_layer.stored_system(sides.closed, planned.inputs, None) == sides.known.system(planned.inputs)
        elif planned.inputs in sides.contents:
            assert stored_layers.stored_layer(sides.closed, planned, None) == sides.layer(planned)
    assert all(sides.closed.matches(blob) for blob in sides.loaded())
    assert len(sides.loaded()) == len(sides.contents), "only layers are taken"
    assert "bundle: done" in sides.console.text
    sides.file.write_bytes(b"")
    sides.load()  # nothing is missing, so the file is not read


def test_a_file_that_was_packed_again_by_tar_is_read(sides: Sides, tmp_path: Path) -> None:
    """GNU tar writes folders, and `./` before each name."""
    with tarfile.open(sides.write(), "r:") as source:
        contents = {member.name: file.read() for member in source if (file := source.extractfile(member))}
    with tarfile.open(sides.file, "w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("./", "./blobs/"):
            info = tarfile.TarInfo(name)
            info.type, info.pax_headers = tarfile.DIRTYPE, {"comment": "é" * 600}
            tar.addfile(info)
        for name, content in contents.items():
            info = tarfile.TarInfo(f"./{name}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    sides.load()
    assert len(sides.loaded()) == len(sides.contents)


def test_a_layer_that_the_bundle_lacks_is_named_with_its_cell(sides: Sides) -> None:
    sides.write(without=sides.image.os_inputs)
    with pytest.raises(FileError, match=rf"images\.tar lacks 1 layer of {CELL}") as error:
        sides.load()
    assert f"builder bundle {CELL} -o images.tar" in error.value.hint
    assert sides.loaded() == set()


def test_a_layer_that_is_not_known_is_not_taken(sides: Sides, tiny: Project, tmp_path: Path) -> None:
    """Nothing says which bytes it must have."""
    sides.write()
    sides.known = KnownLayers(tmp_path / "without layers.json")
    with pytest.raises(FileError, match=rf"of {CELL} is not in the store, and not listed in locks/layers\.json"):
        sides.load()
    assert sides.loaded() == set()


# ---- hostile


def _flip(content: bytearray, sides: Sides) -> None:
    layer = sides.contents[sides.image.os_inputs]
    content[content.index(layer)] ^= 1


def _cut(content: bytearray, sides: Sides) -> None:
    del content[len(content) // 2 :]


def _cut_at_a_file(content: bytearray, sides: Sides) -> None:
    del content[content.rindex(b"blobs/sha256/") :]


def _bad_header(content: bytearray, sides: Sides) -> None:
    content[content.index(b"blobs/sha256/")] ^= 1


def _negative_size(content: bytearray, sides: Sides) -> None:
    """Would read the same header without end."""
    _header(content, b"\xff" * 12)


def _huge_size(content: bytearray, sides: Sides) -> None:
    _header(content, b"\x80" + b"\x7f" * 11)


def _header(content: bytearray, size: bytes) -> None:
    at = content.index(b"blobs/sha256/")
    content[at + 124 : at + 136] = size
    content[at + 148 : at + 156] = b" " * 8
    content[at + 148 : at + 156] = b"%06o\0 " % sum(content[at : at + 512])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_flip, "does not match its digest"),
        (_cut, "its end is missing"),
        (_cut_at_a_file, "its end is missing"),
        (_bad_header, "invalid header at byte "),
        (_negative_size, "its end is missing"),
        (_huge_size, "its end is missing"),
        (lambda content, _: content.clear(), "its end is missing"),
        (lambda content, _: content.__setitem__(0, 1), "it is not a tar"),
        (lambda content, _: content.__setitem__(slice(None), gzip.compress(content)), "or is compressed"),
    ],
)
def test_a_damaged_bundle_is_refused(sides: Sides, damage: Callable[[bytearray, Sides], object], message: str) -> None:
    content = bytearray(sides.write().read_bytes())
    damage(content, sides)
    sides.file.write_bytes(content)
    with pytest.raises(FileError, match=message) as error:
        sides.load()
    assert "SHA-256" in error.value.hint
    assert all(sides.closed.matches(blob) for blob in sides.loaded())
    assert list((sides.closed.root / "tmp").iterdir()) == []


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE])
def test_only_plain_files_under_the_names_of_needed_blobs_are_read(sides: Sides, tmp_path: Path, kind: bytes) -> None:
    """A link could name a file of this machine, and a path could leave the store."""
    secret = tmp_path / "secret"
    secret.write_bytes(sides.contents[sides.image.os_inputs])
    digest = digest_of_bytes(secret.read_bytes()).removeprefix("sha256:")
    with tarfile.open(sides.file, "w") as tar:
        link = tarfile.TarInfo(f"blobs/sha256/{digest}")
        link.type, link.linkname = kind, str(secret)
        tar.addfile(link)
        for name in ("../outside", "/tmp/outside", f"blobs/sha256/../{digest}", "layers/x.json", "index.json"):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"bad"))
    before = {path for path in tmp_path.rglob("*") if "closed" not in path.parts}
    with pytest.raises(FileError, match="lacks"):
        sides.load()
    assert {path for path in tmp_path.rglob("*") if "closed" not in path.parts} == before
    assert sides.loaded() == set()
    assert list((sides.closed.root / "layers").iterdir()) == []


def test_another_layer_in_place_of_the_known_one_is_not_taken(sides: Sides) -> None:
    """Even if the file lists it with a valid digest under the image's name."""
    inputs = sides.image.os_inputs
    sides.contents[inputs] = b"another system"
    other = sides.made.put(sides.contents[inputs], LAYER_TYPE)
    sides.write()
    with pytest.raises(FileError, match="lacks 1 layer"):
        sides.load()
    assert other.digest not in sides.loaded()
