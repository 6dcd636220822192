"""Options reach the step of their command, and the store that they name is used."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from builder.build.outcomes import Outcome, Report
from builder.cli import add as add_cli
from builder.cli import images as images_cli
from builder.cli import options
from builder.cli import release as release_cli
from builder.cli import verify as verify_cli
from builder.cli.context import Context
from builder.common.errors import BuilderError, ImageTestError, IncompleteError, NoEngineError
from builder.common.reference import ImageRef
from builder.engine import setup
from builder.engine.client import Engine
from builder.engine.run import Run as StepRun
from builder.evidence.signing import Signer, Trust
from builder.index.host import RegistrySettings
from builder.layers.store import Store
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.matrix.schema import Trusted
from builder.plan import plan
from builder.plan.plan import Plan
from builder.release.additions import Addition, AdditionRequest, parse_requirement
from builder.release.staging import StagingArea
from builder.steps import lock as locking
from builder.steps.add import AddOptions
from builder.steps.images import ImageOptions
from builder.steps.verify import VerifyOptions
from tests.fakes.engine import FakeEngine
from tests.paths import ROOT
from tests.unit.cli.conftest import CELL, TODAY, Run
from tests.unit.matrix.test_cells import TINY_IDS

PARENT, TARGET = "registry.example.test/org/em:1", "registry.example.test/team/vision:1"
PUT = (PARENT, "einops", "--env", "A=b")
REQUEST = AdditionRequest(requirements=(parse_requirement("einops", "test"),), env={"A": "b"})
KEY = Trusted.model_construct(key="ours.pub")
JOB = Trusted(identity="https://us.test", issuer="https://ci.test")
NOBODY = Trust(signers=(), root=Path())


@dataclass
class Steps:
    """What the commands passed to their steps, which do nothing; `outcomes` and `error` are results of images."""

    given: list[object] = field(default_factory=list)
    cells: list[list[str]] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    error: BuilderError | None = None

    def make_images(self, run: StepRun, planned: Plan, options: ImageOptions) -> list[Outcome]:
        assert run.engine
        self.given.append(options)
        self.stores.append(run.store)
        self.cells.append([image.id for image in planned.images])
        return self.outcomes

    def new_tester(self, run: StepRun, images: object, **options: object) -> dict[str, object]:
        assert run.engine
        return options

    def retest_images(
        self, _: object, tester: dict[str, object], planned: Plan, found: object, jobs: int
    ) -> list[Outcome]:
        assert tester["jobs"] == jobs
        self.given.append(tester)
        self.cells.append([image.id for image in planned.images])
        return self.outcomes

    def refresh(
        self, run: StepRun, chosen: Sequence[Cell], options: ImageOptions, *,
        area: StagingArea | None, signer: Signer | None,
    ) -> Report:  # fmt: skip
        assert run.today == TODAY
        self.given.append((options, area is not None, signer))
        self.cells.append([cell.id for cell in chosen])
        return Report(outcomes=self.outcomes, error=self.error)

    def lock(self, *_: object, **options: object) -> Report:
        self.given.append(options)
        return Report()

    def add(self, _: object, additions: Sequence[Addition], options: AddOptions) -> dict[ImageRef, str]:
        signers = list(options.trust.signers)
        self.given.append(([each.request for each in additions], signers, replace(options, trust=NOBODY)))
        return {}

    def verify_named(self, _: object, reference: ImageRef, options: VerifyOptions) -> list[Any]:
        self.given.append((str(reference), options))
        return []


@pytest.fixture
def steps(run: Run, locked: Project, monkeypatch: pytest.MonkeyPatch) -> Steps:
    """The steps, in a rendered checkout with a public key."""
    assert run("render").code == 0
    (locked.root / "ours.pub").write_text("a key")
    (locked.root / "packages.txt").write_text("einops\n")
    (locked.root / "team.yaml").write_text(
        f"images: [{{image: '{TARGET}', parent: '{PARENT}', packages: [einops], env: {{A: b}}}}]\n"
    )
    steps = Steps()
    monkeypatch.setattr(Engine, "connect", FakeEngine)
    monkeypatch.setattr(images_cli, "make_images", steps.make_images)
    monkeypatch.setattr(images_cli, "new_tester", steps.new_tester)
    monkeypatch.setattr(images_cli, "retest_images", steps.retest_images)
    monkeypatch.setattr(release_cli, "refresh", steps.refresh)
    monkeypatch.setattr(locking, "lock", steps.lock)
    monkeypatch.setattr(add_cli, "add", steps.add)
    monkeypatch.setattr(verify_cli, "verify_named", steps.verify_named)
    return steps


def added(*signers: Trusted, **options: Any) -> tuple[object, ...]:
    return [REQUEST], list(signers), AddOptions(trust=NOBODY, **options)


GIVEN: list[tuple[list[str], object]] = [
    (
        ["images", "-j", "3", "--junit", "reports", "--gpu", "require"],
        ImageOptions(jobs=3, junit=Path("reports"), gpu_mode="require"),
    ),
    (["build", "-j2"], ImageOptions(test=False)),
    (
        ["build", "-j2", "--method", "dockerfile", "--locked"],
        ImageOptions(test=False, method="dockerfile", locked=True),
    ),
    (["test", "-j2"], {"jobs": 2, "gpu_mode": "auto", "junit": None, "gpu_command": None}),
    (
        ["test", "-j2", "--gpu", "off", "--junit", "x"],
        {"jobs": 2, "gpu_mode": "off", "junit": Path("x"), "gpu_command": None},
    ),
    (["refresh", "-j2"], (ImageOptions(), False, None)),
    (
        ["refresh", "-j2", "--gpu", "off", "--sign", "ours.key"],
        (ImageOptions(gpu_mode="off"), False, Signer(key="ours.key")),
    ),
    (["lock"], {"upgrade": False, "refresh": False, "packages": ()}),
    (
        ["lock", "--upgrade", "--os", "--upgrade-package", "a", "--upgrade-package", "b"],
        {"upgrade": True, "refresh": True, "packages": ("a", "b")},
    ),
    (["add", *PUT, "-t", TARGET], added()),
    (
        ["add", PARENT, "-r", "packages.txt", "--env", "A=b", "-t", TARGET, "--dry-run", "--test", "--arch", "arm64",
         "--key", "ours.pub", "--sign", "ours.key"],
        added(KEY, dry_run=True, test=True, arch="arm64", signer=Signer(key="ours.key")),
    ),
    (["add", "-f", "team.yaml"], added()),
    (["verify", PARENT, "--arch", "arm64"], (PARENT, VerifyOptions(arch="arm64", signers=[]))),
    (
        ["verify", PARENT, "--arch", "all", "--rebuild", "--key", "ours.pub", "--identity", "https://us.test",
         "--issuer", "https://ci.test"],
        (PARENT, VerifyOptions(arch="all", signers=[KEY, JOB], rebuild=True)),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "expected"), GIVEN, ids=str)
def test_options_reach_the_step(run: Run, steps: Steps, tiny: Project, arguments: list[str], expected: object) -> None:
    run(*arguments)
    assert steps.given == [expected]


def test_images_of_named_cells_are_made_or_of_the_default_set(run: Run, steps: Steps) -> None:
    result = run("images")
    assert (result.code, result.out) == (0, "")
    assert result.err.startswith("no images (")
    assert steps.cells == [[TINY_IDS[9], *TINY_IDS[12:]]]
    for command in ("images", "test"):
        assert run(command, CELL).code == 0
    assert steps.cells[1:] == [[CELL], [CELL]]


def test_an_image_that_failed_decides_the_exit_code(run: Run, steps: Steps, locked: Project) -> None:
    [image] = plan.make_locked_plan(locked, locked.select([CELL])).images
    steps.outcomes = [Outcome(image=image, error=ImageTestError(f"{CELL}: 1 of 2 tests failed"))]
    for command in ("images", "build", "test"):
        result = run(command, CELL)
        assert result.code == 8
        assert result.err.startswith("1 image: 1 failed (")
        assert result.err.endswith(f": {CELL}: 1 of 2 tests failed\n")


def test_a_refresh_says_what_it_made_before_its_error(run: Run, steps: Steps, locked: Project) -> None:
    assert run("refresh", CELL).err == "no image changed\n"
    assert steps.cells == [[CELL]]
    [image] = plan.make_locked_plan(locked, locked.select([CELL])).images
    steps.outcomes = [Outcome(image=image)]
    steps.error = IncompleteError("the rest failed")
    result = run("refresh", CELL)
    assert result.code == 18
    assert re.fullmatch(r"1 image: 1 up to date \(.*\)\nincomplete: the rest failed\n", result.err)


@pytest.mark.parametrize(("option", "is_locked"), [([], True), (["--no-locked"], False)])
def test_a_variable_refuses_stale_packages_in_ci(
    run: Run, steps: Steps, monkeypatch: pytest.MonkeyPatch, option: list[str], is_locked: bool
) -> None:
    monkeypatch.setenv("GPU_IMAGES_LOCKED", "1")
    run("images", "-j2", *option)
    assert steps.given == [ImageOptions(locked=is_locked)]


@pytest.mark.parametrize("command", ["images", "build", "test"])
def test_an_engine_is_started_only_with_the_option(
    run: Run, steps: Steps, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """`make images` installs one if there is none; `builder images` must not."""

    def connect() -> Engine:
        raise NoEngineError("no Docker Engine answers at x", hint="builder engine")

    monkeypatch.setattr(Engine, "connect", connect)
    monkeypatch.setattr(setup, "ensure", lambda _: FakeEngine())
    result = run(command, CELL)
    assert (result.code, steps.given) == (6, [])
    assert "no Docker Engine answers at x\n  -> builder engine" in result.err
    assert run(command, CELL, "--start-engine").code == 0


# ---- the store and this machine


@pytest.mark.parametrize(
    ("arguments", "variables", "folder", "limit"),
    [
        ([], {}, "cache/gpu-images", 0),
        (["--store", "here", "--store-limit", "2MB"], {}, "project/here", 2_000_000),
        ([], {"GPU_IMAGES_STORE": "there", "GPU_IMAGES_STORE_LIMIT": "1GB"}, "project/there", 10**9),
        (["--store", "here"], {"GPU_IMAGES_STORE": "there"}, "project/here", 0),
    ],
)
def test_the_store_is_that_of_the_option_before_the_variable(
    run: Run, steps: Steps, tiny: Project, monkeypatch: pytest.MonkeyPatch,
    arguments: list[str], variables: dict[str, str], folder: str, limit: int,
) -> None:  # fmt: skip
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run(*arguments, "build", CELL)
    [store] = steps.stores
    assert (store.root, store.limit) == (tiny.root.parent / folder, limit)


def test_the_store_needs_no_variable_home(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty HOME gave /.cache; a relative XDG_CACHE_HOME must be ignored."""
    monkeypatch.setenv("HOME", "")
    own = pwd.getpwuid(os.getuid()).pw_dir
    for cache in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
        assert Context().store.root == Path(own).resolve() / ".cache/gpu-images"
    monkeypatch.setenv("HOME", "relative")
    assert run("gc", "--dry-run").code == 12


@pytest.mark.usefixtures("run")
def test_the_settings_for_registries_are_those_of_the_checkout(
    edit: Callable[[str, str], Project], tmp_path: Path
) -> None:
    settings = 'insecure: ["e.test:5000"]'
    context = Context(root=edit("namespace: team", f"namespace: team\n{settings}").root)
    assert context.host.registries == RegistrySettings(insecure=("e.test:5000",))
    assert context.host is context.host, "read once"
    outside = Context(root=tmp_path)
    assert outside.run(outside.find_project(ignore_invalid=False)).host.registries == RegistrySettings()


def test_the_examples_of_patterns_are_in_matrix_yaml() -> None:
    patterns = re.findall(r"'([^']+)'", options.CELLS)
    assert len(patterns) == 2
    assert Project(ROOT).select(patterns)
