"""Starts a container: checks variables, user and GPUs, runs hooks, then runs the command or the services.

All messages go to stderr, so that stdout has only the output of the command.
"""

from __future__ import annotations

import locale
import os
import subprocess
import sys
from collections.abc import Callable, MutableMapping, Sequence
from pathlib import Path

from . import foreign, gpus, hooks, person, services, state, variables
from .refusal import Refusal

SMALL_SHM = 512 * 2**20
WITHOUT_GPU = Path("/etc/without-gpu.d")
GPU_MEMORY_HOOK = "/usr/local/lib/gpu-memory-limit"
TERMINAL = "xterm-256color"
LOCALE = "C.UTF-8"  # the only one of the image that has UTF-8
# From setlocale(3). Other variables that begin with LC_ are no locales: some terminals set LC_TERMINAL to their name.
LOCALES = (
    "LANG", "LC_ALL", "LC_ADDRESS", "LC_COLLATE", "LC_CTYPE", "LC_IDENTIFICATION", "LC_MEASUREMENT", "LC_MESSAGES",
    "LC_MONETARY", "LC_NAME", "LC_NUMERIC", "LC_PAPER", "LC_TELEPHONE", "LC_TIME",
)  # fmt: skip
HELP = """\
docker run [--gpus all] IMAGE                 {what}
docker run [--gpus all] IMAGE COMMAND ...     run a command, such as `python train.py` or `bash`

Variables (-e NAME=VALUE):
{table}

Programs in /etc/start.d run first. A shell sources *.sh; later programs have the variables that they export, and
their umask.
"""


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status of the services; for a command it does not return, because the command replaces it."""
    environ = dict(os.environ)
    try:
        return _start(list(arguments), environ)
    except Refusal as refusal:
        _print(*(f"error: {line}" for line in str(refusal).splitlines()))
        return refusal.status
    except KeyboardInterrupt:  # while it waits for a GPU
        return 130


def _start(arguments: list[str], environ: MutableMapping[str, str]) -> int:
    known = variables.declared()
    folders = services.present()
    arguments, notes = foreign.command(arguments, environ, [folder.name for folder in folders])
    if arguments == ["--help"]:
        what = f"run {' and '.join(path.name for path in folders)}" if folders else "a shell: add -it"
        sys.stdout.write(HELP.format(what=what, table=variables.table(known)))
        return 0
    runs_services = arguments == [foreign.SERVICES] or (not arguments and bool(folders))
    is_shell = [Path(word).name for word in arguments] in ([], ["bash"], ["bash", "-l"], ["sh"])
    if not runs_services and is_shell and Path("/dev/stdin").resolve() == Path(os.devnull):
        raise Refusal(
            "a shell would get no input and end: add a command, such as `docker run -d IMAGE sleep infinity`, or -it"
        )
    warnings = [*notes, *variables.check(environ, known), *foreign.homes()]
    warnings += [*foreign.variables(environ, [variable.name for variable in known]), *replace_locales(environ)]
    runs_server = runs_services or (bool(arguments) and arguments[0] in foreign.SERVERS)
    warnings.append(person.ids_warning(environ, uid=os.getuid(), gid=os.getgid()))
    if os.getuid() == 0:
        state.forget_copies_of_others()
    target = person.target(environ, uid=os.getuid(), runs_server=runs_server, owner=_workspace_owner())
    if target:
        person.become(*target, chown_home=variables.flag(environ, "CHOWN_HOME"))
    # `docker exec CONTAINER start COMMAND`: the health check goes on with what the container's own launcher started.
    is_second = not runs_services and state.find(state.LAUNCHER) is not None
    try:
        home = state.make()
    except OSError as error:
        raise Refusal(str(error)) from error
    if not is_second:
        (home / state.SERVICES).unlink(missing_ok=True)  # of an earlier start: unhealthy until the hooks have run
    environ["STATE_DIR"] = str(home)
    warnings += [*person.set_up(environ, home), *replace_terminal(environ)]
    driver = gpus.read() if "NVIDIA_VISIBLE_DEVICES" in environ else gpus.Driver()
    lines, gpu_warnings = gpus.describe(driver, environ)
    warnings += [
        *gpu_warnings,
        person.workspace_warning() or person.group_warning(),
        # Without a GPU there is no NCCL, and most commands, such as `pip list`, start no DataLoader workers.
        shm_warning() if runs_services or gpus.visible(driver.gpus, environ) else "",
        noexec_warning(environ["HOME"]),
    ]
    if driver == gpus.Driver() and "NVIDIA_VISIBLE_DEVICES" in environ:  # with a driver, they would hide its errors
        environ.update({name: value for name, value in without_gpu() if name not in environ})
    if "GPU_MEMORY_LIMIT" in environ:
        path = environ.get("PYTHONPATH")
        environ["PYTHONPATH"] = f"{GPU_MEMORY_HOOK}:{path}" if path else GPU_MEMORY_HOOK
    if not variables.flag(environ, "START_QUIET"):
        _print(*(f"warning: {warning}" for warning in warnings if warning), *(lines if runs_services else ()))
    gpus.wait_until_free(driver, environ, _print)
    # Users with different ids share volumes through group 0, so files must be writable for the group.
    if os.getuid() and os.getgid() == 0:
        os.umask(0o002)
    for warning in hooks.run(environ):
        _print(f"warning: {warning}")
    if not is_second:
        state.write(home / state.ENVIRONMENT, "".join(f"{name}={value}\0" for name, value in environ.items()))
    if runs_services:
        return services.run(services.prepare(folders, environ), environ, home, _print)
    if not is_second:
        state.write(home / state.SERVICES, "")  # for the health check: no service runs
    return _execute(arguments or ["/bin/bash"], environ)


def _workspace_owner() -> int:
    try:
        return person.WORKSPACE.stat().st_uid
    except OSError:
        return 0


def _execute(command: list[str], environ: MutableMapping[str, str]) -> int:
    """Replaces this process by the command; on failure, returns the status that a shell would return."""
    try:
        os.execvpe(command[0], command, dict(environ))
    except FileNotFoundError:
        _print(f"error: {command[0]}: no such command in this image")
        return 127
    except OSError as error:
        _print(f"error: {command[0]}: {error.strerror}")
        return 126


def shm_warning(path: str = "/dev/shm") -> str:
    """A warning if shared memory is small, such as Docker's default of 64 MB; else empty."""
    try:
        status = os.statvfs(path)
    except OSError:
        return f"{path} does not exist, and DataLoader workers and NCCL need it: mount it with 8 GB or more"
    total = status.f_blocks * status.f_frsize
    if total >= SMALL_SHM:
        return ""
    return (
        f"{path} has {total // 2**20} MB: DataLoader workers and NCCL stop with a bus error when it is full; "
        "add --shm-size=8g or --ipc=host"
    )


def noexec_warning(home: str) -> str:
    """A warning if compiled or installed programs cannot run, as with Docker's --tmpfs; else empty."""
    for path in ("/tmp", home):
        try:
            flags = os.statvfs(path).f_flag
        except OSError:
            continue
        if flags & os.ST_NOEXEC:
            return f"{path} is mounted noexec, so torch.compile and programs there fail: use --tmpfs {path}:exec"
    return ""


def has_locale(name: str) -> bool:
    before = locale.setlocale(locale.LC_CTYPE)
    try:
        locale.setlocale(locale.LC_CTYPE, name)
    except locale.Error:
        return False
    finally:
        locale.setlocale(locale.LC_CTYPE, before)
    return True


def replace_locales(environ: MutableMapping[str, str], is_known: Callable[[str], bool] = has_locale) -> list[str]:
    """Replaces locales that the image does not have; returns a warning. Otherwise bash and perl print warnings."""
    missing = [name for name in LOCALES if environ.get(name) and not is_known(environ[name])]
    if not missing:
        return []
    given = ", ".join(f"{name}={environ[name]}" for name in missing)
    environ.update(dict.fromkeys(missing, LOCALE))
    return [f"{given}: not in this image, {LOCALE} is used. To have it, install locales-all in a derived image"]


def replace_terminal(environ: MutableMapping[str, str]) -> list[str]:
    """Replaces a TERM that the image has no description for, such as xterm-kitty, with which tmux fails.

    Returns a warning. Runs as the container's user, because the description may be a file in the user's home.
    """
    name = environ.get("TERM")
    command = ["/usr/bin/infocmp", "--", name or ""]
    if not name or not subprocess.run(command, env=dict(environ), capture_output=True, check=False).returncode:
        return []
    environ["TERM"] = TERMINAL
    return [f"TERM={name}: not in this image, {TERMINAL} is used"]


def without_gpu(folder: Path = WITHOUT_GPU) -> list[tuple[str, str]]:
    """Variables that keep a framework from looking for a missing GPU: NAME=VALUE lines of components."""
    lines = [line for file in sorted(folder.glob("*.env")) for line in file.read_text().splitlines()]
    return [(name, value) for name, _, value in (line.partition("=") for line in lines if line)]


def _print(*lines: str) -> None:
    if lines:
        sys.stderr.write("".join(f"{line}\n" for line in lines))
        sys.stderr.flush()
