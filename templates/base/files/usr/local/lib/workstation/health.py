"""Whether every service that was started answers."""

from __future__ import annotations

import os
import sys

from . import services, state


def main() -> int:
    """0 if all answer, or if the container runs a command; 1 naming those that do not."""
    home = state.find()
    if home is None:
        print("this container was not started by the launcher of its image", file=sys.stderr)
        return 1
    if os.getuid() == 0 and home.stat().st_uid:
        # The engine asks as the user that the container was started with. What is run below is the services' user's.
        os.setgroups([0])
        os.setgid(home.stat().st_gid)
        os.setuid(home.stat().st_uid)
    environ = {**os.environ, "STATE_DIR": str(home)}
    started = (home / state.SERVICES).read_text().split()
    silent = [one.name for one in services.present() if one.name in started and services.check(one, environ)]
    if silent:
        print(f"no answer from {', '.join(silent)}", file=sys.stderr)
    return 1 if silent else 0
