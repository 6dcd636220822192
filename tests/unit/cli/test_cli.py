"""The command line: exit codes, output streams, errors, and the commands before building."""

from __future__ import annotations

import errno
import importlib
import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
import yaml

from builder import cli
from builder.cli import COMMANDS
from builder.cli.context import SHOWN
from builder.common import errors
from builder.common.console import View
from builder.common.errors import BuilderError, LockError
from builder.common.lock_text import KNOWN_LAYERS
from builder.common.text import size
from builder.debian import apt
from builder.layers import known_layers
from builder.layers.oci import Layer
from builder.lock.lockfile import GROUP_LOCKS
from builder.matrix.project import Project
from builder.plan import plan
from builder.steps import lock as locking
from builder.steps.lock import Updated
from tests.fakes import locks
from tests.fakes.engine import MemoryConsole
from tests.unit.cli.conftest import CELL, Run
from tests.unit.matrix.test_cells import TINY_IDS, Edit

UNLOCKED = "em-1.9-cu129-py39"
TAG = "registry.example.test:5000/team/quartz-cuda"
Fail = Callable[[BaseException], None]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Makes `builder plan` raise an exception."""

    def fail(error: BaseException) -> None:
        def make(*_: object) -> NoReturn:
            raise error

        monkeypatch.setattr(plan, "make_plan", make)

    return fail


# ---- help


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_commands_and_exit_codes(run: Run, flag: str) -> None:
    result = run(flag)
    assert (result.code, result.err) == (0, "")
    for name in cli.cli.commands:
        assert f"\n  {name} " in result.out
    for kind in errors.ALL[1:]:
        assert re.search(rf"\n +{kind.exit_code}  [A-Za-z]", result.out), kind
    assert f"{errors.INTERRUPTED}  Interrupted" in result.out


@pytest.mark.parametrize("name", sorted(cli.cli.commands))
def test_every_command_has_help(run: Run, name: str) -> None:
    """The first sentence fits into the list of commands, and every option has a text."""
    result = run(name, "--help")
    assert result.code == 0
    usage, text = result.out.split("\n\n")[:2]
    assert usage.startswith(f"Usage: builder {name}")
    assert re.match(r"  [A-Z].*\.", text, re.DOTALL)
    command = cli.cli.commands[name]
    _, sentence = COMMANDS[name]
    assert (command.help or "").startswith(sentence), "the list of commands has another sentence"
    assert sentence.endswith(".")
    assert len(sentence) <= 65, "it does not fit into the list of commands"
    options = [parameter.to_info_dict() for parameter in command.params if parameter.param_type_name == "option"]
    assert [option["name"] for option in options if not option["help"]] == []


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["plan", "--nothing"], ["plan", "--format", "x"], ["build", "-j", "0"]]
)
def test_an_invalid_command_line_is_a_usage_error(run: Run, arguments: list[str]) -> None:
    result = run(*arguments)
    assert (result.code, result.out) == (2, "")
    assert "Error: " in result.err


def test_a_checkout_is_found_by_the_option_root(
    run: Run, tmp_path: Path, tiny: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("plan", "--format", "ids")
    assert result.code == 2
    assert "no matrix.yaml in " in result.err
    assert run("--root", str(tiny.root), "plan", "--format", "ids").code == 0


# ---- errors


@pytest.mark.parametrize("kind", errors.ALL)
@pytest.mark.parametrize("debug", [False, True])
def test_an_error_has_an_exit_code_a_title_and_a_hint(
    run: Run, failing: Fail, kind: type[BuilderError], debug: bool
) -> None:
    failing(kind("it is [bold]wrong[/bold]", hint="do this"))
    result = run(*(["--debug"] if debug else []), "plan", CELL)
    assert (result.code, result.out) == (kind.exit_code, "")
    assert f"{kind.title}: it is [bold]wrong[/bold]\n  -> do this\n" in result.err
    assert ("Traceback" in result.err) is debug


@pytest.mark.parametrize("kind", [BuilderError, RuntimeError])
def test_an_error_controls_no_terminal(run: Run, failing: Fail, kind: type[Exception]) -> None:
    """It may quote a registry, an index or the output of a build."""
    failing(kind("it is \x1b]0;owned\x07\x1b[31mwrong\x1b[0m\n  and\x08"))
    assert "it is wrong\n  and\ufffd\n" in run("plan", CELL).err


@pytest.mark.parametrize("error", [ZeroDivisionError("oh"), OSError("oh")])
@pytest.mark.parametrize("debug", [False, True])
def test_an_internal_error_shows_a_traceback_only_with_debug(
    run: Run, failing: Fail, error: Exception, debug: bool
) -> None:
    failing(error)
    result = run(*(["--debug"] if debug else []), "plan", CELL)
    assert result.code == 1
    assert ("Traceback" in result.err) is debug
    assert (f"internal error: {type(error).__name__}: oh\n  -> Run again with --debug" in result.err) is not debug


def test_a_closed_pipe_is_no_internal_error(run: Run, failing: Fail) -> None:
    failing(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    stdout = os.dup(1)
    try:
        result = run("plan", CELL)
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    assert (result.code, result.err) == (1, "")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(KeyboardInterrupt(), 130, "interrupted:"), (errors.Terminated(), 143, "terminated:")],
)
def test_an_interrupted_command_can_be_run_again(
    run: Run, failing: Fail, error: BaseException, code: int, message: str
) -> None:
    failing(error)
    result = run("plan", CELL)
    assert result.code == code
    assert result.err.lstrip() == f"{message} run the same command again to continue\n"


def test_sigterm_becomes_terminated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("SIGTERM did nothing")

    monkeypatch.setattr(plan, "make_plan", kill)
    assert run("plan", CELL).code == 143


@pytest.mark.usefixtures("locked")
def test_a_full_disk_is_no_internal_error(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    result = run("render")
    assert result.code == errors.DiskError.exit_code
    assert "disk" in result.err


@pytest.mark.parametrize("command", ["render", "lock", "images", "build", "test", "clean"])
def test_two_builders_never_use_a_checkout_at_once(run: Run, locked: Project, command: str) -> None:
    assert run("render").code == 0
    with locked.locked("builder images", wait=False, view=View(MemoryConsole())):
        result = run(command)
    assert result.code == 9
    assert f"`builder images` (pid {os.getpid()}" in result.err
    assert "--wait" in result.err


# ---- plan


def test_the_ids_of_cells_are_listed(run: Run) -> None:
    result = run("plan", "--format", "ids", "*")
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == TINY_IDS


def test_a_plan_is_printed_as_json(run: Run, tiny: Project) -> None:
    result = run("plan", "--format", "json", CELL, UNLOCKED)
    assert (result.code, result.err) == (0, "")
    assert json.loads(result.out) == plan.make_plan(tiny, tiny.select([CELL, UNLOCKED])).as_data()


def test_one_image_is_shown_by_layers(run: Run) -> None:
    result = run("plan", CELL, UNLOCKED)
    assert result.code == 0
    assert CELL in result.out
    assert "quartz bytecode" in result.out
    assert re.search(r"\bos +6 kB", result.out), "the size of its Debian packages"
    assert f"{TAG}:0.5.3-cu129-py311" in result.out
    assert "unique" not in result.out  # one image shares no layers
    assert result.err == f"not locked: {UNLOCKED}   (builder lock {UNLOCKED})\n"


def test_several_images_are_shown_in_a_line_each(run: Run, tiny: Project) -> None:
    ids = [CELL, f"{CELL}-board"]
    plain, board = (image.bytes for image in plan.make_plan(tiny, tiny.select(ids)).images)
    added = size(board - plain)
    head, first, second, last = run("plan", *ids).out.splitlines()
    assert head.split() == ["CELL", "LAYERS", "WHEELS", "SIZE", "ADDS", "OWN", "TAG"]
    assert first.split() == [CELL, "5", "4", *size(plain).split(), *size(plain).split(), "-", f"{TAG}:0.5"]
    assert second.split() == [
        f"{CELL}-board", "7", "5", *size(board).split(), *added.split(), *added.split(), f"{TAG}:0.5-board"
    ]  # fmt: skip
    percent = round(100 * board / (plain + board))
    assert last == f"2 images: {size(plain + board)} in total, {size(board)} in unique layers ({percent} %)"
    layers = run("plan", "--layers", *ids)
    assert "quartz bytecode" in layers.out
    assert layers.out.splitlines()[-1] == last


@pytest.fixture
def before(tiny: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What git exports for any revision: by default the project as it is. With git itself: test_readme.py."""
    folder = tmp_path / "before"
    shutil.copytree(tiny.root, folder, symlinks=True)

    def export(root: Path, revision: str, target: Path) -> None:
        shutil.copytree(folder, target, symlinks=True, dirs_exist_ok=True)

    monkeypatch.setattr("builder.common.git.export", export)
    return folder


@pytest.mark.usefixtures("before")
def test_only_images_that_changed_since_a_revision_are_planned(run: Run, tiny: Project) -> None:
    since = ("plan", "*", "--changed-since", "HEAD")
    assert run(*since, "--format", "ids").out == "\n"
    (tiny.root / "templates/board/files").mkdir(parents=True, exist_ok=True)
    (tiny.root / "templates/board/files/new").write_text("new")
    changed = run(*since, "--format", "ids").out.split()
    assert f"{CELL}-board" in changed
    assert CELL not in changed
    locked = run("plan", CELL, f"{CELL}-board", "--changed-since", "HEAD", "--format", "github")
    parts, cells = locked.out.splitlines()
    [part] = json.loads(parts.removeprefix("parts="))["include"]
    assert (part["name"], part["cells"]) == (f"{CELL}-board (1 image)", f"{CELL}-board")
    assert cells == f"cells={CELL}-board"
    refused = run(*since, "--format", "github")
    assert refused.code == 4
    assert "not locked: " in refused.err
    assert not list((tiny.root / ".builder/tmp").iterdir())


def test_a_revision_of_zeros_is_no_revision(run: Run) -> None:
    """GitHub names it for a new branch."""
    assert run("plan", CELL, "--changed-since", "0" * 40, "--format", "ids").out.split() == [CELL]


def test_only_images_that_are_not_released_are_planned(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.release.status.unreleased", lambda images, _: images[:1])
    assert run("plan", f"{CELL}*", "--unreleased", "--format", "ids").out.split() == [CELL]


def test_a_pipeline_of_gitlab_is_the_output(run: Run) -> None:
    result = run("plan", CELL, "--format", "gitlab", "--publish")
    assert {"stages", f"images of {CELL} (1 image)", "release"} <= set(yaml.safe_load(result.out))
    assert run("plan", CELL, "--publish").err == "usage: --publish needs --format gitlab\n"


@pytest.mark.parametrize(
    "command", [("plan", CELL, "--unreleased"), ("prune",), ("release",), ("stage",)], ids=" ".join
)
def test_commands_for_a_registry_fail_without_one(run: Run, tiny: Project, command: tuple[str, ...]) -> None:
    path = tiny.root / "matrix.yaml"
    path.write_text(path.read_text().replace("registry: registry.example.test:5000", 'registry: ""'))
    result = run(*command)
    assert result.code == 2
    assert "no registry in matrix.yaml" in result.err


def test_every_image_differs_from_a_revision_that_cannot_be_planned(run: Run, before: Path) -> None:
    (before / "matrix.yaml").write_text("registry: 1\n")
    result = run("plan", CELL, "--changed-since", "HEAD", "--format", "ids")
    assert result.out.split() == [CELL]
    assert "HEAD cannot be planned, so all images count as changed: matrix.yaml:1:11: " in result.err


def test_an_unknown_cell_is_refused_with_a_similar_name(run: Run) -> None:
    result = run("plan", "qz-0.5-cu129-py312")
    assert (result.code, result.out) == (2, "")
    assert "no cell matches 'qz-0.5-cu129-py312'; did you mean 'qz-0.5-cu129-py311'?" in result.err
    assert "  -> `builder plan '*'` lists every cell." in result.err, "there need be no set `all`"


# ---- ends of support

BOOKWORM = "support of Debian bookworm ended on 2028-06-30: no security updates since (1 image of qz-0.5-cu129-py311)\n"


@pytest.mark.parametrize("command", [["plan", CELL], ["status", "--here", CELL]])
def test_ends_of_support_are_shown_when_they_are_near(run: Run, bookworm: Project, command: list[str]) -> None:
    assert run(*command, today=date(2028, 4, 30)).err == ""
    assert run(*command, today=date(2028, 7, 1)).err == BOOKWORM


def test_scripts_get_every_end_of_support(run: Run, bookworm: Project) -> None:
    """On any day, with its source: they compare it themselves."""
    [image] = json.loads(run("plan", CELL, "--format", "json").out)["images"]
    [end] = image["support"]
    assert (end["entry"], end["last"]) == ("debian.bookworm", "2028-06-30")
    assert end["source"].startswith("Debian")
    [row] = json.loads(run("status", "--here", CELL, "--format", "json").out)
    assert row["support"] == "2028-06-30"


def test_an_image_has_the_last_day_of_its_support_as_a_label(bookworm: Project, run: Run) -> None:
    """The same on any day; none if it is not known."""
    labels = {
        cell.id: cell_image.settings.labels.get("io.github.gpu-images.support.last")
        for cell in bookworm.select([CELL])
        for cell_image in plan.make_plan(bookworm, [cell]).images
    }
    assert labels == {CELL: "2028-06-30"}


def test_debian_packages_without_updates_are_named_when_they_are_locked(
    run: Run, bookworm: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apt, "open_archive", locks.FakeArchive(versions={"bookworm": "1.0-1"}))
    assert BOOKWORM in run("lock", "--os", CELL, today=date(2028, 7, 1)).err
    assert "support" not in run("lock", "--os", CELL, today=date(2028, 4, 30)).err


@pytest.mark.parametrize("command", [["plan", CELL], ["status", "--here", CELL]])
def test_cells_that_were_not_built_yet_are_named_with_the_reason(run: Run, edit: Edit, command: list[str]) -> None:
    before = run(*command)
    edit('"3.11": {debian: newbird}', '"3.11": {debian: newbird, not_built: "nobody can fetch it"}')
    result = run(*command)
    assert result.out == before.out
    assert result.err == "1 image of qz-0.5-cu129-py311: not built yet: nobody can fetch it\n"
    assert "not built yet" not in run(*command[:-1], "em-1.9-cu129-py39").err


def test_a_reason_why_cells_were_not_built_changes_no_image(tiny: Project, edit: Edit) -> None:
    before = [image.plan for image in plan.make_plan(tiny, tiny.cells).images]
    edited = edit('"3.11": {debian: newbird}', '"3.11": {debian: newbird, not_built: "nobody can fetch it"}')
    assert [image.plan for image in plan.make_plan(edited, edited.cells).images] == before


def test_updates_are_listed_for_a_workflow(run: Run, tiny: Project) -> None:
    """Also if a lock is damaged: an update makes it again."""
    (tiny.root / GROUP_LOCKS.path(CELL)).write_text("{")
    result = run("plan", "*", "--format", "updates")
    assert (result.code, result.err) == (0, "")
    assert result.out == 'debian=["oldbird", "newbird"]\nframeworks=["ember", "quartz"]\n'


# ---- lock and render


def test_lock_names_what_it_wrote_or_how_to_upgrade(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    updated = Updated(written=("locks/x.json",), done=("x",), failures={})
    monkeypatch.setattr(locking, "lock", lambda *_, **__: updated)
    assert run("lock").err == "written: locks/x.json\n"
    monkeypatch.setattr(locking, "lock", lambda *_, **__: Updated(written=(), done=("x",), failures={}))
    wheels, debian = (
        "`builder lock --upgrade` chooses newer wheels",
        "`builder lock --os` chooses newer Debian packages",
    )
    assert run("lock").err == f"all locks unchanged; {wheels}; {debian}\n"
    assert run("lock", "--upgrade").err == f"all locks unchanged; {debian}\n"
    assert run("lock", "--upgrade", "--os").err == "all locks unchanged\n"
    chosen = f"`builder lock --upgrade {CELL} 'em-*'` chooses newer wheels"
    assert run("lock", "--os", CELL, "em-*").err == f"all locks unchanged; {chosen}\n"


@pytest.mark.parametrize(("done", "code"), [((), 4), (("x",), 18)])
def test_lock_names_what_it_wrote_after_a_failure_too(
    run: Run, monkeypatch: pytest.MonkeyPatch, done: tuple[str, ...], code: int
) -> None:
    updated = Updated(written=("locks/x.json",), done=done, failures={"y": [LockError("y: no", hint="change it")]})
    monkeypatch.setattr(locking, "lock", lambda *_, **__: updated)
    result = run("lock")
    assert result.code == code
    assert "y: no" in result.err
    assert "-> change it" in result.err
    assert result.err.count("locks/x.json") == 1


def test_what_is_too_large_to_build_is_refused_when_it_is_locked_and_rendered(
    run: Run, locked: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`images` refused it, after `lock` and `render` had succeeded."""
    path = locked.root / "matrix.yaml"
    path.write_text(f'budgets: [{{cells: "{CELL}", image: 1MB, layer: 1MB}}]\n{path.read_text()}')
    monkeypatch.setattr(locking, "lock", lambda *_, **__: Updated(written=("locks/x.json",), done=("x",), failures={}))
    for command in (["lock", CELL], ["render"], ["render", "--check", CELL]):
        result = run(*command)
        assert result.code == 7
        assert f"{CELL}: the image is" in result.err
    assert not (locked.root / "images").exists()


def test_stale_locks_of_some_cells_are_locked_again_alone(run: Run, tiny: Project) -> None:
    (tiny.root / GROUP_LOCKS.path(CELL)).unlink()
    assert "  -> Resolve again: builder lock\n" in run("lock", "--check").err
    assert f"  -> Resolve again: builder lock {CELL}\n" in run("lock", "--check", CELL).err


def test_render_writes_what_its_check_requires(run: Run, locked: Project) -> None:
    dockerfile = f"images/{TINY_IDS[0]}/plain.Dockerfile"
    stale = run("render", "--check")
    assert stale.code == 5
    assert f"{dockerfile}: missing" in stale.err
    assert not (locked.root / "images").exists()
    written = run("render")
    assert written.code == 0
    assert f"written: {dockerfile}" in written.err
    files = [path for path in (locked.root / "images").rglob("*") if path.is_file()]
    assert f"... and {len(files) - SHOWN} more (git status)" in written.err
    assert run("render", "--check").err == f"images/ is up to date ({len(files)} files)\n"
    assert run("render").err == f"{len(files)} files, 0 changed\n"


def test_a_check_fails_if_a_render_would_change_the_known_layers(run: Run, locked: Project) -> None:
    assert run("render").code == 0
    known = known_layers.KnownLayers(locked.root)
    planned = plan.make_locked_plan(locked, locked.cells).images[0].layers[0]
    layer = Layer(digest=f"sha256:{'1' * 64}", diff_id=f"sha256:{'2' * 64}", size=1, unpacked=1)
    known.add(planned, layer)
    known.write()
    assert run("render", "--check").code == 0
    known.add(replace(planned, inputs=f"sha256:{'3' * 64}"), layer)
    known.write()
    before = (locked.root / KNOWN_LAYERS).read_bytes()
    checked = run("render", "--check")
    assert checked.code == 5
    assert f"{KNOWN_LAYERS} has layers that no image has\n  -> Update it: builder render\n" in checked.err
    assert (locked.root / KNOWN_LAYERS).read_bytes() == before
    assert f"written: {KNOWN_LAYERS} (without layers that no image has)" in run("render").err
    assert run("render", "--check").code == 0


@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_ctrl_c_raises_an_exception_only_after_the_import_of_a_command(
    monkeypatch: pytest.MonkeyPatch, before: signal.Handlers
) -> None:
    """In the import of a compiled module, it showed a traceback. A job in the background ignores it throughout."""
    during: list[object] = []

    def import_module(name: str) -> ModuleType:
        during.append(signal.getsignal(signal.SIGINT))
        return importlib.import_module(name)

    monkeypatch.setattr(cli, "import_module", import_module)
    restored = signal.signal(signal.SIGINT, before)
    try:
        assert cli.Commands(COMMANDS)["plan"].name == "plan"
        after = signal.getsignal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, restored)
    assert during == [before]
    assert after is (signal.default_int_handler if before is signal.SIG_DFL else before)
