"""Makes `files` layers: the plain files of an image's components, and the link to the CUDA libraries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from builder.common import digest
from builder.common.errors import BuildError
from builder.layers import wheel
from builder.layers.splice import Entry
from builder.layers.wheel import Place
from builder.matrix.cells import CUDA
from builder.plan import settings
from builder.plan.plan import PlannedImage


def read(root: Path, image: PlannedImage, place: Place) -> dict[str, Entry]:
    """The files by path. A file of a later component overrides one of an earlier component."""
    files: dict[str, Entry] = {}
    for component in image.file_components:
        top = root / f"templates/{component}/files"
        for source in digest.tree(top):
            path = source.relative_to(top).as_posix()
            if source.is_symlink():
                files[path] = Entry(path=path, mode=0o777, link=str(source.readlink()))
                continue
            mode = wheel.PROGRAM_MODE if source.stat().st_mode & 0o100 else wheel.FILE_MODE
            files[path] = Entry(path=path, mode=mode, content=source.read_bytes())
    for path in files:
        if above := next((str(parent) for parent in PurePosixPath(path).parents if str(parent) in files), None):
            raise BuildError(f"templates/ has a file for /{path}, but /{above} is a link or file of another component")
    constraints = settings.CONSTRAINTS.lstrip("/")
    files[constraints] = Entry(path=constraints, mode=wheel.FILE_MODE, content=image.constraints.encode())
    if image.of_component(CUDA):
        link, metadata = f"{place.site}/{place.link}", f"{place.site}/{place.link}.pth"
        files[link] = Entry(path=link, mode=0o777, link=f"/{wheel.CUDA.site}/{place.link}")
        files[metadata] = Entry(path=metadata, mode=wheel.FILE_MODE, content=f"/{wheel.CUDA.site}\n".encode())
    return files


def entries(files: Mapping[str, Entry], folders: tuple[str, ...]) -> Iterator[Entry]:
    """Sorted by path, each folder before its contents.

    `folders` are those of the operating system that are not 0755 root:root, which a layer must not write. Raises
    BuildError for a file in one of them.
    """
    seen: set[str] = set()
    for path in sorted(files):
        for entry in wheel.new_folders(path, seen):
            if entry.path in folders:
                raise BuildError(
                    f"templates/ has a file for /{path}, but folder /{entry.path} of the system is not 0755 root:root"
                )
            yield entry
        yield files[path]
