"""Names what this repository pinned long ago: python3 -m tools.pins.

Without a network: an old pin may still be the newest release. The date of a pin is that of its line in git, so this
needs the whole history.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Files, lines with the name of what they pin (or no name), and the days after which to look for a newer version.
PINS = (
    (".github/workflows/*.yml", r"uses: (\S+)@", 365),
    (".github/workflows/*.yml", r"(cosign)-release: ", 180),
    ("matrix.yaml", r"image: (debian:\S+)@sha256:", 90),
    ("locks/uv.txt", r"(uv)==", 120),
    ("locks/builder.txt", r"==", 90),
)


def dated_lines(path: Path) -> Iterator[tuple[str, datetime]]:
    """The lines of a file, with the time of the commit that wrote each."""
    command = ["git", "-C", str(ROOT), "blame", "--line-porcelain", "--", str(path)]
    time = datetime.now(UTC)
    for line in subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines():
        if line.startswith("\t"):
            yield line[1:], time
        elif line.startswith("committer-time "):
            time = datetime.fromtimestamp(int(line.split()[1]), UTC)


def old_pins(now: datetime) -> list[str]:
    """A line for each pin that is older than it should be. One that several lines pin is as old as the newest."""
    lines = []
    for pattern, expression, days in PINS:
        pinned: dict[str, datetime] = {}
        for path in sorted(ROOT.glob(pattern)):
            for line, time in dated_lines(path):
                if match := re.search(expression, line):
                    name = match[1] if match.lastindex else pattern
                    pinned[name] = max(time, pinned.get(name, time))
        lines += [
            f"{name} was pinned on {time:%Y-%m-%d}, more than {days} days ago: look for a newer version ({pattern})"
            for name, time in pinned.items()
            if (now - time).days > days
        ]
    return lines


if __name__ == "__main__":
    print("\n".join(old_pins(datetime.now(UTC))) or "no pin is old")
