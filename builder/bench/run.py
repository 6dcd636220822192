"""Takes the measures: one container at a time, of every image in turn, round after round.

Taking turns spreads over all images what changes meanwhile on the machine. The programs are put into the container,
and run as the image's user, behind its entrypoint.
"""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from docker.models.containers import Container

from builder.bench.choice import INSIDE, Subject
from builder.bench.report import Report
from builder.engine import Engine, translated
from builder.errors import ImageTestError
from builder.view import View

FOLDER = "/tmp/bench"  # noqa: S108  in a container that only this run has
MAIN = "builder.bench.inside.main"
STARTS = 3
LIMIT_S = 600
SHM = "1g"  # the engine's default of 64 MB is too small for the batches of PyTorch's workers


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`size` is that of the matrix product, `gpu` a UUID or empty for the CPU; `checkout` owns the containers."""

    runs: int
    size: int
    gpu: str
    checkout: str


def measure(engine: Engine, subjects: Sequence[Subject], settings: Settings, view: View) -> Report:
    """All rounds; what fails in an image is in the report, and the others go on."""
    engine.sweep(settings.checkout)
    report = Report(subjects=subjects, size=settings.size, runs=settings.runs, gpu=bool(settings.gpu))
    view.wait_for(one.id for one in subjects)
    with view.shown():
        for number in range(settings.runs):
            for one in subjects:
                name = f"run {number + 1} of {settings.runs}"
                view.begin(one.id, name)
                try:
                    for line in _round(engine, one, settings, is_first=number == 0):
                        if "doing" in line:
                            view.note(one.id, f"{name}: {line['doing']}")
                        report.take(one.id, line)
                except ImageTestError as error:
                    report.take(one.id, {"failed": name, "reason": str(error)})
                if number + 1 == settings.runs:
                    view.end(one.id, "failed" if one.id in report.failures else "done")
    return report


def _round(engine: Engine, subject: Subject, settings: Settings, *, is_first: bool) -> Iterator[dict[str, Any]]:
    """The lines of one run in one image."""
    yield {"doing": "container"}
    for _ in range(STARTS):
        yield {"measure": "container", "value": _container(engine, subject, settings)}
    asked = {
        "framework": subject.cell.framework,
        "gpu": bool(settings.gpu),
        "size": settings.size,
        "limit_s": LIMIT_S,
        "warm": is_first,
    }
    # The program waits for its files, which can only be put into a container that is there.
    command = f'until [ -e {FOLDER}/ready ]; do sleep 0.02; done; exec python -B -m {MAIN} "$0"'
    container = _start(engine, subject, settings, ["sh", "-c", command, json.dumps(asked)])
    try:
        with translated(f"measuring {subject.id}"):
            container.put_archive("/", files())
            for line in _lines(container.logs(stream=True, follow=True, stdout=True, stderr=False)):
                if found := _parsed(line):
                    yield found
            status = container.wait()["StatusCode"]
            if status:
                told = container.logs(stdout=False, tail=15).decode("utf-8", "replace")
                raise ImageTestError(f"ended with status {status}\n{told}")
    finally:
        _remove(container)


def _container(engine: Engine, subject: Subject, settings: Settings) -> float:
    """Seconds from the order to run `true` to its end."""
    began = time.perf_counter()
    container = _start(engine, subject, settings, ["true"])
    try:
        with translated(f"starting {subject.id}"):
            status = container.wait()["StatusCode"]
            took = time.perf_counter() - began
            if status:
                told = container.logs(tail=15).decode("utf-8", "replace")
                raise ImageTestError(f"`true` ended with status {status}\n{told}")
            return took
    finally:
        _remove(container)


def _start(engine: Engine, subject: Subject, settings: Settings, command: list[str]) -> Container:
    # An engine whose default runtime is NVIDIA's would hand out GPUs that nobody asked for.
    hidden = {} if settings.gpu else {"NVIDIA_VISIBLE_DEVICES": "void"}
    return engine.start(
        subject.image_id,
        checkout=settings.checkout,
        command=command,
        gpus=[settings.gpu] if settings.gpu else False,
        shm_size=SHM,
        network_mode="none",
        environment={"PYTHONPATH": FOLDER, **hidden},
    )


def _remove(container: Container) -> None:
    with translated("removing a container"):
        container.remove(force=True, v=True)


def files() -> bytes:
    """A tar of the programs that run inside, as the package that they are here; `ready` comes last."""
    parts = MAIN.split(".")[:-1]
    folders = ["/".join((FOLDER, *parts[:depth])) for depth in range(len(parts) + 1)]
    contents = {f"{folder}/__init__.py": b"" for folder in folders[1:-1]}
    contents |= {f"{folders[-1]}/{path.name}": path.read_bytes() for path in sorted(INSIDE.glob("*.py"))}
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name in folders:
            folder = tarfile.TarInfo(name.lstrip("/"))
            folder.type, folder.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(folder)
        for name, content in {**contents, f"{FOLDER}/ready": b""}.items():
            member = tarfile.TarInfo(name.lstrip("/"))
            member.size, member.mode = len(content), 0o644
            tar.addfile(member, io.BytesIO(content))
    return out.getvalue()


def _lines(chunks: Iterator[bytes]) -> Iterator[str]:
    """Whole lines of a stream that comes in any pieces."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in whole)
    if rest:
        yield rest.decode("utf-8", "replace")


def _parsed(line: str) -> dict[str, Any]:
    """A framework may print what is no line of ours."""
    try:
        found = json.loads(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
