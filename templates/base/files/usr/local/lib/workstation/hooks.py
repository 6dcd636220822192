"""People's own steps at the start: /etc/start.d, in the order of their names.

`*.sh` are read by a shell, and variables that they export count for all that follows; other executables are run.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import MutableMapping
from pathlib import Path

from .refusal import Refusal

FOLDER = Path("/etc/start.d")
_OF_THE_SHELL = ("_", "SHLVL", "PWD", "OLDPWD")


def run(environ: MutableMapping[str, str], folder: Path = FOLDER) -> None:
    """Runs all; changes `environ`. Raises Refusal naming the one that failed."""
    for hook in sorted(folder.iterdir()) if folder.is_dir() else ():
        if hook.suffix == ".sh":
            _source(hook, environ)
        elif os.access(hook, os.X_OK) and hook.is_file():
            _result(hook, subprocess.run([str(hook)], env=dict(environ), stdout=2, check=False).returncode)


def _source(hook: Path, environ: MutableMapping[str, str]) -> None:
    file = Path(environ["STATE_DIR"]) / "hook-environment"
    file.unlink(missing_ok=True)
    # However the hook ends, and into a file: what it prints goes to the log, and what it leaves running holds nothing.
    code = 'trap \'env -0 >"$2"\' EXIT; set -e; . "$1"'
    done = subprocess.run(["/bin/sh", "-c", code, "sh", str(hook), str(file)], env=dict(environ), stdout=2, check=False)
    _result(hook, done.returncode)
    if not file.exists():
        raise Refusal(f"{hook} replaced the shell's EXIT trap, so what it exported is lost; leave that trap alone")
    found = dict(entry.split("=", 1) for entry in os.fsdecode(file.read_bytes()).split("\0") if "=" in entry)
    file.unlink()
    for name in [name for name in environ if name not in found]:
        del environ[name]
    environ.update({name: value for name, value in found.items() if name not in _OF_THE_SHELL})


def _result(hook: Path, status: int) -> None:
    if status:
        raise Refusal(f"{hook} ended with status {status}", status if 0 < status < 126 else 1)
