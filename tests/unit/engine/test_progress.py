"""The state of a build from its messages: the log, the running step, the failed step."""

from __future__ import annotations

from typing import Any

import pytest

from builder.engine import progress
from builder.engine.progress import TAIL, BuildProgress, PullProgress
from builder.engine.trace import Output, Progress, Status, Vertex


class Build:
    """A BuildProgress with its log."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.state = BuildProgress(log=self.log.append, hide=lambda text: text.replace("secret", "***"))

    def vertex(self, digest: str, *, name: str = "", started: float = 0, completed: float = 0, error: str = "",
               cached: bool = False) -> list[str]:  # fmt: skip
        """Returns names of the steps that began or ended."""
        vertex = Vertex(
            digest=digest, name=name or digest, started=started, completed=completed, error=error, cached=cached
        )
        return [step.vertex.name for step in self.state.feed(Status(vertices=(vertex,)))]

    def prints(self, digest: str, *texts: str) -> None:
        for text in texts:
            self.state.feed(Status(output=(Output(vertex=digest, text=text),)))

    def tail(self, digest: str) -> list[str]:
        return list(self.state.steps[digest].tail)


@pytest.fixture
def build() -> Build:
    return Build()


def test_begin_print_end(build: Build) -> None:
    assert build.vertex("a") == []
    assert build.vertex("a", started=10) == ["a"]
    assert build.vertex("a", started=10) == []
    build.prints("a", "one\n")
    assert build.vertex("a", started=10, completed=12.5) == ["a"]
    assert build.vertex("a", started=10, completed=12.5) == []
    assert build.log == ["==> a", "    one", "<== 2.5 s: a"]


def test_cached_steps_only_end(build: Build) -> None:
    assert build.vertex("a", started=1, completed=1, cached=True) == ["a"]
    assert build.log == ["<== cached: a"]


@pytest.mark.parametrize(
    ("texts", "lines"),
    [
        (["a\nb\n"], ["a", "b"]),
        (["a", "b\nc", "\n"], ["ab", "c"]),
        (["unfinished"], ["unfinished"]),
        (["10%\r20%\r30%\n"], ["30%"]),
        (["\x1b[31mred\x1b[0m\n"], ["red"]),
        (["  \n\n", "x  \n"], ["x"]),
        (["the secret\n"], ["the ***"]),
        (["the sec", "ret\n"], ["the ***"]),
        ([f"{number}\n" for number in range(40)], [str(number) for number in range(40 - TAIL, 40)]),
        (["done\r\n"], ["done"]),
    ],
)
def test_lines(build: Build, texts: list[str], lines: list[str]) -> None:
    build.vertex("a", started=1)
    build.prints("a", *texts)
    build.vertex("a", started=1, completed=2)
    assert build.tail("a") == lines
    assert build.log[-1 - len(lines) : -1] == [f"    {line}" for line in lines]


def test_names_and_errors_are_hidden(build: Build) -> None:
    assert build.vertex("a", name="RUN secret", started=1, completed=2, error="secret failed") == ["RUN ***"] * 2
    assert not any("secret" in line for line in build.log)
    failed = build.state.failed
    assert failed
    assert failed.vertex.error == "*** failed"


def test_running_is_the_last_started_step(build: Build) -> None:
    assert build.state.running is None
    build.vertex("a", started=1)
    build.vertex("b", started=2)
    assert build.state.running is build.state.steps["b"]
    build.vertex("b", started=2, completed=3)
    assert build.state.running is build.state.steps["a"]


def test_failed_is_the_step_that_failed_first(build: Build) -> None:
    assert build.state.failed is None
    build.vertex("a", started=1, completed=3, error="context canceled: gone")
    assert build.state.failed is build.state.steps["a"]
    build.vertex("b", started=1, completed=2, error="exit code: 1")
    assert build.state.failed is build.state.steps["b"]
    assert build.log[-1] == "<== failed: b"


def test_progress_of_a_step(build: Build) -> None:
    build.vertex("a", started=1)
    build.state.feed(Status(progress=(Progress(vertex="a", current=5, total=10), Progress(vertex="?", current=1))))
    assert (build.state.steps["a"].current, build.state.steps["a"].total) == (5, 10)


def test_messages_about_unknown_steps_are_skipped(build: Build) -> None:
    build.prints("unknown", "x\n")
    assert build.log == []
    assert build.state.steps == {}


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (
            "[os 2/3] RUN --mount=type=cache,id=x SOURCE_DATE_EPOCH=1 sh /mnt/steps/os.sh python3 tini",
            "[os 2/3] install Debian packages",
        ),
        (
            "[image 1/4] RUN --mount=type=bind,source=images/x/cuda.txt,target=/m sh /mnt/steps/wheels.sh cuda",
            "[image 1/4] install cuda wheels",
        ),
        (
            "[image 2/4] RUN --mount=type=bind,source=images/x/wheels-ember.txt,target=/m sh /mnt/steps/wheels.sh",
            "[image 2/4] install ember wheels",
        ),
        ("[image 4/4] COPY  templates/base/files/ /", "[image 4/4] COPY templates/base/files/ /"),
        ("RUN --mount=type=bind,source=a,target=b   true", "RUN true"),
        ("exporting to image", "exporting to image"),
        ("", ""),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert progress.short_name(name) == short


@pytest.mark.parametrize(
    ("vertex", "text"),
    [
        (Vertex(started=1, completed=2, error="x", cached=True), "failed"),
        (Vertex(cached=True), "cached"),
        (Vertex(started=1, completed=3.25), "2.2 s"),
    ],
)
def test_describe(vertex: Vertex, text: str) -> None:
    assert progress.describe(vertex) == text


def pulled(status: str, layer: str, current: int | None) -> dict[str, Any]:
    return {"status": status, "id": layer, "progressDetail": {} if current is None else {"current": current}}


@pytest.mark.parametrize(
    ("status", "counts"), [("Extracting", [0, 0, 30, 0, 20, 5]), ("Downloading", [10, 0, 0, 0, 0, 0])]
)
def test_the_bytes_of_a_pull(status: str, counts: list[int]) -> None:
    """Each message has the bytes of its layer so far."""
    progress = PullProgress(status)
    messages: list[dict[str, Any]] = [
        pulled("Downloading", "a", 10), pulled("Pull complete", "c", None), pulled("Extracting", "a", 30),
        {"status": "Extracting"}, pulled("Extracting", "a", 50), pulled("Extracting", "b", 5),
    ]  # fmt: skip
    assert [progress.feed(message) for message in messages] == counts


def test_a_download_that_starts_over_counts_once() -> None:
    progress = PullProgress("Downloading")
    counts = [progress.feed(pulled("Downloading", "a", current)) for current in (10, 20)]
    assert not progress.is_retrying
    assert progress.feed(pulled("Retrying in 5 seconds", "a", None)) == 0
    assert progress.is_retrying
    assert [*counts, *(progress.feed(pulled("Downloading", "a", current)) for current in (5, 25))] == [10, 10, 0, 5]
