"""Builds one planned image with BuildKit, by its rendered Dockerfile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from builder import context
from builder.base import Base
from builder.engine import FREE_DISK, Engine, is_disk_full
from builder.errors import BuilderError, BuildError, DiskError, EngineError
from builder.host import Host
from builder.plan import Plan, PlannedImage
from builder.progress import BuildProgress, short_name
from builder.project import Project
from builder.trace import Status, decode
from builder.view import View, size

PLAN_LABEL = "gpu-images.plan"
# While a first build runs, a wheel's bytes are on the disk unpacked in uv's cache and in the image. Measured for
# torch 2.9.1: 4.2 GB of wheels, 7.5 GB unpacked.
UNPACKED = 1.8
SPARE = 2_000_000_000
# Errors of a step that are the machine's or the network's, not the image's.
_INFRASTRUCTURE = (
    "failed to resolve source metadata",
    "connection reset",
    "error reading from server",
    "rpc error",
)


@dataclass(frozen=True, kw_only=True)
class Built:
    """`reused` is true if the engine had the image of this plan already."""

    image_id: str
    reused: bool


def find(engine: Engine, image: PlannedImage) -> str:
    """Id of an image that the engine has for exactly this plan, tested or not; empty if none."""
    found = engine.images(f"{PLAN_LABEL}={image.digest}")
    return found[0].id if found else ""


def need(plan: Plan) -> int:
    """Bytes of disk that building these images for the first time takes, wheels that they share counted once."""
    return int(plan.unique_bytes * UNPACKED * 2) + SPARE


def check_disk(free: int, plan: Plan, where: str) -> None:
    """Raises DiskError before anything is begun if it cannot end well."""
    if free < need(plan):
        raise DiskError(
            f"building {len(plan.images)} image(s) takes about {size(need(plan))} in {where}, which has {size(free)}",
            hint=FREE_DISK,
        )


def build(
    engine: Engine,
    project: Project,
    image: PlannedImage,
    base: Base,
    host: Host,
    labels: Mapping[str, str],
    view: View,
) -> Built:
    """Builds `image`; raises BuildError with the last lines of the step that failed, EngineError or DiskError."""
    if existing := find(engine, image):
        return Built(image_id=existing, reused=True)
    log_path = project.logs / f"{image.id}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("w", encoding="utf-8") as log:
        hide = host.hide

        def write(line: str) -> None:
            log.write(line + "\n")
            log.flush()

        progress = BuildProgress(log=write, hide=hide)
        view.begin(image.id, "building", progress)
        lent = host.files(project.matrix.python[image.cell.python].debian)
        messages = engine.build(
            context.make(project.root, image, lent),
            dockerfile=f"images/{image.id}/Dockerfile",
            arguments={**host.proxies, "BASE": base.reference},
            labels=labels,
            network=host.network,
        )
        image_id, error = "", ""
        for message in messages:
            if message.get("id") == "moby.buildkit.trace":
                view.steps(image.id, progress.feed(_decoded(image, message["aux"])))
            elif message.get("id") == "moby.image.id":
                image_id = message["aux"]["ID"]
            elif "error" in message:
                error = str(message["error"])
    if error or not image_id:
        raise _failure(image, progress, hide(error), log_path.relative_to(project.root))
    return Built(image_id=image_id, reused=False)


def _decoded(image: PlannedImage, aux: str) -> Status:
    try:
        return decode(aux)
    except ValueError as error:
        raise EngineError(f"{image.id}: Docker Engine's progress cannot be read: {error}") from error


def _failure(image: PlannedImage, progress: BuildProgress, error: str, log: Path) -> BuilderError:
    step = progress.failed
    printed = "\n".join(f"  | {line}" for line in step.tail) if step else ""
    told = "\n".join(part for part in (error, printed) if part)
    if is_disk_full(told):
        return DiskError(f"{image.id}: the disk filled up during the build", hint=FREE_DISK)
    if not error or any(sign in error for sign in _INFRASTRUCTURE):
        return EngineError(
            f"{image.id}: {error or 'Docker Engine ended the build without a word'}",
            hint=f"This is no fault of the image; run the same command again. Whole log: {log}",
        )
    where = short_name(step.vertex.name) if step else "the build"
    return BuildError(f"{image.id}: failed at {where}\n{printed or '  | ' + error}", hint=f"Whole log: {log}")
