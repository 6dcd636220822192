"""Locked Debian packages that the archives no longer have: names them, and takes them from a snapshot archive."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from builder.build.work import Work
from builder.common.errors import BuildError, LockError
from builder.common.units import counted
from builder.lock import apt, os_lock
from builder.plan.plan import PlannedImage

SHOWN = 5
_Result = TypeVar("_Result")
# Errors of apt, and lines of templates/steps/packages.sh, in the output of a step.
_OF_PACKAGES = re.compile(
    r"^\s*\|.*(no installation candidate|version .* was not found|unable to locate package|failed to fetch"
    r"|hash sum mismatch|held broken packages|unmet dependencies|does not have a release file|are not the locked ones"
    r"|[<>] \S+ \S+ (amd64|all) [0-9a-f]{64})",
    re.MULTILINE | re.IGNORECASE,
)


def build(
    work: Work,
    image: PlannedImage,
    context: bytes,
    read_context: Callable[[Work], bytes],
    attempt: Callable[[Work, bytes], _Result],
) -> _Result:
    """What `attempt` returns, a build of an operating system from a build context, which `read_context` returned.

    If it fails because of packages, it is called again with the snapshot archive that matrix.yaml names. Raises what it
    raises, or BuildError with the locked packages that the archives no longer have, or if the context changed since it
    was read: it belongs to another plan.
    """
    try:
        return attempt(work, context)
    except BuildError as error:
        other = _with_snapshot(work, image) if _OF_PACKAGES.search(str(error)) else None
        if other is None:
            raise _explained(work, image, error) from error.__cause__
        work.view.say(f"{image.id}: apt failed; trying again with the snapshot archive of {image.debian}")
    if read_context(work) != context:
        raise BuildError("files of the checkout changed during the build", hint="Run the same command again.")
    try:
        return attempt(other, read_context(other))
    except BuildError as error:
        raise _explained(other, image, error) from error.__cause__


def _with_snapshot(work: Work, image: PlannedImage) -> Work | None:
    """The same with the snapshot archive at the time of the lock; None if matrix.yaml names none. Raises LockError."""
    address = work.project.matrix.debian[image.debian].snapshot
    lock = os_lock.read(work.project.root, image.system)
    if not address or not lock:
        return None
    return replace(work, host=work.host.with_snapshot(address, lock.time))


def _explained(work: Work, image: PlannedImage, error: BuildError) -> BuildError:
    """The error of a build, with the locked packages that the archives no longer have, if that may be its cause."""
    if not _OF_PACKAGES.search(str(error)):
        return error
    request = image.system
    try:
        lock = os_lock.read(work.project.root, request)
        with apt.archive(request.debian, work.host, work.view.say) as archive:
            missing = archive.missing(lock) if lock else []
    except LockError:  # the archives cannot be asked here; the build's own error says enough
        return error
    if not missing:
        return error
    names = ", ".join(missing[:SHOWN]) + (" ..." if len(missing) > SHOWN else "")
    packages = counted(len(missing), "locked package")
    return BuildError(
        f"{image.id}: the archives no longer have {packages} of {request.path}: {names}\n{error}",
        hint=f"Lock the current versions, and build and test with them: make refresh CELLS='{image.id}'   {error.hint}",
    )
