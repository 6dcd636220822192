"""Commands that measure: bench frameworks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click
from rich.text import Text

from builder import atomic, gpu
from builder.bench import choice, plot, report, run
from builder.bench.measures import CPU_SIZE, GPU_SIZE
from builder.cells import Cell
from builder.cli.context import Context, cells_argument
from builder.engine import Engine
from builder.errors import EngineError, ImageTestError, UsageError
from builder.view import View

EPILOG = """\b
CELLS are ids, shell patterns or sets of matrix.yaml; default: a plain image of each framework, on one CUDA and Python.
\b
Examples:
  builder bench frameworks
  builder bench frameworks --runs 5 --json figures.json --plot figures.svg
  builder bench frameworks 'pt-*-cu128-py3{11,13}'
"""


@click.group(name="bench")
def bench_command() -> None:
    """Measure the images."""


_FILE = click.Path(dir_okay=False, path_type=Path)


@bench_command.command(name="frameworks", epilog=EPILOG)
@cells_argument
@click.option("--runs", type=click.IntRange(1, 100), default=3, show_default=True, help="Runs of every measure.")
@click.option(
    "--size",
    type=click.IntRange(16, 65536),
    help=f"Of the matrices that are multiplied; default: {GPU_SIZE} on a GPU, {CPU_SIZE} on the CPU.",
)
@click.option(
    "--gpu",
    "gpu_mode",
    type=click.Choice(gpu.MODES),
    default=gpu.AUTO,
    show_default=True,
    help="A GPU must be there, is used if it is there, or is not used.",
)
@click.option("--json", "json_file", type=_FILE, help="Write every value here.")
@click.option("--plot", "plot_file", type=_FILE, help="Draw the medians, as SVG.")
@click.option("--docs", "docs_file", type=_FILE, help="Put the table into this Markdown file.")
@click.pass_obj
def frameworks_command(
    context: Context,
    wanted: Sequence[str],
    runs: int,
    size: int | None,
    gpu_mode: gpu.Mode,
    json_file: Path | None,
    plot_file: Path | None,
    docs_file: Path | None,
) -> None:
    """Compare PyTorch, TensorFlow and JAX inside their images.

    Start and import, memory after import and after the first operation, a matrix product, a training step of one small
    model, data loading; docs/benchmarks.md says how. Figures of one row compare, if nothing else used the machine.
    """
    project = context.project
    chosen = project.select(wanted) if wanted else choice.default(project.matrix, project.cells)
    _check_files(plot_file, docs_file)
    engine = Engine.connect()
    on_gpu = _gpu(context, engine, chosen, gpu_mode)
    subjects = choice.subjects(engine, project, chosen)
    settings = run.Settings(
        runs=runs, size=size or (GPU_SIZE if on_gpu else CPU_SIZE), gpu=on_gpu, checkout=str(project.root)
    )
    with context.alone(project, "bench"):
        found = run.measure(engine, subjects, settings, View(context.err))
    context.out.print(found.table())
    for note in found.notes():
        context.out.print(Text(note), soft_wrap=True)
    if json_file:
        atomic.write_text(json_file, json.dumps(found.as_data(), indent=2) + "\n")
    if problems := found.problems():
        raise ImageTestError("not all was measured\n" + "\n".join(f"  {one}" for one in problems))
    if plot_file:
        atomic.write_text(plot_file, plot.draw(found))
    if docs_file:
        text = docs_file.read_text(encoding="utf-8")
        atomic.write_text(docs_file, report.into_docs(text, found.markdown(), str(docs_file)))


def _check_files(plot_file: Path | None, docs_file: Path | None) -> None:
    """Before minutes of measuring, not after."""
    if plot_file and plot_file.suffix != ".svg":
        raise UsageError(f"--plot writes SVG, and {plot_file.name} is named otherwise", hint=f"{plot_file.stem}.svg")
    if docs_file:
        report.into_docs(docs_file.read_text(encoding="utf-8"), "", str(docs_file))


def _gpu(context: Context, engine: Engine, chosen: Sequence[Cell], mode: gpu.Mode) -> str:
    """UUID of the GPU that has most memory free; empty for the CPU. On one device all figures compare."""
    if mode == gpu.OFF:
        return ""
    if for_cpu := [cell.id for cell in chosen if cell.is_cpu]:
        why = f"{', '.join(for_cpu)}: made for the CPU"
    elif not engine.info().has_nvidia:
        why = "Docker Engine has no NVIDIA runtime"
    else:
        why = gpu.Pool().why_not()
    if not why:
        return max(gpu.read()[1], key=lambda one: one.free).uuid
    if mode == gpu.REQUIRE:
        raise EngineError(f"no GPU to measure on: {why}", hint="`builder doctor` says what this machine has.")
    context.say(f"measuring on the CPU: {why}")
    return ""
