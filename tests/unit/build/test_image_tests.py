"""Running an image's tests: what is a pass, and the evidence."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Self

import pytest

from builder.build import image_tests
from builder.build.gpu_command import ChecksReport, GpuCommand, GpuResults, StagedTarget
from builder.build.pytest_run import describe, read_results
from builder.common.errors import EngineError, ImageTestError
from builder.compat import gpus
from builder.compat.gpus import Gpu
from builder.engine.model import EngineInfo, LoadedImage
from builder.evidence import results
from builder.evidence.results import Coverage, Evidence, Proof, coverage_of
from builder.evidence.suite import GPU_TESTS, Suite
from builder.matrix import facts
from builder.matrix.facts import Build, Driver
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.plan import PlannedImage
from tests.fakes.engine import INFO, FakeEngine, MemoryConsole
from tests.fakes.run import new_run
from tests.fakes.suites import passing_evidence, write_tests

CELL = "qz-0.5-cu129-py311-board"
ID = "sha256:" + "b" * 64
LOADED = LoadedImage(id=ID, digest="sha256:" + "d" * 64)
Lines = list[tuple[str, str]]


# What a report has for a test that did not pass, and for one that did. A reason may quote the output of an image: with
# an escape sequence of a terminal, it was refused as evidence, and the run ended with an internal error.
DETAILS = ({"seconds": 2.5, "reason": "assert \x1b[31m1\x1b[0m == 2"}, {"seconds": 1.5, "reason": ""})


def report(path: Path, lines: Lines) -> Path:
    entries = [{"test": test, "outcome": result, **DETAILS[result == "passed"]} for test, result in lines]
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    return path


OUTCOMES: dict[str, tuple[Lines, int, str, str]] = {  # with names of one letter
    "passed": ([("a", "passed"), ("b", "passed")], 0, "ab", ""),
    "failed": ([("a", "passed"), ("b", "failed")], 1, "a", "b"),
    "skipped": ([("a", "passed"), ("b", "skipped")], 0, "a", "b"),
    "all skipped": ([("b", "skipped")], 0, "", "b"),
    "failed in tear-down": ([("a", "passed"), ("a", "failed")], 1, "", "a"),
    "failed in set-up": ([("a", "failed")], 1, "", "a"),
    "fails, then passes": ([("a", "failed"), ("a", "passed")], 0, "", "a"),
    "not applicable": ([("a", "passed"), ("b", "not applicable")], 0, "a", ""),
    "not applicable, then failed in tear-down": ([("b", "not applicable"), ("b", "failed")], 1, "", "b"),
}


@pytest.mark.parametrize(("lines", "status", "passed", "failed"), OUTCOMES.values(), ids=OUTCOMES.keys())
def test_outcome(tmp_path: Path, lines: Lines, status: int, passed: str, failed: str) -> None:
    results = read_results(report(tmp_path / "r", lines), tmp_path / "figures", status, [], tmp_path)
    not_applicable = tuple(test for test, result in lines if result == "not applicable")
    assert (results.passed, results.failed, results.not_applicable) == (tuple(passed), tuple(failed), not_applicable)
    assert results.reasons == {test: "assert 1 == 2" for test, result in lines if result != "passed"}
    assert set(results.seconds) == {test for test, _ in lines}


@pytest.mark.parametrize(("lines", "status"), [([], 5), ([("a", "passed")], 2), ([("a", "passed")], -9)])
def test_a_run_that_ends_badly_without_a_failed_test_is_a_failure(tmp_path: Path, lines: Lines, status: int) -> None:
    """Nothing was collected; collection failed; the run was killed."""
    results = read_results(report(tmp_path / "r", lines), tmp_path / "figures", status, [], tmp_path)
    assert results.passed == tuple(test for test, _ in lines)
    assert results.failed == (f"the test run itself (pytest ended with status {status})",)
    absent = read_results(tmp_path / "absent", tmp_path / "figures", status, [], tmp_path)
    assert (absent.passed, absent.failed) == ((), results.failed)
    empty = read_results(tmp_path / "absent", tmp_path / "figures", 0, [], tmp_path)
    assert (empty.passed, empty.failed) == ((), ())


def test_a_line_of_the_report_that_was_cut_off_is_ignored(tmp_path: Path) -> None:
    path = report(tmp_path / "r", [("a", "passed")])
    path.write_text(path.read_text() + '{"test": "b", "out')
    results = read_results(path, tmp_path / "figures", -9, [], tmp_path)
    assert results.passed == ("a",)
    assert len(results.failed) == 1


@pytest.fixture
def image(tiny: Project) -> PlannedImage:
    [planned] = plan.make_locked_plan(tiny, tiny.select([CELL])).images
    write_tests(tiny.root, planned.components)
    return planned


def node(stem: str, folder: str = "images") -> str:
    """The id of the one test of a file."""
    return f"tests/{folder}/{stem}.py::test_it"


class Child:
    """Stands in for the pytest process: reports for each test its outcome in `results`, by default a pass.

    Each file has one test; `more` are others. With `tested`, only these files have a test.
    """

    results: ClassVar[Mapping[str, str]] = {}
    tested: ClassVar[tuple[str, ...] | None] = None
    more: ClassVar[Sequence[str]] = ()
    status = 0
    is_killed_on_gpu = False
    runs: ClassVar[list[list[str]]] = []
    leased: ClassVar[list[str]] = []

    def __init__(self, command: list[str], *, env: Mapping[str, str], **_: object) -> None:
        paths = [Path(word) for word in command if word.endswith(".py")]
        files = [path.stem for path in paths]
        self.runs.append(files)
        tests = [node(path.stem, path.parent.name) for path in paths if self.tested is None or path.stem in self.tested]
        lines = [(test, self.results.get(test, "passed")) for test in (*tests, *self.more)]
        report(Path(env["IMAGE_TEST_REPORT"]), lines)
        options = json.loads(Path(env["IMAGE_TEST_SUBJECT"]).read_text()).get("gpu_options")
        self.leased.append(",".join(options["device_requests"][0]["DeviceIDs"]) if options else "")
        if self.leased[-1] and self.is_killed_on_gpu:
            raise KeyboardInterrupt
        if self.leased[-1]:
            Path(env["IMAGE_TEST_FIGURES"]).write_text(json.dumps({"driver": "570.86.10"}) + "\n")
        self.stdout = iter(f"{file}::test_it PASSED\n" for file in files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def wait(self) -> int:
        return self.status

    def kill(self) -> None:
        return


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> type[Child]:
    class Fresh(Child):
        runs: ClassVar[list[list[str]]] = []
        leased: ClassVar[list[str]] = []

    monkeypatch.setattr("subprocess.Popen", Fresh)
    return Fresh


MakeTester = Callable[..., image_tests.Tester]


@pytest.fixture
def tester(tiny: Project, image: PlannedImage, monkeypatch: pytest.MonkeyPatch, console: MemoryConsole) -> MakeTester:
    """A tester on a machine with these GPUs, which the engine gives to containers as `info` says, by default if any."""
    assert image.id == CELL

    def make(
        *present: Gpu,
        runtime: bool = True,
        mode: gpus.Mode = gpus.AUTO,
        driver: str = "570.86.10",
        info: EngineInfo | None = None,
    ) -> image_tests.Tester:
        info = info or replace(INFO, gpu_option="--gpus" if present and runtime else "")
        monkeypatch.setattr(gpus, "read_gpus", lambda: (driver if present else "", present))
        monkeypatch.setattr(gpus, "GPU_POLL_S", 0.001)
        run = new_run(tiny, engine=FakeEngine(info=info), console=console)
        return image_tests.Tester(run, gpu_mode=mode)

    return make


def is_known(tester: image_tests.Tester, image: PlannedImage) -> bool:
    """Whether earlier results are enough on this machine."""
    return tester.is_complete(image, tester.coverage(image, LOADED))


def of_kind(tiny: Project, kind: str) -> Evidence:
    return next(found for found in results.read_evidence(tiny.state, LOADED.digest) if found.kind == kind)


def test_a_pass_is_written_as_evidence(
    tiny: Project, image: PlannedImage, child: type[Child], tester: MakeTester
) -> None:
    coverage = tester().test(image, LOADED)
    assert coverage.failure == ""
    assert coverage.gpu == "not run"
    files = [f"test_{name}" for name in ("board", "quartz", "cuda", "python", "base")]
    assert coverage.passed == sorted(node(file) for file in files)
    assert child.runs == [files], "the longest first"
    [proof] = results.read_evidence(tiny.state, LOADED.digest)
    assert proof.seconds == dict.fromkeys(coverage.passed, 1.5)
    assert proof.passed == tuple(node(file) for file in files)
    assert (tiny.logs / f"{CELL}.test.log").read_text().count("PASSED") == 5
    assert is_known(tester(), image)


ARM = replace(INFO, architecture="aarch64")  # of an engine on which images for amd64 are emulated


def test_an_image_of_another_architecture_is_not_run(image: PlannedImage, on_gpu: Path, tester: MakeTester) -> None:
    assert image_tests.why_not_run(INFO, image) == ""
    reason = "built, not run: a machine for amd64 must test it"
    assert image_tests.why_not_run(ARM, image) == reason
    with pytest.raises(ImageTestError, match=reason):
        tester(H100, info=replace(ARM, gpu_option="--gpus"), mode=gpus.REQUIRE).check([image])


def test_a_result_of_a_test_that_its_file_does_not_show_is_no_pass(
    tiny: Project, image: PlannedImage, child: type[Child], tester: MakeTester
) -> None:
    """It cannot be distinguished from an invented one: the images would be tested again in every run."""
    child.more = ("tests/images/test_base.py::test_generated",)
    with pytest.raises(ImageTestError, match=r"the result does not count: it has results .*::test_generated") as caught:
        tester().test(image, LOADED)
    assert "as functions" in caught.value.hint
    assert not is_known(tester(), image)


def test_a_reason_that_several_tests_have_is_shown_once(
    tiny: Project, image: PlannedImage, child: type[Child], tester: MakeTester
) -> None:
    failed = [node("test_base"), node("test_cuda")]
    child.results, child.status = dict.fromkeys(failed, "failed"), 1
    pattern = rf"^{CELL}: 2 of 5 tests failed\n  (.*), (.*)\n    assert 1 == 2$"
    with pytest.raises(ImageTestError, match=pattern) as caught:
        tester().test(image, LOADED)
    assert all(test in str(caught.value) for test in failed)
    assert f".builder/logs/{CELL}.test.log" in caught.value.hint
    assert f"docker run --rm -it {'b' * 12} bash" in caught.value.hint
    assert not of_kind(tiny, "image").is_pass


def test_a_component_without_tests(tiny: Project, image: PlannedImage, child: type[Child], tester: MakeTester) -> None:
    (tiny.root / "tests/images/test_board.py").unlink()
    with pytest.raises(ImageTestError, match=r"no tests for a component: tests/images/test_board.py"):
        tester().test(image, LOADED)
    assert child.runs == []
    assert results.read_evidence(tiny.state, LOADED.digest) == []


def test_a_component_without_a_test_is_no_pass(image: PlannedImage, child: type[Child], tester: MakeTester) -> None:
    child.tested = ("test_base", "test_python", "test_cuda", "test_quartz")
    with pytest.raises(ImageTestError, match=r"1 of 5 tests failed\n  .*/test_board.py: no test$"):
        tester().test(image, LOADED)


H100 = Gpu(name="NVIDIA H100", capability="9.0", memory=80 * 10**9, free=70 * 10**9, index=1, uuid="GPU-1")
BUSY = replace(H100, free=1, index=0, uuid="GPU-0")
K80 = replace(H100, name="Tesla K80", capability="3.7")


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Replaces parts of facts.yaml."""
    present = facts.load_facts()
    return lambda **parts: monkeypatch.setattr(facts, "load_facts", lambda: present.model_copy(update=parts))


REQUIRED = "--gpu require, but GPU tests cannot run"
GPU_CASES: dict[str, tuple[tuple[Gpu, ...], bool, str, str, str]] = {
    "no GPU": ((), True, "passed", "not run", "no NVIDIA driver on this machine"),
    "GPU without the engine's runtime": ((H100,), False, "passed", "not run", "cannot give containers NVIDIA GPUs"),
    "GPU that is busy": ((BUSY,), True, "passed", "not run", "no GPU has 8 GB free"),
    "GPU": ((H100,), True, "passed", "passed", ""),
    "GPU beside one that is busy": ((BUSY, H100), True, "passed", "passed", ""),
    "GPU that fails": ((H100,), True, "failed", "failed", ""),
    "GPU whose tests are skipped": ((H100,), True, "skipped", "failed", ""),
    "GPU on which there is nothing to check": ((H100,), True, "not applicable", "failed", ""),
}


@pytest.fixture
def on_gpu(tiny: Project) -> Path:
    """A GPU test of the image's framework."""
    write_tests(tiny.root, ["quartz"], GPU_TESTS)
    return tiny.root / "tests/gpu/test_quartz.py"


@pytest.mark.parametrize(("present", "runtime", "result", "state", "reason"), GPU_CASES.values(), ids=GPU_CASES.keys())
@pytest.mark.usefixtures("on_gpu")
def test_gpu(
    tiny: Project, image: PlannedImage, child: type[Child], tester: MakeTester,
    present: tuple[Gpu, ...], runtime: bool, result: str, state: str, reason: str,
) -> None:  # fmt: skip
    if state != "not run":
        child.results = {node("test_quartz", "gpu"): result}
    with pytest.raises(ImageTestError, match="tests failed") if state == "failed" else nullcontext():
        tester(*present, runtime=runtime).test(image, LOADED)
    coverage = tester().coverage(image, LOADED)
    assert coverage.gpu == state
    no_gpu = of_kind(tiny, "image").no_gpu
    assert reason in no_gpu
    assert bool(no_gpu) is bool(reason)
    assert child.leased == ([""] if state == "not run" else ["", "GPU-1"])
    if state != "not run":
        proof = of_kind(tiny, "gpu")
        assert proof.not_applicable == ((node("test_quartz", "gpu"),) if result == "not applicable" else ())
        assert proof.figures
        assert proof.machine["gpu"] == H100.name


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(("names", "leased"), [({"all", "0", "1"}, "1"), ({"all", "1", "GPU-1"}, "GPU-1")])
def test_gpus_have_the_names_of_their_cdi_devices(
    image: PlannedImage, child: type[Child], tester: MakeTester, names: set[str], leased: str
) -> None:
    """An engine without NVIDIA's runtime. Specifications name GPUs by number, newer ones also by UUID."""
    info = replace(INFO, gpu_option="--device", cdi_gpus=frozenset(names))
    assert tester(H100, info=info).test(image, LOADED).gpu == "passed"
    assert child.leased == ["", f"nvidia.com/gpu={leased}"]


@pytest.mark.usefixtures("on_gpu", "child")
def test_a_gpu_result_stays_valid_where_no_gpu_is_free(tiny: Project, image: PlannedImage, tester: MakeTester) -> None:
    first = tester(H100).test(image, LOADED)
    again = tester(H100, mode=gpus.OFF).test(image, LOADED)
    assert (again.gpu, again.gpu_status) == ("passed", "passed")
    assert again.passed == first.passed
    assert of_kind(tiny, "gpu").figures == ({"driver": "570.86.10"},)
    assert of_kind(tiny, "gpu").machine["gpu"] == H100.name, "where the GPU tests ran"


@pytest.mark.usefixtures("on_gpu")
def test_only_what_is_missing_is_run(image: PlannedImage, child: type[Child], tester: MakeTester) -> None:
    first = tester(H100, mode=gpus.OFF).test(image, LOADED)
    assert (first.gpu_status, first.failure) == ("not run (--gpu off)", "")
    runs = len(child.runs)
    known = tester().coverage(image, LOADED)
    both = tester(H100).test(image, LOADED, known)
    assert len(child.runs) == runs + 1, "the GPU tests"
    assert both.gpu == "passed"
    assert set(both.passed) == {*first.passed, node("test_quartz", "gpu")}
    tester(H100).test(image, LOADED)
    assert len(child.runs) == runs + 3, "all tests again"


@pytest.mark.usefixtures("on_gpu", "child")
def test_evidence_names_the_machine_of_tests_that_another_one_ran(
    tiny: Project, image: PlannedImage, tester: MakeTester
) -> None:
    """As after `builder test --staged`: the results of the builder are reports in the registry."""
    tester(mode=gpus.OFF).test(image, LOADED)
    elsewhere = of_kind(tiny, "image").model_copy(update={"machine": {"kernel": "that of the builder"}})
    results.evidence_path(tiny.state, elsewhere).unlink()
    both = tester(H100).test(image, LOADED, coverage_of([Proof(evidence=elsewhere, signer="builder")]))
    assert [evidence.machine.get("gpu") for evidence in both.newest] == [None, H100.name]
    assert both.newest[0].machine == {"kernel": "that of the builder"}
    assert [own.kind for own in results.read_evidence(tiny.state, LOADED.digest)] == ["gpu"], "its own tests"


@pytest.mark.usefixtures("on_gpu")
def test_a_failure_is_not_kept_when_a_gpu_is_found(
    image: PlannedImage, child: type[Child], tester: MakeTester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "results", {node("test_quartz"): "failed"})
    with pytest.raises(ImageTestError):
        tester(mode=gpus.OFF).test(image, LOADED)
    monkeypatch.setattr(child, "results", {})
    runs = len(child.runs)
    known = tester().coverage(image, LOADED)
    assert tester(H100).test(image, LOADED, known).failure == ""
    assert len(child.runs) == runs + 2


@pytest.mark.usefixtures("on_gpu")
def test_a_failure_on_a_gpu_stays_valid_where_no_gpu_is_free(
    image: PlannedImage, child: type[Child], tester: MakeTester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "results", {node("test_quartz", "gpu"): "failed"})
    with pytest.raises(ImageTestError) as caught:
        tester(H100).test(image, LOADED)
    assert f"Full log: .builder/logs/{CELL}.gpu.log" in caught.value.hint
    monkeypatch.setattr(child, "results", {})
    with pytest.raises(ImageTestError, match="tests/gpu/test_quartz"):
        tester(H100, mode=gpus.OFF).test(image, LOADED)


@pytest.mark.usefixtures("on_gpu")
def test_image_tests_are_not_lost_if_the_gpu_tests_are_interrupted(
    tiny: Project, image: PlannedImage, child: type[Child], tester: MakeTester
) -> None:
    child.is_killed_on_gpu = True
    with pytest.raises(KeyboardInterrupt):
        tester(H100).test(image, LOADED)
    assert of_kind(tiny, "image").is_pass
    assert is_known(tester(), image)


REQUIREMENTS: dict[str, tuple[tuple[Gpu, ...], str, str]] = {
    "nothing": ((H100,), "570.86.10", ""),
    "no GPU": ((), "570.86.10", "no NVIDIA driver"),
    "busy": ((BUSY,), "570.86.10", "no GPU has 8 GB free"),
    "driver too old": ((H100,), "470.82.01", "driver 470.82.01 is too old"),
    "no code for it": ((K80,), "570.86.10", "neither machine code nor PTX"),
    "unknown form of driver version": ((H100,), "bogus", ""),
}


@pytest.mark.parametrize(("present", "driver", "reason"), REQUIREMENTS.values(), ids=REQUIREMENTS.keys())
@pytest.mark.usefixtures("on_gpu", "child")
def test_gpu_required(
    image: PlannedImage, tester: MakeTester, known: Callable[..., None],
    present: tuple[Gpu, ...], driver: str, reason: str,
) -> None:  # fmt: skip
    known(builds={"quartz[cuda]": {"0.5.3": Build(cuda="12.9", architectures=["sm_90"], source="made up")}})
    required, auto = (tester(*present, mode=mode, driver=driver) for mode in (gpus.REQUIRE, gpus.AUTO))
    if not reason:
        required.check([image])
        return
    for step in (lambda: required.check([image]), lambda: required.test(image, LOADED)):
        with pytest.raises(ImageTestError, match=f"^{CELL}: {REQUIRED}: .*{reason}"):
            step()
    auto.check([image])
    assert reason in auto.test(image, LOADED).gpu_status


def test_packages_that_only_tests_need_are_named(
    image: PlannedImage, tester: MakeTester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are an extra: `verify`, `release` and `status` do not need them."""
    tester().check([image])
    for module in ("xdist", "websocket"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        ImageTestError, match=r"packages that are not installed: websocket-client, pytest-xdist$"
    ) as caught:
        tester().check([image])
    assert "extra `images`" in caught.value.hint


@pytest.mark.usefixtures("child")
def test_gpu_required_of_an_image_without_gpu_tests(image: PlannedImage, tester: MakeTester) -> None:
    with pytest.raises(ImageTestError, match=r"tests/gpu/test_quartz.py is missing$") as caught:
        tester(H100, mode=gpus.REQUIRE).check([image])
    assert caught.value.hint == "Write this test. `--gpu auto` builds without GPU tests, as `gpu: not run`."
    status = tester(H100).test(image, LOADED).gpu_status
    assert status == "not run (no GPU test: tests/gpu/test_quartz.py is missing)"


@pytest.mark.usefixtures("on_gpu")
def test_an_image_for_the_cpu_has_no_gpu_tests(image: PlannedImage, child: type[Child], tester: MakeTester) -> None:
    image = replace(image, cell=replace(image.cell, cuda="cpu"))
    required = tester(H100, mode=gpus.REQUIRE)
    required.check([image])
    coverage = required.test(image, LOADED)
    assert (coverage.gpu, len(child.runs)) == ("not run", 1)
    assert is_known(required, image)


@pytest.mark.usefixtures("child")
def test_evidence_without_a_gpu_is_not_enough_where_there_is_one(
    tiny: Project, image: PlannedImage, tester: MakeTester, on_gpu: Path
) -> None:
    tester().test(image, LOADED)
    proof = of_kind(tiny, "image")
    assert is_known(tester(), image)
    assert is_known(tester(BUSY), image)
    assert is_known(tester(H100, mode=gpus.OFF), image)
    assert not is_known(tester(H100), image)
    assert not is_known(tester(H100, mode=gpus.REQUIRE), image)
    tester(H100).test(image, LOADED)
    assert is_known(tester(mode=gpus.OFF), image)
    on_gpu.unlink()
    results.write_evidence(tiny.state, proof.model_copy(update={"suite": dict(Suite.of(tiny.root).files)}))
    assert is_known(tester(H100), image)


def test_the_description_of_the_image_is_json(image: PlannedImage) -> None:
    description = describe(image, ID, "/checkout")
    assert json.loads(json.dumps(description)) == description
    assert description["image_id"] == ID
    assert description["wheels"] == {wheel.name: wheel.version for wheel in image.wheels}
    assert description["cuda_wheels"] == ["nvidia-cuda-runtime-cu12", "nvidia-sums-cu12"]


# ---- by a command

REPORT = {"driver": "570.86.10", "devices": [{"name": "NVIDIA H100", "capability": "9.0"}], "results": []}
FOUND = GpuResults(
    run="",
    tests={},
    kernel="6.1.0",
    inventory={"var/lib/dpkg/status": "a" * 64},
    report=ChecksReport.model_validate(REPORT),
)
TARGET = StagedTarget(reference="registry.example.test/staging/quartz@sha256:0", inventory=FOUND.inventory)


class NoEngine(FakeEngine):
    """The client of an engine that does not run."""

    def info(self) -> EngineInfo:
        raise EngineError("Docker Engine is not running")


class FoundCommand(GpuCommand):
    """A command that returns FOUND."""

    def run(self, *_: object) -> GpuResults:
        return FOUND


@pytest.fixture
def by_command(tiny: Project, on_gpu: Path, console: MemoryConsole) -> image_tests.Tester:
    """The tester of a machine without an engine and a GPU."""
    command = FoundCommand(["srun", "--token=abcdef", "{image}", "{command}"], (), tiny.root)
    return image_tests.Tester(new_run(tiny, engine=NoEngine(), console=console), gpu_command=command)


def image_proof(tiny: Project, image: PlannedImage) -> Coverage:
    """The evidence of the machine that built the image."""
    return coverage_of([Proof(evidence=passing_evidence(tiny.root, image, LOADED.digest), signer="builder")])


def test_a_command_runs_the_gpu_tests_without_an_engine(
    tiny: Project, image: PlannedImage, child: type[Child], by_command: image_tests.Tester
) -> None:
    by_command.check([image])
    known = image_proof(tiny, image)
    assert not by_command.is_complete(image, known)
    assert by_command.test(image, LOADED, known, TARGET).gpu == "passed"
    assert child.runs == [["test_quartz"]]
    machine = dict(of_kind(tiny, "gpu").machine)
    assert machine.pop("inventory").startswith("sha256:")
    assert machine == {
        "command": "srun '--token=***' '{image}' '{command}'", "kernel": "6.1.0", "gpu": "NVIDIA H100", "gpus": "1",
        "driver": "570.86.10",
    }  # fmt: skip
    assert by_command.is_complete(image, coverage_of([*known.reports, *by_command.coverage(image, LOADED).reports]))


def test_a_check_that_failed_in_a_command_is_a_failure(
    tiny: Project, image: PlannedImage, child: type[Child], by_command: image_tests.Tester
) -> None:
    child.results, child.status = {node("test_quartz", "gpu"): "failed"}, 1
    with pytest.raises(ImageTestError, match="1 of 1 tests failed") as caught:
        by_command.test(image, LOADED, image_proof(tiny, image), TARGET)
    assert "docker" not in caught.value.hint
    assert not of_kind(tiny, "gpu").is_pass


def test_a_command_runs_no_image_tests(image: PlannedImage, child: type[Child], by_command: image_tests.Tester) -> None:
    with pytest.raises(ImageTestError, match=r"its image tests have not passed, and .* runs only GPU tests") as caught:
        by_command.test(image, LOADED, target=TARGET)
    assert "builder test --staged STAMP --gpu off" in caught.value.hint
    assert child.runs == []


@pytest.mark.usefixtures("child")
def test_a_command_on_a_gpu_that_the_image_does_not_support_is_no_failure_of_the_image(
    tiny: Project, image: PlannedImage, by_command: image_tests.Tester, known: Callable[..., None]
) -> None:
    """Evidence of it would hold back the release until that GPU passes."""
    known(drivers={"12": Driver(minimum="580.65.06", source="made up")})
    with pytest.raises(ImageTestError, match="its GPU tests ran on an unsuitable GPU: NVIDIA H100: driver 570"):
        by_command.test(image, LOADED, image_proof(tiny, image), TARGET)
    assert results.read_evidence(tiny.state, LOADED.digest) == []
