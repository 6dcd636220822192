"""The facts about an image that its users ask for, and what is said if they are unknown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import date
from typing import Any

import pytest

from builder.common.reference import ImageRef
from builder.common.text import size
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
    released="yes, untested-gpu allowed", signature="yes", signer="keys/ci.pub", digest=DIGEST, is_expected=True,
    tags=("0.5.3-cu129-py311-board", "0.5.3-board", "0.5-board"),
)  # fmt: skip
NOT_LOOKED_UP = "unknown: this machine has no results that count, and no registry was looked up"
NOT_KNOWN = ", on aaaaaaaaaaaa, which is not known to be released"
STAMPED = "0.5.3-cu129-py311-board-20261120"


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
    stamped: str = STAMPED,
) -> CatalogImage:
    planned = planned_of(project, cell)
    status = Status(cell=cell, tested=tested, released=tagged.released, signature=tagged.signature)
    return catalog.catalog_image(
        project,
        ImageState(planned=planned, status=status, tagged=tagged, coverage=coverage, tested=DIGEST),
        planned_of(project, default) if default else None,
        KnownLayers(project.root),
        references or publish.references(planned),
        stamped,
        Changes(text="unknown"),
        TODAY,
    )


def trust(project: Project, *signers: Trusted) -> Project:
    project.__dict__["matrix"] = project.matrix.model_copy(update={"evidence": signers})
    return project


# ---- release and signature


def test_a_released_image_is_pulled_by_its_shortest_tag_or_by_digest(tiny: Project) -> None:
    image = entry(trust(tiny, Trusted(key="keys/other.pub"), Trusted(key="keys/ci.pub")))
    assert (image.pull, image.no_pull) == ((f"docker pull {NAME}:0.5-board", f"docker pull {NAME}@{DIGEST}"), "")
    assert image.tags[0] == "0.5.3-cu129-py311-board"
    assert image.released == f"released as {STAMPED}, untested-gpu allowed"
    assert image.signature == "signed by keys/ci.pub"
    assert image.verify == (
        f"builder verify {NAME}:0.5-board --arch amd64 --key keys/ci.pub",
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


def test_readers_are_told_where_the_key_is(tiny: Project) -> None:
    """The command names a path of the checkout, which they do not have."""
    project = trust(tiny, Trusted(key="keys/ci.pub"))
    project.__dict__["matrix"] = project.matrix.model_copy(update={"source": "https://git.example.test/org/images"})
    assert entry(project).signature == "signed by keys/ci.pub, a public key in https://git.example.test/org/images"


def test_a_tag_that_names_another_image_is_not_pulled(tiny: Project) -> None:
    """The reader found that the short tag is missing, and the page printed the command that pulls it."""
    tagged = replace(RELEASED, released="yes, 0.5-board missing", tags=("0.5.3-cu129-py311-board",))
    image = entry(trust(tiny, Trusted(key="keys/ci.pub")), tagged=tagged)
    assert image.pull[0] == f"docker pull {NAME}:0.5.3-cu129-py311-board"
    assert f"{NAME}:0.5.3-cu129-py311-board " in image.verify[0]


@pytest.mark.parametrize(
    ("signature", "text"),
    [
        ("no", "not signed"),
        ("untrusted", "signed, but by no signer that matrix.yaml lists: do not trust it"),
        ("not checked: cosign verify: /home/me/key of host.internal", "could not be checked"),
        ("invalid list", "could not be checked"),
    ],
)
def test_with_trusted_signers_only_a_signed_image_is_pulled(tiny: Project, signature: str, text: str) -> None:
    """The page had a command that pulls an image with a wrong signature."""
    tagged = replace(RELEASED, signature=signature, signer="")
    image = entry(trust(tiny, Trusted(key="keys/ci.pub")), tagged=tagged)
    assert (image.signature, image.no_pull) == (text, f"signature: {text}")
    assert (image.pull, image.verify) == ((), ())


def test_without_trusted_signers_no_signature_is_needed(tiny: Project) -> None:
    image = entry(tiny, tagged=replace(RELEASED, signature="listed", signer=""))
    assert image.signature == "has a signature that was not checked: matrix.yaml lists no trusted signers"
    assert (len(image.pull), image.verify) == (2, ())


@pytest.mark.parametrize(
    ("tagged", "released", "signature"),
    [
        (TaggedImage(), "unknown: the registry was not looked up", "not looked up"),
        (TaggedImage(released="no"), "not released yet", "nothing is published that could be signed"),
        (
            replace(RELEASED, released="another image, 0.5-board missing", is_expected=False, digest=OTHER),
            "not released: the tag 0.5.3-cu129-py311-board names another image (bbbbbbbbbbbb) than the one that is "
            "described here",
            "the image that is described here is not published",
        ),
        (
            TaggedImage(released="invalid index"),
            "not released: the tag 0.5.3-cu129-py311-board names an invalid index",
            "the image that is described here is not published",
        ),
    ],
)
def test_an_image_that_was_not_found_is_not_pulled(
    tiny: Project, tagged: TaggedImage, released: str, signature: str
) -> None:
    image = entry(tiny, tagged=tagged)
    assert (image.released, image.signature) == (released, signature)
    assert (image.pull, image.no_pull, image.digest) == ((), released, "")


def test_nothing_is_pulled_without_a_registry(tiny: Project) -> None:
    """Without one, Docker would pull the image of a stranger from Docker Hub."""
    image = entry(tiny, tagged=TaggedImage(), references=(ImageRef(repository="team/quartz-cuda", tag="0.5"),))
    assert (image.pull, image.verify) == ((), ())
    assert image.no_pull == image.released == "not published: matrix.yaml names no registry"


def test_an_image_that_was_not_built_yet(edit: Callable[[str, str], Project]) -> None:
    """Without a look-up, the page had a command that pulls it."""
    project = edit('"3.11": {debian: newbird}', '"3.11": {debian: newbird, not_built: "nobody can fetch it"}')
    for tagged in (TaggedImage(released="no"), TaggedImage()):
        image = entry(project, tagged=tagged)
        assert (image.pull, image.no_pull) == ((), "not built yet: nobody can fetch it")
    assert entry(project, stamped="").released == ("released, under no known tag with a stamp, untested-gpu allowed")


# ---- contents, size, support


def test_the_size_and_what_the_default_image_has_of_it(tiny: Project) -> None:
    planned, default = planned_of(tiny, BOARD), planned_of(tiny, PLAIN)
    image = entry(tiny)
    assert (image.bytes, image.is_estimate) == (planned.bytes, True)
    # CUDA, the framework and the operating system are lowest; the layers above differ.
    assert [layer.inputs for layer in planned.layers[:-3]] == [layer.inputs for layer in default.layers[:-1]]
    assert image.size == (
        f"about {size(planned.bytes)} to pull, since some layers were not built yet; {size(default.bytes)} of it in "
        f"common with {PLAIN}"
    )
    assert entry(tiny, PLAIN).size.endswith("; it is the default image for CUDA 12.9 on amd64")
    assert entry(tiny, default="").size.endswith("since some layers were not built yet"), "nothing to compare with"


def test_the_default_image_without_cuda() -> None:
    cell = "jax-0.10-cpu-py311"
    assert entry(Project(ROOT), cell, default=cell).size.endswith("; it is the default image without CUDA on amd64")


def test_layers_above_the_first_difference_are_not_shared(tiny: Project) -> None:
    """Docker pulls them again: it identifies a layer by all layers below it."""
    default = "em-1.10-cu1210-py311"
    assert planned_of(tiny, BOARD).os_inputs == planned_of(tiny, default).os_inputs
    assert entry(tiny, default=default).size.endswith(f"; 0 B of it in common with {default}")


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


def test_gpu_tests_that_were_not_run(tiny: Project) -> None:
    tests = entry(tiny, coverage=coverage_of([evidence()]), tested="2 passed").tests
    assert tests.gpu == "not run (no NVIDIA driver on this machine)"
    no = entry(tiny, tagged=TaggedImage(released="no")).tests
    assert no.state == "no results: the image is neither built here, nor staged, nor released as described here"


def test_tests_that_were_not_looked_up_or_not_read_are_unknown(tiny: Project) -> None:
    """They were shown as "not run"; the errors may name servers and paths."""
    error = "registry.internal: connection refused"
    for tagged, coverage, tested, state in (
        (TaggedImage(), None, "-", NOT_LOOKED_UP),
        (TaggedImage(), coverage_of([]), "not tested", NOT_LOOKED_UP),
        (TaggedImage(), coverage_of([evidence()]), "2 passed", f"2 passed{NOT_KNOWN}"),
        (RELEASED, None, error, "unknown: the results could not be read"),
        (RELEASED, coverage_of([], [error]), error, "no results of image tests that count"),
        (RELEASED, coverage_of([evidence()], [error]), "2 passed", "2 passed"),
    ):
        tests = entry(tiny, tagged=tagged, coverage=coverage, tested=tested).tests
        assert (tests.state, tests.gpu) == (state, "unknown")


def test_results_of_an_image_that_is_not_released_are_not_those_of_the_released_one(tiny: Project) -> None:
    other = replace(RELEASED, released="another image", is_expected=False, digest=OTHER)
    tests = entry(tiny, tagged=other, coverage=coverage_of([evidence()]), tested="2 passed").tests
    assert tests.state == f"2 passed{NOT_KNOWN}"
