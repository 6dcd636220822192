"""The results as medians, ratios and tables. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from benchmarks.frameworks import measures
from benchmarks.frameworks.measures import Measure
from benchmarks.frameworks.selection import Subject
from builder.common.errors import FileError

FORMAT = 1
# The frameworks train the same model with the same data and first weights: rounding may change the loss by 1 %.
TOLERANCE = 0.01
MARKS = ("<!-- figures: written by `python -m benchmarks.frameworks --docs` -->", "<!-- end of figures -->")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A median, and how many times worse it is than the best median; None if either is not above 0."""

    median: float
    ratio: float | None

    def shown(self, measure: Measure) -> str:
        ratio = "" if self.ratio is None else f" ({self.ratio:.1f})"
        return f"{measure.shown(self.median)}{ratio}"


@dataclass(kw_only=True)
class Figures:
    """The results of one image, by the key of the measure.

    `values` has one for each run, `ways` says how it was measured, `absent` why the image has none. `failures` are by
    what failed.
    """

    version: str = ""
    about: dict[str, Any] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    ways: dict[str, str] = field(default_factory=dict)
    losses: dict[str, list[float]] = field(default_factory=dict)
    values: dict[str, list[float]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, line: Mapping[str, Any]) -> None:
        """Adds a line that a program in the image printed."""
        match line:
            case {"about": about}:
                self.about = dict(about)
            case {"version": version}:
                self.version = str(version)
            case {"failed": kind, "reason": reason}:
                self.failures.setdefault(str(kind), str(reason).strip() or f"exit status {line.get('status')}")
            case {"measure": key, "absent": reason}:
                self.absent[str(key)] = str(reason)
            case {"measure": key, "value": value}:
                self.values.setdefault(str(key), []).append(float(value))
                if "way" in line:
                    self.ways[str(key)] = str(line["way"])
                if "losses" in line:
                    self.losses[str(key)] = [float(loss) for loss in line["losses"]]


@dataclass(kw_only=True)
class Report:
    """The results of all images. `figures` are by cell."""

    subjects: Sequence[Subject]
    size: int
    runs: int
    gpu: bool
    workers: int = 0
    figures: dict[str, Figures] = field(init=False)

    def __post_init__(self) -> None:
        self.figures = {subject.id: Figures() for subject in self.subjects}

    def add(self, cell: str, line: Mapping[str, Any]) -> None:
        """Adds a line that a program in the image of this cell printed."""
        if "about" in line:
            self.workers = int(line["workers"])
        self.figures[cell].add(line)

    @property
    def measures(self) -> tuple[Measure, ...]:
        return measures.of_device(gpu=self.gpu)

    def title(self, measure: Measure) -> str:
        return measure.title.format(size=self.size, workers=self.workers)

    def entries(self, measure: Measure) -> dict[str, Entry]:
        """By cell, only for cells with values."""
        runs = {cell: figures.values.get(measure.key) for cell, figures in self.figures.items()}
        medians = {cell: statistics.median(values) for cell, values in runs.items() if values}
        best = (max if measure.more_is_better else min)(medians.values(), default=0.0)

        def ratio(value: float) -> float | None:
            if min(value, best) <= 0:
                return None  # such as no GPU memory at all
            return best / value if measure.more_is_better else value / best

        return {cell: Entry(median=value, ratio=ratio(value)) for cell, value in medians.items()}

    def device(self) -> str:
        """The device in words. All images ran on one machine, so the first one is enough."""
        about = next((figures.about for figures in self.figures.values() if figures.about), None)
        if about is None:
            return "unknown device"
        cpu = f"{about['cpu']}, {about['cores']} cores"
        return f"{about['gpu']}, driver {about['driver']}; {cpu}" if about["gpu"] else f"CPU: {cpu}"

    def basis(self) -> str:
        return "One run" if self.runs == 1 else f"Median of {self.runs} runs"

    def heading(self, subject: Subject) -> str:
        return f"{subject.title} {self.figures[subject.id].version or subject.cell.release}"

    def rows(self) -> Iterator[list[str]]:
        """Rows of the table: the title of a measure, then the entry of each image."""
        for measure in self.measures:
            entries = self.entries(measure)
            shown = {cell: entry.shown(measure) for cell, entry in entries.items()}
            yield [self.title(measure), *(shown.get(subject.id, "-") for subject in self.subjects)]

    def table(self) -> Table:
        """For a terminal; the best of each row is green."""
        table = Table(box=None, header_style="bold")
        table.add_column("measure")
        for subject in self.subjects:
            table.add_column(f"{self.heading(subject)}\n{subject.id}", justify="right")
        for title, *entries in self.rows():
            table.add_row(title, *(Text(entry, style="green" if entry.endswith("(1.0)") else "") for entry in entries))
        return table

    def notes(self) -> list[str]:
        """How the figures of the table were measured, and why some are absent."""
        notes = [f"{self.basis()}, each in new processes; in brackets: ratio to the best. {self.device()}."]
        for subject in self.subjects:
            figures = self.figures[subject.id]
            ways = (figures.ways.get(key, "") for key in ("train_float32", "compiled_float32", "load_n"))
            notes.append(f"{subject.title}: {'; '.join(filter(None, dict.fromkeys(ways)))}.")
            notes += [f"{subject.title}: {reason}." for reason in dict.fromkeys(figures.absent.values())]
        return notes

    def problems(self) -> list[str]:
        """What failed, measures that are missing without a reason, and different losses. With any, no figure counts."""
        problems = []
        for cell, figures in self.figures.items():
            problems += [f"{cell}: {kind}: {reason}" for kind, reason in figures.failures.items()]
            complete = figures.values.keys() | figures.absent.keys()
            missing = [measure.key for measure in self.measures if measure.key not in complete]
            if missing and not figures.failures:
                problems.append(f"{cell}: not measured: {', '.join(missing)}")
        for key in ("train_float32", "compiled_float32"):
            losses = {cell: figures.losses[key] for cell, figures in self.figures.items() if key in figures.losses}
            if _differ(list(losses.values())):
                shown = "; ".join(f"{cell} {' '.join(f'{loss:.4f}' for loss in row)}" for cell, row in losses.items())
                problems.append(f"{key}: the losses differ, so the training was not the same: {shown}")
        return problems

    def as_data(self) -> dict[str, Any]:
        """For --json: every value of every run."""
        images, rows = [], []
        for subject in self.subjects:
            figures = asdict(self.figures[subject.id])
            names = {"cell": subject.id, "reference": subject.reference, "image_id": subject.image_id}
            images.append(names | {key: figures[key] for key in ("version", "about", "absent", "ways", "losses")})
        for measure in self.measures:
            entries = self.entries(measure)
            rows.append(
                {
                    "key": measure.key,
                    "title": self.title(measure),
                    "unit": measure.unit,
                    "better": "more" if measure.more_is_better else "less",
                    "medians": {cell: entry.median for cell, entry in entries.items()},
                    "ratios": {cell: entry.ratio for cell, entry in entries.items()},
                    "values": {cell: figures.values.get(measure.key, []) for cell, figures in self.figures.items()},
                }
            )
        return {
            "format": FORMAT,
            "device": self.device(),
            "gpu": self.gpu,
            "runs": self.runs,
            "size": self.size,
            "workers": self.workers,
            "images": images,
            "measures": rows,
            "problems": self.problems(),
        }

    def markdown(self) -> str:
        lines = [
            f"| | {' | '.join(map(self.heading, self.subjects))} |",
            f"|---|{'---:|' * len(self.subjects)}",
            *(f"| {' | '.join(row)} |" for row in self.rows()),
            "",
            *(f"{note}  " for note in self.notes()),
        ]
        return "\n".join(lines).rstrip() + "\n"


def into_docs(text: str, markdown: str, name: str) -> str:
    """A Markdown file's text with the figures between its two marks replaced. Raises FileError without the marks."""
    begin, end = (re.escape(mark) for mark in MARKS)
    figures = re.compile(rf"{begin}.*?{end}", re.DOTALL)
    if len(figures.findall(text)) != 1:
        raise FileError(f"{name}: no place for the figures", hint=f"Add these two lines: {MARKS[0]}  {MARKS[1]}")
    return figures.sub(lambda _: f"{MARKS[0]}\n{markdown}{MARKS[1]}", text)


def _differ(rows: list[list[float]]) -> bool:
    """Whether a row differs from the first one by more than the tolerance."""
    return any(
        abs(loss - first) > TOLERANCE * abs(first) for row in rows[1:] for loss, first in zip(row, rows[0], strict=True)
    )
