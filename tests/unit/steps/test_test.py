"""Images of staging: what this machine checks, tests and signs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from builder.build.context import LoadedImage
from builder.common.errors import BuildError
from builder.evidence import reports, results, signing
from builder.evidence.results import Coverage, Evidence, Requirement
from builder.evidence.signing import Signer, Trust
from builder.evidence.suite import GPU_TESTS, Suite
from builder.host import Host
from builder.layers import stored_layers
from builder.layers.blobs import MANIFEST_TYPE
from builder.layers.oci import Image
from builder.plan.plan import Plan
from builder.registry import artifacts
from builder.registry.client import Repository
from builder.release.staging import StagedImage, StagingArea
from builder.steps.images import Options
from builder.steps.test import StagedImages, only_for
from builder.steps.test import test_staged as run_staged_tests
from tests.fakes.engine import INFO
from tests.fakes.registry import MemoryRegistry
from tests.fakes.suites import write_tests
from tests.unit.build.assembling import JUPYTER, NOTEBOOK, AssemblyBench


class NamedSigner(Signer):
    """Its signature is its name, in a tag as that of cosign 2."""

    def sign_manifest(self, registry: Repository, digest: str, annotations: Mapping[str, str] = {}) -> None:
        registry.put_manifest(_signature_tag(digest), self.key.encode(), MANIFEST_TYPE)


def _signature_tag(digest: str) -> str:
    return f"{digest.replace(':', '-')}.sig"


def _signer(registry: Repository, digest: str) -> str:
    """Who signed a report; empty if nobody did."""
    signature = registry.manifest(_signature_tag(digest))
    return signature.content.decode() if signature else ""


@dataclass
class GpuMachine:
    """A machine that tests an image that another one staged. `trusted` are the signers of matrix.yaml."""

    bench: AssemblyBench
    registry: MemoryRegistry = field(default_factory=MemoryRegistry)
    trusted: list[str] = field(default_factory=lambda: ["builder", "gpu"])

    def __post_init__(self) -> None:
        [self.planned] = self.bench.images(JUPYTER)
        self.passed = write_tests(self.bench.project.root, self.planned.components)
        self.passed_on_gpu = write_tests(self.bench.project.root, ["ember"], GPU_TESTS)

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
        values = {
            "image": self.image.manifest.digest,
            "cell": JUPYTER,
            "plan": self.planned.digest,
            "suite": dict(Suite.of(self.bench.project.root).files),
            "kind": "image",
            "passed": self.passed,
            "failed": (),
            "machine": {"kernel": "that of the builder"},
            "finished": "2026-11-22T10:00:00Z",
        }
        return Evidence(**{**values, **changes})

    def attach(self, proof: Evidence, signer: str) -> None:
        reports.attach_evidence(self.registry, self.image.manifest, [proof], NamedSigner(key=signer))

    def method(self, signer: Signer | None = None, *, attach: bool = True) -> StagedImages:
        staged = StagedImage(
            cell=JUPYTER, repository="ember-cuda", digest=self.image.manifest.digest, plan=self.planned.digest
        )
        place = StagingArea("registry.example.test/staging", "", Host(), new_registry=lambda *_, **__: self.registry)
        return StagedImages(self.bench.context, self.bench.store, place, {JUPYTER: staged}, signer, attach=attach)

    def coverage(self) -> Coverage:
        """What the reports in the registry prove."""
        project = self.bench.project
        requirement = Requirement.of(self.planned, self.image.manifest.digest, Suite.of(project.root))
        return reports.registry_coverage(self.registry, requirement, Trust.of(project), state=project.state)

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
    return machine


def test_a_machine_names_the_images_that_it_could_only_emulate(machine: GpuMachine) -> None:
    amd64 = machine.planned
    arm64 = replace(amd64, cell=replace(amd64.cell, arch="arm64"))
    said: list[str] = []
    assert only_for("arm64", Plan(images=(amd64, arm64)), said.append).images == (arm64,)
    assert said == [f"not tested on this machine (arm64): {JUPYTER}"]
    assert only_for("amd64", Plan(images=(amd64,)), said.append).images == (amd64,)
    assert len(said) == 1


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
    with pytest.raises(BuildError, match=f"^{JUPYTER}: .* have different files for /opt/venv/.*/shared/module.py$"):
        machine.method().build(machine.planned)
    machine.attach(machine.proof(), "builder")
    machine.method().build(machine.planned)  # who tested it has built or checked it


def test_an_untested_image_without_conflicts_is_loaded(machine: GpuMachine) -> None:
    image = machine.assemble()
    loaded = machine.method().build(machine.planned)
    assert loaded == LoadedImage(id=image.config.digest, digest=image.manifest.digest, origin="loaded")
    assert machine.method().build(machine.planned) == loaded


@pytest.mark.parametrize("store", ["overlay2", "containerd"])
def test_a_machine_that_ran_nothing_attaches_nothing(
    machine: GpuMachine, store: Literal["overlay2", "containerd"]
) -> None:
    """An engine with another kind of store gives the image another id: its copy of the report was signed again."""
    machine.assemble()
    machine.bench.engine.settings = replace(INFO, store=store)
    machine.attach(machine.proof(), "builder")
    method = machine.method(NamedSigner(key="gpu"))
    loaded = method.build(machine.planned)
    [report] = method.reports(machine.planned)
    assert report.evidence == machine.proof(), "tests that another machine ran are not run again"
    assert results.read_evidence(machine.bench.project.state, loaded.digest) == []
    method.attach_results(machine.planned, loaded)
    assert machine.signers() == ["builder"]


@pytest.mark.parametrize("store", ["overlay2", "containerd"])
def test_what_a_machine_ran_itself_is_signed_later_too(
    machine: GpuMachine, store: Literal["overlay2", "containerd"]
) -> None:
    machine.assemble()
    machine.bench.engine.settings = replace(INFO, store=store)
    project = machine.bench.project
    results.write_evidence(project.state, machine.proof())
    reports.attach_evidence(machine.registry, machine.image.manifest, [machine.proof()], None)
    method = machine.method(NamedSigner(key="gpu"))
    method.attach_results(machine.planned, method.build(machine.planned))
    assert "gpu" in machine.signers()


def test_a_machine_that_may_only_read_keeps_its_results(machine: GpuMachine) -> None:
    """Another job, which runs no code of an image, signs and attaches them."""
    machine.assemble()
    method = machine.method(attach=False)
    loaded = method.build(machine.planned)
    results.write_evidence(machine.bench.project.state, machine.proof())
    calls = list(machine.registry.calls)
    method.attach_results(machine.planned, loaded)
    assert machine.registry.calls == calls
    assert results.read_evidence(machine.bench.project.state, loaded.digest) == [machine.proof()]


@pytest.mark.parametrize(
    "changes", [{"passed": ("tests/images/test_base.py::test_it",)}, {"kind": "gpu"}], ids=["too few", "of a GPU"]
)
def test_a_pass_that_would_not_count_is_not_attached(machine: GpuMachine, changes: dict[str, Any]) -> None:
    """As after a local edit: its tests are run again, but that may fail before there is a result."""
    machine.assemble()
    method = machine.method(NamedSigner(key="gpu"))
    loaded = method.build(machine.planned)
    results.write_evidence(machine.bench.project.state, machine.proof(**changes))
    method.attach_results(machine.planned, loaded)
    assert machine.signers() == []
    failed = machine.proof(failed=("tests/images/test_base.py::test_it",))
    results.write_evidence(machine.bench.project.state, failed)
    method.attach_results(machine.planned, loaded)
    assert machine.signers() == ["gpu"], "a failure counts"


def test_results_of_a_signer_who_is_no_longer_trusted_do_not_count(machine: GpuMachine) -> None:
    """A copy of them on this machine counted as its own."""
    machine.assemble()
    machine.attach(machine.proof(), "builder")
    machine.method().build(machine.planned)
    assert machine.coverage().reports
    machine.trusted.remove("builder")
    assert machine.coverage().reports == ()


def test_a_machine_that_can_neither_run_nor_emulate_an_image_downloads_nothing(
    machine: GpuMachine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    machine.assemble()
    monkeypatch.setattr("builder.common.machine.BINFMT", tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    bench = machine.bench
    bench.engine.settings = replace(INFO, architecture="aarch64", is_local=True)
    plan = Plan(images=(machine.planned,))
    [outcome] = run_staged_tests(bench.context, machine.method(), plan, Options(jobs=1))
    assert str(outcome.error) == "this machine (arm64) cannot run programs for amd64"
