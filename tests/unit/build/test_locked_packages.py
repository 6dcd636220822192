"""A build that fails because of Debian packages: the reason, and the second attempt with a snapshot archive."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from builder.build import locked_packages
from builder.build.work import Work
from builder.common.console import View
from builder.common.errors import BuildError
from builder.index.host import Host
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


def build(project: Project, *results: BuildError | str) -> tuple[str, list[Host], str]:
    """The result of a build whose attempts end like this; the settings of each attempt; what was said."""
    console = MemoryConsole()
    work = Work(engine=FakeEngine(), project=project, host=Host(), view=View(console))
    image: PlannedImage = plan.make_locked(project, project.select([CELL])).images[0]
    attempts: list[Host] = []

    def attempt(host: Host) -> str:
        result = results[len(attempts)]
        attempts.append(host)
        if isinstance(result, BuildError):
            raise result
        return result

    return locked_packages.with_snapshot_fallback(work, image, attempt), attempts, console.text


@pytest.fixture
def with_snapshot(edit: Edit) -> Project:
    return edit('    glibc: "2.36"\n', f'    glibc: "2.36"\n    snapshot: {SNAPSHOT}\n')


@pytest.mark.parametrize("error", [OF_APT, OF_CHECK, OF_CHECK_CUT])
def test_an_error_of_packages_says_how_to_lock_the_current_ones(tiny: Project, error: BuildError) -> None:
    with pytest.raises(BuildError) as caught:
        build(tiny, error)
    assert str(caught.value) == str(error)
    assert f"lock the current versions: builder refresh {CELL}" in caught.value.hint
    assert caught.value.hint.endswith(error.hint)


@pytest.mark.parametrize("error", [OF_PIP, OF_A_HOOK])
def test_other_errors_stay_as_they_are(tiny: Project, error: BuildError) -> None:
    with pytest.raises(BuildError) as caught:
        build(tiny, error)
    assert caught.value is error


def test_a_snapshot_archive_is_used_after_a_failure(with_snapshot: Project) -> None:
    result, attempts, said = build(with_snapshot, OF_APT, "done")
    assert result == "done"
    first, second = attempts
    assert first.sources_list("newbird") == ""
    lines = second.sources_list("newbird").splitlines()
    assert [line.split("] ")[1] for line in lines] == [
        f"{SNAPSHOT}/debian/{TIME} newbird main",
        f"{SNAPSHOT}/debian/{TIME} newbird-updates main",
        f"{SNAPSHOT}/debian-security/{TIME} newbird-security main",
    ]
    assert all("check-valid-until=no" in line for line in lines)
    assert said == f"{CELL}: apt failed; trying again with the snapshot archive of newbird\n"


def test_the_second_failure_is_the_last(with_snapshot: Project) -> None:
    with pytest.raises(BuildError, match="no installation candidate"):
        build(with_snapshot, OF_APT, OF_APT)


def test_without_a_failure_of_packages_there_is_one_attempt(with_snapshot: Project) -> None:
    assert len(build(with_snapshot, "done")[1]) == 1
    with pytest.raises(BuildError) as caught:
        build(with_snapshot, OF_PIP)
    assert caught.value is OF_PIP
