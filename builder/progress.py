"""One build's state, from BuildKit's messages: what runs now, what was printed, what failed. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from builder.trace import Status, Vertex

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
    """Feed it statuses; it calls `log` with each line for the log file, and answers what a view asks.

    `hide` takes what must not be shown (hosts of mirrors) out of all that BuildKit tells.
    """

    log: Callable[[str], None]
    hide: Callable[[str], str]
    steps: dict[str, Step] = field(default_factory=dict)

    def feed(self, status: Status) -> list[Step]:
        """Returns the steps that began or ended with this message, for a plain view."""
        changed = []
        for told in status.vertices:
            vertex = replace(told, name=self.hide(told.name), error=self.hide(told.error))
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
        """The step to show: the latest begun of those that are not done."""
        open_ = [step for step in self.steps.values() if step.vertex.started and not step.vertex.completed]
        return max(open_, key=lambda step: step.vertex.started, default=None)

    @property
    def failed(self) -> Step | None:
        """The step that failed by itself (others are cancelled because of it)."""
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


def describe(vertex: Vertex) -> str:
    """`cached`, `failed` or the seconds it took."""
    if vertex.error:
        return "failed"
    if vertex.cached:
        return "cached"
    return f"{vertex.completed - vertex.started:.1f} s"


_WHEELS = re.compile(r"wheels-([a-z0-9]+)\.txt")
_PLACE = re.compile(r"^(\[[^\]]*\]\s*)?")


def short_name(name: str) -> str:
    """What a step does, in a few words: a rendered RUN line is long, and its first words are all mounts."""
    place = _PLACE.match(name)
    prefix = place[0] if place else ""
    if found := _WHEELS.search(name):
        return f"{prefix}install {found[1]} wheels"
    if "apt-get install" in name:
        return f"{prefix}install Debian packages"
    text = re.sub(r"--mount=\S+\s*", "", name)
    return re.sub(r"\s+", " ", text).strip()
