"""Scans for vulnerabilities: what a scanner may print, exceptions, and that a failure is never a clean image."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from builder.common.errors import RefusedError, VerifyError
from builder.matrix.schema import Scan
from builder.registry import scan
from builder.registry.scan import Finding, Result

START = subprocess.Popen.__init__
IMAGE = "sha256:" + "a" * 64
TLS, SSH = "pkg:deb/debian/libtls@1.1?arch=amd64#abc", "pkg:deb/debian/openssh-client@9.2%3A1#def"
SBOM = json.dumps(
    {
        "bomFormat": "CycloneDX",
        "metadata": {"component": {"name": "image", "bom-ref": IMAGE}},
        "components": [
            {"bom-ref": TLS, "name": "libtls", "version": "1.1"},
            {"bom-ref": SSH, "name": "openssh-client", "version": "9.2:1"},
        ],
    }
).encode()
# Reads the SBOM, and prints what is in the file beside it.
SCANNER = """\
import json, pathlib, sys, time
assert json.loads(pathlib.Path(sys.argv[1].removeprefix("sbom:")).read_text())["bomFormat"] == "CycloneDX"
{code}
"""


@pytest.fixture(autouse=True)
def _allowed(_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other unit tests may start no program."""
    monkeypatch.setattr(subprocess.Popen, "__init__", START)


def vulnerability(id_: str, *refs: str, **ratings: Any) -> dict[str, Any]:
    return {"id": id_, "affects": [{"ref": ref} for ref in refs], **ratings}


def printed(*vulnerabilities: dict[str, Any], **more: Any) -> str:
    return json.dumps({"bomFormat": "CycloneDX", "vulnerabilities": vulnerabilities, **more})


def rated(*severities: str) -> dict[str, Any]:
    return {"ratings": [{"severity": severity} for severity in severities]}


def findings(*vulnerabilities: dict[str, Any], **more: Any) -> list[str]:
    return list(map(str, scan.parse(printed(*vulnerabilities, **more).encode(), SBOM)[1]))


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., Result]:
    """Scans with a program whose last lines are `code`."""

    def call(code: str, **settings: Any) -> Result:
        script = tmp_path / "scanner.py"
        script.write_text(SCANNER.format(code=code), encoding="utf-8")
        chosen = Scan(command=[sys.executable, str(script), "sbom:{sbom}"], **settings)
        return scan.scan(chosen, IMAGE, SBOM)

    return call


def exception(id_: str, days: int, **more: str) -> dict[str, str]:
    until = datetime.now(UTC).date() + timedelta(days)
    return {"id": id_, "reason": "not reachable from outside", "until": until.isoformat(), **more}


def test_a_clean_image(run: Callable[..., Result]) -> None:
    tools = {"components": [{"name": "tiny-scanner", "version": "1.2"}]}
    result = run(f"print('''{printed(metadata={'tools': tools})}''')")
    assert (result.summary, result.findings, result.image) == ("clean", (), IMAGE)
    assert result.scanner == "tiny-scanner 1.2"
    assert Result.model_validate_json(result.model_dump_json()) == result


def test_findings_and_exceptions(run: Callable[..., Result]) -> None:
    listed = printed(
        vulnerability("CVE-1", TLS, **rated("high")),
        vulnerability("CVE-2", SSH, **rated("critical")),
        vulnerability("CVE-3", TLS, SSH, **rated("low")),
    )
    settings = Scan.model_validate(
        {
            "command": ["scanner", "{sbom}"],
            "exceptions": [
                exception("CVE-1", 0),
                exception("CVE-2", 9, package="libtls"),
                exception("CVE-3", -1, package="libtls"),
                exception("CVE-4", 9),
            ],
        }
    )
    result = run(f"print('''{listed}''')", exceptions=settings.exceptions)
    assert result.summary == "1 critical, 2 low, 1 excepted"
    assert [finding.excepted for finding in result.findings if finding.id == "CVE-1"] == ["not reachable from outside"]
    [ended] = [str(finding) for finding in result.findings if finding.ended]
    assert ended == f"CVE-3 in libtls 1.1 (low); the exception for CVE-3 ended on {settings.exceptions[2].until}"
    with pytest.raises(
        RefusedError, match="pt: 1 vulnerability of severity high or higher, or unknown\n  CVE-2 in openssh-client"
    ):
        scan.check("pt", result, settings)
    assert scan.unused(settings, [result]) == [
        "note: unused exception for CVE-2 in libtls",
        "note: unused exception for CVE-4",
    ]
    assert scan.unused(None, []) == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("print('1'); print('no database', file=sys.stderr); sys.exit(3)", "exit status 3: no database"),
        (f"print('''{printed()}'''); sys.exit(1)", "exit status 1"),
        ("pass", "invalid output of the scanner"),
        ("print('{}')", "invalid output of the scanner: bomFormat"),
        ("print('[]')", "invalid output of the scanner"),
        ("print('no JSON')", "invalid output of the scanner"),
        ("print('[' * 10**6)", "invalid output of the scanner"),
        ("print(json.dumps({'bomFormat': 'CycloneDX'}))", "vulnerabilities: field required"),
        ("print(json.dumps({'bomFormat': 'SPDX', 'vulnerabilities': []}))", "bomFormat"),
        (f"print(r'''{printed({'id': chr(27)})}''')", "vulnerabilities.0.id"),
        (f"print('''{printed({})}''')", "vulnerabilities.0.id"),
        (f"print('''{printed()}''', flush=True); time.sleep(60)", "no result within 1.0 s"),
    ],
)  # fmt: skip
def test_a_failure_is_never_clean(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, code: str, message: str
) -> None:
    monkeypatch.setattr(scan, "TIMEOUT_S", 1 if "sleep" in code else 60)
    with pytest.raises(VerifyError) as caught:
        run(code)
    assert message in str(caught.value)


def test_a_scanner_that_is_not_installed(tmp_path: Path) -> None:
    with pytest.raises(VerifyError, match="no such file or directory"):
        scan.scan(Scan(command=[str(tmp_path / "scanner"), "{sbom}"]), IMAGE, SBOM)


@pytest.mark.parametrize("text", ["$(id)", "; id", "`id`", "a b"])
def test_no_shell_reads_the_command(tmp_path: Path, text: str) -> None:
    code = f"import sys; print('''{printed()}''') if sys.argv[2] == {text!r} else sys.exit(2)"
    command = [sys.executable, "-c", code, "{sbom}", text]
    assert scan.scan(Scan(command=command), IMAGE, SBOM).summary == "clean"


@pytest.mark.parametrize(
    ("severities", "severity"),
    [
        (["low", "critical", "unknown"], "critical"),
        (["unknown", "none"], "unknown"),
        (["unknown", "high"], "high"),
        (["info"], "none"),
        (["High"], "high"),
        (["urgent"], "unknown"),
        ([], "unknown"),
    ],
    ids=str,
)
def test_the_highest_rating_counts(severities: list[str], severity: str) -> None:
    assert findings(vulnerability("CVE-1", TLS, **rated(*severities))) == [f"CVE-1 in libtls 1.1 ({severity})"]


@pytest.mark.parametrize(
    ("ratings", "severity"),
    [
        ([{"severity": "none"}, {"score": 9.8, "method": "CVSSv31"}], "critical"),
        ([{"score": 3.9, "method": "CVSSv4"}], "low"),
        ([{"severity": "medium"}, {"score": 0.9, "method": "other"}], "medium"),
        ([{"score": 0.9, "method": "other"}], "unknown"),
    ],
)
def test_a_score_counts_as_its_severity(ratings: list[dict[str, Any]], severity: str) -> None:
    """But not scores of another kind, such as the probability of an attack."""
    assert findings(vulnerability("CVE-1", TLS, ratings=ratings)) == [f"CVE-1 in libtls 1.1 ({severity})"]


def test_where_the_package_of_a_finding_is_looked_up() -> None:
    """In the SBOM, by a link to it, or among the components that the scanner printed."""
    own = [{"bom-ref": "pkg:deb/libtls?package-id=7", "name": "libtls", "version": "1.1"}]
    link = "urn:cdx:f08a6ccd-4dce-4759-bd84-c626675d60a7/1#"
    listed = findings(
        vulnerability("CVE-1", TLS, "pkg:deb/libtls?package-id=7", f"{link}{TLS}", **rated("high")),
        vulnerability("CVE-2", f"{link}{SSH.replace('%', '%25').replace('#', '%23')}", **rated("high")),
        vulnerability("CVE-3", "elsewhere", **rated("high")),
        vulnerability("CVE-4", **rated("high")),
        components=own,
    )
    assert listed == [
        "CVE-1 in libtls 1.1 (high)",
        "CVE-2 in openssh-client 9.2:1 (high)",
        "CVE-3 in elsewhere (high)",
        "CVE-4 in an unnamed package (high)",
    ]


def test_a_finding_that_is_printed_twice_has_its_highest_severity() -> None:
    twice = [vulnerability("CVE-1", TLS, **rated(severity)) for severity in ("low", "high", "medium")]
    assert findings(*twice) == ["CVE-1 in libtls 1.1 (high)"]


@pytest.mark.parametrize(
    ("refuse", "refused"),
    [
        ("critical", ["critical", "unknown"]),
        ("high", ["critical", "high", "unknown"]),
        ("low", ["critical", "high", "medium", "low", "unknown"]),
        ("none", []),
    ],
)
def test_what_is_refused(refuse: str, refused: list[str]) -> None:
    """An unknown severity counts as the one that is refused."""
    each = [Finding(id=f"CVE-{name}", package="p", version="1", severity=name) for name in scan.SEVERITIES]
    excepted = [finding.model_copy(update={"excepted": "a good reason"}) for finding in each]
    result = Result(image=IMAGE, scanner="", time="2026-11-23T00:00:00Z", findings=(*each, *excepted))
    assert [finding.severity for finding in result.refused(refuse)] == refused
    assert list(result.counts.items()) == [*((name, 1) for name in scan.SEVERITIES), ("excepted", 6)]


@pytest.mark.parametrize(
    "tools", [[{"vendor": "v", "name": "t", "version": "1"}], {"components": [{"name": "t", "version": "1"}]}], ids=str
)
def test_the_scanner_in_both_forms(tools: Any) -> None:
    assert scan.parse(printed(metadata={"tools": tools}).encode(), SBOM)[0] == "t 1"


@pytest.mark.parametrize("tools", [None, [], {}, {"components": []}, "t", 7, [7], {"services": []}], ids=str)
def test_a_scanner_without_a_name(tools: Any) -> None:
    assert scan.parse(printed(metadata={"tools": tools}).encode(), SBOM)[0] == ""


@pytest.mark.parametrize(("days", "is_excepted"), [(-1, False), (0, True), (1, True)])
def test_an_exception_ends_after_its_last_day(days: int, is_excepted: bool) -> None:
    settings = Scan.model_validate({"command": ["s", "{sbom}"], "exceptions": [exception("CVE-1", 0)]})
    finding = Finding(id="CVE-1", package="libtls", version="1", severity="high")
    today = date.fromisoformat(settings.exceptions[0].until) - timedelta(days)
    [judged] = scan.apply_exceptions([finding], settings.exceptions, today)
    assert bool(judged.excepted) == is_excepted
    assert bool(judged.ended) != is_excepted
