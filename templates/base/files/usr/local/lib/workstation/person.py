"""The user of a container: the image's user, any `--user`, or, if it starts as root, the owner of the volume."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Mapping, MutableMapping
from contextlib import suppress
from pathlib import Path

from .refusal import Refusal

NAME = "user"
UID = 1000
HOME = Path("/home/user")
WORKSPACE = Path("/workspace")
PACKAGES = Path("/opt/venv/lib/python/site-packages")
NAMES = Path("/var/lib/extrausers")  # passwd and group of libnss-extrausers, which ignores ids below 500
_NO_GROUP = 65534  # Debian's nogroup
_UNMAPPED = 65534  # the owner of files whose real owner has no id in the user namespace


def target(environ: Mapping[str, str], *, uid: int, runs_server: bool, owner: int) -> tuple[int, int] | None:
    """The ids of the user and group to change to; None if the user stays. `owner` is the owner of the workspace.

    `runs_server`: the launcher will run services or a Jupyter server, not a command of the user.
    """
    is_set = "NB_UID" in environ or "NB_GID" in environ
    if uid != 0 or (not is_set and not runs_server) or int(environ.get("NB_UID", UID)) == 0:
        # `docker run --user root IMAGE apt-get ...`, or rootless Docker, where root is the host's user.
        return None
    return int(environ.get("NB_UID", owner or UID)), int(environ.get("NB_GID", 0))


def ids_warning(environ: Mapping[str, str], *, uid: int, gid: int) -> str:
    """A warning if NB_UID or NB_GID ask for other ids and the container did not start as root; else empty."""
    asked = environ.get("NB_UID", str(uid)), environ.get("NB_GID", str(gid))
    if uid == 0 or asked == (str(uid), str(gid)):
        return ""
    return (
        f"NB_UID and NB_GID need root at the start, so this stays user {uid}: add `--user root` (the launcher drops "
        "root before it starts anything else), or use `--user $(id -u):0` without them"
    )


def become(user: int, group: int, *, chown_home: bool = False) -> None:
    """Changes root to another user, gives the name `user` these ids, and gives the user the files in the home.

    The name changes only if /etc is writable. In a mounted home, which belongs to the host, owners change only with
    `chown_home`.
    """
    try:
        _set_entry(Path("/etc/passwd"), NAME, {2: str(user), 3: str(group)})
        if group:
            _set_entry(Path("/etc/group"), NAME, {2: str(group)}, new=f"{NAME}:x:{group}:")
    except OSError:
        pass  # /etc is read-only: the user has no name, but everything else works
    device = HOME.lstat().st_dev if HOME.exists() else 0
    if device and (chown_home or device == Path("/").stat().st_dev):
        _change_owner(HOME, device, user, group)
    try:
        os.setgroups(sorted({0, *os.getgroups()}))  # group 0 owns all files that the image's user can write
        os.setgid(group)
        os.setuid(user)
    except PermissionError as error:
        # KILL: process 1 stays root and forwards signals; without it, `docker stop` would end everything at once.
        needed = "--cap-add SETUID --cap-add SETGID --cap-add KILL"
        raise Refusal(f"cannot become user {user}: `--user root` needs {needed}") from error


def set_up(environ: MutableMapping[str, str], fallback: Path) -> list[str]:
    """Sets a writable home and a user name in `environ`; returns warnings."""
    uid = os.getuid()
    home = Path("/root") if uid == 0 else HOME
    current = environ.get("HOME", "/")
    if current == "/" or (current == str(HOME) and uid == 0) or (uid and current == "/root"):
        environ["HOME"] = str(home)
    warnings = _home(environ, fallback)
    name = _name(uid, environ["HOME"])
    for variable in ("USER", "LOGNAME"):
        if environ.get(variable, NAME) == NAME:
            environ[variable] = name
    programs = f"{environ['HOME']}/.local/bin"  # where Python installs what this user cannot install in /opt/venv
    path = environ.get("PATH", os.defpath).split(":")
    if uid and programs not in path:
        environ["PATH"] = ":".join([*path, programs])
    return warnings


def _name(uid: int, home: str) -> str:
    """The user's name; adds an entry for a user without a name, if the file system is writable."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        pass
    name, group = f"{NAME}{uid}", os.getgid()
    try:
        with (NAMES / "passwd").open("a") as file:
            file.write(f"{name}:x:{uid}:{group or _NO_GROUP}::{home}:/bin/bash\n")
        if not _has_name(group):
            with (NAMES / "group").open("a") as file:
                file.write(f"{NAME}{group}:x:{group}:\n")
    except OSError:
        pass  # read-only, or the file belongs to an earlier user of the container, or to root after dpkg ran
    return name


def _has_name(group: int) -> bool:
    try:
        grp.getgrgid(group)
    except KeyError:
        return False
    return True


def _home(environ: MutableMapping[str, str], fallback: Path) -> list[str]:
    if os.access(environ["HOME"], os.W_OK):
        return []
    uid = os.getuid()
    unwritable, environ["HOME"] = environ["HOME"], str(fallback / "home")
    Path(environ["HOME"]).mkdir(mode=0o700, exist_ok=True)
    return [
        f"user {uid} cannot write to {unwritable}: HOME is {environ['HOME']}, which is deleted with the container; for "
        f"a command of `docker exec`, add -e HOME={environ['HOME']}"
    ]


def workspace_warning(folder: Path = WORKSPACE) -> str:
    """A warning if the workspace is not writable; else empty."""
    if not folder.exists() or os.access(folder, os.W_OK):
        return ""
    status, uid = folder.stat(), os.getuid()
    owner, group = status.st_uid, status.st_gid
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        is_mount = folder.stat().st_dev != Path("/").stat().st_dev
        fix = "mount it without :ro" if is_mount else f"mount a folder there, -v FOLDER:{folder}"
    elif not status.st_mode & 0o200:
        fix = f"its mode is {status.st_mode & 0o777:o}, run `chmod u+w` on it"
    elif owner == uid:
        fix = "the host denies it; with SELinux, add :z to -v; on NFS, check the export"
    elif owner in (0, _UNMAPPED):
        fix = (
            f"change its owner, `docker run --rm --user root -v FOLDER:{folder} IMAGE chown {uid} {folder}`, or "
            "start with `--user root -e NB_UID=0` in rootless Docker, where root is your own user"
        )
    else:
        fix = f"start with `--user {owner}:0`, or with `--user root -e NB_UID={owner} -e NB_GID={group}`"
    return f"user {uid} cannot write to {folder}, which belongs to {owner}:{group}: {fix}"


def group_warning(folder: Path = PACKAGES) -> str:
    """A warning if the user cannot install into the image's environment; else empty."""
    if os.access(folder, os.W_OK) or os.statvfs(folder).f_flag & os.ST_RDONLY:
        return ""
    uid = os.getuid()
    return (
        f"user {uid} is not in group 0, so uv cannot install into /opt/venv, and pip installs into ~/.local: use "
        f"`--user {uid}:0`"
    )


def _set_entry(file: Path, name: str, fields: Mapping[int, str], new: str = "") -> None:
    """Changes fields of an entry of passwd or group and moves it to the top, where a search by id finds it first."""
    lines = file.read_text().splitlines()
    old = [line for line in lines if line.split(":", 1)[0] == name]
    parts = (old[0] if old else new).split(":")
    for index, value in fields.items():
        parts[index] = value
    rest = [line for line in lines if line not in old]
    file.write_text("\n".join([":".join(parts), *rest]) + "\n")


def _change_owner(top: Path, device: int, user: int, group: int) -> None:
    """Changes the owner of the image's own files in `top` on `device`, and of `top`; they belong to 1000:0.

    Users of another container may share a mounted home and exchange a folder for a link at any moment. So this opens
    each file by its name in an open folder, without following links, and checks and changes only the opened file. It
    does not recurse, because a user could make folders deeper than Python's limit of recursion.
    """
    levels = [(os.open(top.parent, os.O_PATH), [top.name])]
    while levels:
        folder, names = levels[-1]
        if not names:
            os.close(folder)
            levels.pop()
            continue
        try:
            file = os.open(names.pop(), os.O_PATH | os.O_NOFOLLOW, dir_fd=folder)
        except OSError:  # it has vanished
            continue
        below: list[str] = []
        status, path = os.fstat(file), f"/proc/self/fd/{file}"
        with suppress(OSError):  # read-only, or a mount without chown: `set_up` checks whether the home is writable
            if status.st_dev == device and (status.st_uid, status.st_gid) == (UID, 0):
                os.chown(path, user, group)
            if status.st_dev == device and stat.S_ISDIR(status.st_mode):
                below = os.listdir(path)
        levels.append((file, below))
