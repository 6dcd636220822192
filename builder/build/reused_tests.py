"""Results of thorough tests that hold for a larger image, too.

A test marked `thorough` exercises what its component and those below it put into an image: wheels, their bytecode,
Debian packages, files and variables. Its result holds for every image of the group that contains all of that unchanged.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from builder.common import digest
from builder.common.errors import BuilderError
from builder.engine.client import Engine
from builder.layers import installed
from builder.layers.installed import Package
from builder.matrix.project import Project
from builder.plan.plan import PlannedImage
from builder.registry.evidence import Evidence


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What an image consists of: diff ids of wheel and bytecode layers, Debian packages, files of the checkout with
    digests, variables.
    """

    layers: frozenset[str]
    packages: frozenset[Package]
    files: frozenset[tuple[str, str]]
    variables: frozenset[tuple[str, str]]

    def includes(self, other: Contents) -> bool:
        """Whether the other one is unchanged in this one. A new variable can change what a program does."""
        return (
            other.layers <= self.layers
            and other.packages <= self.packages
            and other.files <= self.files
            and other.variables == self.variables
        )


class ReusedTests:
    """The images of one run that passed their tests, for larger images that are tested later. Thread-safe."""

    def __init__(self, engine: Engine, project: Project) -> None:
        self._engine, self._project = engine, project
        self._passed: dict[str, list[tuple[PlannedImage, Evidence]]] = {}  # by group
        self._contents: dict[str, Contents | None] = {}  # by image id
        self._lock = threading.Lock()

    def add(self, image: PlannedImage, proof: Evidence) -> None:
        """An image that passed."""
        with self._lock:
            self._passed.setdefault(image.cell.group, []).append((image, proof))

    def reusable(self, image: PlannedImage, image_id: str) -> dict[str, str]:
        """Tests that hold for the image if they are thorough -> id of the image that passed them.

        Empty for images that cannot be read: all tests are then run.
        """
        with self._lock:
            smaller = [
                (other, proof)
                for other, proof in self._passed.get(image.cell.group, ())
                if set(other.components) < set(image.components)
            ]
        reusable: dict[str, str] = {}
        for other, proof in smaller:
            large, small = self._read(image, image_id), self._read(other, proof.image_id)
            if large and small and large.includes(small):
                reusable = dict.fromkeys(proof.passed, proof.image_id) | reusable
        return reusable

    def _read(self, image: PlannedImage, image_id: str) -> Contents | None:
        if image_id not in self._contents:
            try:
                self._contents[image_id] = self._read_image(image, image_id)
            except (BuilderError, OSError):
                self._contents[image_id] = None
        return self._contents[image_id]

    def _read_image(self, image: PlannedImage, image_id: str) -> Contents | None:
        info = self._engine.image(image_id)
        status = self._engine.read_file(image_id, f"/{installed.DPKG}", checkout=str(self._project.root))
        try:
            packages = frozenset(installed.debian_packages(status))
        except ValueError:  # an invalid record
            return None
        if info is None or len(info.layers) != len(image.layers) or not packages:
            return None
        files: dict[str, str] = {}
        for component in image.file_components:  # a later one may replace a file
            folder = self._project.root / f"templates/{component}/files"
            files |= digest.of_tree(folder, folder)
        return Contents(
            layers=frozenset(
                diff_id
                for planned, diff_id in zip(image.layers, info.layers, strict=True)
                if planned.kind == "wheels" or planned.compiled
            ),
            packages=packages,
            files=frozenset(files.items()),
            variables=frozenset(image.settings.env.items()),
        )
