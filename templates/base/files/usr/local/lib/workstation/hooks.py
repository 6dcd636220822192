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
    read, write = os.pipe()
    # The environment comes back by a pipe of its own: what the hook prints goes to the log.
    code = f'set -e; . "$1"; exec env -0 >&{write}'
    with subprocess.Popen(
        ["/bin/sh", "-c", code, "sh", str(hook)], env=dict(environ), stdout=2, pass_fds=(write,)
    ) as shell:
        os.close(write)
        with os.fdopen(read, "rb") as stream:
            told = stream.read()
    _result(hook, shell.returncode)
    found = dict(entry.split("=", 1) for entry in os.fsdecode(told).split("\0") if "=" in entry)
    for name in [name for name in environ if name not in found]:
        del environ[name]
    environ.update({name: value for name, value in found.items() if name not in _OF_THE_SHELL})


def _result(hook: Path, status: int) -> None:
    if status:
        raise Refusal(f"{hook} ended with status {status}", status if 0 < status < 126 else 1)
