"""Runs the user's hooks in /etc/start.d before everything else, in the order of their names.

A shell sources `*.sh`; later programs have the variables that they export and their umask. Other executables are run as
they are.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import MutableMapping
from pathlib import Path

from .refusal import Refusal

FOLDER = Path("/etc/start.d")
_SHELL_VARIABLES = ("_", "SHLVL", "PWD", "OLDPWD")


def run(environ: MutableMapping[str, str], folder: Path = FOLDER) -> list[str]:
    """Runs all hooks and updates `environ`; returns warnings. Raises Refusal with the name of a hook that fails."""
    warnings = []
    for hook in sorted(folder.iterdir()) if folder.is_dir() else ():
        if hook.suffix == ".sh":
            _source(hook, environ)
        elif os.access(hook, os.X_OK) and hook.is_file():
            _check_status(hook, subprocess.run([str(hook)], env=dict(environ), stdout=2, check=False).returncode)
        elif hook.is_file() and not hook.name.startswith((".", "README")):
            warnings.append(f"{hook} was not run: make it executable (`chmod +x`), or name it *.sh")
    return warnings


def _source(hook: Path, environ: MutableMapping[str, str]) -> None:
    file = Path(environ["STATE_DIR"]) / "hook-environment"
    file.unlink(missing_ok=True)
    # The trap runs however the hook ends. A file instead of a pipe: the hook's output goes to the log, and a process
    # that it leaves in the background does not keep a pipe open.
    code = 'trap \'{ umask; /usr/bin/env -0; } >"$2"\' EXIT; set -e; . "$1"'
    command = ["/bin/sh", "-c", code, "sh", str(hook), str(file)]
    _check_status(hook, subprocess.run(command, env=dict(environ), stdout=2, check=False).returncode)
    if not file.exists():
        raise Refusal(f"{hook} replaced the shell's EXIT trap, so its exports are lost: do not set that trap")
    umask, _, variables = os.fsdecode(file.read_bytes()).partition("\n")
    file.unlink()
    os.umask(int(umask, 8))
    exported = dict(entry.split("=", 1) for entry in variables.split("\0") if "=" in entry)
    for name in [name for name in environ if name not in exported]:
        del environ[name]
    environ.update({name: value for name, value in exported.items() if name not in _SHELL_VARIABLES})


def _check_status(hook: Path, status: int) -> None:
    if status:
        raise Refusal(f"{hook} ended with status {status}", status if 0 < status < 126 else 1)
