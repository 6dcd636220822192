"""Images of a store: what they consist of, which blobs they lack, and which image a word names."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from builder.common.errors import DamagedError, FileError
from builder.common.files import digest_of_bytes
from builder.layers import oci, stored_images
from builder.layers.oci import LAYER_TYPE, MANIFEST_TYPE, Image, Layer
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.settings import Settings

NAMES = ["org/pt:2.9.1-cu128-py311", "org/pt:2.9.1-cu128-py311-jupyter", "org/pt:2.9.1-cu128-py311-jupyter.untested"]
PLAIN, JUPYTER, NEW = NAMES
REFERENCES = {
    "pt-2.9-cu128-py311": (PLAIN, "org/pt:2.9"),
    "pt-2.9-cu128-py311-jupyter": (JUPYTER, "org/pt:2.9-jupyter"),
    "tf-2.20-cu128-py311": ("org/tf:2.20.0-cu128-py311", "org/tf:2.20"),
}


def put_image(store: Store, *contents: bytes, name: str = "") -> Image:
    """Stores an image with these layers. A layer's diff id follows from its content."""
    layers = []
    for content in contents:
        blob = store.put(content, LAYER_TYPE)
        diff_id = digest_of_bytes(b"tar of " + content)
        layers.append(Layer(digest=blob.digest, diff_id=diff_id, size=blob.size))
    settings = Settings(env={}, ports=(), command=("x",), labels={"a": "1"})
    history = tuple(f"layer {number}" for number in range(len(layers)))
    config = oci.config(settings, layers, history, created="2026-01-01T00:00:00Z", labels={})
    image = stored_images.put_image(store, config, layers, history=history, labels={"a": "1"})
    store.name(name or repr(contents), image.manifest.descriptor)
    return image


def test_an_image_is_read_as_it_was_stored(store: Store) -> None:
    image = put_image(store, b"one", b"two")
    assert stored_images.read_stored_image(store, image.manifest.digest) == image
    assert stored_images.missing(store, image.manifest.digest) == []


def test_missing_and_truncated_blobs(store: Store) -> None:
    image = put_image(store, b"missing", b"truncated", b"complete")
    missing, truncated, _ = (layer.digest for layer in image.layers)
    store.path(missing).unlink()
    store.path(truncated).write_bytes(b"trunc")
    assert stored_images.missing(store, image.manifest.digest) == [missing, truncated]
    store.path(image.config.digest).unlink()
    with pytest.raises(DamagedError):
        stored_images.read_stored_image(store, image.manifest.digest)


def test_an_image_is_found_by_its_plan_and_its_operating_system(store: Store, tiny: Project) -> None:
    """Until one of its blobs is missing."""
    planned = plan.make_locked_plan(tiny, tiny.select(["qz-0.5-cu129-py311"])).images[0]
    image = put_image(store, b"os", b"wheels")
    system = Layer(
        digest=image.layers[0].digest, diff_id=image.layers[0].diff_id, size=2, unpacked=3,
        created="2026-01-01T00:00:00Z", taken=(), folders=(),
    )  # fmt: skip
    stored_images.put_name(store, planned, system, image, "x")
    assert stored_images.find_stored_image(store, planned) is None, "without its operating system"
    other = replace(system, digest=image.layers[1].digest, size=image.layers[1].size)
    for made, expected in ((other, None), (system, image)):
        store.put_record(planned.os_inputs, asdict(made))
        assert stored_images.find_stored_image(store, planned) == expected
    store.path(image.layers[1].digest).unlink()
    assert stored_images.find_stored_image(store, planned) is None


def test_an_image_without_its_manifest(store: Store) -> None:
    with pytest.raises(FileError):
        stored_images.read_stored_image(store, "sha256:" + "0" * 64)


@pytest.mark.parametrize("text", [b"{}", b"[]", b'{"config": 1, "layers": []}', b'{"config": {"digest": 1}}', b"x"])
def test_an_invalid_manifest_is_damaged(store: Store, text: bytes) -> None:
    blob = store.put(text, MANIFEST_TYPE)
    for read in (stored_images.blobs, stored_images.read_stored_image):
        with pytest.raises(DamagedError) as caught:
            read(store, blob.digest)
        assert caught.value.blob == blob.digest


@pytest.mark.parametrize(
    ("word", "hits"),
    [
        (PLAIN, [PLAIN]),
        (JUPYTER, [JUPYTER, NEW]),
        (NEW, [NEW]),
        ("org/pt:*", NAMES),
        ("pt-2.9-cu128-py311", [PLAIN]),
        ("pt-2.9-cu128-py311-jupyter", [JUPYTER, NEW]),
        ("pt-2.9-*-{jupyter,full}", [JUPYTER, NEW]),
        ("org/pt:2.9", [PLAIN]),
        ("org/pt:2.9-jupyter", [JUPYTER, NEW]),
        ("tf-2.20-cu128-py311", []),
        ("org/pt:2", []),
        ("", []),
    ],
)
def test_names_ids_tags_and_patterns(word: str, hits: list[str]) -> None:
    assert stored_images.match_names(reversed(NAMES), word, REFERENCES) == hits


def test_names_match_without_a_checkout() -> None:
    assert stored_images.match_names(NAMES, "org/pt:*-py311", {}) == [PLAIN]
