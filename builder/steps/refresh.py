"""Applies Debian's security updates: locks, renders, builds, tests and stages what changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from builder.build import outcomes
from builder.build.outcomes import Report
from builder.common import git
from builder.common.errors import BuilderError, IncompleteError
from builder.common.text import counted
from builder.engine.run import Run
from builder.evidence.signing import Signer
from builder.lock import checks
from builder.matrix.cells import Cell
from builder.plan import plan, render
from builder.release.staging import StagingArea
from builder.steps import ci
from builder.steps.images import ImageOptions, make_images
from builder.steps.lock import lock
from builder.steps.render import render_images
from builder.steps.stage import stage


def refresh(
    run: Run, chosen: Sequence[Cell], options: ImageOptions, *, area: StagingArea | None, signer: Signer | None
) -> Report:
    """Locks the newest Debian packages of cells, then builds, tests and stages the images that differ.

    They are compared with the last commit, or, without git, with the state before. Without `area`, nothing is staged.
    If a Debian release cannot be locked, or an image fails, the others are completed, and the error of the report is an
    IncompleteError. Raises the error of locking if nothing could be locked.
    """
    project, view = run.project, run.view
    run.engine.check()  # without an engine, the checkout does not change
    if git.commit(project.root, "HEAD"):
        before = ci.plan_digests(project, "HEAD", view)
    else:
        before = {image.id: image.plan for image in plan.make_plan(project, project.cells).images}

    # Today's Debian packages, and the wheels of groups whose lock is missing or out of date.
    locked = lock(run, chosen, upgrade=False, refresh=True)
    failures = [locked.error] if locked.error else []
    if locked.error and not isinstance(locked.error, IncompleteError):
        raise locked.error

    # Dockerfiles. Cells whose locks could not be made have nothing to render or build.
    current = checks.current_cells(project)
    _, rendered = render_images(project, current, is_part=len(current) < len(project.cells))
    written = [*locked.written, *rendered]

    for name in written:
        view.say(f"written: {name}")  # now: what follows takes long, and may be interrupted

    # Images with another plan. Locks are shared, so that images outside the selection may have one, too.
    changed = ci.changed_images(before, plan.make_locked_plan(project, current).images)
    ids = {cell.id for cell in chosen}
    affected = [image.cell for image in changed if image.id in ids]
    if others := len(changed) - len(affected):
        view.say(f"{counted(others, 'image')} outside the selection also changed: run `builder refresh '*'`")
    results = make_images(run, render.load_checked_plan(project, affected), options) if affected else []
    report = Report(outcomes=results)
    passed = [outcome.image.cell for outcome in results if outcome.coverage]
    if failure := outcomes.failure(results):
        failures.append(failure)
        # An image that failed may have been to run tests for others, too, which now run these themselves.
        repeated = make_images(run, render.load_checked_plan(project, passed), options) if passed else []
        passed = [outcome.image.cell for outcome in repeated if outcome.coverage]
        failures += [outcome.error for outcome in repeated if outcome.error]

    if area and passed:
        try:
            with run.store.used():
                staged = stage(run, area, render.load_checked_plan(project, passed), signer=signer)
            report.stamp = staged.stamp
            sent = {outcome.image.id: outcome for outcome in staged.outcomes}
            report.outcomes = [
                replace(outcome, digest=sent[outcome.image.id].digest, sent=sent[outcome.image.id].sent)
                if outcome.image.id in sent
                else outcome
                for outcome in results
            ]
        except BuilderError as error:
            failures.append(error)

    if failures and not (passed or locked.error):
        report.error = failures[0]
    elif failures:
        lines = [f"{error}\n  -> {error.hint}" if error.hint else str(error) for error in failures]
        done = f"{counted(len(passed), 'image')} built and tested" if passed else "no image was built"
        report.error = IncompleteError("\n".join([f"{done}; the rest failed:", *lines]))
    return report
