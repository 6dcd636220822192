"""The health check: whether every started service answers."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from . import services, state

LAUNCHER = b"/usr/local/bin/start"


def main() -> int:
    """Returns 0 if all services answer or the container runs only a command, else 1; prints which do not answer."""
    home = state.find(state.SERVICES)
    if home is None:
        # Dev containers and `docker run --entrypoint` start something else, and no service.
        if not has_launcher():
            return 0
        print("the launcher has not started the services yet, or its state was deleted", file=sys.stderr)
        return 1
    owner = home.name.rpartition("-")[2]  # from the name: the folder may have been replaced since `find`
    if os.getuid() == 0 and owner != "0":
        # The engine runs this as the container's start user; the checks below must run as the services' user.
        os.setgroups([0])
        os.setgid(home.lstat().st_gid)
        os.setuid(int(owner))
    # The environment of the services, with the changes of the launcher (such as HOME) and of hooks.
    entries = os.fsdecode((home / state.ENVIRONMENT).read_bytes()).split("\0")
    environ = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    started = (home / state.SERVICES).read_text().split()
    folders = [folder for folder in services.present() if folder.name in started]
    failed = [folder.name for folder in folders if services.check(folder, environ)]
    if failed:
        print(f"no answer from {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def has_launcher(processes: Path = Path("/proc")) -> bool:
    """Whether a process has the launcher in its arguments: tini has, in each container that the launcher started.

    It need not be process 1: `--init` and `--pid=host` put other programs there. With the latter, processes of other
    containers are there too, in other control groups.
    """
    own = (processes / "self/cgroup").read_bytes()
    for arguments in processes.glob("[0-9]*/cmdline"):
        try:
            if LAUNCHER in arguments.read_bytes().split(b"\0") and (arguments.parent / "cgroup").read_bytes() == own:
                return True
        except OSError:  # it has ended
            continue
    return False
