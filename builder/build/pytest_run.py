"""Runs test files of an image in a pytest process of their own, and reads the results.

The digest of this module is part of every test result (see `builder.evidence.suite`), because it decides what a pass
is: after a change here, all images must be tested again. So it has nothing else. Which tests run, on which GPU, and
the messages are in `builder.build.image_tests`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from builder.build.programs import Program, Programs
from builder.common.text import one_line
from builder.engine.client import RUN_LABEL
from builder.evidence.suite import NOT_APPLICABLE
from builder.plan.plan import PlannedImage

TIMEOUT_S = 1800


def describe(image: PlannedImage, image_id: str, checkout: str) -> dict[str, object]:
    """The image under test, for tests/images/conftest.py."""
    return {
        "image_id": image_id,
        "labels": {RUN_LABEL: checkout},
        "cell": asdict(image.cell),
        "id": image.id,
        "plan": image.plan,
        "components": list(image.components),
        "thorough": sorted(image.thorough),
        "references": list(image.references),
        "requirements": image.requirements,
        "wheels": {wheel.name: wheel.version for wheel in image.wheels},
        "cuda_wheels": [wheel.name for wheel in image.wheels if wheel.is_cuda],
    }


@dataclass(frozen=True, kw_only=True)
class Results:
    """Names of tests by their outcome. `seconds` are durations by test, `reasons` the first line of each failure.

    `figures` are what GPU tests measured.
    """

    passed: tuple[str, ...]
    failed: tuple[str, ...]
    not_applicable: tuple[str, ...]
    seconds: dict[str, float]
    reasons: dict[str, str]
    figures: tuple[dict[str, Any], ...]


@dataclass(frozen=True, kw_only=True)
class PytestRun:
    """Test files of the checkout `root` for the image that `subject` describes.

    `options` go to pytest, `variables` tell docker-py where the engine is.
    """

    root: Path
    files: Sequence[Path]
    subject: Mapping[str, object]
    options: Sequence[str]
    variables: Mapping[str, str]
    log: Path

    def run(self, programs: Programs, scratch: Path, on_line: Callable[[str], str]) -> Results:
        """Runs the tests in `scratch`, an empty folder; `on_line` is as for `Programs.run`."""
        described, report, figures = (scratch / name for name in ("image.json", "report.jsonl", "figures.jsonl"))
        described.write_text(json.dumps(self.subject), encoding="utf-8")
        command = [
            sys.executable, "-m", "pytest", "-v", "--color=no", "-p", "no:cacheprovider", "--rootdir", str(self.root),
            f"--basetemp={scratch}/pytest", "--durations=10", *map(str, self.files), *self.options,
        ]  # fmt: skip
        environment = {
            **os.environ,
            **self.variables,
            "PYTEST_ADDOPTS": "",  # a user's options must not leave tests out
            # No plugins either: importing all plugins of this environment takes 0.8 s.
            "PYTEST_PLUGINS": "",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTEST_XDIST_WORKER": "",  # set if tests of this program run it
            "IMAGE_TEST_SUBJECT": str(described),
            "IMAGE_TEST_REPORT": str(report),
            "IMAGE_TEST_FIGURES": str(figures),
        }
        program = Program(command=command, environment=environment, folder=self.root, log=self.log, timeout_s=TIMEOUT_S)
        status = programs.run(program, on_line)
        return read_results(report, figures, status, self.files, self.root)


def read_results(report: Path, figures: Path, status: int, files: Sequence[Path], root: Path) -> Results:
    """The results in the report that tests/images/conftest.py writes, one JSON line for each phase of a test.

    `status` is that of pytest. A test run that ended badly without naming a failed test (killed, collection error) is
    itself a failure, and so is a file of `files` without a test: a component that was not tested has not passed.
    """
    results: dict[str, bool] = {}
    reasons: dict[str, str] = {}
    seconds: dict[str, float] = {}
    not_applicable: list[str] = []
    for entry in _lines(report):
        seconds[entry["test"]] = entry.get("seconds", 0.0)
        if reason := entry.get("reason"):
            reasons.setdefault(entry["test"], one_line(reason))  # it may quote the output of an image
        if entry["outcome"] == NOT_APPLICABLE:
            not_applicable.append(entry["test"])
        else:
            results[entry["test"]] = results.get(entry["test"], True) and entry["outcome"] == "passed"
    failed = [name for name, is_pass in results.items() if not is_pass]
    if status != 0 and not failed:
        failed.append(f"the test run itself (pytest ended with status {status})")
    for name in (path.relative_to(root).as_posix() for path in files):
        if not any(test.startswith(f"{name}::") for test in results):
            failed.append(f"{name}: no test")
    return Results(
        passed=tuple(name for name, is_pass in results.items() if is_pass),
        failed=tuple(failed),
        not_applicable=tuple(not_applicable),
        seconds=seconds,
        reasons=reasons,
        figures=tuple(_lines(figures)),
    )


def _lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines that tests wrote, without a line that was cut off when the tests were killed."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines
