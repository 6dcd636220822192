"""Runs an image's tests: for each of its components the file tests/images/test_<component>.py, in one pytest process.

A failed, skipped or missing test is not a pass. GPU tests (tests/gpu) run on a GPU of `builder.compat.gpus.Pool`. If
there is none, or none that suits the image, the evidence has `not run` and the reason. `--gpu require` makes that an
error, before anything is built.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from builder.build.outcomes import NOT_APPLICABLE, REUSED
from builder.build.programs import Program, Programs
from builder.build.work import Work
from builder.common import errors
from builder.common.errors import ImageTestError
from builder.compat import gpu_support, gpus
from builder.compat.gpus import Gpu
from builder.engine.client import SOCKET
from builder.matrix import facts
from builder.plan.plan import PlannedImage
from builder.registry import evidence
from builder.registry.evidence import Evidence
from builder.registry.suite import GPU_TESTS, Suite, gpu_test

TIMEOUT_S = 1800
_NO_TEST = "no GPU test: "


@dataclass(frozen=True, kw_only=True)
class Results:
    """Names of tests by their outcome, and `figures` that GPU tests measured.

    `seconds` are durations by test, `reasons` the first line of each failure.
    """

    passed: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()
    not_applicable: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()
    figures: tuple[dict[str, Any], ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _GpuRun:
    state: Literal["passed", "failed", "not run"] = "not run"
    reason: str = ""
    results: Results = Results()
    machine: Mapping[str, str] = field(default_factory=dict)


class Tester:
    """Tests images of one project; `stop` ends the tests that run, from another thread.

    `junit` is a folder for reports.
    """

    def __init__(
        self, work: Work, *, gpu_mode: gpus.Mode = gpus.AUTO, pool: gpus.Pool | None = None, junit: Path | None = None
    ) -> None:
        self._engine, self._project, self._view = work.engine, work.project, work.view
        self._hide = work.host.hide
        self._gpu_mode = gpu_mode
        self._junit = junit
        self._pool = pool or gpus.Pool()
        self._has_runtime = work.engine.info().has_nvidia
        self._suite = Suite.of(work.project.root)
        self._programs = Programs()

    def known(self, image: PlannedImage, image_id: str) -> Evidence | None:
        """Earlier evidence of a pass that is still valid, from no less hardware than there is now."""
        earlier = self._read(image_id)
        if earlier is None or evidence.why_invalid(self._read, earlier, image, self._suite):
            return None
        return None if earlier.gpu == "not run" and not self._why_no_gpu(image) else earlier

    def _earlier(self, image: PlannedImage, image_id: str) -> Evidence | None:
        """Earlier evidence, a pass or not, if it is of this image and the current test suite."""
        earlier = self._read(image_id)
        return None if evidence.why_outdated(earlier, image.digest, self._suite.files) else earlier

    def check(self, images: Sequence[PlannedImage]) -> None:
        """With `--gpu require`, raises ImageTestError if GPU tests of these images cannot run."""
        if self._gpu_mode != gpus.REQUIRE:
            return
        reasons: dict[str, list[str]] = {}
        for image in images:
            if not image.cell.is_cpu and (reason := self._why_no_gpu(image)):
                reasons.setdefault(reason, []).append(image.id)
        if reasons:
            raise errors.join([_no_gpu_test(", ".join(ids), reason) for reason, ids in reasons.items()], "reasons")

    def test(
        self, image: PlannedImage, image_id: str, reusable: Mapping[str, str] = MappingProxyType({}), *,
        only_missing: bool = False,
    ) -> Evidence:  # fmt: skip
        """Runs the tests and writes the evidence; raises ImageTestError unless every one passed.

        Leaves out the thorough ones among the `reusable` tests: test -> id of the image that passed it. With
        `only_missing`, runs only GPU tests if earlier evidence of a pass lacks nothing else.
        """
        self._view.begin(image.id, "testing")
        earlier = self._earlier(image, image_id)
        if only_missing and earlier and not evidence.why_invalid(self._read, earlier, image, self._suite):
            results, reused = _part(earlier, on_gpu=False), earlier.reused
        else:
            results = self._run(image, image_id, "test", self._files(image), reusable=reusable)
            reused = {
                other: tuple(name for name in results.reused if reusable[name] == other)
                for other in dict.fromkeys(reusable[name] for name in results.reused)
            }
        gpu = self._run_on_gpu(image, image_id)
        if results.failed or gpu.results.failed:
            self._engine.check()  # that may be why they failed
        if self._programs.stopped:
            raise ImageTestError(f"{image.id}: the tests were interrupted")
        # A result must not become `not run` because no GPU is free now.
        if gpu.state == "not run" and earlier and earlier.gpu != "not run":
            gpu = _GpuRun(state=earlier.gpu, results=_part(earlier, on_gpu=True), machine=earlier.machine)
        result = Evidence(
            image_id=image_id,
            cell=image.id,
            plan=image.digest,
            suite=dict(self._suite.files),
            passed=results.passed + gpu.results.passed,
            failed=results.failed + gpu.results.failed,
            gpu=gpu.state,
            gpu_reason=gpu.reason,
            not_applicable=gpu.results.not_applicable,
            reused=reused,
            seconds={**results.seconds, **gpu.results.seconds},
            figures=gpu.results.figures,
            machine=gpu.machine or self._machine(),
            finished=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        evidence.write(self._project.state, result)
        if not result.is_pass:
            raise self._failure(image, result, {**results.reasons, **gpu.results.reasons}, on_gpu=not results.failed)
        if reason := evidence.why_incomplete(result, image.components, self._suite):
            hint = "Write tests as functions `test_...` of the module, or of a class `Test...`, or import them by name."
            raise ImageTestError(f"{image.id}: the result does not count: {reason}", hint=hint)
        if gpu.reason and self._gpu_mode == gpus.REQUIRE and not image.cell.is_cpu:
            raise _no_gpu_test(image.id, gpu.reason)  # there was one before the build
        return result

    def _files(self, image: PlannedImage) -> list[Path]:
        """The test files of the image's components. Raises ImageTestError if one is missing."""
        files = [self._project.root / f"tests/images/test_{name}.py" for name in image.components]
        if missing := [path.name for path in files if not path.is_file()]:
            raise ImageTestError(f"{image.id}: no tests for a component: tests/images/{', '.join(missing)}")
        return files

    def _read(self, image_id: str) -> Evidence | None:
        return evidence.read(self._project.state, image_id)

    def _machine(self, leased: Sequence[Gpu] = ()) -> dict[str, str]:
        """Where the tests ran."""
        machine = {"engine": self._engine.info().version, "kernel": platform.release()}
        if leased:
            names = ", ".join(sorted({gpu.name for gpu in leased}))
            machine |= {"gpu": names, "gpus": str(len(leased)), "driver": self._pool.read()[0]}
        return machine

    def _failure(
        self, image: PlannedImage, result: Evidence, reasons: Mapping[str, str], *, on_gpu: bool
    ) -> ImageTestError:
        log = self._log(image, "gpu" if on_gpu else "test")
        return ImageTestError(
            f"{image.id}: {len(result.failed)} of {len(result.failed + result.passed)} tests failed\n"
            + "\n".join(f"  {name}{_because(reasons.get(name, ''))}" for name in result.failed[:12]),
            hint=f"Full log: {log.relative_to(self._project.root)}   "
            f"To inspect the image: docker run --rm -it {result.image_id[7:19]} bash",
        )

    def stop(self) -> None:
        self._programs.stop()

    # ---- GPU tests

    def _run_on_gpu(self, image: PlannedImage, image_id: str) -> _GpuRun:
        """Runs the GPU tests of the image's components, if they can run."""
        if reason := self._why_no_gpu(image):
            return _GpuRun(reason=reason)
        files = [self._project.root / f"tests/gpu/test_{name}.py" for name in image.components]
        with self._pool.lease(lambda gpu: not self._why_unfit(image, gpu), lambda: self._programs.stopped) as leased:
            if not leased:
                return _GpuRun(reason=self._why_no_gpu(image) or "no GPU became free")
            results = self._run(image, image_id, "gpu", [path for path in files if path.is_file()], leased)
            machine = self._machine(leased)
        state: Literal["passed", "failed"] = "passed" if results.passed and not results.failed else "failed"
        return _GpuRun(state=state, results=results, machine=machine)

    def _why_no_gpu(self, image: PlannedImage) -> str:
        """Why the image's GPU tests cannot run now; empty if they can."""
        if image.cell.is_cpu:
            return "the image is for the CPU"
        if self._gpu_mode == gpus.OFF:
            return "--gpu off"
        test = gpu_test(image.cell.framework)
        if not (self._project.root / test).is_file():
            return f"{_NO_TEST}{test} is missing"
        _, present = self._pool.read()
        if present and not self._has_runtime:
            return (
                "Docker Engine has neither the NVIDIA runtime nor NVIDIA CDI devices: install nvidia-container-toolkit"
            )
        unfit = [self._why_unfit(image, gpu) for gpu in present]
        return unfit[0] if unfit and all(unfit) else self._pool.why_not()

    def _why_unfit(self, image: PlannedImage, gpu: Gpu) -> str:
        """Why the image does not run on this GPU: the driver is too old, or there is no code for it. Else empty."""
        driver, _ = self._pool.read()
        needs = gpu_support.needs_of_labels(image.settings.labels)
        try:
            verdict = gpu_support.judge(gpu, driver, needs, facts.load())
        except errors.UsageError:  # an unknown form of driver version: the test will show it
            return ""
        return f"{gpu.name}: {'; '.join(verdict.reasons)}" if verdict.runs is False else ""

    # ---- pytest

    def _run(
        self, image: PlannedImage, image_id: str, kind: str, files: list[Path], leased: Sequence[Gpu] = (),
        reusable: Collection[str] = (),
    ) -> Results:  # fmt: skip
        """Runs test files in a pytest process of their own, without thorough tests that are `reusable`."""
        root = self._project.root
        with self._project.scratch() as scratch:
            subject, passed, report, figures = (
                Path(scratch) / name for name in ("image.json", "reusable.json", "report.jsonl", "figures.jsonl")
            )
            passed.write_text(json.dumps(sorted(reusable)), encoding="utf-8")
            subject.write_text(json.dumps(describe(image, image_id, str(root))), encoding="utf-8")
            command = [
                sys.executable, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider", "--rootdir", str(root),
                f"--basetemp={scratch}/pytest", "--durations=10", *map(str, files),
            ]  # fmt: skip
            if self._junit:
                command += [f"--junit-xml={self._junit.resolve()}/{image.id}.{kind}.xml", "-o"]
                command += [f"junit_suite_name={image.id}"]
            variables = {
                "DOCKER_HOST": os.environ.get("DOCKER_HOST", SOCKET),  # our engine, whatever Docker's context
                "PYTEST_ADDOPTS": "",  # a user's options must not leave tests out
                # Nor plugins. To import those of this environment takes 0.8 s.
                "PYTEST_PLUGINS": "",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
                "IMAGE_TEST_SUBJECT": str(subject),
                "IMAGE_TEST_REPORT": str(report),
                "IMAGE_TEST_REUSABLE": str(passed),
                "IMAGE_TEST_GPUS": ",".join(gpu.uuid or str(gpu.index) for gpu in leased),
                "IMAGE_TEST_FIGURES": str(figures),
            }
            results = outcome(report, self._pytest(image.id, command, variables, self._log(image, kind)))
            no_test = untested(files, root, results.passed + results.failed)
            return replace(
                results,
                failed=(*results.failed, *no_test),
                figures=tuple(_lines(figures)),
                reasons={name: self._hide(reason) for name, reason in results.reasons.items()},
            )

    def _pytest(self, row: str, command: list[str], variables: Mapping[str, str], log_path: Path) -> int:
        """Runs a command with its output in a log and in a row of the view; returns its status."""

        def on_line(line: str) -> str:
            line = self._hide(line)
            if "::" in line and self._view.is_live:
                self._view.note(row, line.split("::", 1)[1].strip())
            return line

        program = Program(
            command=command,
            environment={**os.environ, **variables},
            folder=self._project.root,
            log=log_path,
            timeout_s=TIMEOUT_S,
        )
        return self._programs.run(program, on_line)

    def _log(self, image: PlannedImage, kind: str) -> Path:
        return self._project.logs / f"{image.id}.{kind}.log"


def describe(image: PlannedImage, image_id: str, checkout: str) -> dict[str, object]:
    """The image under test, for tests/images/conftest.py."""
    return {
        "image_id": image_id,
        "checkout": checkout,
        "cell": asdict(image.cell),
        "id": image.id,
        "plan": image.digest,
        "components": list(image.components),
        "references": list(image.references),
        "requirements": image.requirements,
        "wheels": {wheel.name: wheel.version for wheel in image.wheels},
        "cuda_wheels": [wheel.name for wheel in image.wheels if wheel.is_cuda],
    }


def _part(earlier: Evidence, *, on_gpu: bool) -> Results:
    """The results of earlier evidence in GPU tests, or in all others."""

    def chosen(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if name.startswith(f"{GPU_TESTS}/") == on_gpu)

    return Results(
        passed=chosen(earlier.passed),
        failed=chosen(earlier.failed),
        not_applicable=chosen(earlier.not_applicable),
        figures=earlier.figures if on_gpu else (),
        seconds={name: earlier.seconds[name] for name in chosen(earlier.seconds)},
    )


def untested(files: Sequence[Path], root: Path, tests: Sequence[str]) -> list[str]:
    """Of these test files, those that had no test: a component that was not tested has not passed."""
    names = [path.relative_to(root).as_posix() for path in files]
    return [f"{name}: no test" for name in names if not any(test.startswith(f"{name}::") for test in tests)]


def outcome(report: Path, status: int) -> Results:
    """The results in the report that tests/images/conftest.py writes, one JSON line for each phase of a test.

    A test run that ended badly without naming a failed test (killed, collection error) is itself a failure. A GPU test
    that had nothing to check is neither passed nor failed, and neither is a thorough test that was left out.
    """
    results: dict[str, bool] = {}
    reasons: dict[str, str] = {}
    seconds: dict[str, float] = {}
    not_applicable, reused = [], []
    for entry in _lines(report):
        if entry["outcome"] == REUSED:
            reused.append(entry["test"])
            continue
        seconds[entry["test"]] = entry.get("seconds", 0.0)
        if reason := entry.get("reason"):
            reasons.setdefault(entry["test"], reason)
        if entry["outcome"] == NOT_APPLICABLE:
            not_applicable.append(entry["test"])
        else:
            results[entry["test"]] = results.get(entry["test"], True) and entry["outcome"] == "passed"
    passed = tuple(name for name, is_pass in results.items() if is_pass)
    failed = tuple(name for name, is_pass in results.items() if not is_pass)
    if status != 0 and not failed:
        failed = (f"the test run itself (pytest ended with status {status})",)
    return Results(
        passed=passed,
        failed=failed,
        not_applicable=tuple(not_applicable),
        reused=tuple(reused),
        seconds=seconds,
        reasons=reasons,
    )


def _because(reason: str) -> str:
    return f"\n    {reason}" if reason else ""


def _lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines that tests wrote, without a line that was cut off when the tests were killed."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def _no_gpu_test(images: str, reason: str) -> ImageTestError:
    how = "Write this test." if reason.startswith(_NO_TEST) else "`builder doctor` shows this machine's GPUs."
    return ImageTestError(
        f"{images}: --gpu require, but GPU tests cannot run: {reason}",
        hint=f"{how} `--gpu auto` builds without GPU tests, as `gpu: not run`.",
    )
