"""Builds one planned image with BuildKit, by its rendered Dockerfile."""

from __future__ import annotations

import re
from pathlib import Path

from builder import atomic
from builder.base import Base
from builder.engine import Engine, is_disk_full
from builder.errors import FREE_DISK, BuilderError, BuildError, DiskError, EngineError
from builder.host import Host
from builder.plan import Plan, PlannedImage
from builder.progress import BuildProgress, short_name
from builder.project import Project
from builder.trace import Status, decode
from builder.view import View, size

PLAN_LABEL = "gpu-images.plan"
OCI = "org.opencontainers.image"  # label prefix of the OCI image specification, "Pre-Defined Annotation Keys"
_IMAGE_ID = re.compile(r"sha256:[0-9a-f]{64}")
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


def find(engine: Engine, state: Path, image: PlannedImage) -> str:
    """Id of the image that this checkout built for exactly this plan, if the engine still has it; empty if not.

    By our own record, not by label: an image that someone derives from ours inherits its labels.
    """
    try:
        image_id = _record(state, image.digest).read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""
    found = engine.image(image_id) if _IMAGE_ID.fullmatch(image_id) else None
    return image_id if found and found.labels.get(PLAN_LABEL) == image.digest else ""


def built_ids(state: Path) -> set[str]:
    """Ids of all images that this checkout has built."""
    return {path.read_text(encoding="ascii").strip() for path in (state / "built").glob("*")}


def _record(state: Path, plan_digest: str) -> Path:
    return state / "built" / plan_digest.replace(":", "-")


def need(plan: Plan, cached: int = 0) -> int:
    """Bytes of disk that building these images takes, wheels that they share counted once.

    `cached` bytes are in BuildKit's cache already, from an earlier build or one that was interrupted.
    """
    return max(int(plan.unique_bytes * UNPACKED * 2) - cached, 0) + SPARE


def check_disk(free: int, plan: Plan, where: str, cached: int = 0) -> None:
    """Raises DiskError before anything is begun if it cannot end well."""
    wanted = need(plan, cached)
    if free < wanted:
        raise DiskError(
            f"building {len(plan.images)} image(s) takes about {size(wanted)} in {where}, which has {size(free)}",
            hint=FREE_DISK,
        )


def build(
    engine: Engine,
    project: Project,
    image: PlannedImage,
    context: bytes,
    base: Base,
    host: Host,
    revision: str,
    view: View,
) -> str:
    """Builds `image` and returns its id.

    Raises BuildError with the last lines of the step that failed, EngineError or DiskError.
    """
    log_path = project.logs / f"{image.id}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("w", encoding="utf-8") as log:
        hide = host.hide

        def write(line: str) -> None:
            log.write(line + "\n")
            log.flush()

        progress = BuildProgress(log=write, hide=hide)
        view.begin(image.id, "building", progress)
        messages = engine.build(
            context,
            dockerfile=f"images/{image.id}/Dockerfile",
            arguments={**host.proxies, "BASE": base.reference},
            labels={f"{OCI}.revision": revision, f"{OCI}.base.name": base.name},
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
    atomic.write_text(_record(project.state, image.digest), image_id + "\n")
    return image_id


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
