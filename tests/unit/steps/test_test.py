"""Images of staging: what this machine checks, tests and signs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from builder.build.gpu_command import GpuCommand, StagedTarget
from builder.build.image_tests import NO_RESULTS
from builder.build.outcomes import Outcome
from builder.common.console import View
from builder.common.errors import BuildError, ImageTestError, RegistryError
from builder.engine.model import LoadedImage
from builder.evidence import reports, results, signing
from builder.evidence.results import Coverage, Evidence, Requirement
from builder.evidence.signing import Signer, Trust
from builder.evidence.suite import GPU_TESTS, Suite
from builder.layers import stored_layers
from builder.layers.oci import MANIFEST_TYPE, Descriptor, Image
from builder.plan.plan import Plan, PlannedImage
from builder.registry import artifacts
from builder.registry.client import Repository
from builder.release.staging import StagedImage, StagedRelease
from builder.steps.test import StagedTestOptions, complete_tests, only_for
from tests.fakes.engine import INFO, FakeTester, MemoryConsole
from tests.fakes.registry import MemoryArea, MemoryRegistry
from tests.fakes.suites import passing_evidence, write_tests
from tests.unit.build.assembling import JUPYTER, NOTEBOOK, AssemblyBench


class NamedSigner(Signer):
    """Its signature is its name, in a tag as that of cosign 2."""

    def sign_manifest(self, repository: Repository, subject: Descriptor, *_: Any, **__: Any) -> None:
        repository.put_manifest(_signature_tag(subject.digest), self.key.encode(), MANIFEST_TYPE)


def _signature_tag(digest: str) -> str:
    return f"{digest.replace(':', '-')}.sig"


def _signer(registry: Repository, digest: str) -> str:
    """Who signed a report; empty if nobody did."""
    signature = registry.manifest(_signature_tag(digest))
    return signature.content.decode() if signature else ""


@dataclass
class StateTester(FakeTester):
    """Keeps results as a real one does. `ran` is what its tests find; they fail if `is_failing`."""

    state: Path = Path()
    requirement: Requirement | None = None
    ran: Sequence[Evidence] = ()
    is_failing: bool = False
    target: StagedTarget | None = None
    calls: list[str] = field(default_factory=list)

    def check(self, images: Sequence[PlannedImage]) -> None:
        """Nothing is missing."""

    def coverage(self, image: PlannedImage, loaded: LoadedImage) -> Coverage:
        assert self.requirement
        return results.local_coverage(self.state, self.requirement)

    def test(
        self, image: PlannedImage, loaded: LoadedImage, known: Coverage = NO_RESULTS, target: StagedTarget | None = None
    ) -> Coverage:
        self.calls.append(f"test {image.id}")
        self.target = target
        for evidence in self.ran:
            results.write_evidence(self.state, evidence)
        if self.is_failing:
            raise ImageTestError(f"{image.id}: 1 of 2 tests failed", hint="look")
        return results.coverage_of([*known.reports, *self.coverage(image, loaded).reports])


@dataclass
class GpuMachine:
    """A machine that tests an image that another one staged. `trusted` are the signers of matrix.yaml."""

    bench: AssemblyBench
    registry: MemoryRegistry = field(default_factory=MemoryRegistry)
    trusted: list[str] = field(default_factory=lambda: ["builder", "gpu"])
    tested: list[str] = field(default_factory=list)
    target: StagedTarget | None = None

    def __post_init__(self) -> None:
        [self.planned] = self.bench.images(JUPYTER)
        write_tests(self.bench.project.root, self.planned.components)
        write_tests(self.bench.project.root, ["ember"], GPU_TESTS)

    def assemble(self) -> Image:
        """The image, assembled in the store that both machines share, and staged."""
        self.bench.run(JUPYTER)
        self.image = self.bench.stored(JUPYTER)
        self.put(self.image.manifest.digest, self.image.config.digest)
        return self.image

    def put(self, manifest: str, config: str) -> None:
        self.registry.contents |= {blob: self.bench.store.read(blob) for blob in (manifest, config)}

    def proof(self, **changes: Any) -> Evidence:
        """What the builder found."""
        values = {"machine": {"kernel": "that of the builder"}, "finished": "2026-11-22T10:00:00Z", **changes}
        return passing_evidence(self.bench.project.root, self.planned, self.image.manifest.digest, **values)

    def attach(self, proof: Evidence, signer: str) -> None:
        reports.attach_evidence(self.registry, self.image.manifest.descriptor, [proof], NamedSigner(key=signer))

    def complete(
        self, signer: Signer | None = None, *, attach: bool = True, ran: Sequence[Evidence] = (),
        failing: bool = False, command: GpuCommand | None = None,
    ) -> Outcome:  # fmt: skip
        """Runs the tests that the reports lack; `ran` is what this machine found."""
        staged = StagedImage(
            cell=JUPYTER, repository="ember-cuda", digest=self.image.manifest.digest, plan=self.planned.plan
        )
        area = MemoryArea("registry.example.test/staging", lambda _: self.registry)
        tester = StateTester(
            self.bench.engine,
            state=self.bench.project.state,
            requirement=self.requirement,
            ran=ran,
            is_failing=failing,
            gpu_command=command,
        )
        [outcome] = complete_tests(
            self.bench.context, area, StagedRelease(stamp="20261122", revision="", images=(staged,)),
            Plan(images=(self.planned,)), tester, StagedTestOptions(jobs=1, signer=signer, attach=attach),
        )  # fmt: skip
        self.tested, self.target = tester.calls, tester.target
        return outcome

    @property
    def requirement(self) -> Requirement:
        return Requirement.of(self.planned, self.image.manifest.digest, Suite.of(self.bench.project.root))

    def coverage(self) -> Coverage:
        """What the reports in the registry prove."""
        project = self.bench.project
        return reports.registry_coverage(self.registry, self.requirement, Trust.of(project), project.state)

    def signers(self) -> list[str]:
        """Who signed the attached reports, in no order."""
        attached = artifacts.attached(self.registry, self.image.manifest.digest, reports.TYPE)
        return sorted(_signer(self.registry, report) for report in attached)


@pytest.fixture
def machine(bench: AssemblyBench, monkeypatch: pytest.MonkeyPatch) -> GpuMachine:
    machine = GpuMachine(bench)

    def signer_of_manifest(
        registry: Repository, digest: str, annotations: Mapping[str, str], trust: object
    ) -> tuple[str, list[Mapping[str, str]]]:
        name = _signer(registry, digest)
        return (name, [{}]) if name in machine.trusted else ("", [])

    monkeypatch.setattr(signing, "signer_of_manifest", signer_of_manifest)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    return machine


def test_a_machine_names_the_images_that_it_does_not_run(machine: GpuMachine) -> None:
    amd64 = machine.planned
    arm64 = replace(amd64, cell=replace(amd64.cell, arch="arm64"))
    console = MemoryConsole()
    assert only_for("arm64", Plan(images=(amd64, arm64)), View(console)).images == (arm64,)
    assert console.text == f"not tested on this machine (arm64): {JUPYTER}\n"
    assert only_for("amd64", Plan(images=(amd64,)), View(console)).images == (amd64,)
    assert len(console.text.splitlines()) == 1


def test_an_image_that_nobody_tested_is_checked_for_files_of_the_same_path(
    machine: GpuMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`stage --untested` assembles images of layers that it does not have, and nothing compared them later."""
    machine.bench.world.more = {
        "ember": {"shared/module.py": b"one"},
        NOTEBOOK: {"shared/module.py": b"another"},
    }
    with monkeypatch.context() as unchecked:
        unchecked.setattr(stored_layers, "check_paths", lambda *_: [])
        machine.assemble()
    outcome = machine.complete()
    assert isinstance(outcome.error, BuildError)
    assert machine.tested == []
    machine.attach(machine.proof(), "builder")
    assert machine.complete().error is None, "who tested it has built or checked it"


def test_an_untested_image_without_conflicts_is_loaded_and_tested(machine: GpuMachine) -> None:
    image = machine.assemble()
    loaded = LoadedImage(id=image.config.digest, digest=image.manifest.digest, origin="loaded")
    outcome = machine.complete(ran=[machine.proof()])
    assert (outcome.error, outcome.loaded, outcome.tested) == (None, loaded, True)
    assert machine.tested == [f"test {JUPYTER}"]
    assert machine.complete().loaded == loaded


def test_a_command_gets_the_staged_image_by_its_digest_and_this_machine_downloads_none(machine: GpuMachine) -> None:
    image = machine.assemble()
    machine.registry.contents |= {layer.digest: machine.bench.store.read(layer.digest) for layer in image.layers}
    machine.bench.engine.pulled.clear()
    command = GpuCommand(["srun", "{image}", "{command}"], (), Path())
    outcome = machine.complete(ran=[machine.proof()], command=command)
    assert (outcome.error, outcome.tested) == (None, True)
    assert machine.target
    assert machine.target.reference == f"{machine.registry.name}@{image.manifest.digest}"
    assert "usr/local/lib/workstation_jupyter.py" in machine.target.inventory
    assert machine.bench.engine.pulled == []


@pytest.mark.parametrize("store", ["overlay2", "containerd"])
def test_a_machine_that_ran_nothing_attaches_nothing(
    machine: GpuMachine, store: Literal["overlay2", "containerd"]
) -> None:
    """An engine with another kind of store gives the image another id: its copy of the report was signed again."""
    machine.assemble()
    machine.bench.engine.settings = replace(INFO, store=store)
    machine.attach(machine.proof(), "builder")
    outcome = machine.complete(NamedSigner(key="gpu"))
    assert (machine.tested, outcome.tested) == ([], False), "tests that another machine ran are not run again"
    assert outcome.coverage
    assert [report.evidence for report in outcome.coverage.reports] == [machine.proof()]
    assert results.read_evidence(machine.bench.project.state, machine.image.manifest.digest) == []
    assert machine.signers() == ["builder"]


@pytest.mark.parametrize("store", ["overlay2", "containerd"])
def test_what_a_machine_ran_itself_is_signed_later_too(
    machine: GpuMachine, store: Literal["overlay2", "containerd"]
) -> None:
    machine.assemble()
    machine.bench.engine.settings = replace(INFO, store=store)
    results.write_evidence(machine.bench.project.state, machine.proof())
    reports.attach_evidence(machine.registry, machine.image.manifest.descriptor, [machine.proof()], None)
    machine.complete(NamedSigner(key="gpu"))
    assert "gpu" in machine.signers()


def test_a_machine_that_may_only_read_keeps_its_results(machine: GpuMachine) -> None:
    """Another job, which runs no code of an image, signs and attaches them."""
    machine.assemble()
    contents = dict(machine.registry.contents)
    assert machine.complete(attach=False, ran=[machine.proof()]).error is None
    assert machine.registry.contents == contents
    digest = machine.image.manifest.digest
    assert results.read_evidence(machine.bench.project.state, digest) == [machine.proof()]


@pytest.mark.parametrize(
    "changes", [{"passed": ("tests/images/test_base.py::test_it",)}, {"kind": "gpu"}], ids=["too few", "of a GPU"]
)
def test_a_pass_that_would_not_count_is_not_attached(machine: GpuMachine, changes: dict[str, Any]) -> None:
    """As after a local edit: its tests are run again, but that may fail before there is a result."""
    machine.assemble()
    signer = NamedSigner(key="gpu")
    machine.complete(signer, ran=[machine.proof(**changes)])
    assert machine.signers() == []
    failed = machine.proof(failed=("tests/images/test_base.py::test_it",))
    outcome = machine.complete(signer, ran=[failed], failing=True)
    assert isinstance(outcome.error, ImageTestError)
    assert machine.signers() == ["gpu"], "a failure counts"


def test_results_of_a_signer_who_is_no_longer_trusted_do_not_count(machine: GpuMachine) -> None:
    """A copy of them on this machine counted as its own."""
    machine.assemble()
    machine.attach(machine.proof(), "builder")
    machine.complete()
    assert machine.coverage().reports
    machine.trusted.remove("builder")
    assert machine.coverage().reports == ()


def test_a_machine_that_does_not_run_an_image_downloads_nothing(machine: GpuMachine) -> None:
    machine.assemble()
    machine.bench.engine.settings = replace(INFO, architecture="aarch64", is_local=True)
    assert str(machine.complete().error) == f"{JUPYTER}: built, not run: a machine for amd64 must test it"
    assert machine.registry.calls == []


class ReadOnly(MemoryRegistry):
    """Does not respond when results are attached."""

    def put_manifest(self, reference: str, content: bytes, media_type: str) -> str:
        raise RegistryError("no response")


def test_a_failure_to_attach_results_does_not_hide_that_the_tests_failed(machine: GpuMachine) -> None:
    """Only the registry's error was shown, with its exit code."""
    machine.registry = ReadOnly()
    machine.assemble()
    failed = machine.proof(failed=("tests/images/test_base.py::test_it",))
    error = machine.complete(ran=[failed], failing=True).error
    assert isinstance(error, ImageTestError)
    assert f"{JUPYTER}: 1 of 2 tests failed\n  -> look\nno response" in str(error)
    assert isinstance(machine.complete(ran=[machine.proof()]).error, RegistryError)


def test_a_failure_on_the_gpu_of_another_machine_fails_the_command_after_results_are_attached(
    machine: GpuMachine,
) -> None:
    """It ended with "2 images tested" and status 0; only the release refused them."""
    machine.assemble()
    on_gpu = machine.proof(kind="gpu", passed=(), failed=("tests/gpu/test_ember.py::test_it",), machine={"gpu": "H100"})
    machine.attach(on_gpu, "gpu")
    outcome = machine.complete(NamedSigner(key="builder"), ran=[machine.proof()])
    assert str(outcome.error) == f"{JUPYTER}: tests failed on H100"
    assert machine.signers() == ["builder", "gpu"]
