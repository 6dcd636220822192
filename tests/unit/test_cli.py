"""The command line: exit codes, what goes to which stream, and no traceback unless asked for."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest

from builder import cli, digest, doctor, errors, images, lock, locking, oci, plan, runlock, tags
from builder.assemble import Assembler
from builder.build import DockerfileBuilder
from builder.cli import inputs, making
from builder.cli.context import Size
from builder.engine import Engine
from builder.errors import BuilderError, EngineError
from builder.host import Host
from builder.images import Method
from builder.project import Project
from builder.store import CONFIG_TYPE, MANIFEST_TYPE, Store
from builder.verify import Finding, Source, State
from builder.view import size
from builder.work import Work
from tests.unit import tiny_locks
from tests.unit.fakes import FakeEngine
from tests.unit.test_cells import TINY_IDS

CELL = "qz-0.5-cu129-py311"


@dataclass
class Done:
    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture
def run(tiny: Project, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Calls `main` in this process, in the tiny project, with a store beside it."""
    monkeypatch.chdir(tiny.root)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tiny.root.parent / "cache"))
    monkeypatch.delenv("GPU_IMAGES_STORE", raising=False)
    monkeypatch.delenv("GPU_IMAGES_STORE_LIMIT", raising=False)
    monkeypatch.setenv("COLUMNS", "120")
    before = signal.getsignal(signal.SIGTERM)

    def leave(code: int) -> NoReturn:
        raise SystemExit(code)

    def call(*arguments: str) -> Done:
        monkeypatch.setattr(sys, "argv", ["builder", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        assert isinstance(ended.value.code, int)
        return Done(ended.value.code, out, err)

    monkeypatch.setattr(os, "_exit", leave)
    yield call
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Makes `builder plan` end with an exception."""

    def fail(error: BaseException) -> None:
        def make(*_: object) -> NoReturn:
            raise error

        monkeypatch.setattr(plan, "make", make)

    return fail


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_commands_and_exit_codes(run: Run, flag: str) -> None:
    done = run(flag)
    assert (done.code, done.err) == (0, "")
    for name in cli.cli.commands:
        assert f"\n  {name} " in done.out
    for kind in errors.ALL[1:]:
        assert re.search(rf"\n +{kind.exit_code}  [A-Za-z]", done.out), kind
    assert f"{errors.INTERRUPTED}  Interrupted" in done.out
    assert "Traceback" not in done.out


@pytest.mark.parametrize("command", sorted(cli.cli.commands))
def test_every_command_has_help(run: Run, command: str) -> None:
    done = run(command, "--help")
    assert done.code == 0
    assert cli.cli.commands[command].help
    assert done.out.startswith(f"Usage: builder {command}") or f"{command} [OPTIONS]" in done.out


@pytest.mark.parametrize(
    "arguments", [["nothing"], ["plan", "--nothing"], ["plan", "--format", "x"], ["build", "-j", "0"]]
)
def test_a_wrong_command_line(run: Run, arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.code, done.out) == (2, "")
    assert "Error: " in done.err


def test_ids(run: Run) -> None:
    done = run("plan", "--format", "ids", "*")
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == TINY_IDS


def test_json(run: Run, tiny: Project) -> None:
    done = run("plan", "--format", "json", "*")
    assert (done.code, done.err) == (0, "")
    assert json.loads(done.out) == plan.make(tiny, tiny.cells).as_data()


def test_one_image_is_shown_by_layers(run: Run) -> None:
    done = run("plan", CELL, "em-1.9-cu129-py39")
    assert done.code == 0
    assert CELL in done.out
    assert "python bytecode" in done.out
    assert "registry.example.test:5000/team/quartz-cuda:0.5.3-cu129-py311" in done.out
    assert "unique" not in done.out  # there is nothing to share
    assert done.err.strip() == "not locked yet: em-1.9-cu129-py39   (builder lock)"


def test_several_images_are_a_line_each(run: Run, tiny: Project) -> None:
    done = run("plan", CELL, f"{CELL}-board")
    plain, board = (image.bytes for image in plan.make(tiny, tiny.select([CELL, f"{CELL}-board"])).images)
    added = size(board - plain)
    head, first, second, last = done.out.splitlines()
    assert head.split() == ["CELL", "LAYERS", "WHEELS", "SIZE", "ADDS", "OWN", "TAG"]
    tag = "registry.example.test:5000/team/quartz-cuda:0.5"
    # What the second has beside the first is its own; the first has nothing that the second has not.
    assert first.split() == [CELL, "7", "4", *size(plain).split(), *size(plain).split(), "-", tag]
    assert second.split() == [
        f"{CELL}-board", "9", "5", *size(board).split(), *added.split(), *added.split(), f"{tag}-board"
    ]  # fmt: skip
    ratio = round(100 * board / (plain + board))
    assert last == (
        f"2 images: {size(plain + board)} if each had layers of its own, {size(board)} unique, {ratio} % of that"
    )
    layers = run("plan", "--layers", CELL, f"{CELL}-board")
    assert "python bytecode" in layers.out
    assert layers.out.splitlines()[-1] == last


def test_a_plan_of_nothing(run: Run) -> None:
    done = run("plan", "em-1.9-cu129-py39")
    assert (done.code, done.out) == (0, "")
    assert done.err.strip() == "not locked yet: em-1.9-cu129-py39   (builder lock)"


def test_root(run: Run, tmp_path: Path, tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("plan", "--format", "ids")
    assert done.code == 2
    assert "no matrix.yaml in " in done.err
    assert run("--root", str(tiny.root), "plan", "--format", "ids").code == 0


def test_an_unknown_cell(run: Run) -> None:
    done = run("plan", "qz-0.5-cu129-py312")
    assert (done.code, done.out) == (2, "")
    assert "no cell matches 'qz-0.5-cu129-py312'; did you mean 'qz-0.5-cu129-py311'?" in done.err
    assert "  -> `builder plan all`" in done.err


@pytest.mark.parametrize("kind", errors.ALL)
@pytest.mark.parametrize("debug", [False, True])
def test_errors(run: Run, failing: Callable[[BaseException], None], kind: type[BuilderError], debug: bool) -> None:
    failing(kind("it is [bold]wrong[/bold]", hint="do this"))
    done = run(*(["--debug"] if debug else []), "plan", CELL)
    assert (done.code, done.out) == (kind.exit_code, "")
    assert f"{kind.title}: it is [bold]wrong[/bold]\n  -> do this\n" in done.err
    assert ("Traceback" in done.err) is debug


@pytest.mark.parametrize("debug", [False, True])
def test_a_fault_of_ours(run: Run, failing: Callable[[BaseException], None], debug: bool) -> None:
    failing(ZeroDivisionError("oh"))
    done = run(*(["--debug"] if debug else []), "plan", CELL)
    assert done.code == 1
    assert ("Traceback" in done.err) is debug
    assert ("a fault of builder itself: ZeroDivisionError: oh" in done.err) is not debug


@pytest.mark.parametrize(
    ("error", "code", "says"), [(KeyboardInterrupt(), 130, "interrupted;"), (cli.Terminated(), 143, "terminated;")]
)
def test_signals(
    run: Run, failing: Callable[[BaseException], None], error: BaseException, code: int, says: str
) -> None:
    failing(error)
    done = run("plan", CELL)
    assert done.code == code
    assert says in done.err
    assert "Traceback" not in done.err


def test_sigterm_becomes_terminated(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        pytest.fail("SIGTERM did nothing")

    monkeypatch.setattr(plan, "make", kill)
    assert run("plan", CELL).code == 143


@pytest.mark.parametrize(
    ("name", "text", "arguments", "code", "says"),
    [
        ("matrix.yaml", "registry: 1\n", ["plan"], 3, "matrix.yaml:1:11: registry: 1 is read as the number 1"),
        ("matrix.yaml", "a: \x01\n", ["plan"], 3, "matrix.yaml:1"),
        (f"locks/{CELL}.json", "{", ["plan", CELL], 4, f"Make it again: builder lock {CELL}"),
        ("locks/gone.json", "{}", ["lock", "--check", CELL], 5, "locks/gone.json: belongs to no cell"),
        ("templates/Dockerfile.j2", "{{ x }}", ["render"], 4, "not locked: em-1.9-cu129-py39"),
    ],
)
def test_faults_of_files(
    run: Run, tiny: Project, name: str, text: str, arguments: list[str], code: int, says: str
) -> None:
    (tiny.root / name).write_text(text)
    done = run(*arguments)
    assert (done.code, done.out) == (code, "")
    assert says in done.err


@pytest.fixture
def locked(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """The tiny project with a lock for every cell."""
    monkeypatch.setattr(tiny_locks, "LOCKED", TINY_IDS)
    for cell, made in tiny_locks.locks(tiny).items():
        lock.path(tiny.root, cell).write_text(lock.dump(made))
    return tiny


def test_render(run: Run, locked: Project) -> None:
    stale = run("render", "--check")
    assert stale.code == 5
    assert f"images/{TINY_IDS[0]}/Dockerfile: missing" in stale.err
    assert not (locked.root / "images").exists()
    written = run("render")
    assert written.code == 0
    assert f"written: images/{TINY_IDS[0]}/Dockerfile" in written.err
    files = [path for path in (locked.root / "images").rglob("*") if path.is_file()]
    assert f"... and {len(files) - inputs.SHOWN} more (git status)" in written.err
    assert "up to date" in run("render", "--check").err
    assert run("render").err.strip().endswith("files, 0 changed")


def test_a_wrong_template(run: Run, locked: Project) -> None:
    (locked.root / "templates/Dockerfile.j2").write_text("{{ x }}")
    done = run("render")
    assert done.code == 11
    assert "templates/Dockerfile.j2:1: 'x' is undefined" in done.err


@pytest.mark.usefixtures("locked")
def test_a_full_disk_is_said_as_such(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fsync(_: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    done = run("render")
    assert done.code == errors.DiskError.exit_code
    assert "disk" in done.err


@pytest.mark.parametrize("command", ["render", "lock", "images", "build", "test", "rebase", "clean"])
def test_another_builder(run: Run, locked: Project, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.host.read", Host)
    assert run("render").code == 0
    with runlock.held(locked.state, "builder images", wait=False, say=pytest.fail):
        done = run(command)
    assert done.code == 9
    assert f"`builder images` (pid {os.getpid()}" in done.err
    assert "--wait" in done.err


@dataclass
class Seen:
    """How `images.run` was called."""

    method: Method
    cells: list[str]
    options: dict[str, object]


@pytest.fixture
def seen(run: Run, locked: Project, monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    """A checkout that is rendered, and an `images.run` that says that there was one image to do."""
    calls: list[Seen] = []

    def fake(_: object, method: Method, made: plan.Plan, **options: object) -> int:
        calls.append(Seen(method, [image.id for image in made.images], options))
        return 1

    assert run("render").code == 0
    monkeypatch.setattr(Engine, "connect", FakeEngine)
    monkeypatch.setattr("builder.host.read", Host)
    monkeypatch.setattr(images, "run", fake)
    return calls


def test_images(run: Run, seen: list[Seen]) -> None:
    done = run("images", "-j", "3")
    assert (done.code, done.out) == (0, "")
    assert "1 images built, tested and tagged, 4 images up to date (" in done.err
    assert run("build", CELL).code == 0
    assert [(one.cells, one.options) for one in seen] == [
        ([TINY_IDS[9], *TINY_IDS[12:]], {"jobs": 3, "test": True, "tag": True, "gpu_mode": "auto"}),
        ([CELL], {"jobs": 2, "test": False, "tag": False, "gpu_mode": "auto"}),
    ]
    assert all(isinstance(one.method, Assembler) for one in seen)


def test_images_that_are_not_rendered_as_they_should_be(run: Run, locked: Project, seen: list[Seen]) -> None:
    (locked.root / f"images/{TINY_IDS[0]}/Dockerfile").write_text("")
    done = run("images", CELL)
    assert (done.code, seen) == (5, [])
    assert f"images/{TINY_IDS[0]}/Dockerfile: differs" in done.err


def test_the_other_method_needs_no_store(run: Run, tiny: Project, seen: list[Seen]) -> None:
    assert run("build", "--method", "dockerfile", CELL).code == 0
    assert [type(one.method) for one in seen] == [DockerfileBuilder]
    assert not (tiny.root.parent / "cache").exists()


def test_rebase_tests_and_tags_what_it_makes_on_new_packages(
    run: Run, seen: list[Seen], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[dict[str, object]] = []

    def assembler(work: Work, store: Store, **options: bool) -> Assembler:
        made.append(dict(options))
        return Assembler(work, store, **options)

    monkeypatch.setattr(making, "Assembler", assembler)
    assert run("rebase", CELL).code == 0
    assert run("images", CELL).code == 0
    assert made == [{"fresh": True}, {"fresh": False}]
    assert [one.options for one in seen] == [{"jobs": 2, "test": True, "tag": True, "gpu_mode": "auto"}] * 2


@pytest.mark.parametrize(
    ("arguments", "environment", "place"),
    [
        ([], {}, "cache/gpu-images"),
        (["--store", "here"], {}, "project/here"),
        ([], {"GPU_IMAGES_STORE": "there"}, "project/there"),
        (["--store", "here"], {"GPU_IMAGES_STORE": "there"}, "project/here"),
    ],
)
def test_where_the_store_is(
    run: Run,
    tiny: Project,
    seen: list[Seen],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    environment: dict[str, str],
    place: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert run(*arguments, "build", CELL).code == 0
    assert [path.relative_to(tiny.root.parent).parent.as_posix() for path in tiny.root.parent.rglob("oci-layout")] == [
        place
    ]
    assert len(seen) == 1


def test_a_folder_that_is_no_store_is_left_alone(run: Run, tiny: Project, seen: list[Seen]) -> None:
    done = run("--store", "templates", "build", CELL)
    assert (done.code, seen) == (12, [])
    assert f"{tiny.root}/templates is not empty and no image layout" in done.err
    assert not (tiny.root / "templates/oci-layout").exists()


def test_a_store_that_would_grow_beyond_its_limit(run: Run, seen: list[Seen]) -> None:
    """Before anything is fetched. CUDA of the tiny project has 2 MB, and wheels are there twice for a while."""
    done = run("--store-limit", "3MB", "build", CELL)
    assert (done.code, seen) == (10, [])
    assert "its limit is 0.0 GB" in done.err
    assert run("--store-limit", "4MB", "build", CELL).code == 0


@pytest.mark.parametrize(
    ("text", "count"),
    [("40GB", 40 * 10**9), ("40G", 40 * 10**9), ("500MB", 5 * 10**8), ("2TB", 2 * 10**12), ("1k", 1000), ("7", 7)],
)
def test_a_size(text: str, count: int) -> None:
    assert Size().convert(text, None, None) == count


@pytest.mark.parametrize("text", ["", "GB", "-1", "1.5GB", "40 GB", "40gb", "1GiB", "\u0661GB", "9" * 16])
def test_what_is_no_size(run: Run, text: str) -> None:
    done = run("--store-limit", text, "gc")
    assert done.code == 2
    assert "is no size; write 40GB or 500MB" in done.err


def test_gc(run: Run, tiny: Project) -> None:
    store = Store(tiny.root.parent / "cache/gpu-images")
    store.prepare()
    config = store.put(b"{}", CONFIG_TYPE)
    manifest = store.put(oci.manifest(config, []), MANIFEST_TYPE)
    store.name("example/image:1", manifest)
    stray = store.put(b"stray", CONFIG_TYPE)
    tried = run("gc", "--dry-run")
    assert tried.code == 0
    name, shown, *_ = tried.out.splitlines()[1].split()
    assert (name, shown) == ("example/image:1", digest.short(manifest.digest))
    assert "could free 5 B: 1 blobs of no image, 0 leftovers" in tried.err
    assert store.path(stray.digest).exists()
    freed = run("gc")
    assert "\nfreed 5 B: 1 blobs of no image, 0 leftovers" in freed.err
    assert not store.path(stray.digest).exists()
    assert store.read(manifest.digest)


def named(tiny: Project, *names: str) -> Store:
    """A store with an image under each of these names."""
    store = Store(tiny.root.parent / "cache/gpu-images")
    store.prepare()
    for name in names:
        config = store.put(name.encode(), CONFIG_TYPE)
        store.name(name, store.put(oci.manifest(config, []), MANIFEST_TYPE))
    return store


def test_images_are_given_up_by_name_or_pattern(run: Run, tiny: Project) -> None:
    store = named(tiny, "example/image:1", "example/image:1.untested", "example/other:1", "example/kept:1")
    assert run("gc", "--dry-run", "--forget", "*").code == 0
    assert len(store.images()) == 4
    refused = run("gc", "--forget", "example/none:*")
    assert refused.code == 2
    assert "the store has no image 'example/none:*'" in refused.err
    done = run("gc", "--forget", "*.untested", "--forget", "example/[io]*:1")
    assert done.code == 0
    assert "given up: example/image:1.untested\ngiven up: example/image:1, example/other:1\n" in done.err
    assert list(store.images()) == ["example/kept:1"]


@pytest.mark.parametrize(
    ("states", "code", "words"),
    [
        (["not derived", "same"], 0, "1 layers of wheels are what the index gives, 1 not derived"),
        (["same", "different", "failed"], 15, "1 of 3 layers are not what their history says"),
        (["same", "failed", "failed"], 13, "2 of 3 layers could not be compared; the others are right"),
        (["not derived"], 15, "has no layer of wheels that could be compared"),
    ],
    ids=str,
)
def test_verify(
    run: Run, tiny: Project, monkeypatch: pytest.MonkeyPatch, states: list[State], code: int, words: str
) -> None:
    """An index that does not answer is not taken for an image that somebody changed."""
    found = [Finding(layer=f"layer-{state}", digest="sha256:0", state=state, detail="why") for state in states]
    monkeypatch.setattr("builder.host.read", Host)
    monkeypatch.setattr("builder.verify.verify", lambda *_: iter(found))
    named(tiny, "example/image:1")
    done = run("verify", "example/image:1")
    assert done.code == code
    assert words in done.err
    for state in states:
        assert re.search(rf"^{state} +0  layer-{state}  \(why\)$", done.out, re.MULTILINE)


def test_verify_of_an_image_that_the_store_has_not(run: Run, tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.host.read", Host)
    named(tiny, "example/image:1")
    done = run("verify", "example/image:2")
    assert done.code == 2
    assert "has no image 'example/image:2'" in done.err
    assert "example/image:1" in done.err


def test_verify_of_a_cell_takes_what_was_tested_first(run: Run, tiny: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    def verify(source: Source, _: object) -> Iterator[Finding]:
        seen.append(source.manifest())
        yield Finding(layer="x", digest="sha256:0", state="same")

    monkeypatch.setattr("builder.host.read", Host)
    monkeypatch.setattr("builder.verify.verify", verify)
    full = str(tags.compute(tiny.matrix, tiny.cells)[CELL][0])
    for name in (f"{full}.untested", full):
        store = named(tiny, name)
        assert run("verify", CELL).code == 0
        assert digest.of_bytes(seen[-1]) == store.images()[name].digest


def test_gc_of_a_store_that_somebody_uses(run: Run, tiny: Project) -> None:
    with Store(tiny.root.parent / "cache/gpu-images").used():
        done = run("gc")
    assert done.code == 9
    assert "is in use by another builder" in done.err


@pytest.mark.usefixtures("locked")
def test_no_engine(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect() -> NoReturn:
        raise EngineError("no Docker Engine answers at x", hint="`builder engine` finds one.")

    monkeypatch.setattr(Engine, "connect", connect)
    monkeypatch.setattr("builder.host.read", Host)
    run("render")
    done = run("images")
    assert done.code == 6
    assert "engine: no Docker Engine answers at x\n  -> `builder engine` finds one." in done.err


def test_lock(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builder.host.read", Host)
    monkeypatch.setattr(locking, "update", lambda *_, **__: ["locks/x.json"])
    assert run("lock").err.strip() == "written: locks/x.json"
    monkeypatch.setattr(locking, "update", lambda *_, **__: [])
    assert run("lock").err.strip() == "every lock is as it was; --upgrade takes newer versions"
    assert run("lock", "--upgrade").err.strip() == "every lock is as it was"


def test_base_prints_its_name_alone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "connect", FakeEngine)
    monkeypatch.setattr("builder.host.read", Host)
    assert run("base").out == f"example/base:old@sha256:{'1' * 64}\n"
    assert run("base", "newbird").out == f"example/base:new@sha256:{'2' * 64}\n"
    done = run("base", "otherbird")
    assert (done.code, done.out) == (2, "")
    assert "it has: oldbird, newbird" in done.err


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("note", 0), ("missing", 6)])
def test_doctor(run: Run, monkeypatch: pytest.MonkeyPatch, state: doctor.State, code: int) -> None:
    finding = doctor.Finding(name="thing", state=state, detail="[detail]")
    monkeypatch.setattr(doctor, "examine", lambda *_: [finding])
    done = run("doctor")
    assert done.code == code
    assert done.out.split() == [state, "thing", "[detail]"]
    assert ("missing: thing" in done.err) is bool(code)
