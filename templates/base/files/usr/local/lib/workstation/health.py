"""Whether every service that was started answers."""

from __future__ import annotations

import os
import sys

from . import services, state


def main() -> int:
    """0 if all answer; 1 naming those that do not."""
    home = state.find()
    if home is None:
        print("no service runs in this container", file=sys.stderr)
        return 1
    environ = {**os.environ, "STATE_DIR": str(home)}
    names = (home / state.SERVICES).read_text().split()
    silent = [name for name in names if services.check(services.FOLDER / name, environ)]
    if silent:
        print(f"no answer from {', '.join(silent)}", file=sys.stderr)
    return 1 if silent else 0
