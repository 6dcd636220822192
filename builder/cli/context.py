"""The context of all commands: the checkout, its lock, the consoles, and the store."""

from __future__ import annotations

import json
import os
import pwd
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.text import Text

from builder import __version__
from builder.common.console import View
from builder.common.errors import FileError, MatrixError, UsageError
from builder.common.reference import ImageRef
from builder.index import host
from builder.index.host import Host
from builder.layers.store import Store
from builder.matrix import support
from builder.matrix.cells import Cell
from builder.matrix.project import RECORD, Project

if TYPE_CHECKING:
    from builder.engine.run import Run

SHOWN = 10  # names of written files; the others are counted


@dataclass
class Context:
    """The options before the command, where it writes, and the day, in UTC."""

    root: Path | None = None
    store_root: Path | None = None
    store_limit: int = 0
    err: Console = field(default_factory=lambda: Console(stderr=True, highlight=False))
    # Lines are folded to the width of a terminal; a file or a pipe has none.
    out: Console = field(default_factory=lambda: Console(highlight=False, width=None if sys.stdout.isatty() else 200))

    today: date = field(default_factory=lambda: datetime.now(UTC).date())

    @cached_property
    def project(self) -> Project:
        """The checkout. Names the release of gpu-images that rendered it, if this is another one. Raises UsageError."""
        project = Project.find((self.root or Path.cwd()).resolve())
        if (release := project.recorded().get("gpu-images", __version__)) != __version__:
            changes = "`builder plan --changed-since HEAD` shows which images change"
            self.say(f"{RECORD}: made with gpu-images {release}, this is {__version__}: {changes}")
        return project

    def find_project(self, *, ignore_invalid: bool) -> Project | None:
        """The checkout, for commands that work without one. None outside of a checkout, and for an invalid matrix.yaml.

        Raises MatrixError for an invalid file without `ignore_invalid`: it may name the only signers to trust.
        """
        try:
            project, _ = self.project, self.project.cells
        except UsageError:
            return None
        except MatrixError as error:
            if not ignore_invalid:
                raise MatrixError(
                    str(error),
                    hint=f"{error.hint or 'Correct it.'} Or name a signer (--key, --identity) to ignore this file.",
                ) from error
            self.say(f"ignored: {error}")
            return None
        return project

    @cached_property
    def host(self) -> Host:
        """The settings of this machine, with those of matrix.yaml for registries and indexes. Raises UsageError."""
        return host.host_for_project(self.project)

    def run(self, project: Project | None, *, start_engine: bool = False) -> Run:
        """What steps work with. With `start_engine`, installs and starts an engine if none is running."""
        from builder.engine import setup  # noqa: PLC0415  slow to import, as the next ones
        from builder.engine.client import Engine  # noqa: PLC0415
        from builder.engine.run import Run  # noqa: PLC0415

        view = View(self.err)
        return Run(
            checkout=project,
            host=self.host if project else host.read_host(),
            store=self.store,
            view=view,
            connect=partial(setup.ensure, view) if start_engine else Engine.connect,
            today=self.today,
        )

    def say(self, text: str) -> None:
        self.err.print(Text(text), soft_wrap=True)

    def print_table(self, header: Sequence[str], rows: Iterable[Sequence[str]], right: Collection[str] = ()) -> None:
        """Prints rows in columns, of which `right` are aligned right.

        Without Rich, which takes 1 ms for each row, pads the last column, and on 80 columns left "REL…" of a column.
        """
        lines = [header, *rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for number, line in enumerate(lines):
            columns = zip(header, line, widths, strict=True)
            texts = [cell.rjust(width) if name in right else cell.ljust(width) for name, cell, width in columns]
            text = "  ".join(texts).rstrip()
            click.echo(click.style(text, bold=True) if number == 0 and self.out.color_system else text)

    def print_json(self, data: Any) -> None:
        """Prints the result of a command for scripts."""
        click.echo(json.dumps(data, indent=1))

    def say_written(self, names: Sequence[str]) -> None:
        """Names the files that a command wrote."""
        for name in names[:SHOWN]:
            self.say(f"written: {name}")
        if len(names) > SHOWN:
            self.say(f"... and {len(names) - SHOWN} more (git status)")

    def say_support(self, project: Project, cells: Iterable[Cell]) -> None:
        """Names the parts of cells whose support has ended, or ends within 60 days."""
        for line in support.warnings(project.matrix, cells, self.today):
            self.say(line)

    def say_not_built(self, project: Project, cells: Iterable[Cell]) -> None:
        """Names the cells that were not built yet, according to matrix.yaml."""
        for version, images in support.not_built(project.matrix, cells).items():
            self.say(f"{images}: not in the set `all`: {project.matrix.python[version].not_built}")

    @property
    def store(self) -> Store:
        """The store: that of --store, or one in the user's cache folder, which all checkouts share.

        Source: XDG Base Directory Specification, which ignores relative paths.
        """
        root = self.store_root
        if not root:
            cache = Path(os.environ.get("XDG_CACHE_HOME") or "")
            if not cache.is_absolute():
                # An empty HOME counts as unset.
                home = Path(os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir)
                if not home.is_absolute():
                    raise FileError(
                        f"no home folder for the cache: HOME is '{home}'",
                        hint="Set HOME, or run: builder --store FOLDER COMMAND",
                    )
                cache = home / ".cache"
            root = cache / "gpu-images"
        return Store(root.resolve(), limit=self.store_limit)


def parse_image(text: str) -> ImageRef:
    """An image that a user names. Raises UsageError."""
    try:
        return ImageRef.parse(text)
    except ValueError as error:
        raise UsageError(str(error)) from error
