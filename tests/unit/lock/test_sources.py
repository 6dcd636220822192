"""Locks of packages that are built from source, with stand-ins for uv and for the builder of wheels."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from pypi_simple import DistributionPackage

from builder.common.errors import BuildError, LockError, MatrixError, UsageError
from builder.host import Host
from builder.index.local_index import LocalIndex, Sources
from builder.index.releases import Index
from builder.index.wheels import BuiltWheel, LockedWheel
from builder.lock import lockfile
from builder.lock.lockfile import Lock
from builder.lock.resolve import Resolver
from builder.lock.sources import WheelBuild
from builder.matrix.project import Project
from builder.steps.lock import rebuild
from tests.fakes import locks
from tests.unit.lock.test_resolve import Call, Listing, Uv

Edit = Callable[[str, str], Project]
GROUP = "em-1.10-cu1210-py311"
COMMIT = "3f786850e387550fdab836ed7e6dc881de23001b"
ORIGIN = f"git+https://git.example.test/team/extra@{COMMIT}"
RECIPE = f"git: https://git.example.test/team/extra, commit: {COMMIT}"


@dataclass
class FakeBuilder:
    """Builds wheels from `content` and the name, in the version of the sdist or 2.0; it has `kept`, by SHA-256."""

    content: str = "first"
    needs: dict[str, list[str]] = field(default_factory=lambda: {"extra": ["backend", "pip"]})
    log: list[WheelBuild] = field(default_factory=list)
    wheels: list[list[str]] = field(default_factory=list)
    kept: dict[str, BuiltWheel] = field(default_factory=dict)

    def sha256(self, name: str, source: str) -> str:
        return hashlib.sha256(f"{self.content} {name} {source}".encode()).hexdigest()

    def requirements(self, build: WheelBuild) -> list[str]:
        return self.needs.get(build.name, [])

    def build(self, build: WheelBuild, wheels: Sequence[LockedWheel]) -> BuiltWheel:
        self.log.append(build)
        self.wheels.append([wheel.file for wheel in wheels])
        sha256 = self.sha256(build.name, build.source)
        if build.locked and build.locked.sha256 != sha256:
            raise BuildError(f"{build.name}: another wheel")
        sdist = re.search(r"-([0-9.]+)\.tar\.gz#", build.source)
        version = sdist[1] if sdist else "2.0"
        wheel = replace(locks.entry(build.name, version, 5), sha256=sha256, source=build.source, index=build.index)
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
        versions, sources = super().versions(call), self.local._sources
        for name in (versions or {}).keys() & sources.has_sdists.keys():
            file, sdist = "", None
            if versions and sources.has_sdists[name]:
                file = f"{name}-{versions[name]}.tar.gz"
                sdist = cast("DistributionPackage", SimpleNamespace(filename=file, digests={"sha256": "0" * 64}))
            if (name, file) not in sources.built:
                self.local.unbuilt[name, file] = sdist
        return versions


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
    assert (wheel.source, wheel.size, wheel.sha256) == (ORIGIN, 5, builder.sha256("extra", ORIGIN))
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
        MatrixError, match=rf"^matrix.yaml:\d+:\d+: pip cannot be built for {GROUP}: no cell with this lock"
    ):
        resolve(project, uv, FakeBuilder())


def test_no_image_has_what_a_package_needs(project: Project, edit: Edit, uv: SourceUv) -> None:
    edit("needs: [board], requires", "needs: [jupyter], requires")
    with pytest.raises(
        MatrixError, match="no cell with this lock has the components jupyter, and no package"
    ) as caught:
        resolve(edit("  board: [board]", "  board: [board, extra]"), uv, FakeBuilder())
    assert "Add a variant" in caught.value.hint


def test_a_package_cannot_need_itself_for_its_build(project: Project, uv: SourceUv) -> None:
    with pytest.raises(MatrixError, match="extra is needed for its own build: extra -> extra"):
        resolve(project, uv, FakeBuilder(needs={"extra": ["extra"]}))


# ---- a build that needs another package from source

INNER = f"git: https://git.example.test/team/inner, commit: {COMMIT}"
CHAIN = {"extra": ["backend", "outer"], "outer": ["inner"]}


@pytest.fixture
def chain(project: Project, edit: Edit) -> Project:
    """The build of `extra` needs `outer`, and that of `outer` needs `inner`; no image has these two."""
    outer = INNER.replace("inner", "outer")
    return edit("variants:\n", f"  outer: {{{outer}}}\n  inner: {{{INNER}, needs: [board]}}\nvariants:\n")


def test_packages_are_built_before_those_that_need_them(chain: Project, uv: SourceUv) -> None:
    builder = FakeBuilder(needs=CHAIN)
    lock = resolve(chain, uv, builder)
    assert [build.name for build in builder.log] == ["inner", "outer", "extra"]
    assert builder.wheels[1:] == [
        ["inner-2.0-py3-none-any.whl"],
        ["backend-2.0-py3-none-any.whl", "outer-2.0-py3-none-any.whl", "tool-2.0-py3-none-any.whl"],
    ]
    assert [wheel.name for wheel in lock.wheels if wheel.source] == ["extra"], "no image has the others"
    builds = {build.name: [wheel.name for wheel in build.wheels if wheel.source] for build in lock.builds}
    assert builds == {"extra": ["outer"], "inner": [], "outer": ["inner"]}
    assert lockfile.parse_lock(lockfile.dump(lock), "x", GROUP) == lock
    assert lockfile.stale_reason(chain.matrix, lock, chain.groups[GROUP], chain.groups[GROUP]) == ""
    assert resolve(chain, uv, builder, lock) == lock
    assert len(builder.log) == 3


def test_a_package_that_a_package_from_source_requires_is_built_too(chain: Project, uv: SourceUv) -> None:
    uv.needs = {"extra": ["inner"]}
    builder = FakeBuilder(needs={})
    lock = resolve(chain, uv, builder)
    assert sorted(build.name for build in builder.log) == ["extra", "inner"]
    assert [wheel.name for wheel in lock.wheels if wheel.source] == ["extra", "inner"]


@pytest.mark.parametrize("change", ["another commit of inner", "another image"])
def test_what_a_build_needed_is_built_again_and_so_is_the_package(
    chain: Project, edit: Edit, uv: SourceUv, change: str
) -> None:
    builder = FakeBuilder(needs=CHAIN)
    lock = resolve(chain, uv, builder)
    builder.content = "second"
    if change == "another commit of inner":
        other = edit(INNER, INNER.replace(COMMIT, "a" * 40))
        assert (
            lockfile.stale_reason(other.matrix, lock, other.groups[GROUP]) == "sources.inner of matrix.yaml has changed"
        )
    else:
        other = edit("packages: [board]", "packages: [board==1.0]")
    new = resolve(other, uv, builder, lock)
    assert [build.name for build in builder.log[3:]] == ["inner", "outer", "extra"]
    assert lockfile.parse_lock(lockfile.dump(new), "x", GROUP) == new
    assert {each.sha256 for each in new.built.values()}.isdisjoint(each.sha256 for each in lock.built.values())


def test_a_wheel_that_is_lost_is_built_again_after_those_that_it_needs(
    chain: Project, edit: Edit, uv: SourceUv
) -> None:
    builder = FakeBuilder(needs=CHAIN)
    lock = resolve(chain, uv, builder)
    builder.kept.clear()
    edit("  board: {needs", "  more: {needs: [python], packages: [extra]}\n  board: {needs")
    project = edit("jupyter: [board, extra, jupyter]", "jupyter: [board, extra, more, jupyter]")
    again = resolve(project, uv, builder, lock)
    assert [build.name for build in builder.log[3:]] == ["inner", "outer", "extra"]
    assert builder.wheels[3:] == builder.wheels[:3]
    assert (again.wheels, again.builds) == (lock.wheels, lock.builds)


@pytest.mark.parametrize(("lost", "built"), [(False, ["extra"]), (True, ["inner", "outer", "extra"])])
def test_lock_build_builds_what_no_place_has_any_more(
    chain: Project, uv: SourceUv, lost: bool, built: list[str]
) -> None:
    builder = FakeBuilder(needs=CHAIN)
    lock = resolve(chain, uv, builder)
    locks.write_os_locks(chain)
    (chain.root / f"locks/{GROUP}.json").write_text(lockfile.dump(lock))
    if lost:
        builder.kept.clear()
    lines = rebuild(chain, chain.groups[GROUP], ["extra"], builder, lambda _: None)
    assert [build.name for build in builder.log[3:]] == built
    assert len(lines) == len(built)
    lines = rebuild(chain, chain.groups[GROUP], ["inner"], builder, lambda _: None)
    assert [line.split()[1] for line in lines] == ["inner-2.0-py3-none-any.whl"]


def test_a_package_that_only_a_build_needs_can_be_upgraded(chain: Project, uv: SourceUv) -> None:
    """The hint about two versions of it printed this command, which answered that no lock has the package."""
    lock = resolve(chain, uv, FakeBuilder(needs=CHAIN))
    assert "inner" not in lock.versions
    assert "inner" in lock.packages


def test_packages_that_need_each_other_for_their_builds_are_named(chain: Project, uv: SourceUv) -> None:
    needs = {**CHAIN, "inner": ["extra"]}
    with pytest.raises(MatrixError, match="extra is needed for its own build: extra -> outer -> inner -> extra"):
        resolve(chain, uv, FakeBuilder(needs=needs))


def test_a_lock_of_builds_that_need_each_other_is_refused(chain: Project, uv: SourceUv) -> None:
    lock = resolve(chain, uv, FakeBuilder(needs=CHAIN))
    extra, inner, outer = lock.builds
    [wheel] = outer.wheels
    for build, message in (
        (replace(inner, wheels=(lock.built["outer"],)), "builds need each other: (inner -> outer|outer -> inner) -> "),
        (replace(inner, wheels=(replace(wheel, version="3.0"),)), "two wheels of inner were built from source"),
        (replace(inner, wheels=(lock.built["extra"],), name="other"), "the builds are not those of the wheels"),
    ):
        text = lockfile.dump(replace(lock, builds=(extra, build, outer)))
        with pytest.raises(LockError, match=message):
            lockfile.parse_lock(text, "x", GROUP)


def test_a_package_from_source_has_one_version_in_a_group(chain: Project, edit: Edit, uv: SourceUv) -> None:
    """The store and the lock name its wheel by group and package."""
    edit(f"  inner: {{{INNER}, needs: [board]}}\n", "  inner: {}\n")
    project = edit("packages: [extra]", "packages: [extra, inner]")
    builder = FakeBuilder(needs={**CHAIN, "outer": ["inner==1.0"]})
    reason = r"images and builds need two wheels of inner from source: 1\.0 \(.{12}\.\.\.\) and 2\.0 \("
    with pytest.raises(LockError, match=f"^{GROUP}: {reason}") as caught:
        resolve(project, uv, builder)
    assert caught.value.hint.startswith("Pin one version in matrix.yaml. ")
    builder.needs["outer"] = ["inner"]
    assert resolve(project, uv, builder).built["inner"].version == "2.0"


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
    [line] = rebuild(project, cells, ["Extra"], builder, said.append)
    assert line == f"{GROUP}: extra-2.0-py3-none-any.whl is the locked wheel, sha256:{wheel.sha256}"
    assert (builder.log[-1].locked, builder.wheels[-1]) == (wheel, builder.wheels[0])
    builder.content = "other"
    with pytest.raises(BuildError, match="another wheel"):
        rebuild(project, cells, ["extra"], builder, said.append)
    with pytest.raises(UsageError, match="no lock of these cells has a wheel of board that was built from source"):
        rebuild(project, cells, ["board"], builder, said.append)
