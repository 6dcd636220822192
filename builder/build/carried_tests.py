"""Which thorough tests another image has passed, so that they need not run again.

A test marked `thorough` exercises what its component and those below it put into an image: wheels, their bytecode,
Debian packages, files and variables. Its result holds for every image of the group that contains all of that unchanged.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from builder.common.errors import EngineError
from builder.engine.client import Engine
from builder.plan.plan import PlannedImage
from builder.registry.evidence import Evidence

STATUS = "/var/lib/dpkg/status"
_PACKAGE = re.compile(r"^Package: (\S+)\n(?:.+\n)*?Version: (\S+)$", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What an image consists of: diff ids of wheel and bytecode layers, Debian packages, variables."""

    layers: frozenset[str]
    packages: frozenset[tuple[str, str]]
    variables: frozenset[tuple[str, str]]

    def includes(self, other: Contents) -> bool:
        return other.layers <= self.layers and other.packages <= self.packages and other.variables <= self.variables


@dataclass(frozen=True, kw_only=True)
class Carrier:
    """An image that passed its tests."""

    image: PlannedImage
    contents: Contents
    proof: Evidence

    def carries(self, component: str) -> bool:
        """Whether it passed the tests of a component itself."""
        own = [name for names in self.proof.carried.values() for name in names]
        return component in self.image.components and not any(_is_of(component, name) for name in own)


class CarriedTests:
    """The images of one run that passed, for those that are tested after them. Thread-safe."""

    def __init__(self, engine: Engine, checkout: str) -> None:
        self._engine, self._checkout = engine, checkout
        self._tested: dict[str, list[Carrier]] = {}  # by group
        self._lock = threading.Lock()

    def add(self, image: PlannedImage, proof: Evidence) -> None:
        """An image that passed. One that cannot be read, or was not assembled from layers, carries nothing."""
        if contents := self._contents(image, proof.image_id):
            with self._lock:
                self._tested.setdefault(image.cell.group, []).append(
                    Carrier(image=image, contents=contents, proof=proof)
                )

    def carriers(self, image: PlannedImage, image_id: str) -> dict[str, Carrier]:
        """For each component of the image, another image whose thorough tests of that component hold for it."""
        with self._lock:
            others = list(self._tested.get(image.cell.group, ()))
        others = [other for other in others if set(other.image.components) < set(image.components)]
        contents = self._contents(image, image_id) if others else None
        if contents is None:
            return {}
        suitable = [other for other in others if contents.includes(other.contents)]
        return {
            component: other
            for component in image.components
            for other in [next((other for other in suitable if other.carries(component)), None)]
            if other
        }

    def _contents(self, image: PlannedImage, image_id: str) -> Contents | None:
        info = self._engine.image(image_id)
        if info is None or len(info.layers) != len(image.layers):
            return None
        try:
            status = self._engine.read_file(image_id, STATUS, checkout=self._checkout).decode("utf-8", "replace")
        except EngineError:
            return None
        return Contents(
            layers=frozenset(
                diff_id
                for planned, diff_id in zip(image.layers, info.layers, strict=True)
                if planned.kind == "wheels" or planned.compiled
            ),
            packages=frozenset(_PACKAGE.findall(status)),
            variables=frozenset(image.settings.env.items()),
        )


def by_carrier(carried: Sequence[str], carriers: Mapping[str, Carrier]) -> dict[str, tuple[str, ...]]:
    """Carried tests by the id of the image that passed them."""
    result: dict[str, tuple[str, ...]] = {}
    for component, other in carriers.items():
        if names := tuple(name for name in carried if _is_of(component, name)):
            result[other.proof.image_id] = result.get(other.proof.image_id, ()) + names
    return result


def not_passed(carried: Mapping[str, Sequence[str]], carriers: Collection[Carrier]) -> list[str]:
    """Carried tests that the image which is to carry them has not passed."""
    passed = {tested.proof.image_id: set(tested.proof.passed) for tested in carriers}
    return [name for image_id, names in carried.items() for name in names if name not in passed[image_id]]


def _is_of(component: str, test: str) -> bool:
    return test.startswith(f"tests/images/test_{component}.py::")
