"""Which layers an image is stacked from, and in which order. Pure, and over all images of the matrix at once.

What most images share and what changes least lies lowest: CUDA, then the framework, then the operating system, then
the variant. Docker and every puller know a layer by the chain below it, so a security refresh of the operating system
leaves the gigabytes below it alone, and images that begin alike share them on disk and in `docker load`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from builder import digest, splice
from builder.cells import CUDA
from builder.errors import MatrixError
from builder.lock import Wheel

LARGE = 100_000_000  # bytes of a wheel that gets a layer of its own; the others are grouped
MOST = 125  # layers that Docker's overlay2 can stack

LayerKind = Literal["os", "wheels", "files"]


@dataclass(frozen=True, kw_only=True)
class PlannedLayer:
    """A layer to be. `inputs` is the digest of all that it is made from, as far as that is known before building.

    `python` is empty for CUDA wheels, which belong to none. `compiled` names by their `inputs` the wheel layers whose
    bytecode this layer holds; `component` is whose files those are.
    """

    kind: LayerKind
    name: str
    component: str
    inputs: str
    wheels: tuple[Wheel, ...] = ()
    python: str = ""
    compiled: tuple[str, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of its wheels as downloaded, which is within 2 % of the layer."""
        return sum(wheel.size for wheel in self.wheels)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What an image consists of. `components` in order, the framework's one named by `framework`.

    `os`, `files` and `compiler` are digests of inputs.
    """

    framework: str
    components: tuple[str, ...]
    python: str
    wheels: tuple[Wheel, ...]
    os: str
    files: str
    compiler: str


_Key = tuple[str, str]  # sha256 of a wheel, and the Python that it is installed for


def arrange(images: Mapping[str, Parts]) -> dict[str, tuple[PlannedLayer, ...]]:
    """Image id -> its layers, lowest first. Raises MatrixError for an image of more layers than Docker can stack."""
    users: dict[_Key, set[str]] = {}
    for image_id, parts in images.items():
        for wheel in parts.wheels:
            users.setdefault(_key(wheel, parts.python), set()).add(image_id)
    result = {image_id: tuple(_stack(parts, users)) for image_id, parts in images.items()}
    for image_id, layers in result.items():
        if len(layers) > MOST:
            raise MatrixError(f"{image_id} would have {len(layers)} layers; Docker can stack {MOST}")
    return result


def _key(wheel: Wheel, python: str) -> _Key:
    return wheel.sha256, "" if wheel.component == CUDA else python


def _stack(parts: Parts, users: Mapping[_Key, set[str]]) -> Iterable[PlannedLayer]:
    variant = [name for name in parts.components if name not in (CUDA, parts.framework)]
    yield from _wheels(CUDA, parts, users)
    yield from _with_bytecode(parts.framework, parts, users)
    yield PlannedLayer(kind="os", name="os", component="base", inputs=parts.os, python=parts.python)
    for component in variant:
        yield from _with_bytecode(component, parts, users)
    yield PlannedLayer(kind="files", name="files", component="base", inputs=parts.files, python=parts.python)


def _with_bytecode(component: str, parts: Parts, users: Mapping[_Key, set[str]]) -> Iterable[PlannedLayer]:
    made = _wheels(component, parts, users)
    yield from made
    if made:
        compiled = tuple(layer.inputs for layer in made)
        yield PlannedLayer(
            kind="files",
            name=f"{component} bytecode",
            component=component,
            inputs=digest.of_data([splice.FORMAT, parts.compiler, parts.python, list(compiled)]),
            python=parts.python,
            compiled=compiled,
        )


def _wheels(component: str, parts: Parts, users: Mapping[_Key, set[str]]) -> list[PlannedLayer]:
    """The component's wheels: large ones alone, small ones with those that the same images use.

    Layers that more images use come first, so that common beginnings are longest; of those, the large before the small,
    which change oftener.
    """
    python = "" if component == CUDA else parts.python
    groups: dict[tuple[int, tuple[str, ...], bool, str], list[Wheel]] = {}
    for wheel in parts.wheels:
        if wheel.component == component:
            names = tuple(sorted(users[_key(wheel, parts.python)]))
            own = wheel.name if wheel.size >= LARGE else ""
            groups.setdefault((-len(names), names, not own, own), []).append(wheel)
    layers = []
    for (_, _, _, own), wheels in sorted(groups.items()):
        wheels.sort(key=lambda wheel: wheel.name)
        layers.append(
            PlannedLayer(
                kind="wheels",
                name=own or component,
                component=component,
                inputs=wheels_key(python, [wheel.sha256 for wheel in wheels]),
                wheels=tuple(wheels),
                python=python,
            )
        )
    return layers


def wheels_key(python: str, sha256s: Sequence[str]) -> str:
    """Names a layer of wheels by all that its bytes depend on; `python` is empty for those in /opt/nvidia."""
    return digest.of_data({"layer": splice.FORMAT, "python": python, "wheels": list(sha256s)})
