"""The measures as a picture: a panel of bars for each, as an SVG without scripts or fonts of its own. Pure.

The picture has its own background and follows the reader's light or dark colours.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from xml.etree import ElementTree as ET

from benchmarks.frameworks.measures import Measure
from benchmarks.frameworks.report import Report
from benchmarks.frameworks.selection import Subject

WIDTH, COLUMNS, MARGIN, GAP = 920, 2, 24, 28
PANEL = (WIDTH - 2 * MARGIN - (COLUMNS - 1) * GAP) / COLUMNS
BAR, STEP, HEAD, FOOT = 14, 20, 36, 6
LABEL, VALUE = 82, 116  # room for the name before a bar, and for the value after it
TOP = 84

# Colours that people with any colour vision can distinguish (Okabe and Ito), for light and dark backgrounds.
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
    height = _height(report)
    rows = -(-len(panels) // COLUMNS)
    total = TOP + rows * (height + GAP / 2) + MARGIN
    size = {"width": str(WIDTH), "height": _number(total), "viewBox": f"0 0 {WIDTH} {_number(total)}"}
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", **size, "role": "img"})
    names = ", ".join(map(report.heading, report.subjects))
    ET.SubElement(root, "title").text = f"Frameworks side by side: {names}"
    ET.SubElement(root, "style").text = _STYLE
    _rect(root, (0, 0, WIDTH, total), style="page")
    _text(root, MARGIN, MARGIN + 12, names, style="title")
    caption = f"{report.device()}. {report.basis()}; in brackets: ratio to the best."
    _text(root, MARGIN, MARGIN + 34, caption, style="soft")
    for number, measure in enumerate(panels):
        row, column = divmod(number, COLUMNS)
        _panel(root, report, measure, MARGIN + column * (PANEL + GAP), TOP + row * (height + GAP / 2))
    ET.indent(root)
    return ET.tostring(root, encoding="unicode") + "\n"


def _panel(root: ET.Element, report: Report, measure: Measure, left: float, top: float) -> None:
    group = ET.SubElement(root, "g", {"data-measure": measure.key})
    _rect(group, (left, top, PANEL, _height(report)), style="frame", rx="6")
    better = "more is better" if measure.more_is_better else "less is better"
    _text(group, left + 12, top + 20, report.title(measure), style="head")
    _text(group, left + PANEL - 12, top + 20, better, style="soft", anchor="end")
    entries = report.entries(measure)
    longest = max(entry.median for entry in entries.values())
    names = _names(report.subjects)
    start = left + 12 + LABEL
    for number, subject in enumerate(report.subjects):
        line = top + HEAD + number * STEP
        _text(group, left + 12, line + BAR - 3, names[subject.id])
        if (entry := entries.get(subject.id)) is None:
            _text(group, start, line + BAR - 3, "no value", style="soft")
            continue
        length = (PANEL - 12 - LABEL - VALUE) * max(entry.median, 0) / longest if longest > 0 else 0.0
        bar = _rect(group, (start, line, length, BAR), rx="2")
        bar.attrib |= {"fill": _COLOURS[number % len(_COLOURS)], "data-cell": subject.id}
        _text(group, start + length + 6, line + BAR - 3, entry.shown(measure))


def _names(subjects: Sequence[Subject]) -> dict[str, str]:
    """Short names of the bars: the framework, with its version, or CUDA and Python, if it has several bars."""
    titles = Counter(subject.title for subject in subjects)
    lines = {subject.id: f"{subject.cell.short} {subject.cell.line}" for subject in subjects}
    is_unique = len(set(lines.values())) == len(lines)
    names = {}
    for subject in subjects:
        cell = subject.cell
        longer = lines[subject.id] if is_unique else f"{cell.short} {cell.cuda_tag} {cell.python_tag}"
        names[subject.id] = subject.title if titles[subject.title] == 1 else longer
    return names


def _height(report: Report) -> float:
    """Height of a panel."""
    return HEAD + FOOT + STEP * len(report.subjects)


def _rect(parent: ET.Element, box: tuple[float, ...], *, style: str = "", rx: str = "0") -> ET.Element:
    """A rectangle; `box` is its left, top, width and height."""
    place = dict(zip(("x", "y", "width", "height"), map(_number, box), strict=True))
    return ET.SubElement(parent, "rect", {**place, "rx": rx, **({"class": style} if style else {})})


def _text(parent: ET.Element, x: float, y: float, text: str, *, style: str = "", anchor: str = "start") -> None:
    element = ET.SubElement(parent, "text", {"x": _number(x), "y": _number(y), "text-anchor": anchor})
    if style:
        element.set("class", style)
    element.text = text


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
