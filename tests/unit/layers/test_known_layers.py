"""Known layers: the same inputs give the same bytes, on any machine, or the build fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builder.common.errors import BuildError, LockError
from builder.common.files import digest_of_bytes
from builder.common.lock_text import KNOWN_LAYERS as PATH
from builder.layers import known_layers
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import Layer
from builder.plan.layer_order import PlannedLayer

OS = PlannedLayer(kind="os", name="os", component="base", inputs=digest_of_bytes(b"the inputs of an operating system"))


def planned(name: str = "torch") -> PlannedLayer:
    return PlannedLayer(kind="wheels", name=name, component="x", inputs=digest_of_bytes(name.encode()))


def layer(content: str = "1") -> Layer:
    digest, diff_id, toc = (digest_of_bytes(f"{part} {content}".encode()) for part in ("blob", "tar", "files"))
    return Layer(digest=digest, diff_id=diff_id, size=5, unpacked=9, toc=toc)


def system() -> Layer:
    return replace(layer(), created="2026-01-01T00:00:00Z", taken=("opt/tool",), folders=("tmp",))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "locks").mkdir()
    return tmp_path


def test_the_first_build_writes_what_later_ones_read(root: Path) -> None:
    known = KnownLayers(root)
    known.add(planned(), layer())
    known.add(OS, system())
    known.write()
    text = (root / PATH).read_text()
    again = KnownLayers(root)
    assert again.get(planned().inputs) == layer()
    assert again.get(OS.inputs) == system()
    assert again.get("sha256:other") is None
    again.add(planned(), layer())
    again.add(OS, system())
    again.write()
    assert (root / PATH).read_text() == text
    again.add(planned(name="numpy"), layer("2"))
    again.write()
    assert KnownLayers(root).get(planned(name="numpy").inputs) == layer("2")


def test_nothing_is_written_without_layers(root: Path) -> None:
    KnownLayers(root).write()
    assert not (root / PATH).exists()


@pytest.mark.parametrize(
    "change",
    [
        {"digest": digest_of_bytes(b"x")},
        {"diff_id": digest_of_bytes(b"x")},
        {"size": 1},
        {"unpacked": 1},
        {"toc": digest_of_bytes(b"x")},
        {"created": "2026-01-02T00:00:00Z"},
        {"folders": ()},
        {"taken": ()},
    ],
)
def test_other_bytes_for_the_same_inputs_are_an_error(root: Path, change: dict[str, Any]) -> None:
    """The diff id of a known layer is not computed again, and images are assembled from what is recorded."""
    known, first = KnownLayers(root), replace(system(), **change)
    known.add(OS, first)
    known.add(OS, first)
    with pytest.raises(BuildError):
        known.add(OS, system())
    assert known.get(OS.inputs) == first


def test_layers_that_no_image_has_are_removed(root: Path) -> None:
    known = KnownLayers(root)
    for name in ("torch", "numpy"):
        known.add(planned(name=name), layer(name))
    known.add(OS, system())
    known.write()
    assert known_layers.prune(root, {planned().inputs, OS.inputs, "sha256:other"})
    rest = KnownLayers(root)
    assert rest.get(planned().inputs)
    assert rest.get(planned(name="numpy").inputs) is None
    assert rest.get(OS.inputs)
    assert known_layers.prune(root, {planned().inputs})
    assert KnownLayers(root).get(OS.inputs) is None
    assert not known_layers.prune(root, {planned().inputs})


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"format": 4', '"format": 3'),
        ('"size"', '"length"'),
        ('": "sha256:', '": "sha1:'),
        ('"digest"', '<<<<<<< HEAD\n"digest"'),
        ("2026-01-01T", "yesterday "),
        ("2026-01-01T00:00:00Z", ""),
        (', "folders": ["tmp"]', ""),
        ('"toc"', '"created": "2026-01-01T00:00:00Z", "toc"'),
    ],
)
def test_a_damaged_file_is_an_error(root: Path, old: str, new: str) -> None:
    known = KnownLayers(root)
    known.add(planned(), layer())
    known.add(OS, system())
    known.write()
    text = (root / PATH).read_text()
    assert old in text
    (root / PATH).write_text(text.replace(old, new, 1))
    with pytest.raises(LockError):
        KnownLayers(root)


def test_the_file_does_not_depend_on_the_order_of_builds(root: Path) -> None:
    texts = set()
    for names in (["a", "b"], ["b", "a"]):
        (root / PATH).unlink(missing_ok=True)
        known = KnownLayers(root)
        for name in names:
            known.add(planned(name=name), layer(name))
        known.write()
        texts.add((root / PATH).read_text())
    assert len(texts) == 1
