"""From plan to tagged images, with a fake engine and fake tests: order, what is not done again, failures."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from builder.build.context import LoadedImage, Origin, RunContext
from builder.common import errors
from builder.common.console import View
from builder.common.errors import BuildError, DiskError, EngineError, FetchError, ImageTestError, RegistryError
from builder.evidence.results import Evidence, Report
from builder.host import Host
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.plan import PlannedImage
from builder.steps import images, test
from builder.steps.images import Options, Outcome
from builder.steps.test import StagedImages
from tests.fakes.engine import INFO, FakeEngine, FakeProvider, FakeTester, MemoryConsole

FIRST, SECOND = "em-1.10-cu1210-py311", "qz-0.5-cu129-py311-board"


@dataclass
class ModeTester(FakeTester):
    """Keeps its options; `reason` is why GPU tests cannot run."""

    options: dict[str, Any] = field(default_factory=dict)
    reason: str = ""

    def check(self, images: Sequence[PlannedImage]) -> None:
        self.fake.calls.append(f"check {len(images)}")
        if self.reason:
            raise ImageTestError(self.reason)


class BuildBench:
    """The tiny project, with fakes around it."""

    def __init__(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = FakeEngine()
        self.method = FakeProvider(self.engine)
        self.tester = ModeTester(self.engine)
        self.console = MemoryConsole()
        self.context = RunContext(engine=self.engine, project=project, host=Host(), view=View(self.console))
        self.plan = plan.make_locked_plan(project, project.select([FIRST, SECOND]))
        monkeypatch.setattr(images, "Tester", self._tester)
        monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")

    def _tester(self, _: RunContext, **options: Any) -> FakeTester:
        self.tester.options = options
        return self.tester

    def run(self, *, test: bool = True, jobs: int = 2) -> str:
        """The summary. Raises what failed."""
        return self._summary(images.make_images(self.context, self.method, self.plan, Options(jobs=jobs, test=test)))

    def retest(self) -> str:
        return self._summary(images.retest(self.context, self.method, self.plan, Options(jobs=1)))

    def _summary(self, outcomes: Sequence[Outcome]) -> str:
        self.outcomes = outcomes
        if failure := images.failure(outcomes):
            raise failure
        return images.summary(outcomes)

    def calls(self, *kinds: str) -> list[str]:
        """The calls of these kinds since the last call of this function."""
        calls = [call for call in self.engine.calls if call.split()[0] in kinds]
        self.engine.calls.clear()
        return calls

    def references(self, cell: str) -> tuple[str, ...]:
        return next(image.references for image in self.plan.images if image.id == cell)


def failure(cell: str) -> BuildError:
    return BuildError(f"{cell}: failed at the build", hint="Full log: x")


ALL = ("prepare", "build", "test", "tag", "close")


@pytest.fixture
def bench(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> BuildBench:
    return BuildBench(tiny, monkeypatch)


def test_build_test_tag(bench: BuildBench) -> None:
    assert bench.run(jobs=1) == "2 images built, tested and tagged"
    assert bench.engine.calls[0] == "sweep"
    expected = [f"prepare {FIRST} {SECOND}"]
    for cell in (FIRST, SECOND):
        tags = [f"tag {reference}" for reference in reversed(bench.references(cell))]
        expected += [f"build {cell}", f"test {cell}", *tags]
    assert bench.calls(*ALL) == [*expected, "close"]
    # The full tag says that everything is done, so it is set last.
    assert expected[-1] == "tag registry.example.test:5000/team/quartz-cuda:0.5.3-cu129-py311-board"
    assert f"{SECOND}: done" in bench.console.text
    assert "1 test passed, gpu: not run" in bench.console.text


def test_images_that_this_machine_can_neither_run_nor_emulate_are_not_built(
    bench: BuildBench, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("builder.common.machine.BINFMT", tmp_path)
    bench.engine.settings = replace(INFO, architecture="aarch64", is_local=True)
    with pytest.raises(
        EngineError, match=rf"{FIRST}, {SECOND}: this machine \(arm64\) cannot run programs for amd64"
    ) as caught:
        bench.run()
    assert "apt-get install qemu-user-static" in caught.value.hint
    assert bench.calls("prepare", "build") == []
    (tmp_path / "qemu-x86_64").write_text("enabled\nflags: OCF\n")
    assert bench.run() == "2 images built, tested and tagged"


def test_the_method_records_an_image_when_all_its_tags_are_set(bench: BuildBench) -> None:
    bench.tester.failing = frozenset({FIRST})
    with pytest.raises(ImageTestError):
        bench.run(jobs=1)
    assert bench.calls("tag", "name")[-2:] == [f"tag {bench.references(SECOND)[0]}", f"name {SECOND}"]
    bench.tester.failing = frozenset()
    bench.run(test=False)
    assert bench.calls("tag", "name") == []
    bench.run()
    assert sorted(bench.calls("name")) == [f"name {FIRST}", f"name {SECOND}"]


@pytest.mark.parametrize("lost", [False, True])
def test_the_method_records_images_that_were_up_to_date(bench: BuildBench, lost: bool) -> None:
    """Images that were built again and did not change kept the names of untested ones."""
    bench.run()
    bench.calls("name")
    bench.method.lost = lost
    bench.run()
    assert sorted(bench.calls("name")) == [f"name {FIRST}", f"name {SECOND}"]


Done = tuple[Origin, bool, bool]  # origin, tested, tagged
BUILT: Done = ("built", True, True)
LOADED: Done = ("loaded", True, True)
SUMMARIES: list[tuple[list[Done], str]] = [
    ([], "3 images up to date"),
    ([BUILT], "1 image built, tested and tagged. 2 images up to date"),
    ([LOADED] * 3, "3 images loaded from the store, tested and tagged"),
    ([("loaded", False, True)] * 3, "3 images loaded from the store and tagged"),
    ([("present", False, True)] * 3, "3 images tagged"),
    (
        [("loaded", False, False), ("built", False, False)],
        "2 images: 1 built, 1 loaded from the store. 1 image up to date",
    ),
    ([BUILT, LOADED], "2 images tagged: 1 built, 1 loaded from the store; 2 tested. 1 image up to date"),
    ([BUILT, BUILT, ("present", False, True)], "3 images tagged: 2 built, 1 already built; 2 tested"),
    ([("built", False, False), BUILT], "2 images built: 1 tested; 1 tagged. 1 image up to date"),
]


@pytest.mark.parametrize(("done", "text"), SUMMARIES, ids=lambda value: value if isinstance(value, str) else "")
def test_the_summary_of_several_outcomes(bench: BuildBench, done: list[Done], text: str) -> None:
    [image, *_] = bench.plan.images
    outcomes = [
        Outcome(image=image, loaded=LoadedImage(id="i", digest="i", origin=origin), tested=tested, tagged=tagged)
        for origin, tested, tagged in done
    ]
    assert images.summary([*outcomes, *[Outcome(image=image)] * (3 - len(done))]) == text


def test_the_summary_of_failures(bench: BuildBench) -> None:
    [image, *_] = bench.plan.images
    outcomes = [Outcome(image=image), Outcome(image=image, error=failure(FIRST))]
    assert images.summary(outcomes) == "1 image up to date. 1 image failed"
    assert images.summary([]) == "no images"


def test_outcomes_as_json(bench: BuildBench) -> None:
    bench.method.broken[FIRST] = failure(FIRST)
    with pytest.raises(BuildError):
        bench.run()
    failed, passed = (outcome.as_data() for outcome in bench.outcomes)
    assert json.loads(json.dumps(failed)) == failed | {"cell": FIRST, "image": "", "tests": None}
    assert failed["error"] == f"{FIRST}: failed at the build"
    assert (passed["error"], passed["made"], passed["tested"], passed["tagged"]) == (None, "built", True, True)
    assert passed["tests"] == {"passed": 1, "failed": [], "gpu": "not run"}
    assert passed["references"] == list(bench.references(SECOND))
    assert passed["seconds"] >= 0


def test_an_unchanged_image_is_not_tested_again(bench: BuildBench) -> None:
    """As after the engine lost it."""
    bench.run()
    bench.calls(*ALL)
    bench.method.lost = True
    assert bench.run(jobs=1) == "2 images built"
    assert bench.calls(*ALL) == [f"prepare {FIRST} {SECOND}", f"build {FIRST}", f"build {SECOND}", "close"]
    line = bench.console.text.splitlines()[-2]
    assert line.startswith(f"{FIRST}: done")
    assert line.endswith(", unchanged")


def test_only_missing_steps_are_run(bench: BuildBench) -> None:
    """As after a kill: a tag was not set yet, a test not run yet."""
    bench.run()
    bench.calls(*ALL)
    del bench.engine.known[bench.references(FIRST)[0]]
    bench.run()
    assert bench.calls("build", "test", "tag") == [
        f"tag {reference}" for reference in reversed(bench.references(FIRST))
    ]
    bench.tester.results.clear()
    bench.run(jobs=1)
    assert bench.calls("prepare", "build", "test") == [f"test {FIRST}", f"test {SECOND}"]


def test_a_failed_test_gives_no_tag(bench: BuildBench) -> None:
    bench.tester.failing = frozenset({FIRST})
    with pytest.raises(ImageTestError, match=rf"^{FIRST}: 1 of 2 tests failed"):
        bench.run(jobs=1)
    assert bench.calls("test", "tag") == [
        f"test {FIRST}",
        f"test {SECOND}",
        *(f"tag {reference}" for reference in reversed(bench.references(SECOND))),
    ]
    assert f"{FIRST}: failed" in bench.console.text
    assert f"{SECOND}: done" in bench.console.text


def test_a_failed_build_does_not_stop_the_others_and_a_rerun_continues(bench: BuildBench) -> None:
    bench.method.broken[FIRST] = failure(FIRST)
    with pytest.raises(BuildError, match=rf"^{FIRST}: failed at the build"):
        bench.run()
    assert f"tag {bench.references(SECOND)[0]}" in bench.calls("tag")
    bench.method.broken.clear()
    assert bench.run() == "1 image built, tested and tagged. 1 image up to date"
    assert bench.calls("prepare", "build") == [f"prepare {FIRST}", f"build {FIRST}"]


def test_failures_are_in_the_order_of_the_plan(bench: BuildBench) -> None:
    """The error and the exit code are the same in every run, whichever image fails first."""
    bench.method.broken = {FIRST: failure(FIRST), SECOND: EngineError("connection reset by peer")}
    second_ended = threading.Event()
    original = bench.context.view.end

    def end(image: str, state: str, note: str = "") -> None:
        original(image, state, note)
        if image == SECOND:
            second_ended.set()

    def wait(cell: str) -> None:
        if cell == FIRST:
            assert second_ended.wait(10)

    bench.context.view.end = end  # type: ignore[method-assign]
    bench.method.before = wait
    with pytest.raises(BuildError) as caught:
        bench.run(jobs=2)
    assert str(caught.value).splitlines() == [
        "2 images failed",
        f"{FIRST}: failed at the build",
        "  -> Full log: x",
        f"{SECOND}: connection reset by peer",
    ]
    assert bench.calls(*ALL)[-1] == "close"


def test_an_image_whose_layers_are_complete_goes_first(bench: BuildBench) -> None:
    """All slots waited for operating systems of other images."""
    layers: Future[None] = Future()
    bench.method.layers[FIRST] = layers
    bench.method.before = lambda step: layers.set_result(None) if step == SECOND else None
    bench.run(jobs=1)
    assert bench.calls("build", "test") == [f"build {SECOND}", f"test {SECOND}", f"build {FIRST}", f"test {FIRST}"]


def test_images_that_are_up_to_date_do_not_fail_with_the_others(bench: BuildBench) -> None:
    """Too little disk space for one image reported all images as failed."""
    bench.run()
    del bench.method.made[FIRST]
    bench.method.before = raises(DiskError("building 1 image takes about 9 GB"), "prepare")
    with pytest.raises(DiskError):
        bench.run()
    assert [outcome.is_up_to_date for outcome in bench.outcomes] == [False, True]
    assert bench.calls("build") == [f"build {FIRST}", f"build {SECOND}"], "those of the first run"


def test_a_failure_that_images_share_is_shown_once(bench: BuildBench) -> None:
    bench.method.broken = dict.fromkeys(
        (SECOND, FIRST), FetchError("some.whl: the index does not answer", hint="run again")
    )
    with pytest.raises(FetchError) as caught:
        bench.run()
    assert str(caught.value) == f"{FIRST}, {SECOND}: some.whl: the index does not answer"
    assert caught.value.hint == "run again"


def test_the_hint_for_a_deleted_wheel_names_a_cell_of_each_group(tiny: Project) -> None:
    """The other cells of the group share its lock; a command for all cells would change the locks of others too."""
    error = FetchError("some.whl: not listed by the index", hint="It was withdrawn.", package="some")
    ids = [FIRST, "qz-0.5-cu129-py311", SECOND]
    planned = plan.make_locked_plan(tiny, tiny.select(ids))
    failure = images.failure([Outcome(image=image, error=error) for image in planned.images])
    assert isinstance(failure, FetchError)
    assert str(failure) == f"{', '.join(ids)}: some.whl: not listed by the index"
    command = f"builder lock --upgrade-package some {FIRST} qz-0.5-cu129-py311 && builder render"
    assert failure.hint == f"It was withdrawn. Choose another version: {command}"


def raises(error: BaseException, at: str) -> Callable[[str], None]:
    """For `before` of the method: raises at one image, or in `prepare`."""

    def fail(step: str) -> None:
        if step == at:
            raise error

    return fail


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()], ids=["internal error", "Ctrl-C"])
def test_an_internal_error_or_an_interrupt_stops_running_tests(bench: BuildBench, error: BaseException) -> None:
    bench.method.before = raises(error, FIRST)
    with pytest.raises(type(error)):
        bench.run(jobs=1)
    assert bench.tester.stopped == 1
    assert bench.calls("tag", "close") == ["close"]


def test_after_an_interrupt_nothing_is_started(bench: BuildBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the first image is built and the second waits."""
    is_building, is_interrupted = threading.Event(), threading.Event()

    def before(step: str) -> None:
        if step == FIRST:
            is_building.set()
            assert is_interrupted.wait(10)

    def wait(*_: object, **__: object) -> None:
        assert is_building.wait(10)
        raise KeyboardInterrupt

    bench.method.before = before
    monkeypatch.setattr(images, "wait", wait)
    monkeypatch.setattr(bench.tester, "stop", is_interrupted.set)
    others = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        bench.run(jobs=1)
    for thread in set(threading.enumerate()) - others:
        thread.join(10)
    assert bench.calls("build") == [f"build {FIRST}"]


@pytest.mark.parametrize(
    "error",
    [EngineError("no base"), ZeroDivisionError(), KeyboardInterrupt()],
    ids=["error", "internal error", "Ctrl-C"],
)
def test_the_method_is_closed_if_preparing_fails(bench: BuildBench, error: BaseException) -> None:
    bench.method.before = raises(error, "prepare")
    with pytest.raises(type(error)):
        bench.run()
    assert bench.calls(*ALL) == ["close"]


def test_an_error_of_the_file_system_is_a_failure_of_one_image(bench: BuildBench) -> None:
    bench.method.before = raises(OSError(28, "No space left on device"), FIRST)
    with pytest.raises(errors.DiskError, match="full"):
        bench.run()
    assert f"tag {bench.references(SECOND)[0]}" in bench.calls("tag")


@pytest.mark.parametrize("begin", [images.make_images, images.retest], ids=["images", "test"])
def test_required_gpu_tests_that_cannot_run_are_an_error_before_the_build(
    bench: BuildBench, begin: Callable[..., object]
) -> None:
    bench.tester.reason = "no driver"
    with pytest.raises(ImageTestError, match="no driver"):
        begin(bench.context, bench.method, bench.plan, Options(jobs=1, gpu_mode="require"))
    assert bench.tester.options["gpu_mode"] == "require"
    assert bench.calls(*ALL, "check") == ["check 2"]


def test_images_that_run_at_once_share_the_gpus(bench: BuildBench, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[int] = []
    monkeypatch.setattr("builder.compat.gpus.Pool", shares.append)
    bench.run(jobs=1)
    bench.run(jobs=9)
    assert shares == [1, 2]


def test_retest(bench: BuildBench) -> None:
    bench.run(test=False)
    bench.calls(*ALL)
    bench.retest()
    assert bench.retest() == "2 images tested"
    assert bench.calls(*ALL) == [f"test {cell}" for cell in (FIRST, SECOND, FIRST, SECOND)]


def test_an_image_that_is_not_built_cannot_be_tested(bench: BuildBench) -> None:
    with pytest.raises(EngineError, match="2 images failed") as caught:
        bench.retest()
    assert f"{FIRST}: not built\n  -> builder build {FIRST}" in str(caught.value)


def test_where_the_time_went() -> None:
    spent = {
        ("a", "testing"): 300.0,
        ("b", "testing"): 65.0,
        ("a", "loading"): 4.0,
        ("b", "loading"): 2.0,
        ("b", "assembling"): 4.9,
        ("os-bookworm-py3.11-123456", "building"): 40.0,
        ("os-trixie-py3.13-123456", "building"): 30.0,
        ("wheels", "5.3 GB to be fetched"): 48.0,
    }
    text = "testing 6 min 5 s, operating systems 70 s, wheels 48 s, loading 6.0 s"
    assert images.times(spent, {"a", "b"}) == text
    assert images.times({("a", "testing"): 4.9}, {"a"}) == ""


SMALL, LARGE = "qz-0.5-cu129-py311", "qz-0.5-cu129-py311-board"


def test_a_larger_image_leaves_the_thorough_tests_of_a_smaller_one_out(bench: BuildBench) -> None:
    bench.plan = plan.make_locked_plan(bench.context.project, bench.context.project.select([LARGE, SMALL]))
    bench.run(jobs=1)
    small, large = (next(each for each in bench.plan.images if each.id == cell) for cell in (SMALL, LARGE))
    assert bench.tester.thorough == {
        SMALL: frozenset(small.components),
        LARGE: frozenset(large.components) - frozenset(small.components),
    }


def test_an_image_that_is_made_alone_runs_all_its_tests(bench: BuildBench) -> None:
    bench.plan = plan.make_locked_plan(bench.context.project, bench.context.project.select([LARGE]))
    bench.run(jobs=1)
    assert bench.tester.thorough == {LARGE: frozenset(bench.plan.images[0].components)}


def test_an_image_of_a_dockerfile_runs_all_its_tests(bench: BuildBench) -> None:
    """Its layers are not those of the plan, even if there are as many."""
    bench.plan = plan.make_locked_plan(bench.context.project, bench.context.project.select([LARGE, SMALL]))
    bench.method.assembles = False
    bench.run(jobs=1)
    assert bench.tester.thorough == {image.id: frozenset(image.components) for image in bench.plan.images}


def test_an_image_that_is_tested_again_runs_all_its_tests(bench: BuildBench) -> None:
    bench.plan = plan.make_locked_plan(bench.context.project, bench.context.project.select([LARGE, SMALL]))
    bench.run(jobs=1)
    bench.retest()
    assert bench.tester.thorough == {image.id: frozenset(image.components) for image in bench.plan.images}


class UnreachableStaging(StagedImages):
    """Its registry does not respond when results are attached."""

    def __init__(self, method: FakeProvider) -> None:
        self.method = method

    def build(self, image: PlannedImage) -> LoadedImage:
        return self.method.build(image)

    def reports(self, image: PlannedImage) -> Sequence[Report]:
        return ()

    def attach_results(self, image: PlannedImage, loaded: LoadedImage) -> None:
        raise RegistryError(f"{image.id}: no response")


def test_a_failure_to_attach_results_does_not_hide_that_the_tests_failed(bench: BuildBench) -> None:
    """Only the registry's error was shown, with its exit code."""
    bench.tester.failing = frozenset({FIRST})
    outcomes = test.test_staged(bench.context, UnreachableStaging(bench.method), bench.plan, Options(jobs=1))
    first, second = (outcome.error for outcome in outcomes)
    assert isinstance(first, ImageTestError)
    assert f"{FIRST}: 1 of 2 tests failed\n  -> look\n{FIRST}: no response" in str(first)
    assert isinstance(second, RegistryError)


class FailedElsewhere(UnreachableStaging):
    """Another machine's GPU tests of each image failed. Notes the images whose results are attached."""

    def __init__(self, provider: FakeProvider) -> None:
        super().__init__(provider)
        self.attached: list[str] = []

    def reports(self, image: PlannedImage) -> Sequence[Report]:
        evidence = Evidence(
            image="i", cell=image.id, plan=image.digest, suite={}, kind="gpu",
            passed=(), failed=("test_it",), machine={"gpu": "H100"},
        )  # fmt: skip
        return [Report(evidence=evidence, signer="gpu")]

    def attach_results(self, image: PlannedImage, loaded: LoadedImage) -> None:
        self.attached.append(image.id)


def test_a_failure_on_the_gpu_of_another_machine_fails_the_command_after_results_are_attached(
    bench: BuildBench,
) -> None:
    """It ended with "2 images tested" and status 0; only the release refused them."""
    provider = FailedElsewhere(bench.method)
    outcomes = test.test_staged(bench.context, provider, bench.plan, Options(jobs=1))
    assert [str(outcome.error) for outcome in outcomes] == [
        f"{FIRST}: tests failed on H100",
        f"{SECOND}: tests failed on H100",
    ]
    assert provider.attached == [FIRST, SECOND]
