"""The state of each cell on its way to a release: locked, built, tested, staged, released, signed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from packaging.version import Version

from builder.common.errors import ImageTestError, RegistryError, SigningError, VerifyError
from builder.common.reference import ImageRef
from builder.common.text import counted
from builder.engine.run import Run
from builder.evidence import reports, results, signing
from builder.evidence.results import OWN, Coverage, Requirement
from builder.evidence.signing import Trust
from builder.evidence.suite import Suite
from builder.index.host import Host
from builder.layers import oci, stored_images
from builder.layers.oci import Image
from builder.lock.lockfile import read_release_days
from builder.matrix import tags
from builder.matrix.tags import PLAN_LABEL
from builder.plan.plan import Plan, PlannedImage
from builder.registry.client import Repository
from builder.registry.failures import RejectedError
from builder.registry.transfer import CHECKS, map_parallel
from builder.release import staging, tagging
from builder.release.staging import StagedImage, StagedRelease, StagingArea, name_of

NO, YES, NONE = "no", "yes", "-"
INVALID = "invalid index"  # in place of a released image
LISTED, UNTRUSTED = "listed", "untrusted"  # signatures: not checked without trusted signers, or not of any of them
OF_REGISTRY = ("staged", "released", "signature")  # fields of a status


@dataclass(frozen=True, kw_only=True)
class Status:
    """The state of one cell; `-` for fields that do not apply, or were not looked up.

    `tested` is the number of tests that passed, or the reason that the image does not count as tested: of the
    staged image, else of the same image as released, else as built here. `gpu` is the state of its GPU tests.
    `staged` is a stamp, or `not readable` without the permission to read staging. `released` is `yes` if the full
    tag names that image, with the checks that its release skipped, a note if it relies on unsigned results of one
    machine, and the other tags that name another image or are missing. `signature` is `yes` if a trusted signer
    signed it for this cell and tag; UNTRUSTED if only others did, LISTED if matrix.yaml lists no signers to check
    its signature with. `packages` is the age of the lock of its Debian packages in days, None if it is not locked.
    `support` is the last day of support of all its parts, if known. `digest` is the image that the full tag names,
    `tags` name it, the full one first, and `signer` is the trusted signer that signed it, or empty. `newest` is the
    newest release of `framework` when it was locked last, and `days_behind` how much older `release` is; None if
    the index gave no days.
    """

    cell: str
    locked: str = NO
    built: str = NO
    tested: str = NONE
    gpu: str = NONE
    staged: str = NONE
    released: str = NONE
    signature: str = NONE
    packages: int | None = None
    support: str = NONE
    digest: str = ""
    tags: tuple[str, ...] = ()
    signer: str = ""
    framework: str = ""
    release: str = ""
    newest: str = NONE
    days_behind: int | None = None

    @property
    def is_released(self) -> bool:
        """True if the full tag names the image of the plan."""
        return self.released.startswith(YES)

    @property
    def age(self) -> str:
        """`pytorch 2.9.1 (newest 2.15.0, 11 months)`; the parentheses only if there is a newer release."""
        days = self.days_behind or 0
        months = counted(days * 12 // 365, "month") if days > 60 else counted(days, "day")
        return f"{self.framework} {self.release}" + (f" (newest {self.newest}, {months})" if days else "")


@dataclass(frozen=True, kw_only=True)
class ImageState:
    """The status of an image, and what it is made from. `coverage` is None if no results could be read."""

    planned: PlannedImage
    status: Status
    coverage: Coverage | None


class StatusReader:
    """Looks up the status of images; without `area`, only on this machine."""

    def __init__(self, run: Run, area: StagingArea | None) -> None:
        self._run, self._area, project = run, area, run.project
        self._trust, self._suite = Trust.of(project), Suite.of(*project.folders)
        self._days = read_release_days(project.root)
        self._release: StagedRelease | None = None  # the newest that is staged
        self._notes: dict[str, str] = {}  # on releases, by digest
        self._not_staged = NONE
        if area is None:
            return
        try:
            stamps, released_stamps = area.stamps(), area.released_stamps()
        except RejectedError:  # a user with access to the public images may have none to staging
            stamps, released_stamps, self._not_staged = [], [], "not readable"
        self._release = area.read(stamps[0]) if stamps else None
        for stamp in reversed(released_stamps):
            try:
                record = area.released(stamp)
            except (VerifyError, RejectedError) as error:
                run.view.say(f"the record of release {stamp} cannot be read: {error}")
                continue
            if record is None:
                continue
            for image in record.images:
                notes = [f", {name} allowed" for name in record.allowed]
                notes += [f", {OWN}"] if OWN in image.signer and self._trust.signers else []
                self._notes[image.digest] = "".join(notes)

    def read(self, plan: Plan) -> list[Status]:
        """The status of each image, and of each cell that is not locked. Raises RegistryError, SigningError."""
        return [*(state.status for state in self.states(plan.images)), *(Status(cell=cell) for cell in plan.unlocked)]

    def states(self, images: Sequence[PlannedImage]) -> list[ImageState]:
        """The state of each image. Raises RegistryError, SigningError."""
        return [state for _, state in map_parallel(self._state, images, CHECKS)]

    def _state(self, planned: PlannedImage) -> ImageState:
        images = self._release.images if self._release else ()
        staged = next((image for image in images if image.cell == planned.id), None)
        is_current = staged is not None and staged.plan == planned.plan
        stored = stored_images.find_stored_image(self._run.store, planned)
        expected = staged.digest if staged and is_current else stored.manifest.digest if stored else ""
        repository = public_repository(self._run.host, planned)
        released = self._released(planned, repository, expected)
        tests, gpu, coverage = NONE, NONE, None
        try:
            current = staged if is_current else None
            digest = released.digest if released.is_released else ""
            coverage = self._coverage(planned, current, stored, repository, digest)
            if coverage and is_current:
                coverage.require_pass(planned.id)
            if coverage and coverage.failure:
                tests = coverage.failure
            elif coverage:
                tests, gpu = f"{len(coverage.passed)} passed", coverage.gpu
        except (ImageTestError, VerifyError, RegistryError, SigningError) as error:
            tests = str(error).splitlines()[0].removeprefix(f"{planned.id}: ")
        stamp = self._release.stamp if self._release else ""
        days = self._days.get(planned.cell.framework, {})
        newest, day = max(days, key=Version, default=NONE), days.get(planned.cell.release)
        status = replace(
            released,
            locked=YES,
            built=YES if stored else NO,
            tested=tests,
            gpu="cpu" if planned.cell.is_cpu else gpu,
            staged=(stamp if is_current else f"{stamp}, another plan") if staged else self._not_staged,
            packages=planned.os_lock.age(datetime.now(UTC)),
            support=planned.support[0].last.isoformat() if planned.support else NONE,
            framework=planned.cell.framework,
            release=planned.cell.release,
            newest=newest,
            days_behind=max(0, (days[newest] - day).days) if day else None,
        )
        return ImageState(planned=planned, status=status, coverage=coverage)

    def _coverage(
        self,
        planned: PlannedImage,
        staged: StagedImage | None,
        stored: Image | None,
        repository: Repository,
        digest: str,
    ) -> Coverage | None:
        """The coverage of the staged image, else of the released one with this digest, else of that built here.

        A release attaches the reports that counted to the image that it publishes. Returns None without an image.
        Raises VerifyError, RegistryError, SigningError.
        """
        state = self._run.project.state
        if staged and self._area:
            digest = staging.image_of(self._area, staged).manifest.digest
            repository = self._area.open(staged.repository)
        if digest:
            requirement = Requirement.of(planned, digest, self._suite)
            return reports.registry_coverage(repository, requirement, self._trust, state)
        if stored:
            return results.local_coverage(state, Requirement.of(planned, stored.manifest.digest, self._suite))
        return None

    def _released(self, planned: PlannedImage, repository: Repository, expected: str) -> Status:
        """The image that the full tag names, compared with the image `expected`: a status without the other fields.

        If `expected` is empty, because neither staging nor the store has the image, compares the plan in its labels.
        """
        full, *others = staging.references(planned)
        nothing, cell = Status(cell=planned.id), planned.cell
        if self._area is None or not full.registry:
            return nothing
        tagged = repository.digest_of(full.tag)
        try:
            manifest = repository.image_manifest(tagged, cell.arch) if tagged else None
        except VerifyError:
            return replace(nothing, released=INVALID)
        if tagged is None or manifest is None:
            return replace(nothing, released=NO)
        digest = manifest.digest
        notes = self._notes.get(digest, "")
        named = tagging.read_tags(repository, [other.tag for other in others])
        for tag, current in named.items():
            if current != tagged:
                notes += f", {tag} {'names another image' if current else 'missing'}"
        is_expected = digest == expected if expected else _is_of_plan(repository, digest, planned)
        if not is_expected:
            with suppress(VerifyError, RejectedError):
                if oci.read_labels(manifest.content, repository.read_blob)[0] != cell.arch:
                    # Signed for the cell of its own architecture, if at all.
                    return replace(nothing, released=f"another image{notes}")
        # As a release signs them: the image as its cell, an index as the cell without an architecture.
        signature, signer = self._signature(repository, full, {tagged: f"{cell.axes}{cell.suffix}", digest: cell.id})
        return replace(
            nothing,
            released=(YES if is_expected else "another image") + notes,
            signature=signature,
            signer=signer,
            digest=digest,
            tags=(full.tag, *(tag for tag, current in named.items() if current == tagged)),
        )

    def _signature(self, repository: Repository, full: ImageRef, cells: Mapping[str, str]) -> tuple[str, str]:
        """The field `signature`, and the signer: YES if a trusted one signed each digest, as its cell, for the tag."""
        signer = ""
        try:
            if not all(signing.has_signature(repository, digest) for digest in cells):
                return NO, ""
            if not self._trust.signers:
                return LISTED, ""
            for digest, cell in cells.items():
                annotations = {"cell": cell, "image": name_of(full), "tag": full.tag}
                signer, _ = signing.signer_of_manifest(repository, digest, annotations, self._trust)
                if not signer:
                    return UNTRUSTED, ""
        except (VerifyError, RejectedError):
            return "invalid list", ""
        except (SigningError, RegistryError) as error:
            return f"not checked: {error}", ""
        return YES, signer


def unreleased(images: Sequence[PlannedImage], area: StagingArea, host: Host) -> list[PlannedImage]:
    """The images that are not released, and the images of other architectures with the same tags.

    A release needs all architectures of a tag. An image is released if its full tag names an image of its plan. It also
    counts as released if its newest stamped tag names an image of its plan, and the release with this stamp was rolled
    back. If the release is not marked as rolled back, it was interrupted after setting its stamped tags. Raises
    RegistryError, VerifyError.
    """
    repositories = {staging.references(image)[0].name: public_repository(host, image) for image in images}
    listed = {name: repository.list_tags() for name, repository in repositories.items()}

    def is_released(planned: PlannedImage) -> bool:
        full = staging.references(planned)[0]
        repository = repositories[full.name]
        newest = tags.stamps_of(full.tag, listed[full.name])[:1]
        return _is_of_plan(repository, full.tag, planned) or any(
            _is_of_plan(repository, f"{full.tag}-{stamp}", planned) and area.is_rolled_back(stamp) for stamp in newest
        )

    missing = {image.references for image, is_done in map_parallel(is_released, images) if not is_done}
    return [image for image in images if image.references in missing]


def public_repository(host: Host, planned: PlannedImage) -> Repository:
    """The repository with the public tags of an image."""
    return Repository(staging.references(planned)[0], host=host, write=False)


def _is_of_plan(repository: Repository, reference: str, planned: PlannedImage) -> bool:
    """True if a tag or digest names an image of this plan, by its labels."""
    with suppress(VerifyError, RejectedError):
        if manifest := repository.image_manifest(reference, planned.cell.arch):
            arch, labels = oci.read_labels(manifest.content, repository.read_blob)
            return arch == planned.cell.arch and labels.get(PLAN_LABEL) == planned.plan
    return False
