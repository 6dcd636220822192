"""The `builder` command: reads the command line, calls one step, shows what came of it."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from builder import (
    base,
    doctor,
    engine_setup,
    errors,
    host,
    images,
    locking,
    plan,
    render,
    runlock,
)
from builder.engine import Engine
from builder.errors import BuilderError, UsageError
from builder.host import Host
from builder.images import Work
from builder.plan import Plan
from builder.project import Project
from builder.view import View, duration, size

EXIT_CODES = "\n".join(
    f"  {kind.exit_code:>3}  {(kind.__doc__ or '').splitlines()[0].rstrip('.')}" for kind in errors.ALL[1:]
)
EPILOG = f"""\b
Exit codes:
    0  Done, or nothing to do
    1  A fault of this program (with --debug: its traceback)
{EXIT_CODES}
  {errors.INTERRUPTED}  Interrupted (Ctrl-C); {errors.TERMINATED} terminated
"""
CELLS_HELP = "CELLS are ids, shell patterns or sets of matrix.yaml; default: the set `default`."


class Terminated(BaseException):
    """SIGTERM came."""


@dataclass
class Context:
    """What the command line says for every command."""

    root: Path | None = None
    wait: bool = False
    err: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))
    # A file or a pipe has no width to fold lines to.
    out: Console = field(default_factory=lambda: Console(highlight=False, width=None if sys.stdout.isatty() else 200))

    @property
    def project(self) -> Project:
        return Project.find((self.root or Path.cwd()).resolve())

    def say(self, text: str) -> None:
        self.err.print(Text(text), soft_wrap=True)

    @contextmanager
    def alone(self, project: Project, command: str) -> Iterator[None]:
        """Holds the checkout's lock, after removing what a killed holder left."""
        with runlock.held(project.state, f"builder {command}", wait=self.wait, say=self.say):
            project.sweep()
            yield

    def work(self, project: Project, view: View, lent: Host) -> Work:
        return Work(engine=Engine.connect(), project=project, host=lent, view=view)


def _cells(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.argument("wanted", metavar="[CELLS]...", nargs=-1)(command)


def _jobs(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "-j", "--jobs", type=click.IntRange(1, 32), default=2, show_default=True, help="Images at a time."
    )(command)


@click.group(epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.option(
    "--root",
    type=click.Path(file_okay=False, path_type=Path),
    help="The checkout; default: found from here upwards.",
)
@click.option("--wait", is_flag=True, help="Wait for another builder in this checkout instead of giving up.")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def cli(context: click.Context, root: Path | None, wait: bool, debug: bool) -> None:
    """Builds GPU deep-learning images from matrix.yaml.

    \b
    The way through, each step a command of its own:
      lock    matrix.yaml -> locks/     exact wheels of every cell (asks the package index)
      plan    matrix.yaml, locks/       what would be built
      render  locks/, templates/ -> images/   a Dockerfile for every cell
      build   images/ -> Docker         without tests, without tags
      test    Docker -> evidence        the image tests
      images  all that is needed of build, test and tagging; does nothing where nothing changed
    """
    del debug  # read in `main`, which catches what is raised here too
    context.obj = Context(root=root, wait=wait)


@cli.command(name="lock")
@_cells
@click.option("--check", is_flag=True, help="Only say whether the locks belong to matrix.yaml; asks nobody.")
@click.option("--upgrade", is_flag=True, help="Take the newest versions, not those of the present locks.")
@click.pass_obj
def lock_command(context: Context, wanted: Sequence[str], check: bool, upgrade: bool) -> None:
    """Resolve cells to exact wheels and write locks/ (default: all cells)."""
    project = context.project
    chosen = project.select(wanted or ("*",))
    if check:
        locking.check(project, chosen)
        context.say(f"{len(chosen)} locks belong to matrix.yaml")
        return
    with context.alone(project, "lock"):
        changed = locking.update(project, chosen, host.read(), upgrade=upgrade, say=context.say)
    for name in changed:
        context.say(f"written: {name}")
    if not changed:
        context.say("every lock is as it was")


@cli.command(name="plan")
@_cells
@click.option("--format", "form", type=click.Choice(["table", "json", "ids"]), default="table", show_default=True)
@click.pass_obj
def plan_command(context: Context, wanted: Sequence[str], form: str) -> None:
    """Show what would be built: cells, tags, layers, sizes. Asks no engine and no network."""
    project = context.project
    chosen = project.select(wanted)
    if form == "ids":
        click.echo("\n".join(cell.id for cell in chosen))
        return
    made = plan.make(project, chosen)
    if form == "json":
        click.echo(json.dumps(made.as_data(), indent=1))
        return
    context.out.print(_plan_table(made))
    context.out.print(
        f"{len(made.images)} images; "
        f"wheels {size(made.sum_bytes)} if each had its own, {size(made.unique_bytes)} shared"
    )
    if made.unlocked:
        context.say(f"not locked yet: {', '.join(made.unlocked)}   (builder lock)")


def _plan_table(made: Plan) -> Table:
    """A row a layer, the image's tags beside them."""
    table = Table(box=None, pad_edge=False)
    table.add_column("CELL", no_wrap=True)
    table.add_column("LAYER", no_wrap=True)
    table.add_column("WHEELS", justify="right")
    table.add_column("SIZE", justify="right", no_wrap=True)
    table.add_column("TAGS", overflow="fold")
    for image in made.images:
        rows = [
            (f"{layer.kind} {layer.component}", str(len(layer.wheels) or ""), size(layer.bytes) if layer.wheels else "")
            for layer in image.layers
        ]
        rows.append(("sum", str(len(image.wheels)), size(image.bytes)))
        for number, (row, tag) in enumerate(zip_longest(rows, image.references, fillvalue=None)):
            table.add_row(Text(image.id, style="bold") if number == 0 else "", *(row or ("", "", "")), tag or "")
        table.add_section()
    return table


@cli.command(name="render")
@click.option("--check", is_flag=True, help="Write nothing; fail if images/ is not what the inputs give.")
@click.pass_obj
def render_command(context: Context, check: bool) -> None:
    """Write images/ from templates/ and locks/, for every cell."""
    project = context.project
    files = render.render(project.root, project.matrix, plan.make_locked(project, project.cells))
    if check:
        render.check(project.root, files)
        context.say(f"images/ is up to date ({len(files)} files)")
        return
    with context.alone(project, "render"):
        changed = render.write(project.root, files)
    for name in changed:
        context.say(f"written: {name}")
    context.say(f"{len(files)} files, {len(changed)} changed")


def _run(context: Context, wanted: Sequence[str], command: str, *, jobs: int, test: bool, tag: bool) -> None:
    began = time.monotonic()
    project = context.project
    chosen = project.select(wanted)
    with context.alone(project, command):
        made = _current_plan(project, chosen)
        work = context.work(project, View(context.err), host.read())
        count = images.run(work, made, jobs=jobs, test=test, tag=tag)
    took = duration(time.monotonic() - began)
    rest = len(made.images) - count
    what = "built, tested and tagged" if tag else "built"
    done = f"{count} images {what}, " if count else ""
    context.say(f"{done}{rest} images up to date ({took})")


def _current_plan(project: Project, chosen: Sequence[Any]) -> Plan:
    """The plan, after making sure that images/ is what it would be rendered to."""
    made = plan.make_locked(project, project.cells)
    render.check(project.root, render.render(project.root, project.matrix, made))
    ids = {cell.id for cell in chosen}
    return Plan(images=tuple(image for image in made.images if image.id in ids))


@cli.command(name="images", epilog=CELLS_HELP)
@_cells
@_jobs
@click.pass_obj
def images_command(context: Context, wanted: Sequence[str], jobs: int) -> None:
    """Build, test and tag; what is done already is not done again."""
    _run(context, wanted, "images", jobs=jobs, test=True, tag=True)


@cli.command(name="build", epilog=CELLS_HELP)
@_cells
@_jobs
@click.pass_obj
def build_command(context: Context, wanted: Sequence[str], jobs: int) -> None:
    """Build only: no tests, no tags."""
    _run(context, wanted, "build", jobs=jobs, test=False, tag=False)


@cli.command(name="test", epilog=CELLS_HELP)
@_cells
@_jobs
@click.pass_obj
def test_command(context: Context, wanted: Sequence[str], jobs: int) -> None:
    """Run the tests of images that are built, again."""
    project = context.project
    chosen = project.select(wanted)
    with context.alone(project, "test"):
        made = _current_plan(project, chosen)
        images.retest(context.work(project, View(context.err), host.read()), made, jobs=jobs)


@cli.command(name="base")
@click.argument("release", required=False)
@click.option("--fresh", is_flag=True, help="Make a base that was put together here again, with today's packages.")
@click.pass_obj
def base_command(context: Context, release: str | None, fresh: bool) -> None:
    """Have the base image of a Debian RELEASE in the engine; print its name, for `--build-arg BASE=`."""
    project = context.project
    known = project.matrix.debian
    release = release or next(iter(known))
    if release not in known:
        raise UsageError(f"matrix.yaml has no Debian release {release!r}; it has: {', '.join(known)}")
    with context.alone(project, "base"):
        made = base.ensure(Engine.connect(), project, release, host.read(), context.say, fresh=fresh)
    click.echo(made.reference)


@cli.command(name="engine")
@click.pass_obj
def engine_command(context: Context) -> None:
    """Find a Docker Engine; on Debian and Ubuntu, as root, install and start one if none answers."""
    info = engine_setup.ensure(context.say).info()
    context.say(f"engine: Docker Engine {info.version} answers ({info.store})")


@cli.command(name="doctor")
@click.pass_obj
def doctor_command(context: Context) -> None:
    """Show what this machine has for building images, and what is missing."""
    findings = doctor.examine(context.project, context.say)
    table = Table(box=None, show_header=False, pad_edge=False)
    styles = {"ok": "green", "note": "yellow", "missing": "bold red"}
    for finding in findings:
        table.add_row(Text(finding.state, style=styles[finding.state]), finding.name, Text(finding.detail))
    context.out.print(table)
    missing = [finding.name for finding in findings if finding.state == "missing"]
    if missing:
        raise errors.EngineError(f"missing: {', '.join(missing)}")


@cli.command(name="clean")
@click.option("--cache", is_flag=True, help="BuildKit's cache too, of all projects on this engine.")
@click.pass_obj
def clean_command(context: Context, cache: bool) -> None:
    """Remove test containers and images of ours that no tag names, and logs; tagged images stay."""
    project = context.project
    with context.alone(project, "clean"):
        freed = images.clean(Engine.connect(), project, cache=cache)
    context.say(freed)


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise Terminated


def _show(console: Console, error: BuilderError, debug: bool) -> int:
    console.print(Text(f"{error.title}: ", style="bold red"), Text(str(error)), sep="", soft_wrap=True)
    if error.hint:
        console.print(Text(f"  -> {error.hint}"), soft_wrap=True)
    if debug:
        traceback.print_exc()
    return error.exit_code


def _fault(console: Console, error: Exception, debug: bool) -> int:
    """An error that nobody foresaw."""
    if debug:
        traceback.print_exc()
    else:
        told = f"a fault of builder itself: {type(error).__name__}: {error}"
        console.print(Text(told, style="bold red"), soft_wrap=True)
        console.print("  -> Run again with --debug for the traceback, and report it.")
    return 1


def main() -> None:
    """Entry point: catches every error once and ends with its exit code."""
    debug = "--debug" in sys.argv
    console = Console(stderr=True, highlight=False)
    signal.signal(signal.SIGTERM, _terminate)
    code = 0
    try:
        cli.main(standalone_mode=False)
    except BuilderError as error:
        code = _show(console, error, debug)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        console.print("interrupted; run the same command again to go on")
        code = errors.INTERRUPTED
    except Terminated:
        console.print("terminated; run the same command again to go on")
        code = errors.TERMINATED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT) or error.filename:
            code = _show(console, errors.of_file(error), debug)
        else:
            code = _fault(console, error, debug)
    except Exception as error:  # noqa: BLE001  the last resort: a fault of ours, said as such
        code = _fault(console, error, debug)
    sys.stdout.flush()
    sys.stderr.flush()
    if code in (errors.INTERRUPTED, errors.TERMINATED):
        os._exit(code)  # threads that still read from the engine must not keep the program
    sys.exit(code)
