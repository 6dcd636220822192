"""The formats of the catalog, and what changed between two releases."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import yaml

from builder.common.files import digest_of_bytes
from builder.common.reference import ImageRef
from builder.host import Host
from builder.layers.blobs import CONFIG_TYPE, LAYER_TYPE, MANIFEST_TYPE, Descriptor
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.matrix.schema import Trusted
from builder.matrix.tags import PLAN_LABEL
from builder.plan import plan
from builder.release import status
from builder.release.catalog import Catalog, CatalogImage, RecordedRun
from builder.release.staging import ReleasedImage, ReleaseRecord, StagingArea
from builder.release.status import TaggedImage
from builder.steps import catalog
from tests.fakes.registry import MemoryRegistry
from tests.unit.release.test_catalog import BOARD, JUPYTER, NAME, PLAIN, RELEASED, TODAY, entry, trust

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
    return replace(image, tests=replace(image.tests, runs=(run,), state=gpu))


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
    assert f"No command to pull it: not released yet. `builder images {PLAIN}` builds it." in lines
    assert "about " in rows[2]


def test_the_data_is_the_model(tiny: Project) -> None:
    image = entry(tiny)
    data = json.loads(catalog.render_catalog(tiny, content(image), "json"))
    assert data["images"][0]["pull"] == list(image.pull)
    assert data["unlocked"] == ["em-1.9-cu129-py39"]
    assert data["images"][0].keys() == vars(image).keys()


# ---- profiles of KubeSpawner


def test_profiles_of_a_hub(tiny: Project) -> None:
    text = catalog.render_catalog(tiny, content(entry(tiny, JUPYTER), entry(tiny, BOARD)), "kubespawner")
    [profile] = yaml.safe_load(text)["singleuser"]["profileList"]
    description = profile.pop("description")
    assert description.startswith("released as 0.5.3-")
    assert "; signature: signed by keys/ci.pub; " in description
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
    image = replace(entry(tiny, JUPYTER), cuda="cpu", support="<b>")
    [profile] = yaml.safe_load(catalog.render_catalog(tiny, content(image), "kubespawner"))["singleuser"]["profileList"]
    override = profile["kubespawner_override"]
    assert override["environment"] == {"GPU_REQUIRED": "0", "NVIDIA_VISIBLE_DEVICES": "void"}
    assert "extra_resource_limits" not in override
    assert html.escape("<b>") in profile["description"]


def test_an_image_that_cannot_be_pulled_is_no_profile(tiny: Project) -> None:
    project = trust(tiny, Trusted(key="keys/ci.pub"))
    for tagged, reason in (
        (TaggedImage(released="no"), "not released yet"),
        (replace(RELEASED, signature="untrusted", signer=""), "signature: signed, but by no signer that matrix.yaml "),
    ):
        image = entry(project, JUPYTER, tagged)
        text = catalog.render_catalog(project, content(image), "kubespawner")
        assert f"# {JUPYTER} is left out: {reason}" in text
        assert yaml.safe_load(text) == {"singleuser": {"profileList": []}}
        page = Page(catalog.render_catalog(project, content(image), "html"))
        assert "docker pull" not in page.text
        assert "good" not in {attributes.get("class") for _, attributes in page.tags}


# ---- releases and changes


class Registry(MemoryRegistry):
    """A public repository with images of BOARD, which have one layer with one wheel; `full` is their full tag."""

    def __init__(self, project: Project) -> None:
        super().__init__()
        self.project = project
        [self.planned] = plan.make_locked_plan(project, project.select([BOARD])).images
        self.full, *self.aliases = [ImageRef.parse(text).tag for text in self.planned.references]

    def add(self, version: str, *tags: str) -> str:
        """Adds an image of the plan, with this version of its package, and sets tags; returns its digest."""
        layer = f"sha256:{version * 64}"
        line = f"wheels format=6 python=3.11: board-{version}-py3-none-any.whl@sha256:{version * 64}"
        config = json.dumps(
            {
                "architecture": "amd64",
                "config": {"Labels": {PLAN_LABEL: self.planned.plan}},
                "rootfs": {"diff_ids": [layer]},
                "history": [{"created_by": line}],
            }
        ).encode()
        blob = Descriptor.of(config, CONFIG_TYPE)
        self.contents[blob.digest] = config
        manifest = {
            "schemaVersion": 2,
            "mediaType": MANIFEST_TYPE,
            "config": {"mediaType": CONFIG_TYPE, "digest": blob.digest, "size": blob.size},
            "layers": [{"mediaType": LAYER_TYPE, "digest": layer, "size": 70}],
        }
        content = json.dumps(manifest).encode()
        for tag in tags:
            self.put_manifest(tag, content, MANIFEST_TYPE)
        return digest_of_bytes(content)

    def entry(self, store: Store, area: StagingArea | None = None) -> CatalogImage:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(status, "Repository", lambda *_, **__: self)
            made = catalog.make_catalog(
                self.project, Host(), store, [self.planned.cell], area, registry="", here=False, today=TODAY
            )
        [image] = made.images
        return image


@pytest.fixture
def registry(tiny: Project) -> Registry:
    return Registry(tiny)


def test_the_changes_since_the_release_before(registry: Registry, store: Store) -> None:
    full, before = registry.full, "0.5.1-cu129-py311-board-20261101"  # of an earlier release of the framework
    registry.add("1", before)
    registry.add("4", "0.5.2-cu129-py311-board-20261030")  # rolled back
    registry.add("2", f"{full}-20261119", f"{full}-20261120", full, *registry.aliases)
    registry.add("3", "0.5.3-cu129-py311-20261110", "0.4.1-cu129-py311-board-20261110", f"{full}-x")  # of other cells
    image = registry.entry(store)
    assert image.released == f"released as {full}-20261120"
    assert image.changes.text == f"since {before}"
    assert image.changes.packages == ("board 1 -> 2",)
    assert image.pull[0] == f"docker pull {NAME}:{registry.aliases[-1]}"


def test_the_stamp_of_a_release_is_that_of_its_tag(registry: Registry, store: Store) -> None:
    """A push had the stamp of the day, and the release got the next one: staging records the first."""
    full, documents = registry.full, MemoryRegistry()
    area = StagingArea("registry.example.test:5000/staging", "", Host(), new_registry=lambda *_, **__: documents)
    pushed, new = registry.add("1", f"{full}-20261120"), registry.add("2", f"{full}-20261120.1", full)
    for stamp, digest in (("20261119", new), ("20261120", new), ("20261121", pushed)):  # the first was interrupted
        released = ReleasedImage(cell=BOARD, digest=digest, references=(f"{NAME}:{full}",), gpu="passed", signer="")
        area.record(ReleaseRecord(stamp=stamp, revision="", images=(released,)))
    image = registry.entry(store, area)
    missing = "".join(f", {tag} missing" for tag in registry.aliases)
    assert image.released == f"released as {full}-20261120.1{missing}"
    assert image.changes.text == f"since {full}-20261120"
    assert image.pull[0] == f"docker pull {NAME}:{full}", "no other tag names it"


def test_changes_that_are_unknown(registry: Registry, store: Store) -> None:
    full = registry.full
    assert registry.entry(store).changes.text == "unknown: no image was found to compare"
    new = registry.add("2", full)
    assert registry.entry(store).changes.text == "unknown: no tag with a stamp names this image"
    registry.tags[f"{full}-20261120"] = new
    assert registry.entry(store).changes.text == "no earlier release has a tag"
    registry.put_manifest(f"{full}-20261101", b"{}", MANIFEST_TYPE)
    text = "unknown: 0.5.3-cu129-py311-board-{} has no image for amd64 that can be read"
    assert registry.entry(store).changes.text == text.format("20261101")
    registry.add("1", f"{full}-20261101")
    config = json.loads(registry.contents[new])["config"]["digest"]
    registry.contents[config] = registry.contents[config].replace(b"diff_ids", b"")
    assert registry.entry(store).changes.text == text.format("20261120"), "the one that cannot be read is named"
