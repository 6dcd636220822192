"""Compares two images, cells or git revisions by package and bytes."""

from __future__ import annotations

import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import indent

from packaging.utils import canonicalize_name

from builder.common import git
from builder.common.errors import BuilderError, UsageError, VerifyError, did_you_mean
from builder.common.reference import ImageRef
from builder.host import Host
from builder.index.wheels import arch_of
from builder.layers import oci
from builder.layers.store import Store
from builder.lock import diff
from builder.lock.diff import Diff, ImageContents, InstalledWheel, Revisions
from builder.matrix import cells
from builder.matrix.project import Project
from builder.release.image_sources import ImageSource
from builder.steps import ci, verify

FORMS = "A and B are cell ids, git revisions, REVISION:CELL, or images as org/name:tag or registry/org/name:tag."
HERE = "working tree"


@dataclass(frozen=True, kw_only=True)
class _Locks:
    """The locks of a revision or of the working tree, by cell; `cell` is the cell to compare, empty for all."""

    name: str
    by_cell: Mapping[str, ImageContents]
    cell: str = ""


def compare(project: Project, host: Host, store: Store, old: str, new: str) -> Diff | Revisions:
    """Compares the cells, revisions or images that two names mean (see FORMS).

    Without `new`, compares a revision with the working tree. Reads only locks and manifests. Raises UsageError for a
    name that means nothing.
    """
    before = _read_locks(project, old)
    if new:
        after = _read_locks(project, new)
    elif before is None or before.name == HERE:
        raise UsageError(
            f"{old!r} is not {_revision(project.root)}: only a revision is compared with the working tree",
            hint=f"Add a second name. {FORMS}",
        )
    else:
        after = _Locks(name=HERE, by_cell=diff.locked_contents(project))
    if before and after and not before.cell and not after.cell:
        return diff.compare_all(before.name, before.by_cell, after.name, after.by_cell)

    # Images first: their error message covers a name that does not exist at all.
    images: dict[str, ImageContents] = {}
    if before is None or after is None:
        # The history of an image has the names of its wheels, but not their sizes.
        wheel_sizes = diff.sizes(diff.locked_contents(project).values())
        for name, locks in ((old, before), (new, after)):
            if locks is None:
                images[name] = _read_image(project, host, store, name, wheel_sizes)
    contents = []
    for name, locks, other in ((old, before, after), (new, after, before)):
        if not locks:
            contents.append(images[name])
            continue
        # A revision without a cell is compared by the cell of the other name.
        cell = locks.cell or (other.cell if other else "")
        if not cell:
            raise UsageError(
                f"{locks.name} has several cells, but an image is compared with one cell",
                hint=f"Use {locks.name}:CELL.",
            )
        if cell not in locks.by_cell:
            raise UsageError(f"{locks.name} has no lock of {cell}{did_you_mean(cell, locks.by_cell)}")
        contents.append(replace(locks.by_cell[cell], label=f"{cell} ({locks.name})"))
    return diff.compare(*contents)


def _read_locks(project: Project, name: str) -> _Locks | None:
    """The locks that a name means; None if it is neither a cell nor a revision.

    Raises MatrixError, LockError of the revision.
    """
    if cells.ID.fullmatch(name):
        return _Locks(name=HERE, by_cell=diff.locked_contents(project), cell=name)
    revision, _, cell = name.rpartition(":")
    if not (revision and cells.ID.fullmatch(cell)):
        revision, cell = name, ""
    if not git.commit(project.root, revision):
        if cell:
            raise UsageError(f"no git revision {revision!r}", hint="`git log --oneline` lists revisions.")
        return None
    # The cells are those of the revision's own matrix.yaml.
    with ci.checkout_revision(project, revision) as at_revision:
        try:
            return _Locks(name=revision, by_cell=diff.locked_contents(at_revision), cell=cell)
        except BuilderError as error:
            raise type(error)(indent(str(error), f"{revision}:"), hint=error.hint) from error


def _read_image(project: Project, host: Host, store: Store, name: str, wheel_sizes: Mapping[str, int]) -> ImageContents:
    with store.used():
        try:
            reference, arch = ImageRef.parse(name), arch_of(platform.machine())
            [source] = verify.find_images(reference, arch, project, host, store)
        except (UsageError, ValueError) as error:  # ValueError: it is no reference of an image
            raise UsageError(
                f"{name!r} is not a cell, {_revision(project.root)} or an image: {error}", hint=FORMS
            ) from error
        return contents_of_image(name, source, wheel_sizes)


def _revision(root: Path) -> str:
    """`a git revision`, with the reason if this checkout can have none."""
    if not shutil.which("git"):
        return "a git revision (git is not installed: apt-get install git)"
    if not git.run_git(root, "rev-parse", "--git-dir", default=""):
        return f"a git revision ({root} is not a git checkout)"
    return "a git revision"


def contents_of_image(label: str, source: ImageSource, wheel_sizes: Mapping[str, int]) -> ImageContents:
    """The layers of an image, and the wheels that its history names. `wheel_sizes` are known sizes by SHA-256.

    Raises VerifyError for an invalid image.
    """
    try:
        image = source.image
    except VerifyError as error:
        raise VerifyError(f"{label}: {error}", hint=error.hint) from error
    packages: dict[str, InstalledWheel] = {}
    for layer, line in zip(image.layers, image.history, strict=True):
        try:
            wheels = oci.parse_history(line)
        except ValueError as error:  # its text comes from the image: not shown
            raise VerifyError(f"{label}: invalid line about wheels in the history") from error
        for file, sha256 in wheels.wheels if wheels else ():
            name, version = (*file.split("-", 2), "")[:2]
            packages[canonicalize_name(name)] = InstalledWheel(
                name=canonicalize_name(name),
                version=version,
                file=file,
                sha256=sha256,
                size=wheel_sizes.get(sha256, layer.size if wheels and len(wheels.wheels) == 1 else None),
                python="py" + wheels.python.replace(".", "") if wheels and wheels.python else "",
            )
    return ImageContents(label=label, packages=packages, blobs={layer.digest: layer.size for layer in image.layers})
