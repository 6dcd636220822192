"""Locked Debian packages that the archives no longer have: locks the current ones, or uses a snapshot archive."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from builder.build.work import Work
from builder.common import atomic
from builder.common.errors import BuildError, StaleError
from builder.index.host import Host
from builder.lock import os_lock
from builder.lock.os_lock import OsLock, OsRequest
from builder.plan.plan import PlannedImage

SHOWN = 20  # changed packages; the others are counted
_Result = TypeVar("_Result")
# Errors of apt, and lines of templates/steps/packages.sh, in the output of a step.
_OF_PACKAGES = re.compile(
    r"^\s*\|.*(no installation candidate|version .* was not found|unable to locate package|failed to fetch"
    r"|hash sum mismatch|held broken packages|unmet dependencies|does not have a release file|are not the locked ones"
    r"|[<>] \S+ \S+ (amd64|all) [0-9a-f]{64})",
    re.MULTILINE | re.IGNORECASE,
)


def lock_current(work: Work, images: Sequence[PlannedImage], new: Mapping[OsRequest, OsLock]) -> None:
    """Writes new locks of operating systems of these images, after saying which packages changed."""
    work.view.say("\n".join(_changes(work, images, new, "Locking the current versions:")))
    for request, lock in new.items():
        atomic.write_text(work.project.root / request.path, os_lock.dump(lock))


def refuse_stale(
    work: Work, images: Sequence[PlannedImage], new: Mapping[OsRequest, OsLock], command: str
) -> StaleError:
    """The error of a run that may not change locks. `command` locks the current packages, builds and tests."""
    return StaleError(
        "\n".join(_changes(work, images, new, "With --locked, that is an error:")),
        hint=f"Lock the current versions, build and test with them, then commit locks/: {command}",
    )


def _changes(
    work: Work, images: Sequence[PlannedImage], new: Mapping[OsRequest, OsLock], what_follows: str
) -> list[str]:
    """Lines: each package with its locked and its current version, then the images that need it."""
    before = {request: os_lock.read(work.project.root, request) for request in new}
    lines = os_lock.changes(before, new)
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    ids = [image.id for image in images if image.system in new]
    return [
        f"Debian's archives no longer have all locked packages. {what_follows}",
        *(f"  {line}" for line in [*lines[:SHOWN], *more, f"in {', '.join(ids)}"]),
    ]


def with_snapshot_fallback(work: Work, image: PlannedImage, attempt: Callable[[Host], _Result]) -> _Result:
    """What `attempt` returns for the settings of this machine.

    If it fails because of packages, it is called again with the snapshot archive that matrix.yaml names, as it was at
    the time of the lock. Raises what it raises, with what to do, or LockError.
    """
    try:
        try:
            return attempt(work.host)
        except BuildError as error:
            address = work.project.matrix.debian[image.debian].snapshot
            lock = os_lock.read(work.project.root, image.system)
            if not (address and lock and _OF_PACKAGES.search(str(error))):
                raise
        work.view.say(f"{image.id}: apt failed; trying again with the snapshot archive of {image.debian}")
        return attempt(work.host.with_snapshot(address, lock.time))
    except BuildError as error:
        if not _OF_PACKAGES.search(str(error)):
            raise
        # `builder images` looks the packages up before it builds; it got here on a machine that cannot.
        hint = f"If the archives no longer have a locked package, lock the current versions: builder refresh {image.id}"
        raise BuildError(str(error), hint=f"{hint}   {error.hint}") from error.__cause__
