"""Measures the frameworks inside their images: python -m benchmarks.frameworks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click
from rich.text import Text

from benchmarks.frameworks import plot, report, run, selection
from benchmarks.frameworks.measures import CPU_SIZE, GPU_SIZE
from benchmarks.frameworks.report import Report
from builder.cli import SETTINGS, main
from builder.cli.context import Context
from builder.cli.options import cells_argument, debug_option
from builder.common.console import View
from builder.common.errors import EngineError, ImageTestError, UsageError
from builder.common.files import write_atomically
from builder.compat import gpus
from builder.engine.client import Engine
from builder.matrix.cells import Cell

EPILOG = f"""\b
CELLS are cell ids, shell patterns, or sets from matrix.yaml. Default: one plain image of each framework, all with the
same CUDA and Python. Build the images first: builder images default
\b
How to read the table:
  800 ms (2.0)  the median of the runs, and how many times worse it is than the best value in the row (1.0)
  -             the image cannot do this; a note below the table says why
\b
Examples:
  python -m benchmarks.frameworks
  python -m benchmarks.frameworks --runs 5 --json figures.json --plot figures.svg
  python -m benchmarks.frameworks 'pt-*-cu128-py3{{11,13}}'
  python -m benchmarks.frameworks --gpu require --size 16384

docs/benchmarks.md says how to read the figures. Exit code {ImageTestError.exit_code}: a measurement failed, or the
losses (training errors) of the frameworks differ.
"""
_FILE = click.Path(dir_okay=False, path_type=Path)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """Files to write; None for a file that is not requested."""

    json_file: Path | None
    plot_file: Path | None
    docs_file: Path | None

    def check(self) -> None:
        """Raises UsageError or FileError if a file cannot be written; called before measuring, which takes minutes."""
        if self.plot_file and self.plot_file.suffix != ".svg":
            raise UsageError(
                f"--plot writes SVG: {self.plot_file.name} must end in .svg", hint=f"--plot {self.plot_file.stem}.svg"
            )
        if self.docs_file:
            report.into_docs(self.docs_file.read_text(encoding="utf-8"), "", str(self.docs_file))

    def write(self, results: Report) -> None:
        """Raises ImageTestError if not everything was measured: only --json is written then."""
        if self.json_file:
            write_atomically(self.json_file, json.dumps(results.as_data(), indent=2) + "\n")
        if problems := results.problems():
            raise ImageTestError("not everything was measured\n" + "\n".join(f"  {problem}" for problem in problems))
        if self.plot_file:
            write_atomically(self.plot_file, plot.draw(results))
        if self.docs_file:
            text = self.docs_file.read_text(encoding="utf-8")
            write_atomically(self.docs_file, report.into_docs(text, results.markdown(), str(self.docs_file)))


@click.command(epilog=EPILOG, context_settings=SETTINGS)
@cells_argument
@click.option(
    "--runs", type=click.IntRange(1, 100), default=3, show_default=True, help="How often to take each measurement."
)
@click.option(
    "--size",
    type=click.IntRange(16, 65536),
    help=f"Rows and columns of the matrices to multiply.  [default: {GPU_SIZE} on a GPU, {CPU_SIZE} on the CPU]",
)
@click.option(
    "--gpu",
    "gpu_mode",
    type=click.Choice(gpus.MODES),
    default=gpus.AUTO,
    show_default=True,
    help="require: fail without a GPU. auto: use a GPU if there is one, otherwise the CPU. off: use the CPU.",
)
@click.option("--json", "json_file", type=_FILE, help="Write the values of all runs to this JSON file.")
@click.option("--plot", "plot_file", type=_FILE, help="Draw the medians to this SVG file.")
@click.option(
    "--wait",
    is_flag=True,
    expose_value=False,
    help="If another builder is using this checkout, wait for it instead of failing.",
    callback=lambda context, _, wait: setattr(context.obj, "wait", wait),
)
@debug_option
@click.option(
    "--docs",
    "docs_file",
    type=_FILE,
    help="Replace the table between the two `figures` comments in this Markdown file.",
)
@click.pass_obj
def frameworks(
    context: Context, /, patterns: Sequence[str], runs: int, size: int | None, gpu_mode: gpus.Mode, **files: Path | None
) -> None:
    """Compare PyTorch, TensorFlow and JAX inside their images.

    Measures container start, import, the first operation, memory, matrix products, training steps of one small model
    and data loading. All images are measured in turn on the same device, in new processes. Each run takes minutes; do
    not use the machine for anything else meanwhile.
    """
    project, outputs = context.project, Outputs(**files)
    chosen = project.select(patterns) if patterns else selection.default(project.matrix, project.cells)
    outputs.check()
    engine = Engine.connect()
    gpu = _gpu(context, engine, chosen, gpu_mode)
    subjects = selection.subjects(engine, project, chosen)
    settings = run.Settings(
        runs=runs, size=size or (GPU_SIZE if gpu else CPU_SIZE), gpu=gpu, checkout=str(project.root)
    )
    with project.locked("builder bench"):
        results = run.measure(engine, subjects, settings, View(context.err))
    context.out.print(results.table())
    for note in results.notes():
        context.out.print(Text(note), soft_wrap=True)
    outputs.write(results)


def _gpu(context: Context, engine: Engine, chosen: Sequence[Cell], mode: gpus.Mode) -> str:
    """The engine's name of the GPU with most free memory, for all images; empty for the CPU."""
    if mode == gpus.OFF:
        return ""
    if for_cpu := [cell.id for cell in chosen if cell.is_cpu]:
        reason = f"{', '.join(for_cpu)}: built for the CPU"
    elif not engine.info().gpu_option:
        reason = "Docker Engine cannot give containers NVIDIA GPUs"
    else:
        reason = gpus.Pool().why_not()
    if not reason:
        freest = max(gpus.Pool().read()[1], key=lambda gpu: gpu.free)
        return engine.info().gpu_name(freest.uuid, freest.index)
    if mode == gpus.REQUIRE:
        raise EngineError(f"no GPU to measure on: {reason}", hint="`builder doctor` shows what this machine has.")
    context.say(f"measuring on the CPU: {reason}")
    return ""


if __name__ == "__main__":
    main(frameworks, obj=Context())
