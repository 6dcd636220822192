"""What an image's configuration says: variables, command, ports, labels. Pure.

The one source of it for both methods: the Dockerfile's template writes it as instructions, `builder.oci` as JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from builder import facts
from builder.cells import Cell
from builder.matrix import Component, Matrix

OCI = "org.opencontainers.image"  # prefix of the image specification's "Pre-Defined Annotation Keys"
LABEL = "gpu-images"
PLAN_LABEL = f"{LABEL}.plan"
CELL_LABEL = f"{LABEL}.cell"
CUDA_LABEL = f"{LABEL}.cuda"  # a version, or cpu
BUILT_FOR_LABEL = f"{LABEL}.framework.cuda"  # what the framework itself was compiled for
DRIVER_LABEL = f"{LABEL}.driver"  # the oldest that runs this CUDA
ARCHITECTURES_LABEL = f"{LABEL}.gpu.architectures"  # what the framework was compiled for: sm_90 compute_90
PATH = "/opt/venv/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/venv/user/bin"
ENTRYPOINT = ("/usr/bin/tini", "-g", "--", "/usr/local/bin/start")
CONSTRAINTS = "/etc/pip/constraints.txt"


@dataclass(frozen=True, kw_only=True)
class Health:
    """A health check; times in seconds."""

    command: tuple[str, ...]
    interval: int = 10
    timeout: int = 5
    start_period: int = 60
    retries: int = 3


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Order counts in `env` and `labels`: it is the order in the Dockerfile and in the configuration."""

    env: Mapping[str, str]
    ports: tuple[int, ...]
    command: tuple[str, ...]
    labels: Mapping[str, str]
    health: Health | None = None
    entrypoint: tuple[str, ...] = ENTRYPOINT
    user: str = "1000:0"
    workdir: str = "/workspace"


def of_image(
    matrix: Matrix, cell: Cell, parts: Mapping[str, Component], *, reference: str, lock: str, plan: str
) -> Settings:
    """`parts` are the cell's components in order; `reference` its full tag; `lock` and `plan` digests."""
    known = facts.load()
    build = known.build(matrix.frameworks[cell.framework].package, cell.release, cell.cuda)
    checks = [part.healthcheck for part in parts.values() if part.healthcheck]
    commands = [part.command for part in parts.values() if part.command]
    env = {
        "PATH": PATH,
        "LANG": "C.UTF-8",
        # Below the prefix of /opt/venv, else pip would not remove or upgrade what it installed there.
        "PYTHONUSERBASE": "/opt/venv/user",
        # For every pip and uv in the container, those of people's own environments too.
        "PIP_CONSTRAINT": CONSTRAINTS,
        "UV_CONSTRAINT": CONSTRAINTS,
    }
    gpu_labels = {}
    if not cell.is_cpu:
        driver = known.driver(cell.cuda)
        env |= {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
        if driver:
            env["NVIDIA_REQUIRE_CUDA"] = f"driver>={driver}"
            gpu_labels[DRIVER_LABEL] = driver
        if build:
            gpu_labels |= {BUILT_FOR_LABEL: build.cuda, ARCHITECTURES_LABEL: " ".join(build.architectures)}
    env |= matrix.cuda[cell.cuda].env
    for part in parts.values():
        env |= part.env
    return Settings(
        env=env,
        ports=tuple(part.port for part in parts.values() if part.port),
        command=tuple(commands[-1] if commands else ["bash"]),
        health=Health(command=tuple(checks[-1])) if checks else None,
        labels={
            f"{OCI}.title": cell.id,
            f"{OCI}.version": cell.release,
            f"{OCI}.ref.name": reference,
            CELL_LABEL: cell.id,
            f"{LABEL}.framework": cell.framework,
            f"{LABEL}.framework.version": cell.release,
            CUDA_LABEL: cell.cuda,
            **gpu_labels,
            f"{LABEL}.python": cell.python,
            f"{LABEL}.variant": cell.variant,
            f"{LABEL}.components": " ".join(parts),
            f"{LABEL}.lock": lock,
            PLAN_LABEL: plan,
        },
    )
