"""Checks which staged images may be released: their plan, configuration, layers, test results, scan and support."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

from builder.common import errors
from builder.common.errors import BuilderError, ImageTestError, NoRegistryError, VerifyError
from builder.common.text import listed
from builder.engine.run import Run
from builder.evidence import reports, sbom_and_provenance
from builder.evidence.results import Requirement
from builder.evidence.signing import Signer, Trust
from builder.evidence.suite import Suite, gpu_test
from builder.layers.known_layers import KnownLayers
from builder.matrix import support
from builder.matrix.schema import ARM64
from builder.plan.plan import PlannedImage
from builder.registry.parallel import CHECKS, look_up
from builder.release import expected, publish, scan, staging
from builder.release.publish import Candidate
from builder.release.scan import Scanner
from builder.release.staging import StagedImage, StagedRelease, StagingArea

Exemption = Literal["unsigned", "untested-gpu", "missing-arch"]  # from a check; releases record them
EXEMPTIONS: tuple[Exemption, ...] = get_args(Exemption)
_STAGE_TOGETHER = (
    "Build it on a machine of that architecture, and stage it with --images-only. Then stage the images of all "
    f"architectures together. To release it alone, add --allow-missing-arch: {publish.WITHOUT_ARCH}."
)
Checked = Candidate | BuilderError  # the error of an image that may not be released


@dataclass(frozen=True, kw_only=True)
class ReleaseOptions:
    """How to release.

    Without `signer`, nothing is signed. `allowed` are checks to skip; `roll_back` lets tags move to older images.
    `check_only` publishes nothing.
    """

    signer: Signer | None = None
    allowed: Collection[Exemption] = ()
    roll_back: bool = False
    check_only: bool = False


class ReleaseChecks:
    """The checks of the images of a staged release. `planned` are the images of this checkout by cell."""

    def __init__(
        self,
        run: Run,
        area: StagingArea,
        staged: StagedRelease,
        planned: Mapping[str, PlannedImage],
        options: ReleaseOptions,
    ) -> None:
        self._run, self._area, self._staged, self._planned, self._options = run, area, staged, planned, options
        project = run.project
        self._known, self._suite = KnownLayers(project.root), Suite.of(*project.folders)
        self._scanner = Scanner(project, project.matrix.scan) if project.matrix.scan else None

    def check_images(self) -> list[Candidate]:
        """All images of the release, with their SBOMs and scans.

        Raises one error for all that may not be released, and for a list of images that is not trusted (see
        `StagingArea.require_signed`).
        """
        project, entries, allowed = self._run.project, self._staged.images, self._options.allowed
        # What holds back the whole release comes first: its exit code is that of the command.
        refused: list[BuilderError] = []
        if "unsigned" not in allowed:
            try:
                self._area.require_signed(project, self._staged)
            except VerifyError as error:
                refused.append(error)
        cells = [self._planned[entry.cell].cell for entry in entries if entry.cell in self._planned]
        refused += support.refusals(project.matrix, cells, self._run.today)
        self._run.view.add_images(entry.cell for entry in entries)
        with self._run.view.live():
            checked = [result for _, result in look_up(self.check_image, entries, CHECKS)]
        images = [result for result in checked if isinstance(result, Candidate)]
        refused += [result for result in checked if isinstance(result, BuilderError)]
        if "missing-arch" not in allowed:
            refused += self._missing_arch(images)
        if refused:
            raise errors.join(refused, "images cannot be released")
        return images

    def check_image(self, entry: StagedImage) -> Checked:
        """The image, or the error if it may not be released. Raises NoRegistryError."""
        view = self._run.view
        view.begin(entry.cell, "checking")
        try:
            image = self._with_results(entry)
            self._require_tests(image)
            name = image.references[0].name
            image = replace(image, sbom=sbom_and_provenance.sbom(image.planned, name, image.stored))
            if self._scanner:
                view.begin(entry.cell, "scanning")
                self._scanner.scan_sbom(entry.cell, image.sbom)
                image = replace(image, scan=scan.PASSED)
        except NoRegistryError:
            raise
        except BuilderError as error:
            view.end(entry.cell, "failed")
            return error
        state = f"gpu: {image.coverage.gpu_status}" + (f", scan: {image.scan}" if self._scanner else "")
        view.end(entry.cell, "done", state)
        return image

    def _with_results(self, entry: StagedImage) -> Candidate:
        """The image with its results in the registry. Raises StaleError, VerifyError, RegistryError, SigningError."""
        project, options = self._run.project, self._options
        # Anyone who can write to staging may have changed the list: only images of this checkout's plan count.
        planned = self._planned.get(entry.cell)
        if planned is None or planned.plan != entry.plan:
            raise self._staged.stale(entry.cell)
        stored = staging.image_of(self._area, entry)
        repository = self._area.open(entry.repository)
        # Labels, configuration and known layers must match the plan, or the tags of the image would not be true. Layers
        # that are not known are covered by the report that is required below.
        config = repository.read_blob(stored.config.digest)
        expected_image = expected.of_plan(project, self._known, planned)
        expected.check_image(expected_image, stored, config, is_trusted=True)
        coverage = reports.registry_coverage(
            repository, Requirement.of(planned, stored.manifest.digest, self._suite), Trust.of(project),
            state=project.state, allow_unsigned="unsigned" in options.allowed,
        )  # fmt: skip
        return Candidate.of(project, planned, stored, coverage)

    def _require_tests(self, image: Candidate) -> None:
        """Raises ImageTestError unless the image has passed the tests that a release needs."""
        project, options, cell, coverage = self._run.project, self._options, image.planned.cell, image.coverage
        test = f"builder test --staged {self._staged.stamp}"
        try:
            coverage.require_pass(cell.id)
        except ImageTestError as error:
            accept = "" if "unsigned" in options.allowed else "   To accept unsigned results, add --allow-unsigned."
            hint = "" if coverage.image_tests else f"Run the tests: {test}{accept}"
            raise ImageTestError(str(error), hint=hint) from error
        if not (cell.is_cpu or coverage.gpu == "passed" or "untested-gpu" in options.allowed):
            file = gpu_test(cell.framework)
            machine = f"an {ARM64} machine" if cell.arch == ARM64 else "a machine"
            how = f"On {machine} with a GPU: {test} --gpu require"
            how = how if project.path(file).is_file() else f"Write {file}, then test again."
            raise ImageTestError(
                f"{cell.id}: GPU tests have not passed (gpu: {coverage.gpu_status})",
                hint=f"{how}   To release it untested, add --allow-untested-gpu.",
            )

    def _missing_arch(self, images: Collection[Candidate]) -> list[ImageTestError]:
        """An error for every image whose tags also name another architecture, if no image for it would be released."""
        present = {image.cell for image in images}
        refused = []
        for image in images:
            if missing := [cell for cell in image.cells.values() if cell not in present]:
                text = f"{image.cell}: {listed(missing, 1)} would not be released with it, and has the same tags"
                refused.append(ImageTestError(text, hint=_STAGE_TOGETHER))
        return refused
