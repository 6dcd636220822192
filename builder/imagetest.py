"""Runs an image's tests: for each of its components the file tests/images/test_<component>.py, in one pytest process.

A failed, skipped or missing test is not a pass. GPU tests (tests/gpu) run on GPUs that `builder.gpu.Pool` lends, which
the engine hands to the container; where there is none, or it does not suit the image, the evidence says `not run` and
why. `--gpu require` makes that an error, before anything is built.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from builder import errors, evidence, facts, gpu, runson
from builder.engine import SOCKET, Engine
from builder.errors import ImageTestError
from builder.evidence import Evidence
from builder.gpu import Gpu
from builder.hide import Hider
from builder.plan import PlannedImage
from builder.project import Project
from builder.view import View

TIMEOUT_S = 1800
NOT_APPLICABLE = "not applicable"  # an outcome of a GPU test


class Tester:
    """Tests images of one project; `stop` ends what runs, from another thread."""

    def __init__(
        self,
        engine: Engine,
        project: Project,
        view: View,
        hide: Hider,
        *,
        gpu_mode: gpu.Mode = gpu.AUTO,
        pool: gpu.Pool | None = None,
    ) -> None:
        self._engine = engine
        self._project = project
        self._hide = hide
        self._stopped = False
        self._view = view
        self._gpu_mode = gpu_mode
        self._pool = pool or gpu.Pool()
        self._has_runtime = engine.info().has_nvidia
        self._suite = evidence.suite_digest(project.root)
        self._children: set[subprocess.Popen[str]] = set()
        self._lock = threading.Lock()

    def known(self, image: PlannedImage, image_id: str) -> Evidence | None:
        """Earlier evidence, if it is for this image, by today's tests, on no less hardware."""
        found = self._earlier(image, image_id)
        if found is None:
            return None
        if found.gpu == "not run" and not self._why_no_gpu(image):
            return None
        return found

    def _earlier(self, image: PlannedImage, image_id: str) -> Evidence | None:
        """Earlier evidence, if it is for this image and by today's tests."""
        found = evidence.read(self._project.state, image_id)
        return found if found and found.suite == self._suite and found.plan == image.digest else None

    def check(self, images: Sequence[PlannedImage]) -> None:
        """With `--gpu require`, raises ImageTestError if GPU tests of these images cannot run."""
        if self._gpu_mode != gpu.REQUIRE:
            return
        reasons: dict[str, list[str]] = {}
        for image in images:
            if not image.cell.is_cpu and (reason := self._why_no_gpu(image)):
                reasons.setdefault(reason, []).append(image.id)
        if reasons:
            raise errors.join([_no_gpu_test(", ".join(ids), reason) for reason, ids in reasons.items()], "reasons")

    def test(self, image: PlannedImage, image_id: str) -> Evidence:
        """Runs the tests and keeps the evidence; raises ImageTestError unless every one passed."""
        self._view.begin(image.id, "testing")
        files = [self._project.root / f"tests/images/test_{name}.py" for name in image.components]
        if missing := [path.name for path in files if not path.is_file()]:
            raise ImageTestError(f"{image.id}: no tests for a component: tests/images/{', '.join(missing)}")
        passed, failed, log = self._run(image, image_id, files, "test")
        state: Literal["passed", "failed", "not run"] = "not run"
        not_applicable: list[str] = []
        figures: list[dict[str, Any]] = []
        reason = self._why_no_gpu(image)
        if not reason:
            with self._pool.lease(lambda one: not self._why_unfit(image, one), lambda: self._stopped) as gpus:
                if gpus:
                    gpu_passed, gpu_failed, log = self._run(
                        image, image_id, self._gpu_files(image), "gpu", gpus, figures, not_applicable
                    )
                    state = "passed" if gpu_passed and not gpu_failed else "failed"
                    passed, failed = passed + gpu_passed, failed + gpu_failed
                else:
                    reason = self._why_no_gpu(image) or "no GPU became free"
        if failed:
            self._engine.info()  # raises EngineError if that is why they failed
        if self._stopped:
            raise ImageTestError(f"{image.id}: the tests were interrupted")
        earlier = self._earlier(image, image_id)
        if state == "not run" and earlier and earlier.gpu != "not run":
            # What a GPU said of this image stays said: it must not become "not run" because none is free now.
            state, reason, not_applicable = earlier.gpu, "", list(earlier.not_applicable)
            of_gpu = ("tests/gpu/",)
            passed += [name for name in earlier.passed if name.startswith(of_gpu)]
            failed += [name for name in earlier.failed if name.startswith(of_gpu)]
            figures = evidence.read_figures(self._project.state, image_id)
        result = Evidence(
            image_id=image_id,
            cell=image.id,
            plan=image.digest,
            suite=self._suite,
            passed=tuple(passed),
            failed=tuple(failed),
            gpu=state,
            gpu_reason=reason,
            not_applicable=tuple(not_applicable),
        )
        evidence.write_figures(self._project.state, image_id, figures)
        evidence.write(self._project.state, result)
        if not result.is_pass:
            shown = "\n".join(f"  {name}" for name in failed[:12])
            raise ImageTestError(
                f"{image.id}: {len(failed)} of {len(passed) + len(failed)} tests failed\n{shown}",
                hint=f"Whole log: {log.relative_to(self._project.root)}   "
                f"Look inside: docker run --rm -it {image_id[7:19]} bash",
            )
        if reason and self._gpu_mode == gpu.REQUIRE and not image.cell.is_cpu:
            raise _no_gpu_test(image.id, reason)  # there was one when it was asked for
        return result

    def stop(self) -> None:
        self._stopped = True
        with self._lock:
            for child in self._children:
                child.kill()

    def _why_no_gpu(self, image: PlannedImage) -> str:
        """Why the image's GPU tests cannot run now; empty if they can."""
        if image.cell.is_cpu:
            return "the image is for the CPU"
        if self._gpu_mode == gpu.OFF:
            return "--gpu off"
        wanted = f"tests/gpu/test_{image.cell.framework}.py"
        if not (self._project.root / wanted).is_file():
            return f"no GPU test: {wanted} is missing"
        _, gpus = self._pool.read()
        if gpus and not self._has_runtime:
            return "Docker Engine has no NVIDIA runtime: install nvidia-container-toolkit"
        unfit = [self._why_unfit(image, one) for one in gpus]
        if unfit and all(unfit):
            return unfit[0]
        return self._pool.why_not()

    def _why_unfit(self, image: PlannedImage, one: Gpu) -> str:
        """What is known against the image on this GPU: too old a driver, no code for its compute capability."""
        driver, _ = self._pool.read()
        needs = runson.needs_of_labels(image.settings.labels)
        try:
            verdict = runson.judge(one, driver, needs, facts.load())
        except errors.UsageError:  # a driver that is named in no way that we know: the test will tell
            return ""
        return f"{one.name}: {'; '.join(verdict.reasons)}" if verdict.runs is False else ""

    def _gpu_files(self, image: PlannedImage) -> list[Path]:
        """Tests of its components, where they have any."""
        files = [self._project.root / f"tests/gpu/test_{name}.py" for name in image.components]
        return [path for path in files if path.is_file()]

    def _run(
        self,
        image: PlannedImage,
        image_id: str,
        files: list[Path],
        kind: str,
        gpus: Sequence[Gpu] = (),
        figures: list[dict[str, Any]] | None = None,
        not_applicable: list[str] | None = None,
    ) -> tuple[list[str], list[str], Path]:
        """Names of tests that passed and of those that did not; the log.

        What GPU tests measured is added to `figures`, those with nothing to check to `not_applicable`.
        """
        log_path = self._project.logs / f"{image.id}.{kind}.log"
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with self._project.scratch() as scratch:
            subject, report = Path(scratch) / "image.json", Path(scratch) / "report.jsonl"
            subject.write_text(json.dumps(describe(image, image_id, str(self._project.root))), encoding="utf-8")
            command = [
                sys.executable, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider", "--rootdir",
                str(self._project.root), f"--basetemp={scratch}/pytest", *(str(path) for path in files),
            ]  # fmt: skip
            environment = {
                **os.environ,
                "DOCKER_HOST": os.environ.get("DOCKER_HOST", SOCKET),  # the engine that we ask, whatever the context
                "PYTEST_ADDOPTS": "",  # a person's own options must not leave tests out
                "IMAGE_TEST_SUBJECT": str(subject),
                "IMAGE_TEST_REPORT": str(report),
                "IMAGE_TEST_GPUS": ",".join(one.uuid or str(one.index) for one in gpus),
                "IMAGE_TEST_FIGURES": str(Path(scratch) / "figures.jsonl"),
            }
            with log_path.open("w", encoding="utf-8") as log:
                child = subprocess.Popen(
                    command, cwd=self._project.root, env=environment, text=True,
                    stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                )  # fmt: skip
                with self._lock:
                    self._children.add(child)
                timer = threading.Timer(TIMEOUT_S, child.kill)
                timer.start()
                try:
                    assert child.stdout is not None
                    for line in child.stdout:
                        log.write(self._hide(line))
                        if "::" in line and self._view.is_live:
                            self._view.note(image.id, self._hide(line.split("::", 1)[1].strip()))
                    status = child.wait()
                finally:
                    timer.cancel()
                    child.kill()
                    with self._lock:
                        self._children.discard(child)
            passed, failed = outcome(report, status)
            if figures is not None:
                figures += _lines(Path(scratch) / "figures.jsonl")
            if not_applicable is not None:
                not_applicable += [one["test"] for one in _lines(report) if one["outcome"] == NOT_APPLICABLE]
            return passed, failed + untested(files, self._project.root, passed + failed), log_path


def describe(image: PlannedImage, image_id: str, checkout: str) -> dict[str, object]:
    """What the tests are told of their subject."""
    return {
        "image_id": image_id,
        "checkout": checkout,
        "cell": asdict(image.cell),
        "id": image.id,
        "plan": image.digest,
        "lock": image.lock,
        "components": list(image.components),
        "references": list(image.references),
        "requirements": image.requirements,
        "wheels": {wheel.name: wheel.version for wheel in image.wheels},
        "cuda_wheels": [wheel.name for wheel in image.wheels if wheel.component == "cuda"],
    }


def untested(files: list[Path], root: Path, tests: list[str]) -> list[str]:
    """Of these test files, those that had no test: a component that was not tested has not passed."""
    names = [path.relative_to(root).as_posix() for path in files]
    return [f"{name}: no test" for name in names if not any(test.startswith(f"{name}::") for test in tests)]


def outcome(report: Path, status: int) -> tuple[list[str], list[str]]:
    """Passed and not passed tests from the report that tests/images/conftest.py writes, one JSON line each.

    A test run that ended badly without naming a failed test (killed, collection error) is itself a failure. A GPU test
    that had nothing to check is neither passed nor failed.
    """
    results: dict[str, bool] = {}
    for entry in _lines(report):
        if entry["outcome"] != NOT_APPLICABLE:
            results[entry["test"]] = results.get(entry["test"], True) and entry["outcome"] == "passed"
    passed = [name for name, good in results.items() if good]
    failed = [name for name, good in results.items() if not good]
    if status != 0 and not failed:
        failed.append(f"the test run itself (pytest ended with status {status})")
    return passed, failed


def _lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines that tests wrote; without the last if the run was killed while it wrote, which its status says too."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def _no_gpu_test(images: str, reason: str) -> ImageTestError:
    return ImageTestError(
        f"{images}: --gpu require, and GPU tests cannot run: {reason}",
        hint="`builder doctor` shows this machine's GPUs; `--gpu auto` builds, and says `gpu: not run`.",
    )
