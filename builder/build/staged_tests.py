"""Tests staged images on another machine: downloads each by its digest, runs the tests that its reports lack.

A passing report that counts (see `builder.registry.reports`) becomes evidence here, so a machine with a GPU runs
only the GPU tests. Its own results are attached to the same image, also those of a failure.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

from builder.build import disk
from builder.build.work import Method, Origin, Work, record_built
from builder.common.console import Meter
from builder.common.errors import ImageTestError
from builder.engine.load import Loader
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import Image
from builder.layers.store import Store
from builder.matrix.tags import BASE_LABEL
from builder.plan.plan import PlannedImage
from builder.registry import evidence, expected, pull, reports, staging
from builder.registry.client import Manifest
from builder.registry.reports import Reader, Report
from builder.registry.signing import Signer
from builder.registry.staging import Place, StagedImage


class StagedImages(Method):
    """A way to get images: from staging. `staged` are the images of a release by cell."""

    def __init__(
        self, work: Work, store: Store, place: Place, staged: Mapping[str, StagedImage], signer: Signer | None
    ) -> None:
        self._work = work
        self._store = store
        self._place = place
        self._staged = staged
        self._signer = signer
        self._reader = Reader.of(work.project)
        self._known = KnownLayers(work.project.root)
        self._images: dict[str, Image] = {}
        self._loader = Loader(work.engine, store, str(work.project.root), work.view.say)
        self._loading = threading.Lock()

    def build(self, image: PlannedImage) -> tuple[str, Origin]:
        """Downloads the image and loads it into the engine; returns its id. Takes over its reports."""
        work, staged = self._work, self._staged[image.id]
        work.view.begin(image.id, "downloading")
        registry = self._place.open(staged.repository)
        stored, manifest = staging.image_of(self._place, staged)
        report = self._report(image, stored, manifest)
        blobs = [stored.config, *(layer.descriptor for layer in stored.layers)]
        disk.check_download(work, self._store, blobs)
        pull.fetch(registry, self._store, blobs, Meter(work.view, image.id, "downloaded", 0).add)
        self._store.put(manifest.content, stored.manifest.media_type)
        with self._loading:
            work.view.begin(image.id, "loading")
            image_id = self._loader.load(stored, Meter(work.view, image.id, "loaded", 0).add)
        self._images[image.id] = stored
        record_built(work.project.state, f"staged-{image_id}", image_id)
        if report:
            self._take_over(report, image_id)
        return image_id, "loaded"

    def _report(self, image: PlannedImage, stored: Image, manifest: Manifest) -> Report | None:
        """The passing report to rely on, if there is one.

        Raises VerifyError for an image that is not the planned one: without a report that counts, this machine alone
        would vouch for it.
        """
        registry = self._place.open(self._staged[image.id].repository)
        readings = self._reader.read(registry, stored, image.id, image.digest)
        for line in readings.refused:
            self._work.view.say(f"{image.id}: {line}")
        base = stored.labels.get(BASE_LABEL, "")
        expected_image = expected.of_known(self._work.project.root, self._known, image, base)
        config = registry.read_blob(stored.config.digest)
        expected.check(expected_image, stored, manifest.content, config, is_vouched=bool(readings.counted))
        try:
            return self._reader.proof(readings, image.id).report
        except ImageTestError:  # none, or a failure: all tests are run here
            return None

    def _take_over(self, report: Report, image_id: str) -> None:
        """Writes the evidence of a report where this machine has none."""
        state = self._work.project.state
        for proof in (*report.reused, report.evidence.model_copy(update={"image_id": image_id})):
            if evidence.read(state, proof.image_id) is None:
                evidence.write(state, proof)

    def record_tested(self, image: PlannedImage, image_id: str) -> None:
        """Attaches the evidence of this machine, if there is any, to the image in the registry."""
        proof, stored = evidence.read(self._work.project.state, image_id), self._images[image.id]
        if proof is None:
            return
        registry = self._place.open(self._staged[image.id].repository, write=True)
        project = self._work.project
        reports.write(project, registry, stored, reports.of_evidence(project.state, stored, proof), self._signer)
