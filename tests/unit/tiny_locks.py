"""The locks of the tiny project, made up from its matrix: the files in tiny/locks/ are what this gives.

`UPDATE_SNAPSHOTS=1 pytest tests/unit` writes them again, as it does the snapshots.
"""

from __future__ import annotations

import hashlib

from builder import lock
from builder.lock import Lock, Wheel
from builder.project import Project

LOCKED = ("em-1.10-cu1210-py311", "em-1.10-cu1210-py311-jupyter", "qz-0.5-cu129-py311", "qz-0.5-cu129-py311-board")
CUDA = ("nvidia-cuda-runtime-cu12", "nvidia-sums-cu12")


def wheel(component: str, name: str, version: str, size: int, tag: str = "py3-none-any") -> Wheel:
    """A wheel whose digest follows from its name and version."""
    file = f"{name.replace('-', '_')}-{version}-{tag}.whl"
    return Wheel(
        component=component,
        name=name,
        version=version,
        file=file,
        size=size,
        sha256=hashlib.sha256(file.encode()).hexdigest(),
    )


def locks(project: Project) -> dict[str, Lock]:
    """Cell id -> lock, for the cells in LOCKED."""
    made = {}
    for cell in project.cells:
        if cell.id not in LOCKED:
            continue
        tag = "py3-none-manylinux_2_28_x86_64"
        wheels = [wheel("cuda", name, f"{cell.cuda}.7", 1_000_000, tag) for name in CUDA]
        for component, wanted in lock.requirements(project.matrix, cell).items():
            for number, want in enumerate(wanted):
                name = want.split("==", maxsplit=1)[0].split("[", maxsplit=1)[0]
                version = cell.release if "==" in want else f"2.{number}"
                wheels.append(wheel(component, name, version, 1000 + len(name)))
        made[cell.id] = Lock(
            cell=cell.id,
            inputs=lock.inputs(project.matrix, cell, project.together[cell.group]),
            requirements=lock.requirements(project.matrix, cell),
            wheels=tuple(sorted(wheels, key=lambda one: (one.component, one.name))),
        )
    return made
