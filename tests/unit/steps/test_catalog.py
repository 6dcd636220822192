"""The formats of the catalog, and what changed between two releases."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from html.parser import HTMLParser
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from builder.layers import oci
from builder.layers.blobs import CONFIG_TYPE, Descriptor
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.release.catalog import Catalog, CatalogImage, RecordedRun
from builder.release.status import TaggedImage
from builder.steps import catalog
from tests.fakes.registry import MemoryRegistry
from tests.unit.release.test_catalog import BOARD, JUPYTER, NAME, PLAIN, RELEASED, entry

EVIL = "<script>alert(1)</script> | [x](javascript:y) `z`"


class Page(HTMLParser):
    """The names of the elements, their attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data

    def count(self, tag: str) -> int:
        return [name for name, _ in self.tags].count(tag)


def content(*images: CatalogImage) -> Catalog:
    return Catalog(made="2026-11-22", places="on this machine", images=images, unlocked=("em-1.9-cu129-py39",))


def with_run(image: CatalogImage, gpu: str) -> CatalogImage:
    run = RecordedRun(gpu=gpu, driver="580.1", passed=3, failed=0, day="2026-11-20", is_emulated=False)
    return replace(image, tests=replace(image.tests, runs=(run,), refused=(gpu,)))


def test_a_page_has_all_images_in_one_file(tiny: Project) -> None:
    text = catalog.render_catalog(tiny, content(entry(tiny, PLAIN), entry(tiny)), "html")
    page = Page(text)
    assert page.count("article") == 2
    assert not [attributes for _, attributes in page.tags if {"src", "href"} & attributes.keys()], "nothing is loaded"
    labels = page.count("label")
    assert labels == page.count("input") + page.count("select") == 4
    [form] = [attributes for tag, attributes in page.tags if tag == "form"]
    assert "hidden" in form, "without a script, which shows it, it would do nothing"
    assert not [attributes for tag, attributes in page.tags if tag == "article" and "hidden" in attributes]
    assert "em-1.9-cu129-py39 has no lock yet" in page.text
    identifiers = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(identifiers) == len(set(identifiers))


def test_text_of_other_machines_is_no_markup(tiny: Project) -> None:
    image = with_run(entry(tiny), EVIL)
    page = Page(catalog.render_catalog(tiny, content(image), "html"))
    assert page.count("script") == 1
    assert page.count("a") == 0
    assert page.text.count("alert(1)") == 3
    text = catalog.render_catalog(tiny, content(image), "markdown")
    assert "<script" not in text.replace("\\<", "")
    assert r"\<script\>alert(1)\</script\> \| \[x\](javascript:y) \`z\`" in text


def test_each_image_has_a_row_and_a_section_in_the_text(tiny: Project) -> None:
    text = catalog.render_catalog(
        tiny, content(entry(tiny), entry(tiny, PLAIN, TaggedImage(released="no"))), "markdown"
    )
    lines = text.splitlines()
    rows = [line for line in lines if line.startswith("| ")]
    assert {line.count("|") for line in rows} == {10}
    assert [line for line in lines if line.startswith("## ")] == [f"## {BOARD}", f"## {PLAIN}"]
    assert f"docker pull {NAME}:0.5-board" in lines
    assert f"Nothing to pull. `builder images {PLAIN}` builds it." in lines
    assert "about " in rows[2]


def test_the_data_is_the_model(tiny: Project) -> None:
    image = entry(tiny)
    data = json.loads(catalog.render_catalog(tiny, content(image), "json"))
    assert data["images"][0]["pull"] == image.pull
    assert data["unlocked"] == ["em-1.9-cu129-py39"]
    assert data["images"][0].keys() == vars(image).keys()


# ---- profiles of KubeSpawner


def test_profiles_of_a_hub(tiny: Project) -> None:
    text = catalog.render_catalog(tiny, content(entry(tiny, JUPYTER), entry(tiny, BOARD)), "kubespawner")
    [profile] = yaml.safe_load(text)["singleuser"]["profileList"]
    assert profile.pop("description").startswith("released on 2026-11-20")
    assert profile == {
        "display_name": "quartz 0.5.3, CUDA 12.9, Python 3.11 (jupyter, amd64)",
        "slug": JUPYTER.replace(".", "-"),
        "kubespawner_override": {
            "image": f"{NAME}@{RELEASED.digest}",
            "node_selector": {"kubernetes.io/arch": "amd64"},
            "extra_resource_limits": {"nvidia.com/gpu": "1"},
        },
        "default": True,
    }


def test_a_profile_without_a_gpu_does_not_require_one(tiny: Project) -> None:
    """A node whose default runtime is NVIDIA's would give it all of its GPUs."""
    image = replace(entry(tiny, JUPYTER, TaggedImage()), cuda="cpu", support="<b>")
    [profile] = yaml.safe_load(catalog.render_catalog(tiny, content(image), "kubespawner"))["singleuser"]["profileList"]
    override = profile["kubespawner_override"]
    assert override["environment"] == {"GPU_REQUIRED": "0", "NVIDIA_VISIBLE_DEVICES": "void"}
    assert "extra_resource_limits" not in override
    assert override["image"] == f"{NAME}:0.5-jupyter", "no digest is known"
    assert html.escape("<b>") in profile["description"]


def test_an_image_that_cannot_be_pulled_is_no_profile(tiny: Project) -> None:
    text = catalog.render_catalog(tiny, content(entry(tiny, JUPYTER, TaggedImage(released="no"))), "kubespawner")
    assert f"# {JUPYTER} is left out: not released yet\n" in text
    assert yaml.safe_load(text) == {"singleuser": {"profileList": []}}


# ---- changes


def image_with(registry: MemoryRegistry, version: str) -> str:
    """An image of one layer with one wheel."""
    layer = Descriptor(
        media_type="application/vnd.oci.image.layer.v1.tar+gzip", digest=f"sha256:{version * 64}", size=70
    )
    line = f"wheels format=6 python=3.11: board-{version}-py3-none-any.whl@sha256:{version * 64}"
    config = json.dumps(
        {"architecture": "amd64", "rootfs": {"diff_ids": [layer.digest]}, "history": [{"created_by": line}]}
    ).encode()
    blob = Descriptor.of(config, CONFIG_TYPE)
    registry.contents[blob.digest] = config
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {"mediaType": CONFIG_TYPE, "digest": blob.digest, "size": blob.size},
        "layers": [{"mediaType": layer.media_type, "digest": layer.digest, "size": layer.size}],
    }
    made = oci.Manifest.of(json.dumps(manifest).encode())
    registry.put_manifest(made.digest, made.content, made.media_type)
    return made.digest


@pytest.mark.parametrize("is_pruned", [False, True])
def test_the_changes_since_the_release_before(store: Store, is_pruned: bool) -> None:
    registry = MemoryRegistry()
    old, new = image_with(registry, "1"), image_with(registry, "2")
    if is_pruned:
        del registry.contents[old]
    reader: Any = SimpleNamespace(area=object(), releases={BOARD: [("20261101", old), ("20261120", new)]}, store=store)
    tagged = replace(RELEASED, digest=new, repository=registry)
    state: Any = SimpleNamespace(tagged=tagged, planned=SimpleNamespace(id=BOARD))
    changes = catalog._changes(reader, {}, state)
    if is_pruned:
        assert changes.text == "unknown: the registry no longer has the image of release 20261101"
    else:
        assert changes.text == "70 B to pull for who has the image of release 20261101"
        assert changes.packages == ("board 1 -> 2",)
    for field, value, text in (
        ("area", None, "unknown: there is no staging place, which has the records of releases"),
        ("releases", {}, "unknown: no record of a release has this image"),
        ("releases", {BOARD: [("20261120", new)]}, "no earlier release is recorded"),
    ):
        other: Any = SimpleNamespace(**{**vars(reader), field: value})
        assert catalog._changes(other, {}, state).text == text
