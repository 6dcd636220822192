"""What is done before images are built: packages that Debian has deleted, the store, and a refresh.

How they are built, tested and tagged: test_images.py.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from builder.build.assemble import Assembler
from builder.build.dockerfile import DockerfileBuilder
from builder.build.outcomes import Outcome, Report
from builder.common import git
from builder.common.errors import (
    BuilderError,
    DiskError,
    FetchError,
    ImageTestError,
    IncompleteError,
    StaleError,
)
from builder.common.files import digest_of_bytes
from builder.debian import apt
from builder.debian.archives import Archives, PackageAvailability
from builder.debian.os_lock import OsLock
from builder.engine.run import Run
from builder.evidence.results import Coverage
from builder.layers.store import Store
from builder.lock.lockfile import GROUP_LOCKS
from builder.matrix.project import Project
from builder.plan import plan, render
from builder.plan.plan import Plan
from builder.steps import images, lock
from builder.steps.images import DOCKERFILE, LOCKS_CHANGED, ImageOptions, make_images
from builder.steps.refresh import refresh
from builder.steps.render import render_images
from tests.fakes import locks
from tests.fakes.engine import MemoryConsole
from tests.fakes.run import new_run
from tests.unit.matrix.test_cells import TINY_IDS

CELL, BOARD = "qz-0.5-cu129-py311", "qz-0.5-cu129-py311-board"
ON_NEWBIRD = [name for name in TINY_IDS if "-py311" in name]


@dataclass
class Builds:
    """A rendered checkout, Debian's archives, and the plans that were built, each with what builds it.

    Images in `failing` fail their tests; `error` ends the build.
    """

    project: Project
    archive: locks.FakeArchive
    built: list[tuple[str, Plan]] = field(default_factory=list)
    failing: set[str] = field(default_factory=set)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.console = MemoryConsole()
        self.run = new_run(self.project, console=self.console)

    def build(
        self, _: Run, maker: Assembler | DockerfileBuilder, tester: object, planned: Plan, jobs: int
    ) -> list[Outcome]:
        if self.error:
            raise self.error
        self.built.append((type(maker).__name__, planned))
        return [
            Outcome(image=image, error=ImageTestError("a test failed"))
            if image.id in self.failing
            else Outcome(image=image, coverage=Coverage())
            for image in planned.images
        ]

    def make(self, *cells: str, **options: Any) -> list[Outcome]:
        """Makes images; raises the error of the first that failed."""
        planned = render.load_checked_plan(self.project, self.project.select(cells))
        outcomes = make_images(self.run, planned, ImageOptions(**options))
        for outcome in outcomes:
            if outcome.error:
                raise outcome.error
        return outcomes

    def refresh(self, *cells: str) -> Report:
        return refresh(self.run, self.project.select(cells), ImageOptions(), area=None, signer=None)

    @property
    def cells(self) -> list[list[str]]:
        """The cells of each build."""
        return [[image.id for image in planned.images] for _, planned in self.built]


@pytest.fixture
def builds(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> Builds:
    """All cells are locked, and the archives have the locked packages. There is no git."""
    for group, cells in tiny.groups.items():
        (tiny.root / GROUP_LOCKS.path(group)).write_text(GROUP_LOCKS.dump(locks.lock_of(tiny, cells)))
    render_images(tiny, tiny.cells, is_part=False)
    builds = Builds(tiny, locks.FakeArchive(versions={"newbird": "1.0-1", "oldbird": "1.0-1"}))

    def locate(_: Archives, lock: OsLock, blobs: Path | None) -> PackageAvailability:
        builds.archive.looked_up.append(lock.debian)
        return locks.FakeArchives(tiny.matrix, builds.archive.versions).locate(lock, blobs)

    monkeypatch.setattr(apt, "open_archive", builds.archive)
    monkeypatch.setattr(Archives, "locate", locate)
    monkeypatch.setattr(git, "commit", lambda *_: "")
    monkeypatch.setattr(images, "build_test_tag", builds.build)
    monkeypatch.setattr(lock, "_record_release_days", lambda *_: [])  # without an index
    return builds


def test_images_of_dockerfiles_run_all_their_tests_and_need_no_store(builds: Builds) -> None:
    """Their layers are not those of the plan, even if there are as many."""
    builds.make(CELL, BOARD, method=DOCKERFILE)
    assert not builds.run.store.root.exists()
    builds.make(CELL, BOARD)
    (dockerfile, first), (assembler, second) = builds.built
    assert (dockerfile, assembler) == ("DockerfileBuilder", "Assembler")
    assert [image.thorough for image in first.images] == [frozenset(image.components) for image in first.images]
    _, board = second.images
    assert board.thorough == {"board"}


def test_the_limit_of_the_store_is_checked_before_downloads(builds: Builds) -> None:
    """CUDA of the tiny project has 2 MB."""
    folder = builds.run.store.root
    for limit, is_enough in (2_000_000, False), (4_000_000, True):
        builds.run = replace(builds.run, store=Store(folder, limit=limit))
        if is_enough:
            builds.make(CELL)
        else:
            with pytest.raises(DiskError):
                builds.make(CELL)
        assert bool(builds.built) == is_enough


# ---- packages that Debian's archives no longer have


@pytest.mark.parametrize("method", ["assemble", DOCKERFILE])
@pytest.mark.parametrize("error", [None, KeyboardInterrupt()], ids=repr)
def test_new_locks_are_used_and_named_even_if_the_build_is_interrupted(
    builds: Builds, error: BaseException | None, method: str
) -> None:
    """They stay in the checkout, and the user did not ask for them. What they are: test_build_failures.py."""
    builds.archive.versions["newbird"] = "2.0-1"
    builds.error = error
    with pytest.raises(KeyboardInterrupt) if error else nullcontext():
        builds.make(CELL, method=method)
    assert builds.console.text.count(LOCKS_CHANGED) == 1
    builds.error = None
    builds.make(CELL, method=method)
    assert builds.console.text.count(LOCKS_CHANGED) == 1, "they are current"
    locked = plan.make_locked_plan(builds.project, builds.project.select([CELL]))
    assert all(planned == locked for _, planned in builds.built)


def test_locked_packages_that_are_gone_are_refused(builds: Builds) -> None:
    builds.archive.versions["newbird"] = "2.0-1"
    before = {path: path.read_bytes() for path in (builds.project.root / "locks").iterdir()}
    with pytest.raises(StaleError, match=rf"^Locked Debian packages are no longer (.|\n)*\n  in {CELL}, {BOARD}$"):
        builds.make(CELL, BOARD, locked=True)
    assert builds.built == []
    assert {path: path.read_bytes() for path in (builds.project.root / "locks").iterdir()} == before
    builds.make(CELL)
    assert builds.cells == [[CELL]], "the hint works"


def test_nothing_is_looked_up_for_an_operating_system_in_the_store(builds: Builds) -> None:
    store = builds.run.store
    store.prepare()
    blob = b"operating system"
    digest = digest_of_bytes(blob)
    store.path(digest).parent.mkdir(parents=True, exist_ok=True)
    store.path(digest).write_bytes(blob)
    layer = {"digest": digest, "diff_id": digest, "size": len(blob), "unpacked": len(blob), "toc": ""}
    [image] = plan.make_locked_plan(builds.project, builds.project.select([CELL])).images
    store.put_record(image.os_inputs, {**layer, "created": "2026-11-22T00:00:00Z", "taken": (), "folders": ()})
    builds.archive.versions["newbird"] = "2.0-1"
    builds.make(CELL, locked=True)
    assert builds.archive.looked_up == []


# ---- refresh


@pytest.fixture
def updated(builds: Builds) -> Builds:
    """Debian has updated every package since."""
    builds.archive.versions = {"newbird": "2.0-1", "oldbird": "2.0-1"}
    return builds


def test_a_refresh_builds_what_changed(updated: Builds) -> None:
    assert updated.refresh("newbird").error is None
    assert updated.cells == [ON_NEWBIRD]
    again = updated.refresh("newbird")
    assert (again.outcomes, again.error) == ([], None)


@pytest.mark.parametrize("has_lock", [True, False])
def test_a_refresh_goes_on_with_the_debian_releases_that_can_be_locked(updated: Builds, has_lock: bool) -> None:
    """Cells that could not be locked at all have no lock to render from."""
    if not has_lock:
        [path] = (updated.project.root / "locks").glob("os-oldbird-*.json")
        path.unlink()
    updated.archive.broken = "oldbird"
    result = updated.refresh("*")
    assert updated.cells == [ON_NEWBIRD]
    assert isinstance(result.error, IncompleteError)
    assert f"{len(ON_NEWBIRD)} images built and tested; the rest failed:" in str(result.error)


def test_a_refresh_that_can_lock_nothing_fails_as_lock_does(updated: Builds) -> None:
    updated.archive.broken = "oldbird"
    with pytest.raises(FetchError):
        updated.refresh("oldbird")
    assert updated.built == []


@pytest.mark.parametrize(("failing", "kind"), [({CELL}, IncompleteError), ({CELL, BOARD}, ImageTestError)])
def test_a_refresh_of_which_images_fail_names_them(
    updated: Builds, failing: set[str], kind: type[BuilderError]
) -> None:
    updated.failing = failing
    error = updated.refresh(CELL, BOARD).error
    assert type(error) is kind
    assert ", ".join(sorted(failing)) in str(error)


def test_a_refresh_repeats_the_tests_that_a_failed_image_was_to_run_for_others(updated: Builds) -> None:
    updated.failing = {CELL}
    updated.refresh(CELL, BOARD)
    assert updated.cells == [[CELL, BOARD], [BOARD]]
    [board] = updated.built[-1][1].images
    assert board.thorough == set(board.components)
