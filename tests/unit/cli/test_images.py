"""The commands that make images: what they pass to `builder.build`, and the store that they use."""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from builder.build import images
from builder.build.assemble import Assembler
from builder.build.dockerfile import DockerfileBuilder
from builder.build.images import Options, Outcome
from builder.build.os_stage import Way
from builder.build.work import Method, Work
from builder.cli import images as images_cli
from builder.cli.context import Context
from builder.common.errors import NoEngineError
from builder.engine import setup
from builder.engine.client import Engine
from builder.index.host import Host, Registries
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan.plan import Plan
from tests.fakes.engine import FakeEngine
from tests.unit.cli.conftest import CELL, Run
from tests.unit.matrix.test_cells import TINY_IDS


@dataclass
class Call:
    """The arguments of a call of `images.run` or `images.retest`."""

    method: Method
    cells: list[str]
    options: Options


@pytest.fixture
def calls(run: Run, locked: Project, monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """The calls, in a rendered checkout. `images.run` reports that it built the first image."""
    calls: list[Call] = []

    def fake(_: object, method: Method, planned: Plan, options: Options) -> list[Outcome]:
        calls.append(Call(method, [image.id for image in planned.images], options))
        outcomes = [Outcome(image=image) for image in planned.images]
        return [replace(outcomes[0], origin="built", tested=options.test, tagged=options.test), *outcomes[1:]]

    assert run("render").code == 0
    monkeypatch.setattr(Engine, "connect", FakeEngine)
    monkeypatch.setattr(images, "run", fake)
    monkeypatch.setattr(images, "retest", fake)
    return calls


def test_images(run: Run, calls: list[Call]) -> None:
    result = run("images", "-j", "3")
    assert (result.code, result.out) == (0, "")
    assert "1 image built, tested and tagged. 4 images up to date (" in result.err
    assert run("build", CELL).code == 0
    assert run("test", "--gpu", "off", CELL).code == 0
    assert [(call.cells, call.options) for call in calls] == [
        ([TINY_IDS[9], *TINY_IDS[12:]], Options(jobs=3)),
        ([CELL], Options(test=False)),
        ([CELL], Options(gpu_mode="off")),
    ]
    assert all(isinstance(call.method, Assembler) for call in calls)


def test_images_as_json(run: Run, calls: list[Call], tmp_path: Path) -> None:
    result = run("images", CELL, "--format", "json", "--junit", str(tmp_path))
    [outcome] = json.loads(result.out)["images"]
    assert (outcome["cell"], outcome["made"], outcome["tagged"], outcome["error"]) == (CELL, "built", True, None)
    assert calls[0].options == Options(junit=tmp_path)
    assert "up to date" not in result.err


@pytest.mark.parametrize("command", ["images", "build", "test"])
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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prune-cache"], "--prune-cache needs --max-disk"),
        (["--max-disk", "40GB", "--method", "dockerfile"], "--max-disk needs --method assemble"),
        (["--max-disk", "0"], "must be larger than 0"),
    ],
)
def test_invalid_options(run: Run, arguments: list[str], message: str) -> None:
    result = run("images", CELL, *arguments)
    assert result.code == 2
    assert message in result.err


def test_images_that_are_not_rendered(run: Run, locked: Project, calls: list[Call]) -> None:
    dockerfile = f"images/{TINY_IDS[0]}/plain.Dockerfile"
    (locked.root / dockerfile).write_text("")
    result = run("images", CELL)
    assert (result.code, calls) == (5, [])
    assert f"{dockerfile}: differs" in result.err


def test_the_method_dockerfile_needs_no_store(run: Run, tiny: Project, calls: list[Call]) -> None:
    assert run("build", "--method", "dockerfile", CELL).code == 0
    assert [type(call.method) for call in calls] == [DockerfileBuilder]
    assert not (tiny.root.parent / "cache").exists()


def test_the_way_to_make_operating_systems(run: Run, calls: list[Call], monkeypatch: pytest.MonkeyPatch) -> None:
    ways: list[str] = []

    def assembler(work: Work, store: Store, *, os_way: Way) -> Assembler:
        ways.append(os_way)
        return Assembler(work, store, os_way=os_way)

    monkeypatch.setattr(images_cli, "Assembler", assembler)
    assert run("images", CELL).code == 0
    assert run("images", CELL, "--os-layer", "buildkit").code == 0
    assert ways == ["auto", "buildkit"]
    assert [call.options for call in calls] == [Options()] * 2


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
def test_the_folder_of_the_store(
    run: Run, tiny: Project, monkeypatch: pytest.MonkeyPatch, arguments: list[str], variable: str, folder: str
) -> None:
    if variable:
        monkeypatch.setenv("GPU_IMAGES_STORE", variable)
    assert run(*arguments, "build", CELL).code == 0
    parent = tiny.root.parent
    assert [path.parent for path in parent.rglob("oci-layout")] == [parent / folder]


def test_a_folder_that_is_not_a_store_is_unchanged(run: Run, tiny: Project, calls: list[Call]) -> None:
    result = run("--store", "templates", "build", CELL)
    assert (result.code, calls) == (12, [])
    assert f"{tiny.root}/templates is neither empty nor an image layout" in result.err
    assert not (tiny.root / "templates/oci-layout").exists()


def test_the_store_limit_is_checked_before_downloads(run: Run, calls: list[Call]) -> None:
    """CUDA of the tiny project has 2 MB, and wheels take that space twice for a while."""
    result = run("--store-limit", "3MB", "build", CELL)
    assert (result.code, calls) == (10, [])
    assert "its limit is 3.0 MB" in result.err
    assert run("--store-limit", "4MB", "build", CELL).code == 0


@pytest.mark.parametrize(("home", "cache"), [("", ""), ("", "relative")])
def test_the_store_without_a_home(run: Run, monkeypatch: pytest.MonkeyPatch, home: str, cache: str) -> None:
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
    monkeypatch.setattr("builder.index.host.read", Host)
    settings = 'insecure: ["e.test:5000"]\ncreate_repository: [make-it, "{repository}"]'
    context = Context(root=edit("namespace: team", f"namespace: team\n{settings}").root)
    assert context.host.registries == Registries(insecure=("e.test:5000",), create=("make-it", "{repository}"))
    assert context.host is context.host, "read once"
    assert Context(root=tmp_path).host.registries == Registries(), "outside a checkout"


@pytest.mark.parametrize("text", ["", "-1", "40 GB"])
def test_invalid_sizes(run: Run, text: str) -> None:
    result = run("--store-limit", text, "gc")
    assert result.code == 2
    assert "invalid size" in result.err
    assert "use e.g. 40GB" in result.err
