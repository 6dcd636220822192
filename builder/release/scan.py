"""Scans images for vulnerabilities: runs the scanner of matrix.yaml on their SBOM, and attaches its output.

The scanner alone decides, by its exit status: 0 accepts the image. A release runs it, and never reads a scan from a
registry: those are for people.
"""

from __future__ import annotations

import subprocess
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from pydantic import BaseModel, StrictInt, StringConstraints

from builder.common.errors import RefusedError, VerifyError
from builder.common.files import digest_of_bytes
from builder.common.text import Redactor, duration, one_line, printable
from builder.layers import oci
from builder.layers.oci import Digest
from builder.matrix.project import Project
from builder.matrix.schema import SBOM, Scan
from builder.registry import artifacts
from builder.registry.artifacts import Attachments

TYPE, OUTPUT_TYPE = "application/vnd.gpu-images.scan.v2+json", "text/plain"
SCAN = "urn:gpu-images:scan:2"  # a kind of predicate
PASSED, UNSCANNED = "passed", "unscanned"
SHOWN_LINES = 15


class ScanRecord(BaseModel, extra="forbid", frozen=True):
    """One run of the scanner on an SBOM; `output` is the digest of its standard output."""

    image: Digest
    command: tuple[str, ...]
    exit_status: StrictInt
    time: Annotated[str, StringConstraints(pattern=oci.TIME)]
    output: Digest


@dataclass(frozen=True, kw_only=True)
class ImageScan:
    """The scan of an image that the scanner accepted: its record, and the output of the scanner."""

    record: ScanRecord
    output: bytes

    @property
    def predicate(self) -> bytes:
        """The record, as it is attached and signed."""
        return self.record.model_dump_json().encode()

    def add_to(self, attachments: Attachments) -> None:
        """Adds the record and the output. Raises RegistryError."""
        documents = {TYPE: self.predicate}
        if self.output:  # not every registry stores an empty blob
            documents[OUTPUT_TYPE] = self.output
        attachments.add(TYPE, documents, {artifacts.CREATED: self.record.time})


class Scanner:
    """Runs the scanner of matrix.yaml in the checkout, where it finds its own settings. Thread-safe.

    It is killed after `timeout_s` seconds.
    """

    timeout_s: float = 600

    def __init__(self, project: Project, settings: Scan) -> None:
        self._project, self._settings = project, settings
        self._slots = threading.BoundedSemaphore(settings.parallel)

    def scan_sbom(self, cell: str, image: str, sbom: bytes) -> ImageScan:
        """Scans the SBOM of the image with this digest.

        Raises RefusedError if the scanner refuses it, VerifyError if it gives no result.
        """
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
            printed = output.read_bytes()
            text = Redactor()(printable(b"\n".join([printed, messages.read_bytes()]).decode(errors="replace")))
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
        record = ScanRecord(
            image=image,
            command=tuple(self._settings.command),
            exit_status=status,
            time=f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}",
            output=digest_of_bytes(printed),
        )
        return ImageScan(record=record, output=printed)
