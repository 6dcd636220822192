"""How far each cell is on its way: locked, built, tested, staged, released, signed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

from builder.index.host import Host
from builder.layers import images as stored_images
from builder.layers.store import Store
from builder.lock import os_lock
from builder.matrix.project import Project
from builder.plan.plan import Plan, PlannedImage
from builder.registry import evidence, publish
from builder.registry.client import Registry
from builder.registry.staging import Place, StagedImage

NO, YES, NONE = "no", "yes", "-"
PARALLEL = 8  # images that are looked up at once
_SIGNATURE = "{}.sig"  # the tag of cosign's signatures of an image


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of one cell; `-` for what does not apply, or was not looked up.

    `tested` is the number of tests that passed, or why the image does not count as tested; `staged` is a stamp;
    `released` is whether the full tag names the staged image (without staging: the one built here); `packages` is the
    age of the lock of its Debian packages in days, None if it is not locked.
    """

    cell: str
    locked: str = NO
    built: str = NO
    tested: str = NONE
    gpu: str = NONE
    staged: str = NONE
    released: str = NONE
    signed: str = NONE
    packages: int | None = None

    def as_data(self) -> dict[str, Any]:
        """For `--format json`."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where to look. Without `place` and `registry`, only at this machine."""

    project: Project
    store: Store
    host: Host
    place: Place | None = None
    registry: str = ""


def read(where: Where, plan: Plan) -> Iterator[Status]:
    """The status of each image of the plan, and of each cell that is not locked. Raises RegistryError."""
    suite = evidence.suite(where.project.root)
    staged, stamp = _staged(where.place)
    of_image = partial(_of_image, where, suite=suite, staged=staged, stamp=stamp)
    with ThreadPoolExecutor(PARALLEL, "status") as pool:
        yield from pool.map(of_image, plan.images)
    for cell in plan.unlocked:
        yield Status(cell=cell)


def _staged(place: Place | None) -> tuple[Mapping[str, StagedImage], str]:
    """The images of the newest staged release by cell, and its stamp."""
    stamps = place.stamps() if place else []
    if place is None or not stamps:
        return {}, ""
    return {image.cell: image for image in place.read(stamps[0]).images}, stamps[0]


def _of_image(
    where: Where, image: PlannedImage, *, suite: Mapping[str, str], staged: Mapping[str, StagedImage], stamp: str
) -> Status:
    state = where.project.state
    stored = stored_images.find(where.store, image)
    proof = evidence.of_stored(state, stored) if stored else None
    reason = evidence.why_invalid(partial(evidence.read, state), proof, image.digest, suite)
    tested = NONE if stored is None else reason or f"{len(proof.passed)} passed" if proof else "not tested"
    there = staged.get(image.id)
    is_current = there is not None and there.plan == image.digest
    expected = there.digest if there and is_current else stored.manifest.digest if stored else ""
    released, signed = _released(where, image, expected)
    return Status(
        cell=image.id,
        locked=YES,
        built=YES if stored else NO,
        tested=tested,
        gpu="cpu" if image.cell.is_cpu else proof.gpu if proof and not reason else NONE,
        staged=(stamp if is_current else f"{stamp}, another plan") if there else NONE,
        released=released,
        signed=signed,
        packages=_age(where.project, image),
    )


def _released(where: Where, image: PlannedImage, expected: str) -> tuple[str, str]:
    """Whether the full tag names the image `expected`, and whether what it names is signed."""
    full = publish.references(image, where.registry)[0]
    if not full.registry:
        return NONE, NONE
    registry = Registry(full, host=where.host, write=False)
    digest = registry.digest_of(full.tag)
    if digest is None:
        return NO, NONE
    signed = registry.digest_of(_SIGNATURE.format(digest.replace(":", "-")))
    return YES if digest == expected else "another image", YES if signed else NO


def _age(project: Project, image: PlannedImage) -> int | None:
    lock = os_lock.read(project.root, image.system)
    if lock is None:
        return None
    return (datetime.now(UTC) - datetime.strptime(lock.time, "%Y%m%dT%H%M%S%z")).days
