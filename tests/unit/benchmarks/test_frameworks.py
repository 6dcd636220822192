"""The published figures of the frameworks: what is measured, where, and how it is summed up and shown."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner, Result
from docker.models.containers import Container

from benchmarks.frameworks import measures, plot, report, run, selection
from benchmarks.frameworks.__main__ import frameworks
from benchmarks.frameworks.report import Report
from benchmarks.frameworks.selection import Subject
from benchmarks.inside import shared
from builder.cli.context import Context
from builder.common.console import View
from builder.common.errors import EngineError, ImageTestError
from builder.compat import gpus
from builder.compat.gpus import Gpu
from builder.engine.client import Engine
from builder.engine.model import EngineInfo
from builder.matrix import tags
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from tests.fakes.engine import INFO, FakeEngine, MemoryConsole
from tests.paths import ROOT

SVG = "{http://www.w3.org/2000/svg}"
ABOUT = {"python": "3.11.2", "cpu": "Example CPU", "cores": 4, "gpu": "", "driver": ""}


def cell(framework: str, line: str, *, cuda: str = "12.8", python: str = "3.11", variant: str = "plain") -> Cell:
    short = {"pytorch": "pt", "tensorflow": "tf"}.get(framework, framework)
    return Cell(
        framework=framework, short=short, line=line, release=f"{line}.0", cuda=cuda, python=python, variant=variant
    )


def subject(framework: str, line: str, **axes: str) -> Subject:
    point = cell(framework, line, **axes)
    return Subject(cell=point, reference=f"org/{point.id}", image_id=f"sha256:{point.id}")


PT, TF, JAX = subject("pytorch", "2.9"), subject("tensorflow", "2.20"), subject("jax", "0.10")


def filled(values: Mapping[str, Sequence[float | None]] = MappingProxyType({}), *, gpu: bool = False) -> Report:
    """A report of three images, with one value for each; None for no value."""
    results = Report(subjects=(PT, TF, JAX), size=2048, runs=1, gpu=gpu)
    for image in results.subjects:
        results.add(image.id, {"about": ABOUT, "workers": 4})
    for key, row in values.items():
        for image, value in zip(results.subjects, row, strict=True):
            if value is not None:
                results.add(image.id, {"measure": key, "value": value})
    return results


def everything() -> Report:
    return filled({measure.key: (1.0, 123456.0, 2.0) for measure in measures.of_device(gpu=False)})


def shown(results: Report, key: str) -> list[str]:
    title = results.title(measures.BY_KEY[key])
    return next(row[1:] for row in results.rows() if row[0] == title)


# ---- choice of images


def chosen(known: Sequence[Cell], *default_set: str) -> list[str]:
    """Ids of the cells that are measured by default."""
    sets = {"default": list(default_set)} if default_set else {}
    matrix: Any = SimpleNamespace(sets=sets, where=lambda *_: "matrix.yaml")
    return [cell.id for cell in selection.default(matrix, known)]


def test_the_default_is_the_cuda_and_python_that_most_frameworks_share() -> None:
    known = [
        cell("pytorch", "2.15", cuda="13.2", python="3.13"),
        cell("jax", "0.12", cuda="13.2", python="3.13"),
        cell("pytorch", "2.9"),
        cell("pytorch", "2.9", variant="jupyter"),
        cell("tensorflow", "2.20"),
        cell("jax", "0.10"),
    ]
    assert chosen(known) == ["pt-2.9-cu128-py311", "tf-2.20-cu128-py311", "jax-0.10-cu128-py311"]


def test_the_default_of_this_project_has_all_three() -> None:
    project = Project(ROOT)
    cells = selection.default(project.matrix, project.cells)
    assert sorted(cell.framework for cell in cells) == ["jax", "pytorch", "tensorflow"]
    assert len({(cell.cuda, cell.python, cell.variant) for cell in cells}) == 1


# ---- figures


def test_medians_and_ratios() -> None:
    results = filled({"import": (0.8, 1.6, 0.2)})
    for value in (9.0, 0.4):
        results.add(JAX.id, {"measure": "import", "value": value})
    entries = results.entries(measures.BY_KEY["import"])
    assert {cell: (entry.median, entry.ratio) for cell, entry in entries.items()} == {
        PT.id: (0.8, 2.0),
        TF.id: (1.6, 4.0),
        JAX.id: (0.4, 1.0),
    }
    assert shown(results, "import") == ["800 ms (2.0)", "1.60 s (4.0)", "400 ms (1.0)"]


def test_the_most_is_the_best_where_more_is_better() -> None:
    results = filled({"product_float32": (200.0, 400.0, 100.0)})
    assert shown(results, "product_float32") == ["200 (2.0)", "400 (1.0)", "100 (4.0)"]
    assert results.title(measures.BY_KEY["product_float32"]) == "matrix product 2048x2048, float32, GFLOP/s"


def test_an_absent_value_is_a_dash_and_a_note_with_the_reason() -> None:
    results = filled({"compiled_float32": (None, 0.2, 0.1)})
    results.add(PT.id, {"measure": "compiled_float32", "absent": "no compiler"})
    assert shown(results, "compiled_float32") == ["-", "200 ms (2.0)", "100 ms (1.0)"]
    assert "PyTorch: no compiler." in results.notes()


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("import", 0.9996, "1.00 s"),
        ("import", 0.0999, "99.9 ms"),
        ("memory_import", 522_176_060, "522.2 MB"),
        ("gpu_import", 4096, "0"),
        ("product_float32", 712345.6, "712346"),
    ],
)
def test_values_as_text(key: str, value: float, text: str) -> None:
    assert measures.BY_KEY[key].shown(value) == text


def test_a_missing_measure_is_a_problem() -> None:
    results = everything()
    assert results.problems() == []
    del results.figures[TF.id].values["load_n"]
    assert results.problems() == [f"{TF.id}: not measured: load_n"]


def test_a_failure_is_reported_once_with_its_reason() -> None:
    results = everything()
    del results.figures[JAX.id].values["import"]
    for _ in range(2):
        results.add(JAX.id, {"failed": "import", "status": 1, "reason": "ImportError: no"})
    assert results.problems() == [f"{JAX.id}: import: ImportError: no"]


def test_different_losses_are_a_problem() -> None:
    results = everything()
    for image, losses in ((PT, [4.4323, 2.6637]), (TF, [4.4323, 2.6639]), (JAX, [4.4323, 2.6637])):
        results.add(image.id, {"measure": "train_float32", "value": 0.1, "losses": losses})
    assert results.problems() == []
    results.add(TF.id, {"measure": "train_float32", "value": 0.1, "losses": [4.4323, 2.71]})
    [problem] = results.problems()
    assert problem.startswith("train_float32: the losses differ")


def test_data_has_every_value() -> None:
    results = filled({"import": (0.8, 1.6, 0.2)})
    results.add(PT.id, {"measure": "import", "value": 1.0})
    data = json.loads(json.dumps(results.as_data()))
    row = next(row for row in data["measures"] if row["key"] == "import")
    assert row["values"] == {PT.id: [0.8, 1.0], TF.id: [1.6], JAX.id: [0.2]}
    assert row["medians"][PT.id] == 0.9
    assert row["better"] == "less"
    assert [image["image_id"] for image in data["images"]] == [image.image_id for image in results.subjects]
    assert data["images"][0]["about"] == ABOUT


def test_the_page_of_this_project_has_the_place_and_the_picture() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert report.into_docs(page, "x\n", "page") != page
    assert "(pictures/frameworks.svg)" in page
    ET.fromstring((ROOT / "docs/pictures/frameworks.svg").read_text(encoding="utf-8"))


# ---- the picture


def panel(picture: str, key: str) -> ET.Element:
    return next(group for group in ET.fromstring(picture).iter(f"{SVG}g") if group.get("data-measure") == key)


def texts(picture: str, key: str) -> set[str | None]:
    return {text.text for text in panel(picture, key).iter(f"{SVG}text")}


def bars(picture: str, key: str) -> dict[str, float]:
    """Lengths by cell."""
    rects = [rect.attrib for rect in panel(picture, key).iter(f"{SVG}rect")]
    return {rect["data-cell"]: float(rect["width"]) for rect in rects if "data-cell" in rect}


def test_bars_are_as_long_as_their_values() -> None:
    picture = plot.draw(filled({"import": (0.8, 1.6, 0.2), "load_0": (1.0, 2.0, 3.0)}))
    lengths = bars(picture, "import")
    assert lengths[TF.id] == pytest.approx(2 * lengths[PT.id], rel=0.01)
    assert lengths[TF.id] == pytest.approx(8 * lengths[JAX.id], rel=0.01)
    expected = {"import", "less is better", "PyTorch", "800 ms (4.0)", "1.60 s (8.0)", "200 ms (1.0)"}
    assert expected <= texts(picture, "import")
    assert "more is better" in texts(picture, "load_0")


# ---- containers


@dataclass
class ProgramContainer:
    """Prints `out` in pieces and exits with `status`."""

    out: bytes
    status: int
    removed: bool = False

    def put_archive(self, path: str, data: bytes) -> bool:
        assert (path, data) == ("/", run.files())
        return True

    def logs(self, *, stream: bool = False, **_: Any) -> Any:
        pieces = [self.out[at : at + 7] for at in range(0, len(self.out), 7)]
        return iter(pieces) if stream else b"Traceback: out of luck\n"

    def wait(self) -> dict[str, int]:
        return {"StatusCode": self.status}

    def remove(self, **_: Any) -> None:
        self.removed = True


@dataclass
class Started:
    """A container that was started. `request` is what the program in it has to measure; empty for `true`."""

    image: str
    request: dict[str, Any]
    options: dict[str, Any]
    container: ProgramContainer


Answer = Callable[[str, dict[str, Any]], tuple[bytes, int]]


class ContainerEngine(FakeEngine):
    """Starts containers: `answer` returns output and exit status of a program, by image and request."""

    def __init__(self, answer: Answer, info: EngineInfo = INFO) -> None:
        super().__init__(info=info)
        self.answer = answer
        self.started: list[Started] = []

    @property
    def programs(self) -> list[Started]:
        return [started for started in self.started if started.request]

    def start(
        self,
        image: str,
        *,
        checkout: str,
        command: Sequence[str] | None = None,
        ports: Sequence[int] = (),
        gpus: Any = False,
        **options: Any,
    ) -> Container:
        assert all(started.container.removed for started in self.started), "two containers at once"
        assert command
        request = {} if command[0] == "true" else json.loads(command[-1])
        container = ProgramContainer(*(self.answer(image, request) if request else (b"", 0)))
        self.started.append(Started(image, request, {"gpus": gpus, "checkout": checkout, **options}, container))
        return cast("Container", container)


def lines(*output: dict[str, Any] | str) -> bytes:
    return "\n".join(line if isinstance(line, str) else json.dumps(line) for line in output).encode()


def good(image: str, request: dict[str, Any]) -> tuple[bytes, int]:
    return lines({"doing": "import"}, "a framework prints this", "[1]", {"measure": "import", "value": 1.5}), 0


def measured(*images: Subject, answer: Answer = good, gpu: str = "") -> tuple[Report, ContainerEngine, str]:
    """Report, engine and progress of two runs."""
    engine, console = ContainerEngine(answer), MemoryConsole()
    settings = run.Settings(runs=2, size=64, gpu=gpu, checkout="/checkout")
    results = run.measure(engine, images, settings, View(console))
    assert all(started.container.removed for started in engine.started)
    return results, engine, console.text


def test_images_alternate_one_container_at_a_time() -> None:
    results, engine, progress = measured(PT, JAX)
    assert [started.image for started in engine.programs] == [PT.image_id, JAX.image_id] * 2
    assert results.figures[PT.id].values["import"] == [1.5, 1.5]
    assert len(results.figures[JAX.id].values["container"]) == 2 * run.STARTS
    assert {started.options["checkout"] for started in engine.started} == {"/checkout"}
    assert engine.calls == ["sweep"]
    assert f"{PT.id}: run 2 of 2: import" in progress
    assert [started.request["warm"] for started in engine.programs] == [True, True, False, False]
    assert engine.programs[0].request["framework"] == "pytorch"


def test_an_image_that_fails_does_not_stop_the_others() -> None:
    results, _, progress = measured(
        PT, JAX, answer=lambda image, _: (b"", 139) if image == PT.image_id else good("", _)
    )
    assert results.problems()[0].startswith(f"{PT.id}: run 1 of 2: exit status 139\nTraceback: out of luck")
    assert results.figures[JAX.id].values["import"] == [1.5, 1.5]
    assert f"{PT.id}: failed" in progress
    assert f"{JAX.id}: done" in progress


def test_gpus_are_assigned_or_hidden() -> None:
    on_cpu = [started.options for started in measured(PT)[1].started]
    assert {options["environment"]["NVIDIA_VISIBLE_DEVICES"] for options in on_cpu} == {"void"}
    assert not any(options["gpus"] for options in on_cpu)
    on_gpu = [started.options for started in measured(PT, gpu="GPU-1")[1].started]
    assert all(options["gpus"] == ["GPU-1"] for options in on_gpu)
    assert not any("NVIDIA_VISIBLE_DEVICES" in options["environment"] for options in on_gpu)


def test_the_time_of_a_block_is_divided_by_its_steps_and_includes_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 0.0, []

    def step() -> None:
        calls.append("step")

    def wait() -> None:
        nonlocal now
        now += 3.0 * calls[-2:].count("step")
        calls.append("wait")

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert shared.step_s(step, wait, count=3, steps=2) == 3.0
    assert calls == ["step", "step", "wait"] * 3


# ---- the command


@dataclass
class FrameworksCommand:
    """Runs the command on the matrix of this project, with an engine that has all images."""

    root: Path
    patch: pytest.MonkeyPatch
    context: Context = field(default_factory=Context)
    engine: FakeEngine = field(default_factory=FakeEngine)

    def __call__(self, *arguments: str, info: EngineInfo = INFO) -> Result:
        project = Project(self.root)
        self.engine = ContainerEngine(answer, info)
        for names in tags.compute(project.matrix, project.cells).values():
            self.engine.add_image(str(names[0]))
        self.patch.setattr(Engine, "connect", lambda: self.engine)
        self.context = Context(root=self.root, err=MemoryConsole(), out=MemoryConsole())
        return CliRunner().invoke(frameworks, arguments, obj=self.context)

    def output(self, *arguments: str, info: EngineInfo = INFO) -> str:
        """What one run prints to standard output."""
        result = self("--runs", "1", *arguments, info=info)
        assert result.exception is None
        return cast("MemoryConsole", self.context.out).text

    @property
    def progress(self) -> str:
        return cast("MemoryConsole", self.context.err).text

    @property
    def gpus(self) -> set[tuple[str, ...]]:
        """The GPUs of all containers that were started."""
        return {tuple(started.options["gpus"] or ()) for started in cast("ContainerEngine", self.engine).started}


def answer(image: str, request: dict[str, Any]) -> tuple[bytes, int]:
    keys = [measure.key for measure in measures.of_device(gpu=request["gpu"]) if measure.key != "container"]
    return lines({"about": ABOUT, "workers": 4}, *({"measure": key, "value": 2.0} for key in keys)), 0


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FrameworksCommand:
    (tmp_path / "matrix.yaml").write_text((ROOT / "matrix.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(gpus, "read", lambda: ("", ()))
    return FrameworksCommand(tmp_path, monkeypatch)


def test_the_whole_command(command: FrameworksCommand, tmp_path: Path) -> None:
    page, data, picture = tmp_path / "page.md", tmp_path / "figures.json", tmp_path / "figures.svg"
    page.write_text("\n".join(report.MARKS), encoding="utf-8")
    table = command.output("--json", str(data), "--plot", str(picture), "--docs", str(page), "--runs", "2")
    for part in ("PyTorch", "matrix product 2048x2048", "CPU: Example CPU, 4 cores", "Median of 2 runs"):
        assert part in table
    assert json.loads(data.read_text(encoding="utf-8"))["runs"] == 2
    assert len(bars(picture.read_text(encoding="utf-8"), "import")) == 3
    assert "| import |" in page.read_text(encoding="utf-8")


def test_without_a_usable_gpu_all_images_are_measured_on_the_cpu(
    command: FrameworksCommand, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Gpu(name="H100", capability="9.0", memory=80 * 10**9, free=10**9, index=0, uuid="GPU-0")
    monkeypatch.setattr(gpus, "read", lambda: ("570", (device,)))
    nvidia = replace(INFO, runtimes=("nvidia", "runc"))
    refused = command("--gpu", "require", info=nvidia).exception
    assert isinstance(refused, EngineError)
    assert "no GPU has 8 GB free" in str(refused)
    assert not command.gpus, "something was measured"
    assert "2048x2048" in command.output(info=nvidia)
    assert "measuring on the CPU: no GPU has 8 GB free" in command.progress
    assert command.gpus == {()}


def test_a_missing_measure_fails_the_command_and_nothing_is_drawn(
    command: FrameworksCommand, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "answer", lambda *_: (lines({"about": ABOUT, "workers": 4}), 0))
    picture, data = tmp_path / "figures.svg", tmp_path / "figures.json"
    error = command("--plot", str(picture), "--json", str(data), "--runs", "1").exception
    assert isinstance(error, ImageTestError)
    assert "not measured: python, import, " in str(error)
    assert not picture.exists()
    assert json.loads(data.read_text(encoding="utf-8"))["problems"]
