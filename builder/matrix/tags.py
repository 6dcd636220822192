"""Tags of every cell, computed from the matrix, and the names of an image's labels. Pure.

Cells that differ only in their architecture have the same tags: a tag is the index of their images.

The full tag has all axes (`2.9.1-cu128-py313-jupyter`). Aliases leave out the defaults of the cell's line (its first
CUDA, its first Python) and may have the line instead of the release: `2.9.1-jupyter`, `2.9-jupyter`. All of these move
to the newest release, which has security fixes. The full tag with the stamp of a release,
`2.9.1-cu128-py313-jupyter-20261122`, is set once and never moves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count

from builder.common.errors import MatrixError
from builder.common.reference import ImageRef
from builder.matrix.cells import Cell
from builder.matrix.schema import Matrix

OCI = "org.opencontainers.image"  # prefix of the image specification's "Pre-Defined Annotation Keys"
LABEL = "io.github.gpu-images"  # reverse DNS, as the image specification's "Rules" for annotations ask
PLAN_LABEL = f"{LABEL}.plan"
CELL_LABEL = f"{LABEL}.cell"
PARENT_CELL_LABEL = f"{LABEL}.parent.cell"  # of the image that packages were added to
PARENT_LABEL = f"{LABEL}.parent"  # its digest
ADDED_LABEL = f"{LABEL}.added"  # what was added, as JSON
CUDA_LABEL = f"{LABEL}.cuda"  # a version, or cpu
BUILT_FOR_LABEL = f"{LABEL}.framework.cuda"  # the CUDA that the framework was compiled for
SUPPORT_LABEL = f"{LABEL}.support.last"  # the last day of security updates of all parts: 2028-06-30
DRIVER_LABEL = f"{LABEL}.driver"  # the oldest driver for this CUDA
ARCHITECTURES_LABEL = f"{LABEL}.gpu.architectures"  # of the framework's GPU code: sm_90 compute_90


def compute(matrix: Matrix, cells: Iterable[Cell]) -> Mapping[str, tuple[ImageRef, ...]]:
    """Cell id -> references, the full one first; raises MatrixError if two cells have the same tag.

    Only the cells of one image for several architectures may.
    """
    owners: dict[ImageRef, Cell] = {}
    result: dict[str, tuple[ImageRef, ...]] = {}
    for cell in cells:
        framework = matrix.frameworks[cell.framework]
        entry = framework.versions[cell.line]
        repository = f"{matrix.namespace}/{framework.image_for(cell.cuda)}"
        # Aliases leave out defaults; on the cpu also the cpu, which the name of the image already has.
        cuda = "" if cell.is_cpu or cell.cuda == entry.cuda[0] else f"-{cell.cuda_tag}"
        python = "" if cell.python == entry.python[0] else f"-{cell.python_tag}"
        all_axes = f"-{cell.cuda_tag}-{cell.python_tag}"
        names = [
            version + axes + cell.suffix for axes in (all_axes, cuda + python) for version in (cell.release, cell.line)
        ]
        try:
            references = tuple(
                ImageRef(registry=matrix.registry, repository=repository, tag=tag) for tag in dict.fromkeys(names)
            )
        except ValueError as error:
            where = matrix.where("frameworks", cell.framework, "versions", cell.line)
            raise MatrixError(f"{where}: {cell.id}: {error}") from error
        result[cell.id] = references
        for reference in references:
            other = owners.setdefault(reference, cell)
            if replace(other, arch=cell.arch) != cell:
                where = matrix.where("frameworks", cell.framework, "versions", cell.line)
                raise MatrixError(f"{where}: {other.id} and {cell.id} have the same tag {reference}")
    return result


def local_name(reference: str, cell: Cell) -> str:
    """The name of an image in the store and in an engine, where a name has one architecture: `...:2.15-arm64`."""
    return f"{reference}{cell.arch_suffix}"


def local_names(matrix: Matrix, cells: Sequence[Cell]) -> dict[str, tuple[str, ...]]:
    """Cell id -> the names of its image in the store and in an engine, the full one first. Raises MatrixError."""
    references = compute(matrix, cells)
    return {cell.id: tuple(local_name(str(name), cell) for name in references[cell.id]) for cell in cells}


def stamped(reference: ImageRef, stamp: str) -> ImageRef:
    """The tag of one release of an image, from its full tag. Raises MatrixError if it is too long."""
    try:
        return replace(reference, tag=f"{reference.tag}-{stamp}")
    except ValueError as error:
        raise MatrixError(f"{reference} with the stamp {stamp}: {error}") from error


def stamps(first: str) -> Iterator[str]:
    """A stamp and the later ones of its day, in order: `20261122`, then `20261122.1` for a second release."""
    day, start = stamp_order(first)
    for number in count(start):
        yield f"{day}.{number}" if number else day


def is_stamp(text: str) -> bool:
    """True if a text is the stamp of a release."""
    return re.fullmatch(r"[0-9]{8}(\.[1-9][0-9]{0,3})?", text, re.ASCII) is not None


def stamp_order(stamp: str) -> tuple[str, int]:
    """The key to sort stamps by: the newest last."""
    day, _, number = stamp.partition(".")
    return day, int(number or 0)


def stamps_of(full: str, listed: Iterable[str]) -> list[str]:
    """The stamps of the listed tags that are a full tag with a stamp, the newest first."""
    found = [tag.removeprefix(f"{full}-") for tag in listed if tag.startswith(f"{full}-")]
    return sorted(filter(is_stamp, found), key=stamp_order, reverse=True)


def is_tag_of(tag: str, full: str) -> bool:
    """True if an image with this full tag may have a tag without a stamp: the full tag, or an alias."""
    version, *axes = full.split("-")
    numbers = re.split(r"\.?[a-z]", version)[0]  # 2.10.0 of 2.10.0rc1, whose line may be 2.10.0
    start, *rest = tag.split("-")
    cuda, python, suffix = axes[:1], axes[1:2], axes[2:]
    choices = ([*cuda, *python, *suffix], [*cuda, *suffix], [*python, *suffix], suffix)
    return (start == version or f"{numbers}.".startswith(f"{start}.")) and rest in choices
