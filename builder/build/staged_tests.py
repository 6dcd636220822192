"""Tests staged images on another machine: downloads each by its digest, runs the tests that its reports lack.

The reports on the registry that count (see `builder.registry.reports`) are taken over as evidence, so a machine with a
GPU runs only the GPU tests. Its own results are attached to the same image, also those of a failure.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

from builder.build.images import Origin
from builder.build.work import Work
from builder.common.console import Meter
from builder.engine.load import Loader
from builder.layers.oci import Image
from builder.layers.store import Store
from builder.plan.plan import PlannedImage
from builder.registry import evidence, pull, reports, staging
from builder.registry.reports import Reader
from builder.registry.signing import Signer
from builder.registry.staging import Place, StagedImage


class StagedImages:
    """A way to get images: from staging. `staged` are the images of a release by cell."""

    assembles = True

    def __init__(
        self, work: Work, store: Store, place: Place, staged: Mapping[str, StagedImage], signer: Signer | None
    ) -> None:
        self._work = work
        self._store = store
        self._place = place
        self._staged = staged
        self._signer = signer
        self._reader = Reader(work.project)
        self._images: dict[str, Image] = {}
        self._loader = Loader(work.engine, store, str(work.project.root), work.view.say)
        self._loading = threading.Lock()

    def find(self, image: PlannedImage) -> str:
        """None is in the engine as staged: `build` looks for it."""
        return ""

    def prepare(self, images: Sequence[PlannedImage]) -> None:
        """Nothing is shared."""

    def build(self, image: PlannedImage) -> tuple[str, Origin]:
        """Downloads the image and loads it into the engine; returns its id. Takes over its reports."""
        work, staged = self._work, self._staged[image.id]
        work.view.begin(image.id, "downloading")
        registry = self._place.open(staged.repository)
        stored, manifest = staging.image_of(self._place, staged)
        blobs = [stored.config, *(layer.descriptor for layer in stored.layers)]
        missing = sum(blob.size for blob in blobs if not self._store.has(blob.digest, blob.size))
        pull.fetch(registry, self._store, blobs, Meter(work.view, image.id, "downloaded", missing).add)
        self._store.put(manifest.content, stored.manifest.media_type)
        with self._loading:
            work.view.begin(image.id, "loading")
            image_id = self._loader.load(stored, Meter(work.view, image.id, "loaded", 0).add)
        self._images[image.id] = stored
        readings = self._reader.read(registry, image, stored)
        for line in readings.refused:
            work.view.say(f"{image.id}: {line}")
        if readings.counted and not evidence.read(work.project.state, image_id):
            report = max(readings.counted, key=lambda reading: reading.evidence.is_pass).report
            for proof in (*report.reused, report.evidence.model_copy(update={"image_id": image_id})):
                evidence.write(work.project.state, proof)
        return image_id, "loaded"

    def record_tagged(self, image: PlannedImage) -> None:
        """Staged images get no tag."""

    def close(self) -> None:
        """Nothing was started."""

    def record_tested(self, image: PlannedImage, image_id: str) -> None:
        """Attaches the evidence of this machine, if there is any, to the image in the registry."""
        proof, stored = evidence.read(self._work.project.state, image_id), self._images[image.id]
        if proof is None:
            return
        registry = self._place.open(self._staged[image.id].repository, write=True)
        reports.write(registry, stored, reports.of_evidence(self._work.project, stored, proof), self._signer)
