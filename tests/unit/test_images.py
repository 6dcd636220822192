"""From plan to tagged images, with an engine and tests that are not there: order, what is not done again, failures."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from subprocess import CompletedProcess

import pytest

from builder import build, errors, images, plan, render
from builder.errors import BuilderError, BuildError, DiskError, EngineError, ImageTestError, LockError
from builder.host import Host
from builder.images import Work
from builder.plan import Plan
from builder.project import Project
from builder.view import View
from tests.unit import tiny_locks
from tests.unit.fakes import FakeEngine, FakeTester, MemoryConsole, evidence_of

FIRST, SECOND = "em-1.10-cu1210-py311", "qz-0.5-cu129-py311-board"
BASE = f"example/base:new@sha256:{'2' * 64}"


class Bench:
    """A project that is rendered, with fakes around it."""

    def __init__(self, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
        everything = plan.make_locked(project, project.select(tiny_locks.LOCKED))
        render.write(project.root, render.render(project.root, project.matrix, everything))
        self.engine = FakeEngine()
        self.tester = FakeTester(self.engine)
        self.console = MemoryConsole()
        self.work = Work(engine=self.engine, project=project, host=Host(), view=View(self.console))
        self.plan = plan.make_locked(project, project.select([FIRST, SECOND]))
        monkeypatch.setattr(images, "Tester", lambda *_: self.tester)
        monkeypatch.setattr(images, "revision", lambda _: "abc")
        monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")

    def run(self, *, test: bool = True, tag: bool = True, jobs: int = 2) -> int:
        return images.run(self.work, self.plan, jobs=jobs, test=test, tag=tag)

    def calls(self, *kinds: str) -> list[str]:
        """What was done of these kinds; forgotten afterwards."""
        found = [call for call in self.engine.calls if call.split()[0] in kinds]
        self.engine.calls.clear()
        return found

    def references(self, cell: str) -> tuple[str, ...]:
        return next(image.references for image in self.plan.images if image.id == cell)


ALL = ("pull", "build", "test", "tag")


@pytest.fixture
def bench(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(tiny, monkeypatch)


def test_build_test_tag(bench: Bench) -> None:
    assert bench.run(jobs=1) == 2
    expected = [f"pull {BASE}"]
    for cell in (FIRST, SECOND):
        tags = [f"tag {reference}" for reference in reversed(bench.references(cell))]
        expected += [f"build {cell} on {BASE}", f"test {cell}", *tags]
    assert bench.calls(*ALL) == expected
    # The full tag says that all is done, so it comes last.
    assert expected[-1] == "tag registry.example.test:5000/team/quartz-cuda:0.5.3-cu129-py311-board"
    assert f"{SECOND}: done" in bench.console.text
    assert "1 tests passed, gpu: not run" in bench.console.text


def test_what_is_done_is_not_done_again(bench: Bench) -> None:
    bench.run()
    bench.calls(*ALL)
    assert bench.run() == 0
    assert bench.calls(*ALL) == []


def test_only_what_is_missing_is_done(bench: Bench) -> None:
    """As after a kill: a tag was not set yet, a test not run yet."""
    bench.run()
    bench.calls(*ALL)
    full = bench.references(FIRST)[0]
    del bench.engine.known[full]
    assert bench.run() == 1
    assert bench.calls(*ALL) == [f"tag {reference}" for reference in reversed(bench.references(FIRST))]
    bench.tester.kept.clear()
    assert bench.run(jobs=1) == 2
    assert bench.calls("pull", "build", "test") == [f"test {FIRST}", f"test {SECOND}"]


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
    image_id = build.find(bench.engine, bench.work.project.state, image)
    bench.tester.kept[image_id] = evidence_of(image, image_id, failed=("x",))
    bench.calls(*ALL)
    assert bench.run() == 1
    assert bench.calls("build", "test") == [f"test {FIRST}"]


def test_build_only(bench: Bench) -> None:
    assert bench.run(test=False, tag=False, jobs=1) == 2
    assert bench.calls(*ALL) == [f"pull {BASE}", f"build {FIRST} on {BASE}", f"build {SECOND} on {BASE}"]
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
    bench.engine.broken[FIRST] = {"error": "process x did not complete successfully: exit code: 1"}
    with pytest.raises(BuildError, match=rf"^{FIRST}: failed at the build"):
        bench.run()
    assert f"tag {bench.references(SECOND)[0]}" in bench.calls("tag")
    bench.engine.broken.clear()
    assert bench.run() == 1
    assert bench.calls("build") == [f"build {FIRST} on {BASE}"]


def test_all_failures_are_told_in_the_order_of_the_plan(bench: Bench) -> None:
    """Whichever ends first: the error and the exit code are the same in every run."""
    bench.engine.broken = {FIRST: {"error": "exit code: 1"}, SECOND: {"error": "connection reset by peer"}}
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
    bench.engine.before_build = wait
    with pytest.raises(BuilderError) as caught:
        bench.run(jobs=2)
    told = str(caught.value)
    assert told.startswith("2 images failed\n")
    assert "connection reset" in told
    assert "Whole log" in told
    assert told.index(FIRST) < told.index(SECOND)
    assert isinstance(caught.value, BuildError)


def test_a_fault_of_ours_stops_the_tests_that_run(bench: Bench) -> None:
    def fail(_: str) -> None:
        raise ZeroDivisionError

    bench.engine.before_build = fail
    with pytest.raises(ZeroDivisionError):
        bench.run()
    assert bench.tester.stopped == 1
    assert bench.calls("tag") == []


def test_a_base_for_each_release_once(bench: Bench) -> None:
    bench.plan = plan.make_locked(bench.work.project, bench.work.project.select(tiny_locks.LOCKED))
    bench.run()
    assert bench.calls("pull") == [f"pull {BASE}"]


def test_the_disk_is_looked_at_before_anything_is_built(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.engine.told = replace(bench.engine.told, is_local=True)
    usage = shutil.disk_usage(".")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(DiskError, match=r"building 2 image\(s\) takes about 2.0 GB in /nowhere, which has 1 kB"):
        bench.run()
    assert bench.calls("build") == []


def test_retest(bench: Bench) -> None:
    bench.run(test=False, tag=False)
    bench.calls(*ALL)
    images.retest(bench.work, bench.plan, jobs=1)
    images.retest(bench.work, bench.plan, jobs=1)
    assert bench.calls(*ALL) == [f"test {cell}" for cell in (FIRST, SECOND, FIRST, SECOND)]


def test_retest_of_what_is_not_built(bench: Bench) -> None:
    with pytest.raises(EngineError, match="2 images failed") as caught:
        images.retest(bench.work, bench.plan, jobs=1)
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
    untagged = bench.engine.have("sha256:old", labels={build.PLAN_LABEL: "sha256:0"})
    others = bench.engine.have("sha256:others", labels={build.PLAN_LABEL: "sha256:1"})
    (bench.work.project.state / "built/sha256-0").write_text(untagged)
    bench.work.project.logs.mkdir(parents=True, exist_ok=True)
    (bench.work.project.logs / "x.log").write_text("")
    bench.engine.calls.clear()
    said = images.clean(bench.engine, bench.work.project, cache=True)
    assert bench.engine.calls[0] == "sweep"
    assert f"remove {untagged}" in bench.engine.calls
    assert f"remove {others}" not in bench.engine.calls, "another checkout's image"
    assert not any(reference in call for call in bench.engine.calls for reference in bench.references(FIRST))
    assert list(bench.work.project.logs.glob("*.log")) == []
    assert said.endswith("freed 5.0 GB of build cache")


@pytest.mark.parametrize(
    ("head", "status", "expected"),
    [((0, "abc\n"), "", "abc"), ((0, "abc\n"), " M x\n", "abc-dirty"), ((128, ""), "", "unknown")],
)
def test_revision(
    tiny: Project, monkeypatch: pytest.MonkeyPatch, head: tuple[int, str], status: str, expected: str
) -> None:
    def git(command: list[str], **_: object) -> CompletedProcess[str]:
        code, out = head if "rev-parse" in command else (0, status)
        return CompletedProcess(command, code, out, "")

    monkeypatch.setattr("shutil.which", lambda _: "/bin/git")
    monkeypatch.setattr("subprocess.run", git)
    assert images.revision(tiny) == expected


def test_a_plan_of_nothing(bench: Bench) -> None:
    bench.plan = Plan(images=())
    assert bench.run() == 0
    assert bench.calls(*ALL) == []
