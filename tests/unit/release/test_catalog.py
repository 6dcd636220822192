"""The facts about an image that its users ask for, and what is said if they are unknown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from builder.common.reference import ImageRef
from builder.evidence.results import Coverage, Evidence, Report, coverage_of
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import Layer
from builder.matrix.project import Project
from builder.matrix.schema import Trusted
from builder.plan import plan
from builder.plan.plan import PlannedImage
from builder.release import catalog, publish
from builder.release.catalog import CatalogImage, Changes
from builder.release.status import ImageState, Status, TaggedImage
from tests.paths import ROOT

PLAIN, BOARD, JUPYTER = "qz-0.5-cu129-py311", "qz-0.5-cu129-py311-board", "qz-0.5-cu129-py311-jupyter"
DIGEST, OTHER = ("sha256:" + letter * 64 for letter in "ab")
TODAY = date(2026, 11, 22)
NAME = "registry.example.test:5000/team/quartz-cuda"
RELEASED = TaggedImage(
    released="yes, untested-gpu allowed", signature="yes", signer="keys/ci.pub", digest=DIGEST, is_expected=True
)


def planned_of(project: Project, cell: str) -> PlannedImage:
    [image] = plan.make_locked_plan(project, project.select([cell])).images
    return image


def entry(
    project: Project,
    cell: str = BOARD,
    tagged: TaggedImage = RELEASED,
    coverage: Coverage | None = None,
    *,
    tested: str = "-",
    default: str = PLAIN,
    references: tuple[ImageRef, ...] = (),
    stamp: str = "20261120",
) -> CatalogImage:
    planned = planned_of(project, cell)
    status = Status(cell=cell, tested=tested, released=tagged.released, signature=tagged.signature)
    return catalog.catalog_image(
        project,
        ImageState(planned=planned, status=status, tagged=tagged, coverage=coverage, tested=DIGEST),
        planned_of(project, default) if default else None,
        KnownLayers(project.root),
        references or publish.references(planned),
        stamp,
        Changes(text="unknown"),
        TODAY,
    )


def trust(project: Project, *signers: Trusted) -> Project:
    project.__dict__["matrix"] = project.matrix.model_copy(update={"evidence": signers})
    return project


# ---- release and signature


def test_a_released_image_is_pulled_by_its_shortest_tag_or_by_digest(tiny: Project) -> None:
    image = entry(trust(tiny, Trusted(key="keys/other.pub"), Trusted(key="keys/ci.pub")))
    assert (image.pull, image.pull_digest) == (f"docker pull {NAME}:0.5-board", f"docker pull {NAME}@{DIGEST}")
    assert image.tags[0] == "0.5.3-cu129-py311-board"
    assert image.released == "released on 2026-11-20 as 0.5.3-cu129-py311-board-20261120, untested-gpu allowed"
    assert image.signature == "signed by keys/ci.pub"
    assert image.verify == (
        f"builder verify {NAME}:0.5-board --key keys/ci.pub",
        f"cosign verify --key keys/ci.pub --insecure-ignore-tlog=true -a cell={BOARD} -a image=quartz-cuda "
        f"-a tag=0.5.3-cu129-py311-board {NAME}@{DIGEST}",
    )


def test_the_commands_for_an_identity(tiny: Project) -> None:
    signer = Trusted(
        identity="https://git.example.test/org/ci.yml@refs/heads/main", issuer="https://issuer.example.test"
    )
    commands = entry(trust(tiny, signer), tagged=replace(RELEASED, signer=signer.name)).verify
    assert (
        "--identity https://git.example.test/org/ci.yml@refs/heads/main --issuer https://issuer.example.test"
        in commands[0]
    )
    assert "--certificate-identity=https://git.example.test/org/ci.yml@refs/heads/main" in commands[1]


@pytest.mark.parametrize(
    ("tagged", "released", "signature", "has_pull"),
    [
        (TaggedImage(), "unknown: the registry was not looked up", "not looked up", True),
        (TaggedImage(released="no"), "not released yet", "nothing is published that could be signed", False),
        (
            replace(RELEASED, released="another image", is_expected=False, digest=OTHER),
            "the tag names another image (bbbbbbbbbbbb), not the image that is described here",
            "the image that is described here is not published",
            True,
        ),
        (
            replace(RELEASED, signature="listed", signer=""),
            "released on 2026-11-20 as 0.5.3-cu129-py311-board-20261120, untested-gpu allowed",
            "has a signature that was not checked: matrix.yaml lists no trusted signers",
            True,
        ),
        (
            replace(RELEASED, signature="untrusted", signer=""),
            "released on 2026-11-20 as 0.5.3-cu129-py311-board-20261120, untested-gpu allowed",
            "signed, but by no signer that matrix.yaml lists: do not trust it",
            True,
        ),
    ],
)
def test_what_is_unknown_or_untrue_is_said(
    tiny: Project, tagged: TaggedImage, released: str, signature: str, has_pull: bool
) -> None:
    image = entry(tiny, tagged=tagged)
    assert (image.released, image.signature, bool(image.pull)) == (released, signature, has_pull)
    assert bool(image.digest) == bool(image.pull_digest) == tagged.is_expected


def test_nothing_is_pulled_without_a_registry(tiny: Project) -> None:
    """Without one, Docker would pull the image of a stranger from Docker Hub."""
    image = entry(tiny, tagged=TaggedImage(), references=(ImageRef(repository="team/quartz-cuda", tag="0.5"),))
    assert (image.pull, image.verify) == ("", ())
    assert image.released == "not published: matrix.yaml names no registry"


def test_an_image_that_was_not_built_yet(edit: Callable[[str, str], Project]) -> None:
    project = edit('"3.11": {debian: newbird}', '"3.11": {debian: newbird, not_built: "nobody can fetch it"}')
    assert entry(project, tagged=TaggedImage(released="no")).released == "not built yet: nobody can fetch it"
    assert entry(project, stamp="").released == "released, on an unknown day, untested-gpu allowed"


@pytest.mark.parametrize(
    ("releases", "digest", "expected"),
    [
        ([], "a", ("", ("", ""))),
        ([("1", "a")], "a", ("1", ("", ""))),
        ([("1", "b"), ("2", "a"), ("3", "a")], "a", ("2", ("1", "b"))),
        ([("1", "b"), ("2", "c"), ("3", "a")], "c", ("2", ("1", "b"))),  # rolled back
        ([("1", "b"), ("2", "c")], "a", ("", ("", ""))),
    ],
)
def test_the_release_of_an_image_and_the_one_before(
    releases: list[tuple[str, str]], digest: str, expected: tuple[str, tuple[str, str]]
) -> None:
    assert catalog.release_of(releases, digest) == expected


# ---- contents, size, support


def test_the_size_and_what_the_default_image_has_of_it(tiny: Project) -> None:
    planned, default = planned_of(tiny, BOARD), planned_of(tiny, PLAIN)
    image = entry(tiny)
    assert (image.bytes, image.is_estimate) == (planned.bytes, True)
    # CUDA, the framework and the operating system are lowest; the layers above differ.
    assert [layer.inputs for layer in planned.layers[:-3]] == [layer.inputs for layer in default.layers[:-1]]
    assert image.shared_bytes == default.bytes < planned.bytes
    assert image.shared_with == PLAIN
    assert entry(tiny, PLAIN).shared_with == ""


def test_layers_above_the_first_difference_are_not_shared(tiny: Project) -> None:
    """Docker pulls them again: it identifies a layer by all layers below it."""
    default = "em-1.10-cu1210-py311"
    assert planned_of(tiny, BOARD).os_inputs == planned_of(tiny, default).os_inputs
    assert entry(tiny, default=default).shared_bytes == 0


def test_the_size_of_layers_that_a_build_has_recorded(tiny: Project) -> None:
    known = KnownLayers(tiny.root)
    for number, layer in enumerate(planned_of(tiny, BOARD).layers):
        digest = f"sha256:{number:064x}"
        if layer.kind == "os":
            known.add(layer, Layer(digest=digest, diff_id=digest, size=5, created="2026-11-20T00:00:00Z"))
        elif layer.kind != "files":
            known.add(layer, Layer(digest=digest, diff_id=digest, size=1000))
    known.write()
    image = entry(tiny)
    assert not image.is_estimate
    assert image.bytes == 5 + 1000 * (len(planned_of(tiny, BOARD).layers) - 2)


def test_the_default_cell_of_a_cuda_version(tiny: Project) -> None:
    defaults = {cuda: cell.id for (cuda, _), cell in catalog.default_cells(tiny).items()}
    assert next(cell.id for cell in tiny.cells if cell.cuda == "12.9") != PLAIN
    assert defaults == {"12.9": PLAIN, "12.10": "em-1.10-cu1210-py311"}


def test_the_main_packages(tiny: Project) -> None:
    image = entry(tiny)
    assert next(iter(image.packages)) == "quartz", "the framework first"
    assert {"board", "pip"} <= image.packages.keys()
    assert image.packages["quartz"] == "0.5.3"


def test_the_end_of_support(bookworm: Project) -> None:
    assert entry(bookworm).support == "support of Debian bookworm ends on 2028-06-30"
    assert entry(bookworm).is_supported


def test_no_known_end_of_support_is_said(tiny: Project) -> None:
    assert entry(tiny).support == "no end of support is known"


def test_gpus_with_their_drivers() -> None:
    cell = "pt-2.9-cu128-py311"
    image = entry(Project(ROOT), cell, default="")
    assert image.driver == "525.60.13"
    verdicts = {name: each for each in image.gpus for names in each.gpus.values() for name in names}
    assert verdicts["GeForce RTX 4090"].reasons == ("needs driver 525.60.13 or newer",)
    assert verdicts["GeForce RTX 5090"].reasons == ("needs driver 570.26 or newer",)
    assert (verdicts["Tesla K80"].runs, verdicts["Tesla V100"].runs) == (False, True)
    assert "sm_70" in verdicts["Tesla K80"].reasons[0]
    assert "GB200" not in verdicts, "it exists only with an ARM CPU"


# ---- tests


def evidence(**changes: Any) -> Report:
    values = {
        "image": DIGEST, "cell": BOARD, "plan": "p", "suite": {}, "kind": "image", "passed": ("a", "b"), "failed": (),
        "no_gpu": "no NVIDIA driver on this machine", "finished": "2026-11-20T10:00:00Z",
    }  # fmt: skip
    return Report(evidence=Evidence(**{**values, **changes}), signer="keys/ci.pub")


def test_the_newest_results_with_their_days_and_gpus(tiny: Project) -> None:
    gpu = {"kind": "gpu", "passed": ("c",), "machine": {"gpu": "NVIDIA H100", "driver": "580.1"}}
    coverage = coverage_of(
        [
            evidence(finished="2026-11-19T10:00:00Z", failed=("b",), passed=("a",)),
            evidence(),
            evidence(**gpu, finished="2026-11-21T10:00:00Z"),
        ],
        ["report x does not count: it is unsigned"],
    )
    tests = entry(tiny, coverage=coverage, tested="3 passed").tests
    assert (tests.state, tests.gpu) == ("3 passed", "passed")
    assert [(run.gpu, run.driver, run.passed, run.failed, run.day) for run in tests.runs] == [
        ("", "", 2, 0, "2026-11-20"),
        ("NVIDIA H100", "580.1", 1, 0, "2026-11-21"),
    ]
    assert tests.refused == ("report x does not count: it is unsigned",)


def test_gpu_tests_that_were_not_run(tiny: Project) -> None:
    tests = entry(tiny, coverage=coverage_of([evidence()]), tested="2 passed").tests
    assert tests.gpu == "not run (no NVIDIA driver on this machine)"
    assert entry(tiny).tests.gpu == "not run"
    assert entry(tiny).tests.state.startswith("no results: ")


def test_results_of_an_image_that_is_not_released_are_not_those_of_the_released_one(tiny: Project) -> None:
    other = replace(RELEASED, released="another image", is_expected=False, digest=OTHER)
    tests = entry(tiny, tagged=other, coverage=coverage_of([evidence()]), tested="2 passed").tests
    assert tests.state == "2 passed, on aaaaaaaaaaaa, which is not known to be released"
