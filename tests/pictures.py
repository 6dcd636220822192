"""Draws the README's picture of a terminal, from what the commands print: `python -m tests.pictures`.

They run in a folder with the README's matrix.yaml. tests/integration/test_readme.py compares the picture with them.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.text import Text

from tests.paths import ROOT

TERMINAL = ROOT / "docs/pictures/terminal.svg"
WIDTH = 120  # columns
COMMANDS = ("builder plan", 'builder explain --gpu "RTX 4090" --driver 570.86.10')


def draw(lines: Iterable[Text], title: str, path: Path) -> None:
    """Writes the lines, each cut or wrapped as it says, as a terminal. The fonts are those of the reader's machine."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    for line in lines:
        console.print(line)
    drawing = console.export_svg(title=title, unique_id="terminal")
    path.write_text(re.sub(r"@font-face \{.*?\}", "", drawing, flags=re.DOTALL), encoding="utf-8")


def write_repository(folder: Path) -> None:
    """Writes a repository with the README's matrix.yaml, and this checkout's locks."""
    [matrix] = re.findall(r"^```yaml\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
    (folder / "matrix.yaml").write_text(matrix, encoding="utf-8")
    (folder / "locks").symlink_to(ROOT / "locks")


def printed(command: str, folder: Path) -> list[str]:
    """What a command prints to standard output."""
    environ = {**os.environ, "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}", "COLUMNS": str(WIDTH), "NO_COLOR": "1"}
    run = subprocess.run(
        shlex.split(command), cwd=folder, env=environ, stdout=subprocess.PIPE, text=True, check=False, timeout=300
    )
    assert run.returncode == 0, f"{command}: exit code {run.returncode}"
    return run.stdout.splitlines()


def main() -> None:
    lines: list[Text] = []
    with tempfile.TemporaryDirectory() as folder:
        write_repository(Path(folder))
        for command in COMMANDS:
            lines += [Text(f"$ {command}", style="bold green"), *map(Text, printed(command, Path(folder))), Text()]
    draw(lines[:-1], "GPU images", TERMINAL)


if __name__ == "__main__":
    main()
