"""Runs the GPU checks of a staged image by the command of matrix.yaml, such as `srun`, on another machine.

In the image, the command runs tests/gpu/inside.py, which returns the results of the checks, and an inventory of the
image. Missing results, results without a GPU and results of another image are errors, and leave no evidence.
"""

from __future__ import annotations

import base64
import io
import os
import re
import secrets
import shlex
import subprocess
import sys
import tarfile
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from builder.build.programs import Program, Programs, last_lines
from builder.common.errors import ImageTestError
from builder.common.files import digest_of_data
from builder.common.text import Redactor, duration, listed, one_line, printable, secret_values
from builder.evidence.suite import GPU_TESTS, Suite
from builder.layers.estargz import TocEntry
from builder.layers.oci import Printable
from builder.matrix.project import Project
from builder.matrix.schema import COMMAND, IMAGE, WORD_PLACEHOLDER

PYTHON = "/opt/venv/bin/python"
MARKER = "gpu-images-results:"  # as in tests/gpu/inside.py
# The same files as INVENTORY in tests/gpu/inside.py.
_INVENTORY = re.compile(
    r"var/lib/dpkg/status|etc/pip/constraints\.txt|(etc/variables\.d|usr/local/bin)/[^/]+|usr/local/lib/.+\.py"
    r"|opt/venv/lib/python/site-packages/[^/]+\.dist-info/RECORD"
)
# The tests are in the command itself: standard input does not reach a Job of Kubernetes.
_UNPACK = (
    "import base64,io,shutil,subprocess,sys,tarfile,tempfile;d=tempfile.mkdtemp();"
    "tarfile.open(fileobj=io.BytesIO(base64.b64decode('{archive}'))).extractall(d);"
    "r=subprocess.call([sys.executable,'-I',d+'/inside.py',*sys.argv[1:]]);shutil.rmtree(d);sys.exit(r)"
)
_NOT_INSIDE = ("test_*", "conftest.py")  # tests of this machine
LONGEST_WORD = 128 << 10  # bytes: MAX_ARG_STRLEN of Linux
SHOWN_LINES = 15


class _ReportedDevice(BaseModel, extra="allow"):
    name: Printable
    capability: Annotated[str, Field(pattern=r"^([0-9]{1,3}\.[0-9]{1,3})?$")]


class _Result(BaseModel, extra="allow"):
    framework: str
    check: str
    state: Literal["passed", "failed", "not applicable"]
    detail: str


class ChecksReport(BaseModel, extra="allow"):
    """The report of tests/gpu/run.py, of which only these fields are checked here."""

    driver: Printable
    devices: list[_ReportedDevice]
    results: list[_Result]


class GpuResults(BaseModel):
    """The results of tests/gpu/inside.py, with the SHA-256 of the tests and of files of the image, by path.

    `run` is the word that the command passed to it.
    """

    run: str
    tests: dict[Printable, str]
    kernel: Printable
    inventory: dict[Printable, str]
    report: ChecksReport


class _NoResultsError(Exception):
    """The command gave no valid results; the message has the reason."""


@dataclass(frozen=True, kw_only=True)
class StagedTarget:
    """A staged image by its reference, and the inventory that a container of it must have."""

    reference: str
    inventory: Mapping[str, str]


def inventory_of(files: Mapping[str, TocEntry]) -> dict[str, str]:
    """The SHA-256 of the files that list the contents of an image, by path; without empty files and links."""
    return {
        path: entry.digest.removeprefix("sha256:")
        for path, entry in files.items()
        if entry.type == "reg" and entry.size and _INVENTORY.fullmatch(path)
    }


class GpuCommand:
    """The command for GPU tests of a project. Several threads may run it at the same time.

    It gets SIGTERM after `timeout_s` seconds, and SIGKILL `grace_s` seconds later.
    """

    timeout_s: float = 5 * 3600  # a job may wait in the queue of a cluster; the job in ci.yml has an hour more
    grace_s: float = 30  # srun cancels its job in this time, and Podman ends its container

    def __init__(self, words: Sequence[str], hosts: tuple[str, ...], folder: Path) -> None:
        """The command runs in `folder`. `hosts` are hidden in logs and messages."""
        self._words, self._folder = words, folder
        self.run_id = secrets.token_hex(8)  # results of an earlier run have another one
        self.hide = Redactor(hosts, secret_values(words, os.environ))
        self.shown = shlex.join(map(self.hide, words))

    def run(
        self, image: str, target: StagedTarget, files: Iterable[Path], project: Project, programs: Programs,
        suite: Suite,
    ) -> GpuResults:  # fmt: skip
        """Runs the checks of test files of a suite in an image. Raises ImageTestError without valid results."""
        frameworks = [path.stem.removeprefix("test_") for path in files]
        log = project.logs / f"{image}.gpu-command.log"
        packed: list[str] = []

        def on_line(line: str) -> str:
            before, marker, after = line.partition(MARKER)
            if marker:
                packed.append(after.strip())
                return f"{self.hide(before)}{marker} ...\n"
            return self.hide(line)

        try:
            checks = self._checks(project.root / GPU_TESTS, frameworks)
            words = self._fill(project.root / GPU_TESTS, target.reference, frameworks)
            # srun passes its environment on to the nodes.
            environment = {name: value for name, value in os.environ.items() if name != "COSIGN_PASSWORD"}
            program = Program(
                command=words, environment=environment, folder=self._folder, log=log,
                timeout_s=self.timeout_s, grace_s=self.grace_s,
            )  # fmt: skip
            began = time.monotonic()
            status = programs.run(program, on_line)
            if programs.stopped.is_set():
                raise ImageTestError(f"{image}: the tests were interrupted")
            if time.monotonic() - began >= self.timeout_s:
                raise _NoResultsError(f"not finished within {duration(self.timeout_s)}")
            if status:
                raise _NoResultsError(f"exit status {status}" if status > 0 else f"ended by signal {-status}")
            gpu_results = self._read(packed)
            self._check(gpu_results, target, suite, checks)
        except (_NoResultsError, OSError) as error:
            reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
            raise ImageTestError(
                f"{image}: `{self.shown}` gave no results of GPU tests: {self.hide(reason)}\n"
                f"{last_lines(log, SHOWN_LINES)}".rstrip(),
                hint="If a node failed, run the same command again. If not, correct `test.gpu_command` in matrix.yaml. "
                f"Full output: {log.resolve()}",
            ) from error
        return gpu_results

    def machine(self, gpu_results: GpuResults) -> dict[str, str]:
        """The command, and the machine that it ran the tests on, as evidence names them."""
        devices = gpu_results.report.devices
        return {
            "command": self.shown,
            "inventory": digest_of_data(gpu_results.inventory),
            "kernel": gpu_results.kernel,
            "gpu": ", ".join(sorted({device.name for device in devices})),
            "gpus": str(len(devices)),
            "driver": gpu_results.report.driver,
        }

    def _fill(self, tests: Path, reference: str, frameworks: Sequence[str]) -> list[str]:
        """The words of the command, with the tests in them."""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz") as tar:
            tar.add(tests, ".", filter=_inside)
        program = _UNPACK.format(archive=base64.b64encode(out.getvalue()).decode())
        if len(program) >= LONGEST_WORD:
            raise _NoResultsError(
                f"{GPU_TESTS} does not fit into one argument of the command (128 KiB): make it smaller"
            )
        inside = [PYTHON, "-I", "-c", program, "--run", self.run_id, *frameworks]
        values = {IMAGE: reference, COMMAND: shlex.join(inside)}
        words: list[str] = []
        for word in self._words:
            filled = WORD_PLACEHOLDER.sub(lambda match: values[match[0]], word)
            words += inside if word == COMMAND else [filled]
        return words

    def _read(self, packed: Sequence[str]) -> GpuResults:
        """What the tests found, from their last line. Raises _NoResultsError."""
        if len(packed) > 1:
            raise _NoResultsError("several tasks gave results: let the command run one")
        if not packed:
            raise _NoResultsError(f"its output has no line `{MARKER} ...`")
        try:
            gpu_results = GpuResults.model_validate_json(zlib.decompress(base64.b64decode(packed[0])))
            report = ChecksReport.model_validate(self._without_secrets(gpu_results.report.model_dump()))
        except (ValueError, zlib.error) as error:
            raise _NoResultsError("the results are incomplete or damaged") from error
        return gpu_results.model_copy(update={"report": report})

    def _without_secrets(self, value: Any) -> Any:
        """A value of JSON whose texts can be printed and have no secret."""
        if isinstance(value, str):
            return printable(self.hide(value))
        if isinstance(value, dict):
            return {printable(name): self._without_secrets(item) for name, item in value.items()}
        return [self._without_secrets(item) for item in value] if isinstance(value, list) else value

    def _check(self, gpu_results: GpuResults, target: StagedTarget, suite: Suite, checks: Sequence[str]) -> None:
        """Raises _NoResultsError unless this run ran the tests of this suite in this image, on a GPU, each once."""
        if gpu_results.run != self.run_id:
            raise _NoResultsError("the results are of another run")
        tests = {
            name.removeprefix(f"{GPU_TESTS}/"): digest.removeprefix("sha256:")
            for name, digest in suite.files.items()
            if name.startswith(f"{GPU_TESTS}/") and not any(fnmatch(PurePath(name).name, glob) for glob in _NOT_INSIDE)
        }
        if other := _differing(tests, gpu_results.tests):
            raise _NoResultsError(f"it ran other tests than those of the checkout: {other}")
        if other := _differing(target.inventory, gpu_results.inventory):
            raise _NoResultsError(f"it ran another image than {target.reference}, with other files: {other}")
        if not gpu_results.report.devices:
            raise _NoResultsError("the tests found no GPU")
        there = [f"{result.framework} {result.check}" for result in gpu_results.report.results]
        if missing := [name for name in checks if name not in there]:
            raise _NoResultsError(f"it lacks results of checks: {listed(missing, 3)}")
        if len(there) != len(checks):
            raise _NoResultsError(f"it has {len(there)} results of {len(checks)} checks")

    def _checks(self, tests: Path, frameworks: Sequence[str]) -> list[str]:
        """The checks of frameworks: `pytorch matmul`. Raises _NoResultsError for a framework without checks."""
        options = [word for framework in frameworks for word in ("--framework", framework)]
        listing = subprocess.run(
            [sys.executable, str(tests / "run.py"), "--list", *options], capture_output=True, text=True, check=False
        )
        if listing.returncode:
            raise _NoResultsError(f"{GPU_TESTS}/run.py --list: {one_line(listing.stderr.strip()[-300:])}")
        return [" ".join(line.split()[:2]) for line in listing.stdout.splitlines()]


def _differing(expected: Mapping[str, str], gpu_results: Mapping[str, str]) -> str:
    """The first paths with different hashes; empty if there are none."""
    return listed(
        [path for path in sorted({*expected, *gpu_results}) if expected.get(path) != gpu_results.get(path)], 3
    )


def _inside(file: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """A file of the tests as the image gets it, or None. A checkout may be closed to the user of the image."""
    if any(fnmatch(PurePath(file.name).name, glob) for glob in (*_NOT_INSIDE, "__pycache__")):
        return None
    file.mode |= 0o555 if file.isdir() else 0o444
    return file
