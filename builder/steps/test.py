"""Runs the tests of built images, and the tests that the reports of staged images lack.

A machine that did not stage an image downloads the image by its digest. So a machine with a GPU runs only the GPU
tests, if the image tests have a report that counts (see `builder.evidence.results`). The machine attaches its results
to the same image, including failures.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from builder.build.gpu_command import StagedTarget, inventory_of
from builder.build.image_tests import Tester, why_not_run
from builder.build.outcomes import Outcome, for_each_image
from builder.common import errors
from builder.common.console import Meter, View
from builder.common.errors import BuilderError, EngineError, ImageTestError, UsageError
from builder.common.text import listed
from builder.engine.load import Loader
from builder.engine.model import LoadedImage
from builder.engine.run import Run
from builder.evidence import reports, results
from builder.evidence.results import Requirement
from builder.evidence.signing import Signer, Trust
from builder.evidence.suite import Suite
from builder.layers import garbage, stored_layers
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import Image
from builder.plan import render
from builder.plan.plan import Plan, PlannedImage
from builder.registry import transfer
from builder.registry.client import Repository
from builder.release import expected, staging
from builder.release.image_sources import RegistrySource
from builder.release.parent import read_parent
from builder.release.staging import StagedRelease, StagingArea
from builder.steps.images import with_all_tests

SHOWN = 5  # images that are not tested


def retest_images(
    run: Run, tester: Tester, planned: Plan, found: Mapping[str, LoadedImage | None], jobs: int
) -> list[Outcome]:
    """Runs all tests of images that are built, whatever passed before; tags nothing. `found` are those in the engine.

    Raises ImageTestError or EngineError if tests cannot run.
    """
    tester.check(planned.images)
    planned = with_all_tests(planned)

    def test_image(image: PlannedImage) -> Outcome:
        loaded = found[image.id]
        if loaded is None:
            raise EngineError(f"{image.id}: not built", hint=f"builder build {image.id}")
        if reason := why_not_run(run.engine.info(), image):
            raise ImageTestError(f"{image.id}: {reason}")
        coverage = tester.test(image, loaded)
        run.view.end(image.id, "done", coverage.summary)
        return Outcome(image=image, loaded=loaded, coverage=coverage, tested=True)

    with run.view.live():
        done = for_each_image(run, tester, jobs, planned.images, test_image)
    return [done[image.id] for image in planned.images]


@dataclass(frozen=True, kw_only=True)
class StagedTestOptions:
    """How to test staged images, `jobs` at a time.

    Without `attach`, the results stay here: this machine may have no right to write to the registry.
    """

    jobs: int
    signer: Signer | None = None
    attach: bool = True


def complete_tests(
    run: Run, area: StagingArea, release: StagedRelease, planned: Plan, tester: Tester, options: StagedTestOptions
) -> list[Outcome]:
    """Downloads staged images, runs the tests that their reports lack, and attaches the results, also of failures.

    If the tester has a command for GPU tests, this machine downloads no image and needs no engine. Raises
    ImageTestError or EngineError if tests cannot run.
    """
    project, view = run.project, run.view
    signer = options.signer and options.signer.with_trust(project)
    if options.attach and project.matrix.evidence and signer is None:
        view.say(
            "the test results will not be signed: `builder release` on another machine will refuse them\n"
            "  -> Run this again with --sign KEY."
        )
    tester.check(planned.images)
    loader = None if tester.gpu_command else Loader(run.engine, run.store, str(project.root), view)
    by_cell = {image.cell: image for image in release.images}
    known_layers, suite, trust = KnownLayers(project.root), Suite.of(*project.folders), Trust.of(project)
    loading = threading.Lock()

    def test_image(image: PlannedImage) -> Outcome:
        if loader and (reason := why_not_run(run.engine.info(), image)):
            raise ImageTestError(f"{image.id}: {reason}")

        # The image must be the planned one: without a report that counts, only this machine would have tested it.
        view.begin(image.id, "downloading" if loader else "checking")
        staged = by_cell[image.id]
        repository = area.open(staged.repository)
        stored = staging.image_of(area, staged)
        requirement = Requirement.of(image, stored.manifest.digest, suite)
        reported = reports.registry_coverage(repository, requirement, trust, project.state)
        for line in reported.refused:
            view.say(f"{image.id}: {line}")
        config = repository.read_blob(stored.config.digest)
        layers = expected.expected_layers(project, known_layers, image)
        expected.compare_with_plan(image, layers, stored, config, is_trusted=bool(reported.reports))

        loaded = LoadedImage(id="", digest=stored.manifest.digest)
        if loader:
            _download(run, repository, image, stored)
            if reported.failure:
                _compare_files(run, image, stored)
            with loading:  # one at a time: two at once were not faster, and take more disk
                view.begin(image.id, "loading")
                image_id = loader.load(stored, Meter(view, image.id, "loaded", 0).add)
            loaded = LoadedImage(id=image_id, digest=stored.manifest.digest, origin="loaded")

        # Earlier results of this machine count too: they may not have been attached.
        own = tester.coverage(image, loaded)
        known = results.coverage_of([*reported.reports, *own.reports], own.refused)
        is_tested = tester.is_complete(image, known)
        failed: ImageTestError | None = None
        try:
            coverage = known
            if not is_tested:
                coverage = tester.test(image, loaded, known, None if loader else _target(repository, stored))
        except ImageTestError as failure:
            failed = failure

        # Failures are attached too, but no pass that would not count.
        if options.attach:
            try:
                ran = [report.evidence for report in results.local_coverage(project.state, requirement).reports]
                reports.attach_evidence(
                    area.open(staged.repository, write=True), stored.manifest.descriptor, ran, signer
                )
            except BuilderError as error:
                if failed is None:
                    raise
                summary = "errors: the tests failed, and their results were not attached"
                raise errors.join([failed, error], summary) from error
        if failed:
            raise failed
        if coverage.failure:  # on a GPU that this machine does not have
            raise ImageTestError(f"{image.id}: {coverage.failure}")
        view.end(image.id, "done", coverage.summary)
        return Outcome(image=image, loaded=loaded, coverage=coverage, tested=not is_tested)

    with view.live():
        done = for_each_image(run, tester, options.jobs, planned.images, test_image)
    return [done[image.id] for image in planned.images]


def _download(run: Run, repository: Repository, image: PlannedImage, stored: Image) -> None:
    """Downloads an image to the store, which may have some of its blobs."""
    blobs = [stored.config, *(layer.descriptor for layer in stored.layers)]
    garbage.require_free(run.store, sum(blob.size for blob in blobs if not run.store.has(blob.digest, blob.size)))
    transfer.fetch_blobs(repository, run.store, blobs, Meter(run.view, image.id, "downloaded", 0).add)
    run.store.put(stored.manifest.content, stored.manifest.media_type)


def _compare_files(run: Run, image: PlannedImage, stored: Image) -> None:
    """Compares the files of layers: `stage --untested` had neither the wheels nor the layers to do it."""
    run.view.begin(image.id, "comparing the files of layers")
    layers = [
        (layer, stored_layers.read_stored_toc(run.store, stored_layer))
        for layer, stored_layer in zip(image.layers, stored.layers, strict=True)
        if layer.kind not in ("os", "bytecode")  # the paths of bytecode follow from the paths of the modules
    ]
    system = KnownLayers(run.project.root).get(image.os_inputs)
    for warning in stored_layers.check_paths(image.id, layers, system.taken if system else ()):
        run.view.say_once(warning)


def _target(repository: Repository, stored: Image) -> StagedTarget:
    """The staged image for a command for GPU tests. Reads only the lists of files in the layers."""
    files = read_parent(RegistrySource(manifest=stored.manifest.content, repository=repository)).files
    inventory = inventory_of({path: entry for path, (_, entry) in files.items()})
    return StagedTarget(reference=f"{repository.name}@{stored.manifest.digest}", inventory=inventory)


def plan_of_release(run: Run, release: StagedRelease, chosen: set[str], *, own_arch: bool) -> Plan:
    """The planned images of a staged release whose cells are `chosen`; with `own_arch`, only for this architecture.

    Raises UsageError for a cell that the release does not have, StaleError for an image of another plan.
    """
    staged = {image.cell: image for image in release.images}
    if not own_arch and (missing := sorted(chosen - staged.keys())):
        raise UsageError(f"release {release.stamp} does not have {missing[0]}", hint=f"It has: {', '.join(staged)}")
    # All cells of the release: which of its images must pass which thorough tests depends on them.
    planned = render.load_checked_plan(run.project, release.cells(run.project))
    planned = Plan(images=tuple(image for image in planned.images if image.id in chosen))
    if own_arch:
        planned = only_for(run.engine.info().arch, planned, run.view)
    for image in planned.images:
        if staged[image.id].plan != image.plan:
            raise release.stale(image.id)
    return planned


def only_for(arch: str, planned: Plan, view: View) -> Plan:
    """The images of a plan for an architecture. Names the others."""
    if others := [image.id for image in planned.images if image.cell.arch != arch]:
        view.say(f"not tested on this machine ({arch}): {listed(others, SHOWN)}")
    return Plan(images=tuple(image for image in planned.images if image.cell.arch == arch))
