"""The measures as a picture: a panel of bars for each, as an SVG without scripts or fonts of its own. Pure.

It has a background of its own and follows the reader's light or dark colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree as ET

from builder.bench.choice import Subject
from builder.bench.measures import Measure
from builder.bench.report import Report

WIDTH, COLUMNS, MARGIN, GAP = 920, 2, 24, 28
PANEL = (WIDTH - 2 * MARGIN - (COLUMNS - 1) * GAP) / COLUMNS
BAR, STEP, HEAD, FOOT = 14, 20, 36, 6
LABEL, VALUE = 82, 116  # room for a bar's name before it, and for its value after it
TOP = 84

# Colours that people with any colour vision tell apart (Okabe and Ito), for light and dark backgrounds.
_COLOURS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#b8860b", "#56b4e9")
_STYLE = """
.page { fill: #ffffff; } .frame { fill: #f6f7f9; }
text { font-family: system-ui, 'Segoe UI', 'DejaVu Sans', sans-serif; font-size: 12px; fill: #1f2328; }
.title { font-size: 18px; font-weight: 600; } .head { font-weight: 600; } .soft { fill: #59636e; font-size: 11px; }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117; } .frame { fill: #161b22; } text { fill: #e6edf3; } .soft { fill: #9198a1; }
}
"""


def draw(report: Report) -> str:
    """The picture. Bars of a panel are as long as their medians, from zero."""
    panels = [measure for measure in report.measures if report.entries(measure)]
    height = HEAD + FOOT + STEP * len(report.subjects)
    rows = -(-len(panels) // COLUMNS)
    total = TOP + rows * (height + GAP / 2) + MARGIN
    root = ET.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        width=str(WIDTH),
        height=_number(total),
        viewBox=f"0 0 {WIDTH} {_number(total)}",
        role="img",
    )
    names = ", ".join(report.heading(one) for one in report.subjects)
    ET.SubElement(root, "title").text = f"Frameworks side by side: {names}"
    ET.SubElement(root, "style").text = _STYLE
    _rect(root, 0, 0, WIDTH, total, style="page")
    _text(root, MARGIN, MARGIN + 12, names, style="title")
    told = f"{report.device()}. {report.basis()}; in brackets: times the best."
    _text(root, MARGIN, MARGIN + 34, told, style="soft")
    for number, measure in enumerate(panels):
        left = MARGIN + number % COLUMNS * (PANEL + GAP)
        top = TOP + number // COLUMNS * (height + GAP / 2)
        _panel(root, report, measure, left=left, top=top, height=height)
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _panel(root: ET.Element, report: Report, measure: Measure, *, left: float, top: float, height: float) -> None:
    group = ET.SubElement(root, "g", {"data-measure": measure.key})
    _rect(group, left, top, PANEL, height, style="frame", rx="6")
    better = "more is better" if measure.more_is_better else "less is better"
    _text(group, left + 12, top + 20, report.title(measure), style="head")
    _text(group, left + PANEL - 12, top + 20, better, style="soft", anchor="end")
    entries = report.entries(measure)
    longest = max(entry.median for entry in entries.values())
    room = PANEL - 12 - LABEL - VALUE
    names = _names(report.subjects)
    for number, one in enumerate(report.subjects):
        line = top + HEAD + number * STEP
        _text(group, left + 12, line + BAR - 3, names[one.id])
        entry = entries.get(one.id)
        if entry is None:
            _text(group, left + 12 + LABEL, line + BAR - 3, "not there", style="soft")
            continue
        length = room * max(entry.median, 0) / longest if longest > 0 else 0.0
        bar = _rect(group, left + 12 + LABEL, line, length, BAR, rx="2")
        bar.set("fill", _COLOURS[number % len(_COLOURS)])
        bar.set("data-cell", one.id)
        ratio = "" if entry.ratio is None else f" ({entry.ratio:.1f})"
        _text(group, left + 12 + LABEL + length + 6, line + BAR - 3, f"{measure.shown(entry.median)}{ratio}")


def _names(subjects: Sequence[Subject]) -> dict[str, str]:
    """Short names of the bars: the framework's, with its version where there are two of it."""
    titles = [one.title for one in subjects]
    short = {one.id: f"{one.cell.short} {one.cell.line}" for one in subjects}
    twice = len(set(short.values())) != len(short)
    return {
        one.id: one.title if titles.count(one.title) == 1
        else f"{one.cell.short} {one.cell.cuda_tag} {one.cell.python_tag}" if twice
        else short[one.id]
        for one in subjects
    }  # fmt: skip


def _rect(
    parent: ET.Element, x: float, y: float, width: float, height: float, *, style: str = "", rx: str = "0"
) -> ET.Element:
    made = ET.SubElement(
        parent, "rect", x=_number(x), y=_number(y), width=_number(width), height=_number(height), rx=rx
    )
    if style:
        made.set("class", style)
    return made


def _text(parent: ET.Element, x: float, y: float, text: str, *, style: str = "", anchor: str = "start") -> None:
    made = ET.SubElement(parent, "text", {"x": _number(x), "y": _number(y), "text-anchor": anchor})
    if style:
        made.set("class", style)
    made.text = text


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
