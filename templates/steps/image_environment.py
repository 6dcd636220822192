"""Adds the user's own packages in front of those of the image, unless root runs Python.

The image's packages are in /opt/venv and belong to root. Users install packages into PYTHONUSERBASE, which every member
of group 0 can write. For all users except root, `sys.prefix` is that folder: it is first on the path, and pip and uv
install there. Root has only the image's packages, so that root never runs a file that users can write.

Every Python with the image's packages on its path calls this from their .pth file, also Debian's Python, so that it
works in environments with --system-site-packages.
"""

import atexit
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
    if os.getuid() == 0:
        _drop_user_paths()
        return
    overlay = _overlay()
    if not overlay:
        return
    folder = f"{overlay}/{_SITE}"
    if sys.prefix in (IMAGE, "/.venv"):  # before the .pth files of users run, which may read it
        sys.prefix = sys.exec_prefix = site.USER_BASE = overlay
        site.USER_SITE = folder
        site.ENABLE_USER_SITE = True  # for `pip install --user`
    before = list(sys.path)
    if os.path.isdir(folder):
        site.addsitedir(folder, known_paths)
    if folder not in before:
        added = [path for path in sys.path if path not in before]
        at = before.index(image) if image in before else 0
        sys.path[:] = [*before[:at], *added, *before[at:]]


def _overlay() -> str:
    """The folder where this user can install packages: users outside group 0 only in the image's home.

    Never in another home: with Apptainer it is the home on the host, whose packages are not for this image.
    """
    overlay = os.environ.get("PYTHONUSERBASE", OVERLAY)
    if os.access(overlay, os.W_OK):
        return overlay
    return f"{HOME}/.local" if os.environ.get("HOME", HOME) == HOME else ""


def _drop_user_paths() -> None:
    """Removes the user's paths from the environment, which `docker exec -u root` inherits from the image."""
    site.ENABLE_USER_SITE = False
    atexit.register(_drop_stale_records)
    if os.environ.get("HOME") == HOME:
        os.environ.update(HOME="/root", USER="root", LOGNAME="root")
    parts = os.environ.get("PATH", os.defpath).split(":")
    os.environ["PATH"] = ":".join(part for part in parts if not part.startswith((OVERLAY, HOME)))


def _drop_stale_records() -> None:
    """Deletes the user's records of packages that root has replaced or removed: their links are broken."""
    records = f"{OVERLAY}/{_SITE}"
    try:
        for name in os.listdir(records):
            metadata = f"{records}/{name}/METADATA"
            if os.path.islink(metadata) and not os.path.exists(metadata):
                for file in os.listdir(f"{records}/{name}"):
                    os.unlink(f"{records}/{name}/{file}")
                os.rmdir(f"{records}/{name}")
    except OSError:
        return  # read-only
