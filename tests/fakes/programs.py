"""A fake of `builder.build.programs`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from builder.build.programs import Program, Programs


@dataclass
class FakePrograms(Programs):
    """Runs nothing: each program prints `output`, writes `files` (relative to its folder), and ends with `status`."""

    status: int = 0
    output: list[str] = field(default_factory=list)
    files: Mapping[str, bytes] = field(default_factory=lambda: {"root.tar": b"tar"})
    calls: list[Program] = field(default_factory=list)
    stopped: threading.Event = field(default_factory=threading.Event)

    def run(self, program: Program, on_line: Callable[[str], str]) -> int:
        self.calls.append(program)
        program.log.parent.mkdir(parents=True, exist_ok=True)
        program.log.write_text("".join(on_line(f"{line}\n") for line in self.output))
        if self.status == 0:
            for path, content in self.files.items():
                (program.folder / path).write_bytes(content)
        return self.status

    def stop(self) -> None:
        self.stopped.set()
