"""Which test results in a registry count, and when they cover an image."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from builder.common.errors import ImageTestError
from builder.layers.blobs import CONFIG_TYPE, MANIFEST_TYPE, Descriptor
from builder.layers.oci import Image
from builder.matrix.project import Project
from builder.plan import plan
from builder.registry import artifacts, evidence, reports, signing
from builder.registry.evidence import Evidence
from builder.registry.reports import Reader, Readings, Report
from builder.registry.signing import Signer
from builder.registry.suite import GPU_TESTS, Suite
from tests.fakes.registry import MemoryRegistry
from tests.fakes.suites import write_tests

CELL = "qz-0.5-cu129-py311"
CONFIG, MANIFEST, OTHER = ("sha256:" + letter * 64 for letter in "abc")
IMAGE = Image(
    config=Descriptor(media_type=CONFIG_TYPE, digest=CONFIG, size=1),
    manifest=Descriptor(media_type=MANIFEST_TYPE, digest=MANIFEST, size=1),
    layers=(),
)


class ReportsDesk:
    """A checkout, and a registry with the image. A signature is the name of who signed it; `ours` is trusted."""

    def __init__(self, project: Project) -> None:
        self.project = project
        self.registry = MemoryRegistry()
        [self.planned] = plan.make_locked(project, project.select([CELL])).images
        self.passed = write_tests(project.root, self.planned.components)
        self.passed_on_gpu = write_tests(project.root, ["quartz"], GPU_TESTS)

    def proof(self, **changes: Any) -> Evidence:
        values = {
            "image_id": CONFIG,
            "cell": CELL,
            "plan": self.planned.digest,
            "suite": Suite.of(self.project.root).files,
            "passed": self.passed + (self.passed_on_gpu if changes.get("gpu") == "passed" else ()),
            "failed": (),
            "gpu": "not run",
            "finished": "2026-11-22T10:00:00Z",
        }
        return Evidence(**{**values, **changes})

    def attach(
        self, proof: Evidence, *, signer: str = "ours", image: str = MANIFEST, reused: tuple[Evidence, ...] = ()
    ) -> None:
        report = Report(image=image, evidence=proof, reused=reused)
        self.attach_files(report.model_dump_json().encode(), signer)

    def attach_files(self, content: bytes, signer: str) -> None:
        signature = {signing.SIGNATURE_TYPE: signer.encode()} if signer else {}
        artifacts.attach(self.registry, IMAGE.manifest, reports.TYPE, {reports.TYPE: content} | signature)

    def read(self, *, allow_unsigned: bool = False) -> Readings:
        return Reader.of(self.project, allow_unsigned=allow_unsigned).read(
            self.registry, IMAGE, self.planned.id, self.planned.digest, self.planned.components
        )

    def gpu(self) -> str:
        """The GPU state of the report to rely on."""
        return Reader.of(self.project).proof(self.read(), CELL).evidence.gpu


@pytest.fixture
def desk(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> ReportsDesk:
    def trusted_signer(trust: object, documents: dict[str, bytes], kind: str) -> str:
        assert kind in documents
        return "ours" if documents.get(signing.SIGNATURE_TYPE) == b"ours" else ""

    monkeypatch.setattr(artifacts, "CONFIRM_S", 0)
    monkeypatch.setattr(signing, "trusted_signer", trusted_signer)
    return ReportsDesk(tiny)


def test_a_signed_report_of_this_image_counts(desk: ReportsDesk) -> None:
    desk.attach(desk.proof())
    [reading] = desk.read().counted
    assert reading.signer == "ours"
    assert desk.gpu() == "not run"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"image_id": OTHER}, "it is about another image"),
        ({"cell": "qz-0.5-cu129-py311-board"}, "it is about the cell 'qz-0.5-cu129-py311-board'"),
        ({"plan": OTHER}, "it is about another plan"),
        ({"suite": {}}, "test suite changed since it was tested"),
    ],
    ids=str,
)
def test_a_report_of_something_else_does_not_count(desk: ReportsDesk, changes: dict[str, Any], reason: str) -> None:
    desk.attach(desk.proof(**changes))
    readings = desk.read(allow_unsigned=True)
    assert not readings.counted
    assert reason in readings.refused[0]
    with pytest.raises(ImageTestError, match=f"{CELL}: no valid test results\n  report .* does not count"):
        desk.gpu()


def test_a_report_for_another_digest_does_not_count(desk: ReportsDesk) -> None:
    desk.attach(desk.proof(), image=OTHER)
    assert "it is about another image" in desk.read().refused[0]


@pytest.mark.parametrize(("signer", "reason"), [("", "it is unsigned"), ("theirs", "no signer listed under")])
def test_a_report_of_nobody_who_is_trusted(desk: ReportsDesk, signer: str, reason: str) -> None:
    desk.attach(desk.proof(), signer=signer)
    assert reason in desk.read().refused[0]
    assert desk.read(allow_unsigned=True).counted


INVENTED: dict[str, tuple[Callable[[ReportsDesk], dict[str, Any]], str]] = {
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
    "a GPU": (
        lambda desk: {"gpu": "passed", "passed": desk.passed},
        "it lacks results of tests: tests/gpu/test_quartz.py::test_it",
    ),
    "a GPU on which nothing could be checked": (
        lambda desk: {"gpu": "passed", "passed": desk.passed, "not_applicable": desk.passed_on_gpu},
        "its GPU test results do not match `gpu: passed`",
    ),
    "GPU tests without a GPU": (
        lambda desk: {"passed": desk.passed + desk.passed_on_gpu},
        "its GPU test results do not match `gpu: not run`",
    ),
    "a failure that does not apply": (
        lambda desk: {"passed": desk.passed[1:], "not_applicable": desk.passed[:1]},
        "it has results of tests that this image does not have: tests/images/test_base.py::test_it",
    ),
    "reused GPU tests": (
        lambda desk: {"reused": {OTHER: desk.passed_on_gpu}},
        "it has results of tests that this image does not have: tests/gpu/test_quartz.py::test_it",
    ),
}


@pytest.mark.parametrize("signer", ["", "ours"], ids=["own", "signed"])
@pytest.mark.parametrize(("changes", "reason"), INVENTED.values(), ids=INVENTED.keys())
def test_a_pass_counts_only_with_the_results_of_all_tests(
    desk: ReportsDesk, changes: Callable[[ReportsDesk], dict[str, Any]], reason: str, signer: str
) -> None:
    """A local edit of the evidence (failed -> passed, `gpu: passed`) was released."""
    proof = desk.proof(**changes(desk))
    evidence.write(desk.project.state, proof)
    desk.attach(proof, signer=signer)
    readings = desk.read()
    assert not readings.counted
    assert readings.refused[0].endswith(f"does not count: {reason}")


def test_tests_with_parameters_and_of_classes(desk: ReportsDesk) -> None:
    """Their results have other names than their functions."""
    (desk.project.root / "tests/images/test_base.py").write_text(
        "class TestLogin:\n    def test_it(self): ...\n    def helper(self): ...\n"
        "class Helper:\n    def test_nothing(self): ...\nasync def test_each(mode): ...\n"
    )
    base = ("TestLogin::test_it", "test_each[a]", "test_each[b-[c]]")
    passed = (*(f"tests/images/test_base.py::{name}" for name in base), *desk.passed[1:])
    desk.attach(desk.proof(passed=passed))
    assert desk.read().refused == ()


def test_the_results_of_this_machine_need_no_signature(desk: ReportsDesk) -> None:
    desk.attach(desk.proof(), signer="")
    evidence.write(desk.project.state, desk.proof())
    assert desk.read().counted[0].signer == "own results, unsigned"
    evidence.write(desk.project.state, desk.proof(failed=("test_it",)))
    assert not desk.read().counted


def test_reused_results_are_part_of_what_this_machine_ran(desk: ReportsDesk) -> None:
    *passed, thorough = desk.passed
    proof = desk.proof(passed=passed, reused={OTHER: (thorough,)})
    other = desk.proof(image_id=OTHER, cell="other", passed=(thorough,))
    evidence.write(desk.project.state, proof)
    evidence.write(desk.project.state, desk.proof(image_id=OTHER, cell="other", passed=(), failed=(thorough,)))
    desk.attach(proof, signer="", reused=(other,))
    assert "it is unsigned" in desk.read().refused[0]


@pytest.mark.parametrize(
    ("reused", "is_covered"),
    [
        ([], False),
        ([{}], True),
        ([{"passed": ("other",)}], False),
        ([{"failed": ("x",)}], False),
        ([{"suite": {}}], False),
        ([{"image_id": CONFIG}], False),
    ],
    ids=str,
)
def test_reused_results_must_be_in_the_report(
    desk: ReportsDesk, reused: list[dict[str, Any]], is_covered: bool
) -> None:
    *passed, thorough = desk.passed
    others = tuple(desk.proof(**{"image_id": OTHER, "cell": "other", "passed": (thorough,), **each}) for each in reused)
    desk.attach(desk.proof(passed=passed, reused={OTHER: (thorough,)}), reused=others)
    if is_covered:
        assert desk.gpu() == "not run"
    else:
        with pytest.raises(ImageTestError, match="it relies on tests of"):
            desk.gpu()


H100 = {"machine": {"gpu": "H100"}}
A100 = {"machine": {"gpu": "A100"}}
LATER = {"finished": "2026-11-22T11:00:00Z"}
FAILED = {"passed": (), "failed": ("test_it",)}
GPU_FAILED = {**FAILED, "gpu": "failed"}


@pytest.mark.parametrize(
    ("first", "second", "result"),
    [
        ({}, {**H100, "gpu": "passed"}, "passed"),
        ({**H100, "gpu": "passed"}, LATER, "passed"),
        ({**H100, "gpu": "passed"}, {**H100, **GPU_FAILED, **LATER}, "failed on H100"),
        ({**H100, **GPU_FAILED}, {**H100, "gpu": "passed", **LATER}, "passed"),
        ({**H100, **GPU_FAILED}, {**A100, "gpu": "passed", **LATER}, "failed on H100"),
        (FAILED, {**H100, "gpu": "passed", **LATER}, "failed"),
        (FAILED, LATER, "not run"),
    ],
    ids=["cpu, gpu", "gpu, cpu", "fails again", "passes again", "another gpu", "cpu failed", "cpu passes again"],
)
def test_the_newest_report_of_each_gpu_decides(
    desk: ReportsDesk, first: dict[str, Any], second: dict[str, Any], result: str
) -> None:
    for changes in (second, first):  # the order in the registry does not count
        desk.attach(desk.proof(**changes))
    if "failed" in result:
        with pytest.raises(ImageTestError, match=f"tests {result}"):
            desk.gpu()
    else:
        assert desk.gpu() == result


def damage_manifest(desk: ReportsDesk) -> None:
    artifact = artifacts.attached(desk.registry, MANIFEST, reports.TYPE)[0]
    desk.registry.contents[artifact] = b"{}"


def remove_blob(desk: ReportsDesk) -> None:
    content = next(key for key, value in desk.registry.contents.items() if b'"image_id"' in value)
    del desk.registry.contents[content]


@pytest.mark.parametrize("damage", [damage_manifest, remove_blob])
def test_a_damaged_report_does_not_hide_others(desk: ReportsDesk, damage: Callable[[ReportsDesk], None]) -> None:
    desk.attach(desk.proof())
    damage(desk)
    reports.write(desk.project, desk.registry, IMAGE, Report(image=MANIFEST, evidence=desk.proof(**LATER)), SIGNER)
    readings = desk.read()
    assert len(readings.counted) == len(readings.refused) == 1


@pytest.mark.parametrize("content", [b"", b"{}", b"[" * 100_000, json.dumps({"format": 2}).encode()])
def test_a_report_that_cannot_be_read(desk: ReportsDesk, content: bytes) -> None:
    desk.attach_files(content, "ours")
    assert "it cannot be read" in desk.read().refused[0]


ESCAPE = "\x1b]0;owned\x07"


@pytest.mark.parametrize(
    "changes",
    [
        {"gpu_reason": ESCAPE},
        {"machine": {"gpu": ESCAPE}},
        {"passed": [ESCAPE]},
        {"suite": {ESCAPE: "x"}},
        {"cell": ESCAPE},
        {"reused": {ESCAPE: ["x"]}},
    ],
    ids=str,
)
def test_a_report_with_control_characters_does_not_reach_a_terminal(desk: ReportsDesk, changes: dict[str, Any]) -> None:
    content = {"image": MANIFEST, "evidence": {**desk.proof().model_dump(), **changes}}
    desk.attach_files(json.dumps(content).encode(), "ours")
    [line] = desk.read().refused
    assert line.endswith("does not count: it cannot be read")


class _OurSigner(Signer):
    def sign(self, content: bytes) -> bytes:
        return b"ours"


SIGNER = _OurSigner(key="key")


def test_a_report_is_attached_once_and_again_when_it_is_signed(desk: ReportsDesk) -> None:
    report = Report(image=MANIFEST, evidence=desk.proof())
    for signer, count in ((None, 1), (None, 1), (SIGNER, 2), (SIGNER, 2), (None, 2)):
        reports.write(desk.project, desk.registry, IMAGE, report, signer)
        assert len(artifacts.attached(desk.registry, MANIFEST, reports.TYPE)) == count
    notes = desk.registry.listed(MANIFEST.replace(":", "-"))[0]["annotations"]
    assert (notes["gpu-images.cell"], notes["gpu-images.gpu"]) == (CELL, "not run")
