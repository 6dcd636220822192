"""The commands stage, refresh, release and status."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import click

from builder.build.layer_lookup import LayerLookup
from builder.build.outcomes import Report
from builder.cli import options
from builder.cli.context import Context
from builder.cli.images import gpu_option, show_outcomes
from builder.common.errors import UsageError
from builder.common.files import short_digest
from builder.common.text import counted, duration, size
from builder.evidence.signing import Signer
from builder.matrix.project import Project
from builder.plan import plan, render
from builder.plan.plan import Plan
from builder.release import staging, status
from builder.release.release_checks import EXEMPTIONS, ReleaseOptions
from builder.release.staging import StagingArea
from builder.release.status import StatusReader
from builder.steps.images import ImageOptions
from builder.steps.refresh import refresh
from builder.steps.release import release, roll_back
from builder.steps.stage import stage


@click.command(name="stage", epilog=options.CELLS_HELP)
@options.cells_argument
@options.sign_option
@click.option(
    "--images-only",
    is_flag=True,
    help="Do not list the images as a release. Afterwards, run `builder stage` on one machine to list them.",
)
@click.option(
    "--untested",
    is_flag=True,
    help="Also stage images that are neither built here nor staged yet, if the registry has their layers "
    "(locks/layers.json). They are assembled without an engine and without downloading wheels; `builder test --staged` "
    "then runs all their tests.",
)
@options.format_option("github: an output of a GitHub Actions step, the `stamp`.", "text", "github")
@click.pass_obj
def stage_command(
    context: Context, /, patterns: Sequence[str], signer: Signer | None, images_only: bool, untested: bool, form: str
) -> None:  # fmt: skip
    """Push images that passed their tests to staging, with the results.

    Sets no public tag. The images are pushed by digest, with their test results attached, and listed as one release
    with today's date as its stamp. Other machines can test it (`builder test --staged`) and publish it (`builder
    release`). Uses the credentials of `docker login`.

    Images that this machine does not have are listed too, if another machine staged them for the same plan. This
    machine's test results for such images are attached to them.
    """
    began = time.monotonic()
    project = context.project
    area = StagingArea.of(project, context.host)
    planned = render.load_checked_plan(project, project.select(patterns))
    _warn_unsigned(context, project, signer)
    run = context.run(project)
    with run.store.used():
        report = stage(
            run, area, planned, signer=signer, lookup=LayerLookup.of(run) if untested else None, images_only=images_only
        )
    if form == "github":
        click.echo(f"stamp={report.stamp}")
    _say_staged(context, report, signer, began)


def _warn_unsigned(context: Context, project: Project, signer: Signer | None) -> None:
    if project.matrix.evidence and signer is None:
        context.say(
            "the test results are not signed: `builder release` on another machine will refuse them\n"
            "  -> To sign them, add --sign KEY."
        )


def _say_staged(context: Context, report: Report, signer: Signer | None, began: float) -> None:
    """Shows what was staged since `began`, a time of `time.monotonic`, and the command to publish it."""
    staged = [outcome for outcome in report.outcomes if outcome.digest]
    if not staged:
        context.say("no image to stage: CELLS name a set without cells")
        return
    elsewhere = len(staged) - len(report.sent)
    others = f", {elsewhere} of them by another machine" if elsewhere else ""
    done = f"{counted(len(staged), 'image')} staged{others}, {size(report.bytes)} sent"
    if not report.stamp:
        context.say(f"{done}, not listed as a release")
        return
    context.say(f"release {report.stamp}: {done} ({duration(time.monotonic() - began)})")
    if report.stamp.partition(".")[0] > f"{context.today:%Y%m%d}":
        context.say("the registry has a release with a later date than today: the new stamp continues from that date")
    context.say(f"  -> builder release {report.stamp}{signer.option if signer else ''}")


@click.command(name="refresh", epilog=options.CELLS_HELP)
@options.cells_argument
@options.jobs_option
@gpu_option
@options.start_option
@options.sign_option
@click.pass_obj
def refresh_command(
    context: Context, /, patterns: Sequence[str], signer: Signer | None, start_engine: bool, **values: Any
) -> None:
    """Apply Debian security updates: lock, build, test and stage.

    Locks the newest Debian packages of CELLS and renders their Dockerfiles. Then builds and tests the images that
    differ from the last commit (without git: that this command changed), and stages them if `staging` is set in
    matrix.yaml. Only the layers of the operating system change. Images whose packages have not changed are not rebuilt.

    If a Debian release cannot be locked, or an image fails, the others are completed, and the exit code is 18.

    If a test fails, restore the earlier packages with `git restore locks images`, which also discards your other
    uncommitted changes there.
    """
    began = time.monotonic()
    project = context.project
    chosen = project.select(patterns)
    area = StagingArea.of(project, context.host) if project.matrix.staging else None
    if area:
        _warn_unsigned(context, project, signer)
    context.say_support(project, chosen)
    with project.locked("builder refresh"):
        run = context.run(project, start_engine=start_engine)
        report = refresh(run, chosen, ImageOptions(**values), area=area, signer=signer)
    if report.outcomes:
        show_outcomes(context, report.outcomes, began=began)
    else:
        context.say("no image changed")
    if area and report.stamp:
        _say_staged(context, report, signer, began)
    if report.error:
        raise report.error


@click.command(name="release")
@click.argument("stamp", default="")
@options.sign_option
@click.option(
    "--allow-untested-gpu",
    is_flag=True,
    help="Release images for GPUs whose GPU tests were not run. The release records it.",
)
@click.option(
    "--allow-unsigned",
    is_flag=True,
    help="Accept test results without a signature that matrix.yaml trusts. The release records it.",
)
@click.option(
    "--allow-missing-arch",
    is_flag=True,
    help="Publish images without those for other architectures that matrix.yaml has, or that their tags have now. On "
    "machines of these architectures, `docker pull` then fails.",
)
@click.option(
    "--roll-back",
    is_flag=True,
    help="Move all tags back to the images that they named after the release STAMP, which need not be staged any more. "
    "For a release that is only staged: allow its tags to move to an older release or older Debian packages, and away "
    "from images that cannot be read.",
)
@click.option("--check", is_flag=True, help="Only check whether the release may be published.")
@options.format_option(
    "github: an output of a GitHub Actions step: `subjects`, the digest and the name of each released image and index, "
    "for actions/attest.",
    "text", "github",
)  # fmt: skip
@click.pass_obj
def release_command(context: Context, /, stamp: str, check: bool, form: str, **values: Any) -> None:
    """Publish the staged release STAMP: sign it, then set its tags. Default: the newest.

    Needs a checkout of the commit that the images were staged from, and the registry, but no engine and no store.
    Compares the configuration and the known layers of every image with the plan. The test results of each image must
    be for exactly that image and the current test files. They must be signed by a signer listed under `evidence` in
    matrix.yaml, or produced on this machine. Images for GPUs need GPU tests: run `builder test --staged` on a machine
    with a GPU. Images for several architectures with the same tags are released together. If matrix.yaml has `scan`,
    the scanner must accept each image. Warns from 60 days before the end of support of a Debian release, Python, CUDA
    or framework version; afterwards, refuses its images, unless its entry in matrix.yaml has `after_support` with a
    reason.

    Run it again to finish a release that was interrupted. A release that was rolled back stays so until you release
    its STAMP again: `builder plan --unreleased` lists its images only after their plan has changed.
    """
    began = time.monotonic()
    project = context.project
    staging.require_registry(project)
    area = StagingArea.of(project, context.host)
    if values["roll_back"] and check:
        raise UsageError("--check does not check a roll-back", hint="Leave out --check or --roll-back.")
    is_back = values["roll_back"] and stamp
    report = roll_back(context.run(project), area, stamp) if is_back else None
    if report is None:  # it is not public yet
        staged = area.read(stamp)
        # Only the cells of the release: images outside it ran no tests for these.
        planned = {image.id: image for image in render.load_checked_plan(project, staged.cells(project)).images}
        context.say_support(project, [image.cell for image in planned.values()])
        allowed = [name for name in EXEMPTIONS if values.pop(f"allow_{name.replace('-', '_')}")]
        how = ReleaseOptions(allowed=allowed, check_only=check, **values)
        report = release(context.run(project), area, staged, planned, how)
    if check:
        context.say(f"release {report.stamp}: {counted(len(report.outcomes), 'image')} may be released")
        return
    if report.error:
        raise report.error
    tags: dict[str, list[str]] = {}
    for change in report.changed:
        before = f" (was {short_digest(change.before)})" if change.before else ""
        tags.setdefault(f"{change.name}@{change.digest}", []).append(f"{change.tag}{before}")
    for name in sorted(tags):
        context.say(f"{name}: {', '.join(tags[name])}")
    images, changed = counted(len(report.outcomes), "image"), counted(len(report.changed), "tag")
    context.say(f"release {report.stamp}: {images}, {changed} changed ({duration(time.monotonic() - began)})")
    if form == "github":
        subjects = [(outcome.digest, staging.references(outcome.image)[0].name) for outcome in report.sent]
        subjects += [(change.digest, change.name) for change in report.tags]  # indexes too
        lines = dict.fromkeys(f"{digest.removeprefix('sha256:')} {name}" for digest, name in subjects)
        click.echo("\n".join(["subjects<<END", *lines, "END"]))


@click.command(name="status", epilog=options.ALL_CELLS_HELP)
@options.cells_argument
@click.option("--here", is_flag=True, help="Look only at this machine, not at staging and the registry.")
@options.format_option()
@click.pass_obj
def status_command(context: Context, /, patterns: Sequence[str], here: bool, form: str) -> None:
    """Show how far each cell is on its way to a release.

    LOCKED and BUILT are of this checkout and store. TESTED and GPU are the tests of the staged image; if none is
    staged, of the one built here or released. Without a registry, the columns about it are left out; `-` means nothing
    to show.
    RELEASED shows whether the full tag names that image, and which of its other tags name another image or are missing.
    SIGNATURE shows whether a signer that `evidence` in matrix.yaml lists signed it for its cell and tag: `untrusted` if
    only others did, `listed` if matrix.yaml has no signers to check it with. PACKAGES is the age of the locked Debian
    packages; `builder images --locked` names those that the archives no longer have. Below the table are the frameworks
    that had a newer release when they were locked, with the time between both releases, the ends of support that are
    over or at most 60 days away, and the cells that were not built yet.
    """
    project = context.project
    selected = project.select(patterns or ("*",))
    # All cells: other images may have run thorough tests for these.
    planned = plan.make_plan(project, project.cells)
    ids = {cell.id for cell in selected}
    planned = Plan(
        images=tuple(image for image in planned.images if image.id in ids),
        unlocked=tuple(cell for cell in planned.unlocked if cell in ids),
    )
    context.say(f"looking up {counted(len(selected), 'image')} ...")  # 103 take 3 s, more with a registry
    is_remote = project.matrix.staging_place and not here
    area = StagingArea.of(project, context.host) if is_remote else None
    rows = StatusReader(context.run(project), area).read(planned)
    if form == "json":
        context.print_json(list(map(asdict, rows)))
        return
    remote = status.OF_REGISTRY if is_remote else ()
    columns = ("cell", "locked", "built", "tested", "gpu", *remote, "packages")
    table = []
    for row in rows:
        age = "-" if row.packages is None else counted(row.packages, "day")
        values = vars(row) | {"packages": age}
        table.append([values[name] for name in columns])
    context.print_table([name.upper() for name in columns], table)
    for line in dict.fromkeys(row.age for row in rows if row.days_behind):
        context.say(line)
    context.say_support(project, selected)
    context.say_not_built(project, selected)
