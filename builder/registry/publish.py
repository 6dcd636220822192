"""Publishes tested images of the store or of staging: all images first, with what is attached to them, then tags.

First each image gets the tag of this release, which never moves; then the other tags move. So no tag names an image of
half a release.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from builder.common import errors
from builder.common.console import Meter, View
from builder.common.errors import BuilderError, DamagedError, ImageTestError, RegistryError, UsageError
from builder.common.reference import ImageRef
from builder.common.units import size
from builder.index.host import Host
from builder.layers import images as stored_images
from builder.layers.blobs import MANIFEST_TYPE, Descriptor
from builder.layers.oci import Image
from builder.layers.store import Store
from builder.matrix import tags
from builder.matrix.project import Project
from builder.plan.plan import Plan, PlannedImage
from builder.registry import evidence, push, tagging
from builder.registry.client import Manifest, Registry
from builder.registry.evidence import Coverage, Requirement
from builder.registry.parallel import in_turn
from builder.registry.push import Pushed
from builder.registry.suite import Suite
from builder.registry.tagging import TagChange

Fetch = Callable[[Descriptor], Path]  # downloads a blob to the store


@dataclass(frozen=True, kw_only=True)
class Target:
    """The image of a cell, what its tests proved, and the references to publish it under, the full tag first.

    `source` is a repository of the same registry that has its blobs, empty if there is none. `fetch` downloads a blob
    from where the image is staged, if the registry can neither mount it nor has it.
    """

    cell: str
    stored: Image
    manifest: Manifest
    coverage: Coverage
    references: tuple[ImageRef, ...]
    source: str = ""
    fetch: Fetch | None = None

    @property
    def digest(self) -> str:
        return self.manifest.digest


class NotBuiltError(ImageTestError):
    """The store does not have the image."""


def require_registry(project: Project, registry: str) -> None:
    """Raises UsageError without a registry to publish to; `registry` overrides the setting in matrix.yaml."""
    if not (registry or project.matrix.registry):
        raise UsageError(
            "no registry in matrix.yaml", hint='Set `registry: "registry.example.com"` there, or use --to.'
        )


def targets(project: Project, store: Store, plan: Plan, registry: str = "") -> list[Target]:
    """The images of the store that passed their tests; `registry` overrides the setting in matrix.yaml.

    Raises one error for all images that are not built or have not passed.
    """
    chosen, failures = collect(project, store, plan, registry)
    if failures:
        raise errors.join(list(failures.values()), "images cannot be pushed")
    return chosen


def collect(
    project: Project, store: Store, plan: Plan, registry: str = ""
) -> tuple[list[Target], dict[str, BuilderError]]:
    """As `targets`, with the errors by cell."""
    chosen: list[Target] = []
    failures: dict[str, BuilderError] = {}
    suite = Suite.of(project.root)
    for image in plan.images:
        try:
            chosen.append(_target(project, store, image, suite, registry))
        except (DamagedError, ImageTestError) as error:
            failures[image.id] = type(error)(f"{image.id}: {error}", hint=f"builder images {image.id}")
    return chosen, failures


def _target(project: Project, store: Store, image: PlannedImage, suite: Suite, registry: str) -> Target:
    """An image of the store. Raises DamagedError, or ImageTestError if it has not passed."""
    stored = stored_images.find(store, image)
    if stored is None:
        raise NotBuiltError("not built")
    requirement = Requirement.of(image, stored.manifest.digest, suite)
    coverage = evidence.local_coverage(project.state, requirement)
    if coverage.failure:
        raise ImageTestError(coverage.failure)
    manifest = Manifest.of(store.read(stored.manifest.digest), MANIFEST_TYPE)
    return Target(
        cell=image.id, stored=stored, manifest=manifest, coverage=coverage, references=references(image, registry)
    )


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

    target: Target
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
class Published:
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


class _Tagged:
    """A target, its repository, and the digests of its moving tags when the push began."""

    def __init__(self, host: Host, target: Target) -> None:
        self.target = target
        self.registry = Registry(target.references[0], host=host, write=True)
        self.moving = tagging.read(self.registry, [reference.tag for reference in target.references])
        self.sent: Sent | None = None  # when the image is finished

    @property
    def is_released(self) -> bool:
        """Whether the full tag names this image already."""
        return self.moving[self.target.references[0].tag] == self.target.digest

    def stamped(self, stamp: str) -> str:
        """The stamped tag of a release."""
        return tags.stamped(self.target.references[0], stamp).tag

    def is_free(self, stamp: str) -> bool:
        """Whether no other image has the stamped tag of a release."""
        return self.registry.digest_of(self.stamped(stamp)) in (None, self.target.digest)


@dataclass(kw_only=True)
class Publisher:
    """Publishes images together, once, as one release, which gets the first of the `stamps` that no other image has.

    `roll_back` lets tags move to older images. `record` is called when the release may begin, before anything is
    pushed; `attach` for each image when it is in the registry, before it has a tag.
    """

    host: Host
    view: View
    store: Store
    stamps: Iterable[str]
    roll_back: bool = False
    record: Callable[[], None] = lambda: None
    attach: Callable[[Registry, Target, str], None] | None = None

    def __post_init__(self) -> None:
        self._images: list[_Tagged] = []
        self._changes: list[TagChange] = []

    def publish(self, chosen: Sequence[Target]) -> Published:
        """Pushes every target, then sets its tags.

        All tags are read first. So if the registry does not respond, or a tag would move back, nothing is changed.
        """
        error: BuilderError | None = None
        try:
            self._publish(chosen)
        except BuilderError as failure:
            error = _with_changes(failure, self._changes)
        except BaseException:  # Ctrl-C: the only place that knows what was changed
            for change in self._changes:
                if change.is_change:
                    self.view.say(f"changed before the interruption: {change}")
            raise
        sent = (image.sent for image in self._images if image.sent)
        return Published(images=tuple(sent), tags=tuple(self._changes), error=error)

    def _publish(self, chosen: Sequence[Target]) -> None:
        self._images = [_Tagged(self.host, target) for target in chosen]
        if not self.roll_back:
            self._check_forward()
        stamp = self._stamp()
        self.record()
        with self.view.live():
            self._push_all(stamp)
        # The stamp was free when it was chosen: if another image has such a tag now, another push set it.
        for image in self._images:
            stamped = {image.stamped(stamp): None} if not image.is_released else {}
            tagging.tag(image.registry, image.target.manifest, self._changes, stamped)
        for image in self._images:
            tagging.tag(image.registry, image.target.manifest, self._changes, image.moving)
        for registry in {image.registry.name: image.registry for image in self._images}.values():
            tagging.confirm(registry, [change for change in self._changes if change.name == registry.name])

    def _check_forward(self) -> None:
        """Raises RegistryError if a tag would move to an older release or older Debian packages."""
        lines = []
        for image in self._images:
            target = image.target
            lines += tagging.backward(image.registry, image.moving, target.digest, target.stored.labels)
        if lines:
            raise RegistryError(
                "nothing was pushed: these tags would move to an older release, or to older Debian packages\n"
                + "\n".join(f"  {line}" for line in lines),
                hint="Run `make refresh` to build on current packages, or use --roll-back to move the tags back.",
            )

    def _stamp(self) -> str:
        """The first stamp that no other image has; empty if all images are released. Raises RegistryError."""
        new = [image for image in self._images if not image.is_released]
        stamp = next((stamp for stamp in self.stamps if all(image.is_free(stamp) for image in new)), None)
        if new and stamp is None:
            raise RegistryError(
                "nothing was pushed: other images have the tags of this release", hint="Stage the images again."
            )
        return stamp if new and stamp else ""

    def _push_all(self, stamp: str) -> None:
        """Pushes the images, with what is attached to them. Raises one error for all failures at the end."""
        repositories = sorted({image.target.references[0].repository for image in self._images})

        def push_image(image: _Tagged) -> tuple[_Tagged, Sent]:
            began = time.monotonic()
            pushed = self._push(image, repositories)
            return image, Sent(target=image.target, pushed=pushed, seconds=time.monotonic() - began)

        def finish(pushed: tuple[_Tagged, Sent], stop: threading.Event) -> None:
            image, sent = pushed
            began = time.monotonic()
            self._finish(image, image.registry.stoppable(stop), stamp)
            image.sent = replace(sent, seconds=sent.seconds + time.monotonic() - began)

        in_turn(push_image, finish, self._images, lambda image: self.view.end(image.target.cell, "failed"))

    def _finish(self, image: _Tagged, registry: Registry, stamp: str) -> None:
        """Attaches what belongs to a pushed image, which will get the tag of this stamp."""
        if self.attach:
            target = image.target
            self.view.begin(target.cell, "attaching test results and statements")
            self.attach(registry, target, "" if image.is_released else image.stamped(stamp))
            self.view.end(target.cell, "done", "test results and statements attached")

    def _push(self, image: _Tagged, repositories: Sequence[str]) -> Pushed:
        target = image.target
        sources = {*repositories, target.source} - {target.references[0].repository, ""}
        blobs = blobs_of(self.store, target.stored)
        meter = Meter(self.view, target.cell, "checked or sent", sum(blob.size for blob in blobs))
        return push.push(
            image.registry,
            target.manifest,
            blobs,
            fetch=target.fetch,
            mount_from=sorted(sources, key=lambda name: name != target.source),
            progress=meter.add,
        )


def _with_changes(error: BuilderError, changes: Sequence[TagChange]) -> BuilderError:
    """The error, with the tags that were changed before it."""
    lines = [f"  {change}" for change in changes if change.is_change]
    if not lines:
        return error
    return type(error)(f"{error}\ntags changed before the failure:\n" + "\n".join(lines), hint=error.hint)
