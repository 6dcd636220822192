"""Releases staged images: reads the reports of each from the registry, and publishes them if all are covered.

Only the checkout and the registry are needed. What was released is recorded beside the staged release, as an artifact
with the tag `released-<stamp>`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, StringConstraints

from builder.common import digest, errors
from builder.common.console import Meter, View
from builder.common.errors import BuilderError, ImageTestError, StaleError, VerifyError
from builder.common.reference import ImageRef
from builder.index.host import Host
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import Image
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.matrix.tags import BASE_LABEL
from builder.plan.plan import PlannedImage
from builder.registry import artifacts, expected, publish, pull, staging
from builder.registry.artifacts import File
from builder.registry.client import Manifest, Registry
from builder.registry.expected import Expected
from builder.registry.publish import Published, Target
from builder.registry.reports import Reader, Readings
from builder.registry.signing import Signer
from builder.registry.staging import Place, Release, StagedImage

TYPE = "application/vnd.gpu-images.released.v1+json"
PREFIX = "released-"
_Line = Annotated[str, StringConstraints(max_length=600)]


class ReleasedImage(BaseModel):
    """`references` are its tags, `gpu` the state of its GPU tests, `signer` who signed the report; empty for nobody."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cell: _Line
    digest: _Line
    references: tuple[_Line, ...]
    gpu: _Line
    signer: _Line


class Released(BaseModel):
    """What a release published, and the checks that it was told to leave out."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    stamp: _Line
    revision: _Line
    images: tuple[ReleasedImage, ...]
    allowed: tuple[_Line, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Options:
    """`registry` overrides the one in matrix.yaml. `signer` signs the images; None leaves them unsigned."""

    registry: str = ""
    signer: Signer | None = None
    allow_unsigned: bool = False
    allow_untested_gpu: bool = False
    roll_back: bool = False

    @property
    def allowed(self) -> tuple[str, ...]:
        names = {"unsigned": self.allow_unsigned, "untested-gpu": self.allow_untested_gpu}
        return tuple(name for name, is_set in names.items() if is_set)


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A staged image that may be released: its target, and the reports that count."""

    target: Target
    readings: Readings
    signer: str


class Releaser:
    """Checks and releases the images of one staged release. `planned` are the images of this checkout by cell."""

    def __init__(self, project: Project, place: Place, planned: Mapping[str, PlannedImage], options: Options) -> None:
        self._project = project
        self._place = place
        self._planned = planned
        self._options = options
        self._reader = Reader(project, allow_unsigned=options.allow_unsigned)
        self._known = KnownLayers(project.root)

    def check(self, release: Release) -> list[Candidate]:
        """The images of a release. Raises one error for all that may not be released."""
        candidates: list[Candidate] = []
        failures: list[BuilderError] = []
        for staged in release.images:
            try:
                candidates.append(self._check(staged, release))
            except BuilderError as error:
                failures.append(error)
        if failures:
            raise errors.join(failures, "images cannot be released")
        return candidates

    def _check(self, staged: StagedImage, release: Release) -> Candidate:
        planned = self._planned.get(staged.cell)
        if planned is None or planned.digest != staged.plan:
            raise StaleError(
                f"{staged.cell}: staged from another plan than that of this checkout",
                hint=f"Check out revision {release.revision or 'it was staged from'}, or stage the image again.",
            )
        image, manifest = staging.image_of(self._place, staged)
        registry = self._place.open(staged.repository)
        self._check_truth(planned, image, manifest, registry.read_blob(image.config.digest))
        readings = self._reader.read(registry, planned, image)
        proof = self._reader.proof(readings, staged.cell)
        if not (planned.cell.is_cpu or proof.evidence.gpu == "passed" or self._options.allow_untested_gpu):
            raise ImageTestError(
                f"{staged.cell}: gpu: {proof.evidence.gpu_status}",
                hint=f"On a machine with a GPU: builder test --staged {release.stamp} --gpu require   "
                "Or release it as it is: --allow-untested-gpu",
            )
        target = Target(
            cell=staged.cell,
            plan=staged.plan,
            stored=image,
            manifest=manifest,
            evidence=proof.evidence,
            references=publish.references(planned, self._options.registry),
            source=self._place.repository(staged.repository).repository,
        )
        return Candidate(target=target, readings=readings, signer=proof.signer)

    def _check_truth(self, planned: PlannedImage, image: Image, manifest: Manifest, config: bytes) -> None:
        """Raises VerifyError unless labels, configuration and known layers are those that the tags promise."""
        lines = expected.differences(Expected(image=planned, layers={}), manifest.content, config)
        base = image.labels.get(BASE_LABEL, "")
        for layer, stored in zip(planned.layers, image.layers, strict=False):
            known = self._known.get(layer, base)
            if known and (known.digest, known.diff_id) != (stored.digest, stored.diff_id):
                lines.append(
                    f"layer {layer.name} is {digest.short(stored.digest)}, expected {digest.short(known.digest)}"
                )
        if lines:
            raise VerifyError(f"{planned.id}: the staged image differs from the plan: {'; '.join(lines)}")

    def publish(
        self, host: Host, view: View, store: Store, release: Release, candidates: Sequence[Candidate]
    ) -> Published:
        """Publishes images that were checked, and records it. The error that ended it is in the result."""
        by_cell = {candidate.target.cell: candidate for candidate in candidates}

        def attach(registry: Registry, target: Target) -> None:
            source = self._place.open(staging.name_of(target.references[0]))
            if source.name != registry.name:
                for reading in by_cell[target.cell].readings.counted:
                    artifacts.copy(source, registry, target.digest, reading.artifact)
            if self._options.signer:
                full = target.references[0]
                image = ImageRef(registry=full.registry, repository=full.repository, digest=target.digest)
                self._options.signer.sign_image(image, {"cell": target.cell, "tag": full.tag})

        targets = [self._reachable(view, store, candidate.target) for candidate in candidates]
        request = publish.Request(stamps=[release.stamp], roll_back=self._options.roll_back, attach=attach)
        result = publish.publish(host, view, store, targets, request)
        if result.error is None:
            self._record(release, candidates)
        return result

    def _reachable(self, view: View, store: Store, target: Target) -> Target:
        """The target, with its blobs in the store if staging is another registry: it cannot mount them from there."""
        staged = self._place.repository(staging.name_of(target.references[0]))
        if staged.registry == target.references[0].registry:
            return target
        registry = self._place.open(staging.name_of(target.references[0]))
        blobs = [target.stored.config, *(layer.descriptor for layer in target.stored.layers)]
        meter = Meter(view, target.cell, "downloaded", sum(blob.size for blob in blobs))
        pull.fetch(registry, store, blobs, meter.add)
        return replace(target, source="")

    def _record(self, release: Release, candidates: Sequence[Candidate]) -> None:
        images = [
            ReleasedImage(
                cell=candidate.target.cell,
                digest=candidate.target.digest,
                references=tuple(map(str, candidate.target.references)),
                gpu=candidate.target.evidence.gpu_status,
                signer=candidate.signer,
            )
            for candidate in candidates
        ]
        released = Released(
            stamp=release.stamp, revision=release.revision, images=tuple(images), allowed=self._options.allowed
        )
        files = [File(media_type=TYPE, content=released.model_dump_json().encode())]
        registry = self._place.open(staging.INDEX, write=True)
        artifacts.put(registry, artifacts.manifest(TYPE, files, {}), files, f"{PREFIX}{release.stamp}")
