"""From plan to tagged images, with an engine and tests that are not there: order, what is not done again, failures."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from builder import build, errors, images, plan
from builder.errors import BuilderError, BuildError, EngineError, FetchError, ImageTestError, LockError
from builder.host import Host
from builder.plan import Plan, PlannedImage
from builder.project import Project
from builder.settings import PLAN_LABEL
from builder.view import View
from builder.work import Work
from tests.unit.fakes import FakeEngine, FakeMethod, FakeTester, MemoryConsole, evidence_of

FIRST, SECOND = "em-1.10-cu1210-py311", "qz-0.5-cu129-py311-board"


@dataclass
class ModeTester(FakeTester):
    """Keeps what it was made with; `lacks` is why GPU tests cannot run."""

    options: dict[str, Any] = field(default_factory=dict)
    lacks: str = ""

    def check(self, images: Sequence[PlannedImage]) -> None:
        self.fake.calls.append(f"check {len(images)}")
        if self.lacks:
            raise ImageTestError(self.lacks)


class Bench:
    """The tiny project, with fakes around it."""

    def __init__(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = FakeEngine()
        self.method = FakeMethod(self.engine)
        self.tester = ModeTester(self.engine)
        self.console = MemoryConsole()
        self.work = Work(engine=self.engine, project=project, host=Host(), view=View(self.console))
        self.plan = plan.make_locked(project, project.select([FIRST, SECOND]))
        monkeypatch.setattr(images, "Tester", self._tester)
        monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")

    def _tester(self, *_: object, **options: Any) -> FakeTester:
        self.tester.options = options
        return self.tester

    def run(self, *, test: bool = True, tag: bool = True, jobs: int = 2) -> int:
        return images.run(self.work, self.method, self.plan, jobs=jobs, test=test, tag=tag)

    def retest(self) -> None:
        images.retest(self.work, self.method, self.plan, jobs=1)

    def calls(self, *kinds: str) -> list[str]:
        """What was done of these kinds; forgotten afterwards."""
        found = [call for call in self.engine.calls if call.split()[0] in kinds]
        self.engine.calls.clear()
        return found

    def references(self, cell: str) -> tuple[str, ...]:
        return next(image.references for image in self.plan.images if image.id == cell)


def failure(cell: str) -> BuildError:
    return BuildError(f"{cell}: failed at the build", hint="Whole log: x")


ALL = ("prepare", "build", "test", "tag", "close")


@pytest.fixture
def bench(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tiny, monkeypatch)


def test_build_test_tag(bench: Bench) -> None:
    assert bench.run(jobs=1) == 2
    expected = [f"prepare {FIRST} {SECOND}"]
    for cell in (FIRST, SECOND):
        tags = [f"tag {reference}" for reference in reversed(bench.references(cell))]
        expected += [f"build {cell}", f"test {cell}", *tags]
    assert bench.calls(*ALL) == [*expected, "close"]
    # The full tag says that all is done, so it comes last.
    assert expected[-1] == "tag registry.example.test:5000/team/quartz-cuda:0.5.3-cu129-py311-board"
    assert f"{SECOND}: done" in bench.console.text
    assert "1 tests passed, gpu: not run" in bench.console.text


def test_the_store_is_told_when_all_tags_are_set(bench: Bench) -> None:
    bench.tester.failing = frozenset({FIRST})
    with pytest.raises(ImageTestError):
        bench.run(jobs=1)
    assert bench.calls("tag", "name")[-2:] == [f"tag {bench.references(SECOND)[0]}", f"name {SECOND}"]
    bench.tester.failing = frozenset()
    bench.run(tag=False)
    assert bench.calls("tag", "name") == []
    bench.run()
    assert bench.calls("name") == [f"name {FIRST}"]


def test_what_is_done_is_not_done_again(bench: Bench) -> None:
    bench.run()
    bench.calls(*ALL)
    assert bench.run() == 0
    assert bench.calls(*ALL) == []


def test_what_comes_out_as_it_was_is_not_tested_again(bench: Bench) -> None:
    """As after `rebase` where no package changed."""
    bench.run()
    bench.calls(*ALL)
    bench.method.fresh = True
    assert bench.run(jobs=1) == 0
    assert bench.calls(*ALL) == [f"prepare {FIRST} {SECOND}", f"build {FIRST}", f"build {SECOND}", "close"]
    assert f"{FIRST}: done" in bench.console.text.splitlines()[-2]
    assert bench.console.text.splitlines()[-2].endswith(", as it was")


def test_what_comes_out_as_it_was_but_lost_a_tag_is_tagged(bench: Bench) -> None:
    bench.run()
    bench.method.fresh = True
    full = bench.references(SECOND)[0]
    del bench.engine.known[full]
    bench.calls(*ALL)
    assert bench.run() == 1
    assert f"tag {full}" in bench.calls("tag")


def test_only_what_is_missing_is_done(bench: Bench) -> None:
    """As after a kill: a tag was not set yet, a test not run yet."""
    bench.run()
    bench.calls(*ALL)
    full = bench.references(FIRST)[0]
    del bench.engine.known[full]
    assert bench.run() == 1
    assert bench.calls("build", "test", "tag") == [
        f"tag {reference}" for reference in reversed(bench.references(FIRST))
    ]
    bench.tester.kept.clear()
    assert bench.run(jobs=1) == 2
    assert bench.calls("prepare", "build", "test") == [f"test {FIRST}", f"test {SECOND}"]


def test_a_tag_that_is_on_another_image_is_moved(bench: Bench) -> None:
    bench.run()
    reference = bench.references(FIRST)[1]
    bench.engine.have(reference)
    bench.calls(*ALL)
    assert bench.run() == 1
    assert f"tag {reference}" in bench.calls("tag")
    assert bench.run() == 0


def test_evidence_that_is_no_pass_is_made_again(bench: Bench) -> None:
    bench.run()
    image = bench.plan.images[0]
    image_id = bench.method.find(image)
    bench.tester.kept[image_id] = evidence_of(image, image_id, failed=("x",))
    bench.calls(*ALL)
    assert bench.run() == 1
    assert bench.calls("build", "test") == [f"test {FIRST}"]


def test_build_only(bench: Bench) -> None:
    assert bench.run(test=False, tag=False, jobs=1) == 2
    assert bench.calls(*ALL) == [f"prepare {FIRST} {SECOND}", f"build {FIRST}", f"build {SECOND}", "close"]
    assert bench.run(test=False, tag=False) == 0


def test_a_failed_test_gives_no_tag(bench: Bench) -> None:
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


def test_a_failed_build_does_not_stop_the_others_and_a_rerun_goes_on(bench: Bench) -> None:
    bench.method.broken[FIRST] = failure(FIRST)
    with pytest.raises(BuildError, match=rf"^{FIRST}: failed at the build"):
        bench.run()
    assert f"tag {bench.references(SECOND)[0]}" in bench.calls("tag")
    bench.method.broken.clear()
    assert bench.run() == 1
    assert bench.calls("prepare", "build") == [f"prepare {FIRST}", f"build {FIRST}"]


def test_all_failures_are_told_in_the_order_of_the_plan(bench: Bench) -> None:
    """Whichever ends first: the error and the exit code are the same in every run."""
    bench.method.broken = {FIRST: failure(FIRST), SECOND: EngineError(f"{SECOND}: connection reset by peer")}
    second_ended = threading.Event()
    original = bench.work.view.end

    def end(image: str, state: str, note: str = "") -> None:
        original(image, state, note)
        if image == SECOND:
            second_ended.set()

    def wait(cell: str) -> None:
        if cell == FIRST:
            assert second_ended.wait(10)

    bench.work.view.end = end  # type: ignore[method-assign]
    bench.method.before = wait
    with pytest.raises(BuilderError) as caught:
        bench.run(jobs=2)
    told = str(caught.value)
    assert told.startswith("2 images failed\n")
    assert "connection reset" in told
    assert "Whole log" in told
    assert told.index(FIRST) < told.index(SECOND)
    assert isinstance(caught.value, BuildError)


def test_a_failure_that_images_share_is_told_once(bench: Bench) -> None:
    bench.method.broken = dict.fromkeys((SECOND, FIRST), FetchError("some.whl: the index is silent", hint="run again"))
    with pytest.raises(FetchError) as caught:
        bench.run()
    assert str(caught.value) == f"{FIRST}, {SECOND}: some.whl: the index is silent"
    assert caught.value.hint == "run again"


def test_a_failure_of_one_image_names_it_once(bench: Bench) -> None:
    bench.method.broken = {FIRST: failure(FIRST), SECOND: EngineError("connection reset by peer")}
    with pytest.raises(BuildError) as caught:
        bench.run()
    assert str(caught.value).splitlines() == [
        "2 images failed",
        f"{FIRST}: failed at the build",
        "  -> Whole log: x",
        f"{SECOND}: connection reset by peer",
    ]


def raises(error: BaseException, at: str) -> Callable[[str], None]:
    """For `before` of the method: fails at one image, or when it is to prepare."""

    def fail(step: str) -> None:
        if step == at:
            raise error

    return fail


@pytest.mark.parametrize("error", [ZeroDivisionError(), KeyboardInterrupt()], ids=["fault", "Ctrl-C"])
def test_a_fault_of_ours_or_an_interrupt_stops_the_tests_that_run(bench: Bench, error: BaseException) -> None:
    bench.method.before = raises(error, FIRST)
    with pytest.raises(type(error)):
        bench.run(jobs=1)
    assert bench.tester.stopped == 1
    assert bench.calls("tag", "close") == ["close"]


def test_after_an_interrupt_nothing_is_begun(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when Ctrl-C comes while the first image is built: the second waits for its turn."""
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
    "error", [EngineError("no base"), ZeroDivisionError(), KeyboardInterrupt()], ids=["error", "fault", "Ctrl-C"]
)
def test_what_was_prepared_is_closed_if_that_fails(bench: Bench, error: BaseException) -> None:
    bench.method.before = raises(error, "prepare")
    with pytest.raises(type(error)):
        bench.run()
    assert bench.calls(*ALL) == ["close"]


def test_the_method_is_closed_after_failures(bench: Bench) -> None:
    bench.method.broken = {FIRST: failure(FIRST), SECOND: failure(SECOND)}
    with pytest.raises(BuildError, match="2 images failed"):
        bench.run()
    assert bench.calls(*ALL)[-1] == "close"


def test_an_error_of_the_file_system_is_a_failure_of_one_image(bench: Bench) -> None:
    bench.method.before = raises(OSError(28, "No space left on device"), FIRST)
    with pytest.raises(errors.DiskError, match="full"):
        bench.run()
    assert f"tag {bench.references(SECOND)[0]}" in bench.calls("tag")


@pytest.mark.parametrize("begin", [images.run, images.retest], ids=["images", "test"])
def test_gpu_tests_that_cannot_run_stop_it_before_anything_is_built(bench: Bench, begin: Callable[..., object]) -> None:
    bench.tester.lacks = "no driver"
    with pytest.raises(ImageTestError, match="no driver"):
        begin(bench.work, bench.method, bench.plan, jobs=1, gpu_mode="require")
    assert bench.tester.options["gpu_mode"] == "require"
    assert bench.calls(*ALL, "check") == ["check 2"]


def test_a_build_without_tests_needs_no_gpu(bench: Bench) -> None:
    bench.tester.lacks = "no driver"
    assert bench.run(test=False, tag=False) == 2


def test_images_that_run_at_once_share_the_gpus(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[int] = []
    monkeypatch.setattr("builder.gpu.Pool", shares.append)
    bench.run(jobs=1)
    bench.run(jobs=9)
    assert shares == [1, 2]


def test_retest(bench: Bench) -> None:
    bench.run(test=False, tag=False)
    bench.calls(*ALL)
    bench.retest()
    bench.retest()
    assert bench.calls(*ALL) == [f"test {cell}" for cell in (FIRST, SECOND, FIRST, SECOND)]


def test_retest_of_what_is_not_built(bench: Bench) -> None:
    with pytest.raises(EngineError, match="2 images failed") as caught:
        bench.retest()
    assert f"{FIRST}: not built\n  -> builder build {FIRST}" in str(caught.value)


def test_left_containers_are_swept_first(bench: Bench) -> None:
    bench.run()
    assert bench.engine.calls[0] == "sweep"


def test_join() -> None:
    one, two = BuildError("a failed", hint="look"), LockError("b failed")
    assert errors.join([one]) is one
    both = errors.join([one, two])
    assert isinstance(both, BuildError)
    assert str(both) == "2 images failed\na failed\n  -> look\nb failed"


def test_clean(bench: Bench) -> None:
    bench.run()
    untagged = bench.engine.have("sha256:old", labels={PLAN_LABEL: "sha256:0"})
    others = bench.engine.have("sha256:others", labels={PLAN_LABEL: "sha256:1"})
    tagged = bench.engine.known[bench.references(FIRST)[0]].id
    for name, image_id in (("sha256:0", untagged), ("sha256:1", tagged)):
        record = build.record(bench.work.project.state, name)
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text(image_id + "\n")
    bench.work.project.logs.mkdir(parents=True, exist_ok=True)
    (bench.work.project.logs / "x.log").write_text("")
    bench.engine.calls.clear()
    said = images.clean(bench.engine, bench.work.project, cache=True)
    assert bench.engine.calls[0] == "sweep"
    assert f"remove {untagged}" in bench.engine.calls
    assert f"remove {others}" not in bench.engine.calls, "another checkout's image"
    assert f"remove {tagged}" not in bench.engine.calls
    assert not any(reference in call for call in bench.engine.calls for reference in bench.references(FIRST))
    assert list(bench.work.project.logs.glob("*.log")) == []
    assert said.endswith("freed 5.0 GB of build cache")


def test_a_plan_of_nothing(bench: Bench) -> None:
    bench.plan = Plan(images=())
    assert bench.run() == 0
    assert bench.calls(*ALL) == []
