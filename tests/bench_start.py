"""How soon a Jupyter image answers: from the order to run it to Jupyter's first answer on its port."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import requests
from docker.models.containers import Container

from builder import tags
from builder.cells import components
from builder.engine import Engine
from builder.project import Project

COMPONENT = "jupyter"
PAUSE_S, LIMIT_S = 0.05, 120.0
ANSWER = "{cell}: from `docker run` to Jupyter's answer"
ALONE = "{cell}: from `docker run` to the end of `true`"


def measure(
    engine: Engine, project: Project, timed: Callable[[str], AbstractContextManager[None]], repeat: int
) -> tuple[str, str] | None:
    """Times both, several times; returns the names of the two measurements, or None where no Jupyter image is built."""
    found = first_built(engine, project)
    if found is None:
        return None
    cell, image_id, port = found
    names = ANSWER.format(cell=cell), ALONE.format(cell=cell)
    checkout = str(project.root)
    for _ in range(repeat):
        started: list[Container] = []
        try:
            with timed(names[0]):
                started.append(engine.start(image_id, checkout=checkout, ports=[port]))
                wait_for_answer(started[0], port)
            with timed(names[1]):
                started.append(engine.start(image_id, checkout=checkout, command=["true"]))
                started[1].wait()
        finally:
            for container in started:
                container.remove(force=True, v=True)
    return names


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
    """Asks for Jupyter's version, which it tells without a token, until it answers."""
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
