"""Checks that this machine can build, test and run GPU images."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import requests

from builder.build import operating_systems
from builder.common import machine
from builder.common.errors import BuilderError, EngineError, UsageError
from builder.common.http import failure_sentence
from builder.common.reference import ImageRef
from builder.common.tasks import RetryPolicy
from builder.common.text import size
from builder.compat import gpus
from builder.engine.client import Engine
from builder.engine.model import EMULATION_HINT, EngineInfo
from builder.engine.run import Run
from builder.engine.setup import parse_version, too_old
from builder.index import host
from builder.index.host import Host
from builder.index.session import IndexSession, fetch_errors
from builder.index.wheels import PLATFORMS
from builder.layers.oci import CONTAINERD
from builder.matrix.cells import indexes_of_packages
from builder.matrix.project import Project
from builder.registry.client import Repository
from builder.release.staging import INDEX, StagingArea

State = Literal["ok", "note", "missing"]
TIMEOUT_S = 15
BUILDS_DOCKERFILES = (25, 0)  # which has HEALTHCHECK --start-interval
POLICY = RetryPolicy(connect_s=TIMEOUT_S, read_s=TIMEOUT_S, retries=0)


class MachineFinding(NamedTuple):
    """One finding. `missing`: images cannot be built without it; `note`: they can."""

    name: str
    state: State
    detail: str


_Findings = Iterator[tuple[str, State, str]]


def examine(run: Run) -> list[MachineFinding]:
    """All findings. Reports what is missing as a finding, not as an error."""
    return [MachineFinding(*finding) for finding in _examine(run)]


def _examine(run: Run) -> _Findings:
    project, store = run.project, run.store
    yield "python", "ok", sys.version.split()[0]
    uv = Path(sys.executable).parent / "uv"
    if uv.exists():
        output = subprocess.run([str(uv), "--version"], capture_output=True, text=True, check=False).stdout
        yield "uv", "ok", output.split(" (")[0].removeprefix("uv ").strip()
    else:
        yield "uv", "missing", "not in .venv: run `make` again"

    engine: Engine | None = None
    info: EngineInfo | None = None
    try:
        engine = run.engine
        info = engine.info()
    except EngineError as error:
        yield "engine", "missing", _with_hint(error)
    if engine and info:
        obstacle = too_old(info)
        name = f"{info.name} {info.version}{', rootless' if info.is_rootless else ''}"
        if engine.address.selected_by:
            name += f", at {engine.address.host} (selected by {engine.address.selected_by})"
        yield "engine", "missing" if obstacle else "ok", obstacle or name
        yield from _abilities(info)
        about = f"{info.architecture}, {info.cpus} CPUs, {size(info.memory)} of memory"
        yield "machine", "ok" if info.arch in PLATFORMS else "missing", about
        yield from _emulation(project, info)
    docker = shutil.which("docker")
    yield "docker", "ok" if docker else "missing", docker or "the image tests need it: apt-get install docker.io"

    # Disks. That of a remote engine cannot be measured.
    yield "disk: checkout", "ok", f"{size(shutil.disk_usage(project.root).free)} free"
    if info and info.is_local:
        yield "disk: engine", "ok", f"{size(shutil.disk_usage(info.root).free)} free"
    detail = "not created yet"
    if store.root.is_dir():
        limit = f" of at most {size(store.limit)}" if store.limit else ""
        detail = f"{size(store.size())}{limit}, {size(shutil.disk_usage(store.root).free)} free"
    yield "layers", "ok", f"{store.root}, {detail}"

    driver, present = gpus.read_gpus()
    names = ", ".join(f"{gpu.name} ({size(gpu.memory)})" for gpu in present)
    absent = "none: images can be built, GPU tests are not run"
    yield "gpu", "ok" if present else "note", f"{names}, driver {driver}" if present else absent
    if info and info.all_gpus:  # also of an engine on another machine
        yield "gpu in containers", "ok", f"docker run {info.all_gpus}"
    elif present:
        yield "gpu in containers", "note", "no: install nvidia-container-toolkit and restart the engine"

    if cosign := shutil.which("cosign"):
        yield "cosign", "ok", cosign
    else:
        yield "cosign", "note", "not installed: signatures cannot be made or checked"

    run.view.say("checking the package index and the registry ...")
    yield ("index", *_index())
    yield from _named_indexes(project)
    yield from _registries(engine, project)
    if reason := operating_systems.obstacle_here():
        yield "mmdebstrap", "note", f"{reason}: builds run it in a container of Debian"
    else:
        yield "mmdebstrap", "ok", shutil.which("mmdebstrap") or "a build will install it with apt-get"


def _with_hint(error: BuilderError) -> str:
    return f"{error}. {error.hint}".removesuffix(". ")


def _emulation(project: Project, info: EngineInfo) -> _Findings:
    """A finding for each other architecture in matrix.yaml: this machine can make its images, or not.

    The emulation of a remote engine is unknown.
    """
    for arch in sorted({cell.arch for cell in project.cells} - {info.arch}):
        if not info.is_local:
            yield arch, "note", f"the engine must emulate {PLATFORMS[arch]}"
        elif machine.emulates(PLATFORMS[arch]):
            yield arch, "ok", "emulated by QEMU: images can be built, and are not run"
        else:
            yield arch, "note", f"not emulated: its images cannot be built. {EMULATION_HINT}"


def _abilities(info: EngineInfo) -> _Findings:
    """The abilities and the limits of this kind of engine."""
    is_podman, is_containerd = info.name == "Podman", info.store == CONTAINERD
    kept = "; keeps layers compressed too, so images take about 1.5 times as much disk as with overlay2"
    yield "store", "ok", f"{info.store}, {info.root}{kept if is_containerd else ''}"
    if is_podman:
        yield "loading", "note", "Podman gets whole archives: it pulls only over TLS"
    elif info.is_rootless or not info.is_local:
        which = "a rootless engine" if info.is_rootless else "an engine on another machine"
        yield "loading", "note", f"{which} gets whole archives, unless it can reach the loopback of this machine"
    else:
        yield "loading", "ok", "the engine pulls the layers that it lacks from builder"
    if is_podman or parse_version(info.version) < BUILDS_DOCKERFILES:
        detail = "cannot build Dockerfiles (--method dockerfile), which needs Docker Engine 25 or newer"
        yield "dockerfiles", "note", f"{info.name} {detail}"
    else:
        yield "dockerfiles", "ok", "--method dockerfile builds them"
    if info.is_rootless:
        yield "mounts", "note", "your own folders belong to root in containers: docker run --user root -e NB_UID=0"


def _index() -> tuple[State, str]:
    """The state of the default index. Never shows its address, which may be that of a private mirror."""
    try:
        settings = host.read_host().index
    except UsageError as error:
        return "missing", str(error)
    which = "the configured mirror" if settings.url else "PyPI"
    session = IndexSession(settings, timeout=(TIMEOUT_S, TIMEOUT_S), retries=0)
    try:
        files = session.files("pip")
    except (requests.RequestException, OSError) as error:
        return "missing", f"{which} does not answer: {failure_sentence(error)}. {session.hint(error, '')}".removesuffix(
            ". "
        )
    if not files:
        return "missing", f"{which} does not have pip: check its address"
    return "ok", f"{which} answers{', with a CA bundle of this machine' if settings.ca_bundle else ''}"


def _named_indexes(project: Project) -> _Findings:
    """A finding for each index of matrix.yaml: it has one of its packages and accepts the login, or not."""
    packages: dict[str, str] = {}
    for members in project.groups.values():
        for package, index in indexes_of_packages(project.matrix, members[0]).items():
            packages.setdefault(index, package)
    for index, package in packages.items():
        name = f"index {index}"
        try:
            settings = host.host_for_project(project).index.of(index)
            with IndexSession(settings, timeout=(TIMEOUT_S, TIMEOUT_S)) as session, fetch_errors(package, session):
                has_files = bool(session.files(package))
        except BuilderError as error:
            yield name, "missing", _with_hint(error)
            continue
        absent = f"has no {package}: publish it there, or correct its index in matrix.yaml"
        yield name, "ok" if has_files else "missing", f"has {package}" if has_files else absent


def _registries(engine: Engine | None, project: Project) -> _Findings:
    """The registry of matrix.yaml, or Docker's default, and that of staging if it is another one."""
    matrix = project.matrix
    if matrix.registry:
        image = next(iter(matrix.frameworks.values())).image
        reference = ImageRef(registry=matrix.registry, repository=f"{matrix.namespace}/{image}")
        yield ("registry", *_registry(project, reference))
    elif engine is None:
        yield "registry", "note", "not checked: no engine"
    elif engine.has_remote(next(iter(matrix.debian.values())).image):
        yield "registry", "ok", "Docker's default registry answers"
    else:
        yield "registry", "note", "no registry answers: base images for Dockerfiles are made from Debian packages"
    if matrix.staging:
        try:
            repository = StagingArea.of(project, "", Host()).repository(INDEX)
        except UsageError as error:
            yield "staging", "note", str(error)
            return
        if repository.registry != matrix.registry:
            yield ("staging", *_registry(project, repository))


def _registry(project: Project, repository: ImageRef) -> tuple[State, str]:
    try:
        Repository(repository, host=host.host_for_project(project), write=True, policy=POLICY).exists()
    except BuilderError as error:
        return "note", _with_hint(error)
    return "ok", f"{repository.registry} answers"
