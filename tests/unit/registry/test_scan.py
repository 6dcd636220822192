"""Scans for vulnerabilities: the exit status of the scanner decides, and a failure is never a pass."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, cast

import pytest

from builder.common.console import View
from builder.common.errors import RefusedError, SigningError, UsageError, VerifyError
from builder.common.files import digest_of_bytes
from builder.index.host import Host
from builder.layers import oci
from builder.layers.blobs import MANIFEST_TYPE, Descriptor
from builder.matrix.project import Project
from builder.registry import artifacts, sbom_and_provenance, scan, signing
from builder.registry.client import Registry
from builder.registry.failures import TooLongError
from builder.registry.scan import ImageScan, ReleasedScan, Scanner, ScanRecord
from builder.registry.signing import SIGNATURE_TYPE, Signer
from tests.fakes.engine import MemoryConsole
from tests.fakes.registry import MemoryRegistry
from tests.fakes.scanners import with_scanner

CELL = "qz-0.5-cu129-py311"
OTHER = "sha256:" + "e" * 64
PASS = "import json, sys; json.load(open(sys.argv[1].removeprefix('sbom:'))); print('no matches')"
LARGEST = 100_000  # bytes of a blob that `Limited` reads

pytestmark = pytest.mark.usefixtures("programs")


class Limited(MemoryRegistry):
    """Refuses to read a large blob, as the client does."""

    def read_blob(self, digest: str) -> bytes:
        if len(self.contents[digest]) > LARGEST:
            raise TooLongError("the response is longer than allowed")
        return super().read_blob(digest)


class Desk:
    """A registry with an image that has a tag and an SBOM, and a checkout."""

    def __init__(self, project: Project) -> None:
        self.project, self.registry, self.console = project, Limited(), MemoryConsole()
        [self.cell] = project.select([CELL])
        self.digest = self.registry.put_manifest("2.9", b'{"layers": []}', MANIFEST_TYPE)
        self.image = Descriptor(media_type=MANIFEST_TYPE, digest=self.digest, size=14)
        self.attach(sbom_and_provenance.SBOM_TYPE, self.sbom(self.digest))

    def sbom(self, subject: str) -> bytes:
        return json.dumps({"metadata": {"component": {"bom-ref": subject}}}).encode()

    def attach(self, kind: str, content: bytes) -> None:
        artifacts.attach(cast("Registry", self.registry), self.image, kind, {kind: content})

    def attach_scan(self, day: str, exit_status: int = 0, signer: Signer | None = None, output: bytes = b"") -> None:
        record = ScanRecord(
            image=self.digest,
            command=("scanner",),
            exit_status=exit_status,
            time=f"{day}T00:00:00Z",
            output=digest_of_bytes(output),
        )
        with artifacts.attaching(cast("Registry", self.registry), self.image) as attachments:
            ImageScan(record=record, output=output, refusal=None).add_to(attachments, signer)

    @property
    def scans(self) -> list[dict[str, bytes]]:
        """The documents of each attached scan."""
        return list(artifacts.documents(cast("Registry", self.registry), self.digest, scan.TYPE))

    @property
    def state(self) -> str:
        return scan.newest_scan(self.project, cast("Registry", self.registry), self.digest)

    def sbom_scan(self, code: str, **options: Any) -> ImageScan:
        return Scanner(with_scanner(self.project, code), **options).scan_sbom(CELL, self.digest, b"{}")

    def released_scan(self, code: str, tag: str = "2.9") -> ReleasedScan | None:
        scanner = Scanner(with_scanner(self.project, code))
        return scanner.scan_tag(self.cell, cast("Registry", self.registry), tag, View(self.console))


@pytest.fixture
def desk(tiny: Project, monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(tiny)


def test_an_accepted_image_has_what_the_scanner_printed_and_the_record(desk: Desk) -> None:
    passed = desk.released_scan(f"{PASS}; print('database of today', file=sys.stderr)")
    assert passed
    assert (passed.cell, passed.digest, passed.error) == (CELL, desk.digest, None)
    [documents] = desk.scans
    assert documents[scan.OUTPUT_TYPE] == b"no matches\n"
    record = ScanRecord.model_validate_json(documents[scan.TYPE])
    assert record == passed.record
    assert (record.image, record.exit_status, record.output) == (desk.digest, 0, digest_of_bytes(b"no matches\n"))
    assert record.command[1:] == ("scanner.py", "sbom:{sbom}"), "without a path of this machine"
    assert desk.state == f"passed {record.time[:10]}, unsigned"
    assert f"{CELL}: scanning" in desk.console.text


def test_a_refused_image_is_recorded_and_the_end_of_the_output_is_shown(desk: Desk) -> None:
    code = (
        "import sys\n"
        "for number in range(100): print(f'CVE-{number}')\n"
        "print('\\x1b[2Jat https://me:secret@example.test/', file=sys.stderr)\n"
        "sys.exit(2)\n"
    )
    refused = desk.released_scan(code)
    assert refused
    assert isinstance(refused.error, RefusedError)
    first, *lines = str(refused.error).splitlines()
    assert re.fullmatch(rf"{CELL}: refused by \S+ \(exit status 2\)", first)
    assert lines == [*(f"  | CVE-{number}" for number in range(86, 100)), "  | at https://example.test/"]
    log = desk.project.logs / f"{CELL}.scan.log"
    assert refused.error.hint.endswith(f"Full output: {log}")
    assert len(log.read_text("utf-8").split()) == 102
    assert refused.record
    assert desk.state == f"failed {refused.record.time[:10]}, unsigned"
    assert f"{CELL}: failed in " in desk.console.text


@pytest.mark.parametrize(
    ("code", "timeout_s", "message"),
    [
        ("import os; print('halfway', flush=True); os.kill(os.getpid(), 9)", 60, "ended by signal 9\n  | halfway"),
        ("import time; time.sleep(60)", 0.5, "no result within 0.5 s"),
    ],
)
def test_a_scanner_without_a_result_is_an_error(desk: Desk, code: str, timeout_s: float, message: str) -> None:
    with pytest.raises(VerifyError) as caught:
        desk.sbom_scan(code, timeout_s=timeout_s)
    assert message in str(caught.value)


def test_a_scanner_that_is_not_installed_is_an_error_and_nothing_is_attached(desk: Desk) -> None:
    path = with_scanner(desk.project, PASS).root / "matrix.yaml"
    path.write_text(re.sub(r'\["[^"]+"', '["no-such-scanner"', path.read_text("utf-8"), count=1), encoding="utf-8")
    scanner = Scanner(Project(desk.project.root))
    failed = scanner.scan_tag(desk.cell, cast("Registry", desk.registry), "2.9", View(desk.console))
    assert failed
    assert (str(failed.error), failed.record) == (f"{CELL}: no-such-scanner: no such file or directory", None)
    assert desk.state == "unscanned"


def test_a_scanner_that_prints_nothing_attaches_no_empty_blob(desk: Desk) -> None:
    assert desk.released_scan("")
    [documents] = desk.scans
    assert list(documents) == [scan.TYPE]


def test_the_scanner_finds_its_settings_in_the_checkout(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran in the folder of the command, where it would not find its ignore file."""
    (desk.project.root / ".scanner.yaml").write_text("ignore: [CVE-1]\n", encoding="utf-8")
    monkeypatch.chdir("/")
    assert desk.sbom_scan("print(open('.scanner.yaml').read())").output == b"ignore: [CVE-1]\n\n"


def test_no_more_scans_run_at_a_time_than_parallel_allows(desk: Desk) -> None:
    """trivy locks its cache. The test of `release` with `parallel: 2` has scans that wait for each other."""
    code = "import os, time; os.mkdir('busy'); time.sleep(0.3); os.rmdir('busy')"
    scanner = Scanner(with_scanner(desk.project, code))
    with ThreadPoolExecutor(2) as pool:
        scans = list(pool.map(lambda cell: scanner.scan_sbom(cell, desk.digest, b"{}"), ["a", "b"]))
    assert [each.record.exit_status for each in scans] == [0, 0]


@pytest.mark.parametrize("subject", ["", OTHER])
def test_an_image_without_an_sbom_of_its_own_is_not_scanned(desk: Desk, subject: str) -> None:
    del desk.registry.tags[desk.digest.replace(":", "-")]
    if subject:
        desk.attach(sbom_and_provenance.SBOM_TYPE, desk.sbom(subject))
    failed = desk.released_scan(PASS)
    assert failed
    assert str(failed.error) == f"{CELL}: no SBOM is attached to this image: `builder release` attaches one"
    assert desk.state == "unscanned"


def test_a_cell_that_is_not_released_is_left_out(desk: Desk) -> None:
    assert desk.released_scan(PASS, "2.8") is None


def test_of_an_index_the_image_for_the_architecture_of_the_cell_is_scanned(desk: Desk) -> None:
    """What it attached to the index was in no status."""
    other = desk.registry.put_manifest("other", b'{"layers": [], "a": 1}', MANIFEST_TYPE)
    desk.registry.tags["2.9"] = desk.registry.add_index(amd64=desk.digest, arm64=other)
    passed = desk.released_scan(PASS)
    assert passed
    assert (passed.digest, passed.error) == (desk.digest, None)
    desk.cell = replace(desk.cell, arch="arm64")
    failed = desk.released_scan(PASS)
    assert failed
    assert (failed.cell, failed.digest) == (f"{CELL}-arm64", other)
    assert "no SBOM is attached" in str(failed.error)


def test_a_scan_of_nothing_is_no_pass(desk: Desk) -> None:
    project = with_scanner(desk.project, PASS)
    with pytest.raises(UsageError, match="none of these images is released"):
        scan.scan_released(project, Host(), [], View(desk.console), registry="registry.example.test", signer=None)


def test_a_checkout_without_a_scanner(tiny: Project) -> None:
    with pytest.raises(UsageError, match="`scan` is not set") as caught:
        Scanner(tiny)
    assert 'scan:\n  command: [grype, "sbom:{sbom}", --fail-on, high]' in caught.value.hint


# ---- the newest scan


def test_the_newest_scan_counts_in_any_order(desk: Desk) -> None:
    """By the time in the record: the list of attachments, with its annotations, is not signed."""
    assert desk.state == "unscanned"
    desk.attach_scan("2026-11-24", exit_status=1)
    desk.attach_scan("2026-11-23")
    tag = desk.digest.replace(":", "-")
    entries = desk.registry.listed(tag)
    entries[-1]["annotations"][artifacts.CREATED] = "2030-01-01T00:00:00Z"
    desk.registry.put_manifest(tag, json.dumps({"manifests": entries}).encode(), oci.INDEX_TYPE)
    assert desk.state == "failed 2026-11-24, unsigned"


def test_scans_that_are_invalid_too_large_or_of_another_image_do_not_count(desk: Desk) -> None:
    desk.attach_scan("2026-11-23")
    [documents] = desk.scans
    record = json.loads(documents[scan.TYPE])
    for change in ({"image": OTHER}, {"time": "\x1b[2J"}, {"exit_status": "0"}, {"command": ["x" * LARGEST]}):
        desk.attach(scan.TYPE, json.dumps({**record, "time": "2026-11-25T00:00:00Z", **change}).encode())
    desk.attach(scan.TYPE, b"[" * 1000)
    assert desk.state == "passed 2026-11-23, unsigned"


def test_a_large_output_is_not_read(desk: Desk) -> None:
    """Reports have many megabytes, and the client reads at most four into memory."""
    desk.attach_scan("2026-11-23", output=b"x" * 2 * LARGEST)
    assert desk.state == "passed 2026-11-23, unsigned"


def test_a_damaged_list_does_not_end_the_status(desk: Desk) -> None:
    desk.registry.put_manifest(desk.digest.replace(":", "-"), b"[]", MANIFEST_TYPE)
    assert desk.state == "invalid list"


@pytest.mark.parametrize(
    ("signer", "end"), [("keys/ci.pub", ""), ("", ", unsigned"), (SigningError("cosign"), ", signature not checked")]
)
def test_the_status_shows_whether_a_scan_is_signed(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, signer: str | SigningError, end: str
) -> None:
    class Pen(Signer):
        def sign(self, content: bytes) -> bytes:
            return b"signature of " + content

    def trusted_signer(_: object, documents: dict[str, bytes], kind: str) -> str:
        assert documents[SIGNATURE_TYPE] == b"signature of " + documents[kind]
        if isinstance(signer, SigningError):
            raise signer
        return signer

    monkeypatch.setattr(signing, "trusted_signer", trusted_signer)
    desk.attach_scan("2026-11-23", signer=Pen(key="k"))
    assert desk.state == f"passed 2026-11-23{end}"
