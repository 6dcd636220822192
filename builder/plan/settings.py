"""The configuration of an image: variables, command, ports, labels. Pure.

The only source for both build methods: the Dockerfile's template writes it as instructions, `builder.layers.oci` as
JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from builder.common.errors import MatrixError
from builder.matrix import facts, support, tags
from builder.matrix.cells import Cell
from builder.matrix.schema import AMD64, Arch, Component, Matrix

# The image's own `apt-get` and others in /usr/local precede programs that users install. Programs in ~/.local/bin are
# those of `uv tool install` and of users who cannot write to /opt/venv. GKE mounts the driver at /usr/local/nvidia.
PATH = (
    "/usr/local/sbin:/usr/local/bin:/opt/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin:/usr/local/nvidia/bin:"
    "/home/user/.local/bin"
)
# -s: reap orphans also where tini is not process 1 (`--init`, `--pid=host`), instead of a warning that it cannot.
ENTRYPOINT = ("/usr/bin/tini", "-s", "-g", "--", "/usr/local/bin/start")
CONSTRAINTS = "/etc/pip/constraints.txt"
_ENV = {
    "PATH": PATH,
    "LANG": "C.UTF-8",
    # For `docker exec` with any --user: the engine finds home folders in /etc/passwd only.
    "HOME": "/home/user",
    "USER": "user",
    "LOGNAME": "user",
    # For every pip and uv in the container, also in environments that users create. UV_BUILD_CONSTRAINT is for those in
    # which uv builds packages: one that needs torch was built with the newest. The path file of templates/steps/os.sh
    # does this for pip.
    "PIP_CONSTRAINT": CONSTRAINTS,
    "UV_CONSTRAINT": CONSTRAINTS,
    "UV_BUILD_CONSTRAINT": CONSTRAINTS,
}
DRIVER_VARIABLE = "NVIDIA_REQUIRE_CUDA"
FIXED = _ENV.keys() - {"LANG"}  # matrix.yaml may not set these: programs of the image depend on them


@dataclass(frozen=True, kw_only=True)
class Health:
    """A health check; times in seconds. Docker Engine 25 and newer use `start_interval`, older ones wait `interval`."""

    command: tuple[str, ...]
    interval: int = 10
    timeout: int = 10  # the launcher allows each service 4 s, and an image has at most two
    start_period: int = 60
    start_interval: int = 1  # until it succeeds for the first time; services answer within a second
    retries: int = 3


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The configuration of an image.

    `env` and `labels` keep their order in the Dockerfile and in the configuration, which alone has `arch`.
    """

    env: Mapping[str, str]
    ports: tuple[int, ...]
    command: tuple[str, ...]
    labels: Mapping[str, str]
    health: Health | None = None
    entrypoint: tuple[str, ...] = ENTRYPOINT
    user: str = "1000:0"
    workdir: str = "/workspace"
    arch: Arch = AMD64


def built_labels(plan: str, created: str) -> dict[str, str]:
    """Labels that are known only after the build: digest of the plan, time of the newest Debian package (RFC 3339)."""
    return {f"{tags.OCI}.created": created, tags.PLAN_LABEL: plan}


def of_image(matrix: Matrix, cell: Cell, components: Mapping[str, Component]) -> Settings:
    """The configuration of a cell's image; `components` are the cell's, in order.

    Has no registry and no namespace: a fork has the same images. Raises MatrixError for a variable that every image
    sets.
    """
    known = facts.load_facts()
    driver = "" if cell.is_cpu else known.driver(cell.cuda)
    env = dict(_ENV)
    if not cell.is_cpu:
        env |= {"NVIDIA_VISIBLE_DEVICES": "all", "NVIDIA_DRIVER_CAPABILITIES": "compute,utility"}
        # For GKE, as in NVIDIA's own images. A variable of the image, because `kubectl exec` does not run the launcher,
        # and the loader's cache does not know a folder that is mounted later.
        env["LD_LIBRARY_PATH"] = "/usr/local/nvidia/lib:/usr/local/nvidia/lib64"
        if driver:
            env[DRIVER_VARIABLE] = f"driver>={driver}"
    own = {("cuda", cell.cuda): matrix.cuda[cell.cuda].env}
    own |= {("components", name): component.env for name, component in components.items()}
    for path, variables in own.items():
        if reserved := sorted(variables.keys() & FIXED):
            where = matrix.where(*path, "env", reserved[0], key=True)
            label = ".".join([*path, "env", reserved[0]])
            raise MatrixError(f"{where}: {label}: every image sets {reserved[0]}", hint="Use another variable.")
        env |= variables
    license_ = matrix.frameworks[cell.framework].license
    licenses = [f"({license_})" if " " in license_ else license_]
    licenses += ["" if cell.is_cpu else "LicenseRef-NVIDIA-CUDA", "LicenseRef-Packages"]  # NOTICE explains both
    ends = support.ends_of_cell(matrix, cell)
    build = None if cell.is_cpu else known.build_of_cell(matrix, cell)
    labels = {
        f"{tags.OCI}.title": cell.id,
        f"{tags.OCI}.version": cell.release,
        f"{tags.OCI}.source": matrix.source,
        f"{tags.OCI}.url": matrix.source,
        f"{tags.OCI}.documentation": f"{matrix.source}#readme" if matrix.source else "",
        f"{tags.OCI}.licenses": " AND ".join(filter(None, licenses)),
        tags.CELL_LABEL: cell.id,
        f"{tags.LABEL}.framework": cell.framework,
        f"{tags.LABEL}.framework.version": cell.release,
        tags.CUDA_LABEL: cell.cuda,
        tags.DRIVER_LABEL: driver,
        tags.BUILT_FOR_LABEL: build.cuda if build else "",
        tags.ARCHITECTURES_LABEL: " ".join(build.architectures) if build else "",
        tags.SUPPORT_LABEL: ends[0].last.isoformat() if ends else "",
        f"{tags.LABEL}.python": cell.python,
        f"{tags.LABEL}.variant": cell.variant,
        f"{tags.LABEL}.components": " ".join(components),
        # Dev containers (containers.dev, "Image Metadata") give the user of this name the uid of the user on the host.
        # They do not change the number in `user`, so a mounted folder of another uid would not be writable.
        # No `hostRequirements`: devcontainer.json could not take them back, to choose one GPU with --gpus=device=1.
        "devcontainer.metadata": '[{"remoteUser":"user"}]',
    }
    # If several components have a command or a health check, the last one counts: the variant comes last.
    commands = [component.command for component in components.values() if component.command]
    checks = [component.healthcheck for component in components.values() if component.healthcheck]
    return Settings(
        env=env,
        ports=tuple(component.port for component in components.values() if component.port),
        command=tuple(commands[-1] if commands else ["bash"]),
        labels={name: value for name, value in labels.items() if value},
        health=Health(command=tuple(checks[-1])) if checks else None,
        arch=cell.arch,
    )
