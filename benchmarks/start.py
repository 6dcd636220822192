"""How soon a Jupyter image answers: from the start of the container to Jupyter's first answer on its port."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

import requests
from docker.models.containers import Container

from builder.engine.client import Engine
from builder.matrix import tags
from builder.matrix.cells import components
from builder.matrix.project import Project

COMPONENT = "jupyter"
PAUSE_S, LIMIT_S = 0.05, 120.0


def measure(
    engine: Engine, project: Project, timed: Callable[[str], AbstractContextManager[None]], repeat: int
) -> tuple[str, str] | None:
    """Times Jupyter and `true`, several times. Returns the names of the two measurements, or None without an image."""
    image = first_built(engine, project)
    if image is None:
        return None
    cell, image_id, port = image
    jupyter, alone = f"{cell}: from `docker run` to Jupyter's answer", f"{cell}: from `docker run` to the end of `true`"
    checkout = str(project.root)
    for _ in range(repeat):
        with ExitStack() as containers:
            with timed(jupyter):
                container = engine.start(image_id, checkout=checkout, ports=[port])
                containers.callback(container.remove, force=True, v=True)
                wait_for_answer(container, port)
            with timed(alone):
                container = engine.start(image_id, checkout=checkout, command=["true"])
                containers.callback(container.remove, force=True, v=True)
                container.wait()
    return jupyter, alone


def first_built(engine: Engine, project: Project) -> tuple[str, str, int] | None:
    """Cell, image id and port of the first cell with Jupyter whose image the engine has under its full tag."""
    port = project.matrix.components[COMPONENT].port
    references = tags.compute(project.matrix, project.cells)
    for cell in project.cells:
        if port and COMPONENT in components(project.matrix, cell):
            image = engine.image(str(references[cell.id][0]))
            if image:
                return cell.id, image.id, port
    return None


def wait_for_answer(container: Container, port: int) -> None:
    """Requests Jupyter's version, which needs no token, until it answers."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        container.reload()
        if container.status == "exited":
            raise SystemExit(f"the container ended:\n{container.logs(tail=15).decode('utf-8', 'replace')}")
        published: Sequence[dict[str, str]] = container.ports.get(f"{port}/tcp") or ()
        if published and _answers(f"http://127.0.0.1:{published[0]['HostPort']}/api"):
            return
        time.sleep(PAUSE_S)
    raise SystemExit(f"Jupyter did not answer within {LIMIT_S:.0f} s")


def _answers(address: str) -> bool:
    try:
        return requests.get(address, timeout=5).status_code == 200
    except requests.RequestException:
        return False
