"""Adds the user's own packages in front of those of the image, unless root runs Python.

The image's packages are in /opt/venv and belong to root. Users install packages into /opt/venv/user, which every member
of group 0 can write, or into ~/.local where they cannot write there. For all users except root, `sys.prefix` is the
folder that they install into, so pip and uv install there, and both folders are on the path before the image's. Root
has only the image's packages, and neither reads nor changes a folder that users can write: they could make it run or
delete any file.

Every Python with the image's packages on its path calls this from their .pth file, also Debian's Python, so that it
works in environments with --system-site-packages.
"""

import os
import site
import sys

IMAGE = "/opt/venv"
OVERLAY = "/opt/venv/user"
HOME = "/home/user"
_SITE = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


def enter(image: str, known_paths: set[str]) -> None:
    """Changes the paths of this process. `image` is the folder of the image's packages, `known_paths` as in `site`."""
    known_paths.add(f"{IMAGE}/{_SITE}")  # by its real name: it may be on the path by way of /.venv
    pip = _pip_arguments()
    # pip refuses build constraints together with --no-build-isolation, which builds with the image's packages anyway.
    if pip and "--no-build-isolation" not in pip and "PIP_NO_BUILD_ISOLATION" not in os.environ:
        os.environ.setdefault("PIP_BUILD_CONSTRAINT", os.environ.get("PIP_CONSTRAINT", ""))
    if os.getuid() == 0:
        _drop_user_paths()
        return
    place = _place_to_install()
    if place and sys.prefix in (IMAGE, "/.venv"):  # before the .pth files of users run, which may read it
        sys.prefix = sys.exec_prefix = site.USER_BASE = place
        site.USER_SITE = f"{place}/{_SITE}"
        site.ENABLE_USER_SITE = True  # for `pip install --user`
    if place == OVERLAY:
        _drop_stale_records()
        if pip:
            os.umask(os.umask(0) & ~0o020)  # group 0 can replace what it installs, whatever its number
    before = list(sys.path)
    # A derived image has its packages in OVERLAY, whoever can write there now.
    for top in dict.fromkeys((place, OVERLAY)):
        if top and os.path.isdir(f"{top}/{_SITE}"):
            site.addsitedir(f"{top}/{_SITE}", known_paths)
    added = [path for path in sys.path if path not in before]
    at = before.index(image) if image in before else 0
    sys.path[:] = [*before[:at], *added, *before[at:]]


def _place_to_install() -> str:
    """The folder where this user can install packages: users outside group 0 only in the image's home.

    Never in another home: with Apptainer it is the home on the host, whose packages are not for this image.
    """
    place = os.environ.get("PYTHONUSERBASE", OVERLAY)
    if os.access(place, os.W_OK):
        return place
    return f"{HOME}/.local" if os.environ.get("HOME", HOME) == HOME else ""


def _pip_arguments() -> list[str]:
    """The command line of this process if it runs pip, else nothing; `sys.argv` is not set yet."""
    try:
        with open("/proc/self/cmdline", "rb") as file:
            words = os.fsdecode(file.read()).split("\0")
    except OSError:
        return []
    return words if any(os.path.basename(word).rstrip(".0123456789") == "pip" for word in words[1:6]) else []


def _drop_stale_records() -> None:
    """Deletes the user's records of packages that root has replaced or removed: their links are broken.

    Python would take such a package for one without a version. Root changes the time of the folder of the image's
    packages, which is otherwise that of the operating system.
    """
    records = f"{OVERLAY}/{_SITE}"
    try:
        if os.stat(f"{IMAGE}/{_SITE}").st_mtime <= os.stat(f"{IMAGE}/pyvenv.cfg").st_mtime:
            return
        for name in os.listdir(records):
            metadata = f"{records}/{name}/METADATA"
            if os.path.islink(metadata) and not os.path.exists(metadata):
                for file in os.listdir(f"{records}/{name}"):
                    os.unlink(f"{records}/{name}/{file}")
                os.rmdir(f"{records}/{name}")
    except OSError:
        return  # another user's process deleted it first


def _drop_user_paths() -> None:
    """Removes the user's paths from the environment, which `docker exec -u root` inherits from the image."""
    site.ENABLE_USER_SITE = False
    if os.environ.get("HOME") == HOME:
        os.environ.update(HOME="/root", USER="root", LOGNAME="root")
    parts = os.environ.get("PATH", os.defpath).split(":")
    os.environ["PATH"] = ":".join(part for part in parts if not part.startswith((OVERLAY, HOME)))
