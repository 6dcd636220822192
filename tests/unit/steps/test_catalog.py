"""The catalog: which images it says to pull, their results, and its formats."""

from __future__ import annotations

import html
import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from html.parser import HTMLParser
from typing import Any

import pytest
import yaml

from builder.common.errors import UsageError
from builder.common.files import digest_of_bytes
from builder.common.reference import ImageRef
from builder.evidence.results import Coverage, Evidence, Proof, coverage_of
from builder.layers.oci import CONFIG_TYPE, LAYER_TYPE, MANIFEST_TYPE, Descriptor
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.matrix.schema import Trusted
from builder.matrix.tags import PLAN_LABEL
from builder.plan import plan
from builder.release import status
from builder.release.staging import StagingArea
from builder.release.status import ImageState, StatusReader
from builder.steps import catalog
from builder.steps.catalog import NONE_THAT_COUNT, CatalogImage
from tests.fakes.registry import MemoryArea, MemoryRegistry
from tests.fakes.run import new_run

BOARD, JUPYTER = "qz-0.5-cu129-py311-board", "qz-0.5-cu129-py311-jupyter"
NAME = "registry.example.test:5000/team/quartz-cuda"
TODAY = date(2026, 11, 22)
EVIL = "<script>alert(1)</script> | [x](javascript:y) `z`"


def trust(project: Project, *signers: Trusted) -> Project:
    project.__dict__["matrix"] = project.matrix.model_copy(update={"evidence": signers})
    return project


class Registry(MemoryRegistry):
    """A public repository with images of a cell, which have one layer with one wheel; `full` is their full tag."""

    def __init__(self, project: Project, cell: str = BOARD) -> None:
        super().__init__()
        self.project = project
        [self.planned] = plan.make_locked_plan(project, project.select([cell])).images
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

    def entry(self, store: Store) -> CatalogImage:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(status, "Repository", lambda *_, **__: self)
            [image] = catalog.make_catalog(new_run(self.project, store=store), [self.planned.cell], nothing_staged())
        return image


def nothing_staged() -> StagingArea:
    staged = MemoryRegistry()
    return MemoryArea("registry.example.test/staging", lambda _: staged)


@pytest.fixture
def registry(tiny: Project) -> Registry:
    return Registry(tiny)


def released(project: Project, store: Store, cell: str = BOARD) -> CatalogImage:
    """The entry of a released image."""
    registry = Registry(project, cell)
    registry.add("2", registry.full, *registry.aliases)
    return registry.entry(store)


# ---- which images are pulled


def test_a_released_image_is_pulled_by_its_shortest_tag_that_names_it(registry: Registry, store: Store) -> None:
    digest = registry.add("2", registry.full, registry.aliases[0])
    image = registry.entry(store)
    assert (image.reason, image.name, image.release) == ("", NAME, "")
    assert (image.status.tags[-1], image.status.digest) == (registry.aliases[0], digest)


def test_an_image_that_is_not_the_released_one_is_not_pulled(registry: Registry, store: Store) -> None:
    assert registry.entry(store).reason == "not released yet"
    registry.add("2", registry.full)
    registry.planned = replace(registry.planned, plan="sha256:" + "0" * 64)
    registry.add("3", registry.full)
    assert registry.entry(store).reason == "its tag names another image"


def test_with_trusted_signers_only_a_signed_image_is_pulled(tiny: Project, store: Store) -> None:
    """The page had a command that pulls an image with a wrong signature."""
    image = released(trust(tiny, Trusted(key="keys/ci.pub")), store)
    assert image.reason == "no signer that matrix.yaml names has signed it"
    for form in catalog.TEMPLATES:
        assert "docker pull" not in catalog.render_catalog(tiny, [image], form, TODAY)


def test_an_image_that_was_not_built_yet(edit: Callable[[str, str], Project], store: Store) -> None:
    project = edit('"3.11": {debian: newbird}', '"3.11": {debian: newbird, not_built: "nobody can fetch it"}')
    assert Registry(project).entry(store).reason == "nobody can fetch it"


def test_nothing_is_pulled_without_a_registry(edit: Callable[[str, str], Project], store: Store) -> None:
    """Without one, Docker would pull the image of a stranger from Docker Hub."""
    project = edit("registry: registry.example.test:5000", 'registry: ""')
    with pytest.raises(UsageError):
        catalog.make_catalog(new_run(project, store=store), [], nothing_staged())


# ---- contents, tests, changes


def test_the_packages_that_the_matrix_names(tiny: Project, store: Store) -> None:
    packages = released(tiny, store).packages
    assert "quartz 0.5.3" in packages
    assert {package.split()[0] for package in packages} >= {"board", "pip"}


def evidence(**changes: Any) -> Proof:
    values = {
        "image": "sha256:" + "a" * 64, "cell": BOARD, "plan": "p", "suite": {}, "kind": "image", "passed": ("a", "b"),
        "failed": (), "no_gpu": "no NVIDIA driver on this machine", "finished": "2026-11-20T10:00:00Z",
    }  # fmt: skip
    return Proof(evidence=Evidence(**{**values, **changes}), signer="keys/ci.pub")


ERROR = "registry.internal: connection refused"


@pytest.mark.parametrize(
    ("coverage", "tested", "tests", "gpu"),
    [
        (None, ERROR, NONE_THAT_COUNT, NONE_THAT_COUNT),
        (coverage_of([], [ERROR]), ERROR, NONE_THAT_COUNT, NONE_THAT_COUNT),
        (coverage_of([evidence()], [ERROR]), "2 passed", "2 passed", "not run (no NVIDIA driver on this machine)"),
    ],
)
def test_errors_of_results_are_not_shown(
    tiny: Project, store: Store, monkeypatch: pytest.MonkeyPatch,
    coverage: Coverage | None, tested: str, tests: str, gpu: str,
) -> None:  # fmt: skip
    """They may name servers and paths."""
    read = StatusReader.states

    def states(self: StatusReader, images: Any) -> list[ImageState]:
        return [
            replace(state, coverage=coverage, status=replace(state.status, tested=tested))
            for state in read(self, images)
        ]

    monkeypatch.setattr(StatusReader, "states", states)
    image = released(tiny, store)
    assert (image.tests, image.gpu) == (tests, gpu)


def test_the_newest_release_that_names_the_image(registry: Registry, store: Store) -> None:
    full = registry.full
    assert registry.entry(store).reason == "not released yet"
    registry.add("2", f"{full}-20261119", f"{full}-20261120", full, *registry.aliases)
    registry.add("3", f"{full}-20261121", "0.5.3-cu129-py311-20261122", f"{full}-x")  # rolled back, and of other cells
    assert registry.entry(store).release == f"{full}-20261120"


# ---- formats


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


def test_a_page_is_one_file(tiny: Project, store: Store) -> None:
    page = Page(catalog.render_catalog(tiny, [released(tiny, store)], "html", TODAY))
    assert not [attributes for _, attributes in page.tags if {"src", "href"} & attributes.keys()], "nothing is loaded"
    assert f"docker pull {NAME}:" in page.text


def test_contents_say_how_far_the_framework_is_behind_its_newest_release(tiny: Project, store: Store) -> None:
    days = {"quartz": {"0.5.3": "2026-10-01", "0.6.0": "2026-10-29"}}
    (tiny.root / "locks/releases.json").write_text(json.dumps(days))
    images = [released(tiny, store)]
    assert "quartz 0.5.3 (newest 0.6.0, 28 days), CUDA" in catalog.render_catalog(tiny, images, "markdown", TODAY)
    assert "quartz 0.5.3 (newest 0.6.0, 28 days), CUDA" in catalog.render_catalog(tiny, images, "html", TODAY)


def test_text_of_other_machines_is_no_markup(tiny: Project, store: Store) -> None:
    image = replace(released(tiny, store), gpu=EVIL)
    page = Page(catalog.render_catalog(tiny, [image], "html", TODAY))
    assert not {"script", "a"} & {tag for tag, _ in page.tags}
    assert "alert(1)" in page.text
    text = catalog.render_catalog(tiny, [image], "markdown", TODAY)
    assert r"\<script\>alert(1)\</script\> \| \[x\](javascript:y) \`z\`" in text


def test_profiles_of_a_hub(tiny: Project, store: Store) -> None:
    image = replace(released(tiny, store, JUPYTER), gpu="<b>")
    images = [image, released(tiny, store), replace(image, reason="not released yet")]
    text = catalog.render_catalog(tiny, images, "kubespawner", TODAY)
    assert f"# {JUPYTER} is left out: not released yet\n" in text
    [profile] = yaml.safe_load(text)["singleuser"]["profileList"]
    assert profile == {
        "display_name": "quartz 0.5.3, CUDA 12.9, Python 3.11 (jupyter, amd64)",
        "slug": JUPYTER.replace(".", "-"),
        "description": f"tests: {NONE_THAT_COUNT}; GPU tests: {html.escape('<b>')}",
        "kubespawner_override": {
            "image": f"{NAME}@{image.status.digest}",
            "node_selector": {"kubernetes.io/arch": "amd64"},
            "extra_resource_limits": {"nvidia.com/gpu": "1"},
        },
    }


def test_a_profile_without_a_gpu_does_not_require_one(tiny: Project, store: Store) -> None:
    """A node whose default runtime is NVIDIA's would give it all of its GPUs."""
    image = released(tiny, store, JUPYTER)
    image = replace(image, planned=replace(image.planned, cell=replace(image.cell, cuda="cpu")))
    text = catalog.render_catalog(tiny, [image], "kubespawner", TODAY)
    [profile] = yaml.safe_load(text)["singleuser"]["profileList"]
    override = profile["kubespawner_override"]
    assert override["environment"] == {"GPU_REQUIRED": "0", "NVIDIA_VISIBLE_DEVICES": "void"}
    assert "extra_resource_limits" not in override
