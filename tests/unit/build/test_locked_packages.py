"""A build that fails because of Debian packages: the reason, and the second attempt with a snapshot archive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from builder.build import locked_packages
from builder.build.work import Work
from builder.common.console import View
from builder.common.errors import BuildError, LockError
from builder.index.host import Host
from builder.lock import apt
from builder.lock.os_lock import OsLock
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.plan import PlannedImage
from tests.fakes.engine import FakeEngine, MemoryConsole
from tests.fakes.locks import TIME

Edit = Callable[[str, str], Project]
CELL = "qz-0.5-cu129-py311"
SNAPSHOT = "http://snapshot.example.test/archive"
OF_APT = BuildError("os: mmdebstrap failed\n  | E: Package 'tini' has no installation candidate", hint="Full log: x")
OF_CHECK = BuildError("os: failed at os.sh\n  | The installed packages (>) are not the locked ones (<):\n  | < tini")
OF_CHECK_CUT = BuildError(
    "\n".join(["os: failed at os.sh", *[f"  | > p{number} 1.0 all {'0' * 64}" for number in range(15)]])
)
OF_A_HOOK = BuildError("os: mmdebstrap failed\n  | E: command failed: /x/run-commands\n  | E: mmdebstrap failed to run")
OF_PIP = BuildError("image: failed at wheels.sh\n  | error: Hash mismatch for tini")


@dataclass
class FakeArchive:
    """Stands in for `apt.archive`; `gone` are the packages that it does not have, None if it cannot be asked."""

    gone: list[str] | None = field(default_factory=list)

    @contextmanager
    def __call__(self, _: str, __: Host, ___: object) -> Iterator[FakeArchive]:
        if self.gone is None:
            raise LockError("apt-get is not installed")
        yield self

    def missing(self, _: OsLock) -> list[str]:
        assert self.gone is not None
        return self.gone


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch) -> FakeArchive:
    fake = FakeArchive()
    monkeypatch.setattr(apt, "archive", fake)
    return fake


def build(project: Project, *results: BuildError | str, context_now: bytes = b"context") -> tuple[str, list[Work], str]:
    """The result of a build whose attempts end like this; the surroundings of each attempt; what was said."""
    console = MemoryConsole()
    work = Work(engine=FakeEngine(), project=project, host=Host(), view=View(console))
    image: PlannedImage = plan.make_locked(project, project.select([CELL])).images[0]
    attempts: list[Work] = []

    def attempt(current: Work, context: bytes) -> str:
        assert context == b"context"
        result = results[len(attempts)]
        attempts.append(current)
        if isinstance(result, BuildError):
            raise result
        return result

    return locked_packages.build(work, image, b"context", lambda _: context_now, attempt), attempts, console.text


@pytest.fixture
def with_snapshot(edit: Edit) -> Project:
    return edit('    glibc: "2.36"\n', f'    glibc: "2.36"\n    snapshot: {SNAPSHOT}\n')


@pytest.mark.parametrize("error", [OF_APT, OF_CHECK, OF_CHECK_CUT])
def test_packages_that_are_gone_are_named(tiny: Project, archive: FakeArchive, error: BuildError) -> None:
    archive.gone = [f"p{number} 1.0" for number in range(7)]
    with pytest.raises(BuildError) as caught:
        build(tiny, error)
    image = plan.make_locked(tiny, tiny.select([CELL])).images[0]
    lines = str(caught.value).splitlines()
    assert lines[0] == (
        f"{CELL}: the archives no longer have 7 locked packages of {image.system.path}: "
        "p0 1.0, p1 1.0, p2 1.0, p3 1.0, p4 1.0 ..."
    )
    assert lines[1:] == str(error).splitlines(), "the output of the step stays"
    assert f"make refresh CELLS='{CELL}'" in caught.value.hint
    assert caught.value.hint.endswith(error.hint)


@pytest.mark.parametrize(
    ("error", "gone"), [(OF_PIP, ["tini 1.0"]), (OF_A_HOOK, ["tini 1.0"]), (OF_APT, []), (OF_APT, None)]
)
def test_other_errors_stay_as_they_are(
    tiny: Project, archive: FakeArchive, error: BuildError, gone: list[str] | None
) -> None:
    archive.gone = gone
    with pytest.raises(BuildError) as caught:
        build(tiny, error)
    assert caught.value is error


def test_a_snapshot_archive_is_used_after_a_failure(with_snapshot: Project, archive: FakeArchive) -> None:
    result, attempts, said = build(with_snapshot, OF_APT, "done")
    assert result == "done"
    first, second = attempts
    assert first.host.sources_list("newbird") == ""
    lines = second.host.sources_list("newbird").splitlines()
    assert [line.split("] ")[1] for line in lines] == [
        f"{SNAPSHOT}/debian/{TIME} newbird main",
        f"{SNAPSHOT}/debian/{TIME} newbird-updates main",
        f"{SNAPSHOT}/debian-security/{TIME} newbird-security main",
    ]
    assert all("check-valid-until=no" in line for line in lines)
    assert said == f"{CELL}: apt failed; trying again with the snapshot archive of newbird\n"


def test_the_second_failure_is_the_last(with_snapshot: Project, archive: FakeArchive) -> None:
    archive.gone = ["tini 1.0"]
    with pytest.raises(BuildError, match="no longer have 1 locked package"):
        build(with_snapshot, OF_APT, OF_APT)


def test_a_changed_build_context_ends_the_build(with_snapshot: Project, archive: FakeArchive) -> None:
    """The second attempt would have files that the plan does not."""
    with pytest.raises(BuildError, match="files of the checkout changed during the build"):
        build(with_snapshot, OF_APT, "done", context_now=b"edited")


def test_without_a_failure_of_packages_there_is_one_attempt(with_snapshot: Project, archive: FakeArchive) -> None:
    assert len(build(with_snapshot, "done")[1]) == 1
    with pytest.raises(BuildError) as caught:
        build(with_snapshot, OF_PIP)
    assert caught.value is OF_PIP
