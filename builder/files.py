"""Makes `files` layers: the plain files of an image's components, and the link to the CUDA libraries."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

from builder import digest, settings, wheel
from builder.cells import CUDA
from builder.errors import BuildError
from builder.plan import PlannedImage
from builder.splice import Entry
from builder.wheel import Place


def read(root: Path, image: PlannedImage, place: Place) -> dict[str, Entry]:
    """The files by path. A later component's file counts more than an earlier one's."""
    found: dict[str, Entry] = {}
    for component in image.file_components:
        top = root / f"templates/{component}/files"
        for path in digest.tree(top):
            name = path.relative_to(top).as_posix()
            if path.is_symlink():
                found[name] = Entry(path=name, mode=0o777, link=str(path.readlink()))
                continue
            mode = wheel.PROGRAM_MODE if path.stat().st_mode & 0o100 else wheel.FILE_MODE
            found[name] = Entry(path=name, mode=mode, content=path.read_bytes())
    for name in found:
        if above := next((str(one) for one in PurePosixPath(name).parents if str(one) in found), None):
            raise BuildError(f"templates/ has a file for /{name}, but /{above} is a link or file of another component")
    constraints = settings.CONSTRAINTS.lstrip("/")
    found[constraints] = Entry(path=constraints, mode=wheel.FILE_MODE, content=image.constraints.encode())
    if image.of_component(CUDA):
        link, metadata = f"{place.site}/{place.link}", f"{place.site}/{place.link}.pth"
        found[link] = Entry(path=link, mode=0o777, link=f"/{wheel.CUDA.site}/{place.link}")
        found[metadata] = Entry(path=metadata, mode=wheel.FILE_MODE, content=f"/{wheel.CUDA.site}\n".encode())
    return found


def entries(found: Mapping[str, Entry], folders: tuple[str, ...]) -> Iterator[Entry]:
    """Sorted by path, each folder before what is in it.

    `folders` are those of the operating system that a layer must not write as 0755 root:root; raises BuildError for a
    file in one of them.
    """
    seen: set[str] = set()
    for name in sorted(found):
        for entry in wheel.new_folders(name, seen):
            if entry.path in folders:
                raise BuildError(
                    f"templates/ has a file for /{name}, but /{entry.path} has an owner or mode of its own"
                )
            yield entry
        yield found[name]
