"""NVIDIA's archives as entries of a layer: the files of all in one folder, and links to those of CUDA wheels.

A compiler looks for all headers and libraries in CUDA_HOME. Those of cuBLAS and others are in the image already, where
their wheels have them: the folder has links to them. `templates/steps/redist.py` does the same for a Dockerfile.
"""

from __future__ import annotations

import lzma
import re
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from posixpath import dirname, join, normpath

from builder.common.errors import FetchError
from builder.layers import splice
from builder.layers.splice import Entry
from builder.layers.wheel import FILE_MODE, PROGRAM_MODE, environment, new_folders
from builder.lock.lockfile import LockedArchive
from builder.plan.settings import CUDA_HOME

MOST_BYTES = 2_000_000_000  # of all files of an archive; nvcc's has some 300 MB
_HOME = CUDA_HOME.lstrip("/")
_OF_WHEEL = re.compile(rf"({environment('').site}/nvidia/[^/]+/(include|lib)/([^/]+))(/.+)?")
_LIBRARY = re.compile(r"(lib[^.]+\.(?:so|a))(\.[0-9]+)*")


def redist_entries(archives: Sequence[tuple[LockedArchive, Path]], wheel_files: Iterable[str]) -> Iterator[Entry]:
    """The files of archives, in their order, then links to `wheel_files`, the paths of files of CUDA wheels.

    A library of a wheel replaces that of an archive: each is in the image once. Holds one file in memory. Raises
    FetchError for an archive that is damaged, has an entry or a link out of its folder, or has another file for a path
    of an earlier one.
    """
    known: dict[str, tuple[int, str, str]] = {}
    folders: set[str] = set()
    links = _links(sorted(wheel_files))
    for archive, path in archives:
        for entry in _read(archive, path):
            library = _LIBRARY.fullmatch(entry.path.removeprefix(f"{_HOME}/lib/"))
            if library and f"{_HOME}/lib/{library[1]}" in links:
                continue
            described = (entry.mode, entry.link, splice.sha256(entry.content or b""))
            above = [folder.path for folder in new_folders(entry.path, set())]
            if (
                known.get(entry.path, described) != described
                or entry.path in folders
                or not known.keys().isdisjoint(above)
            ):
                raise _invalid(archive, f"/{entry.path} is another file than in an earlier archive, or a folder there")
            if entry.path not in known:
                known[entry.path] = described
                yield from new_folders(entry.path, folders)
                yield entry
    for link, target in links.items():
        if link not in known and link not in folders:
            yield from new_folders(link, folders)
            yield Entry(path=link, mode=0o777, link=target)


def _read(archive: LockedArchive, path: Path) -> Iterator[Entry]:
    """The files and links of an archive, without owners and times. Raises FetchError."""
    size = 0
    try:
        with tarfile.open(path, "r:xz") as tar:
            for member in tar:
                top, _, name = member.name.partition("/")
                if member.isdir():  # implied by its files
                    continue
                if top != archive.folder or not _is_inside(name) or not name.isprintable():
                    raise _invalid(archive, f"it has an entry {member.name[:100]!a}, not below {archive.folder}/")
                place = f"{_HOME}/licenses/{archive.name}/LICENSE" if name == "LICENSE" else f"{_HOME}/{name}"
                size += member.size
                if member.issym():
                    # Without a .. after a name: that name may be a link itself.
                    target = member.linkname
                    if normpath(target) != target or not _is_inside(normpath(join(dirname(name), target))):
                        raise _invalid(archive, f"{name} is a link to {target[:100]!a}, out of its folder")
                    yield Entry(path=place, mode=0o777, link=target)
                elif (content := tar.extractfile(member)) and size <= MOST_BYTES:
                    mode = PROGRAM_MODE if member.mode & 0o111 else FILE_MODE
                    yield Entry(path=place, mode=mode, content=content.read())
                else:
                    raise _invalid(archive, f"{name} is no file, or too large")
    except (tarfile.TarError, lzma.LZMAError, EOFError, KeyError, ValueError) as error:
        raise _invalid(archive, str(error)) from error


def _is_inside(path: str) -> bool:
    return normpath(path) == path and path not in (".", "..") and not path.startswith(("../", "/"))


def _links(wheel_files: Iterable[str]) -> dict[str, str]:
    """Links in CUDA_HOME to headers and libraries of wheels, and from lib64, where nvcc looks, to lib."""
    links = {f"{_HOME}/lib64": "lib"}
    for target, folder, name, below in (found.groups() for found in map(_OF_WHEEL.fullmatch, wheel_files) if found):
        if folder == "include" and not name.endswith(".py"):
            links.setdefault(f"{_HOME}/include/{name}", f"/{target}")
        elif folder == "lib" and not below and (library := _LIBRARY.fullmatch(name)):
            for each in (name, library[1]):  # wheels have libcublas.so.12 alone; -lcublas finds libcublas.so
                links.setdefault(f"{_HOME}/lib/{each}", f"/{target}")
    return links


def _invalid(archive: LockedArchive, reason: str) -> FetchError:
    return FetchError(
        f"{archive.file} is invalid: {reason}", hint="Its SHA-256 is the locked one: lock another release of CUDA."
    )
