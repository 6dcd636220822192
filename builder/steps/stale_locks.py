"""Locks today's Debian packages for operating systems whose locked packages no archive has any more."""

from __future__ import annotations

from contextlib import suppress

from builder.build.apt_container import ContainerApt
from builder.build.layer_lookup import LayerLookup
from builder.common.errors import LockError, StaleError, join
from builder.debian import os_resolve
from builder.debian.archives import Archives
from builder.debian.os_lock import OS_LOCKS, DebianPackage
from builder.engine.run import Run
from builder.layers import known_layers
from builder.lock import diff
from builder.plan import plan, recorded
from builder.plan.plan import Plan

SHOWN = 20  # changed packages; the others are counted


def lock_stale_systems(
    run: Run, planned: Plan, lookup: LayerLookup | None, archives: Archives, *, is_locked: bool
) -> bool:
    """Locks current packages for operating systems that must be made, but whose locked packages no archive has.

    Without `lookup`, all operating systems must be made, from archives alone. Returns True if there were any such
    packages. With `is_locked` (--locked), raises StaleError instead, or the error of locking them.
    """
    project, view, store = run.project, run.view, run.store
    images = {image.os_inputs: image for image in planned.images}
    if lookup:
        with store.used():
            images = {
                inputs: image
                for inputs, image in images.items()
                if not (lookup.in_store(inputs) or lookup.in_registry(inputs))
            }
    requests = {image.os_request for image in images.values()}

    def is_kept(package: DebianPackage) -> bool:
        return lookup is not None and store.has(f"sha256:{package.sha256}", package.size)

    new, failures = os_resolve.current_locks_of_stale(project, requests, archives, run.host, is_kept, ContainerApt(run))
    if is_locked and failures:
        raise join(failures, "locks failed")
    for failure in failures:  # without --locked, only the images that need this operating system fail, when built
        view.say(f"cannot lock current packages: {failure}")
    if not new:
        return False

    before = {request: OS_LOCKS.read(project.root, request) for request in new}
    lines = diff.lock_changes(
        {request.path: lock.packages for request, lock in before.items() if lock},
        {request.path: lock.packages for request, lock in new.items()},
    )
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    ids = [image.id for image in planned.images if image.os_request in new]
    follows = "With --locked, that is an error:" if is_locked else "Locking the current versions:"
    head = f"Locked Debian packages are no longer in any archive. {follows}"
    text = "\n".join([head, *(f"  {line}" for line in [*lines[:SHOWN], *more, f"in {', '.join(ids)}"])])
    if is_locked:
        hint = "Run the same command with --no-locked to lock the current versions, then commit locks/."
        raise StaleError(text, hint=hint)
    view.say(text)
    for request, lock in new.items():
        OS_LOCKS.write(project.root, request, lock)
    # No image has the layers of the earlier packages any more; `builder render --check` would report them.
    with suppress(LockError, StaleError):  # other cells are not locked, or their locks are out of date
        complete = plan.make_locked_plan(project, project.cells)
        known_layers.prune(project.root, {layer.inputs for image in complete.images for layer in image.layers})
        recorded.record_plans(project, {image.id: image.plan for image in complete.images})
    return True
