"""As whom a container runs: the image's user, an arbitrary `--user`, or, started as root, the owner of the volume."""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

from .refusal import Refusal

NAME = "user"
UID = 1000
HOME = Path("/home/user")
WORKSPACE = Path("/workspace")
# Made in the image for group 0, so that any user of that group can write there.
STATE = (Path("/run/workstation"), Path("/var/lib/workstation"), Path("/opt/venv/user"))


def wanted(environ: Mapping[str, str], *, uid: int, serving: bool, owner: int) -> tuple[int, int] | None:
    """User and group to become, None to stay. `owner` is whose the workspace is.

    Raises Refusal where NB_UID or NB_GID cannot be had.
    """
    asked = "NB_UID" in environ or "NB_GID" in environ
    if uid != 0:
        same = environ.get("NB_UID", str(uid)) == str(uid) and environ.get("NB_GID", str(os.getgid())) == str(
            os.getgid()
        )
        if asked and not same:
            raise Refusal(
                "NB_UID and NB_GID need root at the start: add `--user root` (root is given up before anything else "
                "runs), or leave them out and use `--user $(id -u):0`"
            )
        return None
    if not asked and not serving:
        return None  # `docker run --user root IMAGE apt-get ...`
    return int(environ.get("NB_UID", owner or UID)), int(environ.get("NB_GID", 0))


def become(user: int, group: int) -> None:
    """Gives up root for good. The image's `user` gets the numbers, where /etc can be written, and its files."""
    try:
        _rename(Path("/etc/passwd"), NAME, {2: str(user), 3: str(group)})
        if group:
            _rename(Path("/etc/group"), NAME, {2: str(group)}, new=f"{NAME}:x:{group}:")
    except OSError:
        pass  # read-only: the user then has no name, and all else works
    for top in (*STATE, HOME):
        _give(top, user, group)
    try:
        os.setgroups(sorted({0, *os.getgroups()}))  # group 0 owns what the image lets its user write
        os.setgid(group)
        os.setuid(user)
    except PermissionError as error:
        raise Refusal(
            f"cannot become user {user}: the capabilities SETUID and SETGID are needed for `--user root`"
        ) from error


def settle(environ: MutableMapping[str, str], fallback: Path) -> list[str]:
    """Gives the process a name, and a home and a place for pip that it can write to; returns warnings."""
    uid = os.getuid()
    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:
        name = NAME
    for variable in ("USER", "LOGNAME"):
        environ.setdefault(variable, name)
    home = Path("/root") if uid == 0 else HOME
    told = environ.get("HOME", "/")
    if told == "/" or (told == str(HOME) and uid == 0) or (uid and told == "/root"):
        environ["HOME"] = str(home)
    warnings = _home(environ, fallback)
    if not os.access(environ.get("PYTHONUSERBASE", "/"), os.W_OK):
        environ["PYTHONUSERBASE"] = f"{environ['HOME']}/.local"
    return warnings


def _home(environ: MutableMapping[str, str], fallback: Path) -> list[str]:
    if os.access(environ["HOME"], os.W_OK):
        return []
    uid = os.getuid()
    was, environ["HOME"] = environ["HOME"], str(fallback / "home")
    Path(environ["HOME"]).mkdir(mode=0o700, exist_ok=True)
    return [f"{was} cannot be written by user {uid}: home is {environ['HOME']}, and lost with the container"]


def workspace_warning(folder: Path = WORKSPACE) -> str:
    """What to do if the workspace cannot be written; empty if it can."""
    if not folder.exists() or os.access(folder, os.W_OK):
        return ""
    owner, group = folder.stat().st_uid, folder.stat().st_gid
    fix = (
        "mount it without :ro"
        if os.statvfs(folder).f_flag & os.ST_RDONLY
        else f"start with `--user {owner}:0`, or with `--user root -e NB_UID={owner} -e NB_GID={group}`"
    )
    return f"{folder} belongs to {owner}:{group} and cannot be written by user {os.getuid()}: {fix}"


def _rename(file: Path, name: str, fields: Mapping[int, str], new: str = "") -> None:
    """Changes fields of an entry of passwd or group and puts it first, where a search by number finds it."""
    lines = file.read_text().splitlines()
    mine = [line for line in lines if line.split(":", 1)[0] == name]
    parts = (mine[0] if mine else new).split(":")
    for index, value in fields.items():
        parts[index] = value
    rest = [line for line in lines if line not in mine]
    file.write_text("\n".join([":".join(parts), *rest]) + "\n")


def _give(top: Path, user: int, group: int) -> None:
    """Gives the files below `top` that the image made for its user to another.

    Those belong to 1000:0. What people mount belongs to a group of theirs, and stays as it is.
    """
    if not top.exists():
        return
    for path in _below(top):
        try:
            if (path.lstat().st_uid, path.lstat().st_gid) == (UID, 0):
                os.lchown(path, user, group)
        except OSError:
            continue  # read-only, or a mount that refuses: `settle` sees whether it can be written


def _below(top: Path) -> Iterable[Path]:
    yield top
    device = top.stat().st_dev
    for folder, folders, files in os.walk(top):
        here = Path(folder)
        folders[:] = [name for name in folders if (here / name).lstat().st_dev == device]
        yield from (path for name in (*folders, *files) if (path := here / name).lstat().st_dev == device)
