"""Compares the locks of two git revisions by package."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import indent

from builder.common.errors import BuilderError
from builder.debian import os_lock
from builder.debian.os_lock import OS_LOCKS
from builder.lock import diff
from builder.lock.diff import LockedPackage
from builder.lock.lockfile import GROUP_LOCKS
from builder.matrix.project import Project
from builder.steps import ci


def compare_revisions(project: Project, old: str, new: str) -> list[str]:
    """Lines for the locks that differ. An empty `new` is the working tree. Raises UsageError for no revision."""
    after = _packages_at(project, new) if new else _locked_packages(project)
    return diff.lock_changes(_packages_at(project, old), after)


def _packages_at(project: Project, revision: str) -> dict[str, Sequence[LockedPackage]]:
    with ci.checkout_revision(project, revision) as at_revision:
        try:
            return _locked_packages(at_revision)
        except BuilderError as error:
            raise type(error)(indent(str(error), f"{revision}:"), hint=error.hint) from error


def _locked_packages(project: Project) -> dict[str, Sequence[LockedPackage]]:
    """The packages of the locks of all cells, by group or by path. Raises MatrixError, LockError."""
    packages: dict[str, Sequence[LockedPackage]] = {}
    for group in project.groups:
        if lock := GROUP_LOCKS.read(project.root, group):
            packages[group] = lock.wheels
    for request in os_lock.requests_of_cells(project.matrix, project.cells):
        if system := OS_LOCKS.read(project.root, request):
            packages[request.path] = system.packages
    return packages
