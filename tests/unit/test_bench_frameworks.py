"""`builder bench frameworks`: which images, what becomes of the figures, the picture, the containers' lines."""

from __future__ import annotations

import ast
import io
import json
import re
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from xml.etree import ElementTree as ET

import pytest
from click.testing import CliRunner, Result
from docker.models.containers import Container

from builder import gpu, tags
from builder.bench import choice, measures, plot, report, run
from builder.bench.choice import Subject
from builder.bench.inside import shared
from builder.bench.report import Report
from builder.cells import Cell
from builder.cli import benchmarks
from builder.cli.context import Context
from builder.engine import Engine, EngineInfo
from builder.errors import BuilderError, EngineError, FileError, ImageTestError, UsageError
from builder.gpu import Gpu
from builder.project import Project
from builder.view import View
from tests.unit.fakes import INFO, FakeEngine, MemoryConsole

SVG = "{http://www.w3.org/2000/svg}"
ROOT = Path(__file__).resolve().parents[2]
ABOUT = {"python": "3.11.2", "cpu": "Example CPU", "cores": 4, "gpu": "", "driver": ""}


def cell(framework: str, line: str, *, cuda: str = "12.8", python: str = "3.11", variant: str = "plain") -> Cell:
    short = {"pytorch": "pt", "tensorflow": "tf"}.get(framework, framework)
    return Cell(
        framework=framework, short=short, line=line, release=f"{line}.0", cuda=cuda, python=python, variant=variant
    )


def subject(framework: str, line: str, **more: str) -> Subject:
    made = cell(framework, line, **more)
    return Subject(cell=made, reference=f"org/{made.id}", image_id=f"sha256:{made.id}")


PT, TF, JAX = subject("pytorch", "2.9"), subject("tensorflow", "2.20"), subject("jax", "0.10")


def filled(**values: Sequence[float | None]) -> Report:
    """A report of three images; one value for each, None where there is none."""
    made = Report(subjects=(PT, TF, JAX), size=2048, runs=1, gpu=False)
    for one in made.subjects:
        made.take(one.id, {"about": ABOUT, "workers": 4})
    for key, row in values.items():
        for one, value in zip(made.subjects, row, strict=True):
            if value is not None:
                made.take(one.id, {"measure": key, "value": value})
    return made


def shown(made: Report, key: str) -> list[str]:
    title = made.title(measures.BY_KEY[key])
    return next(row[1:] for row in made.rows() if row[0] == title)


# ---- which images


def matrix_of(known: Sequence[Cell], *sets: str) -> Any:
    """As much of a matrix as selection reads."""

    class Some:
        pass

    some = Some()
    some.sets, some.exclude = ({"default": list(sets)} if sets else {}), ()  # type: ignore[attr-defined]
    return some


def ids(chosen: Sequence[Cell]) -> list[str]:
    return [one.id for one in chosen]


def test_the_default_is_what_most_frameworks_share() -> None:
    known = [
        cell("pytorch", "2.15", cuda="13.2", python="3.13"),
        cell("jax", "0.12", cuda="13.2", python="3.13"),
        cell("pytorch", "2.9"),
        cell("pytorch", "2.9", variant="jupyter"),
        cell("tensorflow", "2.20"),
        cell("jax", "0.10"),
    ]
    want = ["pt-2.9-cu128-py311", "tf-2.20-cu128-py311", "jax-0.10-cu128-py311"]
    assert ids(choice.default(matrix_of(known), known)) == want


def test_of_several_such_the_default_set_decides() -> None:
    frameworks = (("pytorch", "2.9"), ("jax", "0.10"))
    known = [cell(name, line, python=python) for name, line in frameworks for python in ("3.11", "3.13")]
    assert ids(choice.default(matrix_of(known), known)) == ["pt-2.9-cu128-py311", "jax-0.10-cu128-py311"]
    newer = matrix_of(known, "*-py313")
    assert ids(choice.default(newer, known)) == ["pt-2.9-cu128-py313", "jax-0.10-cu128-py313"]


def test_one_line_of_a_framework_that_of_the_default_set_first() -> None:
    known = [cell("jax", "0.10"), cell("jax", "0.12"), cell("pytorch", "2.9")]
    assert ids(choice.default(matrix_of(known), known)) == ["jax-0.10-cu128-py311", "pt-2.9-cu128-py311"]
    chosen = choice.default(matrix_of(known, "jax-0.12-*"), known)
    assert ids(chosen) == ["jax-0.12-cu128-py311", "pt-2.9-cu128-py311"]


def test_the_projects_own_matrix_has_all_three() -> None:
    project = Project(ROOT)
    chosen = choice.default(project.matrix, project.cells)
    assert {one.framework for one in chosen} == {"pytorch", "tensorflow", "jax"}
    assert len(chosen) == 3
    assert len({(one.cuda, one.python, one.variant) for one in chosen}) == 1


def test_a_matrix_without_such_frameworks(tiny: Project) -> None:
    with pytest.raises(UsageError, match="no plain image of PyTorch, TensorFlow, JAX"):
        choice.default(tiny.matrix, tiny.cells)


def test_a_framework_without_a_benchmark(tiny: Project) -> None:
    with pytest.raises(UsageError, match="no benchmark of ember, quartz, only of pytorch, tensorflow, jax"):
        choice.subjects(FakeEngine(), tiny, tiny.cells)


def test_images_are_found_by_their_full_tags_and_those_not_built_are_named() -> None:
    project, engine = Project(ROOT), FakeEngine()
    chosen = choice.default(project.matrix, project.cells)
    names = {one.framework: one for one in chosen}
    reference = f"org/pt-cuda:{names['pytorch'].release}-cu128-py311"
    image_id = engine.have(reference)
    with pytest.raises(EngineError) as caught:
        choice.subjects(engine, project, chosen)
    missing = [names["tensorflow"].id, names["jax"].id]
    assert str(caught.value) == f"not built: {', '.join(missing)}"
    assert caught.value.hint == f"builder images {' '.join(missing)}"
    found = choice.subjects(engine, project, [names["pytorch"]])
    assert [(one.reference, one.image_id) for one in found] == [(reference, image_id)]


def test_every_framework_with_a_title_has_its_program() -> None:
    assert {path.stem for path in choice.INSIDE.glob("on_*.py")} == {f"on_{name}" for name in choice.TITLES}


# ---- figures


def test_medians_and_ratios() -> None:
    made = filled(**{"import": (0.8, 1.6, 0.2)})
    made.take(JAX.id, {"measure": "import", "value": 9.0})
    made.take(JAX.id, {"measure": "import", "value": 0.4})
    entries = made.entries(measures.BY_KEY["import"])
    assert {one: (entry.median, entry.ratio) for one, entry in entries.items()} == {
        PT.id: (0.8, 2.0),
        TF.id: (1.6, 4.0),
        JAX.id: (0.4, 1.0),
    }
    assert shown(made, "import") == ["800 ms (2.0)", "1.60 s (4.0)", "400 ms (1.0)"]


def test_where_more_is_better_the_most_is_the_best() -> None:
    made = filled(product_float32=(200.0, 400.0, 100.0))
    assert shown(made, "product_float32") == ["200 (2.0)", "400 (1.0)", "100 (4.0)"]
    assert made.title(measures.BY_KEY["product_float32"]) == "matrix product 2048x2048, float32, GFLOP/s"


def test_no_gpu_memory_at_all_is_no_number_of_times() -> None:
    made = filled(gpu_import=(0.0, 0.0, 5e8))
    made.gpu = True
    assert shown(made, "gpu_import") == ["0", "0", "500.0 MB"]


def test_what_is_not_there_is_a_dash_and_a_note_with_the_reason() -> None:
    made = filled(compiled_float32=(None, 0.2, 0.1))
    made.take(PT.id, {"measure": "compiled_float32", "absent": "no compiler"})
    assert shown(made, "compiled_float32") == ["-", "200 ms (2.0)", "100 ms (1.0)"]
    assert "PyTorch: no compiler." in made.notes()


def test_gpu_rows_only_on_a_gpu() -> None:
    made = filled()
    assert not [row for row in made.rows() if "GPU" in row[0] or "TF32" in row[0]]
    made.gpu = True
    assert len([row for row in made.rows() if "GPU memory" in row[0]]) == 3


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
def test_values_as_people_write_them(key: str, value: float, text: str) -> None:
    assert measures.BY_KEY[key].shown(value) == text


def test_keys_are_unique() -> None:
    assert len(measures.BY_KEY) == len(measures.MEASURES)


def test_the_device() -> None:
    made = filled()
    assert made.device() == "CPU: Example CPU, 4 cores"
    made.take(PT.id, {"about": {**ABOUT, "gpu": "Example GPU", "driver": "570.1"}, "workers": 4})
    assert made.device() == "Example GPU, driver 570.1; Example CPU, 4 cores"


def everything() -> Report:
    rows = {measure.key: (1.0, 2.0, 4.0) for measure in measures.of_device(gpu=False)}
    return filled(**rows)


def test_no_problems_where_all_is_there() -> None:
    assert everything().problems() == []


def test_a_measure_that_nobody_took_is_a_problem() -> None:
    made = everything()
    del made.values[TF.id]["load_n"]
    assert made.problems() == [f"{TF.id}: not measured: load_n"]


def test_a_failure_is_told_once_with_its_reason() -> None:
    made = everything()
    del made.values[JAX.id]["import"]
    for _ in range(2):
        made.take(JAX.id, {"failed": "import", "status": 1, "reason": "ImportError: no"})
    assert made.problems() == [f"{JAX.id}: import: ImportError: no"]


def test_losses_that_differ_are_no_comparison() -> None:
    made = everything()
    for one, losses in ((PT, [4.4323, 2.6637]), (TF, [4.4323, 2.6639]), (JAX, [4.4323, 2.6637])):
        made.take(one.id, {"measure": "train_float32", "value": 0.1, "losses": losses})
    assert made.problems() == []
    made.take(TF.id, {"measure": "train_float32", "value": 0.1, "losses": [4.4323, 2.71]})
    assert [one for one in made.problems() if one.startswith("train_float32: the losses differ")]


def test_data_has_every_value() -> None:
    made = filled(**{"import": (0.8, 1.6, 0.2)})
    made.take(PT.id, {"measure": "import", "value": 1.0})
    data = json.loads(json.dumps(made.as_data()))
    found = next(one for one in data["measures"] if one["key"] == "import")
    assert found["values"] == {PT.id: [0.8, 1.0], TF.id: [1.6], JAX.id: [0.2]}
    assert found["medians"][PT.id] == 0.9
    assert found["better"] == "less"
    assert [one["image_id"] for one in data["images"]] == [one.image_id for one in made.subjects]


def test_markdown_goes_between_its_marks() -> None:
    text = f"before\n{report.MARKS[0]}\nold\n{report.MARKS[1]}\nafter\n"
    made = report.into_docs(text, filled(**{"import": (0.8, 1.6, 0.2)}).markdown(), "x.md")
    assert made.startswith(
        f"before\n{report.MARKS[0]}\n| | PyTorch 2.9.0 | TensorFlow 2.20.0 | JAX 0.10.0 |\n|---|---:|"
    )
    assert "| import | 800 ms (4.0) | 1.60 s (8.0) | 200 ms (1.0) |" in made
    assert made.endswith(f"{report.MARKS[1]}\nafter\n")
    assert "old" not in made
    assert report.into_docs(made, "new\n", "x.md") == f"before\n{report.MARKS[0]}\nnew\n{report.MARKS[1]}\nafter\n"


@pytest.mark.parametrize("text", ["", report.MARKS[0], "".join(report.MARKS) * 2])
def test_a_file_without_one_place_for_the_figures(text: str) -> None:
    with pytest.raises(FileError, match=r"x\.md: no place for the figures"):
        report.into_docs(text, "", "x.md")


def test_the_projects_page_has_the_place_and_the_picture() -> None:
    page = (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8")
    assert report.into_docs(page, "x\n", "page") != page
    assert "(pictures/frameworks.svg)" in page
    ET.fromstring((ROOT / "docs/pictures/frameworks.svg").read_text(encoding="utf-8"))


# ---- the picture


def panel(drawn: str, key: str) -> ET.Element:
    root = ET.fromstring(drawn)
    return next(one for one in root.iter(f"{SVG}g") if one.get("data-measure") == key)


def bars(drawn: str, key: str) -> dict[str, float]:
    rects = panel(drawn, key).iter(f"{SVG}rect")
    return {one.attrib["data-cell"]: float(one.attrib["width"]) for one in rects if "data-cell" in one.attrib}


def test_bars_are_as_long_as_their_values() -> None:
    drawn = plot.draw(filled(**{"import": (0.8, 1.6, 0.2)}))
    lengths = bars(drawn, "import")
    assert lengths[TF.id] == pytest.approx(2 * lengths[PT.id], rel=0.01)
    assert lengths[TF.id] == pytest.approx(8 * lengths[JAX.id], rel=0.01)
    texts = [one.text for one in panel(drawn, "import").iter(f"{SVG}text")]
    assert {"import", "less is better", "PyTorch", "800 ms (4.0)", "1.60 s (8.0)", "200 ms (1.0)"} <= set(texts)


def test_more_is_better_is_said() -> None:
    drawn = plot.draw(filled(load_0=(1.0, 2.0, 3.0)))
    assert "more is better" in [one.text for one in panel(drawn, "load_0").iter(f"{SVG}text")]


def test_a_missing_value_has_no_bar_and_zeros_no_length() -> None:
    made = filled(compiled_float32=(None, 0.2, 0.1), gpu_import=(0.0, -5.0, 0.0))
    made.gpu = True
    drawn = plot.draw(made)
    assert bars(drawn, "compiled_float32").keys() == {TF.id, JAX.id}
    assert "not there" in [one.text for one in panel(drawn, "compiled_float32").iter(f"{SVG}text")]
    assert set(bars(drawn, "gpu_import").values()) == {0.0}


def test_text_is_escaped_and_nothing_lies_outside() -> None:
    made = filled(**{one.key: (1.0, 123456.0, 2.0) for one in measures.of_device(gpu=False)})
    made.take(PT.id, {"about": {**ABOUT, "cpu": '<script>&"'}, "workers": 4})
    drawn = plot.draw(made)
    assert "<script>" not in drawn
    root = ET.fromstring(drawn)
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for one in root.iter(f"{SVG}rect"):
        assert float(one.attrib["x"]) + float(one.attrib["width"]) <= width
        assert float(one.attrib["y"]) + float(one.attrib["height"]) <= height


def test_two_images_of_one_framework_have_names_of_their_own() -> None:
    other = subject("pytorch", "2.15", cuda="13.2", python="3.13")
    made = Report(subjects=(PT, other), size=1, runs=1, gpu=False)
    for one in made.subjects:
        made.take(one.id, {"measure": "import", "value": 1.0})
    texts = [one.text for one in panel(plot.draw(made), "import").iter(f"{SVG}text")]
    assert {"pt 2.9", "pt 2.15"} <= set(texts)


# ---- containers


class FakeContainer:
    """One that prints `out` in pieces and ends with `status`."""

    def __init__(self, out: bytes, status: int) -> None:
        self.out, self.status = out, status
        self.archive = b""
        self.removed = False

    def put_archive(self, path: str, data: bytes) -> bool:
        assert path == "/"
        self.archive = data
        return True

    def logs(self, *, stream: bool = False, **_: Any) -> Any:
        pieces = [self.out[at : at + 7] for at in range(0, len(self.out), 7)]
        return iter(pieces) if stream else b"Traceback: out of luck\n"

    def wait(self) -> dict[str, int]:
        return {"StatusCode": self.status}

    def remove(self, **_: Any) -> None:
        self.removed = True


class ContainerEngine(FakeEngine):
    """Starts containers that answer as `answer` says of an image and a command: what they print, and their status."""

    def __init__(self, answer: Callable[[str, Sequence[str]], tuple[bytes, int]], info: EngineInfo = INFO) -> None:
        super().__init__(info=info)
        self.answer = answer
        self.started: list[tuple[str, Sequence[str], dict[str, Any], FakeContainer]] = []

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
        before = [one for *_, one in self.started if not one.removed]
        assert not before, "two containers at once"
        made = FakeContainer(*self.answer(image, command or ()))
        self.started.append((image, command or (), {"gpus": gpus, "checkout": checkout, **options}, made))
        return cast("Container", made)


def lines(*told: dict[str, Any] | str) -> bytes:
    return "\n".join(one if isinstance(one, str) else json.dumps(one) for one in told).encode()


ASKED = run.Settings(runs=2, size=64, gpu="", checkout="/checkout")


def good(image: str, command: Sequence[str]) -> tuple[bytes, int]:
    if command[0] == "true":
        return b"", 0
    return lines({"doing": "import"}, "a framework says hello", "[1]", {"measure": "import", "value": 1.5}), 0


def test_images_take_turns_one_container_at_a_time() -> None:
    engine, console = ContainerEngine(good), MemoryConsole()
    made = run.measure(engine, (PT, JAX), ASKED, View(console))
    measured = [image for image, command, _, _ in engine.started if command[0] != "true"]
    assert measured == [PT.image_id, JAX.image_id, PT.image_id, JAX.image_id]
    assert made.values[PT.id]["import"] == [1.5, 1.5]
    assert len(made.values[JAX.id]["container"]) == 2 * run.STARTS
    assert all(one.removed for *_, one in engine.started)
    assert {options["checkout"] for _, _, options, _ in engine.started} == {"/checkout"}
    assert engine.calls == ["sweep"]
    assert f"{PT.id}: run 2 of 2: import" in console.text
    asked = [json.loads(command[-1]) for _, command, _, _ in engine.started if command[0] != "true"]
    assert [one["warm"] for one in asked] == [True, True, False, False]
    assert asked[0]["framework"] == "pytorch"


def test_an_image_that_fails_does_not_stop_the_others() -> None:
    def answer(image: str, command: Sequence[str]) -> tuple[bytes, int]:
        return (b"", 139) if image == PT.image_id and command[0] != "true" else good(image, command)

    engine, console = ContainerEngine(answer), MemoryConsole()
    made = run.measure(engine, (PT, JAX), ASKED, View(console))
    assert made.problems()[0].startswith(f"{PT.id}: run 1 of 2: ended with status 139\nTraceback: out of luck")
    assert made.values[JAX.id]["import"] == [1.5, 1.5]
    assert f"{PT.id}: failed" in console.text
    assert f"{JAX.id}: done" in console.text
    assert all(one.removed for *_, one in engine.started)


def test_gpus_are_handed_out_or_hidden() -> None:
    engine = ContainerEngine(good)
    run.measure(engine, (PT,), ASKED, View(MemoryConsole()))
    assert {options["environment"]["NVIDIA_VISIBLE_DEVICES"] for _, _, options, _ in engine.started} == {"void"}
    assert not any(options["gpus"] for _, _, options, _ in engine.started)
    engine = ContainerEngine(good)
    run.measure(engine, (PT,), run.Settings(runs=1, size=64, gpu="GPU-1", checkout="/x"), View(MemoryConsole()))
    assert all(options["gpus"] == ["GPU-1"] for _, _, options, _ in engine.started)
    assert not any("NVIDIA_VISIBLE_DEVICES" in options["environment"] for _, _, options, _ in engine.started)


def test_the_programs_go_in_whole_and_their_sign_last() -> None:
    with tarfile.open(fileobj=io.BytesIO(run.files())) as tar:
        members = tar.getmembers()
    names = [one.name for one in members]
    assert names[-1] == "tmp/bench/ready"
    assert {f"tmp/bench/builder/bench/inside/{path.name}" for path in choice.INSIDE.glob("*.py")} <= set(names)
    assert {"tmp/bench/builder/__init__.py", "tmp/bench/builder/bench/__init__.py"} <= set(names)
    assert all(one.mode & 0o444 == 0o444 for one in members)


def test_the_programs_parse_on_python_3_9_and_need_nothing_of_the_host() -> None:
    for path in choice.INSIDE.glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"), feature_version=(3, 9))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("builder"):
                assert node.module == "builder.bench.inside", path.name


def test_the_programs_tell_of_every_measure() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in choice.INSIDE.glob("*.py"))
    told = set(re.findall(r'"([a-z0-9_]+)"', text))
    families = {"product_", "train_", "compiled_"}
    for key in measures.BY_KEY.keys() - {"container"}:
        assert key in told or any(key.startswith(one) and key.removeprefix(one) in told for one in families), key


def test_blocks_divide_by_their_steps_and_wait_at_the_end_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = 0.0, []

    def step() -> None:
        calls.append("step")

    def wait() -> None:
        nonlocal now
        now += 3.0 * calls[-2:].count("step")
        calls.append("wait")

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert shared.blocks(step, wait, count=3, steps=2) == 3.0
    assert calls == ["step", "step", "wait"] * 3


# ---- the command


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Runs the command on this project's matrix, with an engine that has all images, or none."""
    (tmp_path / "matrix.yaml").write_text((ROOT / "matrix.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    project = Project(tmp_path)

    def answer(image: str, asked: Sequence[str]) -> tuple[bytes, int]:
        if asked[0] == "true":
            return b"", 0
        on_gpu = json.loads(asked[-1])["gpu"]
        keys = [one.key for one in measures.of_device(gpu=on_gpu) if one.key != "container"]
        return lines({"about": ABOUT, "workers": 4}, *({"measure": key, "value": 2.0} for key in keys)), 0

    def invoke(*arguments: str, built: bool = True, info: EngineInfo = INFO) -> Result:
        engine = ContainerEngine(answer, info)
        if built:
            for names in tags.compute(project.matrix, project.cells).values():
                engine.have(str(names[0]))
        monkeypatch.setattr(Engine, "connect", lambda: engine)
        context = Context(root=tmp_path, err=MemoryConsole(), out=MemoryConsole())
        made = CliRunner().invoke(benchmarks.bench_command, ["frameworks", *arguments], obj=context)
        made.context = context  # type: ignore[attr-defined]
        made.engine = engine  # type: ignore[attr-defined]
        return made

    monkeypatch.setattr(gpu, "read", lambda: ("", ()))
    return invoke


def test_the_whole_command(command: Callable[..., Any], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("\n".join(report.MARKS), encoding="utf-8")
    files = tmp_path / "figures.json", tmp_path / "figures.svg"
    made = command("--json", str(files[0]), "--plot", str(files[1]), "--docs", str(page), "--runs", "2")
    assert made.exception is None
    table = made.context.out.text
    assert "PyTorch" in table
    assert "matrix product 2048x2048" in table
    assert "CPU: Example CPU, 4 cores" in table
    assert "Median of 2 runs" in table
    assert json.loads(files[0].read_text(encoding="utf-8"))["runs"] == 2
    assert len(bars(files[1].read_text(encoding="utf-8"), "import")) == 3
    assert "| import |" in page.read_text(encoding="utf-8")


def failed(made: Any, kind: type[BuilderError]) -> BuilderError:
    assert isinstance(made.exception, kind), made.exception
    assert not made.engine.started, "something was measured"
    return made.exception


def test_images_that_are_not_built(command: Callable[..., Any]) -> None:
    error = failed(command(built=False), EngineError)
    assert str(error).startswith("not built: ")
    assert error.hint.startswith("builder images ")


NVIDIA = replace(INFO, runtimes=("nvidia", "runc"))


def gpus(*free: int) -> tuple[str, tuple[Gpu, ...]]:
    """A driver with GPUs of 80 GB, of which so many GB are free."""
    made = [
        Gpu(name="H100", capability="9.0", memory=80 * 10**9, free=one * 10**9, index=number, uuid=f"GPU-{number}")
        for number, one in enumerate(free)
    ]
    return "570", tuple(made)


def test_on_the_gpu_with_most_room(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "read", lambda: gpus(20, 70, 30))
    made = command("--gpu", "require", "--runs", "1", info=NVIDIA)
    assert made.exception is None
    assert "matrix product 8192x8192, TF32" in made.context.out.text
    assert {tuple(options["gpus"]) for _, _, options, _ in made.engine.started} == {("GPU-1",)}
    made = command("--gpu", "off", "--runs", "1", info=NVIDIA)
    assert "matrix product 2048x2048" in made.context.out.text
    assert not any(options["gpus"] for _, _, options, _ in made.engine.started)


@pytest.mark.parametrize(("info", "why"), [(INFO, "has no NVIDIA runtime"), (NVIDIA, "no GPU has 8 GB free")])
def test_no_gpu_to_measure_on(
    command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, info: EngineInfo, why: str
) -> None:
    monkeypatch.setattr(gpu, "read", lambda: gpus(1))
    assert why in str(failed(command("--gpu", "require", info=info), EngineError))
    made = command("--runs", "1", info=info)
    assert made.exception is None
    assert "measuring on the CPU: " in made.context.err.text
    assert why in made.context.err.text
    assert "2048x2048" in made.context.out.text


def test_images_for_the_cpu_bring_all_to_the_cpu(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "read", lambda: gpus(70))
    cells = ("jax-0.10-cpu-py311", "pt-2.9-cu128-py311")
    told = "jax-0.10-cpu-py311: made for the CPU"
    assert told in str(failed(command(*cells, "--gpu", "require", info=NVIDIA), EngineError))
    made = command(*cells, "--runs", "1", info=NVIDIA)
    assert made.exception is None
    assert f"measuring on the CPU: {told}" in made.context.err.text
    assert not any(options["gpus"] for _, _, options, _ in made.engine.started)


def test_a_plot_is_an_svg_and_is_refused_before_anything_is_measured(command: Callable[..., Any]) -> None:
    assert "--plot writes SVG" in str(failed(command("--plot", "figures.png"), UsageError))


def test_what_was_not_measured_fails_the_command_and_draws_nothing(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rest = [one for one in measures.MEASURES if one.key != "load_0"]
    whole = measures.of_device(gpu=False)
    calls = iter([rest])
    monkeypatch.setattr(measures, "of_device", lambda *, gpu: next(calls, whole) if not gpu else whole)
    picture = tmp_path / "figures.svg"
    made = command("--plot", str(picture), "--runs", "1")
    assert isinstance(made.exception, ImageTestError)
    assert "not measured: load_0" in str(made.exception)
    assert not picture.exists()
