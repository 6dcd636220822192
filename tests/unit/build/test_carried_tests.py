"""Thorough tests that another image passed: which image can carry them, and for which components."""

from __future__ import annotations

from dataclasses import replace

import pytest

from builder.build import carried_tests
from builder.build.carried_tests import STATUS, CarriedTests
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.plan import PlannedImage
from builder.registry.evidence import Evidence
from tests.fakes.engine import FakeEngine, evidence_of

SMALL, LARGE = "qz-0.5-cu129-py311", "qz-0.5-cu129-py311-board"
DPKG = "Package: libc6\nStatus: install ok installed\nVersion: 2.36-9\n\nPackage: gcc\nVersion: 12\n"
TEST = "tests/images/test_{}.py::test_it"


class Run:
    """Two images of one group in an engine; the larger one has the components of the smaller one, and one more."""

    def __init__(self, tiny: Project) -> None:
        self.engine = FakeEngine()
        self.small, self.large = sorted(
            plan.make_locked(tiny, tiny.select([SMALL, LARGE])).images, key=lambda image: len(image.components)
        )
        self.carried = CarriedTests(self.engine, "checkout")
        self.ids = {image.id: self.put(image) for image in (self.small, self.large)}

    def put(self, image: PlannedImage, *, dpkg: str = DPKG, instead_of: str = "") -> str:
        """The image in the engine: diff ids are inputs of layers, but `instead_of` another one."""
        image_id = self.engine.add_image(image.id)
        layers = tuple(replace(each, inputs="other") if each.name == instead_of else each for each in image.layers)
        changed = replace(image, layers=layers)
        self.engine.add_contents(image_id, self.engine.known[image.id], changed, dpkg=dpkg)
        return image_id

    def proof(self, image: PlannedImage, **changes: object) -> Evidence:
        passed = tuple(TEST.format(name) for name in image.components)
        return evidence_of(image, self.ids[image.id]).model_copy(update={"passed": passed, **changes})

    def carriers(self) -> dict[str, str]:
        carriers = self.carried.carriers(self.large, self.ids[self.large.id])
        return {component: other.image.id for component, other in carriers.items()}


@pytest.fixture
def run(tiny: Project) -> Run:
    return Run(tiny)


def test_an_image_carries_the_tests_of_its_components(run: Run) -> None:
    assert set(run.small.components) < set(run.large.components)
    assert run.carriers() == {}
    run.carried.add(run.small, run.proof(run.small))
    assert run.carriers() == dict.fromkeys(run.small.components, SMALL)
    assert run.carried.carriers(run.small, run.ids[SMALL]) == {}, "no image carries its own tests"


def test_a_larger_image_carries_nothing_for_a_smaller_one(run: Run) -> None:
    run.carried.add(run.large, run.proof(run.large))
    assert run.carried.carriers(run.small, run.ids[SMALL]) == {}


def test_tests_that_were_carried_are_not_carried_again(run: Run) -> None:
    component = run.small.components[0]
    carried = {"sha256:" + "c" * 64: (TEST.format(component),)}
    run.carried.add(run.small, run.proof(run.small, carried=carried))
    assert run.carriers() == dict.fromkeys(run.small.components[1:], SMALL)


def test_other_layers_carry_nothing(run: Run) -> None:
    wheels = next(layer.name for layer in run.small.layers if layer.kind == "wheels")
    run.put(run.small, instead_of=wheels)
    run.carried.add(run.small, run.proof(run.small))
    assert run.carriers() == {}


@pytest.mark.parametrize("kind", ["os", "files"])
def test_layers_of_the_operating_system_and_of_files_may_differ(run: Run, kind: str) -> None:
    """A variant has more Debian packages and more files."""
    for layer in run.small.layers:
        if layer.kind == kind and not layer.compiled:
            run.put(run.small, instead_of=layer.name)
    run.carried.add(run.small, run.proof(run.small))
    assert run.carriers()


@pytest.mark.parametrize(
    ("dpkg", "carries"),
    [
        (DPKG + "\nPackage: git\nVersion: 1\n", True),
        (DPKG.replace("2.36-9", "2.36-10"), False),
        (DPKG.partition("\n\n")[0] + "\n", False),
    ],
    ids=["one more", "another version", "one is missing"],
)
def test_the_image_has_all_debian_packages_of_its_carrier(run: Run, dpkg: str, carries: bool) -> None:
    run.put(run.large, dpkg=dpkg)
    run.carried.add(run.small, run.proof(run.small))
    assert bool(run.carriers()) is carries


def test_the_image_has_all_variables_of_its_carrier(run: Run) -> None:
    settings = replace(run.small.settings, env={**run.small.settings.env, "MODE": "fast"})
    run.carried.add(replace(run.small, settings=settings), run.proof(run.small))
    assert run.carriers() == {}


def test_an_image_that_was_not_assembled_carries_nothing(run: Run) -> None:
    """BuildKit's layers are not those of the plan."""
    image_id = run.ids[SMALL]
    run.engine.known[image_id] = replace(run.engine.known[image_id], layers=("a", "b"))
    run.carried.add(run.small, run.proof(run.small))
    assert run.carriers() == {}


def test_an_image_that_cannot_be_read_carries_nothing(run: Run) -> None:
    del run.engine.files[run.ids[SMALL], STATUS]
    run.carried.add(run.small, run.proof(run.small))
    assert run.carriers() == {}


def test_carried_tests_are_grouped_by_their_image_and_must_have_passed(run: Run) -> None:
    run.carried.add(run.small, run.proof(run.small))
    carriers = run.carried.carriers(run.large, run.ids[LARGE])
    tests = [TEST.format(run.small.components[0]), TEST.format(run.small.components[1]) + "_not"]
    grouped = carried_tests.by_carrier([*tests, TEST.format("board")], carriers)
    assert grouped == {run.ids[SMALL]: tuple(tests)}
    assert carried_tests.not_passed(grouped, carriers.values()) == tests[1:]
