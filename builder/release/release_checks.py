"""Checks which staged images may be released: their plan, configuration, layers, test results, scan and support."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, get_args

from builder.common import errors
from builder.common.errors import BuilderError, ImageTestError, NoRegistryError, RefusedError, VerifyError
from builder.common.text import Redactor, duration, listed, one_line, printable
from builder.engine.run import Run
from builder.evidence import reports, sbom_and_provenance
from builder.evidence.results import Requirement
from builder.evidence.signing import Signer, Trust
from builder.evidence.suite import Suite, gpu_test
from builder.layers.known_layers import KnownLayers
from builder.matrix import support
from builder.matrix.project import Project
from builder.matrix.schema import ARM64, SBOM, Scan
from builder.plan.plan import PlannedImage
from builder.registry.transfer import CHECKS, map_parallel
from builder.release import expected, staging
from builder.release.staging import Candidate, StagedImage, StagedRelease, StagingArea, cells_by_arch
from builder.release.tagging import WITHOUT_ARCH

Exemption = Literal["unsigned", "untested-gpu", "missing-arch"]  # from a check; releases record them
EXEMPTIONS: tuple[Exemption, ...] = get_args(Exemption)
_STAGE_TOGETHER = (
    "Build it on a machine of that architecture, and stage it with --images-only. Then stage the images of all "
    f"architectures together. To release it alone, add --allow-missing-arch: {WITHOUT_ARCH}."
)
Checked = Candidate | BuilderError  # the error of an image that may not be released


SCANNED = "passed"
SHOWN_LINES = 15  # of a scanner's output


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
            checked = [result for _, result in map_parallel(self.check_image, entries, CHECKS)]
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
                image = replace(image, scan=SCANNED)
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
        layers = expected.expected_layers(project, self._known, planned)
        expected.compare_with_plan(planned, layers, stored, config, is_trusted=True)
        coverage = reports.registry_coverage(
            repository, Requirement.of(planned, stored.manifest.digest, self._suite), Trust.of(project),
            project.state, allow_unsigned="unsigned" in options.allowed,
        )  # fmt: skip
        return Candidate(planned=planned, stored=stored, coverage=coverage)

    def _require_tests(self, image: Candidate) -> None:
        """Raises ImageTestError unless the image has passed the tests that a release needs."""
        project, options, cell, coverage = self._run.project, self._options, image.planned.cell, image.coverage
        key = options.signer.option if options.signer else " --sign KEY" if project.matrix.evidence else ""
        test = f"builder test --staged {self._staged.stamp}{key}"
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
            cells = cells_by_arch(self._run.project, image.planned).values()
            if missing := [cell for cell in cells if cell not in present]:
                text = f"{image.cell}: {listed(missing, 1)} would not be released with it, and has the same tags"
                refused.append(ImageTestError(text, hint=_STAGE_TOGETHER))
        return refused


class Scanner:
    """Runs the scanner of matrix.yaml on SBOMs, in the checkout, where it finds its own settings. Thread-safe.

    The scanner alone decides, by its exit status: 0 accepts the image. It is killed after `timeout_s` seconds.
    """

    timeout_s: float = 600

    def __init__(self, project: Project, settings: Scan) -> None:
        self._project, self._settings = project, settings
        self._slots = threading.BoundedSemaphore(settings.parallel)

    def scan_sbom(self, cell: str, sbom: bytes) -> None:
        """Raises RefusedError if the scanner refuses the SBOM of an image, VerifyError if it gives no result."""
        program, log = self._settings.command[0], self._project.logs / f"{cell}.scan.log"
        status: int | None = None
        with self._slots, TemporaryDirectory() as folder:
            path, output = Path(folder) / "sbom.json", Path(folder) / "output"
            path.write_bytes(sbom)
            # A file, as a child of the scanner could keep a pipe open after a timeout.
            with output.open("wb") as out:
                try:
                    status = subprocess.run(
                        [word.replace(SBOM, str(path)) for word in self._settings.command],
                        cwd=self._project.root, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                        timeout=self.timeout_s, check=False,
                    ).returncode  # fmt: skip
                except subprocess.TimeoutExpired:
                    pass  # what it printed until then is shown below
                except OSError as error:
                    raise VerifyError(
                        f"{cell}: {program}: {(error.strerror or str(error)).lower()}",
                        hint="Install the scanner, or correct `scan.command` in matrix.yaml.",
                    ) from error
            printed = output.read_text(encoding="utf-8", errors="replace")
        text = Redactor()(printable(printed))
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(text, encoding="utf-8")
        last = [f"  | {one_line(line)}" for line in text.splitlines() if line.strip()][-SHOWN_LINES:]
        if status is None or status < 0:
            reason = f"no result within {duration(self.timeout_s)}" if status is None else f"ended by signal {-status}"
            raise VerifyError("\n".join([f"{cell}: {program}: {reason}", *last]), hint=f"Full output: {log}")
        if status:
            raise RefusedError(
                "\n".join([f"{cell}: refused by {program} (exit status {status})", *last]),
                hint=f"Update the packages, or edit the scanner's own list of exceptions. Full output: {log}",
            )
