"""Runs the GPU checks of an image inside it, one test for each check, on the GPUs that `builder` chose.

A check that has nothing to check on these GPUs is skipped, and reported to `builder` as
`not applicable` with its reason. Any other skipped test has not passed.
"""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from docker.models.containers import Container

from tests.images.conftest import (  # noqa: F401  pytest finds fixtures and hooks by name
    docker_client,
    keep,
    pytest_configure,
    subject,
    write_report,
)
from tests.images.containers import run_in

HERE = Path(__file__).parent
INSIDE = "/tmp/gpu-tests"
NOT_APPLICABLE = "not applicable"  # as in builder/evidence/suite.py
Check = Callable[[str], None]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """As in the image tests, with the outcome `not applicable`."""
    not_applicable = (NOT_APPLICABLE, True) in report.user_properties
    write_report(report, NOT_APPLICABLE if not_applicable else report.outcome)


@pytest.fixture(scope="session")
def container(keep: Callable[..., Container], subject: Any) -> Container:  # noqa: F811
    """A container with these GPUs and the checks. NCCL passes data between processes through /dev/shm."""
    assert subject.data["gpu_options"], "no GPU of this machine's engine"
    new = keep(["sleep", "3600"], shm_size="1g", **subject.data["gpu_options"])
    assert new.put_archive("/tmp", archive())
    return new


def archive() -> bytes:
    """A tar file with run.py and its checks."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path in [HERE / "run.py", *sorted((HERE / "checks").glob("*.py"))]:
            tar.add(path, f"{Path(INSIDE).name}/{path.relative_to(HERE)}")
    return out.getvalue()


@pytest.fixture(scope="module")
def results(subject: Any, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:  # noqa: F811
    """The results of the checks of a module's tests, by name. One run for all: importing a framework takes seconds.

    If a command of matrix.yaml ran the checks, `subject` has what they found, and there is no container.
    """
    framework = request.path.stem.removeprefix("test_")
    if "report" in subject.data:
        report = subject.data["report"]
        data = {**report, "results": [each for each in report["results"] if each["framework"] == framework]}
    else:
        data = results_in_container(request, framework)
    with Path(os.environ["IMAGE_TEST_FIGURES"]).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(data) + "\n")
    return {result["check"]: result for result in data["results"]}


def results_in_container(request: pytest.FixtureRequest, framework: str) -> dict[str, Any]:
    """What run.py finds in a container of this machine's engine."""
    command = ["python", f"{INSIDE}/run.py", "--framework", framework, "--json", "-"]
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.path == request.path:
            command += ["--only", str(item.callspec.params["name"])]
    status, out, log = run_in(request.getfixturevalue("container"), command)
    print(log)
    assert out, f"run.py ended with status {status}:\n{log[-3000:]}"
    data: dict[str, Any] = json.loads(out)
    return data


@pytest.fixture
def check(results: dict[str, dict[str, Any]], record_property: Callable[[str, object], None]) -> Check:
    """A function that fails or skips the test by the result of its check in the image."""

    def run(name: str) -> None:
        if results[name]["state"] == NOT_APPLICABLE:
            record_property(NOT_APPLICABLE, True)
            pytest.skip(results[name]["detail"])
        assert results[name]["state"] == "passed", results[name]["detail"]

    return run
