"""What was measured, as medians, ratios and tables. Pure."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.table import Table
from rich.text import Text

from builder.bench import measures
from builder.bench.choice import Subject
from builder.bench.measures import Measure
from builder.errors import FileError

FORMAT = 1
# The same model, data and weights give the same loss in every framework; this far apart may rounding bring them.
SAME = 0.01
MARKS = ("<!-- figures: written by `builder bench frameworks --docs` -->", "<!-- end of figures -->")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A median, and how many times worse than the best one it is (1 for the best)."""

    median: float
    ratio: float | None


@dataclass(kw_only=True)
class Report:
    """`values` are by cell and measure, of each run; `absent` says why one is not there, `ways` how it was done."""

    subjects: Sequence[Subject]
    size: int
    runs: int
    gpu: bool
    workers: int = 0
    about: dict[str, dict[str, Any]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    ways: dict[str, dict[str, str]] = field(default_factory=dict)
    absent: dict[str, dict[str, str]] = field(default_factory=dict)
    losses: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)

    def take(self, cell: str, line: Mapping[str, Any]) -> None:
        """A line that a program in the image printed."""
        if "about" in line:
            self.about[cell], self.workers = dict(line["about"]), int(line["workers"])
        elif "version" in line:
            self.versions[cell] = str(line["version"])
        elif "failed" in line:
            reason = str(line["reason"]).strip() or f"ended with status {line['status']}"
            self.failures.setdefault(cell, {}).setdefault(str(line["failed"]), reason)
        elif "absent" in line:
            self.absent.setdefault(cell, {})[str(line["measure"])] = str(line["absent"])
        elif "measure" in line:
            key = str(line["measure"])
            self.values.setdefault(cell, {}).setdefault(key, []).append(float(line["value"]))
            if "way" in line:
                self.ways.setdefault(cell, {})[key] = str(line["way"])
            if "losses" in line:
                self.losses.setdefault(cell, {})[key] = [float(one) for one in line["losses"]]

    @property
    def measures(self) -> tuple[Measure, ...]:
        return measures.of_device(gpu=self.gpu)

    def title(self, measure: Measure) -> str:
        return measure.title.format(size=self.size, workers=self.workers)

    def entries(self, measure: Measure) -> dict[str, Entry]:
        """By cell; a cell that has no value is left out."""
        medians = {
            one.id: statistics.median(found)
            for one in self.subjects
            if (found := self.values.get(one.id, {}).get(measure.key))
        }
        if not medians:
            return {}
        best = max(medians.values()) if measure.more_is_better else min(medians.values())

        def ratio(value: float) -> float | None:
            if min(value, best) <= 0:
                return None  # no GPU memory at all: nothing is a number of times that
            return best / value if measure.more_is_better else value / best

        return {cell: Entry(median=value, ratio=ratio(value)) for cell, value in medians.items()}

    def device(self) -> str:
        """What the measures were taken on, in a sentence; of the first image, as all ran on one machine."""
        told = next(iter(self.about.values()), None)
        if told is None:
            return "unknown device"
        cpu = f"{told['cpu']}, {told['cores']} cores"
        return f"{told['gpu']}, driver {told['driver']}; {cpu}" if told["gpu"] else f"CPU: {cpu}"

    def basis(self) -> str:
        return "One run" if self.runs == 1 else f"Median of {self.runs} runs"

    def heading(self, subject: Subject) -> str:
        return f"{subject.title} {self.versions.get(subject.id, subject.cell.release)}"

    def rows(self) -> Iterator[list[str]]:
        """The table: what, then a cell of the table for each image."""
        for measure in self.measures:
            entries = self.entries(measure)
            yield [self.title(measure), *(_entry(measure, entries.get(one.id)) for one in self.subjects)]

    def table(self) -> Table:
        """For a terminal; the best of each row stands out."""
        table = Table(box=None, header_style="bold")
        table.add_column("what")
        for one in self.subjects:
            table.add_column(f"{self.heading(one)}\n{one.id}", justify="right")
        for what, *cells in self.rows():
            table.add_row(what, *(Text(cell, style="green" if cell.endswith("(1.0)") else "") for cell in cells))
        return table

    def notes(self) -> list[str]:
        """What the table does not say."""
        found = [f"{self.basis()}, each in new processes; in brackets: times the best. {self.device()}."]
        for one in self.subjects:
            ways = {key: way for key, way in self.ways.get(one.id, {}).items() if not key.endswith("_first")}
            unique = dict.fromkeys(ways.get(key, "") for key in ("train_float32", "compiled_float32", "load_n"))
            found.append(f"{one.title}: {'; '.join(way for way in unique if way)}.")
            found += [f"{one.title}: {reason}." for reason in dict.fromkeys(self.absent.get(one.id, {}).values())]
        return found

    def problems(self) -> list[str]:
        """What failed, what is missing without a reason, and losses that are not the same: the figures do not count."""
        found = [f"{cell}: {what}: {why}" for cell, told in self.failures.items() for what, why in told.items()]
        for one in self.subjects:
            have = self.values.get(one.id, {}).keys() | self.absent.get(one.id, {}).keys()
            lost = [measure.key for measure in self.measures if measure.key not in have]
            if lost and one.id not in self.failures:
                found.append(f"{one.id}: not measured: {', '.join(lost)}")
        for key in ("train_float32", "compiled_float32"):
            losses = {cell: told[key] for cell, told in self.losses.items() if key in told}
            if any(abs(one - other) > SAME * abs(other) for one, other in _beside(list(losses.values()))):
                shown = "; ".join(f"{cell} {' '.join(f'{one:.4f}' for one in told)}" for cell, told in losses.items())
                found.append(f"{key}: the losses differ, so this was not the same training: {shown}")
        return found

    def as_data(self) -> dict[str, Any]:
        """For --json: every value of every run."""
        return {
            "format": FORMAT,
            "device": self.device(),
            "gpu": self.gpu,
            "runs": self.runs,
            "size": self.size,
            "workers": self.workers,
            "images": [
                {
                    "cell": one.id,
                    "reference": one.reference,
                    "image_id": one.image_id,
                    "version": self.versions.get(one.id, ""),
                    "about": self.about.get(one.id, {}),
                    "absent": self.absent.get(one.id, {}),
                    "ways": self.ways.get(one.id, {}),
                    "losses": self.losses.get(one.id, {}),
                }
                for one in self.subjects
            ],
            "measures": [
                {
                    "key": measure.key,
                    "title": self.title(measure),
                    "unit": measure.unit,
                    "better": "more" if measure.more_is_better else "less",
                    "medians": {cell: entry.median for cell, entry in self.entries(measure).items()},
                    "ratios": {cell: entry.ratio for cell, entry in self.entries(measure).items()},
                    "values": {one.id: self.values.get(one.id, {}).get(measure.key, []) for one in self.subjects},
                }
                for measure in self.measures
            ],
            "problems": self.problems(),
        }

    def markdown(self) -> str:
        lines = [
            f"| | {' | '.join(self.heading(one) for one in self.subjects)} |",
            f"|---|{'---:|' * len(self.subjects)}",
            *(f"| {' | '.join(row)} |" for row in self.rows()),
        ]
        return "\n".join([*lines, "", *(f"{note}  " for note in self.notes())]).rstrip() + "\n"


def into_docs(text: str, markdown: str, name: str) -> str:
    """A Markdown file's text with the figures between its two marks replaced; raises FileError if it has none."""
    begin, end = (re.escape(mark) for mark in MARKS)
    whole = re.compile(rf"{begin}.*?{end}", re.DOTALL)
    if len(whole.findall(text)) != 1:
        raise FileError(f"{name}: no place for the figures", hint=f"Put these two lines in: {MARKS[0]}  {MARKS[1]}")
    return whole.sub(lambda _: f"{MARKS[0]}\n{markdown}{MARKS[1]}", text)


def _entry(measure: Measure, entry: Entry | None) -> str:
    if entry is None:
        return "-"
    ratio = "" if entry.ratio is None else f" ({entry.ratio:.1f})"
    return f"{measure.shown(entry.median)}{ratio}"


def _beside(lists: list[list[float]]) -> Iterator[tuple[float, float]]:
    """Each list's numbers beside those of the first."""
    for one in lists[1:]:
        yield from zip(one, lists[0], strict=True)
