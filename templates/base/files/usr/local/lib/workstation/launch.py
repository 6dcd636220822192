"""From the start of a container to its command or its services: checks, user, GPUs, hooks, run.

Everything that it says goes to stderr, so that the output of a command is its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import MutableMapping, Sequence

from . import gpus, hooks, person, services, state, variables
from .refusal import Refusal

SERVICES = "services"
SMALL_SHM = 512 * 2**20
GPU_MEMORY_HOOK = "/usr/local/lib/gpu-memory-limit"
HELP = """\
docker run [--gpus all] IMAGE                 {what}
docker run [--gpus all] IMAGE COMMAND ...     run a command, such as `python train.py` or `bash`

Variables (-e NAME=VALUE):
{table}

Programs in /etc/start.d run first: *.sh are read by a shell, and may export variables.
"""


def main(arguments: Sequence[str]) -> int:
    """Does not return for a command, which it becomes."""
    environ = dict(os.environ)
    try:
        return _start(list(arguments), environ)
    except Refusal as refusal:
        _say(*(f"error: {line}" for line in str(refusal).splitlines()))
        return refusal.status


def _start(arguments: list[str], environ: MutableMapping[str, str]) -> int:
    known = variables.declared()
    folders = services.present()
    if arguments == ["--help"]:
        what = f"run {' and '.join(path.name for path in folders)}" if folders else "a shell: add -it"
        sys.stdout.write(HELP.format(what=what, table=variables.table(known)))
        return 0
    quiet = variables.flag(environ, "START_QUIET")
    serving = arguments == [SERVICES] or (not arguments and bool(folders))
    warnings = variables.check(environ, known)
    told = person.wanted(environ, uid=os.getuid(), serving=serving, owner=_owner())
    if told:
        person.become(*told)
    try:
        home = state.make()
    except OSError as error:
        raise Refusal(str(error)) from error
    environ["STATE_DIR"] = str(home)
    warnings += person.settle(environ, home)
    found = gpus.read() if "NVIDIA_VISIBLE_DEVICES" in environ else gpus.Found()
    lines, gpu_warnings = gpus.tell(found, environ)
    warnings += [*gpu_warnings, *filter(None, (person.workspace_warning(), shm_warning()))]
    if "GPU_MEMORY_LIMIT" in environ:
        path = environ.get("PYTHONPATH")
        environ["PYTHONPATH"] = f"{GPU_MEMORY_HOOK}:{path}" if path else GPU_MEMORY_HOOK
    if not quiet:
        _say(*(f"warning: {one}" for one in warnings), *(lines if serving else ()))
    hooks.run(environ)
    if serving:
        return services.run(services.prepare(folders, environ), environ, home, _say)
    state.write(home / state.SERVICES, "")  # for the health check: no service is meant to run
    return _become(arguments or ["bash"], environ)


def _owner() -> int:
    try:
        return person.WORKSPACE.stat().st_uid
    except OSError:
        return 0


def _become(command: list[str], environ: MutableMapping[str, str]) -> int:
    """Replaces this process; statuses of failure are those of a shell."""
    try:
        os.execvpe(command[0], command, dict(environ))
    except FileNotFoundError:
        _say(f"error: {command[0]}: no such command in this image")
        return 127
    except OSError as error:
        _say(f"error: {command[0]}: {error.strerror}")
        return 126


def shm_warning(path: str = "/dev/shm") -> str:
    """What to do if shared memory is small, as Docker's 64 MB are; empty if it is not."""
    try:
        told = os.statvfs(path)
    except OSError:
        return f"{path} is not there: DataLoader workers and NCCL need it; mount it, 8 GB or more"
    total = told.f_blocks * told.f_frsize
    if total >= SMALL_SHM:
        return ""
    return (
        f"{path} has {total // 2**20} MB: DataLoader workers and NCCL stop with a bus error when it is full; "
        "add --shm-size=8g or --ipc=host"
    )


def _say(*lines: str) -> None:
    if lines:
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
