"""From the store to a registry: what was tested, by digest. Blobs and manifests of all images first, then tags.

Tags that say a line only (`2.9-jupyter`) move when every image of the run is there: who pulls by such a tag never gets
half a release.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from builder import assemble, errors, evidence, push
from builder.errors import BuilderError, ImageTestError, UsageError
from builder.evidence import Evidence
from builder.host import Host
from builder.load import Assembled
from builder.plan import Plan, PlannedImage
from builder.project import Project
from builder.push import Blob
from builder.reference import ImageRef
from builder.registry import Registry
from builder.store import MANIFEST_TYPE, Store
from builder.view import Meter, View, size


@dataclass(frozen=True, kw_only=True)
class Target:
    """An image and where it goes."""

    image: PlannedImage
    made: Assembled
    proof: Evidence
    references: tuple[ImageRef, ...]

    def registry(self, host: Host) -> Registry:
        return Registry(self.references[0], host=host, write=True)


def targets(project: Project, store: Store, plan: Plan, registry: str) -> list[Target]:
    """What may be published; `registry` counts more than that of matrix.yaml.

    Raises UsageError without a registry, and ImageTestError for images that are not built or have not passed.
    """
    if not (registry or project.matrix.registry):
        raise UsageError(
            "matrix.yaml names no registry", hint='Set `registry: "registry.example.com"` there, or give --to.'
        )
    suite = evidence.suite_digest(project.root)
    found, failures = [], []
    for image in plan.images:
        made = assemble.find(store, image)
        if made is None:
            failures.append(ImageTestError(f"{image.id}: not built", hint=f"builder images {image.id}"))
            continue
        proof = _proof(project, made)
        fault = _fault(image, proof, suite)
        if proof is None or fault:
            failures.append(ImageTestError(f"{image.id}: {fault}", hint=f"builder images {image.id}"))
            continue
        references = [ImageRef.parse(text) for text in image.references]
        if registry:
            references = [replace(reference, registry=registry) for reference in references]
        found.append(Target(image=image, made=made, proof=proof, references=tuple(references)))
    if failures:
        raise errors.join(failures)
    return found


def fault(project: Project, image: PlannedImage, made: Assembled, suite: str) -> str:
    """Why an image of the store may not be published; empty if it may."""
    return _fault(image, _proof(project, made), suite)


def _proof(project: Project, made: Assembled) -> Evidence | None:
    """What the image's tests found, whichever of its digests the engine knew it by."""
    ids = (made.config.digest, made.manifest.digest)
    return next((proof for one in ids if (proof := evidence.read(project.state, one))), None)


def _fault(image: PlannedImage, proof: Evidence | None, suite: str) -> str:
    """Why an image may not be published; empty if it may."""
    if proof is None or proof.plan != image.digest:
        return "not tested"
    if proof.suite != suite:
        return "tested by other tests than those of today"
    return "" if proof.is_pass else "its tests failed"


def publish(host: Host, view: View, store: Store, chosen: Sequence[Target]) -> list[str]:
    """Pushes every target and sets its tags; returns sentences on what was done. Failures are raised together."""
    told: list[str] = []
    failures: list[BuilderError] = []
    repositories = sorted({target.references[0].repository for target in chosen})
    with view.shown():
        for target in chosen:
            try:
                told += _push(host, view, store, target, repositories)
            except BuilderError as error:
                failures.append(error)
                view.end(target.image.id, "failed")
    if failures:
        raise errors.join(failures)
    for target in chosen:
        told += _tag(host, store, target, versioned=(), moving=_tags(target.references[1:]))
    return told


def _push(host: Host, view: View, store: Store, target: Target, repositories: Sequence[str]) -> list[str]:
    made, image = target.made, target.image
    blobs = [made.config, *(layer.descriptor for layer in made.layers)]
    meter = Meter(view, image.id, "pushed", sum(blob.size for blob in {blob.digest: blob for blob in blobs}.values()))
    done = push.push(
        target.registry(host),
        manifest=store.read(made.manifest.digest),
        media_type=MANIFEST_TYPE,
        blobs=[Blob(digest=blob.digest, size=blob.size, path=store.path(blob.digest)) for blob in blobs],
        mount_from=[name for name in repositories if name != target.references[0].repository],
        progress=meter.add,
    )
    parts = [(done.sent, "sent"), (done.mounted, "taken over"), (done.skipped, "there already")]
    told = [
        f"{image.id}: {done.digest}, {', '.join(f'{size(count)} {what}' for count, what in parts if count)}, "
        f"gpu: {target.proof.gpu_told}"
    ]
    return told + _tag(host, store, target, versioned=_tags(target.references[:1]), moving=())


def _tag(host: Host, store: Store, target: Target, *, versioned: Sequence[str], moving: Sequence[str]) -> list[str]:
    digest = target.made.manifest.digest
    return push.tag(target.registry(host), digest, store.read(digest), MANIFEST_TYPE, versioned, moving)


def _tags(references: Sequence[ImageRef]) -> list[str]:
    return [reference.tag for reference in references]
