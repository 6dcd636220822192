"""The state of a build or a pull, from the engine's messages. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from builder.common.units import size
from builder.engine.trace import Status, Vertex

_WORTH_A_LINE = re.compile(r"\bRUN\b|\binstall\b|^exporting")
TAIL = 15  # lines of the failing step that are shown


@dataclass
class Step:
    vertex: Vertex
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL))
    unfinished: str = ""
    current: int = 0
    total: int = 0


@dataclass
class BuildProgress:
    """The steps of a build, updated by `feed`. `log` is called with each line for the log file.

    `hide` removes from names, errors and output what must not be shown (hosts of mirrors).
    """

    log: Callable[[str], None]
    hide: Callable[[str], str]
    steps: dict[str, Step] = field(default_factory=dict)

    def feed(self, status: Status) -> list[Step]:
        """Updates the steps; returns those that began or ended with this message, for a plain view."""
        changed = []
        for raw in status.vertices:
            vertex = replace(raw, name=self.hide(raw.name), error=self.hide(raw.error))
            step = self.steps.get(vertex.digest)
            if step is None:
                step = self.steps[vertex.digest] = Step(Vertex(digest=vertex.digest))
            before, step.vertex = step.vertex, vertex
            if vertex.started and not before.started and not vertex.cached:
                self.log(f"==> {vertex.name}")
                changed.append(step)
            if vertex.completed and not before.completed:
                self._flush(step)
                self.log(f"<== {describe(vertex)}: {vertex.name}")
                changed.append(step)
        for part in status.progress:
            if step := self.steps.get(part.vertex):
                step.current, step.total = part.current, part.total
        for output in status.output:
            if step := self.steps.get(output.vertex):
                self._print(step, output.text)
        return changed

    @property
    def running(self) -> Step | None:
        """The step to show: the last started of those that are not finished."""
        open_ = [step for step in self.steps.values() if step.vertex.started and not step.vertex.completed]
        return max(open_, key=lambda step: step.vertex.started, default=None)

    def summary(self) -> str:
        """The running step in one line; empty between steps."""
        step = self.running
        if step is None:
            return ""
        text = short_name(step.vertex.name)
        if step.total:
            text += f"  {size(step.current)} of {size(step.total)}"
        elif step.current:
            text += f"  {size(step.current)}"
        return f"{text}  {step.tail[-1]}" if step.tail else text

    @property
    def failed(self) -> Step | None:
        """The step that failed first (others are cancelled because of it)."""
        broken = [step for step in self.steps.values() if step.vertex.error]
        own = [step for step in broken if "context canceled" not in step.vertex.error]
        return next(iter(own or broken), None)

    def _print(self, step: Step, text: str) -> None:
        *lines, step.unfinished = (step.unfinished + text).split("\n")
        for line in lines:
            self._line(step, line)

    def _flush(self, step: Step) -> None:
        if step.unfinished:
            self._line(step, step.unfinished)
            step.unfinished = ""

    def _line(self, step: Step, line: str) -> None:
        clean = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self.hide(line.rstrip("\r").rsplit("\r", 1)[-1])).rstrip()
        if clean:
            step.tail.append(clean)
            self.log(f"    {clean}")


def lines(changed: Iterable[Step]) -> Iterator[str]:
    """A line for each step that began or ended, except for copies and settings, which take no time."""
    for step in changed:
        name = short_name(step.vertex.name)
        if _WORTH_A_LINE.search(name):
            yield f"{name} {describe(step.vertex) if step.vertex.completed else '...'}"


def describe(vertex: Vertex) -> str:
    """`cached`, `failed` or the seconds it took."""
    if vertex.error:
        return "failed"
    if vertex.cached:
        return "cached"
    return f"{vertex.completed - vertex.started:.1f} s"


_WHEELS = re.compile(r"source=images/[^/,]+/(?:wheels-)?([a-z0-9-]+)\.txt")
_STAGE = re.compile(r"^(\[[^\]]*\]\s*)?")


def short_name(name: str) -> str:
    """A short name of a step: a rendered RUN line is long and begins with its mounts."""
    match = _STAGE.match(name)
    stage = match[0] if match else ""
    if wheels := _WHEELS.search(name):
        return f"{stage}install {wheels[1]} wheels"
    if "/mnt/steps/os.sh" in name:
        return f"{stage}install Debian packages"
    text = re.sub(r"--mount=\S+\s*", "", name)
    return re.sub(r"\s+", " ", text).strip()


@dataclass
class PullProgress:
    """Counts the bytes of layers in the messages of a pull. `status` is that of the messages that count.

    `is_retrying`: a download failed at least once.
    """

    status: str
    is_retrying: bool = False
    _layers: dict[str, int] = field(default_factory=dict)

    def feed(self, message: Mapping[str, Any]) -> int:
        """Returns the number of bytes since the message before."""
        status = str(message.get("status", ""))
        self.is_retrying |= status.startswith("Retrying")
        if status != self.status:
            return 0
        layer, current = str(message.get("id", "")), int((message.get("progressDetail") or {}).get("current") or 0)
        before = self._layers.get(layer, 0)
        self._layers[layer] = max(before, current)  # a download that starts over counts once
        return self._layers[layer] - before
