"""Why an operating system could not be made: Debian's archives do not keep all versions of a package."""

from __future__ import annotations

import re

from builder.build.work import Work
from builder.common.errors import BuildError, LockError
from builder.common.units import counted
from builder.lock import apt, os_lock
from builder.plan.plan import PlannedImage

SHOWN = 5
# Errors of apt, and of templates/steps/packages.sh, in the output of a step.
_OF_PACKAGES = re.compile(r"^\s*\|\s*(E: |.*are not the locked ones)", re.MULTILINE)


def explained(work: Work, image: PlannedImage, error: BuildError) -> BuildError:
    """The error of a build, with the locked packages that the archives no longer have, if that may be its cause."""
    wanted = image.system
    if not _OF_PACKAGES.search(str(error)):
        return error
    try:
        lock = os_lock.read(work.project.root, wanted)
        with apt.archive(wanted.debian, work.host) as archive:
            missing = archive.missing(lock) if lock else []
    except LockError:  # the archives cannot be asked here; the build's own error says enough
        return error
    if not missing:
        return error
    names = ", ".join(missing[:SHOWN]) + (" ..." if len(missing) > SHOWN else "")
    packages = counted(len(missing), "locked package")
    return BuildError(
        f"{image.id}: Debian's archives no longer have {packages} of {wanted.path}: {names}\n{error}",
        hint=f"Lock the current versions, and build and test with them: make refresh CELLS='{image.id}'   {error.hint}",
    )
