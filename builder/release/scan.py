"""Scans images for vulnerabilities: runs the scanner of matrix.yaml on their SBOM.

The scanner alone decides, by its exit status: 0 accepts the image.
"""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

from builder.common.errors import RefusedError, VerifyError
from builder.common.text import Redactor, duration, one_line, printable
from builder.matrix.project import Project
from builder.matrix.schema import SBOM, Scan

PASSED, UNSCANNED = "passed", "unscanned"
SHOWN_LINES = 15


class Scanner:
    """Runs the scanner of matrix.yaml in the checkout, where it finds its own settings. Thread-safe.

    It is killed after `timeout_s` seconds.
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
            path, output, messages = (Path(folder) / name for name in ("sbom.json", "output", "messages"))
            path.write_bytes(sbom)
            # Files, as a child of the scanner could keep pipes open after a timeout.
            with output.open("wb") as out, messages.open("wb") as err:
                try:
                    status = subprocess.run(
                        [word.replace(SBOM, str(path)) for word in self._settings.command],
                        cwd=self._project.root, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
                        timeout=self.timeout_s, check=False,
                    ).returncode  # fmt: skip
                except subprocess.TimeoutExpired:
                    pass  # what it printed until then is shown below
                except OSError as error:
                    raise VerifyError(
                        f"{cell}: {program}: {(error.strerror or str(error)).lower()}",
                        hint="Install the scanner, or correct `scan.command` in matrix.yaml.",
                    ) from error
            printed = b"\n".join([output.read_bytes(), messages.read_bytes()])
        text = Redactor()(printable(printed.decode(errors="replace")))
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
