"""The benchmark of the frameworks: choice of images, figures, picture, containers, command."""

from __future__ import annotations

import ast
import io
import json
import re
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from builder.common.errors import BuilderError, EngineError, FileError, ImageTestError, UsageError
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


def test_the_default_set_decides_between_equal_pairs() -> None:
    known = [
        cell(name, line, python=python)
        for name, line in (("pytorch", "2.9"), ("jax", "0.10"))
        for python in ("3.11", "3.13")
    ]
    assert chosen(known) == ["pt-2.9-cu128-py311", "jax-0.10-cu128-py311"]
    assert chosen(known, "*-py313") == ["pt-2.9-cu128-py313", "jax-0.10-cu128-py313"]


def test_one_line_of_each_framework_preferably_of_the_default_set() -> None:
    known = [cell("jax", "0.10"), cell("jax", "0.12"), cell("pytorch", "2.9")]
    assert chosen(known) == ["jax-0.10-cu128-py311", "pt-2.9-cu128-py311"]
    assert chosen(known, "jax-0.12-*") == ["jax-0.12-cu128-py311", "pt-2.9-cu128-py311"]


def test_the_default_of_this_project_has_all_three() -> None:
    project = Project(ROOT)
    cells = selection.default(project.matrix, project.cells)
    assert sorted(cell.framework for cell in cells) == ["jax", "pytorch", "tensorflow"]
    assert len({(cell.cuda, cell.python, cell.variant) for cell in cells}) == 1


def test_a_matrix_without_these_frameworks(tiny: Project) -> None:
    with pytest.raises(UsageError, match="no plain image of PyTorch, TensorFlow, JAX"):
        selection.default(tiny.matrix, tiny.cells)
    with pytest.raises(UsageError, match="no benchmark for ember, quartz, only for pytorch, tensorflow, jax"):
        selection.subjects(FakeEngine(), tiny, tiny.cells)


def test_images_are_found_by_their_full_tags() -> None:
    project, engine = Project(ROOT), FakeEngine()
    cells = {cell.framework: cell for cell in selection.default(project.matrix, project.cells)}
    reference = f"org/pt-cuda:{cells['pytorch'].release}-cu128-py311"
    image_id = engine.add_image(reference)
    with pytest.raises(EngineError) as caught:
        selection.subjects(engine, project, list(cells.values()))
    missing = [cells["tensorflow"].id, cells["jax"].id]
    assert str(caught.value) == f"not built: {', '.join(missing)}"
    assert caught.value.hint == f"builder images {' '.join(missing)}"
    [image] = selection.subjects(engine, project, [cells["pytorch"]])
    assert (image.reference, image.image_id) == (reference, image_id)


def test_every_framework_has_its_program() -> None:
    assert {path.stem for path in selection.INSIDE.glob("on_*.py")} == {f"on_{name}" for name in selection.TITLES}


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


def test_nothing_is_a_multiple_of_no_gpu_memory() -> None:
    assert shown(filled({"gpu_import": (0.0, 0.0, 5e8)}, gpu=True), "gpu_import") == ["0", "0", "500.0 MB"]


def test_an_absent_value_is_a_dash_and_a_note_with_the_reason() -> None:
    results = filled({"compiled_float32": (None, 0.2, 0.1)})
    results.add(PT.id, {"measure": "compiled_float32", "absent": "no compiler"})
    assert shown(results, "compiled_float32") == ["-", "200 ms (2.0)", "100 ms (1.0)"]
    assert "PyTorch: no compiler." in results.notes()


def test_gpu_rows_only_on_a_gpu() -> None:
    assert not [row for row in filled().rows() if "GPU" in row[0] or "TF32" in row[0]]
    assert len([row for row in filled(gpu=True).rows() if "GPU memory" in row[0]]) == 3


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("import", 0.0069, "6.90 ms"),
        ("import", 0.9996, "1.00 s"),
        ("import", 0.0999, "99.9 ms"),
        ("import", 123.4, "123 s"),
        ("memory_import", 522_176_060, "522.2 MB"),
        ("gpu_import", 4096, "0"),
        ("product_float32", 712345.6, "712346"),
        ("load_0", 9.996, "10.0"),
    ],
)
def test_values_as_text(key: str, value: float, text: str) -> None:
    assert measures.BY_KEY[key].shown(value) == text


def test_keys_are_unique() -> None:
    assert len(measures.BY_KEY) == len(measures.MEASURES)


def test_the_device() -> None:
    results = filled()
    assert results.device() == "CPU: Example CPU, 4 cores"
    results.add(PT.id, {"about": {**ABOUT, "gpu": "Example GPU", "driver": "570.1"}, "workers": 4})
    assert results.device() == "Example GPU, driver 570.1; Example CPU, 4 cores"


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


def test_markdown_replaces_what_is_between_its_marks() -> None:
    text = f"before\n{report.MARKS[0]}\nold\n{report.MARKS[1]}\nafter\n"
    page = report.into_docs(text, filled({"import": (0.8, 1.6, 0.2)}).markdown(), "x.md")
    assert page.startswith(
        f"before\n{report.MARKS[0]}\n| | PyTorch 2.9.0 | TensorFlow 2.20.0 | JAX 0.10.0 |\n|---|---:|"
    )
    assert "| import | 800 ms (4.0) | 1.60 s (8.0) | 200 ms (1.0) |" in page
    assert page.endswith(f"{report.MARKS[1]}\nafter\n")
    assert "old" not in page
    assert report.into_docs(page, "new\n", "x.md") == f"before\n{report.MARKS[0]}\nnew\n{report.MARKS[1]}\nafter\n"


@pytest.mark.parametrize("text", ["", report.MARKS[0], "".join(report.MARKS) * 2])
def test_a_file_without_one_place_for_the_figures(text: str) -> None:
    with pytest.raises(FileError, match=r"x\.md: no place for the figures"):
        report.into_docs(text, "", "x.md")


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


def test_a_missing_value_has_no_bar_and_zeros_no_length() -> None:
    picture = plot.draw(filled({"compiled_float32": (None, 0.2, 0.1), "gpu_import": (0.0, -5.0, 0.0)}, gpu=True))
    assert bars(picture, "compiled_float32").keys() == {TF.id, JAX.id}
    assert "no value" in texts(picture, "compiled_float32")
    assert set(bars(picture, "gpu_import").values()) == {0.0}


def test_text_is_escaped_and_nothing_is_outside_the_picture() -> None:
    results = everything()
    results.add(PT.id, {"about": {**ABOUT, "cpu": '<script>&"'}, "workers": 4})
    picture = plot.draw(results)
    assert "<script>" not in picture
    root = ET.fromstring(picture)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for rect in root.iter(f"{SVG}rect"):
        assert float(rect.attrib["x"]) + float(rect.attrib["width"]) <= width
        assert float(rect.attrib["y"]) + float(rect.attrib["height"]) <= height


def test_two_images_of_one_framework_have_different_names() -> None:
    results = Report(subjects=(PT, subject("pytorch", "2.15", cuda="13.2", python="3.13")), size=1, runs=1, gpu=False)
    for image in results.subjects:
        results.add(image.id, {"measure": "import", "value": 1.0})
    assert {"pt 2.9", "pt 2.15"} <= texts(plot.draw(results), "import")


# ---- containers


@dataclass
class FakeContainer:
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
    container: FakeContainer


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
        container = FakeContainer(*(self.answer(image, request) if request else (b"", 0)))
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


def test_progress_is_shown_while_the_program_runs() -> None:
    """Not only when the output is complete."""

    def output() -> Iterator[bytes]:
        yield b'{"doing": "import"}\n'
        pytest.fail("read further than the first line")

    assert next(run._json_lines(output())) == {"doing": "import"}


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


def test_the_programs_are_copied_completely_and_ready_is_last() -> None:
    with tarfile.open(fileobj=io.BytesIO(run.files())) as tar:
        members = tar.getmembers()
    names = [member.name for member in members]
    assert names[-1] == "tmp/bench/ready"
    assert {f"tmp/bench/benchmarks/inside/{path.name}" for path in selection.INSIDE.glob("*.py")} <= set(names)
    folders = ("tmp/bench", "tmp/bench/benchmarks", "tmp/bench/benchmarks/inside")
    assert names[:3] == list(folders)
    assert {f"{folder}/__init__.py" for folder in folders[1:]} <= set(names)
    assert all(member.mode & 0o444 == 0o444 for member in members)


def test_the_programs_parse_on_python_3_9_and_import_nothing_of_the_host() -> None:
    for path in selection.INSIDE.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("builder", "benchmarks")):
                assert f"{node.module}.".startswith("benchmarks.inside."), path.name


def test_the_programs_print_every_measure() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in selection.INSIDE.glob("*.py"))
    words = set(re.findall(r'"([a-z0-9_]+)"', text))
    families = {"product_", "train_"}
    for key in measures.BY_KEY.keys() - {"container"}:
        assert key in words or any(key.startswith(name) and key.removeprefix(name) in words for name in families), key


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

NVIDIA = replace(INFO, runtimes=("nvidia", "runc"))


@dataclass
class Bench:
    """Runs the command on the matrix of this project, with an engine that has all images, or none."""

    root: Path
    patch: pytest.MonkeyPatch
    context: Context = field(default_factory=Context)
    engine: FakeEngine = field(default_factory=FakeEngine)

    def __call__(self, *arguments: str, built: bool = True, info: EngineInfo = INFO) -> Result:
        project = Project(self.root)
        self.engine = ContainerEngine(answer, info)
        for names in tags.compute(project.matrix, project.cells).values() if built else ():
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

    def refused(self, kind: type[BuilderError], *arguments: str, **options: Any) -> BuilderError:
        """The error of a command that measures nothing."""
        error = self(*arguments, **options).exception
        assert isinstance(error, kind), error
        assert not self.gpus, "something was measured"
        return error


def answer(image: str, request: dict[str, Any]) -> tuple[bytes, int]:
    keys = [measure.key for measure in measures.of_device(gpu=request["gpu"]) if measure.key != "container"]
    return lines({"about": ABOUT, "workers": 4}, *({"measure": key, "value": 2.0} for key in keys)), 0


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    (tmp_path / "matrix.yaml").write_text((ROOT / "matrix.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(gpus, "read", lambda: ("", ()))
    return Bench(tmp_path, monkeypatch)


def test_the_whole_command(bench: Bench, tmp_path: Path) -> None:
    page, data, picture = tmp_path / "page.md", tmp_path / "figures.json", tmp_path / "figures.svg"
    page.write_text("\n".join(report.MARKS), encoding="utf-8")
    table = bench.output("--json", str(data), "--plot", str(picture), "--docs", str(page), "--runs", "2")
    for part in ("PyTorch", "matrix product 2048x2048", "CPU: Example CPU, 4 cores", "Median of 2 runs"):
        assert part in table
    assert json.loads(data.read_text(encoding="utf-8"))["runs"] == 2
    assert len(bars(picture.read_text(encoding="utf-8"), "import")) == 3
    assert "| import |" in page.read_text(encoding="utf-8")


def test_the_help_explains_the_command() -> None:
    text = CliRunner().invoke(frameworks, ["--help"]).output
    for part in ("Default: one plain image of each framework", "800 ms (2.0)", "--plot figures.svg", "[default: 3"):
        assert part in text


def test_images_that_are_not_built(bench: Bench) -> None:
    error = bench.refused(EngineError, built=False)
    assert str(error).startswith("not built: ")
    assert error.hint.startswith("builder images ")


def machine(monkeypatch: pytest.MonkeyPatch, *free: int) -> None:
    """A machine with GPUs of 80 GB; `free` are the free GB of each."""
    devices = tuple(
        Gpu(name="H100", capability="9.0", memory=80 * 10**9, free=count * 10**9, index=number, uuid=f"GPU-{number}")
        for number, count in enumerate(free)
    )
    monkeypatch.setattr(gpus, "read", lambda: ("570", devices))


def test_the_gpu_with_most_free_memory_is_used(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 20, 70, 30)
    assert "matrix product 8192x8192, TF32" in bench.output("--gpu", "require", info=NVIDIA)
    assert bench.gpus == {("GPU-1",)}
    assert "matrix product 2048x2048" in bench.output("--gpu", "off", info=NVIDIA)
    assert bench.gpus == {()}


CPU_CELL = "jax-0.10-cpu-py311"


@pytest.mark.parametrize(
    ("cells", "free", "info", "reason"),
    [
        ((), 1, INFO, "Docker Engine has no NVIDIA runtime"),
        ((), 1, NVIDIA, "no GPU has 8 GB free"),
        ((CPU_CELL, "pt-2.9-cu128-py311"), 70, NVIDIA, f"{CPU_CELL}: built for the CPU"),
    ],
)
def test_without_a_usable_gpu_all_images_are_measured_on_the_cpu(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, cells: tuple[str, ...], free: int, info: EngineInfo, reason: str
) -> None:
    machine(monkeypatch, free)
    assert reason in str(bench.refused(EngineError, *cells, "--gpu", "require", info=info))
    assert "2048x2048" in bench.output(*cells, info=info)
    assert f"measuring on the CPU: {reason}" in bench.progress
    assert bench.gpus == {()}


def test_a_plot_is_an_svg_and_is_refused_before_anything_is_measured(bench: Bench) -> None:
    assert "--plot writes SVG" in str(bench.refused(UsageError, "--plot", "figures.png"))


def test_a_missing_measure_fails_the_command_and_nothing_is_drawn(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "answer", lambda *_: (lines({"about": ABOUT, "workers": 4}), 0))
    picture, data = tmp_path / "figures.svg", tmp_path / "figures.json"
    error = bench("--plot", str(picture), "--json", str(data), "--runs", "1").exception
    assert isinstance(error, ImageTestError)
    assert "not measured: python, import, " in str(error)
    assert not picture.exists()
    assert json.loads(data.read_text(encoding="utf-8"))["problems"]
