"""Runs an image's tests: for each of its components the file tests/images/test_<component>.py, in one pytest process.

A failed, skipped or missing test is not a pass. GPU tests (tests/gpu) run on a GPU of `builder.compat.gpus.Pool`. If
there is none, or none that suits the image, the evidence has `not run` and the reason. `--gpu require` makes that an
error, before anything is built.
"""

from __future__ import annotations

import math
import platform
import shutil
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from builder.build.gpu_command import GpuCommand, GpuResults, StagedTarget
from builder.build.programs import Programs
from builder.build.pytest_run import PytestRun, describe
from builder.common import errors, machine
from builder.common.errors import EngineError, ImageTestError
from builder.common.text import listed
from builder.compat import gpu_support, gpus
from builder.compat.gpu_support import Device
from builder.compat.gpus import Gpu
from builder.engine.model import EngineInfo, LoadedImage
from builder.engine.run import Run
from builder.evidence.results import Coverage, Evidence, Kind, Requirement, coverage_of, local_coverage, write_evidence
from builder.evidence.suite import IMAGE_TESTS, RUNNER, Suite, gpu_test
from builder.matrix import facts
from builder.matrix.project import Project
from builder.plan.plan import PlannedImage

PACKAGES = {
    "pytest": "pytest",
    "testinfra": "pytest-testinfra",
    "websocket": "websocket-client",
    "xdist": "pytest-xdist",
}
TESTS_EACH = 10  # a process for fewer takes longer to start than it saves
LOGS: dict[Kind, str] = {"image": "test", "gpu": "gpu"}  # the part of a log's name that identifies the tests
NO_RESULTS = Coverage()
_NO_TEST = "no GPU test: "


def project_of_tests(run: Run) -> Project:
    """The checkout, or a copy of its test files, so that all are below one root. The checkout must be locked.

    Test files import each other, so those of a team that extends the shipped ones are copied together. The copy has the
    state of the checkout.
    """
    project = run.project
    if len(project.folders) == 1:
        return project
    root = project.state / "tests"
    shutil.rmtree(root, ignore_errors=True)
    for name in Suite.of(*project.folders).files.keys() - {RUNNER}:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(next(path for folder in project.folders if (path := folder / name).is_file()), root / name)
    shutil.copyfile(project.folders[-1] / "pyproject.toml", root / "pyproject.toml")  # pytest's options
    (root / project.state.name).symlink_to("..")
    return Project(root)


def why_not_run(engine: EngineInfo, image: PlannedImage) -> str:
    """The reason that this machine does not run an image, which it may have built, or an empty string."""
    arch = image.cell.arch
    return "" if arch == engine.arch else f"built, not run: a machine for {arch} must test it"


class Tester:
    """Tests images of one project; `stop` ends the tests that run, from another thread.

    The tests of one image run in `processes` at the same time. `junit` is a folder for reports. With `gpu_command`,
    only GPU tests run, by this command, and no engine is used.
    """

    def __init__(
        self,
        run: Run,
        *,
        gpu_mode: gpus.Mode = gpus.AUTO,
        junit: Path | None = None,
        processes: int = 1,
        gpu_command: GpuCommand | None = None,
    ) -> None:
        self._run, self._project, self._view = run, project_of_tests(run), run.view
        self._hide = gpu_command.hide if gpu_command else run.host.hide
        self.gpu_command = gpu_command
        self._gpu_mode = gpu_mode
        self._junit = junit
        self._processes = processes
        self._pool = gpus.Pool()
        if gpu_command is None:
            for root in {run.project.root, self._project.root}:
                run.engine.sweep(str(root))  # containers and temporary images of killed runs
        self._suite = Suite.of(self._project.root)
        self._programs = Programs()

    def coverage(self, image: PlannedImage, loaded: LoadedImage) -> Coverage:
        """The coverage of an image by this machine's earlier results."""
        requirement = Requirement.of(image, loaded.digest, self._suite)
        return local_coverage(self._project.state, requirement)

    def is_complete(self, image: PlannedImage, coverage: Coverage) -> bool:
        """True if the image passed its tests, on a GPU too if there is one now."""
        is_gpu_missing = coverage.gpu == "not run" and not self._why_no_gpu(image)
        return not (coverage.failure or is_gpu_missing)

    def check(self, images: Sequence[PlannedImage]) -> None:
        """Raises ImageTestError or EngineError if something that the tests need is missing.

        With `--gpu require`, also if GPU tests of these images cannot run.
        """
        if missing := [package for module, package in PACKAGES.items() if find_spec(module) is None]:
            raise ImageTestError(
                f"tests of images need packages that are not installed: {', '.join(missing)}",
                hint="Install builder with its extra `images`; in a checkout of this repository: make .venv/.ready   "
                "`builder build` makes images without testing them.",
            )
        if not self.gpu_command and not shutil.which("docker"):
            raise EngineError(
                "the image tests need the `docker` command",
                hint="On Debian or Ubuntu: apt-get install docker.io   (docker-cli since Debian 13)",
            )
        if self._gpu_mode != gpus.REQUIRE:
            return
        reasons: dict[str, list[str]] = {}
        for image in images:
            if not image.cell.is_cpu and (reason := self._why_no_gpu(image)):
                reasons.setdefault(reason, []).append(image.id)
        if reasons:
            raise errors.join([_no_gpu_test(", ".join(ids), reason) for reason, ids in reasons.items()], "reasons")

    def test(
        self, image: PlannedImage, loaded: LoadedImage, known: Coverage = NO_RESULTS, target: StagedTarget | None = None
    ) -> Coverage:
        """Runs the image tests, unless `known` has a pass of them, and the GPU tests if there is a GPU.

        Writes the evidence of both. Returns the coverage by this evidence and `known` together. Raises ImageTestError
        unless every test passed. `target` is the staged image for the command for GPU tests.
        """
        self._view.begin(image.id, "testing")
        if not target:
            hint = f"docker run --rm -it {loaded.id[7:19]} bash   shows the image before it has its tags"
            self._view.note(image.id, hint)
        no_gpu = self._why_no_gpu(image)
        results: list[Evidence] = []
        before = known.image_tests
        if before is None or not before.is_pass:
            if target:
                raise ImageTestError(
                    f"{image.id}: its image tests have not passed, and `test.gpu_command` runs only GPU tests",
                    hint="First run on a machine with Docker: builder test --staged STAMP --gpu off",
                )
            results.append(self._run_files(image, loaded, "image", no_gpu=no_gpu))
        if not no_gpu and known.gpu != "passed":
            if self.gpu_command and target:
                files = self._gpu_files(image)
                gpu_results = self.gpu_command.run(image.id, target, files, self._project, self._programs, self._suite)
                for gpu in gpu_results.report.devices:
                    device = Device(name=gpu.name, capability=gpu.capability)
                    if reason := self._why_unfit(image, device, gpu_results.report.driver):
                        raise ImageTestError(
                            f"{image.id}: its GPU tests ran on an unsuitable GPU: {reason}",
                            hint="Let `test.gpu_command` in matrix.yaml choose another machine.",
                        )
                results.append(self._run_files(image, loaded, "gpu", gpu_results=gpu_results))
            else:
                with self._pool.lease(
                    lambda gpu: not self._why_unfit(image, gpu, self._pool.read()[0]), self._programs.stopped.is_set
                ) as leased:
                    if leased:
                        results.append(self._run_files(image, loaded, "gpu", leased))
                    else:
                        no_gpu = self._why_no_gpu(image) or "no GPU became free"
                        if results:  # the image tests ran before this was known
                            results = [results[0].model_copy(update={"no_gpu": no_gpu})]
                            write_evidence(self._project.state, results[0])
        own = self.coverage(image, loaded)
        for result in (*results, *own.newest):  # an earlier failure on a GPU that is not free now is still a failure
            if not result.is_pass:
                raise self._failure(image, loaded, result)
        requirement = Requirement.of(image, loaded.digest, self._suite)
        for result in results:
            if reason := requirement.why_not_met(result):
                raise ImageTestError(
                    f"{image.id}: the result does not count: {reason}",
                    hint="Write tests as functions `test_...` of the module, or of a class `Test...`, "
                    "or import them by name.",
                )
        if no_gpu and self._gpu_mode == gpus.REQUIRE and not image.cell.is_cpu:
            raise _no_gpu_test(image.id, no_gpu)  # `check` found a GPU before the build; it is in use or gone now
        return coverage_of([*known.reports, *own.reports], own.refused)

    def _files(self, image: PlannedImage) -> list[Path]:
        """The test files of the image's components. Raises ImageTestError if a file is missing.

        The last component first: tests of a service or a framework take longest, and one process runs a file.
        """
        files = [self._project.root / f"tests/images/test_{name}.py" for name in reversed(image.components)]
        if missing := [path.name for path in files if not path.is_file()]:
            raise ImageTestError(
                f"{image.id}: no tests for a component: tests/images/{', '.join(missing)}",
                hint="Write at least one test for each component: docs/components.md.",
            )
        return files

    def _gpu_files(self, image: PlannedImage) -> list[Path]:
        paths = [self._project.root / f"tests/gpu/test_{name}.py" for name in image.components]
        return [path for path in paths if path.is_file()]

    def _machine(self, leased: Sequence[Gpu] = ()) -> dict[str, str]:
        """The machine that the tests run on, as evidence names it."""
        engine = self._run.engine.info()
        machine = {"engine": engine.version, "kernel": platform.release()}
        if engine.id:
            machine["engine_id"] = engine.id
        if leased:
            names = ", ".join(sorted({gpu.name for gpu in leased}))
            machine |= {"gpu": names, "gpus": str(len(leased)), "driver": self._pool.read()[0]}
        return machine

    def _failure(self, image: PlannedImage, loaded: LoadedImage, result: Evidence) -> ImageTestError:
        # One fault may fail every test: without docker0, 157 errors differed in the id of the container alone.
        by_reason: dict[str, list[str]] = {}
        for name in result.failed:
            by_reason.setdefault(result.reasons.get(name, "")[:60] or name, []).append(name)
        lines = []
        for names in list(by_reason.values())[:12]:
            lines.append(f"  {listed(names, 3)}")
            if reason := result.reasons.get(names[0]):
                lines.append(f"    {reason}")
        hint = f"Full log: {self._log(image, result.kind).relative_to(self._project.root)}"
        if not self.gpu_command:
            hint += f"   To inspect the image: docker run --rm -it {loaded.id[7:19]} bash"
        return ImageTestError(
            f"{image.id}: {len(result.failed)} of {len(result.failed + result.passed)} tests failed\n"
            + "\n".join(lines),
            hint=hint,
        )

    def stop(self) -> None:
        self._programs.stop()

    # ---- GPU tests

    def _why_no_gpu(self, image: PlannedImage) -> str:
        """The reason that the image's GPU tests cannot run now, or an empty string."""
        if image.cell.is_cpu:
            return "the image is for the CPU"
        if not self.gpu_command and (reason := why_not_run(self._run.engine.info(), image)):
            return reason
        if self._gpu_mode == gpus.OFF:
            return "--gpu off"
        test = gpu_test(image.cell.framework)
        if not (self._project.root / test).is_file():
            return f"{_NO_TEST}{test} is missing"
        if self.gpu_command:
            return ""
        driver, present = self._pool.read()
        if present and not self._run.engine.info().gpu_option:
            return "Docker Engine cannot give containers NVIDIA GPUs: install nvidia-container-toolkit"
        unfit = [self._why_unfit(image, gpu, driver) for gpu in present]
        return unfit[0] if unfit and all(unfit) else self._pool.why_not()

    def _why_unfit(self, image: PlannedImage, gpu: Device, driver: str) -> str:
        """The reason that the image does not run on this GPU (an old driver, no code for it), or an empty string."""
        known = facts.load_facts()
        needs = gpu_support.needs_of_cell(self._run.project.matrix, image.cell, known)
        try:
            verdict = gpu_support.judge(gpu, driver, needs, known)
        except errors.UsageError:  # an unknown form of driver version: the test will show it
            return ""
        return f"{gpu.name}: {'; '.join(verdict.reasons)}" if verdict.runs is False else ""

    # ---- pytest

    def _run_files(
        self, image: PlannedImage, loaded: LoadedImage, kind: Kind, leased: Sequence[Gpu] = (), *,
        no_gpu: str = "", gpu_results: GpuResults | None = None,
    ) -> Evidence:  # fmt: skip
        """Runs the tests of a kind in a pytest process of their own, on the leased GPUs, and writes the evidence.

        With `gpu_results` of a command, the GPU tests check these results, and start no container. Raises
        ImageTestError if the tests were stopped, EngineError if the engine does not respond.
        """
        root = self._project.root
        subject = describe(image, loaded.id, str(root))
        variables: Mapping[str, str] = {}
        if self.gpu_command and gpu_results:
            subject["report"] = gpu_results.report.model_dump()
            where = self.gpu_command.machine(gpu_results)
        else:
            info = self._run.engine.info()
            names = [info.gpu_name(gpu.uuid, gpu.index) for gpu in leased]
            subject |= {
                "engine": info.name,
                "gpu_options": info.gpu_options(names) if names else {},
                "private_hosts": self._run.host.names,
            }
            variables, where = self._run.engine.address.variables, self._machine(leased)
        options: list[str] = []
        tests = self._suite.of_image(image.components, IMAGE_TESTS, thorough=image.thorough)
        processes = min(self._processes, 1 + len(tests) // TESTS_EACH)
        if kind == "image" and processes > 1:
            # Tests of one file or class share containers, which the last test may end: the tests stay in their order.
            # By itself, xdist begins with the file that has the most tests, which are short ones.
            options += ["-p", "xdist.plugin", "-n", str(processes), "--dist", "loadscope", "--no-loadscope-reorder"]
        if self._junit:
            options += [f"--junit-xml={self._junit.resolve()}/{image.id}.{LOGS[kind]}.xml", "-o"]
            options += [f"junit_suite_name={image.id}"]

        def on_line(line: str) -> str:
            line = self._hide(line)
            if "::" in line and self._view.console.is_terminal:
                self._view.note(image.id, " ".join(line.rpartition("::")[2].split()))
            return line

        run = PytestRun(
            root=root,
            files=self._files(image) if kind == "image" else self._gpu_files(image),
            subject=subject,
            options=options,
            variables=variables,
            log=self._log(image, kind),
        )
        with self._project.scratch() as scratch:
            results = run.run(self._programs, Path(scratch), on_line)
        if results.failed and not gpu_results:
            self._run.engine.check()  # that may be why they failed
        if self._programs.stopped.is_set():
            raise ImageTestError(f"{image.id}: the tests were interrupted")
        result = Evidence(
            image=loaded.digest,
            cell=image.id,
            plan=image.plan,
            suite=dict(self._suite.files),
            kind=kind,
            passed=results.passed,
            failed=results.failed,
            reasons={name: self._hide(reason) for name, reason in results.reasons.items()},
            not_applicable=results.not_applicable,
            no_gpu=no_gpu,
            seconds=results.seconds,
            figures=results.figures,
            machine=where,
            finished=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        # Now, not at the end: a kill during the GPU tests does not lose minutes of image tests.
        write_evidence(self._project.state, result)
        return result

    def _log(self, image: PlannedImage, kind: Kind) -> Path:
        return self._project.logs / f"{image.id}.{LOGS[kind]}.log"


def new_tester(
    run: Run, images: Sequence[PlannedImage], *, jobs: int, gpu_mode: gpus.Mode, junit: Path | None,
    gpu_command: GpuCommand | None = None,
) -> Tester:  # fmt: skip
    """The tester of these images. `jobs` images are tested at a time, and share the processors."""
    # Tests of one image, one after the other, use half of two processors: most wait for the start of a container.
    processes = math.ceil(1.5 * machine.processors() / min(jobs, max(1, len(images))))
    return Tester(run, gpu_mode=gpu_mode, junit=junit, processes=processes, gpu_command=gpu_command)


def _no_gpu_test(images: str, reason: str) -> ImageTestError:
    how = "Write this test." if reason.startswith(_NO_TEST) else "`builder doctor` shows this machine's GPUs."
    return ImageTestError(
        f"{images}: --gpu require, but GPU tests cannot run: {reason}",
        hint=f"{how} `--gpu auto` builds without GPU tests, as `gpu: not run`.",
    )
