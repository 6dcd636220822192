"""Locks of packages that are built from source, with stand-ins for uv and for the builder of wheels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from builder.common.errors import BuildError, LockError, MatrixError, UsageError
from builder.index.host import Host
from builder.index.local_index import LocalIndex, Sources
from builder.index.releases import Index
from builder.index.wheels import BuiltWheel, LockedWheel
from builder.lock import lockfile, update
from builder.lock.lockfile import Lock
from builder.lock.resolve import Resolver
from builder.lock.sources import WheelBuild
from builder.matrix.project import Project
from tests.fakes import locks
from tests.unit.lock.test_resolve import Call, Listing, Uv

Edit = Callable[[str, str], Project]
GROUP = "em-1.10-cu1210-py311"
COMMIT = "3f786850e387550fdab836ed7e6dc881de23001b"
ORIGIN = f"git+https://git.example.test/team/extra@{COMMIT}"
RECIPE = f"git: https://git.example.test/team/extra, commit: {COMMIT}"


@dataclass
class FakeBuilder:
    """Builds wheels of version 2.0, whose content is `content`; `kept` are those that it has, by SHA-256."""

    content: str = "first"
    needs: list[str] = field(default_factory=lambda: ["backend", "pip"])
    log: list[WheelBuild] = field(default_factory=list)
    wheels: list[list[str]] = field(default_factory=list)
    kept: dict[str, BuiltWheel] = field(default_factory=dict)

    def requirements(self, build: WheelBuild) -> list[str]:
        return self.needs

    def build(self, build: WheelBuild, wheels: Sequence[LockedWheel]) -> BuiltWheel:
        self.log.append(build)
        self.wheels.append([wheel.file for wheel in wheels])
        sha256 = hashlib.sha256(self.content.encode()).hexdigest()
        if build.locked and build.locked.sha256 != sha256:
            raise BuildError(f"{build.name}: another wheel")
        wheel = replace(locks.entry(build.name, "2.0", 5), sha256=sha256, source=build.source, index=build.index)
        self.kept[sha256] = BuiltWheel(wheel=wheel, metadata=b"")
        return self.kept[sha256]

    def built(self, wheel: LockedWheel, group: str) -> BuiltWheel | None:
        return self.kept.get(wheel.sha256)


class SourceUv(Uv):
    """Needs the metadata of each package that it takes."""

    local: LocalIndex

    @contextmanager
    def serve(self, index: Index, sources: Sources) -> Iterator[tuple[str, LocalIndex]]:
        self.local = LocalIndex(index, sources)
        yield "http://127.0.0.1:1/s/simple/", self.local

    def versions(self, call: Call) -> dict[str, str] | None:
        for name in self.specifiers(call).keys() & self.local._sources.has_sdists.keys():
            if (name, "") not in self.local._sources.built:
                self.local.unbuilt[name, ""] = None
        return super().versions(call)


def resolver_of(project: Project, uv: SourceUv, builder: FakeBuilder | None) -> Resolver:
    return Resolver(
        project, Host(), say=uv.messages.append, run=uv, catalogue=Listing(uv), serve=uv.serve, builder=builder
    )


def resolve(project: Project, uv: SourceUv, builder: FakeBuilder | None, present: Lock | None = None) -> Lock:
    return resolver_of(project, uv, builder).resolve(project.groups[GROUP], present, {})


@pytest.fixture
def uv(tmp_path: Path) -> SourceUv:
    return SourceUv(tmp_path)


@pytest.fixture
def project(edit: Edit) -> Project:
    """The tiny project, whose variant `jupyter` has the package `extra` from source; it is built with `board`."""
    edit("  board: {needs", "  extra: {needs: [python], packages: [extra]}\n  board: {needs")
    edit("jupyter: [board, jupyter]", "jupyter: [board, extra, jupyter]")
    return edit("variants:\n", f"sources:\n  extra: {{{RECIPE}, needs: [board], requires: [tool]}}\nvariants:\n")


def test_a_package_is_built_once_in_the_smallest_image_with_what_it_needs(project: Project, uv: SourceUv) -> None:
    builder = FakeBuilder()
    lock = resolve(project, uv, builder)
    [build] = builder.log
    assert (build.name, build.source, build.cell.id) == ("extra", ORIGIN, f"{GROUP}-board")
    assert sorted(build.lock.components) == ["board", "ember", "python"], "the image has no package from source"
    assert builder.wheels == [["backend-2.0-py3-none-any.whl", "tool-2.0-py3-none-any.whl"]], "the image has pip"
    wheel = next(wheel for wheel in lock.wheels if wheel.name == "extra")
    assert (wheel.source, wheel.size, wheel.sha256) == (ORIGIN, 5, hashlib.sha256(b"first").hexdigest())
    [locked] = lock.builds
    assert (locked.name, locked.cell, locked.recipe) == ("extra", f"{GROUP}-board", project.matrix.sources["extra"])
    assert [each.name for each in locked.wheels] == ["backend", "tool"]

    text = lockfile.dump(lock)
    assert lockfile.parse_lock(text, "x", GROUP) == lock
    assert lockfile.stale_reason(project.matrix, lock, project.groups[GROUP], project.groups[GROUP]) == ""
    uv.calls.clear()
    assert resolve(project, uv, builder, lock) == lock
    assert (len(builder.log), uv.calls) == (1, [])


def test_the_framework_of_the_image_is_pinned_for_a_build(project: Project, uv: SourceUv) -> None:
    resolve(project, uv, FakeBuilder())
    [call] = [call for call in uv.version_calls if call.packages == ["backend", "pip", "tool"]]
    assert "ember==1.10.0" in call.bounds
    assert call.preferred["board"] == "2.0"


def test_a_new_component_takes_the_wheel_that_is_kept(project: Project, edit: Edit, uv: SourceUv) -> None:
    builder = FakeBuilder()
    lock = resolve(project, uv, builder)
    edit("  board: {needs", "  more: {needs: [python], packages: [extra]}\n  board: {needs")
    project = edit("jupyter: [board, extra, jupyter]", "jupyter: [board, extra, more, jupyter]")
    again = resolve(project, uv, builder, lock)
    assert (again.wheels, again.builds) == (lock.wheels, lock.builds)
    assert len(builder.log) == 1
    builder.kept.clear()
    assert resolve(project, uv, builder, lock) == again
    assert builder.wheels[0] == builder.wheels[1], "built again as it was locked"


def test_a_wheel_is_built_again_if_the_image_changes_that_it_was_built_in(
    project: Project, edit: Edit, uv: SourceUv
) -> None:
    """What is compiled for one version of a framework may not work with another one."""
    builder = FakeBuilder()
    lock = resolve(project, uv, builder)
    uv.newest = "3.0"
    edit("packages: [notebook]", "packages: [notebook>=3]")
    assert resolve(edit("variants:\n", "# \nvariants:\n"), uv, builder, lock).versions["notebook"] == "3.0"
    assert len(builder.log) == 1, "it was built in another image"
    builder.content = "second"
    new = resolve(edit("packages: [board]", "packages: [board>=3]"), uv, builder, lock)
    assert (len(builder.log), new.versions["board"]) == (2, "3.0")
    assert new.builds[0].image != lock.builds[0].image


def test_another_commit_is_built_and_nothing_else_changes(project: Project, edit: Edit, uv: SourceUv) -> None:
    builder = FakeBuilder()
    lock = resolve(project, uv, builder)
    other = edit(COMMIT, "a" * 40)
    assert lockfile.stale_reason(other.matrix, lock, other.groups[GROUP]) == "sources.extra of matrix.yaml has changed"
    builder.content, uv.newest = "second", "3.0"
    new = resolve(other, uv, builder, lock)
    changed = {wheel.name for wheel in {*map(replace, new.wheels)} ^ {*map(replace, lock.wheels)}}
    assert changed == {"extra"}
    assert [build.source for build in builder.log] == [ORIGIN, ORIGIN.replace(COMMIT, "a" * 40)]


def test_a_package_that_is_no_longer_from_source_is_resolved_again(project: Project, edit: Edit, uv: SourceUv) -> None:
    lock = resolve(project, uv, FakeBuilder())
    other = edit(f"sources:\n  extra: {{{RECIPE}, needs: [board], requires: [tool]}}\n", "")
    reason = "extra: a wheel of the index in matrix.yaml, built from source in the lock"
    assert lockfile.stale_reason(other.matrix, lock, other.groups[GROUP]) == reason
    new = resolve(other, uv, None, lock)
    assert not any(wheel.source for wheel in new.wheels)
    assert new.builds == ()
    assert '"builds"' not in lockfile.dump(new)


def test_a_package_that_all_images_have_cannot_be_built(edit: Edit, uv: SourceUv) -> None:
    project = edit("variants:\n", f"sources:\n  pip: {{{RECIPE}}}\nvariants:\n")
    with pytest.raises(
        MatrixError, match=rf"^matrix.yaml:\d+:\d+: pip cannot be built for {GROUP}: no cell of this group"
    ):
        resolve(project, uv, FakeBuilder())


def test_no_image_has_what_a_package_needs(project: Project, edit: Edit, uv: SourceUv) -> None:
    edit("needs: [board], requires", "needs: [jupyter], requires")
    with pytest.raises(MatrixError, match="no cell of this group has the components jupyter, and no package") as caught:
        resolve(edit("  board: [board]", "  board: [board, extra]"), uv, FakeBuilder())
    assert "Add a variant" in caught.value.hint


def test_a_package_cannot_need_itself_for_its_build(project: Project, uv: SourceUv) -> None:
    with pytest.raises(MatrixError, match="extra is needed for its own build: extra -> extra"):
        resolve(project, uv, FakeBuilder(needs=["extra"]))


def test_explain_builds_nothing(project: Project, uv: SourceUv) -> None:
    [cell] = project.select([f"{GROUP}-jupyter"])
    assert resolver_of(project, uv, None).reason(cell) == ""
    assert not any("extra" in call.packages for call in uv.calls)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f'"source": "{ORIGIN}"', '"source": "git+https://user:password@git.example.test/x@main"'),
        (f'"source": "{ORIGIN}"', f'"source": "../x#sha256={"0" * 64}"'),
        (f', "source": "{ORIGIN}"', ""),
        ('"name": "extra", "recipe"', '"name": "other", "recipe"'),
    ],
)
def test_an_edited_source_is_refused(project: Project, uv: SourceUv, old: str, new: str) -> None:
    text = lockfile.dump(resolve(project, uv, FakeBuilder()))
    assert text.count(old) == 1
    with pytest.raises(LockError):
        lockfile.parse_lock(text.replace(old, new), "x", GROUP)


def test_a_locked_wheel_is_built_again_and_compared(project: Project, uv: SourceUv) -> None:
    builder = FakeBuilder()
    lock = resolve(project, uv, builder)
    locks.write_os_locks(project)
    (project.root / f"locks/{GROUP}.json").write_text(lockfile.dump(lock))
    cells = project.groups[GROUP]
    said: list[str] = []
    [wheel] = [wheel for wheel in lock.wheels if wheel.source]
    [line] = update.rebuild(project, cells, ["Extra"], builder, said.append)
    assert line == f"{GROUP}: extra-2.0-py3-none-any.whl is the locked wheel, sha256:{wheel.sha256}"
    assert (builder.log[-1].locked, builder.wheels[-1]) == (wheel, builder.wheels[0])
    builder.content = "other"
    with pytest.raises(BuildError, match="another wheel"):
        update.rebuild(project, cells, ["extra"], builder, said.append)
    with pytest.raises(UsageError, match="no lock of these cells has a wheel of board that was built from source"):
        update.rebuild(project, cells, ["board"], builder, said.append)
