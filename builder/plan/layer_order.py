"""The layers of an image, in order. Pure.

They depend on the image's own components and wheels alone, so adding a cell to the matrix changes no other image. A
large wheel is a layer of its own; the small wheels of the foundation are one layer, and so are those of the variant.

CUDA is lowest, then the framework, the operating system, the variant. Docker identifies a layer by the chain below it,
so a security refresh of the operating system keeps the gigabytes below it, and images with the same lowest layers share
them on disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Literal

from builder.common import digest
from builder.common.errors import MatrixError
from builder.index.wheels import Wheel
from builder.matrix.cells import CUDA, Cell

# Raise it with every change of the bytes that `splice`, `wheel` or `wheel_zip` of builder.layers write.
LAYER_FORMAT = 4
MTIME = 946684800  # 2000-01-01, of every file: constant, and after 1980, the earliest that zip can store
LARGE = 25_000_000  # bytes of a wheel with a layer of its own; docs/decisions/0014-layers-by-a-local-rule.md
MOST = 125  # layers that Docker's overlay2 can stack
# CUDA libraries that not every framework needs. They follow the others, so that frameworks on the same CUDA share a
# longer chain.
_NOT_FOR_ALL = ("cusparselt", "nvshmem", "cufile", "curand")
# Parts of CUDA's compiler, which few images have: with the small wheels, whatever their size.
_COMPILERS = ("nvcc", "nvvm")

LayerKind = Literal["os", "wheels", "files"]


@dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """A layer to build. `inputs` is the digest of everything that determines its bytes, as known before the build.

    `python` is empty for CUDA wheels, which do not depend on it. `compiled` are the `inputs` of the wheel layers whose
    bytecode is in this layer; `component` is the owner of the files; `debian` are the bytes of Debian's packages.
    """

    kind: LayerKind
    name: str
    component: str
    inputs: str
    wheels: tuple[Wheel, ...] = ()
    python: str = ""
    compiled: tuple[str, ...] = ()
    debian: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of its wheels or Debian packages as downloaded; layers of wheels are within 2 % of it, `os` 25 %."""
        return sum(wheel.size for wheel in self.wheels) + self.debian


def foundation(
    cell: Cell, components: Collection[str], wheels: Sequence[Wheel], compiler: str
) -> tuple[PlannedLayer, ...]:
    """The layers below the operating system, which all images of the cell's group have.

    `components` are those that all cells of the group have; `compiler` is a digest of inputs.
    """
    cuda = [wheel for wheel in wheels if wheel.component == CUDA]
    others = [wheel for wheel in wheels if wheel.component in components]
    return (*_cuda(CUDA, cuda), *_with_bytecode(cell.framework, cell.python, others, compiler))


def planned_os(inputs: str, python: str, debian: int) -> PlannedLayer:
    """The layer of an operating system; `debian` are the bytes of its packages."""
    return PlannedLayer(kind="os", name="os", component="base", inputs=inputs, python=python, debian=debian)


def stack(
    cell: Cell, lowest: Sequence[PlannedLayer], wheels: Iterable[Wheel], *, os: PlannedLayer, files: str, compiler: str
) -> tuple[PlannedLayer, ...]:
    """The layers of an image, lowest first: `lowest` are those of `foundation`, `wheels` all wheels of the image.

    `files` and `compiler` are digests of inputs. Raises MatrixError for more layers than Docker allows.
    """
    below = {wheel.component for layer in lowest for wheel in layer.wheels}
    above = [wheel for wheel in wheels if wheel.component not in below]
    layers = [
        *lowest,
        os,
        *_cuda(cell.variant, above),
        *_with_bytecode(cell.variant, cell.python, above, compiler),
        PlannedLayer(kind="files", name="files", component="base", inputs=files, python=cell.python),
    ]
    if len(layers) > MOST:
        raise MatrixError(f"{cell.id} would have {len(layers)} layers; the limit of Docker is {MOST}")
    return tuple(layers)


def _cuda(name: str, wheels: Sequence[Wheel]) -> Iterator[PlannedLayer]:
    """Layers of the CUDA wheels in `wheels`, in /opt/nvidia for every Python."""
    return _cut(name, "", sorted((wheel for wheel in wheels if wheel.is_cuda), key=_cuda_order))


def _cuda_order(wheel: Wheel) -> tuple[bool, str]:
    return any(part in wheel.name for part in _NOT_FOR_ALL), wheel.name


def _with_bytecode(name: str, python: str, wheels: Sequence[Wheel], compiler: str) -> Iterator[PlannedLayer]:
    """Layers of the Python wheels in `wheels`, and one layer with the bytecode of all of them."""
    for_python = sorted((wheel for wheel in wheels if not wheel.is_cuda), key=attrgetter("name"))
    layers = list(_cut(name, python, for_python))
    yield from layers
    if layers:
        compiled = tuple(layer.inputs for layer in layers)
        yield PlannedLayer(
            kind="files",
            name=f"{name} bytecode",
            component=name,
            inputs=digest.of_data([LAYER_FORMAT, compiler, python, list(compiled)]),
            python=python,
            compiled=compiled,
        )


def _cut(name: str, python: str, wheels: Sequence[Wheel]) -> Iterator[PlannedLayer]:
    """A layer for each large wheel, in the order given, then one layer `name` for the small ones."""
    layers = [(wheel.name, [wheel]) for wheel in wheels if _is_large(wheel)]
    if small := [wheel for wheel in wheels if not _is_large(wheel)]:
        layers.append((name, small))
    for layer, members in layers:
        inputs = wheels_key(python, members)
        yield PlannedLayer(
            kind="wheels", name=layer, component=name, inputs=inputs, wheels=tuple(members), python=python
        )


def _is_large(wheel: Wheel) -> bool:
    return wheel.size >= LARGE and not any(part in wheel.name for part in _COMPILERS)


def wheels_key(python: str, wheels: Sequence[Wheel]) -> str:
    """The `inputs` of a layer of wheels; `python` is empty for wheels in /opt/nvidia.

    File name and size are part of it, although the hash determines them, so that a cached layer never hides a lock
    with a wrong one.
    """
    return _wheels_key(LAYER_FORMAT, python, tuple((wheel.file, wheel.size, wheel.sha256) for wheel in wheels))


@cache  # images of many variants have the same layers
def _wheels_key(layer_format: int, python: str, entries: tuple[tuple[str, int, str], ...]) -> str:
    return digest.of_data({"layer": layer_format, "python": python, "wheels": entries})
