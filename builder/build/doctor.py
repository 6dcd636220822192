"""Checks that this machine can build, test and run GPU images."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from typing import Literal

import requests

from builder.build import operating_systems
from builder.common.errors import BuilderError, EngineError
from builder.common.http import failure_sentence
from builder.common.reference import ImageRef
from builder.common.tasks import RetryPolicy
from builder.common.text import size
from builder.compat import gpus
from builder.engine.model import EngineInfo
from builder.engine.run import Run
from builder.engine.setup import too_old
from builder.index.session import IndexSession, fetch_errors
from builder.index.settings import IndexSettings
from builder.index.wheels import PLATFORMS
from builder.matrix.cells import indexes_of_packages
from builder.matrix.schema import ARM64
from builder.matrix.tags import CELL_LABEL
from builder.registry.client import Repository

State = Literal["ok", "note", "missing"]
TIMEOUT_S = 15
POLICY = RetryPolicy(connect_s=TIMEOUT_S, read_s=TIMEOUT_S, retries=0)


_Findings = Iterator[tuple[str, State, str]]


def examine(run: Run) -> _Findings:
    """Findings as name, state and detail. `missing`: images cannot be built without it; `note`: they can.

    Reports what is missing as a finding, not as an error.
    """
    yield "python", "ok", sys.version.split()[0]
    info: EngineInfo | None = None
    try:
        address, info = run.engine.address, run.engine.info()
    except EngineError as error:
        yield "engine", "missing", _with_hint(error)
    else:
        obstacle = too_old(info)
        name = f"{info.name} {info.version}{', rootless' if info.is_rootless else ''}, {info.store}, {info.root}"
        if address.selected_by:
            name += f", at {address.host} (selected by {address.selected_by})"
        yield "engine", "missing" if obstacle else "ok", obstacle or name
        about = f"{info.architecture}, {info.cpus} CPUs, {size(info.memory)} of memory"
        yield "machine", "ok" if info.arch in PLATFORMS else "missing", about
        yield ("containers", *_containers(run, info))
    docker = shutil.which("docker")
    yield "docker", "ok" if docker else "missing", docker or "the image tests need it: apt-get install docker.io"
    yield "store", "ok", f"{run.store.root}{f', at most {size(run.store.limit)}' if run.store.limit else ''}"

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
    yield ("index", *_index(run.host.index))
    if run.checkout:
        yield from _named_indexes(run)
        yield from _registry(run)
    if reason := operating_systems.obstacle_here():
        yield "mmdebstrap", "note", f"{reason}: builds run it in a container of Debian"
    else:
        yield "mmdebstrap", "ok", shutil.which("mmdebstrap") or "a build will install it with apt-get"


def _containers(run: Run, info: EngineInfo) -> tuple[State, str]:
    """Starts a container of an image that the engine has: the runtime of an engine that answers may fail."""
    try:
        cells = {image.labels[CELL_LABEL]: image.id for image in run.engine.images(CELL_LABEL)}
        fits = [cell for cell in cells if cell.endswith(f"-{ARM64}") == (info.arch == ARM64)]
        if not fits:
            return "note", "not tried: the engine has no image of builder yet"
        with run.engine.running(cells[fits[0]], checkout=str((run.checkout or run.store).root), network_mode="none"):
            return "ok", f"started a container of {fits[0]}"
    except BuilderError as error:
        return "missing", _with_hint(error)


def _with_hint(error: BuilderError) -> str:
    return f"{error}. {error.hint}".removesuffix(". ")


def _index(settings: IndexSettings) -> tuple[State, str]:
    """The state of the default index. Never shows its address, which may be that of a private mirror."""
    which = "the configured mirror" if settings.url else "PyPI"
    session = IndexSession(settings, timeout=(TIMEOUT_S, TIMEOUT_S), retries=0)
    try:
        files = session.files("pip")
    except (requests.RequestException, OSError) as error:
        reason = f"{failure_sentence(error)}. {session.hint(error, '')}".removesuffix(". ")
        return "missing", f"{which} does not answer: {reason}"
    if not files:
        return "missing", f"{which} does not have pip: check its address"
    return "ok", f"{which} answers{', with a CA bundle of this machine' if settings.ca_bundle else ''}"


def _named_indexes(run: Run) -> _Findings:
    """A finding for each index of matrix.yaml: it has one of its packages and accepts the login, or not."""
    packages: dict[str, str] = {}
    for members in run.project.groups.values():
        for package, index in indexes_of_packages(run.project.matrix, members[0]).items():
            packages.setdefault(index, package)
    for index, package in packages.items():
        name = f"index {index}"
        try:
            with (
                IndexSession(run.host.index.of(index), timeout=(TIMEOUT_S, TIMEOUT_S)) as session,
                fetch_errors(package, session),
            ):
                has_files = bool(session.files(package))
        except BuilderError as error:
            yield name, "missing", _with_hint(error)
            continue
        absent = f"has no {package}: publish it there, or correct its index in matrix.yaml"
        yield name, "ok" if has_files else "missing", f"has {package}" if has_files else absent


def _registry(run: Run) -> _Findings:
    """The registry of matrix.yaml, if it names one."""
    matrix = run.project.matrix
    if not matrix.registry:
        return
    reference = ImageRef(registry=matrix.registry, repository=f"{matrix.namespace}/{matrix.image_names[0]}")
    try:
        Repository(reference, host=run.host, write=True, policy=POLICY).list_tags()
    except BuilderError as error:
        yield "registry", "note", _with_hint(error)
    else:
        yield "registry", "ok", f"{matrix.registry} answers"
