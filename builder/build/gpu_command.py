"""Runs the GPU checks of a staged image by the command of matrix.yaml, such as `srun`, on another machine.

In the image, the command runs tests/gpu/inside.py, which returns the results of the checks, and an inventory of the
image. Missing results, results without a GPU and results of another image are errors, and leave no evidence.
"""

from __future__ import annotations

import base64
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from builder.build.programs import Program, Programs
from builder.common.errors import ImageTestError
from builder.common.files import digest_of_data
from builder.common.text import Redactor, duration, listed, one_line, secret_values
from builder.evidence.suite import GPU_TESTS
from builder.layers.estargz import TocEntry
from builder.layers.oci import Printable
from builder.matrix.project import Project
from builder.matrix.schema import COMMAND, IMAGE, RESULTS, TESTS, WORD_PLACEHOLDER

PYTHON = "/opt/venv/bin/python"
MOUNTED_TESTS, MOUNTED_RESULTS = "/tests", "/results"  # where the command mounts the two folders
MARKER, FILE = "gpu-images-results:", "results.json"  # as in tests/gpu/inside.py, whose INVENTORY are these files:
_INVENTORY = re.compile(
    r"var/lib/dpkg/status|etc/pip/constraints\.txt|(etc/variables\.d|usr/local/bin)/[^/]+|usr/local/lib/.+\.py"
    r"|opt/venv/lib/python/site-packages/[^/]+\.dist-info/RECORD"
)
# Without a folder, the tests are in the command itself: standard input does not reach a Job of Kubernetes.
_UNPACK = (
    "import base64,io,shutil,subprocess,sys,tarfile,tempfile;d=tempfile.mkdtemp();"
    "tarfile.open(fileobj=io.BytesIO(base64.b64decode('{archive}'))).extractall(d);"
    "r=subprocess.call([sys.executable,'-I',d+'/inside.py',*sys.argv[1:]]);shutil.rmtree(d);sys.exit(r)"
)
LONGEST_WORD = 128 << 10  # bytes: MAX_ARG_STRLEN of Linux
SHOWN_LINES = 15


class _Device(BaseModel, extra="allow"):
    name: Printable
    capability: str


class _Result(BaseModel, extra="allow"):
    framework: str
    check: str


class Report(BaseModel, extra="allow"):
    """The report of tests/gpu/run.py, of which only these fields are checked here."""

    driver: Printable
    devices: list[_Device]
    results: list[_Result]


class FoundInside(BaseModel):
    """The results of tests/gpu/inside.py. `inventory` is the SHA-256 of files of the image, by path."""

    kernel: Printable
    inventory: dict[Printable, str]
    report: Report


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

    def __init__(self, words: Sequence[str], hosts: tuple[str, ...]) -> None:
        """`hosts` are hidden in logs and messages."""
        self._words = words
        self.hide = Redactor(hosts, secret_values(words, os.environ))
        self.shown = shlex.join(map(self.hide, words))

    def run(
        self, image: str, target: StagedTarget, files: Iterable[Path], project: Project, programs: Programs, log: Path
    ) -> FoundInside:
        """Runs the checks of test files in an image. Raises ImageTestError without valid results."""
        frameworks = [path.stem.removeprefix("test_") for path in files]
        lines: deque[str] = deque(maxlen=SHOWN_LINES)
        packed = ""

        def on_line(line: str) -> str:
            nonlocal packed
            before, marker, after = line.partition(MARKER)
            if marker:
                packed = after.strip()
                return f"{self.hide(before)}{marker} ...\n"
            line = self.hide(line)
            if line.strip():
                lines.append(f"  | {one_line(line.strip())}")
            return line

        try:
            with project.scratch() as scratch:
                words = self._prepare(Path(scratch), project.root / GPU_TESTS, target.reference, frameworks)
                program = Program(
                    command=words, environment=os.environ, folder=project.root, log=log,
                    timeout_s=self.timeout_s, grace_s=self.grace_s,
                )  # fmt: skip
                began = time.monotonic()
                status = programs.run(program, on_line)
                if programs.stopped:
                    raise ImageTestError(f"{image}: the tests were interrupted")
                if time.monotonic() - began >= self.timeout_s:
                    raise _NoResultsError(f"not finished within {duration(self.timeout_s)}")
                if status:
                    raise _NoResultsError(f"exit status {status}" if status > 0 else f"ended by signal {-status}")
                found = self._read(packed, Path(scratch) / "results" / FILE)
            self._check(found, target, frameworks, project.root / GPU_TESTS)
        except (_NoResultsError, OSError) as error:
            reason = (error.strerror or str(error)).lower() if isinstance(error, OSError) else str(error)
            raise ImageTestError(
                "\n".join([f"{image}: `{self.shown}` gave no results of GPU tests: {self.hide(reason)}", *lines]),
                hint="If a node failed, run the same command again. If not, correct `test.gpu_command` in matrix.yaml. "
                f"Full output: {log}",
            ) from error
        return found

    def machine(self, found: FoundInside) -> dict[str, str]:
        """The command, and the machine that it ran the tests on, as evidence names them."""
        devices = found.report.devices
        return {
            "command": self.shown,
            "inventory": digest_of_data(found.inventory),
            "kernel": found.kernel,
            "gpu": ", ".join(sorted({device.name for device in devices})),
            "gpus": str(len(devices)),
            "driver": found.report.driver,
        }

    def _has(self, placeholder: str) -> bool:
        return any(placeholder in WORD_PLACEHOLDER.findall(word) for word in self._words)

    def _prepare(self, scratch: Path, tests: Path, reference: str, frameworks: Sequence[str]) -> list[str]:
        """Writes the folders with the tests and for the results; returns the words with all values."""
        folder, results = scratch / "tests", scratch / "results"
        shutil.copytree(tests, folder, ignore=shutil.ignore_patterns("test_*", "conftest.py", "__pycache__"))
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w:gz") as tar:
            tar.add(folder, ".")
        inside = ["-c", _UNPACK.format(archive=base64.b64encode(out.getvalue()).decode())]
        if self._has(TESTS):
            inside = [f"{MOUNTED_TESTS}/inside.py"]
        elif len(inside[1]) >= LONGEST_WORD:
            raise _NoResultsError(f"{GPU_TESTS} is too large for a word of the command: mount it with {TESTS}")
        results.mkdir()
        results.chmod(0o777)  # for another user in the container; no other user can enter the folder above
        inside = [PYTHON, "-I", *inside, *(["--results", MOUNTED_RESULTS] if self._has(RESULTS) else []), *frameworks]
        values = {IMAGE: reference, COMMAND: shlex.join(inside), TESTS: str(folder), RESULTS: str(results)}
        words: list[str] = []
        for word in self._words:
            filled = WORD_PLACEHOLDER.sub(lambda match: values[match[0]], word)
            words += inside if word == COMMAND else [filled]
        return words

    def _read(self, packed: str, file: Path) -> FoundInside:
        """The results, from the last line or the file of the tests. Raises _NoResultsError."""
        try:
            if packed or self._has(RESULTS):
                text = file.read_bytes() if self._has(RESULTS) else zlib.decompress(base64.b64decode(packed))
                return FoundInside.model_validate_json(self.hide(text.decode()))
        except FileNotFoundError:
            raise _NoResultsError(f"{RESULTS} has no file {FILE}") from None
        except (ValueError, zlib.error) as error:
            raise _NoResultsError("the results are incomplete or damaged") from error
        raise _NoResultsError(f"its output has no line `{MARKER} ...`")

    def _check(self, found: FoundInside, target: StagedTarget, frameworks: Sequence[str], tests: Path) -> None:
        """Raises _NoResultsError unless all checks ran in this image, on a GPU."""
        paths = sorted({*found.inventory, *target.inventory})
        if other := [path for path in paths if found.inventory.get(path) != target.inventory.get(path)]:
            raise _NoResultsError(f"it ran another image than {target.reference}, with other files: {listed(other, 3)}")
        if not found.report.devices:
            raise _NoResultsError("the tests found no GPU")
        options = [word for framework in frameworks for word in ("--framework", framework)]
        listing = subprocess.run(
            [sys.executable, str(tests / "run.py"), "--list", *options], capture_output=True, text=True, check=False
        )
        if listing.returncode:
            raise _NoResultsError(f"{GPU_TESTS}/run.py --list: {one_line(listing.stderr.strip())}")
        there = {f"{result.framework} {result.check}" for result in found.report.results}
        names = [" ".join(line.split()[:2]) for line in listing.stdout.splitlines()]
        if missing := [name for name in names if name not in there]:
            raise _NoResultsError(f"it lacks results of checks: {listed(missing, 3)}")
