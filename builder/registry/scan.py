"""Vulnerabilities of an image: runs the scanner of matrix.yaml on its SBOM, and decides what refuses a release.

The scanner reads CycloneDX, and prints CycloneDX with `vulnerabilities`. Anything else is a failure, never a clean
image. Source: CycloneDX 1.6, "vulnerabilities".
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, date, datetime
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal, get_args
from urllib.parse import unquote

from pydantic import AfterValidator, BaseModel, Field, StringConstraints, ValidationError

from builder.common.errors import RefusedError, UsageError, VerifyError
from builder.common.redact import Redactor
from builder.common.units import counted, duration
from builder.layers import oci
from builder.layers.oci import Digest
from builder.matrix.project import Project
from builder.matrix.schema import SBOM, Scan, ScanException

UNSCANNED, FAILED, CLEAN = "unscanned", "scan failed", "clean"
TIMEOUT_S = 600
Severity = Literal["critical", "high", "medium", "low", "none", "unknown"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)
# Of several ratings, the first of these counts: an unknown one may be high.
_CHOICE: tuple[Severity, ...] = ("critical", "high", "unknown", "medium", "low", "none")
_SCORES: tuple[tuple[float, Severity], ...] = (
    (9.0, "critical"), (7.0, "high"), (4.0, "medium"), (0.1, "low"), (-inf, "none"),
)  # fmt: skip
_HINT = "Let `scan.command` in matrix.yaml print CycloneDX with `vulnerabilities`, as JSON."


def _printable(value: str) -> str:
    if not value.isprintable():
        raise ValueError("expected one line of printable characters")
    return value


LONGEST = 500  # characters of a text
_Text = Annotated[str, StringConstraints(max_length=LONGEST), AfterValidator(_printable)]
_Time = Annotated[str, StringConstraints(pattern=oci.TIME)]


class Finding(BaseModel, extra="forbid", frozen=True):
    """A vulnerability of a package. `excepted` is why it does not count, `ended` the last day of its exception."""

    id: Annotated[_Text, Field(min_length=1)]
    package: _Text
    version: _Text
    severity: Severity
    excepted: _Text = ""
    ended: _Text = ""

    def __str__(self) -> str:
        ended = f"; the exception for {self.id} ended on {self.ended}" if self.ended else ""
        return f"{self.id} in {f'{self.package} {self.version}'.rstrip()} ({self.severity}){ended}"


class Result(BaseModel, extra="forbid", frozen=True):
    """The findings in the image whose manifest has the digest `image`, the most severe first."""

    format: Literal[1] = 1
    image: Digest
    scanner: _Text
    time: _Time
    findings: tuple[Finding, ...]

    @property
    def counts(self) -> dict[str, int]:
        """The number of findings without an exception, by severity, and of those with one (`excepted`)."""
        counts = dict.fromkeys((*SEVERITIES, "excepted"), 0)
        for finding in self.findings:
            counts["excepted" if finding.excepted else finding.severity] += 1
        return counts

    @property
    def summary(self) -> str:
        """`clean`, or e.g. `3 high, 1 excepted`."""
        parts = [f"{count} {name}" for name, count in self.counts.items() if count]
        is_clean = all(finding.excepted for finding in self.findings)
        return ", ".join([CLEAN, *parts] if is_clean else parts)

    def refused(self, lowest: str) -> tuple[Finding, ...]:
        """The findings of the severity `lowest` or a higher one, and those of an unknown severity."""
        if lowest == "none":
            return ()
        severities = (*SEVERITIES[: SEVERITIES.index(lowest) + 1], "unknown")
        return tuple(each for each in self.findings if not each.excepted and each.severity in severities)


def settings_of(project: Project) -> Scan:
    """The scanner of a project. Raises UsageError without one."""
    if project.matrix.scan is None:
        raise UsageError(
            "`scan` is not set in matrix.yaml: no image is scanned for vulnerabilities",
            hint="Replace `scan: null` in matrix.yaml with:\n"
            'scan:\n  command: [grype, "sbom:{sbom}", --output, cyclonedx-json]',
        )
    return project.matrix.scan


def scan(settings: Scan, image: str, sbom: bytes) -> Result:
    """Scans the SBOM of the image with this digest. Raises VerifyError."""
    scanner, findings = parse(_run(settings.command, sbom), sbom)
    now = datetime.now(UTC)
    return Result(
        image=image,
        scanner=scanner,
        time=f"{now:%Y-%m-%dT%H:%M:%SZ}",
        findings=tuple(apply_exceptions(findings, settings.exceptions, now.date())),
    )


def check(cell: str, result: Result, settings: Scan) -> None:
    """Raises RefusedError if there are findings that must not be released."""
    if refused := result.refused(settings.refuse):
        number = counted(len(refused), "vulnerability", "vulnerabilities")
        raise RefusedError(
            "\n  ".join([f"{cell}: {number} of severity {settings.refuse} or higher, or unknown", *map(str, refused)]),
            hint="Update the packages, or add an exception to `scan` in matrix.yaml. "
            "To release it as it is: builder release --allow-vulnerable",
        )


def apply_exceptions(
    findings: Iterable[Finding], exceptions: Sequence[ScanException], today: date
) -> Iterator[Finding]:
    """The findings with the exceptions of today."""
    for finding in findings:
        matching = [each for each in exceptions if _covers(each, finding)]
        newest = max(matching, key=lambda each: each.until, default=None)
        if newest is None:
            yield finding
        elif today <= date.fromisoformat(newest.until):
            yield finding.model_copy(update={"excepted": newest.reason})
        else:
            yield finding.model_copy(update={"ended": newest.until})


def unused(settings: Scan | None, results: Sequence[Result]) -> list[str]:
    """A note for each exception that no finding matches."""
    findings = [finding for result in results for finding in result.findings]
    return [
        f"note: unused exception for {each.id}{f' in {each.package}' if each.package else ''}"
        for each in (settings.exceptions if settings else ())
        if not any(_covers(each, finding) for finding in findings)
    ]


def _covers(exception: ScanException, finding: Finding) -> bool:
    return exception.id == finding.id and exception.package in ("", finding.package)


# ---- what a scanner prints


class _Component(BaseModel):
    ref: str = Field("", alias="bom-ref")
    name: _Text
    version: _Text = ""


class _Metadata(BaseModel):
    component: _Component | None = None
    tools: Any = None


class _Bom(BaseModel):
    bom_format: Literal["CycloneDX"] = Field(alias="bomFormat")
    metadata: _Metadata = _Metadata()
    components: tuple[_Component, ...] = ()


class _Rating(BaseModel):
    """`severity` is empty for other kinds of scores, such as EPSS; a score of CVSS has one."""

    severity: str = ""
    score: float | None = None
    method: str = ""


class _Affected(BaseModel):
    ref: _Text


class _Vulnerability(BaseModel):
    id: Annotated[_Text, Field(min_length=1)]
    ratings: tuple[_Rating, ...] = ()
    affects: tuple[_Affected, ...] = ()


class _Report(_Bom):
    vulnerabilities: tuple[_Vulnerability, ...]


def subject(sbom: bytes) -> str:
    """The digest of the image that an SBOM is about. Raises VerifyError."""
    component = oci.parse(_Bom, sbom, "SBOM", hint="").metadata.component
    return component.ref if component else ""


def parse(output: bytes, sbom: bytes) -> tuple[str, list[Finding]]:
    """Name and version of a scanner, empty if it printed none, and its findings in the SBOM, the most severe first.

    Raises VerifyError.
    """
    report = oci.parse(_Report, output, "output of the scanner", hint=_HINT)
    listed = (*oci.parse(_Bom, sbom, "SBOM", hint="").components, *report.components)
    components = {component.ref: component for component in listed}
    findings: dict[tuple[str, str, str], Finding] = {}
    for each in report.vulnerabilities:
        rated = filter(None, map(_severity, each.ratings))
        severity = min(rated, key=_CHOICE.index, default="unknown")
        for ref in [affected.ref for affected in each.affects] or [""]:
            component = _component(components, ref)
            finding = Finding(id=each.id, package=component.name, version=component.version, severity=severity)
            key = (finding.id, finding.package, finding.version)
            findings[key] = min(findings.get(key, finding), finding, key=lambda each: _CHOICE.index(each.severity))
    ordered = sorted(findings.values(), key=lambda each: (SEVERITIES.index(each.severity), each.id, each.package))
    return _tool(report.metadata.tools), ordered


def _severity(rating: _Rating) -> Severity | None:
    """The severity of a rating; None if it has none. Source of the scores: CVSS 3.1, section 5."""
    if name := rating.severity.lower():
        return "none" if name == "info" else next((each for each in SEVERITIES if each == name), "unknown")
    if rating.score is None or not rating.method.lower().startswith("cvss"):
        return None
    return next(severity for least, severity in _SCORES if rating.score >= least)


def _component(components: dict[str, _Component], ref: str) -> _Component:
    """The component of a reference; else one that is named after the reference.

    Scanners may refer to the SBOM by a link: urn:cdx:<serial number>/<version>#<reference>.
    """
    linked = ref.partition("#")[2] if ref.startswith("urn:cdx:") else ref
    for name in (ref, linked, unquote(linked)):
        if name in components:
            return components[name]
    return _Component(name=ref or "an unnamed package")


def _tool(tools: Any) -> str:
    """The first tool of a document: a list in CycloneDX 1.4, `components` since 1.5."""
    listed = tools.get("components") if isinstance(tools, dict) else tools
    try:
        tool = _Component.model_validate(listed[0]) if listed else None
    except (ValidationError, TypeError, KeyError):
        return ""
    return f"{tool.name} {tool.version}".strip()[:LONGEST] if tool else ""


# ---- the scanner


def _run(command: Sequence[str], sbom: bytes) -> bytes:
    """What the scanner of an SBOM prints. Raises VerifyError."""
    with TemporaryDirectory() as folder:
        path, output, log = (Path(folder) / name for name in ("sbom.json", "output", "log"))
        path.write_bytes(sbom)
        arguments = [argument.replace(SBOM, str(path)) for argument in command]
        try:
            # Files, as a child of the scanner could keep pipes open after a timeout.
            with output.open("wb") as out, log.open("wb") as err:
                done = subprocess.run(
                    arguments, stdin=subprocess.DEVNULL, stdout=out, stderr=err, timeout=TIMEOUT_S, check=False
                )
        except subprocess.TimeoutExpired as error:
            raise VerifyError(f"{command[0]}: no result within {duration(TIMEOUT_S)}") from error
        except OSError as error:
            raise VerifyError(
                f"{command[0]}: {(error.strerror or str(error)).lower()}",
                hint="Install the scanner, or correct `scan.command` in matrix.yaml.",
            ) from error
        if done.returncode:
            lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
            last = next((line for line in reversed(lines) if line.strip()), "")
            reason = "".join(filter(str.isprintable, Redactor()(last)))[:300]
            raise VerifyError(f"{command[0]}: exit status {done.returncode}{f': {reason}' if reason else ''}")
        return output.read_bytes()
