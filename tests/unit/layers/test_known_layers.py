"""Known layers: the same inputs give the same bytes, on any machine, or the build fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builder.common import digest
from builder.common.errors import BuildError, LockError
from builder.layers import known_layers
from builder.layers.known_layers import KnownLayer, KnownLayers
from builder.layers.oci import Layer
from builder.lock.document import KNOWN_LAYERS as PATH
from builder.plan.layer_order import LayerKind, PlannedLayer

BASE = "debian:1"


def planned(kind: LayerKind = "wheels", name: str = "torch") -> PlannedLayer:
    return PlannedLayer(kind=kind, name=name, component="x", inputs=digest.of_bytes(name.encode()))


def layer(content: str = "1", compressed: str = "") -> Layer:
    blob = f"{content} {compressed}".encode()
    return Layer(digest=digest.of_bytes(blob), diff_id=digest.of_bytes(content.encode()), size=len(blob), unpacked=9)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "locks").mkdir()
    return tmp_path


def test_the_first_build_writes_what_later_ones_read(root: Path) -> None:
    known = KnownLayers(root)
    known.add(planned(), layer(), BASE)
    known.add(planned("os", "os"), layer("2"), BASE)
    known.write()
    text = (root / PATH).read_text()
    again = KnownLayers(root)
    wheels = layer()
    assert again.get(planned()) == KnownLayer(
        digest=wheels.digest, diff_id=wheels.diff_id, size=wheels.size, unpacked=9
    )
    system = again.get(planned("os", "os"), BASE)
    assert system
    assert system.digest == layer("2").digest
    assert again.get(planned("os", "os"), "debian:2") is None
    again.add(planned(), layer(), "debian:2")
    again.write()
    assert (root / PATH).read_text() == text, "a layer of wheels does not depend on the base"


def test_nothing_is_written_without_layers(root: Path) -> None:
    KnownLayers(root).write()
    assert not (root / PATH).exists()


@pytest.mark.parametrize("kind", ["wheels", "files", "os"])
def test_other_bytes_for_the_same_inputs_are_an_error(root: Path, kind: LayerKind) -> None:
    known = KnownLayers(root)
    known.add(planned(kind), layer(), BASE)
    known.add(planned(kind), layer(), BASE)
    first, other = layer(), layer("2")
    what, old, new = (
        ("diff id", first.diff_id, other.diff_id) if kind == "os" else ("digest", first.digest, other.digest)
    )
    with pytest.raises(BuildError, match=f"^layer torch has the {what} {new}, but {PATH} records {old}$"):
        known.add(planned(kind), other, BASE)
    kept = known.get(planned(kind), BASE)
    assert kept
    assert kept.digest == first.digest


def test_an_operating_system_may_be_compressed_by_another_zlib(root: Path) -> None:
    known = KnownLayers(root)
    known.add(planned("os"), layer("1", "zlib"), BASE)
    known.add(planned("os"), layer("1", "zlib-ng"), BASE)
    known.add(planned("wheels", "numpy"), layer("1", "spliced"), BASE)
    with pytest.raises(BuildError):
        known.add(planned("wheels", "numpy"), layer("1", "otherwise"), BASE)


def test_an_operating_system_on_another_base_has_other_bytes(root: Path) -> None:
    known = KnownLayers(root)
    known.add(planned("os"), layer(), BASE)
    known.add(planned("os"), layer("2"), "debian:2")
    for base, content in ((BASE, "2"), ("debian:2", "1")):
        with pytest.raises(BuildError):
            known.add(planned("os"), layer(content), base)


@pytest.mark.parametrize("change", [{"diff_id": digest.of_bytes(b"x")}, {"size": 1}, {"unpacked": 1}])
def test_a_recorded_layer_must_be_right_in_all_its_fields(root: Path, change: dict[str, Any]) -> None:
    """The diff id of a known layer is not computed again."""
    known = KnownLayers(root)
    known.add(planned(), replace(layer(), **change), BASE)
    with pytest.raises(BuildError):
        known.add(planned(), layer(), BASE)


def test_layers_that_no_image_has_are_removed(root: Path) -> None:
    known = KnownLayers(root)
    for name in ("torch", "numpy"):
        known.add(planned(name=name), layer(name), BASE)
    known.add(planned("os", "torch"), layer("os"), BASE)
    known.write()
    assert known_layers.prune(root, {planned().inputs, "sha256:other"})
    assert list(known_layers.read(root)) == [planned().inputs, f"{planned().inputs} {BASE}"]
    assert not known_layers.prune(root, {planned().inputs})


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"format": 1', '"format": 2', "has lock format 2; this builder reads format 1"),
        ('"size"', '"length"', "is damaged"),
        ('": "sha256:', '": "sha1:', "is damaged"),
        ('"digest"', '<<<<<<< HEAD\n"digest"', "is damaged"),
    ],
)
def test_a_damaged_file_is_an_error(root: Path, old: str, new: str, message: str) -> None:
    known = KnownLayers(root)
    known.add(planned(), layer(), BASE)
    known.write()
    text = (root / PATH).read_text()
    (root / PATH).write_text(text.replace(old, new, 1))
    with pytest.raises(LockError, match=f"^{PATH} {message}"):
        KnownLayers(root)


def test_the_file_does_not_depend_on_the_order_of_builds(root: Path) -> None:
    texts = set()
    for names in (["a", "b"], ["b", "a"]):
        (root / PATH).unlink(missing_ok=True)
        known = KnownLayers(root)
        for name in names:
            known.add(replace(planned(name=name)), layer(name), BASE)
        known.write()
        texts.add((root / PATH).read_text())
    assert len(texts) == 1
