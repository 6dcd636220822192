"""Tests staged images on another machine: downloads each by its digest, runs the tests that its reports lack.

A passing report that counts (see `builder.registry.reports`) becomes evidence here, so a machine with a GPU runs
only the GPU tests. Its own results are attached to the same image, also those of a failure.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from functools import partial

from builder.build import disk
from builder.build.work import Method, Origin, Work, record_built
from builder.common.console import Meter
from builder.common.errors import ImageTestError
from builder.engine.load import Loader
from builder.layers import splice, stored_layers
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import Image
from builder.layers.store import Store
from builder.plan.plan import PlannedImage
from builder.registry import evidence, expected, pull, reports, staging
from builder.registry.client import Manifest
from builder.registry.evidence import Evidence
from builder.registry.reports import OWN, Reader, Reading
from builder.registry.signing import Signer
from builder.registry.staging import Place, StagedImage
from builder.registry.suite import Suite


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
        self._suite = Suite.of(work.project.root)
        self._known = KnownLayers(work.project.root)
        self._images: dict[str, Image] = {}
        self._files: dict[str, list[splice.File]] = {}  # of layers, by digest: images share them
        self._signed: dict[str, Evidence] = {}  # the evidence of signed reports by image id
        self._loader = Loader(work.engine, store, str(work.project.root), work.view.say)
        self._loading = threading.Lock()
        if work.project.matrix.evidence and signer is None:
            work.view.say("the test results will not be signed: `builder release` on another machine will refuse them")
            work.view.say("  -> Run this again with --sign KEY.")

    def build(self, image: PlannedImage) -> tuple[str, Origin]:
        """Downloads the image and loads it into the engine; returns its id. Takes over its reports."""
        work, staged = self._work, self._staged[image.id]
        work.view.begin(image.id, "downloading")
        registry = self._place.open(staged.repository)
        stored, manifest = staging.image_of(self._place, staged)
        reading = self._reading(image, stored, manifest)
        blobs = [stored.config, *(layer.descriptor for layer in stored.layers)]
        disk.check_download(work, self._store, blobs)
        pull.fetch(registry, self._store, blobs, Meter(work.view, image.id, "downloaded", 0).add)
        self._store.put(manifest.content, stored.manifest.media_type)
        if reading is None:
            self._check_paths(image, stored)
        with self._loading:
            work.view.begin(image.id, "loading")
            image_id = self._loader.load(stored, Meter(work.view, image.id, "loaded", 0).add)
        self._images[image.id] = stored
        record_built(work.project.state, f"staged-{image_id}", image_id)
        if reading:
            self._take_over(reading, image_id)
        return image_id, "loaded"

    def _reading(self, image: PlannedImage, stored: Image, manifest: Manifest) -> Reading | None:
        """The passing report to rely on, if there is one.

        Raises VerifyError for an image that is not the planned one: without a report that counts, only this machine
        would have tested it.
        """
        registry = self._place.open(self._staged[image.id].repository)
        readings = self._reader.read(registry, stored, image.id, image.digest, image.components)
        for line in readings.refused:
            self._work.view.say(f"{image.id}: {line}")
        expected_image = expected.of_known(self._work.project.root, self._known, image)
        config = registry.read_blob(stored.config.digest)
        expected.check(expected_image, stored, manifest.content, config, is_trusted=bool(readings.counted))
        try:
            return self._reader.proof(readings, image.id)
        except ImageTestError:  # none, or a failure: all tests are run here
            return None

    def _check_paths(self, image: PlannedImage, stored: Image) -> None:
        """Raises BuildError if layers have different files for one path.

        `stage --untested` cannot check it: it has neither the wheels nor the layers.
        """
        self._work.view.begin(image.id, "comparing the files of layers")
        layers = []
        for planned, layer in zip(image.layers, stored.layers, strict=True):
            if planned.kind != "os" and not planned.compiled:  # bytecode has the paths of its modules
                if layer.digest not in self._files:
                    with self._store.path(layer.digest).open("rb") as file:
                        self._files[layer.digest] = list(splice.read_files(file))
                layers.append((planned.name, self._files[layer.digest]))
        system = self._known.system(image.os)
        stored_layers.check_files(image.id, layers, system.taken if system else ())

    def _take_over(self, reading: Reading, image_id: str) -> None:
        """Writes the evidence of a report where this machine has none."""
        state = self._work.project.state
        own = reading.evidence.model_copy(update={"image_id": image_id})
        for proof in (*reading.report.reused, own):
            if evidence.read(state, proof.image_id) is None:
                evidence.write(state, proof)
        if reading.signer != OWN:
            self._signed[image_id] = own

    def record_tested(self, image: PlannedImage, image_id: str) -> None:
        """Attaches the evidence of this machine, if there is any, to the image in the registry.

        Neither a copy of a signed report, as this machine did not run its tests, nor a pass that would not count.
        """
        state = self._work.project.state
        proof, stored = evidence.read(state, image_id), self._images[image.id]
        if proof is None or proof == self._signed.get(image_id):
            return
        if proof.is_pass and evidence.why_invalid(partial(evidence.read, state), proof, image, self._suite):
            return
        registry = self._place.open(self._staged[image.id].repository, write=True)
        project = self._work.project
        reports.write(project, registry, stored, reports.of_evidence(project.state, stored, proof), self._signer)
