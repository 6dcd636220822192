"""Measures in containers: one at a time, of every image in turn, round after round.

Alternating spreads what changes on the machine meanwhile over all images. The programs are copied into the container
and run as the image's user, behind its entrypoint.
"""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

from docker.models.containers import Container

from benchmarks.frameworks.report import Report
from benchmarks.frameworks.selection import INSIDE, Subject
from builder.common.console import View
from builder.common.errors import ImageTestError
from builder.engine.client import Engine
from builder.engine.model import translated

FOLDER = "/tmp/bench"  # noqa: S108  in a container that only this run uses
MAIN = "benchmarks.inside.main"
STARTS = 3
LIMIT_S = 600
SHM = "1g"  # the engine's default of 64 MB is too small for the batches of PyTorch's workers


@dataclass(frozen=True, kw_only=True)
class Settings:
    """`size` is that of the matrix product, `gpu` a GPU or empty (the CPU); `checkout` owns the containers."""

    runs: int
    size: int
    gpu: str
    checkout: str


def measure(engine: Engine, subjects: Sequence[Subject], settings: Settings, view: View) -> Report:
    """All rounds. A failure of one image is in the report and does not stop the others."""
    engine.sweep(settings.checkout)
    report = Report(subjects=subjects, size=settings.size, runs=settings.runs, gpu=bool(settings.gpu))
    view.add_images(subject.id for subject in subjects)
    with view.live():
        for number in range(1, settings.runs + 1):
            for subject in subjects:
                name = f"run {number} of {settings.runs}"
                view.begin(subject.id, name)
                try:
                    for line in _round(engine, subject, settings, is_first=number == 1):
                        if "doing" in line:
                            view.note(subject.id, f"{name}: {line['doing']}")
                        report.add(subject.id, line)
                except ImageTestError as error:
                    report.add(subject.id, {"failed": name, "reason": str(error)})
                if number == settings.runs:
                    view.end(subject.id, "failed" if report.figures[subject.id].failures else "done")
    return report


def _round(engine: Engine, subject: Subject, settings: Settings, *, is_first: bool) -> Iterator[dict[str, Any]]:
    """The lines of one run in one image."""
    yield {"doing": "container"}
    for _ in range(STARTS):
        began = time.perf_counter()
        with _container(engine, subject, settings, ["true"]) as container:
            status = container.wait()["StatusCode"]
            took = time.perf_counter() - began
            _check(container, status)
        yield {"measure": "container", "value": took}
    request = {
        "framework": subject.cell.framework,
        "gpu": bool(settings.gpu),
        "size": settings.size,
        "limit_s": LIMIT_S,
        "warm": is_first,
    }
    # The program waits for its files: they can be copied only into a container that exists.
    command = f'until [ -e {FOLDER}/ready ]; do sleep 0.02; done; exec python -B -m {MAIN} "$0"'
    with _container(engine, subject, settings, ["sh", "-c", command, json.dumps(request)]) as container:
        container.put_archive("/", files())
        yield from _json_lines(container.logs(stream=True, follow=True, stdout=True, stderr=False))
        _check(container, container.wait()["StatusCode"])


@contextmanager
def _container(engine: Engine, subject: Subject, settings: Settings, command: list[str]) -> Iterator[Container]:
    """A container of the image, removed afterwards."""
    # An engine whose default runtime is NVIDIA's gives GPUs to every container.
    none: dict[str, Any] = {"environment": {"NVIDIA_VISIBLE_DEVICES": "void"}}
    options = engine.info().gpu_options((settings.gpu,)) if settings.gpu else none
    options["environment"] = {"PYTHONPATH": FOLDER, **options.get("environment", {})}
    container = engine.start(
        subject.image_id,
        checkout=settings.checkout,
        command=command,
        shm_size=SHM,
        network_mode="none",
        **options,
    )
    try:
        with translated(f"measuring {subject.id}"):
            yield container
    finally:
        with translated("removing a container"):
            container.remove(force=True, v=True)


def _check(container: Container, status: int) -> None:
    """Raises ImageTestError with the end of the container's log if its exit status is not 0."""
    if status:
        log = container.logs(stdout=False, tail=15).decode("utf-8", "replace")
        raise ImageTestError(f"exit status {status}\n{log}")


def files() -> bytes:
    """A tar of the programs in `inside`, as the package that they are here; `ready` is the last member."""
    package = "/".join((FOLDER, *MAIN.split(".")[:-1]))
    folders = [package.rsplit("/", depth)[0] for depth in (2, 1)] + [package]
    contents = {f"{folders[1]}/__init__.py": b""}
    contents |= {f"{package}/{path.name}": path.read_bytes() for path in sorted(INSIDE.glob("*.py"))}
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


def _json_lines(chunks: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """The JSON objects among the lines of a stream, which may break anywhere. A framework may print other lines."""
    rest = b""
    for chunk in chain(chunks, [b"\n"]):
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            try:
                content = json.loads(line)
            except ValueError:
                continue
            if isinstance(content, dict):
                yield content
