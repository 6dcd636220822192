"""The state folder of a running container: tokens, the configuration of sshd, the names of the services."""

from __future__ import annotations

import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

TOP = Path("/run/workstation")
KEPT = Path("/var/lib/workstation")
ENVIRONMENT = "environment"  # file with the services' variables, in the format of /proc/PID/environ
SERVICES = "services"  # file with the names of the started services, one on each line
LAUNCHER = "launcher"  # file with the process of the launcher


def make() -> Path:
    """Creates a folder that only this user can read, in /run, or in /tmp if /run is not writable. Raises OSError."""
    for folder in _places(str(os.getuid())):
        try:
            if folder.parent == TOP:
                TOP.mkdir(mode=0o755, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError:
            continue
        if _is_ours(folder, os.getuid()) and os.access(folder, os.W_OK):
            if not is_in_use(folder):
                forget_copies(folder)
                write(folder / LAUNCHER, process(os.getpid()))
            return folder
    raise OSError("cannot write to /run/workstation or /tmp: with --read-only, add --tmpfs /tmp")


def forget_copies(folder: Path) -> None:
    """Empties a state folder that `docker commit` copied into an image: each container has tokens and keys of its own.

    A copy is recognized by the ctime of the file `made`, which only the kernel sets: a restart keeps it, a copy has
    another one. The host name cannot tell containers apart: with `--hostname` and `--network host`, several share it.
    """
    if not _is_copy(folder):
        return
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    made = folder / "made"
    write(made, "")
    write(folder / "made-at", str(made.stat().st_ctime_ns))


def _is_copy(folder: Path) -> bool:
    made, note = folder / "made", folder / "made-at"
    return not (note.is_file() and made.exists() and note.read_text() == str(made.stat().st_ctime_ns))


def forget_copies_of_others() -> None:
    """Removes the state folders of all users that `docker commit` copied into the image; called at a start as root.

    Users could exchange files for links meanwhile, but `rmtree` follows no links.
    """
    for place in (*_places("*"), KEPT / "of-*"):
        for folder in place.parent.glob(place.name):
            with suppress(OSError):  # with --cap-drop ALL, root cannot look into them
                is_on_volume = folder.lstat().st_dev != Path("/").stat().st_dev
                if not is_on_volume and _is_copy(folder) and not is_in_use(folder):
                    shutil.rmtree(folder)


def is_in_use(folder: Path) -> bool:
    """Whether the launcher that made this folder still runs.

    Then it is no copy, even if it looks like one: `chmod -R` changes the ctime of its files.
    """
    try:
        record = (folder / LAUNCHER).read_text()
        return record == process(int(record.split()[0]))
    except (OSError, ValueError, IndexError):  # it has ended
        return False


def process(number: int) -> str:
    """Identifies a process by its id, start time and control group, which a command that replaces the launcher keeps.

    With `--pid=host`, a copy of the container sees the same processes, but is in another control group.
    """
    folder = Path(f"/proc/{number}")
    start = (folder / "stat").read_text().rpartition(")")[2].split()[19]  # proc(5)
    return f"{number} {start} {(folder / 'cgroup').read_text()}"


def kept() -> Path | None:
    """Creates the folder for what containers on the same volume share, such as host keys; None if that fails."""
    folder = KEPT / f"of-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if not _is_ours(folder, os.getuid()):
            return None
        if folder.stat().st_dev == Path("/").stat().st_dev:  # on a volume, it may be restored from a backup
            forget_copies(folder)
    except OSError:
        return None
    return folder


def find(file: str) -> Path | None:
    """The state folder of this user that has this file and whose launcher runs; for root, of any user.

    Root may run the health check, which looks for the services of the container's user.
    """
    uid = os.getuid()
    for place in _places(str(uid) if uid else "*"):
        for folder in sorted(place.parent.glob(place.name)):
            owner = folder.name.rpartition("-")[2]
            if owner.isdecimal() and _is_ours(folder, int(owner)) and _is_live(folder, int(owner), file):
                return folder
    return None


def _is_live(folder: Path, owner: int, file: str) -> bool:
    """Whether the folder has this file and its launcher runs.

    Reads the folder as its owner: with --cap-drop ALL, root lacks CAP_DAC_OVERRIDE and cannot read it.
    """
    uid = os.geteuid()
    try:
        os.seteuid(owner)
    except PermissionError:  # root without CAP_SETUID started no services of another user
        return False
    try:
        return (folder / file).is_file() and is_in_use(folder)
    finally:
        os.seteuid(uid)


def _places(uid: str) -> tuple[Path, Path]:
    return TOP / f"of-{uid}", Path(f"/tmp/workstation-of-{uid}")


def write(path: Path, text: str) -> None:
    """Writes a file that only its owner can read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", errors="surrogateescape") as stream:
        stream.write(text)


def _is_ours(folder: Path, uid: int) -> bool:
    """Whether this user created the folder; anyone can create folders in /tmp."""
    try:
        status = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == uid and not status.st_mode & 0o022
