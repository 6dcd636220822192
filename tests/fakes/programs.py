"""A fake of `builder.build.programs`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from builder.build.programs import Program, Programs


@dataclass
class FakePrograms(Programs):
    """Runs nothing: each program prints `output`, writes `result` to the path that is its last argument, and ends.

    `scripts` has the text of the files that the arguments of each program name, by option.
    """

    status: int = 0
    output: list[str] = field(default_factory=list)
    result: bytes = b"tar"
    calls: list[Program] = field(default_factory=list)
    scripts: list[dict[str, str]] = field(default_factory=list)

    def run(self, program: Program, on_line: Callable[[str], str]) -> int:
        self.calls.append(program)
        options = (word.partition("=") for word in program.command)
        self.scripts.append(
            {path: Path(path).read_text(errors="replace") for _, _, path in options if Path(path).is_file()}
        )
        program.log.parent.mkdir(parents=True, exist_ok=True)
        program.log.write_text("".join(on_line(f"{line}\n") for line in self.output))
        if self.status == 0:
            Path(program.command[-1]).write_bytes(self.result)
        return self.status
