"""From plan to tagged images, with a fake engine and fake tests: order, what is not done again, failures."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from builder.build import outcomes
from builder.build.outcomes import Outcome
from builder.cli.images import summary
from builder.common.errors import BuildError, DiskError, EngineError, FetchError, ImageTestError
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.plan import PlannedImage
from builder.steps.images import build_test_tag
from builder.steps.test import retest_images
from tests.fakes.engine import INFO, FakeEngine, FakeMaker, FakeTester, MemoryConsole
from tests.fakes.run import new_run

FIRST, SECOND = "em-1.10-cu1210-py311", "qz-0.5-cu129-py311-board"


@dataclass
class ModeTester(FakeTester):
    """`reason` is why GPU tests cannot run."""

    reason: str = ""

    def check(self, images: Sequence[PlannedImage]) -> None:
        self.fake.calls.append(f"check {len(images)}")
        if self.reason:
            raise ImageTestError(self.reason)


class BuildBench:
    """The tiny project, with fakes around it."""

    def __init__(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = FakeEngine()
        self.maker = FakeMaker(self.engine)
        self.tester = ModeTester(self.engine)
        self.console = MemoryConsole()
        self.context = new_run(project, engine=self.engine, console=self.console)
        self.plan = plan.make_locked_plan(project, project.select([FIRST, SECOND]))
        monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")

    def run(self, *, test: bool = True, jobs: int = 2) -> str:
        """The summary. Raises what failed."""
        tester = self.tester if test else None
        return self._summary(build_test_tag(self.context, self.maker, tester, self.plan, jobs))

    def retest(self) -> str:
        found = {image.id: self.maker.find(image) for image in self.plan.images}
        return self._summary(retest_images(self.context, self.tester, self.plan, found, 1))

    def _summary(self, done: Sequence[Outcome]) -> str:
        self.outcomes = done
        if failure := outcomes.failure(done):
            raise failure
        return summary(done)

    def calls(self, *kinds: str) -> list[str]:
        """The calls of these kinds since the last call of this function."""
        calls = [call for call in self.engine.calls if call.split()[0] in kinds]
        self.engine.calls.clear()
        return calls

    def references(self, cell: str) -> tuple[str, ...]:
        return next(image.references for image in self.plan.images if image.id == cell)


def failure(cell: str) -> BuildError:
    return BuildError(f"{cell}: failed at the build", hint="Full log: x")


ALL = ("start", "build", "test", "tag", "close")


@pytest.fixture
def bench(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> BuildBench:
    return BuildBench(tiny, monkeypatch)


def test_build_test_tag(bench: BuildBench) -> None:
    assert bench.run(jobs=1) == "2 images: 2 built, 2 tested, 2 tagged"
    assert bench.engine.calls[0] == "sweep"
    expected = [f"start {FIRST} {SECOND}"]
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
    with pytest.raises(EngineError):
        bench.run()
    assert bench.calls("start", "build") == []
    (tmp_path / "qemu-x86_64").write_text("enabled\nflags: OCF\n")
    assert bench.run() == "2 images: 2 built"
    assert "built, not run: a machine for amd64 must test it" in bench.console.text
    assert bench.run() == "2 images: 2 up to date"
    assert bench.calls("test", "tag", "name") == []


def test_the_method_records_an_image_when_all_its_tags_are_set(bench: BuildBench) -> None:
    bench.tester.failing = frozenset({FIRST})
    with pytest.raises(ImageTestError):
        bench.run(jobs=1)
    tags = [f"tag {reference}" for reference in reversed(bench.references(SECOND))]
    assert bench.calls("test", "tag", "name") == [f"test {FIRST}", f"test {SECOND}", *tags, f"name {SECOND}"]
    assert f"{FIRST}: failed" in bench.console.text
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
    bench.maker.lost = lost
    bench.run()
    assert sorted(bench.calls("name")) == [f"name {FIRST}", f"name {SECOND}"]


def test_an_unchanged_image_is_not_tested_again(bench: BuildBench) -> None:
    """As after the engine lost it."""
    bench.run()
    bench.calls(*ALL)
    bench.maker.lost = True
    assert bench.run(jobs=1) == "2 images: 2 built"
    assert bench.calls(*ALL) == [f"start {FIRST} {SECOND}", f"build {FIRST}", f"build {SECOND}", "close"]
    line = bench.console.text.splitlines()[-2]
    assert line.startswith(f"{FIRST}: done")
    assert line.endswith(", unchanged")


def test_only_missing_steps_are_run(bench: BuildBench) -> None:
    """As after a kill: a tag was not set yet, a test not run yet."""
    bench.run()
    bench.calls(*ALL)
    del bench.engine.known[bench.references(FIRST)[0]]
    bench.run()
    assert bench.calls("build", "test", "tag") == [f"tag {bench.references(FIRST)[0]}"]
    bench.tester.results.clear()
    bench.run(jobs=1)
    assert bench.calls("start", "build", "test") == [f"test {FIRST}", f"test {SECOND}"]


def test_a_failed_build_does_not_stop_the_others_and_a_rerun_continues(bench: BuildBench) -> None:
    bench.maker.broken[FIRST] = failure(FIRST)
    with pytest.raises(BuildError):
        bench.run()
    assert f"tag {bench.references(SECOND)[0]}" in bench.calls("tag")
    bench.maker.broken.clear()
    assert bench.run() == "2 images: 1 built, 1 tested, 1 tagged, 1 up to date"
    assert bench.calls("start", "build") == [f"start {FIRST}", f"build {FIRST}"]


def test_failures_are_in_the_order_of_the_plan(bench: BuildBench) -> None:
    """The error and the exit code are the same in every run, whichever image fails first."""
    bench.maker.broken = {FIRST: failure(FIRST), SECOND: EngineError("connection reset by peer")}
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
    bench.maker.before = wait
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
    bench.maker.layers[FIRST] = layers
    bench.maker.before = lambda step: layers.set_result(None) if step == SECOND else None
    bench.run(jobs=1)
    assert bench.calls("build", "test") == [f"build {SECOND}", f"test {SECOND}", f"build {FIRST}", f"test {FIRST}"]


def test_images_that_are_up_to_date_do_not_fail_with_the_others(bench: BuildBench) -> None:
    """Too little disk space for one image reported all images as failed."""
    bench.run()
    del bench.maker.made[FIRST]
    bench.maker.before = raises(DiskError("building 1 image takes about 9 GB"), "start")
    with pytest.raises(DiskError):
        bench.run()
    assert [outcome.is_up_to_date for outcome in bench.outcomes] == [False, True]
    assert bench.calls("build") == [f"build {FIRST}", f"build {SECOND}"], "those of the first run"


def test_a_failure_that_images_share_is_shown_once(bench: BuildBench) -> None:
    bench.maker.broken = dict.fromkeys(
        (SECOND, FIRST), FetchError("some.whl: the index does not answer", hint="run again")
    )
    with pytest.raises(FetchError) as caught:
        bench.run()
    assert str(caught.value) == f"{FIRST}, {SECOND}: some.whl: the index does not answer"
    assert caught.value.hint == "run again"


def raises(error: BaseException, at: str) -> Callable[[str], None]:
    """For `before` of the method: raises at one image, or in `start`."""

    def fail(step: str) -> None:
        if step == at:
            raise error

    return fail


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()], ids=["internal error", "Ctrl-C"])
def test_an_internal_error_or_an_interrupt_stops_running_tests(bench: BuildBench, error: BaseException) -> None:
    bench.maker.before = raises(error, FIRST)
    with pytest.raises(type(error)):
        bench.run(jobs=1)
    assert bench.tester.stopped == 1
    assert bench.calls("tag", "close") == ["close"]


class InterruptedMaker(FakeMaker):
    """Ctrl-C while the first image is built and the second waits."""

    is_building: threading.Event
    is_interrupted: threading.Event

    def as_ready(self, images: Sequence[PlannedImage]) -> Iterator[PlannedImage]:
        yield from images
        assert self.is_building.wait(10)
        raise KeyboardInterrupt


def test_after_an_interrupt_nothing_is_started(bench: BuildBench, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = bench.maker = InterruptedMaker(bench.engine)
    maker.is_building, maker.is_interrupted = threading.Event(), threading.Event()

    def before(step: str) -> None:
        if step == FIRST:
            maker.is_building.set()
            assert maker.is_interrupted.wait(10)

    maker.before = before
    monkeypatch.setattr(bench.tester, "stop", maker.is_interrupted.set)
    others = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        bench.run(jobs=1)
    for thread in set(threading.enumerate()) - others:
        thread.join(10)
    assert bench.calls("build") == [f"build {FIRST}"]


@pytest.mark.parametrize("error", [EngineError("no base"), ZeroDivisionError(), KeyboardInterrupt()], ids=repr)
def test_the_method_is_closed_if_preparing_fails(bench: BuildBench, error: BaseException) -> None:
    bench.maker.before = raises(error, "start")
    with pytest.raises(type(error)):
        bench.run()
    assert bench.calls(*ALL) == ["close"]


def test_an_error_of_the_file_system_is_a_failure_of_one_image(bench: BuildBench) -> None:
    bench.maker.before = raises(OSError(28, "No space left on device"), FIRST)
    with pytest.raises(DiskError):
        bench.run()
    assert f"tag {bench.references(SECOND)[0]}" in bench.calls("tag")


def test_required_gpu_tests_that_cannot_run_are_an_error_before_the_build(bench: BuildBench) -> None:
    bench.tester.reason = "no driver"
    with pytest.raises(ImageTestError):
        bench.run()
    with pytest.raises(ImageTestError):
        bench.retest()
    assert bench.calls(*ALL, "check") == ["check 2", "close", "check 2"]


def test_retest(bench: BuildBench) -> None:
    bench.run(test=False)
    bench.calls(*ALL)
    bench.retest()
    assert bench.retest() == "2 images: 2 tested"
    assert bench.calls(*ALL) == [f"test {cell}" for cell in (FIRST, SECOND, FIRST, SECOND)]


def test_an_image_that_is_not_built_cannot_be_tested(bench: BuildBench) -> None:
    with pytest.raises(EngineError) as caught:
        bench.retest()
    assert f"{FIRST}: not built\n  -> builder build {FIRST}" in str(caught.value)


SMALL, LARGE = "qz-0.5-cu129-py311", "qz-0.5-cu129-py311-board"


@pytest.mark.parametrize("chosen", [[LARGE, SMALL], [LARGE]], ids=["both", "alone"])
def test_a_larger_image_leaves_the_thorough_tests_of_a_smaller_one_out(bench: BuildBench, chosen: list[str]) -> None:
    bench.plan = plan.make_locked_plan(bench.context.project, bench.context.project.select(chosen))
    bench.run(jobs=1)
    parts = {image.id: frozenset(image.components) for image in bench.plan.images}
    left_out = parts.get(SMALL, frozenset())
    assert bench.tester.thorough == {**parts, LARGE: parts[LARGE] - left_out}
    bench.retest()
    assert bench.tester.thorough == parts, "tested again: all"


def test_images_with_the_longest_tests_are_tested_first(bench: BuildBench) -> None:
    both = plan.make_locked_plan(bench.context.project, bench.context.project.select([SMALL, LARGE]))
    bench.plan = replace(both, images=tuple(sorted(both.images, key=lambda image: image.id == SMALL)))
    bench.run(test=False)
    bench.run(jobs=1)
    assert bench.calls("build", "test") == [f"build {LARGE}", f"build {SMALL}", f"test {SMALL}", f"test {LARGE}"]
