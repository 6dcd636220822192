"""Results of thorough tests that hold for a larger image, too: which images, and which tests."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builder.build.reused_tests import ReusedTests
from builder.common.errors import DiskError
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.plan import PlannedImage
from builder.registry.evidence import Evidence
from tests.fakes.engine import DPKG, FakeEngine, evidence_of

SMALL, LARGE = "qz-0.5-cu129-py311", "qz-0.5-cu129-py311-board"
PASSED = {"test_other": SMALL}


class Run:
    """Two images of one group in an engine; the larger one has the components of the smaller one, and one more."""

    def __init__(self, tiny: Project) -> None:
        self.project = tiny
        self.engine = FakeEngine()
        self.small, self.large = sorted(
            plan.make_locked(tiny, tiny.select([SMALL, LARGE])).images, key=lambda image: len(image.components)
        )
        self.tests = ReusedTests(self.engine, tiny)
        self.ids = {image.id: self.put(image) for image in (self.small, self.large)}

    def put(self, image: PlannedImage, *, dpkg: str = DPKG, other_layer: str = "") -> str:
        """The image in the engine; the layer with that name is another one."""
        image_id = self.engine.add_image(image.id)
        layers = tuple(replace(each, inputs="other") if each.name == other_layer else each for each in image.layers)
        self.engine.add_contents(image_id, self.engine.known[image.id], replace(image, layers=layers), dpkg=dpkg)
        return image_id

    def proof(self, image: PlannedImage) -> Evidence:
        return evidence_of(image, self.ids[image.id])

    def reusable(self) -> dict[str, str]:
        """Tests that the larger image may reuse -> the cell of the image that passed them."""
        cells = {image_id: cell for cell, image_id in self.ids.items()}
        return {test: cells[other] for test, other in self.tests.reusable(self.large, self.ids[LARGE]).items()}


@pytest.fixture
def run(tiny: Project) -> Run:
    return Run(tiny)


def test_a_larger_image_reuses_what_a_smaller_one_passed(run: Run) -> None:
    assert set(run.small.components) < set(run.large.components)
    assert run.reusable() == {}
    run.tests.add(run.small, run.proof(run.small))
    assert run.reusable() == PASSED
    assert run.tests.reusable(run.small, run.ids[SMALL]) == {}, "an image does not reuse its own results"


def test_a_smaller_image_reuses_nothing(run: Run) -> None:
    run.tests.add(run.large, run.proof(run.large))
    assert run.tests.reusable(run.small, run.ids[SMALL]) == {}


def test_what_an_image_reused_itself_is_not_reused_again(run: Run) -> None:
    proof = run.proof(run.small).model_copy(update={"reused": {"sha256:" + "c" * 64: ("test_thorough",)}})
    run.tests.add(run.small, proof)
    assert run.reusable() == PASSED


def test_results_of_other_layers_are_not_reused(run: Run) -> None:
    run.put(run.small, other_layer=next(layer.name for layer in run.small.layers if layer.kind == "wheels"))
    run.tests.add(run.small, run.proof(run.small))
    assert run.reusable() == {}


@pytest.mark.parametrize("kind", ["os", "files"])
def test_layers_of_the_operating_system_and_of_files_may_differ(run: Run, kind: str) -> None:
    """A variant has more Debian packages and more files; these are compared one by one."""
    [layer] = [layer for layer in run.small.layers if layer.kind == kind and not layer.compiled]
    run.put(run.small, other_layer=layer.name)
    run.tests.add(run.small, run.proof(run.small))
    assert run.reusable() == PASSED


@pytest.mark.parametrize(
    ("dpkg", "expected"),
    [
        (DPKG + "\nPackage: git\nStatus: install ok installed\nVersion: 1\n", PASSED),
        (DPKG.replace("2.36-9", "2.36-10"), {}),
        (DPKG.replace("install ok installed", "deinstall ok config-files", 1), {}),
        (f"{DPKG}\nPackage: git\nStatus: install ok installed\nVersion: 1\nSource: (invalid)\n", {}),
    ],
    ids=["one more", "another version", "one is removed", "one is invalid"],
)
def test_all_debian_packages_of_the_smaller_image_are_needed(run: Run, dpkg: str, expected: dict[str, str]) -> None:
    run.put(run.large, dpkg=dpkg)
    run.tests.add(run.small, run.proof(run.small))
    assert run.reusable() == expected


def test_without_debian_packages_nothing_is_known(run: Run) -> None:
    run.put(run.small, dpkg="")
    run.tests.add(run.small, run.proof(run.small))
    assert run.reusable() == {}


def test_a_file_that_another_component_replaces(run: Run) -> None:
    """Tests of the smaller image used the file that it replaces."""
    component = next(iter(run.small.file_components))
    folder = run.project.root / "templates"
    name = next(path for path in sorted((folder / component / "files").rglob("*")) if path.is_file())
    other = folder / "board/files" / name.relative_to(folder / component / "files")
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_text("another")
    larger = replace(run.large, file_components=tuple(dict.fromkeys([*run.large.file_components, "board"])))
    run.tests.add(run.small, run.proof(run.small))
    assert run.tests.reusable(larger, run.ids[LARGE]) == {}


@pytest.mark.parametrize("is_larger", [False, True])
def test_variables_are_the_same(run: Run, is_larger: bool) -> None:
    """A program may read one that only the larger image has."""
    small, large = (
        replace(image, settings=replace(image.settings, env={**image.settings.env, "MODE": "fast"}))
        if (image is run.large) is is_larger
        else image
        for image in (run.small, run.large)
    )
    run.tests.add(small, run.proof(small))
    assert run.tests.reusable(large, run.ids[LARGE]) == {}


@pytest.mark.parametrize("error", [DiskError("the disk is full"), FileNotFoundError(2, "no such file")], ids=str)
def test_an_image_that_cannot_be_read(run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """The larger image is then tested as a whole; the run goes on."""

    def fail(*_: object, **__: object) -> bytes:
        raise error

    monkeypatch.setattr(run.engine, "read_file", fail)
    run.tests.add(run.small, run.proof(run.small))
    assert run.reusable() == {}


def test_an_image_with_other_layers_than_planned(run: Run) -> None:
    image_id = run.ids[SMALL]
    run.engine.known[image_id] = replace(run.engine.known[image_id], layers=("a", "b"))
    run.tests.add(run.small, run.proof(run.small))
    assert run.reusable() == {}
