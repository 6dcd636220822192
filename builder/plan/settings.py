"""The configuration of an image: variables, command, ports, labels. Pure.

The only source for both build methods: the Dockerfile's template writes it as instructions, `builder.layers.oci` as
JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from builder.matrix import facts
from builder.matrix.cells import Cell
from builder.matrix.schema import Component, Matrix
from builder.matrix.tags import (
    ARCHITECTURES_LABEL,
    BASE_LABEL,
    BUILT_FOR_LABEL,
    CELL_LABEL,
    CUDA_LABEL,
    DRIVER_LABEL,
    LABEL,
    OCI,
    PLAN_LABEL,
)

PATH = "/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/venv/user/bin"
ENTRYPOINT = ("/usr/bin/tini", "-g", "--", "/usr/local/bin/start")
CONSTRAINTS = "/etc/pip/constraints.txt"
_ENV = {
    "PATH": PATH,
    "LANG": "C.UTF-8",
    # For `docker exec` with any --user: the engine finds home folders in /etc/passwd only.
    "HOME": "/home/user",
    "USER": "user",
    "LOGNAME": "user",
    # For packages that users install. templates/steps/image_environment.py adds it, except for root.
    "PYTHONUSERBASE": "/opt/venv/user",
    "PYTHONNOUSERSITE": "1",
    "UV_TOOL_BIN_DIR": "/opt/venv/user/bin",
    # For every pip and uv in the container, also in environments that users create.
    "PIP_CONSTRAINT": CONSTRAINTS,
    "UV_CONSTRAINT": CONSTRAINTS,
}


@dataclass(frozen=True, kw_only=True)
class Health:
    """A health check; times in seconds."""

    command: tuple[str, ...]
    interval: int = 10
    timeout: int = 10  # two services, each with the four seconds of the launcher
    start_period: int = 60
    retries: int = 3


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`env` and `labels` keep their order in the Dockerfile and in the configuration."""

    env: Mapping[str, str]
    ports: tuple[int, ...]
    command: tuple[str, ...]
    labels: Mapping[str, str]
    health: Health | None = None
    entrypoint: tuple[str, ...] = ENTRYPOINT
    user: str = "1000:0"
    workdir: str = "/workspace"


def built_labels(plan: str, base: str, created: str) -> dict[str, str]:
    """Labels that are known only after the build: digest of the plan, name of the base image, and the time of the
    newest Debian package (RFC 3339).
    """
    return {f"{OCI}.created": created, BASE_LABEL: base, PLAN_LABEL: plan}


def of_image(matrix: Matrix, cell: Cell, components: Mapping[str, Component]) -> Settings:
    """`components` are the cell's, in order. Without registry and namespace: a fork has the same images."""
    commands = [component.command for component in components.values() if component.command]
    checks = [component.healthcheck for component in components.values() if component.healthcheck]
    return Settings(
        env=_env(matrix, cell, components),
        ports=tuple(component.port for component in components.values() if component.port),
        command=tuple(commands[-1] if commands else ["bash"]),
        health=Health(command=tuple(checks[-1])) if checks else None,
        labels=_labels(matrix, cell, components),
    )


def _env(matrix: Matrix, cell: Cell, components: Mapping[str, Component]) -> dict[str, str]:
    env = dict(_ENV)
    if not cell.is_cpu:
        env |= {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
        if driver := facts.load().driver(cell.cuda):
            env["NVIDIA_REQUIRE_CUDA"] = f"driver>={driver}"
    env |= matrix.cuda[cell.cuda].env
    for component in components.values():
        env |= component.env
    return env


def _labels(matrix: Matrix, cell: Cell, components: Mapping[str, Component]) -> dict[str, str]:
    known = facts.load()
    package = matrix.frameworks[cell.framework].package
    build = None if cell.is_cpu else known.build(package, cell.release, cell.cuda)
    labels = {
        f"{OCI}.title": cell.id,
        f"{OCI}.version": cell.release,
        f"{OCI}.source": matrix.source,
        CELL_LABEL: cell.id,
        f"{LABEL}.framework": cell.framework,
        f"{LABEL}.framework.version": cell.release,
        CUDA_LABEL: cell.cuda,
        DRIVER_LABEL: "" if cell.is_cpu else known.driver(cell.cuda),
        BUILT_FOR_LABEL: build.cuda if build else "",
        ARCHITECTURES_LABEL: " ".join(build.architectures) if build else "",
        f"{LABEL}.python": cell.python,
        f"{LABEL}.variant": cell.variant,
        f"{LABEL}.components": " ".join(components),
    }
    return {name: value for name, value in labels.items() if value}
