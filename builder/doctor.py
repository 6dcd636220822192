"""What this machine has for building, testing and running GPU images, and what it lacks."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import requests

from builder import assemble, gpu, host, plan
from builder.engine import Engine, EngineInfo
from builder.engine_setup import MINIMUM, parse_version
from builder.errors import BuilderError, EngineError, UsageError
from builder.project import Project
from builder.store import Store
from builder.view import size

State = Literal["ok", "note", "missing"]
TIMEOUT_S = 15


@dataclass(frozen=True, kw_only=True)
class Finding:
    """`missing` is something without which images cannot be made; `note` is worth knowing."""

    name: str
    state: State
    detail: str


def examine(project: Project, store: Store, say: Callable[[str], None]) -> list[Finding]:
    """All findings; never raises for something that is merely absent."""
    findings = [_python(), _uv()]
    try:
        engine: Engine | None = Engine.connect()
    except EngineError as error:
        engine = None
        findings.append(Finding(name="engine", state="missing", detail=f"{error}. {error.hint}"))
    info = None
    if engine:
        try:
            info = engine.info()
            findings += _engine(info)
        except EngineError as error:
            findings.append(Finding(name="engine", state="missing", detail=str(error)))
    findings += [_client(), *_disks(project, info), _store(store), *_gpus(info)]
    say("asking the package index and the registry ...")
    findings += [_index(), _registry(engine, project), _bootstrap()]
    return findings


def _python() -> Finding:
    return Finding(name="python", state="ok", detail=sys.version.split()[0])


def _uv() -> Finding:
    uv = Path(sys.executable).parent / "uv"
    if not uv.exists():
        return Finding(name="uv", state="missing", detail="not in .venv: run `make` again")
    told = subprocess.run([str(uv), "--version"], capture_output=True, text=True, check=False).stdout
    return Finding(name="uv", state="ok", detail=told.split(" (")[0].removeprefix("uv ").strip())


def _engine(info: EngineInfo) -> list[Finding]:
    new = parse_version(info.version) >= MINIMUM
    return [
        Finding(
            name="engine",
            state="ok" if new else "missing",
            detail=f"Docker Engine {info.version}" + ("" if new else f", but {MINIMUM[0]} or newer is needed"),
        ),
        Finding(
            name="buildkit",
            state="ok" if info.buildkit else "missing",
            detail="in the engine" if info.buildkit else "this engine has none",
        ),
        Finding(name="store", state="ok", detail=f"{info.store}, {info.root}"),
        Finding(
            name="machine",
            state="ok" if info.architecture in ("x86_64", "amd64") else "missing",
            detail=f"{info.architecture}, {info.cpus} CPUs, {size(info.memory)} of memory",
        ),
    ]


def _client() -> Finding:
    if path := shutil.which("docker"):
        return Finding(name="docker", state="ok", detail=path)
    return Finding(
        name="docker",
        state="missing",
        detail="the image tests need it: apt-get install docker.io",
    )


def _disks(project: Project, info: EngineInfo | None) -> list[Finding]:
    places = {"disk: checkout": project.root}
    if info and info.is_local:
        places["disk: engine"] = Path(info.root)
    try:
        wanted = assemble.engine_bytes(plan.make(project, project.select(())).unique_bytes)
    except BuilderError:
        wanted = 0
    findings = []
    for name, path in places.items():
        free = shutil.disk_usage(path).free
        enough = name != "disk: engine" or free >= wanted
        detail = f"{size(free)} free" + (f"; the default images take about {size(wanted)} to build" if wanted else "")
        findings.append(
            Finding(
                name=name,
                state="ok" if enough else "missing",
                detail=detail if "engine" in name else f"{size(free)} free",
            )
        )
    return findings


def _store(store: Store) -> Finding:
    if not store.root.is_dir():
        return Finding(name="layers", state="ok", detail=f"{store.root}, to be made")
    limit = f" of at most {size(store.limit)}" if store.limit else ""
    detail = f"{store.root}, {size(store.size())}{limit}, {size(shutil.disk_usage(store.root).free)} free"
    return Finding(name="layers", state="ok", detail=detail)


def _gpus(info: EngineInfo | None) -> list[Finding]:
    driver, gpus = gpu.read()
    if not gpus:
        return [Finding(name="gpu", state="note", detail="none: images are built, GPU tests are not run")]
    names = ", ".join(f"{card.name} ({size(card.memory)})" for card in gpus)
    runtime = bool(info and info.has_nvidia)
    return [
        Finding(name="gpu", state="ok", detail=f"{names}, driver {driver}"),
        Finding(
            name="nvidia runtime",
            state="ok" if runtime else "note",
            detail="in the engine" if runtime else "absent: install nvidia-container-toolkit to use `--gpus all`",
        ),
    ]


def _index() -> Finding:
    """Never shows the address: it may be a mirror's."""
    try:
        settings = host.read().index
    except UsageError as error:
        return Finding(name="index", state="missing", detail=str(error))
    which = "the configured mirror" if settings.url else "PyPI"
    uv = Path(sys.executable).parent / "uv"
    # uv itself asks, so that what answers here is what `builder lock` asks.
    command = [str(uv), "pip", "compile", "-", "--quiet", "--no-header", "--no-config", "--refresh-package", "pip"]
    environment = {**os.environ, **settings.environment(), "UV_HTTP_TIMEOUT": str(TIMEOUT_S), "UV_HTTP_RETRIES": "1"}
    try:
        done = subprocess.run(
            command, input="pip\n", capture_output=True, text=True, check=False, timeout=4 * TIMEOUT_S, env=environment
        )
    except (subprocess.TimeoutExpired, OSError):
        return Finding(name="index", state="missing", detail=f"{which} does not answer")
    if done.returncode == 0:
        ca = ", with a CA bundle of this machine" if settings.ca_bundle else ""
        return Finding(name="index", state="ok", detail=f"{which} answers{ca}")
    return Finding(name="index", state="missing", detail=f"{which} does not answer")


def _registry(engine: Engine | None, project: Project) -> Finding:
    registry = project.matrix.registry
    if not registry:
        if engine is None:
            return Finding(name="registry", state="note", detail="not asked: no engine")
        image = next(iter(project.matrix.debian.values())).image
        reached = engine.has_remote(image)
        detail = "Docker's default registry answers" if reached else "none answers; base images are made from packages"
        return Finding(name="registry", state="ok" if reached else "note", detail=detail)
    for scheme in ("https", "http"):
        try:
            status = requests.get(f"{scheme}://{registry}/v2/", timeout=TIMEOUT_S).status_code
        except requests.RequestException:
            continue
        if status in (200, 401):
            return Finding(name="registry", state="ok", detail=f"{registry} answers ({scheme})")
    return Finding(name="registry", state="note", detail=f"{registry} does not answer")


def _bootstrap() -> Finding:
    if path := shutil.which("mmdebstrap"):
        return Finding(name="mmdebstrap", state="ok", detail=path)
    return Finding(name="mmdebstrap", state="note", detail="absent; needed only where the base image cannot be pulled")
