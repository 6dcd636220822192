"""Scans for vulnerabilities: the exit status of the scanner decides, and a failure is never a pass."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from builder.common.errors import RefusedError, VerifyError
from builder.matrix.project import Project
from builder.matrix.schema import Scan
from builder.release.release_checks import Scanner
from tests.fakes.scanners import with_scanner

CELL = "qz-0.5-cu129-py311"
PASS = "import json, sys; json.load(open(sys.argv[1].removeprefix('sbom:'))); print('no matches')"

pytestmark = pytest.mark.usefixtures("programs")


class Desk:
    """A checkout with a scanner."""

    def __init__(self, project: Project) -> None:
        self.project = project

    def scanner(self, code: str) -> Scanner:
        project = with_scanner(self.project, code)
        assert project.matrix.scan
        return Scanner(project, project.matrix.scan)

    def scan(self, code: str) -> str:
        """The output in the log."""
        self.scanner(code).scan_sbom(CELL, b"{}")
        return (self.project.logs / f"{CELL}.scan.log").read_text("utf-8")


@pytest.fixture
def desk(tiny: Project) -> Desk:
    return Desk(tiny)


def test_an_accepted_image_has_the_output_in_the_log(desk: Desk) -> None:
    output = desk.scan(f"{PASS}; print('database of today', file=sys.stderr)")
    assert sorted(output.splitlines()) == ["database of today", "no matches"]


def test_of_a_refused_image_the_end_of_the_output_is_shown(desk: Desk) -> None:
    code = (
        "import sys\n"
        "for number in range(100): print(f'CVE-{number}', flush=True)\n"
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
        scanner.scan_sbom(CELL, b"{}")
    assert message in str(caught.value)


def test_a_scanner_that_is_not_installed_is_an_error(desk: Desk) -> None:
    scanner = Scanner(desk.project, Scan(command=["no-such-scanner", "{sbom}"]))
    with pytest.raises(VerifyError, match=f"^{CELL}: no-such-scanner: no such file or directory"):
        scanner.scan_sbom(CELL, b"{}")


def test_the_scanner_finds_its_settings_in_the_checkout(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ran in the folder of the command, where it would not find its ignore file."""
    (desk.project.root / ".scanner.yaml").write_text("ignore: [CVE-1]\n", encoding="utf-8")
    monkeypatch.chdir("/")
    assert desk.scan("print(open('.scanner.yaml').read())") == "ignore: [CVE-1]\n\n"


def test_no_more_scans_run_at_a_time_than_parallel_allows(desk: Desk) -> None:
    """trivy locks its cache. The test of `release` with `parallel: 2` has scans that wait for each other."""
    scanner = desk.scanner("import os, time; os.mkdir('busy'); time.sleep(0.3); os.rmdir('busy')")
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda cell: scanner.scan_sbom(cell, b"{}"), ["a", "b"]))
