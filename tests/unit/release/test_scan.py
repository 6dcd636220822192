"""Scans for vulnerabilities: the exit status of the scanner decides, and a failure is never a pass."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import pytest

from builder.common.errors import RefusedError, VerifyError
from builder.common.files import digest_of_bytes
from builder.layers.blobs import MANIFEST_TYPE, Descriptor
from builder.matrix.project import Project
from builder.matrix.schema import Scan
from builder.registry import artifacts
from builder.registry.client import Repository
from builder.release import scan
from builder.release.scan import ImageScan, Scanner, ScanRecord
from tests.fakes import registry as registry_fakes
from tests.fakes.registry import MemoryRegistry
from tests.fakes.scanners import with_scanner

CELL = "qz-0.5-cu129-py311"
PASS = "import json, sys; json.load(open(sys.argv[1].removeprefix('sbom:'))); print('no matches')"

pytestmark = pytest.mark.usefixtures("programs")


class Desk:
    """A registry with an image, and a checkout."""

    def __init__(self, project: Project) -> None:
        self.project, self.registry = project, MemoryRegistry()
        self.digest = self.registry.put_manifest("2.9", b'{"layers": []}', MANIFEST_TYPE)
        self.image = Descriptor(media_type=MANIFEST_TYPE, digest=self.digest, size=14)

    def scanner(self, code: str) -> Scanner:
        project = with_scanner(self.project, code)
        assert project.matrix.scan
        return Scanner(project, project.matrix.scan)

    def scan(self, code: str) -> ImageScan:
        return self.scanner(code).scan_sbom(CELL, self.digest, b"{}")

    def attach(self, image_scan: ImageScan) -> dict[str, bytes]:
        """The documents that are attached."""
        registry = cast("Repository", self.registry)
        with artifacts.attaching(registry, self.image) as attachments:
            image_scan.add_to(attachments)
        [documents] = registry_fakes.documents(registry, self.digest, scan.TYPE)
        return documents


@pytest.fixture
def desk(tiny: Project) -> Desk:
    return Desk(tiny)


def test_an_accepted_image_gets_what_the_scanner_printed_and_the_record(desk: Desk) -> None:
    documents = desk.attach(desk.scan(f"{PASS}; print('database of today', file=sys.stderr)"))
    assert documents[scan.OUTPUT_TYPE] == b"no matches\n"
    record = ScanRecord.model_validate_json(documents[scan.TYPE])
    assert (record.image, record.exit_status, record.output) == (desk.digest, 0, digest_of_bytes(b"no matches\n"))
    assert record.command[1:] == ("scanner.py", "sbom:{sbom}"), "without a path of this machine"


def test_of_a_refused_image_the_end_of_the_output_is_shown(desk: Desk) -> None:
    code = (
        "import sys\n"
        "for number in range(100): print(f'CVE-{number}')\n"
        "print('\\x1b[2Jat https://me:secret@example.test/', file=sys.stderr)\n"
        "sys.exit(2)\n"
    )
    with pytest.raises(RefusedError) as caught:
        desk.scan(code)
    first, *lines = str(caught.value).splitlines()
    assert re.fullmatch(rf"{CELL}: refused by \S+ \(exit status 2\)", first)
    assert lines == [*(f"  | CVE-{number}" for number in range(86, 100)), "  | at https://example.test/"]
    log = desk.project.logs / f"{CELL}.scan.log"
    assert caught.value.hint.endswith(f"Full output: {log}")
    assert len(log.read_text("utf-8").split()) == 102


@pytest.mark.parametrize(
    ("code", "timeout_s", "message"),
    [
        ("import os; print('halfway', flush=True); os.kill(os.getpid(), 9)", 60, "ended by signal 9\n  | halfway"),
        ("import time; time.sleep(60)", 0.5, "no result within 0.5 s"),
    ],
)
def test_a_scanner_without_a_result_is_an_error(desk: Desk, code: str, timeout_s: float, message: str) -> None:
    scanner = desk.scanner(code)
    scanner.timeout_s = timeout_s
    with pytest.raises(VerifyError) as caught:
        scanner.scan_sbom(CELL, desk.digest, b"{}")
    assert message in str(caught.value)


def test_a_scanner_that_is_not_installed_is_an_error(desk: Desk) -> None:
    scanner = Scanner(desk.project, Scan(command=["no-such-scanner", "{sbom}"]))
    with pytest.raises(VerifyError, match=f"^{CELL}: no-such-scanner: no such file or directory"):
        scanner.scan_sbom(CELL, desk.digest, b"{}")


def test_a_scanner_that_prints_nothing_attaches_no_empty_blob(desk: Desk) -> None:
    assert list(desk.attach(desk.scan(""))) == [scan.TYPE]


def test_the_scanner_finds_its_settings_in_the_checkout(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran in the folder of the command, where it would not find its ignore file."""
    (desk.project.root / ".scanner.yaml").write_text("ignore: [CVE-1]\n", encoding="utf-8")
    monkeypatch.chdir("/")
    assert desk.scan("print(open('.scanner.yaml').read())").output == b"ignore: [CVE-1]\n\n"


def test_no_more_scans_run_at_a_time_than_parallel_allows(desk: Desk) -> None:
    """trivy locks its cache. The test of `release` with `parallel: 2` has scans that wait for each other."""
    scanner = desk.scanner("import os, time; os.mkdir('busy'); time.sleep(0.3); os.rmdir('busy')")
    with ThreadPoolExecutor(2) as pool:
        scans = list(pool.map(lambda cell: scanner.scan_sbom(cell, desk.digest, b"{}"), ["a", "b"]))
    assert [each.record.exit_status for each in scans] == [0, 0]
