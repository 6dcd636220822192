"""Running an image's tests: what counts as passed, and what is kept of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from builder import evidence, gpu, imagetest, plan
from builder.errors import ImageTestError
from builder.gpu import Gpu
from builder.hide import Hider
from builder.imagetest import describe, outcome
from builder.plan import PlannedImage
from builder.project import Project
from builder.settings import ARCHITECTURES_LABEL, CUDA_LABEL, DRIVER_LABEL
from builder.view import View
from tests.unit.fakes import INFO, FakeEngine, MemoryConsole, evidence_of

CELL = "qz-0.5-cu129-py311-board"
ID = "sha256:" + "b" * 64
Lines = list[tuple[str, str]]


def report(path: Path, lines: Lines) -> Path:
    path.write_text("".join(json.dumps({"test": test, "outcome": result}) + "\n" for test, result in lines))
    return path


OUTCOMES: dict[str, tuple[Lines, int, list[str], list[str]]] = {
    "passed": ([("a", "passed"), ("b", "passed")], 0, ["a", "b"], []),
    "failed": ([("a", "passed"), ("b", "failed")], 1, ["a"], ["b"]),
    "skipped": ([("a", "passed"), ("b", "skipped")], 0, ["a"], ["b"]),
    "all skipped": ([("b", "skipped")], 0, [], ["b"]),
    "failed in tear-down": ([("a", "passed"), ("a", "failed")], 1, [], ["a"]),
    "failed in set-up": ([("a", "failed")], 1, [], ["a"]),
    "fails, then passes": ([("a", "failed"), ("a", "passed")], 0, [], ["a"]),
    "none collected": ([], 5, [], ["the test run itself (pytest ended with status 5)"]),
    "collection error": ([("a", "passed")], 2, ["a"], ["the test run itself (pytest ended with status 2)"]),
    "nothing to check": ([("a", "passed"), ("b", "not applicable")], 0, ["a"], []),
    "nothing to check, then failed in tear-down": ([("b", "not applicable"), ("b", "failed")], 1, [], ["b"]),
    "killed": ([("a", "passed")], -9, ["a"], ["the test run itself (pytest ended with status -9)"]),
}


@pytest.mark.parametrize(("lines", "status", "passed", "failed"), OUTCOMES.values(), ids=OUTCOMES.keys())
def test_outcome(tmp_path: Path, lines: Lines, status: int, passed: list[str], failed: list[str]) -> None:
    assert outcome(report(tmp_path / "r", lines), status) == (passed, failed)


def test_outcome_without_a_report(tmp_path: Path) -> None:
    assert outcome(tmp_path / "absent", 3) == ([], ["the test run itself (pytest ended with status 3)"])
    assert outcome(tmp_path / "absent", 0) == ([], [])


def test_outcome_of_a_run_that_was_killed_while_it_wrote(tmp_path: Path) -> None:
    path = report(tmp_path / "r", [("a", "passed")])
    path.write_text(path.read_text() + '{"test": "b", "out')
    passed, failed = outcome(path, -9)
    assert passed == ["a"]
    assert len(failed) == 1


@pytest.fixture
def image(tiny: Project) -> PlannedImage:
    made = plan.make_locked(tiny, tiny.select([CELL])).images[0]
    for name in made.components:
        path = tiny.root / f"tests/images/test_{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    return made


def node(stem: str, folder: str = "images") -> str:
    """The id of the one test of a file."""
    return f"tests/{folder}/{stem}.py::test"


class Child:
    """Stands in for the pytest process: reports what `results` has for the file that it is to run."""

    results: ClassVar[Mapping[str, str]] = {}
    status = 0
    runs: ClassVar[list[list[str]]] = []
    gpus: ClassVar[list[str]] = []

    def __init__(self, command: list[str], *, env: Mapping[str, str], **_: object) -> None:
        paths = [Path(word) for word in command if word.endswith(".py")]
        files = [path.stem for path in paths]
        self.runs.append(files)
        report(
            Path(env["IMAGE_TEST_REPORT"]),
            [(node(path.stem, path.parent.name), self.results.get(path.stem, "passed")) for path in paths],
        )
        self.gpus.append(env["IMAGE_TEST_GPUS"])
        if self.gpus[-1]:
            Path(env["IMAGE_TEST_FIGURES"]).write_text(json.dumps({"driver": "570.86.10"}) + "\n")
        self.subject = json.loads(Path(env["IMAGE_TEST_SUBJECT"]).read_text())
        self.stdout = iter(f"{file}::test PASSED\n" for file in files)

    def wait(self) -> int:
        return self.status

    def kill(self) -> None:
        return


@pytest.fixture
def child(monkeypatch: pytest.MonkeyPatch) -> type[Child]:
    class Fresh(Child):
        runs: ClassVar[list[list[str]]] = []
        gpus: ClassVar[list[str]] = []

    monkeypatch.setattr("subprocess.Popen", Fresh)
    return Fresh


MakeTester = Callable[..., imagetest.Tester]


@pytest.fixture
def tester(tiny: Project, image: PlannedImage, monkeypatch: pytest.MonkeyPatch, console: MemoryConsole) -> MakeTester:
    """A tester on a machine with so many GPUs; the engine has NVIDIA's runtime if it has one."""
    assert image.id == CELL

    def make(
        *gpus: Gpu, runtime: bool = True, mode: gpu.Mode = gpu.AUTO, driver: str = "570.86.10"
    ) -> imagetest.Tester:
        info = replace(INFO, runtimes=("nvidia", "runc") if gpus and runtime else ("runc",))
        pool = gpu.Pool(ask=lambda: (driver if gpus else "", gpus), poll=0.001)
        return imagetest.Tester(FakeEngine(info=info), tiny, View(console), Hider(), gpu_mode=mode, pool=pool)

    return make


def test_a_pass_is_kept(tiny: Project, image: PlannedImage, child: type[Child], tester: MakeTester) -> None:
    found = tester().test(image, ID)
    assert found.is_pass
    assert found.gpu == "not run"
    files = [f"test_{name}" for name in ("base", "python", "cuda", "quartz", "board")]
    assert found.passed == tuple(node(file) for file in files)
    assert child.runs == [files]
    assert evidence.read(tiny.state, ID) == found
    assert (tiny.logs / f"{CELL}.test.log").read_text().count("PASSED") == 5
    assert tester().known(image, ID) == found


@pytest.mark.parametrize(("result", "status"), [("failed", 1), ("skipped", 0)])
def test_what_did_not_pass(
    tiny: Project, image: PlannedImage, child: type[Child], tester: MakeTester, result: str, status: int
) -> None:
    child.results, child.status = {"test_cuda": result}, status
    with pytest.raises(ImageTestError, match=rf"^{CELL}: 1 of 5 tests failed\n  {node('test_cuda')}$") as caught:
        tester().test(image, ID)
    assert f".builder/logs/{CELL}.test.log" in caught.value.hint
    assert f"docker run --rm -it {'b' * 12} bash" in caught.value.hint
    found = evidence.read(tiny.state, ID)
    assert found
    assert not found.is_pass


def test_a_component_without_tests(tiny: Project, image: PlannedImage, child: type[Child], tester: MakeTester) -> None:
    (tiny.root / "tests/images/test_board.py").unlink()
    with pytest.raises(ImageTestError, match=r"no tests for a component: tests/images/test_board.py"):
        tester().test(image, ID)
    assert child.runs == []
    assert evidence.read(tiny.state, ID) is None


def test_a_run_that_collected_nothing_is_no_pass(
    image: PlannedImage, child: type[Child], tester: MakeTester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imagetest, "outcome", lambda *_: ([], []))
    with pytest.raises(ImageTestError, match=r"5 of 5 tests failed\n  tests/images/test_base.py: no test\n"):
        tester().test(image, ID)
    assert len(child.runs) == 1


def test_a_component_that_had_no_test_is_no_pass(
    image: PlannedImage, child: type[Child], tester: MakeTester, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [node(f"test_{name}") for name in ("base", "python", "cuda", "quartz")]
    monkeypatch.setattr(imagetest, "outcome", lambda *_: (others, []))
    with pytest.raises(ImageTestError, match=r"1 of 5 tests failed\n  tests/images/test_board.py: no test$"):
        tester().test(image, ID)
    assert child.runs


H100 = Gpu(name="NVIDIA H100", capability="9.0", memory=80 * 10**9, free=70 * 10**9, index=1, uuid="GPU-1")
BUSY = replace(H100, free=1, index=0, uuid="GPU-0")
REQUIRED = "--gpu require, and GPU tests cannot run"
GPU_CASES: dict[str, tuple[tuple[Gpu, ...], bool, str, str, str]] = {
    "no GPU": ((), True, "passed", "not run", "no NVIDIA driver answers on this machine"),
    "GPU without the engine's runtime": ((H100,), False, "passed", "not run", "no NVIDIA runtime"),
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
    path = tiny.root / "tests/gpu/test_quartz.py"
    path.parent.mkdir(parents=True)
    path.write_text("")
    return path


@pytest.mark.parametrize(("gpus", "runtime", "result", "state", "reason"), GPU_CASES.values(), ids=GPU_CASES.keys())
@pytest.mark.usefixtures("on_gpu")
def test_gpu(
    tiny: Project, image: PlannedImage, child: type[Child], tester: MakeTester,
    gpus: tuple[Gpu, ...], runtime: bool, result: str, state: str, reason: str,
) -> None:  # fmt: skip
    made = tester(*gpus, runtime=runtime)
    if state != "not run":
        child.results = {"test_quartz": result}
    if state == "failed":
        with pytest.raises(ImageTestError):
            made.test(image, ID)
    else:
        made.test(image, ID)
    found = evidence.read(tiny.state, ID)
    assert found
    assert found.gpu == state
    assert reason in found.gpu_reason
    assert bool(found.gpu_reason) is bool(reason)
    assert child.gpus == ([""] if state == "not run" else ["", "GPU-1"])
    assert found.not_applicable == ((node("test_quartz", "gpu"),) if result == "not applicable" else ())
    measured = evidence.figures_path(tiny.state, ID)
    assert measured.exists() is (state != "not run")


@pytest.mark.usefixtures("on_gpu", "child")
def test_what_a_gpu_said_of_an_image_stays_said(tiny: Project, image: PlannedImage, tester: MakeTester) -> None:
    first = tester(H100).test(image, ID)
    again = tester(H100, mode=gpu.OFF).test(image, ID)
    assert (again.gpu, again.gpu_reason) == ("passed", "")
    assert sorted(again.passed) == sorted(first.passed)
    assert json.loads(evidence.figures_path(tiny.state, ID).read_text()) == [{"driver": "570.86.10"}]


@pytest.mark.usefixtures("on_gpu")
def test_a_failure_on_a_gpu_is_not_forgotten_where_none_is_free(
    image: PlannedImage, child: type[Child], tester: MakeTester, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = image.cell.framework
    monkeypatch.setattr(child, "results", {f"test_{kind}": "failed"})
    with pytest.raises(ImageTestError):
        tester(H100).test(image, ID)
    monkeypatch.setattr(child, "results", {})
    with pytest.raises(ImageTestError, match=f"tests/gpu/test_{kind}"):
        tester(H100, mode=gpu.OFF).test(image, ID)


@pytest.mark.usefixtures("on_gpu")
def test_gpu_off(image: PlannedImage, child: type[Child], tester: MakeTester) -> None:
    found = tester(H100, mode=gpu.OFF).test(image, ID)
    assert (found.gpu, found.gpu_reason, len(child.runs)) == ("not run", "--gpu off", 1)
    assert found.is_pass


WANTS: dict[str, tuple[tuple[Gpu, ...], str, dict[str, str], str]] = {
    "nothing": ((H100,), "570.86.10", {}, ""),
    "no GPU": ((), "570.86.10", {}, "no NVIDIA driver"),
    "busy": ((BUSY,), "570.86.10", {}, "no GPU has 8 GB free"),
    "driver too old": ((H100,), "470.82.01", {DRIVER_LABEL: "525.60.13"}, "driver 470.82.01 is too old"),
    "no code for it": ((H100,), "570.86.10", {ARCHITECTURES_LABEL: "sm_70"}, "neither machine code nor PTX"),
    "a driver named in no way that we know": ((H100,), "bogus", {DRIVER_LABEL: "525.60.13"}, ""),
}


@pytest.mark.parametrize(("gpus", "driver", "labels", "reason"), WANTS.values(), ids=WANTS.keys())
@pytest.mark.usefixtures("on_gpu", "child")
def test_gpu_required(
    image: PlannedImage, tester: MakeTester,
    gpus: tuple[Gpu, ...], driver: str, labels: dict[str, str], reason: str,
) -> None:  # fmt: skip
    image = replace(image, settings=replace(image.settings, labels={CUDA_LABEL: "12.9", **labels}))
    made = tester(*gpus, mode=gpu.REQUIRE, driver=driver)
    if not reason:
        made.check([image])
        return
    with pytest.raises(ImageTestError, match=f"^{CELL}: {REQUIRED}: .*{reason}"):
        made.check([image])
    with pytest.raises(ImageTestError, match=f"^{CELL}: {REQUIRED}: .*{reason}"):
        made.test(image, ID)
    tester(*gpus, driver=driver).check([image])
    assert reason in tester(*gpus, driver=driver).test(image, ID).gpu_reason


@pytest.mark.usefixtures("child")
def test_gpu_required_of_an_image_without_gpu_tests(image: PlannedImage, tester: MakeTester) -> None:
    with pytest.raises(ImageTestError, match=r"tests/gpu/test_quartz.py is missing$") as caught:
        tester(H100, mode=gpu.REQUIRE).check([image])
    assert "--gpu auto" in caught.value.hint
    assert tester(H100).test(image, ID).gpu_reason == "no GPU test: tests/gpu/test_quartz.py is missing"


@pytest.mark.usefixtures("on_gpu")
def test_an_image_for_the_cpu_has_no_gpu_tests(image: PlannedImage, child: type[Child], tester: MakeTester) -> None:
    image = replace(image, cell=replace(image.cell, cuda="cpu"))
    made = tester(H100, mode=gpu.REQUIRE)
    made.check([image])
    found = made.test(image, ID)
    assert (found.gpu, len(child.runs)) == ("not run", 1)
    assert made.known(image, ID) == found


@pytest.mark.usefixtures("on_gpu")
def test_images_that_lack_the_same_are_named_together(image: PlannedImage, tester: MakeTester) -> None:
    other = replace(image, cell=replace(image.cell, variant="plain"))
    with pytest.raises(ImageTestError, match=rf"^{CELL}, {other.id}: {REQUIRED}"):
        tester(mode=gpu.REQUIRE).check([image, other])


def stale(tiny: Project, image: PlannedImage, change: str) -> dict[str, Any]:
    if change == "tests":
        (tiny.root / "tests/images/test_base.py").write_text("assert True")
    if change == "plan":
        return {"plan": "sha256:other"}
    if change == "damaged":
        evidence.path(tiny.state, ID).write_text("{")
    return {}


@pytest.mark.parametrize("change", ["tests", "plan", "damaged"])
@pytest.mark.usefixtures("child")
def test_evidence_that_no_longer_counts(tiny: Project, image: PlannedImage, tester: MakeTester, change: str) -> None:
    found = tester().test(image, ID)
    if changes := stale(tiny, image, change):
        evidence.write(tiny.state, found.model_copy(update=changes))
    assert tester().known(image, ID) is None


def test_evidence_without_gpu_does_not_count_where_a_gpu_is(
    tiny: Project, image: PlannedImage, child: type[Child], tester: MakeTester, on_gpu: Path
) -> None:
    found = tester().test(image, ID)
    assert child.runs
    assert tester().known(image, ID) == found
    assert tester(BUSY).known(image, ID) == found
    assert tester(H100, mode=gpu.OFF).known(image, ID) == found
    assert tester(H100).known(image, ID) is None
    assert tester(H100, mode=gpu.REQUIRE).known(image, ID) is None
    passed = tester(H100).test(image, ID)
    assert tester(mode=gpu.OFF).known(image, ID) == passed
    on_gpu.unlink()
    evidence.write(tiny.state, found.model_copy(update={"suite": evidence.suite_digest(tiny.root)}))
    assert tester(H100).known(image, ID) is not None


def test_what_the_tests_are_told(image: PlannedImage) -> None:
    told = describe(image, ID, "/checkout")
    assert json.loads(json.dumps(told)) == told
    assert told["image_id"] == ID
    assert told["wheels"] == {wheel.name: wheel.version for wheel in image.wheels}
    assert told["cuda_wheels"] == ["nvidia-cuda-runtime-cu12", "nvidia-sums-cu12"]
    assert evidence_of(image, ID).cell == told["id"]
