"""`builder stage` and `builder release`, with registries in memory: what they print, and hints that work as printed."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from builder.cli.images import test_command as image_tests_command
from builder.common import git
from builder.evidence.signing import Signer
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.release import staging, tagging
from tests.unit.cli.conftest import CELL, Result, Run
from tests.unit.release.test_tag_groups import EMBER, PublishBench
from tests.unit.steps import test_release, test_stage
from tests.unit.steps.test_release import STAMP, ReleaseDesk


def trust(project: Project) -> None:
    """Lists a signer in matrix.yaml."""
    path = project.root / "matrix.yaml"
    path.write_text(f"evidence: [{{key: keys/ci.pub}}]\n{path.read_text('utf-8')}", encoding="utf-8")


@pytest.fixture
def rendered(locked: Project, run: Run) -> Project:
    assert run("render").code == 0
    return locked


@pytest.fixture
def desk(rendered: Project, store: Store, monkeypatch: pytest.MonkeyPatch) -> ReleaseDesk:
    desk = ReleaseDesk(rendered, store)
    desk.public.others["team/staging-quartz-cuda"] = desk.public.others["staging/quartz-cuda"]
    monkeypatch.setattr(staging, "Repository", lambda *_, **__: desk.registry)
    monkeypatch.setattr(tagging, "Repository", lambda *_, **__: desk.public)
    [image] = desk.staged().images
    desk.area.write(desk.project, STAMP, "abc", [image])
    return desk


@pytest.fixture
def stage(rendered: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Run) -> Run:
    """Stages an image that passed its tests."""
    yard = test_stage.Yard(PublishBench(rendered, tmp_path / "store", monkeypatch))
    monkeypatch.setattr(staging, "Repository", lambda reference, **_: yard.open(reference))

    def call(*arguments: str, **options: Any) -> Result:
        return run("--store", str(yard.bench.store.root), "stage", *arguments, **options)

    monkeypatch.setattr(git, "state", lambda _: "abc")
    return call


def test_a_release_without_gpu_tests_says_how_to_get_them(run: Run, desk: ReleaseDesk) -> None:
    desk.report_without_gpu()
    result = run("release", STAMP, "--sign", "a key", "--allow-unsigned", "--check")
    assert result.code == 8
    assert f"builder test --staged {STAMP} --sign 'a key' --gpu require" in result.err
    assert "To release it untested, add --allow-untested-gpu." in result.err


def test_a_release_without_results_that_count_says_how_to_get_them(run: Run, desk: ReleaseDesk) -> None:
    """The refusal had no next step."""
    (desk.project.root / "tests/images/test_base.py").write_text("def test_other(): ...\n")
    result = run("release")
    assert result.code == 8
    assert f"Run the tests: builder test --staged {STAMP}   " in result.err
    assert "To accept unsigned results, add --allow-unsigned." in result.err
    trust(desk.project)
    assert f"builder test --staged {STAMP} --sign KEY   " in run("release").err


def test_a_release_of_own_unsigned_results_says_so(run: Run, desk: ReleaseDesk) -> None:
    assert "own results" not in run("release", "--check").err
    trust(desk.project)
    text = f"record `own results, unsigned` for {test_release.CELL}: only this machine ran their tests"
    assert text in run("release", "--check").err


def test_stage_names_the_next_command(stage: Run) -> None:
    result = stage(EMBER)
    assert result.code == 0, result.err
    assert re.search(r"  -> builder release [0-9]{8}\n$", result.err)
    assert "not signed" not in result.err, "nobody is trusted"


def test_stage_warns_of_results_that_others_refuse(stage: Run, tiny: Project) -> None:
    trust(tiny)
    result = stage(EMBER, "--images-only")
    assert "the test results are not signed: `builder release` on another machine will refuse them" in result.err
    assert "  -> To sign them, add --sign KEY." in result.err


def test_stage_prints_the_output_of_a_github_step(stage: Run) -> None:
    result = stage(EMBER, "--format", "github")
    assert result.code == 0, result.err
    assert re.fullmatch(r"stamp=[0-9]{8}\n", result.out)


def test_a_stamp_of_a_later_day_than_today_is_explained(stage: Run, tiny: Project) -> None:
    assert "later day" not in stage(EMBER, today=date(2026, 11, 23)).err
    result = stage(EMBER, today=date(2026, 11, 22))
    assert "the registry has a release with a later date than today" in result.err


@pytest.mark.parametrize("option", [[], ["--images-only"]], ids=str)
def test_no_release_is_staged_for_a_set_without_cells(
    stage: Run, monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    """The release without images was the newest, so `builder release` released nothing, and succeeded."""
    monkeypatch.setattr(staging.StagingArea, "_put", None)
    monkeypatch.setattr(staging.StagingArea, "write", None)
    result = stage("unsupported", *option)
    assert (result.code, result.err) == (0, "no image to stage: CELLS name a set without cells\n")


def test_a_release_prints_the_subjects_of_attestations(run: Run, desk: ReleaseDesk) -> None:
    result = run("release", STAMP, "--format", "github")
    assert result.code == 0, result.err
    digest = desk.image.manifest.digest.removeprefix("sha256:")
    assert result.out == f"subjects<<END\n{digest} registry.example.test:5000/team/quartz-cuda\nEND\n"
    *_, tags, summary = result.err.splitlines()
    assert tags.startswith(f"registry.example.test:5000/team/quartz-cuda@sha256:{digest}: ")
    assert tags.count(", ") == len(desk.tags) - 1, "one line for all tags of an image"
    assert summary.startswith(f"release {STAMP}: 1 image, {len(desk.tags)} tags changed")


def test_the_newest_staged_release_is_tested_without_a_stamp() -> None:
    for arguments in ([CELL, "--staged"], ["--staged", "--no-attach", CELL]):
        assert image_tests_command.make_context("test", arguments).params["stamp"] == "newest"


def test_only_results_of_staged_images_can_be_kept(run: Run, rendered: Project) -> None:
    result = run("test", CELL, "--no-attach")
    assert (result.code, "--no-attach needs --staged" in result.err) == (2, True)


# ---- ends of support: Debian bookworm gets its last updates on 2028-06-30. Days: tests/unit/matrix/test_support.py

ENTRY = "  bookworm:\n"


@pytest.mark.parametrize("option", [(), ("--check",)])
def test_nothing_is_released_after_the_end_of_support_without_a_reason(
    run: Run, bookworm: Project, desk: ReleaseDesk, option: tuple[str, ...]
) -> None:
    before = run("release", "--check", today=date(2028, 6, 30))
    assert "support of Debian bookworm ends on 2028-06-30, today" in before.err
    after = date(2028, 7, 1)
    refused = run("release", *option, today=after)
    assert refused.code == 16
    message = "refused: support of Debian bookworm ended on 2028-06-30, so these images get no security updates: "
    assert f"{message}1 image of {test_release.CELL}\n  -> Move them to a supported version, or " in refused.err
    assert 'add to debian.bookworm (matrix.yaml:10:5): after_support: "why"' in refused.err
    assert desk.tags == {}

    path = bookworm.root / "matrix.yaml"
    reason = "    after_support: one course needs it\n"
    path.write_text(path.read_text("utf-8").replace(ENTRY, ENTRY + reason, 1), encoding="utf-8")
    released = run("release", *option, today=after)
    assert released.code == 0, "the reason changes no plan"
    ended = "support of Debian bookworm ended on 2028-06-30: no security updates since"
    assert f"{ended} (1 image of {test_release.CELL}): one course needs it" in released.err
    assert bool(desk.tags) == (not option)


@pytest.mark.parametrize("option", [(), ("--check",)])
def test_a_release_of_images_that_were_not_built_before_names_the_key_to_delete(
    run: Run, tiny: Project, desk: ReleaseDesk, option: tuple[str, ...]
) -> None:
    path, old = tiny.root / "matrix.yaml", '"3.11": {debian: newbird'
    text = path.read_text("utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, f'{old}, not_built: "nobody can fetch it"'), encoding="utf-8")
    released = run("release", *option)
    assert released.code == 0, "the key changes no plan"
    built = f"1 image of {test_release.CELL}: built and tested: delete `not_built` of python.3.11 (matrix.yaml:15:40)"
    assert f"{built}, to add them to the set `all`\n" in released.err
    assert "not in the set" not in released.err
    assert bool(desk.tags) == (not option)


def test_without_a_key_stage_does_not_repeat_what_identities_of_the_matrix_signed(
    stage: Run, rendered: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job knows its identity only after it has signed."""
    trust(rendered)
    trusted: list[list[str]] = []

    def sign_manifest(signer: Signer, *_: object) -> None:
        trusted.append([who.name for who in signer.trust.signers] if signer.trust else [])

    monkeypatch.setattr(Signer, "sign_manifest", sign_manifest)
    assert stage(EMBER, "--sign", "keyless").code == 0
    assert trusted == [["keys/ci.pub"]] * 2, "of the report and of the list"
