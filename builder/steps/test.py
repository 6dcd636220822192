"""Staged images on another machine: downloads each by its digest, reads its reports, and attaches new results.

So a machine with a GPU runs only the GPU tests, if the image tests have a report that counts
(see `builder.evidence.results`). It attaches its own results to the same image, including failures.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from builder.build import disk
from builder.build.context import ImageProvider, LoadedImage, RunContext, record_built
from builder.common import errors
from builder.common.console import Meter
from builder.common.errors import BuilderError, ImageTestError
from builder.common.text import listed
from builder.engine.load import Loader
from builder.evidence import reports, results
from builder.evidence.results import Coverage, Report, Requirement
from builder.evidence.signing import Signer, Trust
from builder.evidence.suite import Suite
from builder.layers import stored_layers
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import Image
from builder.layers.store import Store
from builder.plan.plan import Plan, PlannedImage
from builder.registry import transfer
from builder.release import expected, staging
from builder.release.staging import StagedImage, StagingArea
from builder.steps import images
from builder.steps.images import Options, Outcome

SHOWN = 5  # images that are not tested


def only_for(arch: str, plan: Plan, say: Callable[[str], None]) -> Plan:
    """The images of a plan for an architecture. Names the others, which this machine could only emulate."""
    if others := [image.id for image in plan.images if image.cell.arch != arch]:
        say(f"not tested on this machine ({arch}): {listed(others, SHOWN)}")
    return Plan(images=tuple(image for image in plan.images if image.cell.arch == arch))


def test_staged(run: RunContext, provider: StagedImages, plan: Plan, options: Options) -> list[Outcome]:
    """Downloads staged images, runs the tests that their reports lack, and attaches the results, also of failures."""
    images.check_docker_client()
    tester = images.new_tester(run, plan, options)

    def test_image(image: PlannedImage) -> Outcome:
        if error := run.engine.info().foreign_error(image.cell.arch):
            raise error
        loaded = provider.build(image)
        # What this machine ran before counts too: its results may not have been attached.
        known = tester.coverage(image, loaded)
        known = results.coverage_of([*provider.reports(image), *known.reports], known.refused)
        is_tested = tester.is_complete(image, known)
        try:
            coverage = known if is_tested else tester.test(image, loaded, known)
        except ImageTestError as failed:
            try:
                provider.attach_results(image, loaded)
            except BuilderError as error:
                raise errors.join(
                    [failed, error], "errors: the tests failed, and their results were not attached"
                ) from error
            raise
        provider.attach_results(image, loaded)
        if coverage.failure:  # on a GPU that this machine does not have
            raise ImageTestError(f"{image.id}: {coverage.failure}")
        run.view.end(image.id, "done", images.tests_text(coverage))
        return Outcome(image=image, loaded=loaded, coverage=coverage, tested=not is_tested)

    with run.view.live():
        done = images.run_steps(run, tester, provider, options.jobs, plan.images, test_image)
    return [done[image.id] for image in plan.images]


class StagedImages(ImageProvider):
    """A way to get images: from staging. `staged` are the images of a release by cell.

    Without `attach`, this machine keeps its results: it may not be able to write to the registry.
    """

    def __init__(
        self,
        run: RunContext,
        store: Store,
        place: StagingArea,
        staged: Mapping[str, StagedImage],
        signer: Signer | None,
        *,
        attach: bool = True,
    ) -> None:
        self._run = run
        self._store = store
        self._place = place
        self._staged = staged
        self._signer, self._attach = signer, attach
        self._suite = Suite.of(run.project.root)
        self._known = KnownLayers(run.project.root)
        self._images: dict[str, Image] = {}
        self._coverage: dict[str, Coverage] = {}  # by the reports in the registry; by cell
        self._loader = Loader(run.engine, store, str(run.project.root), run.view.say)
        self._loading = threading.Lock()
        if attach and run.project.matrix.evidence and signer is None:
            run.view.say("the test results will not be signed: `builder release` on another machine will refuse them")
            run.view.say("  -> Run this again with --sign KEY.")

    def build(self, image: PlannedImage) -> LoadedImage:
        """Downloads the image and loads it into the engine. Reads its reports.

        Raises VerifyError for an image that is not the planned one: without a report that counts, only this machine
        would have tested it.
        """
        run, staged = self._run, self._staged[image.id]
        run.view.begin(image.id, "downloading")
        repository = self._place.open(staged.repository)
        stored, manifest = staging.image_of(self._place, staged)
        requirement = Requirement.of(image, stored.manifest.digest, self._suite)
        coverage = reports.registry_coverage(repository, requirement, Trust.of(run.project), state=run.project.state)
        for line in coverage.refused:
            run.view.say(f"{image.id}: {line}")
        expected_image = expected.of_known(run.project.root, self._known, image)
        config = repository.read_blob(stored.config.digest)
        expected.check_image(expected_image, stored, manifest.content, config, is_trusted=bool(coverage.reports))
        blobs = [stored.config, *(layer.descriptor for layer in stored.layers)]
        disk.check_download(run, self._store, blobs)
        transfer.fetch_blobs(repository, self._store, blobs, Meter(run.view, image.id, "downloaded", 0).add)
        self._store.put(manifest.content, stored.manifest.media_type)
        if coverage.failure:
            self._check_paths(image, stored)
        with self._loading:
            run.view.begin(image.id, "loading")
            image_id = self._loader.load(stored, Meter(run.view, image.id, "loaded", 0).add)
        self._images[image.id], self._coverage[image.id] = stored, coverage
        record_built(run.project.state, image_id)
        return LoadedImage(id=image_id, digest=stored.manifest.digest, origin="loaded")

    def reports(self, image: PlannedImage) -> Sequence[Report]:
        """The reports of an image in the registry that count."""
        return self._coverage[image.id].reports

    def attach_results(self, image: PlannedImage, loaded: LoadedImage) -> None:
        """Attaches this machine's results to the image in the registry, except for a pass that would not count."""
        if not self._attach:
            return
        project = self._run.project
        requirement = Requirement.of(image, loaded.digest, self._suite)
        repository = self._place.open(self._staged[image.id].repository, write=True)
        own = [report.evidence for report in results.local_coverage(project.state, requirement).reports]
        reports.attach_evidence(repository, self._images[image.id].manifest, own, self._signer)

    def _check_paths(self, image: PlannedImage, stored: Image) -> None:
        """Warns of layers that have different files for one path, or raises BuildError: see `check_paths`.

        `stage --untested` cannot check it: it has neither the wheels nor the layers.
        """
        self._run.view.begin(image.id, "comparing the files of layers")
        layers = [
            (planned, stored_layers.read_toc(self._store, layer))
            for planned, layer in zip(image.layers, stored.layers, strict=True)
            if planned.kind != "os" and not planned.compiled  # the paths of bytecode follow from those of its modules
        ]
        system = self._known.system(image.os_inputs)
        for warning in stored_layers.check_paths(image.id, layers, system.taken if system else ()):
            self._run.view.say_once(warning)
