"""Pushes the tested images of the store to staging, with their reports."""

from __future__ import annotations

from dataclasses import dataclass

from builder.common import errors
from builder.common.console import Meter, View
from builder.common.errors import BuilderError
from builder.common.reference import ImageRef
from builder.common.units import size
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan.plan import Plan, PlannedImage
from builder.registry import publish, push, reports
from builder.registry.publish import NotBuiltError, Target
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
class Stager:
    """Stages images of one store; `signer` signs their reports, unless it is None."""

    project: Project
    store: Store
    view: View
    place: Place
    signer: Signer | None = None

    def stage(self, plan: Plan) -> Staged:
        """Pushes the images by digest, and attaches their reports.

        Looks up those that the store lacks: another machine may have staged them for the same plan. Raises one error
        for all images that are neither in the store nor in staging, before anything is sent, and one for all failures.
        """
        targets, failures = publish.collect(self.project, self.store, plan)
        not_built = [image for image in plan.images if isinstance(failures.get(image.id), NotBuiltError)]
        elsewhere = [image for planned in not_built if (image := self._look_up(planned))]
        missing = failures.keys() - {image.cell for image in elsewhere}
        if missing:
            raise errors.join([failures[cell] for cell in sorted(missing)], "images cannot be staged")
        here, sent = [], 0
        failed: list[BuilderError] = []
        with self.view.live():
            for target in targets:
                try:
                    image, count = self._push(target, [name_of(other.references[0]) for other in targets])
                except BuilderError as error:
                    failed.append(error)
                    self.view.end(target.cell, "failed")
                    continue
                here.append(image)
                sent += count
        if failed:
            raise errors.join(failed)
        return Staged(here=tuple(here), elsewhere=tuple(elsewhere), sent=sent)

    def _look_up(self, planned: PlannedImage) -> StagedImage | None:
        name = name_of(ImageRef.parse(planned.references[0]))
        present = self.place.open(name).digest_of(plan_tag(planned.digest))
        if present is None:
            return None
        return StagedImage(cell=planned.id, repository=name, digest=present, plan=planned.digest)

    def _push(self, target: Target, names: list[str]) -> tuple[StagedImage, int]:
        """Pushes an image, its report, and last the tag of its plan. Returns the number of bytes of blobs sent too.

        Blobs may be mounted from the repositories `names`.
        """
        name = name_of(target.references[0])
        registry = self.place.open(name, write=True)
        blobs = publish.blobs_of(self.store, target.stored)
        meter = Meter(self.view, target.cell, "checked or sent", sum(blob.size for blob in blobs))
        others = [self.place.repository(other).repository for other in dict.fromkeys(names) if other != name]
        pushed = push.push(registry, target.manifest, blobs, mount_from=others, progress=meter.add)
        report = reports.of_evidence(self.project.state, target.stored, target.evidence)
        reports.write(self.project, registry, target.stored, report, self.signer)
        registry.put_manifest(plan_tag(target.plan), target.manifest.content, target.manifest.media_type)
        self.view.end(target.cell, "staged", f"{size(pushed.sent)} sent, gpu: {target.evidence.gpu_status}")
        image = StagedImage(cell=target.cell, repository=name, digest=target.digest, plan=target.plan)
        return image, pushed.sent
