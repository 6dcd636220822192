"""Which test results count for an image, on this machine and in a registry, and what they prove together."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from builder.common.errors import ImageTestError
from builder.evidence import reports, results, signing
from builder.evidence.results import OWN, Coverage, Evidence, Proof, Requirement, coverage_of, read_evidence
from builder.evidence.signing import Signer, Trust
from builder.evidence.suite import GPU_TESTS, Suite
from builder.layers.oci import MANIFEST_TYPE, Descriptor
from builder.matrix.project import Project
from builder.plan import plan
from builder.registry import artifacts
from builder.registry.client import Repository
from tests.fakes.registry import MemoryRegistry
from tests.fakes.suites import passing_evidence, write_tests

CELL = "qz-0.5-cu129-py311"
MANIFEST, OTHER = ("sha256:" + letter * 64 for letter in "bc")
IMAGE = Descriptor(media_type=MANIFEST_TYPE, digest=MANIFEST, size=1)


class EvidenceDesk:
    """A checkout, and a registry with the image. `signatures` are who signed each report; `ours` is trusted."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.signatures: dict[str, str] = {}
        self.registry = MemoryRegistry()
        [self.planned] = plan.make_locked_plan(project, project.select([CELL])).images
        self.passed = write_tests(project.root, self.planned.components)
        self.passed_on_gpu = write_tests(project.root, ["quartz"], GPU_TESTS)

    def proof(self, **changes: Any) -> Evidence:
        values: dict[str, Any] = {"passed": self.passed, "finished": "2026-11-22T10:00:00Z"}
        if changes.get("kind") == "gpu":
            values |= {"passed": self.passed_on_gpu, "machine": {"gpu": "H100"}}
        return passing_evidence(self.project.root, self.planned, MANIFEST, **{**values, **changes})

    def write(self, proof: Evidence) -> None:
        results.write_evidence(self.project.state, proof)

    def attach(self, proof: Evidence, *, signer: str = "ours") -> None:
        self.attach_files(proof.model_dump_json().encode(), signer)

    def attach_files(self, content: bytes, signer: str) -> None:
        with artifacts.attaching(self.registry, IMAGE) as attachments:
            report = attachments.add(reports.TYPE, {reports.TYPE: content})
        if signer:
            self.signatures[report.digest] = signer

    def signer(self) -> Signer:
        """A trusted one."""
        signatures = self.signatures

        class OurSigner(Signer):
            def sign_manifest(self, repository: Repository, subject: Descriptor, *_: Any, **__: Any) -> None:
                assert repository.manifest(subject.digest), "cosign signs what is in the repository"
                signatures[subject.digest] = "ours"

        return OurSigner(key="key")

    @property
    def requirement(self) -> Requirement:
        return Requirement.of(self.planned, MANIFEST, Suite.of(self.project.root))

    def read(self, *, allow_unsigned: bool = False) -> Coverage:
        """What the reports in the registry prove."""
        return reports.registry_coverage(
            self.registry, self.requirement, Trust.of(self.project),
            self.project.state, allow_unsigned=allow_unsigned,
        )  # fmt: skip


@pytest.fixture
def desk(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> EvidenceDesk:
    desk = EvidenceDesk(tiny)

    def signer_of_manifest(
        registry: object, digest: str, annotations: Mapping[str, str], trust: object
    ) -> tuple[str, list[Mapping[str, str]]]:
        return ("ours", [{}]) if desk.signatures.get(digest) == "ours" else ("", [])

    monkeypatch.setattr(signing, "signer_of_manifest", signer_of_manifest)
    monkeypatch.setattr(signing, "has_signature", lambda _, digest: digest in desk.signatures)
    return desk


# ---- on this machine


def test_evidence_is_kept_by_image_and_kind_of_tests(desk: EvidenceDesk) -> None:
    state, first, on_gpu = desk.project.state, desk.proof(failed=("x",)), desk.proof(kind="gpu")
    desk.write(first)
    desk.write(on_gpu)
    assert read_evidence(state, MANIFEST) == [first, on_gpu]
    assert results.evidence_path(state, first).name == f"sha256-{'b' * 64}.image.json"
    again = desk.proof()
    desk.write(again)
    assert read_evidence(state, MANIFEST) == [again, on_gpu], "each run replaces that of the same tests"
    assert read_evidence(state, OTHER) == []


def test_a_failure_on_one_kind_of_gpu_is_not_forgotten_after_a_pass_on_another(desk: EvidenceDesk) -> None:
    """The second run replaced the results of the first one, and the image could be pushed."""
    desk.write(desk.proof())
    desk.write(desk.proof(kind="gpu", failed=("x",)))
    desk.write(desk.proof(kind="gpu", machine={"gpu": "A100"}, finished="2026-11-22T11:00:00Z"))
    coverage = results.local_coverage(desk.project.state, desk.requirement)
    assert coverage.failure == "tests failed on H100"


@pytest.mark.parametrize(
    "blob",
    [None, b"", b"{", b"[]", b"\xff\xfe", b'{"image": "x"}', "another time"],
    ids=["absent", "empty", "cut short", "a list", "not UTF-8", "incomplete", "another time"],
)
def test_a_file_that_cannot_be_read_is_no_evidence(desk: EvidenceDesk, blob: bytes | str | None) -> None:
    desk.write(desk.proof(kind="gpu"))
    path = results.evidence_path(desk.project.state, desk.proof())
    if blob == "another time":
        blob = desk.proof().model_dump_json().replace("2026-11-22T10:00:00Z", "x").encode()
    if isinstance(blob, bytes):
        path.write_bytes(blob)
    assert [each.kind for each in read_evidence(desk.project.state, MANIFEST)] == ["gpu"]


@pytest.mark.parametrize(
    ("changes", "failure"),
    [({}, ""), ({"failed": ("x",)}, "tests failed"), ({"passed": ()}, "tests failed")],
    ids=["passed", "failed", "nothing ran"],
)
def test_own_results_count_if_they_pass(desk: EvidenceDesk, changes: dict[str, Any], failure: str) -> None:
    assert results.local_coverage(desk.project.state, desk.requirement).failure == "not tested"
    desk.write(desk.proof(**changes))
    assert results.local_coverage(desk.project.state, desk.requirement).failure == failure


# ---- in a registry


def test_a_signed_report_of_this_image_counts(desk: EvidenceDesk) -> None:
    desk.attach(desk.proof())
    coverage = desk.read()
    coverage.require_pass(CELL)
    assert [report.signer for report in coverage.reports] == ["ours"]
    assert coverage.gpu == "not run"


@pytest.mark.parametrize(("signer", "reason"), [("", "it is unsigned"), ("theirs", "no signer listed under")])
def test_a_report_of_nobody_who_is_trusted(desk: EvidenceDesk, signer: str, reason: str) -> None:
    desk.attach(desk.proof(), signer=signer)
    assert reason in desk.read().refused[0]
    assert desk.read(allow_unsigned=True).reports


REFUSED: dict[str, tuple[Callable[[EvidenceDesk], dict[str, Any]], str]] = {
    "another image": (lambda _: {"image": OTHER}, "it is about another image"),
    "another cell": (lambda _: {"cell": f"{CELL}-board"}, f"it is about the cell '{CELL}-board'"),
    "another plan": (lambda _: {"plan": OTHER}, "it is about another plan"),
    "another suite": (
        lambda _: {"suite": {}},
        "test suite changed since it was tested: builder/build/pytest_run.py and ",
    ),
    "one test of four": (
        lambda desk: {"passed": desk.passed[:1]},
        "it lacks results of tests: tests/images/test_cuda.py::test_it and 2 more",
    ),
    "a name": (
        lambda desk: {"passed": (*desk.passed, "tests/images/test_base.py::test_invented")},
        "it has results of tests that this image does not have: tests/images/test_base.py::test_invented",
    ),
    "a test of another image": (
        lambda desk: {"passed": (*desk.passed, "tests/images/test_board.py::test_it")},
        "it has results of tests that this image does not have: tests/images/test_board.py::test_it",
    ),
    "image tests as GPU tests": (
        lambda desk: {"kind": "gpu", "passed": desk.passed},
        "it has results of tests that this image does not have: tests/images/test_base.py::test_it and 3 more",
    ),
    "GPU tests as image tests": (
        lambda desk: {"passed": desk.passed + desk.passed_on_gpu},
        "it has results of tests that this image does not have: tests/gpu/test_quartz.py::test_it",
    ),
    "a test that does not apply": (
        lambda desk: {"passed": desk.passed[1:], "not_applicable": desk.passed[:1]},
        "it has results of tests that this image does not have: tests/images/test_base.py::test_it",
    ),
}


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_results_that_do_not_count_have_a_reason(
    desk: EvidenceDesk, changes: Callable[[EvidenceDesk], dict[str, Any]], reason: str
) -> None:
    """A local edit of the evidence (failed -> passed, `gpu: passed`) was released."""
    proof = desk.proof(**changes(desk))
    desk.write(proof)
    desk.attach(proof)
    assert not results.local_coverage(desk.project.state, desk.requirement).reports
    coverage = desk.read(allow_unsigned=True)
    assert not coverage.reports
    assert f"does not count: {reason}" in coverage.refused[0]
    with pytest.raises(ImageTestError, match=f"^{CELL}: no valid test results\n  report .* does not count"):
        coverage.require_pass(CELL)


@pytest.mark.parametrize("passed", [(), ("tests/gpu/test_quartz.py::test_it",)])
def test_gpu_tests_that_do_not_apply_are_no_pass_alone(desk: EvidenceDesk, passed: tuple[str, ...]) -> None:
    (desk.project.root / "tests/gpu/test_quartz.py").write_text("def test_it(): ...\ndef test_fp8(): ...\n")
    desk.attach(desk.proof())
    not_applicable = {"tests/gpu/test_quartz.py::test_it", "tests/gpu/test_quartz.py::test_fp8"}.difference(passed)
    desk.attach(desk.proof(kind="gpu", passed=passed, not_applicable=sorted(not_applicable)))
    assert desk.read().gpu == ("passed" if passed else "failed")


def test_tests_with_parameters_and_of_classes(desk: EvidenceDesk) -> None:
    """Their results have other names than their functions."""
    (desk.project.root / "tests/images/test_base.py").write_text(
        "class TestLogin:\n    def test_it(self): ...\n    def helper(self): ...\n"
        "class Helper:\n    def test_nothing(self): ...\nasync def test_each(mode): ...\n"
    )
    base = ("TestLogin::test_it", "test_each[a]", "test_each[b-[c]]")
    passed = (*(f"tests/images/test_base.py::{name}" for name in base), *desk.passed[1:])
    desk.attach(desk.proof(passed=passed))
    assert desk.read().refused == ()


THOROUGH = """\
import pytest

from tests.helpers import test_imported

@pytest.mark.thorough
@pytest.mark.parametrize("name", ["a"])
def test_long(name): ...

@pytest.mark.parametrize("name", ["a", pytest.param("b", marks=pytest.mark.thorough)])
def test_partly(name): ...
"""


def test_thorough_tests_are_needed_of_the_image_that_must_pass_them(desk: EvidenceDesk) -> None:
    (desk.project.root / "tests/images/test_base.py").write_text(THOROUGH)
    (desk.project.root / "tests/helpers.py").write_text(
        "import pytest\n@pytest.mark.thorough\ndef test_imported(): ...\n"
    )
    others, base = desk.passed[1:], "tests/images/test_base.py"
    desk.attach(desk.proof(passed=(f"{base}::test_partly[a]", *others)))
    assert (
        desk.read()
        .refused[0]
        .endswith(f"tests that another image of its command ran: {base}::test_imported and 1 more")
    )
    desk.planned = plan.make_locked_plan(desk.project, desk.project.select([CELL])).images[0]
    object.__setattr__(desk.planned, "thorough", frozenset(desk.planned.components) - {"base"})
    assert desk.read().failure == ""
    desk.attach(desk.proof(passed=(f"{base}::test_partly[a]", f"{base}::test_long[a]", *others)))
    assert desk.read().refused == (), "more tests than needed are no fault"


def test_the_results_of_this_machine_need_no_signature(desk: EvidenceDesk) -> None:
    desk.attach(desk.proof(), signer="")
    desk.write(desk.proof())
    assert desk.read().reports[0].signer == OWN == "own results, unsigned"
    desk.write(desk.proof(failed=("test_it",)))
    assert not desk.read().reports


# ---- together

LATER: dict[str, Any] = {"finished": "2026-11-22T11:00:00Z"}
FAILED: dict[str, Any] = {"passed": (), "failed": ("test_it",)}
GPU: dict[str, Any] = {"kind": "gpu"}
A100: dict[str, Any] = {"kind": "gpu", "machine": {"gpu": "A100"}}


@pytest.mark.parametrize(
    ("reported", "result"),
    [
        ([{}, GPU], "passed"),
        ([GPU, LATER], "passed"),
        ([{}, GPU | FAILED], "tests failed on H100"),
        ([FAILED, GPU | LATER], "tests failed"),
        ([FAILED, LATER], "not run"),
        ([LATER, FAILED], "not run"),
        ([GPU], "not tested"),
        ([{}, GPU, GPU | FAILED | LATER], "tests failed on H100"),
        ([{}, GPU | FAILED, GPU | LATER], "passed"),
        ([{}, GPU | FAILED, A100 | LATER], "tests failed on H100"),
        ([{}, GPU, A100 | FAILED | LATER], "tests failed on A100"),
        ([{}, GPU, A100], "passed"),
    ],
    ids=[
        "cpu, gpu",
        "gpu, cpu",
        "gpu fails",
        "cpu failed",
        "cpu passes again",
        "cpu passed after it failed",
        "gpu alone",
        "gpu fails again",
        "gpu passes again",
        "another gpu passes",
        "another gpu fails",
        "both gpus pass",
    ],
)
def test_the_newest_report_of_each_kind_and_gpu_decides(
    desk: EvidenceDesk, reported: list[dict[str, Any]], result: str
) -> None:
    proofs = [desk.proof(**changes) for changes in reported]
    for order in (proofs, proofs[::-1]):  # that in the registry does not count
        coverage = coverage_of(Proof(evidence=proof, signer="ours") for proof in order)
        assert (coverage.failure or coverage.gpu) == result


def test_the_signer_is_the_one_of_what_the_result_relies_on(desk: EvidenceDesk) -> None:
    """A signature on an older pass of the same tests is better than unsigned results."""

    def signers(*reports: tuple[dict[str, Any], str]) -> list[str]:
        return coverage_of(Proof(evidence=desk.proof(**changes), signer=signer) for changes, signer in reports).signers

    assert signers(({}, "ci"), (GPU, "gpu")) == ["ci", "gpu"]
    assert signers(({}, "ci"), (LATER, OWN)) == ["ci"]
    assert signers(({}, "ci"), (GPU, OWN)) == ["ci", OWN]
    assert signers((FAILED, "ci"), (LATER, OWN)) == [OWN]
    assert signers(({}, "")) == [""]


def test_each_machine_is_named_for_the_tests_that_it_ran(desk: EvidenceDesk) -> None:
    """Merged results named the GPU machine for tests that the builder had run."""
    desk.attach(desk.proof(machine={"kernel": "that of the builder"}))
    desk.attach(desk.proof(kind="gpu"))
    assert [each.machine for each in desk.read().newest] == [{"kernel": "that of the builder"}, {"gpu": "H100"}]


def test_the_gpu_status_has_the_reason(desk: EvidenceDesk) -> None:
    reports = [Proof(evidence=desk.proof(no_gpu="no driver"), signer=OWN)]
    assert coverage_of(reports).gpu_status == "not run (no driver)"
    reports.append(Proof(evidence=desk.proof(kind="gpu"), signer=OWN))
    assert coverage_of(reports).gpu_status == "passed"


# ---- what others wrote


def damage_manifest(desk: EvidenceDesk) -> None:
    artifact = next(iter(artifacts.attached(desk.registry, MANIFEST, reports.TYPE)))
    desk.registry.contents[artifact] = b"{}"


def remove_blob(desk: EvidenceDesk) -> None:
    content = next(key for key, value in desk.registry.contents.items() if b'"suite"' in value)
    del desk.registry.contents[content]


@pytest.mark.parametrize("damage", [damage_manifest, remove_blob])
def test_a_damaged_report_does_not_hide_others(desk: EvidenceDesk, damage: Callable[[EvidenceDesk], None]) -> None:
    desk.attach(desk.proof())
    damage(desk)
    reports.attach_evidence(desk.registry, IMAGE, [desk.proof(**LATER)], desk.signer())
    coverage = desk.read()
    assert len(coverage.reports) == len(coverage.refused) == 1


ESCAPE = "\x1b]0;owned\x07"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"[" * 100_000,
        b'{"kind": "image"}',
        {"kind": "skipped"},
        {"no_gpu": ESCAPE},
        {"machine": {"gpu": ESCAPE}},
        {"passed": [ESCAPE]},
        {"reasons": {"test_it": ESCAPE}},
        {"suite": {ESCAPE: "x"}},
        {"cell": ESCAPE},
    ],
    ids=lambda content: repr(content)[:30],
)
def test_a_report_that_cannot_be_read(desk: EvidenceDesk, content: bytes | dict[str, Any]) -> None:
    """Its control characters do not reach a terminal."""
    if isinstance(content, dict):
        content = json.dumps({**desk.proof().model_dump(), **content}).encode()
    desk.attach_files(content, "ours")
    [line] = desk.read().refused
    assert line.endswith("does not count: it cannot be read")


def test_a_report_is_attached_once_and_signed_when_there_is_a_signer(desk: EvidenceDesk) -> None:
    for signer, is_signed in ((None, False), (None, False), (desk.signer(), True), (desk.signer(), True), (None, True)):
        reports.attach_evidence(desk.registry, IMAGE, [desk.proof(no_gpu="no driver")], signer)
        attached = artifacts.attached(desk.registry, MANIFEST, reports.TYPE)
        assert desk.signatures == (dict.fromkeys(attached, "ours") if is_signed else {})
        assert len(attached) == 1
    notes = desk.registry.listed(MANIFEST.replace(":", "-"))[0]["annotations"]
    assert (notes["io.github.gpu-images.cell"], notes["io.github.gpu-images.gpu"]) == (CELL, "not run (no driver)")


# ---- in the statement of a release


def stated(desk: EvidenceDesk, *results: tuple[Evidence, str]) -> dict[str, Any]:
    """The predicate of evidence with its signers; empty without one."""
    predicate = reports.test_result(coverage_of(Proof(evidence=proof, signer=signer) for proof, signer in results))
    return dict(json.loads(predicate or "{}"))


def test_a_statement_has_what_in_toto_specifies_and_all_evidence(desk: EvidenceDesk) -> None:
    statement = stated(desk, (desk.proof(), "ours"), (desk.proof(kind="gpu"), OWN))
    assert statement["result"] == "PASSED"
    assert statement["passedTests"] == sorted((*desk.passed, *desk.passed_on_gpu))
    assert statement["failedTests"] == []
    files = {each["name"]: f"sha256:{each['digest']['sha256']}" for each in statement["configuration"]}
    assert files == Suite.of(desk.project.root).files
    coverage = reports.stated_coverage([json.dumps(statement).encode()], desk.requirement)
    coverage.require_pass(CELL)
    assert coverage.gpu == "passed"


@pytest.mark.parametrize("changes", [FAILED, GPU], ids=["failed", "no image tests"])
def test_a_statement_says_passed_only_of_an_image_that_passed(desk: EvidenceDesk, changes: dict[str, Any]) -> None:
    assert stated(desk, (desk.proof(**changes), "ours"))["result"] == "FAILED"


def test_a_release_does_not_sign_results_that_nobody_answers_for(desk: EvidenceDesk) -> None:
    """With `--allow-unsigned`."""
    assert stated(desk, (desk.proof(), "")) == {}
    statement = stated(desk, (desk.proof(), ""), (desk.proof(kind="gpu"), "ours"))
    assert [each["kind"] for each in statement["evidence"]] == ["gpu"]
    assert statement["passedTests"] == list(desk.passed_on_gpu)


@pytest.mark.parametrize(
    ("predicate", "reason"),
    [(b"[]", "invalid statement"), (b'{"evidence": [{}]}', "invalid statement: evidence.0.image")],
)
def test_a_statement_that_cannot_be_read_does_not_hide_another_one(
    desk: EvidenceDesk, predicate: bytes, reason: str
) -> None:
    other = json.dumps(stated(desk, (desk.proof(), "ours"))).encode()
    coverage = reports.stated_coverage([predicate, other], desk.requirement)
    coverage.require_pass(CELL)
    assert coverage.refused[0].startswith(reason)
