"""The layers of an image, in order. Pure.

The layers depend on the image's own components and wheels alone, so a new cell in the matrix changes no other image. A
large wheel is a layer of its own. The small wheels of the foundation are one layer, and the small wheels of the variant
are another.

CUDA is lowest, then the framework, the operating system, the variant. Docker identifies a layer by the chain of layers
below. So a security refresh of the operating system keeps the gigabytes below, and images with the same lowest layers
share these layers on disk.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from types import MappingProxyType
from typing import Literal

from builder.common.files import digest_of_data
from builder.index.wheels import Wheel
from builder.matrix.cells import CUDA, Cell

# Raise it with every change of the bytes that `estargz`, `splice` or `wheel` of builder.layers write, also
# by a new version of libdeflate (`deflate` in locks/builder.txt).
LAYER_FORMAT = 6
MTIME = 946684800  # 2000-01-01, of every file: constant, and after 1980, the earliest that zip can store
LARGE = 25_000_000  # bytes of a wheel with a layer of its own; docs/decisions/0014-layers-by-a-local-rule.md
MOST = 125  # the most layers that Docker's overlay2 can stack
# CUDA libraries that not every framework needs. They are last, so that frameworks on the same CUDA share a
# longer chain.
_NOT_FOR_ALL = ("cusparselt", "nvshmem", "cufile", "curand")
# Parts of CUDA's compiler, which few images have: with the small wheels, whatever their size.
_COMPILERS = ("nvcc", "nvvm")

LayerKind = Literal["os", "wheels", "bytecode", "files"]


@dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """A layer to build. `inputs` is the digest of everything that determines its bytes, as known before the build.

    `python` is empty for CUDA wheels, which do not depend on it. `compiled` are the `inputs` of the wheel layers whose
    bytecode is in this layer. `component` is the owner of the files; `debian` are the bytes of Debian's packages;
    `prefetch` are the paths that come first, see `builder.layers.estargz.prefetch_order`. `is_foundation` is for layers
    below the operating system, which all images of the group have.
    """

    kind: LayerKind
    name: str
    component: str
    inputs: str
    wheels: tuple[Wheel, ...] = ()
    python: str = ""
    compiled: tuple[str, ...] = ()
    debian: int = 0
    prefetch: tuple[str, ...] = ()
    is_foundation: bool = False

    @property
    def may_overlap(self) -> bool:
        """Allows different files for one path, in its wheels and in other such layers: the highest one is used.

        Files of the framework and of CUDA are not replaced.
        """
        return self.kind == "wheels" and bool(self.python) and not self.is_foundation

    @property
    def bytes(self) -> int:
        """Bytes of its wheels or Debian packages as downloaded: layers of wheels are within 2 % of it, `os` 25 %."""
        return sum(wheel.size for wheel in self.wheels) + self.debian


def lowest_layers(
    cell: Cell,
    components: Collection[str],
    wheels: Sequence[Wheel],
    compiler: str,
    prefetch: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[PlannedLayer, ...]:
    """The layers below the operating system, which all images of the cell's group have.

    `components` are those that all cells of the group have; `compiler` is a digest of inputs; `prefetch` are the paths
    to prefetch by component.
    """
    below = [wheel for wheel in wheels if (wheel.component == CUDA if wheel.is_cuda else wheel.component in components)]
    layers = _layers_with_bytecode(below, cell.python, compiler, prefetch, cuda_name=CUDA, name=cell.framework)
    return tuple(replace(layer, is_foundation=True) for layer in layers)


def upper_layers(
    cell: Cell,
    lowest: Sequence[PlannedLayer],
    wheels: Iterable[Wheel],
    compiler: str,
    prefetch: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[PlannedLayer, ...]:
    """The layers above the operating system, but for the files: those of the wheels that are not in `lowest`.

    `lowest` are `lowest_layers`, `wheels` all wheels of the image; `compiler` and `prefetch` are as there.
    """
    below = {wheel.component for layer in lowest for wheel in layer.wheels}
    above = [wheel for wheel in wheels if wheel.component not in below]
    return tuple(
        _layers_with_bytecode(above, cell.python, compiler, prefetch, cuda_name=cell.variant, name=cell.variant)
    )


def _layers_with_bytecode(
    wheels: Sequence[Wheel],
    python: str,
    compiler: str,
    prefetch: Mapping[str, Sequence[str]],
    *,
    cuda_name: str,
    name: str,
) -> list[PlannedLayer]:
    """The layers of `wheel_layers`, then the bytecode of the Python wheels."""
    components = {wheel.component for wheel in wheels if not wheel.is_cuda}
    first = tuple(sorted({path for component in components for path in prefetch.get(component, ())}))
    layers = wheel_layers(wheels, python, cuda_name=cuda_name, name=name, prefetch=first)
    if components:
        compiled = tuple(layer.inputs for layer in layers if layer.python)
        bytecode = PlannedLayer(
            kind="bytecode",
            name=f"{name} bytecode",
            component=name,
            inputs=digest_of_data([LAYER_FORMAT, compiler, python, list(compiled), *([list(first)] if first else [])]),
            python=python,
            compiled=compiled,
            prefetch=first,
        )
        layers.append(bytecode)
    return layers


def wheel_layers(
    wheels: Sequence[Wheel], python: str, *, cuda_name: str, name: str, prefetch: tuple[str, ...] = ()
) -> list[PlannedLayer]:
    """Layers of CUDA wheels, the same for every Python, then of Python wheels.

    `cuda_name` and `name` name the layers of small wheels.
    """
    # In a fixed order, whatever that of the lock: images on the same CUDA share the layers below the first difference.
    of_cuda = [wheel for wheel in wheels if wheel.is_cuda]
    of_cuda.sort(key=lambda wheel: (any(part in wheel.name for part in _NOT_FOR_ALL), wheel.name))
    of_python = sorted((wheel for wheel in wheels if not wheel.is_cuda), key=attrgetter("name"))
    layers = []
    for component, version, ordered in ((cuda_name, "", of_cuda), (name, python, of_python)):
        members: list[tuple[str, list[Wheel]]] = []
        small = []
        for wheel in ordered:
            if wheel.size >= LARGE and not any(part in wheel.name for part in _COMPILERS):
                members.append((wheel.name, [wheel]))
            else:
                small.append(wheel)
        if small:
            members.append((component, small))
        layers += [
            PlannedLayer(
                kind="wheels",
                name=layer,
                component=component,
                inputs=wheels_key(version, group, paths),
                wheels=tuple(group),
                python=version,
                prefetch=paths,
            )
            for layer, group in members
            # Of a large wheel, a start reads hardly anything.
            for paths in [prefetch if version and group is small else ()]
        ]
    return layers


def wheels_key(python: str, wheels: Sequence[Wheel], prefetch: tuple[str, ...] = ()) -> str:
    """The `inputs` of a layer of wheels; `python` is empty for CUDA wheels.

    File name and size are part of it, although the hash determines them, so that a cached layer never hides a lock
    with a wrong one.
    """
    entries = tuple((wheel.file, wheel.size, wheel.sha256) for wheel in wheels)
    return _wheels_key(LAYER_FORMAT, python, entries, prefetch)


@cache  # images of many variants have the same layers
def _wheels_key(
    layer_format: int, python: str, entries: tuple[tuple[str, int, str], ...], prefetch: tuple[str, ...]
) -> str:
    inputs = {"layer": layer_format, "python": python, "wheels": entries}
    return digest_of_data(inputs | ({"prefetch": prefetch} if prefetch else {}))
