"""Pushes the tested images of the store to staging, with their reports."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from builder.common import errors
from builder.common.console import Meter, View
from builder.common.errors import BuildError
from builder.common.reference import ImageRef
from builder.common.units import size
from builder.layers.blobs import Descriptor
from builder.layers.oci import Image
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan.plan import Plan, PlannedImage
from builder.registry import publish, push
from builder.registry.client import Manifest, Registry
from builder.registry.evidence import Coverage, attach_evidence
from builder.registry.parallel import in_turn
from builder.registry.publish import NotBuiltError
from builder.registry.signing import Signer
from builder.registry.staging import Place, StagedImage, name_of, plan_tag


@dataclass(frozen=True, kw_only=True)
class Staged:
    """The staged images of a plan: those of this machine, for which `sent` bytes were sent, and those of others."""

    here: tuple[StagedImage, ...]
    elsewhere: tuple[StagedImage, ...]
    sent: int

    @property
    def images(self) -> list[StagedImage]:
        return sorted([*self.here, *self.elsewhere], key=lambda image: image.cell)


@dataclass(frozen=True, kw_only=True)
class _Image:
    """An image to push, and what its tests proved: None for an image that was not tested."""

    staged: StagedImage
    stored: Image
    coverage: Coverage | None


class Assembler(Protocol):
    """Makes images from layers that a registry has. `repositories` are those with such layers."""

    def repositories(self) -> list[ImageRef]: ...

    def assemble(self, image: PlannedImage) -> Image: ...

    def fetch(self, blob: Descriptor) -> Path: ...


@dataclass(frozen=True, kw_only=True)
class Stager:
    """Stages images of one store; `signer` signs their reports, unless it is None.

    With an `assembler`, images that are neither here nor staged are staged too, without test results. With a day in
    `listed_on`, they are listed for this day before any is pushed, so that `prune` keeps them.
    """

    project: Project
    store: Store
    view: View
    place: Place
    signer: Signer | None = None
    assembler: Assembler | None = None
    listed_on: str = ""

    def stage(self, plan: Plan) -> Staged:
        """Pushes the images by digest, and attaches their reports.

        Looks up those that the store lacks: another machine may have staged them for the same plan. Raises one error
        for all images that are neither in the store nor in staging, before anything is sent, and one for all failures.
        """
        targets, failures = publish.collect(self.project, self.store, plan)
        by_cell = {planned.id: planned for planned in plan.images}
        images = [
            _Image(staged=_staged(by_cell[target.cell], target.digest), stored=target.stored, coverage=target.coverage)
            for target in targets
        ]
        elsewhere: list[StagedImage] = []
        for planned in plan.images:
            if not isinstance(failures.get(planned.id), NotBuiltError):
                continue
            if staged := self._look_up(planned):
                elsewhere.append(staged)
                del failures[planned.id]
            elif self.assembler:
                try:
                    stored = self.assembler.assemble(planned)
                    images.append(_Image(staged=_staged(planned, stored.manifest.digest), stored=stored, coverage=None))
                    del failures[planned.id]
                except BuildError as error:
                    failures[planned.id] = error
        if failures:
            raise errors.join([failures[cell] for cell in sorted(failures)], "images cannot be staged")
        here = tuple(image.staged for image in images)
        if self.listed_on:
            self.place.list_images(self.listed_on, [*here, *elsewhere])
        return Staged(here=here, elsewhere=tuple(elsewhere), sent=self._push_all(images))

    def _look_up(self, planned: PlannedImage) -> StagedImage | None:
        present = self.place.open(_name(planned)).digest_of(plan_tag(planned.digest))
        return _staged(planned, present) if present else None

    def _push_all(self, images: Sequence[_Image]) -> int:
        """Pushes all images; returns the number of bytes of blobs sent. Raises one error for all failures."""

        def push_image(image: _Image) -> tuple[_Image, Registry, Manifest, int]:
            registry = self.place.open(image.staged.repository, write=True)
            manifest = Manifest.of(self.store.read(image.staged.digest), image.stored.manifest.media_type)
            return image, registry, manifest, self._push(image, registry, manifest, self._sources(image, images))

        def finish(pushed: tuple[_Image, Registry, Manifest, int], stop: threading.Event) -> int:
            image, registry, manifest, sent = pushed
            self._finish(image, registry.stoppable(stop), manifest, sent)
            return sent

        with self.view.live():
            return sum(in_turn(push_image, finish, images, lambda image: self.view.end(image.staged.cell, "failed")))

    def _sources(self, image: _Image, images: Sequence[_Image]) -> list[str]:
        """Repositories of the same registry that blobs of an image may be mounted from."""
        own = self.place.repository(image.staged.repository)
        others = [self.place.repository(other.staged.repository) for other in images]
        if self.assembler and image.coverage is None:
            others += self.assembler.repositories()
        sources = [other.repository for other in others if other.registry == own.registry]
        return [source for source in dict.fromkeys(sources) if source != own.repository]

    def _push(self, image: _Image, registry: Registry, manifest: Manifest, sources: list[str]) -> int:
        """Pushes an image by its digest; returns the number of bytes of blobs sent."""
        blobs = publish.blobs_of(self.store, image.stored)
        fetch = self.assembler.fetch if self.assembler else None
        meter = Meter(self.view, image.staged.cell, "checked or sent", sum(blob.size for blob in blobs))
        return push.push(registry, manifest, blobs, fetch=fetch, mount_from=sources, progress=meter.add).sent

    def _finish(self, image: _Image, registry: Registry, manifest: Manifest, sent: int) -> None:
        """Attaches the report of a pushed image, and last sets the tag of its plan."""
        staged, coverage = image.staged, image.coverage
        if coverage:
            self.view.begin(staged.cell, "attaching test results")
            for report in coverage.reports:
                attach_evidence(self.project, registry, image.stored.manifest, report.evidence, self.signer)
        registry.put_manifest(plan_tag(staged.plan), manifest.content, manifest.media_type)
        status = f"gpu: {coverage.gpu_status}" if coverage else "not tested"
        self.view.end(staged.cell, "staged", f"{size(sent)} sent, {status}")


def _name(planned: PlannedImage) -> str:
    return name_of(ImageRef.parse(planned.references[0]))


def _staged(planned: PlannedImage, digest: str) -> StagedImage:
    return StagedImage(cell=planned.id, repository=_name(planned), digest=digest, plan=planned.digest)
