"""The state of each cell on its way to a release: locked, built, tested, staged, released, signed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from builder.common.errors import ImageTestError, RegistryError, SigningError, VerifyError
from builder.common.reference import ImageRef
from builder.evidence import reports, results, signing
from builder.evidence.results import OWN, Coverage, Requirement
from builder.evidence.signing import Trust
from builder.evidence.suite import Suite
from builder.host import Host
from builder.layers import oci, stored_images
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.matrix.tags import PLAN_LABEL
from builder.plan.plan import Plan, PlannedImage
from builder.registry.client import Repository
from builder.registry.failures import RejectedError
from builder.registry.parallel import CHECKS, look_up
from builder.release import publish, staging, tagging
from builder.release.staging import StagedImage, StagedRelease, StagingArea, name_of

NO, YES, NONE = "no", "yes", "-"
LISTED, UNTRUSTED = "listed", "untrusted"  # signatures: not checked without trusted signers, or not of any of them
OF_REGISTRY = ("staged", "released", "signature")  # fields of a status
_Tests = tuple[str, float | None, str]  # the fields `tested`, `seconds` and `gpu` of a status


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of one cell; `-` for fields that do not apply, or were not looked up.

    `tested` is the number of tests that passed, or the reason that the image does not count as tested: of the staged
    image, else of the one built here. `seconds` is the duration of these tests. `gpu` is the state of its GPU tests.
    `staged` is a stamp. `released` is `yes` if the full tag names that image, with the checks that its release left
    out, a note if it relies on unsigned results of one machine, and the other tags that name another image or are
    missing. `signature` is `yes` if a trusted signer signed it for this cell and tag; UNTRUSTED if only others did,
    LISTED if matrix.yaml lists no signers to check its signature with. `packages` is the age of the lock of its Debian
    packages in days, None if it is not locked. `support` is the last day of support of all its parts, if known.
    """

    cell: str
    locked: str = NO
    built: str = NO
    tested: str = NONE
    seconds: float | None = None
    gpu: str = NONE
    staged: str = NONE
    released: str = NONE
    signature: str = NONE
    packages: int | None = None
    support: str = NONE


@dataclass(kw_only=True)
class StatusReader:
    """Looks up the status of images. With `here`, or without `area` and a registry, only on this machine."""

    project: Project
    store: Store
    host: Host
    area: StagingArea | None = None
    registry: str = ""
    here: bool = False

    def __post_init__(self) -> None:
        self._trust = Trust.of(self.project)
        self._suite = Suite.of(*self.project.folders)
        self._release: StagedRelease | None = None  # the newest that is staged
        self._notes: dict[str, str] = {}  # on releases, by digest
        self._unreadable = ""
        if self.area is not None:
            self._release = self.area.read(stamps[0]) if (stamps := self.area.stamps()) else None
            for stamp in reversed(self.area.released_stamps()):
                try:
                    if released := self.area.released(stamp):
                        allowed = "".join(f", {name} allowed" for name in released.allowed)
                        self._notes |= {
                            image.digest: allowed + (f", {OWN}" if OWN in image.signer and self._trust.signers else "")
                            for image in released.images
                        }
                except (VerifyError, RejectedError):
                    self._unreadable += f", record of {stamp} cannot be read"

    def read(self, plan: Plan) -> Iterator[Status]:
        """The status of each image, and of each cell that is not locked. Raises RegistryError, SigningError."""
        for _, status in look_up(self._status, plan.images, CHECKS):
            yield status
        for cell in plan.unlocked:
            yield Status(cell=cell)

    def _status(self, planned: PlannedImage) -> Status:
        images = self._release.images if self._release else ()
        staged = next((image for image in images if image.cell == planned.id), None)
        is_current = staged is not None and staged.plan == planned.plan
        stored = stored_images.find_stored_image(self.store, planned)
        if staged and is_current:
            tested, seconds, gpu = self._tests_in_registry(planned, staged)
        elif stored:
            coverage = results.local_coverage(
                self.project.state, Requirement.of(planned, stored.manifest.digest, self._suite)
            )
            tested, seconds, gpu = (coverage.failure, None, NONE) if coverage.failure else _passed(coverage)
        else:
            tested, seconds, gpu = NONE, None, NONE
        expected = staged.digest if staged and is_current else stored.manifest.digest if stored else ""
        released, signature = self._released(planned, expected)
        stamp = self._release.stamp if self._release else ""
        return Status(
            cell=planned.id,
            locked=YES,
            built=YES if stored else NO,
            tested=tested,
            seconds=seconds,
            gpu="cpu" if planned.cell.is_cpu else gpu,
            staged=(stamp if is_current else f"{stamp}, another plan") if staged else NONE,
            released=released,
            signature=signature,
            packages=planned.os_lock.age(datetime.now(UTC)),
            support=planned.support[0].last.isoformat() if planned.support else NONE,
        )

    def _tests_in_registry(self, planned: PlannedImage, staged: StagedImage) -> _Tests:
        assert self.area is not None
        try:
            image = staging.image_of(self.area, staged)
            requirement = Requirement.of(planned, image.manifest.digest, self._suite)
            repository = self.area.open(staged.repository)
            coverage = reports.registry_coverage(repository, requirement, self._trust, state=self.project.state)
            coverage.require_pass(planned.id)
            return _passed(coverage)
        except (ImageTestError, VerifyError, RegistryError, SigningError) as error:
            return str(error).splitlines()[0].removeprefix(f"{planned.id}: "), None, NONE

    def _released(self, planned: PlannedImage, expected: str) -> tuple[str, str]:
        """The fields `released` and `signature` of a status, compared with the image `expected`.

        If `expected` is empty, because neither staging nor the store has the image, compares the plan in its labels.
        """
        full, *others = publish.references(planned, self.registry)
        if self.here or not full.registry:
            return NONE, NONE
        repository = Repository(full, host=self.host, write=False)
        tagged = repository.digest_of(full.tag)
        try:
            manifest = repository.image_manifest(tagged, planned.cell.arch) if tagged else None
        except VerifyError:
            return "invalid index", NONE
        if tagged is None or manifest is None:
            return NO, NONE
        digest = manifest.digest
        notes = self._notes.get(digest, "") + self._unreadable
        for tag, current in tagging.read_tags(repository, [other.tag for other in others]).items():
            if current != tagged:
                notes += f", {tag} {'names another image' if current else 'missing'}"
        is_expected = digest == expected if expected else _is_of_plan(repository, digest, planned)
        cell = planned.cell
        if not is_expected:
            with suppress(VerifyError, RejectedError):
                if oci.read_labels(manifest.content, repository.read_blob)[0] != cell.arch:
                    return f"another image{notes}", NONE  # signed for the cell of its own architecture, if at all
        # As a release signs them: the image as its cell, an index as the cell without an architecture.
        signature = self._signature(repository, full, {tagged: f"{cell.axes}{cell.suffix}", digest: cell.id})
        return (YES if is_expected else "another image") + notes, signature

    def _signature(self, repository: Repository, full: ImageRef, cells: Mapping[str, str]) -> str:
        """The field `signature`: YES if a trusted signer signed each digest, as its cell, for the full tag."""
        try:
            if not all(signing.has_signature(repository, digest) for digest in cells):
                return NO
            if not self._trust.signers:
                return LISTED
            for digest, cell in cells.items():
                annotations = {"cell": cell, "image": name_of(full), "tag": full.tag}
                signer, _ = signing.signer_of_manifest(repository, digest, annotations, self._trust)
                if not signer:
                    return UNTRUSTED
        except (VerifyError, RejectedError):
            return "invalid list"
        except SigningError as error:
            return f"not checked: {error}"
        return YES


def unreleased(images: Sequence[PlannedImage], host: Host) -> list[PlannedImage]:
    """The images that are not released, with those for other architectures of the same tags.

    A release needs all of them. An image is released if its full tag names an image of its plan. Raises RegistryError.
    """

    def is_released(planned: PlannedImage) -> bool:
        full = publish.references(planned)[0]
        return _is_of_plan(Repository(full, host=host, write=False), full.tag, planned)

    tags = {image.references for image, is_done in look_up(is_released, images) if not is_done}
    return [image for image in images if image.references in tags]


def _is_of_plan(repository: Repository, reference: str, planned: PlannedImage) -> bool:
    """True if a tag or digest names an image of this plan, by its labels."""
    with suppress(VerifyError, RejectedError):
        if manifest := repository.image_manifest(reference, planned.cell.arch):
            arch, labels = oci.read_labels(manifest.content, repository.read_blob)
            return arch == planned.cell.arch and labels.get(PLAN_LABEL) == planned.plan
    return False


def _passed(coverage: Coverage) -> _Tests:
    return coverage.tests_status, round(sum(coverage.seconds.values()), 1) or None, coverage.gpu
