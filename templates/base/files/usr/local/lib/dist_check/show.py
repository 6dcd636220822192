"""A report as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Report = Mapping[str, Any]


def text(report: Report) -> str:
    lines: list[str] = []
    if report["started"]:
        lines += _computed(report)
    lines += _problems("problem", report["problems"])
    lines += _logs(report)
    lines += _problems("note", report["notes"])
    if report["ok"]:
        lines.append(f"ok: {_count(report['world'], 'rank')} got every sum right")
    elif report["started"]:
        lines.append("failed")
    else:
        lines.append("failed: nothing was computed")
    return "\n".join(lines)


def _computed(report: Report) -> list[str]:
    versions = " ".join(f"{name} {version}" for name, version in report["versions"].items())
    ranks = _count(report["world"], "rank")
    lines = [
        f"{report['framework']} ({versions}), {ranks} on {_count(len(report['nodes']), 'node')}",
        f"library: {report['library']} ({report['why']})",
        "",
    ]
    rows = [("rank", "host", "device", "interface", "transport")]
    for rank in report["ranks"]:
        interface = " ".join(
            f"{name} {address}".strip() for name, address in _pairs(rank["interfaces"], rank["addresses"])
        )
        transport = ", ".join([*rank["transports"], *rank["cards"]])
        rows.append((str(rank["rank"]), rank["host"], rank["device"], interface or "none", transport or "?"))
    lines += [*_table(rows), ""]
    if report["checks"]:
        lines += [*_sums(report["checks"]), ""]
    if report["bandwidth"]:
        bandwidth = [("all-reduce of", "time", "data", "bus bandwidth")]
        for row in report["bandwidth"]:
            # One rank sends nothing: its time says nothing about a link.
            data, bus = (rate(row[name]) if report["world"] > 1 else "-" for name in ("algorithm", "bus"))
            bandwidth.append((size(row["bytes"]), f"{row['seconds'] * 1000:.3f} ms", data, bus))
        lines += [*_table(bandwidth), ""]
    return lines


def _sums(checks: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for each type."""
    by_type: dict[str, list[Mapping[str, Any]]] = {}
    for check in checks:
        by_type.setdefault(check["dtype"], []).append(check)
    rows = []
    for dtype, own in by_type.items():
        wrong = [f"{check['elements']} wrong on ranks {check['wrong_ranks']}" for check in own if check["wrong_ranks"]]
        counts = ", ".join(str(check["elements"]) for check in own)
        rows.append((f"sum of {dtype}", "WRONG: " + "; ".join(wrong) if wrong else f"exact for {counts} values"))
    return _table(rows)


def _problems(kind: str, problems: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for problem in problems:
        lines.append(f"{kind}: {problem['what']}")
        lines += [f"    fix: {fix}" if at == 0 else f"     or: {fix}" for at, fix in enumerate(problem["fix"])]
    return lines


def _logs(report: Report) -> list[str]:
    lines = []
    for rank in report.get("ranks", ()):
        if rank["state"] in ("failed", "stuck") and rank["log"].strip():
            lines.append(f"last lines of the log of rank {rank['rank']}:")
            lines += [f"    {line}" for line in rank["log"].splitlines()]
    return lines


def _pairs(names: Sequence[str], addresses: Sequence[str]) -> list[tuple[str, str]]:
    return [(name, addresses[at] if at < len(addresses) else "") for at, name in enumerate(names)]


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return ["  ".join(cell.ljust(widths[at]) for at, cell in enumerate(row)).rstrip() for row in rows]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def size(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:g} {unit}"
        count /= 1024
    return f"{count:g} GiB"


def rate(bytes_per_second: float) -> str:
    """In powers of 1000, like the speeds of links and the results of nccl-tests."""
    if bytes_per_second >= 1e9:
        return f"{bytes_per_second / 1e9:.2f} GB/s"
    return f"{bytes_per_second / 1e6:.1f} MB/s"
