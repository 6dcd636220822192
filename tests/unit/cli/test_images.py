"""The commands that make images: what they pass to `builder.build`, and the store that they use."""

from __future__ import annotations

import json
import os
import pwd
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import pytest

from builder.build.assemble import Assembler
from builder.build.context import LoadedImage
from builder.build.dockerfile import DockerfileBuilder
from builder.build.outcomes import Outcome
from builder.cli import images as commands
from builder.cli.context import Context
from builder.common import git
from builder.common.errors import ImageTestError, NoEngineError
from builder.common.files import digest_of_bytes
from builder.debian import apt
from builder.debian.archives import Archives, Kept, PackageLocations
from builder.debian.os_lock import OsLock
from builder.engine import setup
from builder.engine.client import Engine
from builder.evidence.results import Coverage
from builder.host import Host, RegistrySettings
from builder.layers.store import Store
from builder.lock.lockfile import GROUP_LOCKS
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.plan import Plan
from builder.steps import images
from tests.fakes import locks
from tests.fakes.engine import FakeEngine
from tests.unit.cli.conftest import CELL, Run
from tests.unit.matrix.test_cells import TINY_IDS

_Maker = Assembler | DockerfileBuilder


@dataclass
class Call:
    """The arguments of a call of `build_test_tag` or `retest_images`; `holder` is the command in the lock.

    `thorough` are the components whose thorough tests each image must pass.
    """

    maker: _Maker | None
    cells: list[str]
    jobs: int
    tester: dict[str, object] | None
    holder: str
    thorough: list[frozenset[str]]


@pytest.fixture
def archive(monkeypatch: pytest.MonkeyPatch) -> locks.FakeArchive:
    """Debian's archives, with all packages that are locked."""
    archive = locks.FakeArchive(versions={"newbird": "1.0-1", "oldbird": "1.0-1"})
    monkeypatch.setattr(apt, "open_archive", archive)

    def locate(found: Archives, lock: OsLock, is_kept: Kept) -> PackageLocations:
        archive.looked_up.append(lock.debian)
        return locks.FakeArchives(found._matrix, archive.versions).locate(lock, is_kept)

    monkeypatch.setattr(Archives, "locate", locate)
    return archive


@pytest.fixture
def calls(run: Run, locked: Project, monkeypatch: pytest.MonkeyPatch, archive: locks.FakeArchive) -> list[Call]:
    """The calls, in a rendered checkout. `build_test_tag` reports that it built the first image."""
    calls: list[Call] = []

    def new_tester(_: object, __: object, *, jobs: int, gpu_mode: str, junit: Path | None) -> dict[str, object]:
        return {"gpu_mode": gpu_mode, "junit": junit}

    def make(
        _: object,
        maker: Assembler | DockerfileBuilder | None,
        tester: dict[str, object] | None,
        planned: Plan,
        jobs: int,
    ) -> list[Outcome]:
        holder = json.loads((locked.state / "lock").read_text())["command"]
        cells, thorough = [image.id for image in planned.images], [image.thorough for image in planned.images]
        calls.append(Call(maker, cells, jobs, tester, holder, thorough))
        done = [Outcome(image=image, coverage=Coverage()) for image in planned.images]
        built = LoadedImage(id="", digest="", origin="built")
        return [replace(done[0], loaded=built, tested=bool(tester), tagged=bool(tester)), *done[1:]]

    def retest(_: object, tester: dict[str, object], planned: Plan, __: object, jobs: int) -> list[Outcome]:
        return make(None, None, tester, planned, jobs)

    assert run("render").code == 0
    monkeypatch.setattr(Engine, "connect", FakeEngine)
    monkeypatch.setattr(images, "build_test_tag", make)
    monkeypatch.setattr(images, "new_tester", new_tester)
    monkeypatch.setattr(commands, "new_tester", new_tester)
    monkeypatch.setattr(commands, "retest_images", retest)
    return calls


def test_commands_pass_their_options_to_the_build(run: Run, calls: list[Call]) -> None:
    result = run("images", "-j", "3")
    assert (result.code, result.out) == (0, "")
    assert "1 image built, tested and tagged. 4 images up to date (" in result.err
    assert run("build", "-j2", CELL).code == 0
    assert run("test", "-j2", "--gpu", "off", CELL).code == 0
    assert [(call.holder, call.cells, call.jobs, call.tester) for call in calls] == [
        ("builder images", [TINY_IDS[9], *TINY_IDS[12:]], 3, {"gpu_mode": "auto", "junit": None}),
        ("builder build", [CELL], 2, None),
        ("builder test", [CELL], 2, {"gpu_mode": "off", "junit": None}),
    ]
    assert [type(call.maker) for call in calls[:2]] == [Assembler, Assembler]


def test_outcomes_are_printed_as_json(run: Run, calls: list[Call], tmp_path: Path) -> None:
    result = run("images", CELL, "-j2", "--format", "json", "--junit", str(tmp_path))
    [outcome] = json.loads(result.out)["images"]
    assert (outcome["cell"], outcome["made"], outcome["tagged"], outcome["error"]) == (CELL, "built", True, None)
    assert calls[0].tester == {"gpu_mode": "auto", "junit": tmp_path}
    assert "up to date" not in result.err


@pytest.mark.parametrize("command", ["images", "build"])
def test_an_engine_is_started_only_with_the_option(
    run: Run, calls: list[Call], monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """`make images` installs one if there is none; `builder images` must not."""
    started: list[Engine] = []

    def connect() -> Engine:
        raise NoEngineError("no Docker Engine answers at x", hint="builder engine")

    def ensure(_: object) -> Engine:
        started.append(FakeEngine())
        return started[0]

    monkeypatch.setattr(Engine, "connect", connect)
    monkeypatch.setattr(setup, "ensure", ensure)
    result = run(command, CELL)
    assert (result.code, started, calls) == (6, [], [])
    assert "no Docker Engine answers at x\n  -> builder engine" in result.err
    assert run(command, CELL, "--start-engine").code == 0
    assert len(started) == len(calls) == 1


def test_images_that_are_not_rendered_are_refused(run: Run, locked: Project, calls: list[Call]) -> None:
    dockerfile = f"images/{CELL}/plain.Dockerfile"
    (locked.root / dockerfile).write_text("")
    result = run("images", CELL)
    assert (result.code, calls) == (5, [])
    assert f"{dockerfile}: differs" in result.err
    assert f"  -> Update it: builder render {CELL}\n" in result.err
    assert run("render", CELL).code == 0
    assert run("images", CELL).code == 0


def test_other_cells_without_a_lock_or_a_dockerfile_do_not_stop_an_image(
    run: Run, locked: Project, calls: list[Call]
) -> None:
    """A line of matrix.yaml that could not be locked stopped the images of every other line."""
    unlocked = TINY_IDS[0]
    (locked.root / GROUP_LOCKS.path(unlocked)).unlink()
    shutil.rmtree(locked.root / "images")
    rendered = run("render", f"{CELL}*")
    assert rendered.code == 0
    assert sorted(path.name for path in (locked.root / "images").iterdir()) == [CELL]
    assert run("render", "--check", f"{CELL}*").code == 0
    assert run("images", CELL).code == 0
    assert [call.cells for call in calls] == [[CELL]]
    refused = run("images", unlocked)
    assert refused.code == 4
    assert f"lock: not locked: {unlocked}\n  -> Resolve first: builder lock {unlocked}\n" in refused.err


def test_a_part_is_rendered_and_the_rest_stays(run: Run, locked: Project, calls: list[Call]) -> None:
    other = locked.root / f"images/{TINY_IDS[0]}/plain.Dockerfile"
    other.write_text("")
    stray = locked.root / "images/gone"
    stray.mkdir()
    assert run("render", CELL).err.endswith(" files, 0 changed\n")
    assert run("render", "--check", CELL).code == 0
    assert (other.read_text(), stray.exists()) == ("", True)
    assert run("render", "--check").code == 5
    assert run("render").code == 0
    assert (other.read_text() != "", stray.exists()) == (True, False)


def test_the_method_dockerfile_needs_no_store(run: Run, tiny: Project, calls: list[Call]) -> None:
    assert run("build", "--method", "dockerfile", CELL).code == 0
    assert [type(call.maker) for call in calls] == [DockerfileBuilder]
    assert not (tiny.root.parent / "cache").exists()


def test_images_of_dockerfiles_run_all_their_tests(run: Run, locked: Project, calls: list[Call]) -> None:
    """Their layers are not those of the plan, even if there are as many."""
    chosen = [CELL, f"{CELL}-board"]
    assert run("images", "--method", "dockerfile", *chosen).code == 0
    assert run("images", *chosen).code == 0
    planned = plan.make_locked_plan(locked, locked.select(chosen)).images
    assert calls[0].thorough == [frozenset(image.components) for image in planned]
    assert calls[1].thorough == [image.thorough for image in planned] != calls[0].thorough


# ---- packages that Debian's archives no longer have

CHANGE = "tini 1.0-1 -> 2.0-1 (locks/os-newbird-"


def locks_and_images(project: Project) -> dict[str, bytes]:
    folders = (project.root / "locks", project.root / "images")
    return {str(path): path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()}


def test_packages_that_are_gone_are_replaced_by_current_ones(
    run: Run, locked: Project, calls: list[Call], archive: locks.FakeArchive
) -> None:
    """The build failed after minutes of downloads, with a page of apt's messages for each operating system."""
    archive.versions["newbird"] = "2.0-1"
    before = plan.make_locked_plan(locked, locked.select([CELL])).images[0].os_inputs
    result = run("images", CELL)
    assert result.code == 0, result.err
    assert "Locked Debian packages are no longer in any archive. Locking the current versions:" in result.err
    assert CHANGE in result.err
    assert f"  in {CELL}\n" in result.err
    assert "git commit -m 'Update Debian packages' locks" in result.err
    after = plan.make_locked_plan(locked, locked.select([CELL])).images[0]
    assert after.os_inputs != before
    assert [call.cells for call in calls] == [[CELL]]
    assert run("render", "--check").code == 0
    assert "git commit" not in run("images", CELL).err, "the new locks are current"


def test_changed_locks_are_named_after_an_interrupted_build(
    run: Run, calls: list[Call], archive: locks.FakeArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stay in the checkout, and the user did not ask for them."""

    def interrupt(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(images, "build_test_tag", interrupt)
    archive.versions["newbird"] = "2.0-1"
    result = run("images", CELL)
    assert result.code == 130
    assert result.err.count("git restore locks") == 1
    assert "git restore locks" not in run("images", CELL).err, "the new locks are current"


@pytest.mark.parametrize(("variable", "arguments"), [("1", ""), ("", "--locked")])
def test_locked_packages_that_are_gone_are_refused(
    run: Run, locked: Project, calls: list[Call], archive: locks.FakeArchive, monkeypatch: pytest.MonkeyPatch,
    variable: str, arguments: str,
) -> None:  # fmt: skip
    archive.versions["newbird"] = "2.0-1"
    before = locks_and_images(locked)
    monkeypatch.setenv("GPU_IMAGES_LOCKED", variable)
    result = run("images", "qz-0.5-cu129-py311*", *arguments.split())
    assert (result.code, calls) == (5, [])
    assert CHANGE in result.err
    [images_line] = [line for line in result.err.splitlines() if line.startswith("  in ")]
    assert set(images_line.removeprefix("  in ").split(", ")) == {CELL, f"{CELL}-board", f"{CELL}-jupyter"}
    assert result.err.count("->") > 1
    assert "-> Run the same command with --no-locked" in result.err
    assert locks_and_images(locked) == before
    assert run("images", "--no-locked", CELL).code == 0, "the hint works"


@pytest.mark.parametrize("option", ["--locked", "--no-locked"])
def test_a_lock_of_an_earlier_builder_is_not_said_to_be_gone(
    run: Run, calls: list[Call], archive: locks.FakeArchive, option: str
) -> None:
    """Without source packages, most packages are not found, although the archives have them."""
    archive.versions["newbird"], archive.source = "2.0-1", "glibc (1)"
    result = run("images", option, CELL)
    assert (result.code, len(calls)) == ((5, 0) if option == "--locked" else (0, 1))
    assert "Locks of an earlier builder do not name source packages" in result.err
    assert "no longer in any archive" not in result.err


def test_nothing_is_looked_up_for_an_operating_system_in_the_store(
    run: Run, locked: Project, calls: list[Call], archive: locks.FakeArchive
) -> None:
    image = plan.make_locked_plan(locked, locked.select([CELL])).images[0]
    store = Store(locked.root.parent / "cache/gpu-images")
    store.prepare()
    blob = b"operating system"
    digests = {"digest": digest_of_bytes(blob), "diff_id": digest_of_bytes(blob)}
    rest = {"created": "2026-11-22T00:00:00Z", "taken": (), "folders": ()}
    store.path(digests["digest"]).parent.mkdir(parents=True, exist_ok=True)
    store.path(digests["digest"]).write_bytes(blob)
    store.put_record(image.os_inputs, {**digests, "size": len(blob), "unpacked": len(blob), "toc": "", **rest})
    archive.versions["newbird"] = "2.0-1"
    assert run("images", "--locked", CELL).code == 0
    assert archive.looked_up == []


# ---- the store


@pytest.mark.parametrize(
    ("arguments", "variable", "folder"),
    [
        ([], "", "cache/gpu-images"),
        (["--store", "here"], "", "project/here"),
        ([], "there", "project/there"),
        (["--store", "here"], "there", "project/here"),
    ],
)
@pytest.mark.usefixtures("calls")
def test_the_option_decides_the_folder_of_the_store_before_the_variable(
    run: Run, tiny: Project, monkeypatch: pytest.MonkeyPatch, arguments: list[str], variable: str, folder: str
) -> None:
    if variable:
        monkeypatch.setenv("GPU_IMAGES_STORE", variable)
    assert run(*arguments, "build", CELL).code == 0
    parent = tiny.root.parent
    assert [path.parent for path in parent.rglob("oci-layout")] == [parent / folder]


def test_the_store_limit_is_checked_before_downloads(run: Run, calls: list[Call]) -> None:
    """CUDA of the tiny project has 2 MB."""
    result = run("--store-limit", "2MB", "build", CELL)
    assert (result.code, calls) == (10, [])
    assert "its limit is 2.0 MB" in result.err
    assert run("--store-limit", "4MB", "build", CELL).code == 0


@pytest.mark.parametrize(("home", "cache"), [("", ""), ("", "relative")])
def test_the_store_needs_no_variable_home(run: Run, monkeypatch: pytest.MonkeyPatch, home: str, cache: str) -> None:
    """An empty HOME gave /.cache; a relative XDG_CACHE_HOME must be ignored."""
    monkeypatch.setenv("HOME", home)
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    own = pwd.getpwuid(os.getuid()).pw_dir
    assert Context().store.root == Path(own).resolve() / ".cache/gpu-images"
    monkeypatch.setenv("HOME", "relative")
    result = run("gc", "--dry-run")
    assert result.code == 12
    assert "HOME is 'relative'" in result.err


def test_the_settings_for_registries_are_those_of_the_checkout(
    edit: Callable[[str, str], Project], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("builder.host.read_host", Host)
    settings = 'insecure: ["e.test:5000"]\ncreate_repository: [make-it, "{repository}"]'
    context = Context(root=edit("namespace: team", f"namespace: team\n{settings}").root)
    assert context.host.registries == RegistrySettings(insecure=("e.test:5000",), create=("make-it", "{repository}"))
    assert context.host is context.host, "read once"
    assert Context(root=tmp_path).host.registries == RegistrySettings(), "outside a checkout"


@pytest.mark.parametrize("text", ["", "-1", "40 GB"])
def test_invalid_sizes_are_refused(run: Run, text: str) -> None:
    result = run("--store-limit", text, "gc")
    assert result.code == 2
    assert "invalid size" in result.err
    assert "use e.g. 40GB" in result.err


# ---- refresh


@pytest.fixture
def updates(archive: locks.FakeArchive, calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> locks.FakeArchive:
    """Debian has updated every package since; there is no git."""
    monkeypatch.setattr(git, "commit", lambda *_: None)
    archive.versions = {"newbird": "2.0-1", "oldbird": "2.0-1"}
    return archive


def test_a_refresh_builds_what_changed(run: Run, calls: list[Call], updates: locks.FakeArchive) -> None:
    result = run("refresh", "newbird")
    assert result.code == 0, result.err
    assert [call.cells for call in calls] == [[name for name in TINY_IDS if "-py311" in name]]
    assert run("refresh", "newbird").err.endswith("no image changed\n")


def test_a_refresh_goes_on_with_the_debian_releases_that_can_be_locked(
    run: Run, calls: list[Call], updates: locks.FakeArchive
) -> None:
    updates.broken = "oldbird"
    result = run("refresh", "*")
    assert result.code == 18
    [call] = calls
    assert call.cells == [name for name in TINY_IDS if "-py311" in name]
    assert "  Debian oldbird: apt-get update failed" in result.err
    assert f"{len(call.cells)} images built and tested; the rest failed:" in result.err


def test_a_refresh_that_can_lock_nothing_fails_as_lock_does(
    run: Run, calls: list[Call], updates: locks.FakeArchive
) -> None:
    updates.broken = "oldbird"
    assert run("refresh", "oldbird").code == 4
    assert calls == []


def test_a_refresh_leaves_out_cells_that_could_not_be_locked_at_all(
    run: Run, calls: list[Call], updates: locks.FakeArchive, locked: Project
) -> None:
    """They have no lock to render from."""
    [path] = (locked.root / "locks").glob("os-oldbird-*.json")
    path.unlink()
    updates.broken = "oldbird"
    result = run("refresh", "newbird", "em-1.9-cu129-py39")
    assert result.code == 18
    assert [call.cells for call in calls] == [[name for name in TINY_IDS if "-py311" in name]]


@pytest.mark.parametrize(("failing", "code"), [({CELL}, 18), ({CELL, f"{CELL}-board"}, 8)])
def test_a_refresh_of_which_images_fail_names_them(
    run: Run,
    calls: list[Call],
    updates: locks.FakeArchive,
    monkeypatch: pytest.MonkeyPatch,
    failing: set[str],
    code: int,
) -> None:
    def fake(_: object, __: object, ___: object, planned: Plan, jobs: int) -> list[Outcome]:
        error = ImageTestError("a test failed")
        return [
            Outcome(image=image, error=error) if image.id in failing else Outcome(image=image, coverage=Coverage())
            for image in planned.images
        ]

    monkeypatch.setattr(images, "build_test_tag", fake)
    result = run("refresh", CELL, f"{CELL}-board")
    assert result.code == code
    assert ", ".join(sorted(failing)) in result.err
    assert ("1 image built and tested; the rest failed:" in result.err) == (code == 18)
