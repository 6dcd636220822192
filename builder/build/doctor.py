"""What this machine has for building, testing and running GPU images, and what is missing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import requests

from builder.build import disk, operating_systems
from builder.common.errors import BuilderError, EngineError, UsageError
from builder.common.reference import ImageRef
from builder.common.retry import RetryPolicy
from builder.common.units import size
from builder.compat import gpus
from builder.engine.client import Engine
from builder.engine.model import EngineInfo
from builder.engine.setup import MINIMUM, parse_version
from builder.index import host
from builder.index.host import Host
from builder.index.session import IndexSession, describe
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan import plan
from builder.registry.client import Registry
from builder.registry.staging import INDEX, Place

State = Literal["ok", "note", "missing"]
TIMEOUT_S = 15
POLICY = RetryPolicy(connect_s=TIMEOUT_S, read_s=TIMEOUT_S, retries=0)


@dataclass(frozen=True)
class Finding:
    """`missing`: images cannot be built without it; `note`: they can."""

    name: str
    state: State
    detail: str


def examine(project: Project, store: Store, say: Callable[[str], None]) -> list[Finding]:
    """All findings; raises nothing for what is missing."""
    engine: Engine | None = None
    info: EngineInfo | None = None
    docker = shutil.which("docker")
    findings = [Finding("python", "ok", sys.version.split()[0]), _uv()]
    try:
        engine = Engine.connect()
        info = engine.info()
        findings += _engine(info)
    except EngineError as error:
        findings.append(Finding("engine", "missing", f"{error}. {error.hint}".removesuffix(". ")))
    findings += [
        Finding(
            "docker", "ok" if docker else "missing", docker or "the image tests need it: apt-get install docker.io"
        ),
        Finding("disk: checkout", "ok", f"{size(shutil.disk_usage(project.root).free)} free"),
        *_engine_disk(project, info),
        _store(store),
        *_gpus(info),
    ]
    say("checking the package index and the registry ...")
    return [
        *findings,
        _index(),
        *_registries(engine, project),
        _mmdebstrap(),
    ]


def _mmdebstrap() -> Finding:
    if reason := operating_systems.obstacle_here():
        return Finding("mmdebstrap", "note", f"{reason}: builds run it in a container of Debian")
    return Finding("mmdebstrap", "ok", shutil.which("mmdebstrap") or "a build will install it with apt-get")


def _uv() -> Finding:
    uv = Path(sys.executable).parent / "uv"
    if not uv.exists():
        return Finding("uv", "missing", "not in .venv: run `make` again")
    output = subprocess.run([str(uv), "--version"], capture_output=True, text=True, check=False).stdout
    return Finding("uv", "ok", output.split(" (")[0].removeprefix("uv ").strip())


def _engine(info: EngineInfo) -> list[Finding]:
    is_new = parse_version(info.version) >= MINIMUM
    version = f"Docker Engine {info.version}" + ("" if is_new else f", but {MINIMUM[0]} or newer is needed")
    is_amd64 = info.architecture in ("x86_64", "amd64")
    machine = f"{info.architecture}, {info.cpus} CPUs, {size(info.memory)} of memory"
    return [
        Finding("engine", "ok" if is_new else "missing", version),
        Finding("store", "ok", f"{info.store}, {info.root}"),
        Finding("machine", "ok" if is_amd64 else "missing", machine),
    ]


def _has(present: bool, otherwise: State, absent: str) -> tuple[State, str]:
    return ("ok", "in the engine") if present else (otherwise, absent)


def _engine_disk(project: Project, info: EngineInfo | None) -> list[Finding]:
    if info is None or not info.is_local:
        return []
    free = shutil.disk_usage(info.root).free
    try:
        needed = disk.engine_bytes(plan.make(project, project.select(())).unique_bytes)
    except BuilderError:
        return [Finding("disk: engine", "ok", f"{size(free)} free")]
    detail = f"{size(free)} free; the default images take about {size(needed)} to build"
    return [Finding("disk: engine", "ok" if free >= needed else "missing", detail)]


def _store(store: Store) -> Finding:
    if not store.root.is_dir():
        return Finding("layers", "ok", f"{store.root}, not created yet")
    limit = f" of at most {size(store.limit)}" if store.limit else ""
    free = shutil.disk_usage(store.root).free
    return Finding("layers", "ok", f"{store.root}, {size(store.size())}{limit}, {size(free)} free")


def _gpus(info: EngineInfo | None) -> list[Finding]:
    driver, present = gpus.read()
    if not present:
        return [Finding("gpu", "note", "none: images can be built, GPU tests are not run")]
    names = ", ".join(f"{gpu.name} ({size(gpu.memory)})" for gpu in present)
    absent = "not in the engine: install nvidia-container-toolkit to use `--gpus all`"
    return [
        Finding("gpu", "ok", f"{names}, driver {driver}"),
        Finding("nvidia runtime", *_has(bool(info and info.has_nvidia), "note", absent)),
    ]


def _index() -> Finding:
    """Never shows the address: it may be a mirror's."""
    try:
        settings = host.read().index
    except UsageError as error:
        return Finding(name="index", state="missing", detail=str(error))
    which = "the configured mirror" if settings.url else "PyPI"
    try:
        files = IndexSession(settings, timeout=(TIMEOUT_S, TIMEOUT_S), retries=0).files("pip")
    except (requests.RequestException, OSError) as error:
        return Finding(name="index", state="missing", detail=f"{which} does not answer: {describe(error)}")
    if not files:
        return Finding(name="index", state="missing", detail=f"{which} does not have pip: check its address")
    ca = ", with a CA bundle of this machine" if settings.ca_bundle else ""
    return Finding(name="index", state="ok", detail=f"{which} answers{ca}")


def _registries(engine: Engine | None, project: Project) -> Iterator[Finding]:
    """The registry of matrix.yaml, or Docker's default, and that of staging if it is another one."""
    matrix = project.matrix
    if matrix.registry:
        image = next(iter(matrix.frameworks.values())).image
        repository = ImageRef(registry=matrix.registry, repository=f"{matrix.namespace}/{image}")
        yield _registry("registry", project, repository)
    else:
        yield _default_registry(engine, project)
    if matrix.staging:
        try:
            repository = Place.of(project, "", Host()).repository(INDEX)
        except UsageError as error:
            yield Finding("staging", "note", str(error))
            return
        if repository.registry != matrix.registry:
            yield _registry("staging", project, repository)


def _registry(name: str, project: Project, repository: ImageRef) -> Finding:
    try:
        Registry(repository, host=host.of(project.matrix), write=True, policy=POLICY).exists()
    except BuilderError as error:
        return Finding(name, "note", f"{error}. {error.hint}".removesuffix(". "))
    return Finding(name, "ok", f"{repository.registry} answers")


def _default_registry(engine: Engine | None, project: Project) -> Finding:
    if engine is None:
        return Finding("registry", "note", "not checked: no engine")
    if engine.has_remote(next(iter(project.matrix.debian.values())).image):
        return Finding("registry", "ok", "Docker's default registry answers")
    return Finding("registry", "note", "no registry answers: base images for Dockerfiles are made from Debian packages")
