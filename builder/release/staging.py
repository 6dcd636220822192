"""Staged releases: tested images in a registry by digest, without public tags, and a document that lists them.

An image is in the repository <staging>/<its name>, with its reports attached and the tag of its plan. The document is
in <staging>/releases, as an artifact with the tag `release-<stamp>`, signed if there is a signer. Other machines need
nothing else to test and to release the images.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, StringConstraints

from builder.common.console import Meter
from builder.common.errors import RegistryError, StaleError, UsageError, VerifyError
from builder.common.files import digest_of_bytes, short_digest, write_atomically
from builder.common.reference import ImageRef, staged_repository
from builder.engine.run import Run
from builder.evidence import signing
from builder.evidence.results import Coverage
from builder.evidence.signing import Signer, Trust
from builder.index.host import Host
from builder.layers import oci
from builder.layers.oci import Descriptor, Digest, Image
from builder.matrix import tags
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.plan.plan import PlannedImage
from builder.registry import artifacts, transfer
from builder.registry.client import Repository
from builder.registry.transfer import Sent

TYPE = "application/vnd.gpu-images.release.v1+json"
RELEASED_TYPE = "application/vnd.gpu-images.released.v1+json"
ROLLED_BACK_TYPE = "application/vnd.gpu-images.rolled-back.v1+json"
INDEX, PREFIX, RELEASED, ROLLED_BACK = "releases", "release-", "released-", "rolled-back-"
_HINT = "Stage the images again."
UNSCANNED = "unscanned"
_Line = Annotated[oci.Printable, StringConstraints(max_length=600)]
_Text = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.+-]{0,100}$")]


class StagedImage(BaseModel, extra="forbid", frozen=True):
    """A staged image: `repository` is the image's name in staging, `digest` the digest of its manifest.

    The record of a release also has the image's tags (`references`) and the digest that the tags name (`tagged`: the
    digest of an index, if the tags are for several architectures), the state of the GPU tests, the signer of the
    reports, and the result of the scan for vulnerabilities. `signer` is `own results, unsigned` if the machine that
    released the image ran the tests, empty without a trusted signature.
    """

    cell: _Text
    repository: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(-[a-z0-9]+){0,20}$", max_length=100)]
    digest: Digest
    plan: Digest
    tagged: _Line = ""
    references: tuple[_Line, ...] = ()
    gpu: _Line = ""
    signer: _Line = ""
    scan: _Line = ""

    @classmethod
    def of(cls, planned: PlannedImage, digest: str) -> StagedImage:
        """The image with this digest, which was built as planned."""
        return cls(cell=planned.id, repository=repository_name(planned), digest=digest, plan=planned.plan)


class StagedRelease(BaseModel, extra="forbid", frozen=True):
    """A staged release, or the record of the images that a release publishes, which is written before its first tag.

    `revision` is the commit of the checkout, with `+changes` if files differed from it; empty outside git. `allowed`
    are the checks that the release skipped.
    """

    format: Literal[1] = 1
    stamp: _Text
    revision: _Text
    images: tuple[StagedImage, ...]
    allowed: tuple[_Line, ...] = ()

    def cells(self, project: Project) -> list[Cell]:
        """The cells of a project that the release has images of."""
        ids = {image.cell for image in self.images}
        return [cell for cell in project.cells if cell.id in ids]

    def stale(self, cell: str) -> StaleError:
        """The error for a cell that has another plan now."""
        commit = self.revision.partition("+")[0]
        return StaleError(
            f"{cell}: staged from a different plan than this checkout's",
            hint=f"Check out revision {commit}." if commit else "Check out the revision that it was staged from.",
        )


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An image to stage or to publish, and its coverage by tests.

    `is_staged` is True if another machine staged the image. For a release, `sbom` is the image's SBOM, and `scan` the
    result of the scanner in matrix.yaml.
    """

    planned: PlannedImage
    stored: Image
    coverage: Coverage
    is_staged: bool = False
    sbom: bytes = b""
    scan: str = UNSCANNED

    @property
    def cell(self) -> str:
        return self.planned.id

    @property
    def arch(self) -> str:
        return self.planned.cell.arch

    @property
    def digest(self) -> str:
        return self.stored.manifest.digest

    @cached_property
    def references(self) -> tuple[ImageRef, ...]:
        return references(self.planned)


class StagingArea:
    """The place where images are staged: a registry, optionally with a prefix for the names of repositories.

    Never that of the public images.
    """

    def __init__(self, place: str, registry: str, host: Host) -> None:
        """`place` is `staging` of matrix.yaml, `registry` the registry if it names none."""
        self._place, self._registry, self._host = place, registry, host
        self._opened: dict[tuple[str, bool], Repository] = {}

    @classmethod
    def of(cls, project: Project, host: Host) -> StagingArea:
        """The staging area of a project. Raises UsageError without a registry, and for the place of public images."""
        matrix = project.matrix
        area = cls(matrix.staging_place, matrix.registry, host)
        if not (matrix.staging_place and area.repository(INDEX).registry):
            raise UsageError("no registry in matrix.yaml", hint='Set `registry: "registry.example.com"` there.')
        for name in matrix.image_names:
            public = ImageRef(registry=matrix.registry, repository=f"{matrix.namespace}/{name}")
            repositories = (public, *map(area.repository, (*matrix.image_names, INDEX)))
            # GHCR.io:443 is ghcr.io.
            place, *places = (repository.name.lower().replace(":443/", "/") for repository in repositories)
            if place in places:
                raise UsageError(
                    f"staging: {public} is the place of public images",
                    hint="Use another place for `staging` in matrix.yaml. "
                    f"Default: {matrix.registry or 'REGISTRY'}/{matrix.namespace}/staging-<image>.",
                )
        return area

    def repository(self, name: str) -> ImageRef:
        """The repository of images of this name."""
        return staged_repository(self._place, self._registry, name)

    def open(self, name: str, *, write: bool = False) -> Repository:
        """A repository, always the same object: it has a connection and a login, and keeps what was read by digest."""
        if (name, write) not in self._opened:
            self._opened[name, write] = Repository(self.repository(name), host=self._host, write=write)
        return self._opened[name, write]

    # ---- releases

    def stamps(self) -> list[str]:
        """The stamps of all staged releases, the newest first."""
        return self._stamps(PREFIX)

    def _stamps(self, *prefixes: str) -> list[str]:
        listed = self.open(INDEX).list_tags()
        names = {tag.removeprefix(prefix) for prefix in prefixes for tag in listed if tag.startswith(prefix)}
        return sorted(filter(tags.is_stamp, names), key=tags.stamp_order, reverse=True)

    def read(self, stamp: str = "") -> StagedRelease:
        """A staged release, by default the newest. Raises UsageError for an unknown one, RegistryError, VerifyError."""
        if not stamp:
            stamps = self.stamps()
            if not stamps:
                raise RegistryError(f"nothing is staged in {self.repository(INDEX)}", hint="builder stage")
            stamp = stamps[0]
        if release := self._document(f"{PREFIX}{stamp}", stamp):
            return release
        raise UsageError(f"no staged release {stamp}", hint=f"Staged: {', '.join(self.stamps()[:5]) or 'none'}.")

    def _document(self, tag: str, stamp: str, media_type: str = TYPE) -> StagedRelease | None:
        if not tags.is_stamp(stamp):
            raise UsageError(f"invalid stamp {stamp[:100]!r}: use e.g. 20261122")
        documents = artifacts.read_artifact(self.open(INDEX), tag, media_type)
        if documents is None:
            return None
        release = oci.parse_document(StagedRelease, documents.get(media_type, b""), tag, hint=_HINT)
        if release.stamp != stamp:
            raise VerifyError(f"{tag} has the stamp {release.stamp}, expected {stamp}", hint=_HINT)
        return release

    def released(self, stamp: str) -> StagedRelease | None:
        """The record of the images that a release published; None if it published nothing.

        Raises UsageError, RegistryError, VerifyError.
        """
        return self._document(f"{RELEASED}{stamp}", stamp, RELEASED_TYPE)

    def released_stamps(self) -> list[str]:
        """The stamps of all releases of which something was published, the newest first."""
        return self._stamps(RELEASED)

    def record(self, released: StagedRelease) -> None:
        """Writes the record of a release, beside the staged release."""
        content = released.model_dump_json().encode()
        self._put(f"{RELEASED}{released.stamp}", RELEASED_TYPE, content)

    def is_rolled_back(self, stamp: str) -> bool:
        """True if tags moved back from the release with this public stamp, and it was not released again since."""
        tag = f"{ROLLED_BACK}{stamp}"
        return (artifacts.read_artifact(self.open(INDEX), tag, ROLLED_BACK_TYPE) or {}).get(ROLLED_BACK_TYPE) == b"true"

    def mark_rolled_back(self, stamps: Iterable[str], current: str) -> None:
        """Marks the `stamps` newer than `current` as rolled back, and `current` as not rolled back.

        Call it before the tags move. A mark is replaced, not deleted: some registries do not allow deletion.
        """
        for stamp in {current, *stamps}:
            is_newer = tags.stamp_order(stamp) > tags.stamp_order(current)
            if (is_newer or stamp == current) and self.is_rolled_back(stamp) != is_newer:
                # With the note, each mark is a manifest of its own: whoever deletes one leaves the other marks.
                content, note = b"true" if is_newer else b"false", {"stamp": stamp}
                self._put(f"{ROLLED_BACK}{stamp}", ROLLED_BACK_TYPE, content, note)

    def _put(self, tag: str, kind: str, content: bytes, notes: Mapping[str, str] = {}) -> None:
        repository, artifact = self.open(INDEX, write=True), artifacts.artifact_manifest(kind, {kind: content}, notes)
        artifacts.put_documents(repository, [content])
        repository.put_manifest(tag, artifact.content, artifact.media_type)

    def write(
        self, project: Project, day: str, revision: str, images: Sequence[StagedImage], signer: Signer | None = None
    ) -> StagedRelease:
        """Writes a release under the next stamp of the day, unless an equal release is staged; returns it.

        If the registry has a stamp of a later day, the release gets the next stamp of that day: otherwise, `release`
        would take the other one for newer. Signs it, and records that this checkout wrote it, see `require_signed`.
        """
        repository = self.open(INDEX, write=True)
        newest = next(iter(self._stamps(PREFIX, RELEASED)), "")
        for stamp in tags.stamps(max(day, newest.partition(".")[0])):
            release = StagedRelease(stamp=stamp, revision=revision, images=tuple(images))
            content, tag = release.model_dump_json().encode(), f"{PREFIX}{stamp}"
            artifact, present = artifacts.artifact_manifest(TYPE, {TYPE: content}), repository.digest_of(tag)
            if present is None and tags.stamp_order(stamp) <= tags.stamp_order(newest):
                continue  # the stamp of a deleted release: with it, this release would be older than the newest one
            if present not in (None, artifact.digest):
                continue  # another release
            if present is None:
                artifacts.put_artifact(repository, artifact, [content])
            if signer:
                signer.sign_manifest(repository, artifact.descriptor)
            if present is None and repository.digest_of(tag) is None:
                repository.put_manifest(tag, artifact.content, artifact.media_type)
                time.sleep(repository.confirm_s)  # another machine may have set the same tag at the same time
            if repository.digest_of(tag) == artifact.digest:
                write_atomically(_own(project, content), f"{stamp}\n")
                return release
        raise AssertionError("stamps are endless")

    def require_signed(self, project: Project, release: StagedRelease) -> None:
        """Raises VerifyError unless this checkout, or a signer of matrix.yaml, listed exactly these images.

        Anyone who can write to staging could remove an image from the list, and its tags would stay on an older image.
        """
        content = release.model_dump_json().encode()
        if _own(project, content).exists():
            return
        # The digest of exactly this list, whatever its tag names now.
        repository, digest = self.open(INDEX), artifacts.artifact_manifest(TYPE, {TYPE: content}).digest
        if signing.has_signature(repository, digest):
            signer, _ = signing.signer_of_manifest(repository, digest, {}, Trust.of(project))
            if signer:
                return
        raise VerifyError(
            f"release {release.stamp}: images may be missing: this checkout did not stage it, and no signer listed "
            "under `evidence` in matrix.yaml signed the list of its images",
            hint="List them again: builder stage, with --sign KEY on another machine   "
            "To accept the list unsigned, add --allow-unsigned.",
        )


def _own(project: Project, content: bytes) -> Path:
    """The file that records that this checkout wrote a staged release."""
    return project.state / "staged" / short_digest(digest_of_bytes(content))


def require_registry(project: Project) -> None:
    """Raises UsageError without a registry to publish to."""
    if not project.matrix.registry:
        raise UsageError("no registry in matrix.yaml", hint='Set `registry: "registry.example.com"` there.')


def references(image: PlannedImage) -> tuple[ImageRef, ...]:
    """The references to publish an image under, the full tag first."""
    return tuple(ImageRef.parse(text) for text in image.references)


def cells_by_arch(project: Project, image: PlannedImage) -> dict[str, str]:
    """The ids of all cells of the matrix with the references of an image, by architecture."""
    return {cell.arch: cell.id for cell in project.cells if replace(cell, arch=image.cell.arch) == image.cell}


def name_of(reference: ImageRef) -> str:
    """The name of a public repository in staging: its last part."""
    return reference.repository.rpartition("/")[2]


def repository_name(planned: PlannedImage) -> str:
    """The name of an image's repository in staging."""
    return name_of(references(planned)[0])


def plan_tag(plan: str) -> str:
    """The tag of the image that was staged for a plan, for machines that did not make it."""
    return f"plan-{plan.removeprefix('sha256:')}"


def image_of(area: StagingArea, staged: StagedImage) -> Image:
    """A staged image. Raises RegistryError, VerifyError."""
    repository = area.open(staged.repository)
    manifest = repository.manifest(staged.digest)
    if manifest is None:
        raise RegistryError(f"{staged.cell}: {repository.name} has no {staged.digest}", hint=_HINT)
    return oci.read_image(manifest.content, repository.read_blob)


def push_image(
    run: Run,
    repository: Repository,
    image: Candidate,
    mount_from: Sequence[str],
    fetch: Callable[[Descriptor], Path] | None = None,
    source: str = "",
) -> Sent:
    """Pushes an image by digest, with its progress in the view; sets no tag.

    `mount_from`, `fetch` and `source` are as in `transfer.send_blobs`.
    """
    manifest = image.stored.manifest
    blobs = (image.stored.config, *(layer.descriptor for layer in image.stored.layers))
    paths = {blob: run.store.path(blob.digest) for blob in blobs}
    files = {blob: path if path.exists() else None for blob, path in paths.items()}
    progress = Meter(run.view, image.cell, "checked or sent", sum(blob.size for blob in files)).add
    sent = transfer.send_blobs(repository, files, fetch=fetch, source=source, mount_from=mount_from, progress=progress)
    # The manifest last: a registry rejects a manifest whose blobs it lacks.
    repository.put_manifest(manifest.digest, manifest.content, manifest.media_type)
    return sent
