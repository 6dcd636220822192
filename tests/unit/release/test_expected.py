"""Differences between an image and the plan are found and named: additions, changes, omissions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest

from builder.common.errors import VerifyError
from builder.common.files import digest_of_bytes, digest_of_data
from builder.layers import estargz, oci
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import CONFIG_TYPE, LAYER_TYPE, Descriptor, Layer
from builder.matrix.project import Project
from builder.plan import plan, settings
from builder.plan.plan import PlannedImage
from builder.release import expected

CELL = "qz-0.5-cu129-py311-board"
Change = Callable[[dict[str, Any], dict[str, Any]], object]


@pytest.fixture
def image(tiny: Project) -> PlannedImage:
    return plan.make_locked_plan(tiny, tiny.select([CELL])).images[0]


def documents(image: PlannedImage) -> tuple[dict[str, Any], dict[str, Any]]:
    """Manifest and configuration as the assembler writes them."""
    stack = [
        Layer(digest=digest_of_data(number), diff_id=digest_of_data([number]), size=number)
        for number in range(len(image.layers))
    ]
    history = [oci.history_line(layer) for layer in image.layers]
    created = "2026-11-01T00:00:00Z"
    labels = settings.built_labels(image.plan, created)
    config = oci.config(image.settings, stack, history, created=created, labels=labels)
    descriptor = Descriptor(media_type=CONFIG_TYPE, digest=digest_of_bytes(config), size=len(config))
    return json.loads(oci.manifest(descriptor, stack)), json.loads(config)


def refusal(image: PlannedImage, promised: Mapping[int, Layer], manifest: dict[str, Any], config: bytes) -> str:
    """The message for an image, without the words that all have; empty if it is as planned."""
    content = json.dumps(manifest, separators=(",", ":")).encode()
    try:
        expected.compare_with_plan(image, promised, oci.read_image(content, lambda _: config), config, is_trusted=True)
    except VerifyError as error:
        return str(error).removeprefix(f"{CELL}: the image differs from the plan: ")
    return ""


def refusal_of(image: PlannedImage, manifest: dict[str, Any], config: dict[str, Any]) -> str:
    """With a manifest that names the configuration as it is."""
    content = json.dumps(config, separators=(",", ":")).encode()
    if manifest["config"].get("digest"):
        manifest["config"] |= {"digest": digest_of_bytes(content), "size": len(content)}
    return refusal(image, {}, manifest, content)


def test_an_image_of_the_assembler_has_no_differences(image: PlannedImage) -> None:
    assert refusal_of(image, *documents(image)) == ""


def add_layer(manifest: dict[str, Any], config: dict[str, Any]) -> None:
    """The attack: an additional layer with a history line like ours."""
    manifest["layers"].append({"mediaType": LAYER_TYPE, "digest": digest_of_data("x"), "size": 1})
    config["rootfs"]["diff_ids"].append(digest_of_data("y"))
    config["history"].append({"created": config["created"], "created_by": "files: python bytecode"})


CONFIG, MANIFEST = "its configuration is another one", "its manifest is another one"
CHANGES: dict[str, tuple[Change, str]] = {
    "user": (lambda _, config: config["config"].update(User="root"), CONFIG),
    "entrypoint": (lambda _, config: config["config"].update(Entrypoint=["sh"]), CONFIG),
    "variable": (lambda _, config: config["config"]["Env"].append("LD_PRELOAD=/x.so"), CONFIG),
    "path": (lambda _, config: config["config"]["Env"].__setitem__(0, "PATH=/tmp"), CONFIG),
    "volume": (lambda _, config: config["config"].update(Volumes={"/x": {}}), CONFIG),
    "on build": (lambda _, config: config["config"].update(OnBuild=["RUN x"]), CONFIG),
    "label": (lambda _, config: config["config"]["Labels"].update({"a": "b"}), CONFIG),
    "system": (lambda _, config: config.update(os="windows"), CONFIG),
    "time": (lambda _, config: config.update(created="2026-11-02T00:00:00Z"), CONFIG),
    "line": (lambda _, config: config["history"][0].update(created_by="x"), CONFIG),
    "empty line": (lambda _, config: config["history"].append({"empty_layer": True}), CONFIG),
    "type of a layer": (lambda manifest, _: manifest["layers"][0].update(mediaType="x"), MANIFEST),
    "address": (lambda manifest, _: manifest["layers"][0].update(urls=["https://x"]), MANIFEST),
    "annotation": (lambda manifest, _: manifest.update(annotations={"a": "b"}), MANIFEST),
    "subject": (lambda manifest, _: manifest.update(subject=manifest["config"]), MANIFEST),
    "added layer": (add_layer, " layers, expected "),
    "left out": (
        lambda manifest, config: (
            manifest["layers"].pop(),
            config["rootfs"]["diff_ids"].pop(),
            config["history"].pop(),
        ),
        " layers, expected ",
    ),
    "plan": (
        lambda _, config: config["config"]["Labels"].update({"io.github.gpu-images.plan": "x"}),
        "built from plan 'x'",
    ),
    "label of the time": (
        lambda _, config: config["config"]["Labels"].update({"org.opencontainers.image.created": "yesterday"}),
        "invalid creation time 'yesterday'",
    ),
    "number for text": (lambda manifest, _: manifest.update(schemaVersion=2.0), MANIFEST),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES.keys())
def test_a_change_is_refused(image: PlannedImage, change: Change, message: str) -> None:
    manifest, config = documents(image)
    change(manifest, config)
    assert message in refusal_of(image, manifest, config)


def test_the_same_values_in_other_bytes(image: PlannedImage) -> None:
    manifest, config = documents(image)
    content = json.dumps(config, indent=1).encode()
    manifest["config"] |= {"digest": digest_of_bytes(content), "size": len(content)}
    assert CONFIG in refusal(image, {}, manifest, content)


def test_known_layers(tiny: Project, image: PlannedImage) -> None:
    """The layer of files comes from the checkout, the others from its locks/layers.json."""
    [number] = [number for number, layer in enumerate(image.layers) if layer.kind == "files"]
    bare = expected.expected_layers(tiny, KnownLayers(tiny.root), image)
    assert set(bare) == {number}
    (tiny.root / "templates/base/files/etc/new").write_text("x")
    assert expected.expected_layers(tiny, KnownLayers(tiny.root), image)[number] != bare[number]

    known = KnownLayers(tiny.root)
    system = Layer(
        digest=digest_of_bytes(b"debian"),
        diff_id=digest_of_bytes(b"inflated"),
        size=6,
        unpacked=1,
        created="2026-11-01T00:00:00Z",
        taken=(),
        folders=(),
    )
    known.add(image.os_layer, system)
    compiled = [layer for layer in image.layers if layer.compiled]
    for layer in compiled:
        content = digest_of_bytes(layer.name.encode())
        known.add(layer, Layer(digest=content, diff_id=content, size=1, unpacked=1))
    known.write()
    layers = expected.expected_layers(tiny, KnownLayers(tiny.root), image)
    assert len(layers) == 2 + len(compiled)
    assert system in layers.values()


def test_the_annotations_of_a_layer_are_those_of_the_expected_one(image: PlannedImage) -> None:
    """Snapshotters mount the files of the table of contents that the annotation has the digest of."""
    manifest, config = documents(image)
    known = oci.read_image(json.dumps(manifest).encode(), lambda _: json.dumps(config).encode()).layers[0]
    toc, other = digest_of_bytes(b"files"), digest_of_bytes(b"other files")
    promised = {0: replace(known, unpacked=99, toc=toc)}
    right = {estargz.TOC_ANNOTATION: toc, estargz.SIZE_ANNOTATION: "99"}
    for changed, message in (
        (right, ""),
        ({**right, estargz.TOC_ANNOTATION: other}, MANIFEST),
        ({**right, estargz.SIZE_ANNOTATION: "100"}, MANIFEST),
        ({**right, "other": "x"}, MANIFEST),
        (None, MANIFEST),
    ):
        manifest["layers"][0].pop("annotations", None)
        if changed:
            manifest["layers"][0]["annotations"] = changed
        said = refusal(image, promised, manifest, json.dumps(config, separators=(",", ":")).encode())
        assert (said and said.partition(" (")[0]) == message


def test_another_layer_of_the_operating_system_is_a_difference(tiny: Project, image: PlannedImage) -> None:
    """The same files in other bytes: no machine writes them."""
    manifest, config = documents(image)
    content, config_bytes = (
        json.dumps(manifest, separators=(",", ":")).encode(),
        json.dumps(config, separators=(",", ":")).encode(),
    )
    actual = oci.read_image(content, lambda _: config_bytes)
    [number] = [number for number, layer in enumerate(image.layers) if layer.kind == "os"]
    layer = actual.layers[number]
    for known in (layer, replace(layer, digest=digest_of_bytes(b"compressed otherwise"))):
        with nullcontext() if known == layer else pytest.raises(VerifyError, match=r"layer os is .*, expected "):
            expected.compare_with_plan(image, {number: known}, actual, config_bytes, is_trusted=True)


@pytest.mark.parametrize("created", ["2026-11-01T00:00:00Z", "2026-11-02T00:00:00Z"])
def test_the_creation_time_is_that_of_the_known_system(tiny: Project, image: PlannedImage, created: str) -> None:
    """If the system is known, nobody can make an image look newer than its packages."""
    manifest, config = documents(image)
    [number] = [number for number, layer in enumerate(image.layers) if layer.kind == "os"]
    known = KnownLayers(tiny.root)
    system = Layer(
        digest=digest_of_bytes(b"compressed by another zlib"),
        diff_id=config["rootfs"]["diff_ids"][number],
        size=1,
        unpacked=1,
        created=created,
        taken=(),
        folders=(),
    )
    known.add(image.os_layer, system)
    content = json.dumps(config, separators=(",", ":")).encode()
    said = refusal(image, expected.expected_layers(tiny, known, image), manifest, content)
    assert (CONFIG in said) == (created != config["created"])
