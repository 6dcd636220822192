"""Publishes tested images of the store or of staging: all images first, with what is attached to them, then tags.

First each image gets the tag of this release, which never moves; then the other tags move. So no tag names an image of
half a release. Images that differ only in their architecture share their tags, which name an index of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from builder.common import errors
from builder.common.console import Meter, View
from builder.common.errors import BuilderError, DamagedError, ImageTestError, RegistryError, UsageError, VerifyError
from builder.common.reference import ImageRef
from builder.common.text import size
from builder.evidence import results
from builder.evidence.results import Coverage, Requirement
from builder.evidence.suite import Suite
from builder.host import Host
from builder.layers import images as stored_images
from builder.layers import oci
from builder.layers.blobs import Descriptor
from builder.layers.oci import Image, Manifest
from builder.layers.store import Store
from builder.matrix import tags
from builder.matrix.project import Project
from builder.plan.plan import Plan, PlannedImage
from builder.registry import transfer
from builder.registry.client import INDEXES, Repository
from builder.registry.failures import RejectedError
from builder.registry.parallel import pipeline
from builder.registry.transfer import Pushed
from builder.release import tagging
from builder.release.tagging import TagChange

Fetch = Callable[[Descriptor], Path]  # downloads a blob to the store
WITHOUT_ARCH = "on machines of that architecture, `docker pull` then fails, or pulls an image that does not run"


@dataclass(frozen=True, kw_only=True)
class PublishableImage:
    """The image of a cell, its coverage by tests, and the references to publish it under, the full tag first.

    `cells` are the ids of all cells of the matrix with these references, by architecture. `source` is a repository of
    the same registry that has its blobs, empty if there is none. `fetch` downloads a blob from where the image is
    staged, if the registry can neither mount it nor has it.
    """

    cell: str
    arch: str
    cells: Mapping[str, str]
    stored: Image
    coverage: Coverage
    references: tuple[ImageRef, ...]
    source: str = ""
    fetch: Fetch | None = None

    @property
    def digest(self) -> str:
        return self.stored.manifest.digest


class NotBuiltError(ImageTestError):
    """The store does not have the image."""


def require_registry(project: Project, registry: str) -> None:
    """Raises UsageError without a registry to publish to; `registry` overrides the setting in matrix.yaml."""
    if not (registry or project.matrix.registry):
        raise UsageError(
            "no registry in matrix.yaml", hint='Set `registry: "registry.example.com"` there, or use --to.'
        )


def targets(project: Project, store: Store, plan: Plan, registry: str = "") -> list[PublishableImage]:
    """The images of the store that passed their tests; `registry` overrides the setting in matrix.yaml.

    Raises one error for all images that are not built or have not passed.
    """
    chosen, failures = collect(project, store, plan, registry)
    if failures:
        raise errors.join(list(failures.values()), "images are not built or have not passed their tests")
    return chosen


def collect(
    project: Project, store: Store, plan: Plan, registry: str = ""
) -> tuple[list[PublishableImage], dict[str, BuilderError]]:
    """As `targets`, with the errors by cell."""
    chosen: list[PublishableImage] = []
    failures: dict[str, BuilderError] = {}
    suite = Suite.of(project.root)
    for image in plan.images:
        try:
            chosen.append(_target(project, store, image, suite, registry))
        except (DamagedError, ImageTestError) as error:
            failures[image.id] = type(error)(f"{image.id}: {error}", hint=f"builder images {image.id}")
    return chosen, failures


def require_run(images: Sequence[PublishableImage], *, hint: str) -> None:
    """Raises ImageTestError for images that only an emulation has run; `hint` is the other way to publish them."""
    if not_run := [f"{image.cell}: {image.coverage.tests_status}" for image in images if image.coverage.is_emulated]:
        raise ImageTestError(
            "\n".join(not_run),
            hint=f"Test them on a machine of their architecture. To publish them as they are: {hint}",
        )


def _target(project: Project, store: Store, image: PlannedImage, suite: Suite, registry: str) -> PublishableImage:
    """An image of the store. Raises DamagedError, or ImageTestError if it has not passed."""
    stored = stored_images.find_stored_image(store, image)
    if stored is None:
        raise NotBuiltError("not built")
    requirement = Requirement.of(image, stored.manifest.digest, suite)
    coverage = results.local_coverage(project.state, requirement)
    if coverage.failure:
        raise ImageTestError(coverage.failure)
    return PublishableImage(
        cell=image.id,
        arch=image.cell.arch,
        cells=cells_by_arch(project, image),
        stored=stored,
        coverage=coverage,
        references=references(image, registry),
    )


def cells_by_arch(project: Project, image: PlannedImage) -> dict[str, str]:
    """The ids of the cells that differ from that of an image at most in their architecture, by architecture."""
    return {cell.arch: cell.id for cell in project.cells if replace(cell, arch=image.cell.arch) == image.cell}


def by_tags(images: Iterable[PublishableImage]) -> list[list[PublishableImage]]:
    """The images that share their tags, together."""
    groups: dict[tuple[ImageRef, ...], list[PublishableImage]] = {}
    for image in images:
        groups.setdefault(image.references, []).append(image)
    return list(groups.values())


def tagged_manifest(images: Sequence[PublishableImage]) -> Manifest:
    """What the tags of these images name: the manifest of the image if the matrix has one architecture, else an index.

    An index that lacks an architecture is a clear error for an engine that needs it; a manifest would be an image that
    does not run there.
    """
    if len(images[0].cells) == 1:
        return images[0].stored.manifest
    manifests = {image.arch: image.stored.manifest.descriptor for image in images}
    return Manifest.of(oci.platform_index(manifests), oci.INDEX_TYPE)


def references(image: PlannedImage, registry: str = "") -> tuple[ImageRef, ...]:
    """The references of an image, the full tag first; `registry` overrides the setting in matrix.yaml."""
    parsed = (ImageRef.parse(text) for text in image.references)
    return tuple(replace(reference, registry=registry) if registry else reference for reference in parsed)


def blobs_of(store: Store, image: Image) -> dict[Descriptor, Path | None]:
    """The configuration and the layers of an image, with their files; None for a blob that the store lacks."""
    blobs = (image.config, *(layer.descriptor for layer in image.layers))
    return {blob: path if (path := store.path(blob.digest)).exists() else None for blob in blobs}


@dataclass(frozen=True, kw_only=True)
class Sent:
    """An image that is in the registry now."""

    target: PublishableImage
    pushed: Pushed
    seconds: float

    def __str__(self) -> str:
        parts = [(self.pushed.sent, "sent"), (self.pushed.mounted, "mounted"), (self.pushed.present, "already present")]
        sizes = ", ".join(f"{size(count)} {state}" for count, state in parts if count)
        return f"{self.target.cell}: {self.pushed.digest}, {sizes}, gpu: {self.target.coverage.gpu_status}"

    def as_data(self) -> dict[str, Any]:
        """For `--format json`."""
        return {
            "cell": self.target.cell,
            "digest": self.pushed.digest,
            "bytes": {"sent": self.pushed.sent, "mounted": self.pushed.mounted, "present": self.pushed.present},
            "gpu": self.target.coverage.gpu_status,
            "seconds": round(self.seconds, 1),
        }


@dataclass(frozen=True, kw_only=True)
class Released:
    """The results of a push, up to the error that ended it, if there was one."""

    images: tuple[Sent, ...]
    tags: tuple[TagChange, ...]
    error: BuilderError | None

    @property
    def changed(self) -> list[TagChange]:
        return [change for change in self.tags if change.is_change]

    @property
    def lines(self) -> list[str]:
        """What was sent and changed."""
        return list(map(str, (*self.images, *self.changed)))

    def as_data(self) -> dict[str, Any]:
        """For `--format json`."""
        return {
            "images": [sent.as_data() for sent in self.images],
            "tags": [change.as_data() for change in self.tags],
            "error": str(self.error) if self.error else None,
        }


class ReleaseDocuments(Protocol):
    """What a release writes besides images and tags."""

    def record(self) -> None:
        """Records what is published, before anything is pushed."""

    def attach(self, repository: Repository, image: PublishableImage, stamped: str) -> None:
        """Attaches statements to an image that is in the registry, and signs it, before it has a tag.

        `stamped` is the stamped tag that the image gets now, empty if it has one.
        """

    def sign_index(self, repository: Repository, digest: str, images: Sequence[PublishableImage], stamped: str) -> None:
        """Signs the index of these images, which is in the registry, before it has a tag."""


@dataclass(kw_only=True)
class _Publication:
    """Images with the same tags, what these tags will name, and the digests of the moving ones when the push began."""

    targets: Sequence[PublishableImage]
    registry: Repository
    manifest: Manifest
    moving: dict[str, str | None]

    @property
    def is_released(self) -> bool:
        """Whether the full tag names it already."""
        return self.moving[self.targets[0].references[0].tag] == self.manifest.digest

    def stamped(self, stamp: str) -> str:
        """The stamped tag of a release, empty if it has one."""
        return "" if self.is_released else tags.stamped(self.targets[0].references[0], stamp).tag


@dataclass(frozen=True, kw_only=True)
class Publisher:
    """Publishes images together as one release, which gets the first of the `stamps` that no other image has.

    `roll_back` lets tags move to older images, `allow_missing_arch` to an image for fewer architectures than the
    matrix has, or than the tag names now. `documents` are those of a release, None for a plain push.
    """

    host: Host
    view: View
    store: Store
    stamps: Iterable[str]
    roll_back: bool = False
    allow_missing_arch: bool = False
    documents: ReleaseDocuments | None = None
    new_registry: Callable[..., Repository] = Repository

    def publish(self, chosen: Sequence[PublishableImage]) -> Released:
        """Pushes every image, then sets all tags. The error that ended it is in the result."""
        sent: dict[str, Sent] = {}
        changes: list[TagChange] = []
        error: BuilderError | None = None
        try:
            self._publish(chosen, sent, changes)
        except BuilderError as failure:
            lines = [f"  {change}" for change in changes if change.is_change]
            error = failure
            if lines:
                text = "\n".join([str(failure), "tags changed before the failure:", *lines])
                error = type(failure)(text, hint=failure.hint)
        except BaseException:  # Ctrl-C: `changes` is lost after this, so report it here
            for change in changes:
                if change.is_change:
                    self.view.say(f"changed before the interruption: {change}")
            raise
        images = tuple(sent[target.cell] for target in chosen if target.cell in sent)
        return Released(images=images, tags=tuple(changes), error=error)

    def _publish(self, chosen: Sequence[PublishableImage], done: dict[str, Sent], changes: list[TagChange]) -> None:
        """Fills `done`, by cell, and `changes` step by step: both are shown after a failure too."""
        # Read all tags first. So if the registry does not respond, or a tag would move back, nothing is changed.
        publications: list[_Publication] = []
        for targets in by_tags(chosen):
            repository = self.new_registry(targets[0].references[0], host=self.host, write=True)
            moving = tagging.read_tags(repository, [reference.tag for reference in targets[0].references])
            manifest = tagged_manifest(targets)
            publications.append(_Publication(targets=targets, registry=repository, manifest=manifest, moving=moving))
        self._check_tags(publications)
        stamp = self._stamp(publications)
        if self.documents:
            self.documents.record()

        # Images go up by digest, one after another; what is attached to one goes up while the next one is pushed.
        repositories = {target.references[0].repository for target in chosen}
        publication_of = {target.cell: each for each in publications for target in each.targets}

        def push_image(target: PublishableImage) -> Sent:
            began = time.monotonic()
            sources = {*repositories, target.source} - {target.references[0].repository, ""}
            blobs = blobs_of(self.store, target.stored)
            pushed = transfer.push_image(
                publication_of[target.cell].registry,
                target.stored.manifest,
                blobs,
                fetch=target.fetch,
                mount_from=sorted(sources, key=lambda name: (name != target.source, name)),
                progress=Meter(self.view, target.cell, "checked or sent", sum(blob.size for blob in blobs)).add,
            )
            return Sent(target=target, pushed=pushed, seconds=time.monotonic() - began)

        def finish_image(sent: Sent, stop: threading.Event) -> None:
            target, began = sent.target, time.monotonic()
            if self.documents:
                self.view.begin(target.cell, "attaching test results and statements")
                publication = publication_of[target.cell]
                self.documents.attach(publication.registry.stoppable(stop), target, publication.stamped(stamp))
                self.view.end(target.cell, "done", "test results and statements attached")
            done[target.cell] = replace(sent, seconds=sent.seconds + time.monotonic() - began)

        with self.view.live():
            pipeline(push_image, finish_image, chosen, lambda target: self.view.end(target.cell, "failed"))
        for each in publications:
            if each.manifest.media_type == oci.INDEX_TYPE:
                digest, content = each.manifest.digest, each.manifest.content
                each.registry.put_manifest(digest, content, oci.INDEX_TYPE)
                if self.documents:
                    self.documents.sign_index(each.registry, digest, each.targets, each.stamped(stamp))

        # No tag before all images are complete in the registry: none names an image of half a release. First the tags
        # that never move. They were free when the stamp was chosen: if a tag is taken now, another push has set it.
        for each in publications:
            stamped = {each.stamped(stamp): None} if not each.is_released else {}
            tagging.tag(each.registry, each.manifest, changes, stamped)
        for each in publications:
            tagging.tag(each.registry, each.manifest, changes, each.moving)
        # Registries have no compare-and-swap: this detects that another push of the same tags won the race.
        for repository in {each.registry.name: each.registry for each in publications}.values():
            tagging.confirm(repository, [change for change in changes if change.name == repository.name])

    def _check_tags(self, publications: Sequence[_Publication]) -> None:
        """Raises RegistryError if a tag would move to an older release or older Debian packages, or if the image that
        it names now cannot be read, so that its age is unknown. Also raises it if a tag would have no image for an
        architecture of the matrix, or for one that it has now.
        """
        backward: list[str] = []
        missing: list[str] = []
        for each in publications:
            images = {target.arch: target.stored.labels for target in each.targets}
            named: dict[str, dict[str, dict[str, str]]] = {}
            for tag, before in each.moving.items():
                if not before or before == each.manifest.digest:
                    continue
                name = f"{each.registry.name}:{tag}"
                try:
                    named[before] = named.get(before) or tagging.named_images(each.registry, before)
                except (VerifyError, RejectedError) as error:
                    backward.append(f"{name} names an image that cannot be read: {error}")
                    with suppress(VerifyError, RejectedError):  # an unreadable image still has its architectures
                        index = each.registry.manifest(before)
                        if index and index.media_type in INDEXES:
                            named[before] = {arch: {} for arch in oci.read_platforms(index.content)}
                    continue
                if reason := tagging.backward(named[before], images):
                    backward.append(f"{name} would move back {reason}")
            needed = {arch for of_tag in (each.targets[0].cells, *named.values()) for arch in of_tag}
            for arch in sorted(needed - images.keys()):
                missing.append(f"{each.targets[0].references[0]} would have no image for {arch}")
        if backward and not self.roll_back:
            raise RegistryError(
                "nothing was pushed: these tags would move back, or the images that they name now cannot be read\n"
                + "\n".join(f"  {line}" for line in backward),
                hint="Run `make refresh` to build on current packages, or use --roll-back to move the tags anyway.",
            )
        if missing and self.allow_missing_arch:
            for line in missing:
                self.view.say(line.replace("would have", "has"))
        elif missing:
            raise RegistryError(
                "nothing was pushed: these tags would have no image for an architecture that matrix.yaml has, or that "
                "they have now\n" + "\n".join(f"  {line}" for line in missing),
                hint="Publish the images for all architectures together: `builder stage` on a machine of each, then "
                f"`builder release`. Or use --allow-missing-arch: {WITHOUT_ARCH}",
            )

    def _stamp(self, publications: Sequence[_Publication]) -> str:
        """The first stamp whose tags no other image has; empty if all images are released. Raises RegistryError."""
        new = [each for each in publications if not each.is_released]
        if not new:
            return ""
        for stamp in self.stamps:
            if all(each.registry.digest_of(each.stamped(stamp)) in (None, each.manifest.digest) for each in new):
                return stamp
        raise RegistryError(
            "nothing was pushed: other images have the tags of this release", hint="Stage the images again."
        )
