"""Runs mmdebstrap: the file system of a Debian release as a tar, without a container engine.

Packages are downloaded from this machine's own Debian archives, and the result has Debian's own addresses. It needs
root, and Debian or Ubuntu. Source: mmdebstrap(1).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from builder.build.programs import Program, Programs
from builder.common.errors import FREE_DISK, BuildError, DiskError
from builder.engine.errors import is_disk_full
from builder.index.host import KEYRING, Host
from builder.index.mmdebstrap import install, is_installed

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")

# apt's sandbox user may not be able to write here, and apt would give its folders to that user.
_AS_ROOT = 'APT::Sandbox::User "root";'
TIMEOUT_S = 3600
_TAIL = 8  # lines of output in a message
# dpkg syncs each file to a disk, so the files are written to memory if there is enough.
TMPFS = 5 << 30
FREE_MEMORY = TMPFS + (1 << 30)  # bytes that must be available for each file system in memory
_IN_MEMORY = f'mount -t tmpfs -o size={TMPFS} tmpfs "$TMPDIR" && exec "$@"'
_memory_lock = threading.Lock()
_in_memory = 0  # file systems in memory now
# Messages of mmdebstrap, and what the view shows for them.
_STEPS = {
    r"I: running apt-get update": "downloading the lists of packages",
    r"I: downloading packages": "downloading the release",
    r"I: installing essential": "installing the release",
    r"I: running --customize-hook .*/run-commands": "installing the image's packages",
    r"I: creating tarball": "packing",
}
# Processes of packages end with mmdebstrap, and it ends with the builder.
_ISOLATED = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]


class BootstrapError(BuildError):
    """mmdebstrap failed: a package does not exist, an archive cannot be reached, or a package's script failed."""


@dataclass(frozen=True, kw_only=True)
class Bootstrap:
    """What to make: a Debian release. `hook` is a program to run before it is packed; it gets the root folder.

    `steps` is the folder of slim.sh, clean.sh and packages.sh; `lock` is the path of a lock with the only packages that
    may be installed.
    """

    release: str
    steps: Path
    log: Path
    lock: Path | None = None
    hook: Path | None = None


def reason_not() -> str:
    """Why this machine cannot run mmdebstrap; empty if it can, perhaps after `prepare` installed it."""
    if os.geteuid() != 0:
        return "only root can run it"
    if not is_installed() and not shutil.which("apt-get"):
        return "it is not installed"
    if not all(map(shutil.which, ("setpriv", "unshare"))):
        return "setpriv and unshare are not installed"
    probe = subprocess.run([*_ISOLATED, "true"], capture_output=True, check=False)
    return "this machine does not allow it to create namespaces" if probe.returncode else ""


def prepare(say: Callable[[str], None]) -> str:
    """Installs mmdebstrap if it is missing and this is root; returns why it cannot run, empty if it can."""
    return reason_not() or install(say)


def run(bootstrap: Bootstrap, host: Host, scratch: Path, programs: Programs, note: Callable[[str], None]) -> Path:
    """Makes the file system in `scratch`; returns the path of its tar. `note` gets what is being done.

    Raises BootstrapError with the last lines of the output, or DiskError.
    """
    tar = scratch / "root.tar"
    with _memory() as has_memory:
        status, output = _run(bootstrap, host, tar, programs, note, in_memory=has_memory)
    if status and has_memory and is_disk_full(output):
        status, output = _run(bootstrap, host, tar, programs, note, in_memory=False)
    if status == 0:
        return tar
    if is_disk_full(output):
        raise DiskError(f"the disk of {scratch} is full\n{output}", hint=FREE_DISK)
    how = "failed" if status > 0 else f"was killed: after {TIMEOUT_S} s, or because memory ran out"
    raise BootstrapError(f"mmdebstrap {how} ({bootstrap.release}, status {status})\n{output}")


def _run(
    bootstrap: Bootstrap, host: Host, tar: Path, programs: Programs, note: Callable[[str], None], *, in_memory: bool
) -> tuple[int, str]:
    """Exit status, and the last lines of the output."""
    prefix = [] if reason_not() else [*_ISOLATED, *(["sh", "-c", _IN_MEMORY, "sh"] if in_memory else [])]
    scratch = tar.parent
    (scratch / "tmp").mkdir(exist_ok=True)
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": os.environ.get("HOME", "/"),
        "LC_ALL": "C.UTF-8",
        "TMPDIR": str(scratch / "tmp"),
        **host.proxies,  # nothing else of this machine: packages have scripts
    }
    tail: deque[str] = deque(maxlen=_TAIL)

    def on_line(line: str) -> str:
        line = host.hide(line)
        if step := next((step for pattern, step in _STEPS.items() if re.match(pattern, line)), ""):
            note(step)
        tail.append(f"  | {line.rstrip()}")
        return line

    program = Program(
        command=[*prefix, "mmdebstrap", *_options(bootstrap, host, scratch), bootstrap.release, str(tar)],
        environment=environment,
        folder=scratch,
        log=bootstrap.log,
        timeout_s=TIMEOUT_S,
    )
    return programs.run(program, on_line), "\n".join(tail)


def _options(bootstrap: Bootstrap, host: Host, scratch: Path) -> list[str]:
    options = [
        "--variant=minbase",
        "--format=tar",
        "--skip=check/qemu,cleanup/run",
        f"--keyring={KEYRING}",
        f"--aptopt={_AS_ROOT}",
        f"--extract-hook={bootstrap.steps}/slim.sh",
    ]
    if sources := host.sources_list(bootstrap.release):
        (scratch / "sources.list").write_text(sources, encoding="utf-8")
        inside = '"$1/etc/apt/sources.list"'
        own, canonical = quote(f"{scratch}/sources.list"), quote(f"{scratch}/canonical")
        options.append(f"--setup-hook=cp {inside} {canonical}; cp {own} {inside}")
        options.append(f"--customize-hook=cp {canonical} {inside}")
    if bootstrap.lock:
        program, lock = (quote(str(path)) for path in (bootstrap.steps / "packages.sh", bootstrap.lock))
        options.append(f'--setup-hook=sh {program} pin "$1" {lock}')
    options += [f"--aptopt={option}" for option in host.apt_options(bootstrap.release)]
    if bootstrap.hook:
        options.append(f"--customize-hook={bootstrap.hook}")
    return [*options, f"--customize-hook={bootstrap.steps}/clean.sh"]


@contextmanager
def _memory() -> Iterator[bool]:
    """Whether a file system fits into memory, beside those that others write there now."""
    global _in_memory  # noqa: PLW0603  all threads share the memory
    with _memory_lock:
        fits = _free_memory() >= FREE_MEMORY + _in_memory * TMPFS
        _in_memory += fits
    try:
        yield fits
    finally:
        with _memory_lock:
            _in_memory -= fits


def _free_memory() -> int:
    """Bytes that programs can use without swapping. Source: proc(5), MemAvailable; cgroup v2, memory.max."""
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", MEMINFO.read_text(encoding="ascii"), re.MULTILINE)
    free = int(match[1]) << 10 if match else 0
    try:
        limit, used = ((CGROUP / f"memory.{name}").read_text(encoding="ascii").strip() for name in ("max", "current"))
    except OSError:  # the root group, which has no limit, or version 1
        return free
    return free if limit == "max" else min(free, int(limit) - int(used))
