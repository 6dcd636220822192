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
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest
import yaml

from builder import cli
from builder.build.outcomes import Report
from builder.cli import COMMANDS
from builder.cli.context import SHOWN
from builder.common import errors
from builder.common.errors import BuilderError, IncompleteError, LockError
from builder.common.text import size
from builder.lock.lockfile import GROUP_LOCKS
from builder.matrix.project import Project
from builder.plan import plan
from builder.steps import lock as locking
from tests.fakes import locks
from tests.unit.cli.conftest import CELL, UNLOCKED, Run, store_of
from tests.unit.matrix.test_cells import TINY_IDS, Edit

ESCAPES = "\x1b]0;owned\x07\x1b[31mwrong\x1b[0m\n  and\x08"
TAG = "registry.example.test:5000/team/quartz-cuda"
Fail = Callable[[BaseException], None]
PARENT, TARGET = "registry.example.test/org/em:1", "registry.example.test/team/vision:1"
NO_REQUESTS = [
    [],
    [PARENT],
    [PARENT, "einops"],
    ["-t", TARGET],
    ["--refresh", TARGET, "-t", TARGET],
    ["--refresh", TARGET, PARENT, "einops"],
    ["-f", "team.yaml", "--refresh", TARGET],
    ["-f", "team.yaml", "--env", "A=b"],
]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """Makes `builder plan` raise an exception."""

    def fail(error: BaseException) -> None:
        def make(*_: object) -> NoReturn:
            raise error

        monkeypatch.setattr(plan, "make_plan", make)

    return fail


# ---- help


def test_without_a_command_the_commands_are_listed(run: Run) -> None:
    result = run()
    assert (result.code, result.err) == (0, "")
    assert len(result.out.splitlines()) < 30
    assert set(COMMANDS) <= {line.split()[0] for line in result.out.splitlines() if line.startswith("  ")}


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


def test_every_command_that_the_code_names_exists_with_its_options() -> None:
    """In hints, messages and docstrings."""
    group = {option for parameter in cli.cli.params for option in parameter.opts}
    commands = []
    for path in Path(cli.__file__).parents[1].rglob("*.py"):
        code = re.sub(r'"\n +f?"', "", path.read_text(encoding="utf-8"))  # a text in several lines
        commands += re.findall(r"(?:`|: )builder ((?:--[a-z-]+ (?:[A-Z]+ )?)*)([a-z]+)((?: [^`&;\n]*)?)", code)
    assert len(commands) > 50
    for before, name, arguments in commands:
        parameters = cli.cli.commands[name].params
        known = {
            "--help",
            *(option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)),
        }
        assert set(re.findall(r"--[a-z-]+", before)) <= group, before
        assert set(re.findall(r"(?<!\S)--[a-z-]+", arguments)) <= known, f"{name}{arguments}"


ME = "https://me.example.test"
OF_UPDATES = (["--upgrade"], ["--os"], ["--upgrade-package", "pillow"])  # options of lock
MESSAGES: list[tuple[list[str], int, str, str]] = [
    (["nothing"], 2, "No such command 'nothing'.", ""),
    (["plan", "--nothing"], 2, "No such option '--nothing'.", ""),
    (["plan", "--format", "x"], 2, "'x' is not one of 'table'", ""),
    (["plan", "--format", "github", "--disk", "0GB"], 2, "usage: --disk needs a size larger than 0", ""),
    (["plan", "--disk", "14GB"], 2, "0, and --format github or gitlab", ""),
    (["plan", "--publish"], 2, "usage: --publish needs --format gitlab", ""),
    (["plan", "qz-0.5-cu129-py312"], 2, f"'qz-0.5-cu129-py312'; did you mean '{CELL}'?", "`builder plan '*'` lists"),
    (["plan", "*", "--format", "github"], 4, f"not locked: {UNLOCKED}, ", "builder lock\n"),
    (["lock", "--check"], 5, f"locks/{UNLOCKED}.json: missing", "Resolve again: builder lock\n"),
    *((["lock", "--check", *more], 2, "usage: --check changes no lock", "Leave out --check") for more in OF_UPDATES),
    (["lock", "--check", UNLOCKED], 5, ": missing", f"Resolve again: builder lock {UNLOCKED}\n"),
    (["render", "--check", CELL], 5, f"images/{CELL}/plain.Dockerfile: missing", f"Update it: builder render {CELL}\n"),
    (["images", CELL], 5, f"images/{CELL}/plain.Dockerfile: missing", f"Update it: builder render {CELL}\n"),
    (["images", UNLOCKED], 4, f"not locked: {UNLOCKED}", f"Resolve first: builder lock {UNLOCKED}\n"),
    (["explain", "--gpu", "V100", "--driver", "abc"], 2, "usage: invalid driver version 'abc'", "`nvidia-smi` shows"),
    (["build", "-j", "0"], 2, "0 is not in the range 1<=x<=32", ""),
    (["--store-limit", "40 GB", "gc"], 2, "invalid size '40 GB': use e.g. 40GB", ""),
    (["gc", "--forget", "it:1", "--forget", "none:*"], 2, "no image 'none:*'", "`builder gc --dry-run` lists"),
    (["release", "20261122", "--roll-back", "--check"], 2, "--check does not check a roll-back", "Leave out"),
    (["verify", "it:2"], 2, "has no image 'it:2'", ""),
    (["verify", "it:1", "--identity", "us"], 2, "--identity and --issuer must be used together", ""),
    (["verify", "it:1", "--identity", "us", "--issuer", ME], 2, "--identity and --issuer must be addresses", ""),
    *((["add", *arguments], 2, "name a PARENT and the image to make (-t)", "") for arguments in NO_REQUESTS),
]


@pytest.mark.parametrize(("arguments", "code", "message", "hint"), MESSAGES, ids=lambda value: str(value)[:60])
def test_a_command_line_that_is_refused(
    run: Run, tiny: Project, arguments: list[str], code: int, message: str, hint: str
) -> None:
    store = store_of(tiny, "it:1")
    (tiny.root / "team.yaml").write_text("images: []\n")
    result = run(*arguments)
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert (f"  -> {hint}" if hint else "") in result.err
    assert list(store.images()) == ["it:1"]


@pytest.mark.parametrize(
    "command", [("plan", CELL, "--unreleased"), ("prune",), ("release",), ("stage",)], ids=" ".join
)
def test_commands_for_a_registry_fail_without_one(run: Run, edit: Edit, command: tuple[str, ...]) -> None:
    edit("registry: registry.example.test:5000", 'registry: ""')
    result = run(*command)
    assert result.code == 2
    assert "no registry in matrix.yaml" in result.err


def test_a_checkout_is_found_by_the_option_root(
    run: Run, tmp_path: Path, tiny: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("plan", "--format", "ids")
    assert result.code == 2
    assert "no matrix.yaml in " in result.err
    assert run("--root", str(tiny.root), "plan", "--format", "ids").code == 0


@pytest.mark.parametrize(
    ("command", "signer"),
    [
        (("gc", "--forget", "it:1"), False),
        (("verify", "it:2", "--identity", ME, "--issuer", ME), True),
        (("verify", "it:2"), False),
        (("add", "it:2", "x", "-t", "e.test/it:3", "--identity", ME, "--issuer", ME), True),
        (("add", "it:2", "x", "-t", "e.test/it:3"), False),
    ],
)
def test_an_invalid_matrix_is_ignored_unless_it_may_name_the_only_signer(
    run: Run, tiny: Project, command: tuple[str, ...], signer: bool
) -> None:
    store_of(tiny, "it:1")
    (tiny.root / "matrix.yaml").write_text("frameworks: [\n")
    result = run(*command)
    if signer or command[0] == "gc":
        assert result.err.startswith("ignored: matrix.yaml:2:1: invalid YAML")
        assert result.code == (2 if signer else 0), "the store has no it:2"
    else:
        assert result.code == 3
        assert "  -> Correct it. Or name a signer (--key, --identity) to ignore this file." in result.err


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


@pytest.mark.parametrize(
    ("error", "code", "shown"),
    [
        (ZeroDivisionError("oh"), 1, "internal error: ZeroDivisionError: oh\n  -> Run again with --debug"),
        (OSError("oh"), 1, "internal error: OSError: oh\n  -> Run again with --debug"),
        (OSError(errno.ENOSPC, "No space left on device"), errors.DiskError.exit_code, "disk"),
        (KeyboardInterrupt(), 130, "interrupted: run the same command again to continue\n"),
        (errors.Terminated(), 143, "terminated: run the same command again to continue\n"),
        (BuilderError(f"it is {ESCAPES}"), 1, "it is wrong\n  and\ufffd\n"),
        (RuntimeError(f"it is {ESCAPES}"), 1, "it is wrong\n  and\ufffd\n"),
    ],
)
def test_an_exception_is_shown_without_a_traceback(
    run: Run, failing: Fail, error: BaseException, code: int, shown: str
) -> None:
    """It may quote a registry, an index or the output of a build, which must not control the terminal."""
    failing(error)
    result = run("plan", CELL)
    assert result.code == code
    assert shown in result.err
    assert "Traceback" not in result.err


def test_an_internal_error_shows_a_traceback_with_debug(run: Run, failing: Fail) -> None:
    failing(ZeroDivisionError("oh"))
    result = run("--debug", "plan", CELL)
    assert result.code == 1
    assert "Traceback" in result.err
    assert "internal error" not in result.err


def test_a_closed_pipe_is_no_internal_error(run: Run, failing: Fail) -> None:
    failing(BrokenPipeError(errno.EPIPE, "Broken pipe"))
    stdout = os.dup(1)
    try:
        result = run("plan", CELL)
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
    assert (result.code, result.err) == (1, "")


def test_sigterm_becomes_terminated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "make_plan", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert run("plan", CELL).code == 143


@pytest.mark.parametrize("command", ["render", "lock", "images", "build", "test"])
def test_two_builders_never_use_a_checkout_at_once(run: Run, locked: Project, command: str) -> None:
    assert run("render").code == 0
    with locked.locked("builder images"):
        result = run(command)
    assert result.code == 9
    assert f"`builder images` (pid {os.getpid()}" in result.err


# ---- plan


def test_a_plan_is_printed_as_ids_or_json(run: Run, tiny: Project) -> None:
    result = run("plan", "--format", "ids", "*")
    assert (result.code, result.err) == (0, "")
    assert result.out.splitlines() == TINY_IDS
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
    assert not re.search(r" +$", result.out, re.M)
    assert "counted once" not in result.out  # one image shares no layers
    assert result.err == f"not locked: {UNLOCKED}   (builder lock {UNLOCKED})\n"


def test_several_images_are_shown_in_a_line_each(run: Run, tiny: Project) -> None:
    ids = [CELL, f"{CELL}-board"]
    plain, board = (image.bytes for image in plan.make_plan(tiny, tiny.select(ids)).images)
    added = size(board - plain)
    head, first, second, last = run("plan", *ids).out.splitlines()
    assert head.split() == ["CELL", "SIZE", "NEW", "TAG"]
    assert first.split() == [CELL, *size(plain).split(), *size(plain).split(), f"{TAG}:0.5"]
    assert second.split() == [f"{CELL}-board", *size(board).split(), *added.split(), f"{TAG}:0.5-board"]
    percent = round(100 * board / (plain + board))
    shared = f"with the layers that they share counted once, {size(board)} ({percent} %)"
    assert last == f"2 images: {size(plain + board)}; {shared}"


def test_only_images_that_changed_since_a_revision_are_planned(
    run: Run, tiny: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With git itself, and the output for GitHub: test_readme.py."""
    folder = tmp_path / "before"
    shutil.copytree(tiny.root, folder, symlinks=True)

    def export(root: Path, revision: str, target: Path) -> None:
        shutil.copytree(folder, target, symlinks=True, dirs_exist_ok=True)

    monkeypatch.setattr("builder.common.git.export", export)
    since = ("plan", CELL, f"{CELL}-board", "--changed-since", "HEAD")
    assert run(*since, "--format", "ids").out == "\n"
    (tiny.root / "templates/board/files").mkdir(parents=True, exist_ok=True)
    (tiny.root / "templates/board/files/new").write_text("new")
    assert run(*since, "--format", "ids").out.split() == [f"{CELL}-board"]
    assert not list((tiny.root / ".builder/tmp").iterdir())

    (folder / "matrix.yaml").write_text("registry: 1\n")
    result = run(*since, "--format", "ids")
    assert result.out.split() == [CELL, f"{CELL}-board"]
    assert "HEAD cannot be planned, so all images count as changed: matrix.yaml:1:11: " in result.err


def test_a_revision_of_zeros_is_no_revision(run: Run) -> None:
    """GitHub names it for a new branch."""
    assert run("plan", CELL, "--changed-since", "0" * 40, "--format", "ids").out.split() == [CELL]


def test_only_images_that_are_not_released_are_planned(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.release.status.unreleased", lambda images, *_: images[:1])
    assert run("plan", f"{CELL}*", "--unreleased", "--format", "ids").out.split() == [CELL]


def test_a_pipeline_of_gitlab_is_the_output(run: Run) -> None:
    result = run("plan", CELL, "--format", "gitlab", "--publish")
    assert {"stages", f"images of {CELL} (1 image)", "release"} <= set(yaml.safe_load(result.out))


# ---- ends of support

BOOKWORM = "support of Debian bookworm ended on 2028-06-30: no security updates since (1 image of qz-0.5-cu129-py311)\n"


@pytest.mark.parametrize("command", ["plan", "status"])
def test_ends_of_support_and_cells_that_were_not_built_are_named(
    run: Run, bookworm: Project, edit: Edit, command: str
) -> None:
    arguments = [command, CELL, *(["--here"] if command == "status" else [])]
    first = "looking up 1 image ...\n" if command == "status" else ""
    before = run(*arguments, today=date(2028, 4, 30))
    assert before.err == first
    assert run(*arguments, today=date(2028, 7, 1)).err == first + BOOKWORM
    edit('"3.11": {debian: bookworm}', '"3.11": {debian: bookworm, not_built: "nobody can fetch it"}')
    after = run(*arguments, today=date(2028, 4, 30))
    assert after.err == f"{first}1 image of qz-0.5-cu129-py311: not in the set `all`: nobody can fetch it\n"
    assert after.out == before.out


def test_scripts_get_every_end_of_support(run: Run, bookworm: Project) -> None:
    """On any day, with its source: they compare it themselves."""
    [image] = json.loads(run("plan", CELL, "--format", "json").out)["images"]
    [end] = image["support"]
    assert (end["entry"], end["last"]) == ("debian.bookworm", "2028-06-30")
    assert end["source"].startswith("Debian")
    [row] = json.loads(run("status", "--here", CELL, "--format", "json").out)
    assert row["support"] == "2028-06-30"


def test_status_says_how_far_a_framework_is_behind_its_newest_release(run: Run, tiny: Project) -> None:
    """A line for all images of it. The newest release has none."""
    days = {"quartz": {"0.5.3": "2025-11-12", "0.10.0": "2026-10-28"}, "ember": {"1.10.0": "2026-10-28"}}
    (tiny.root / "locks/releases.json").write_text(json.dumps(days))
    shown = ["looking up 16 images ...", "quartz 0.5.3 (newest 0.10.0, 11 months)"]
    assert run("status", "--here").err.splitlines() == shown
    [row] = json.loads(run("status", "--here", CELL, "--format", "json").out)
    expected = {"framework": "quartz", "release": "0.5.3", "newest": "0.10.0", "days_behind": 350}
    assert expected.items() <= row.items()
    (tiny.root / "locks/releases.json").write_text('{"quartz": {"\\u001b[31m": "2026-10-28"}}')
    damaged = run("status", "--here", CELL)
    assert damaged.code == 4
    assert "\nlock: locks/releases.json is damaged: quartz" in damaged.err


def test_debian_packages_without_updates_are_named_when_they_are_locked(
    run: Run, bookworm: Project, update: Callable[..., None]
) -> None:
    update("locks/x.json")
    after = date(2028, 7, 1)
    assert BOOKWORM in run("lock", "--os", CELL, today=after).err
    assert "support" not in run("lock", CELL, today=after).err


def test_updates_are_listed_for_a_workflow(run: Run, tiny: Project) -> None:
    """Also if a lock is damaged: an update makes it again."""
    (tiny.root / GROUP_LOCKS.path(CELL)).write_text("{")
    result = run("plan", "*", "--format", "updates")
    assert (result.code, result.err) == (0, "")
    assert result.out == 'debian=["oldbird", "newbird"]\nframeworks=["ember", "quartz"]\n'


# ---- lock and render


@pytest.fixture
def update(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the result of the step that locks."""

    def set_result(*written: str, error: BuilderError | None = None) -> None:
        report = Report(written=list(written), error=error)
        monkeypatch.setattr(locking, "lock", lambda *_, **__: report)

    return set_result


def test_lock_names_what_it_wrote_or_how_to_upgrade(run: Run, update: Callable[..., None]) -> None:
    update("locks/x.json")
    assert run("lock").err == "written: locks/x.json\n"
    update()
    newer = "--upgrade chooses newer wheels, --os newer Debian packages"
    assert run("lock").err == f"all locks unchanged: {newer}\n"
    assert run("lock", "--upgrade").err == "all locks unchanged\n"


@pytest.mark.parametrize(
    ("error", "code"), [(LockError("y: no"), 4), (IncompleteError("failed:\n  y: no\nwritten:\n  locks/x.json"), 18)]
)
def test_lock_names_what_it_wrote_after_a_failure_too(
    run: Run, update: Callable[..., None], error: BuilderError, code: int
) -> None:
    update("locks/x.json", error=error)
    result = run("lock")
    assert result.code == code
    assert result.err.count("locks/x.json") == 1


def test_what_is_too_large_to_build_is_refused_when_it_is_locked_and_rendered(
    run: Run, locked: Project, edit: Edit, update: Callable[..., None]
) -> None:
    """`images` refused it, after `lock` and `render` had succeeded."""
    edit("namespace: team\n", f'namespace: team\nbudgets: [{{cells: "{CELL}", image: 1MB, layer: 1MB}}]\n')
    update("locks/x.json")
    for command in (["lock", CELL], ["render"], ["render", "--check", CELL]):
        assert run(*command).code == 7
    assert not (locked.root / "images").exists()


def test_render_writes_what_its_check_requires(run: Run, locked: Project) -> None:
    assert run("render", "--check").code == 5
    assert not (locked.root / "images").exists()
    written = run("render")
    assert written.code == 0
    assert f"written: images/{TINY_IDS[0]}/plain.Dockerfile" in written.err
    files = [path for path in (locked.root / "images").rglob("*") if path.is_file()]
    assert f"... and {len(files) - SHOWN} more (git status)" in written.err
    assert run("render", "--check").err == f"images/ is up to date ({len(files)} files)\n"
    assert run("render").err == f"{len(files)} files, 0 changed\n"


def test_a_part_is_rendered_and_the_rest_stays(run: Run, locked: Project) -> None:
    """A line of matrix.yaml that could not be locked stopped the images of every other line."""
    (locked.root / GROUP_LOCKS.path(TINY_IDS[0])).unlink()
    stray = locked.root / "images/gone"
    stray.mkdir(parents=True)
    assert run("render", f"{CELL}*").code == 0
    assert sorted(path.name for path in (locked.root / "images").iterdir()) == ["gone", CELL]
    assert run("render", "--check", f"{CELL}*").code == 0
    assert run("render").code == 4
    lock = locks.lock_of(locked, locked.groups[TINY_IDS[0]])
    (locked.root / GROUP_LOCKS.path(TINY_IDS[0])).write_text(GROUP_LOCKS.dump(lock))
    assert run("render").code == 0
    assert not stray.exists()


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
