"""Builds one planned image with BuildKit, by its rendered Dockerfile."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from builder import atomic, base, context
from builder.base import Base
from builder.engine import RUN_LABEL, is_disk_full
from builder.errors import FREE_DISK, BuilderError, BuildError, DiskError, EngineError
from builder.plan import Plan, PlannedImage
from builder.progress import BuildProgress, short_name
from builder.settings import OCI, PLAN_LABEL
from builder.trace import Status, decode
from builder.view import size
from builder.work import Work

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


class DockerfileBuilder:
    """Builds each image by its whole rendered Dockerfile: slower, and what everyone can read and do by hand."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._contexts: dict[str, bytes] = {}
        self._bases: dict[str, Base] = {}

    def find(self, image: PlannedImage) -> str:
        """Id of the image that this checkout built for exactly this plan, if the engine still has it; empty if not.

        By our own record, not by label: an image that someone derives from ours inherits its labels.
        """
        try:
            image_id = record(self._work.project.state, image.digest).read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError):
            return ""
        found = self._work.engine.image(image_id) if _IMAGE_ID.fullmatch(image_id) else None
        return image_id if found and found.labels.get(PLAN_LABEL) == image.digest else ""

    def prepare(self, images: Sequence[PlannedImage]) -> None:
        """Reads all contexts now: a file that is edited while images are built belongs to the next plan."""
        work = self._work
        for image in images:
            self._contexts[image.id] = context.make(work.project.root, image, work.host.files(image.debian))
        for release in dict.fromkeys(image.debian for image in images):
            self._bases[release] = base.ensure(work.engine, work.project, release, work.host, work.view.say)
        info = work.engine.info()
        if info.is_local:  # of an engine elsewhere we cannot know
            free = shutil.disk_usage(info.root).free
            check_disk(free, Plan(images=tuple(images)), info.root, work.engine.cache_bytes())

    def build(self, image: PlannedImage) -> str:
        """Builds `image` and returns its id.

        Raises BuildError with the last lines of the step that failed, EngineError or DiskError.
        """
        context_tar, from_ = self._contexts[image.id], self._bases[image.debian]
        image_id = run(self._work, image.id, image.id, context_tar, from_)
        atomic.write_text(record(self._work.project.state, image.digest), image_id + "\n")
        return image_id

    def tagged(self, image: PlannedImage) -> None:
        """Nobody else keeps names for these images."""

    def close(self) -> None:
        """Nothing was begun."""


def built_ids(state: Path) -> set[str]:
    """Ids of all images that this checkout has built."""
    return {path.read_text(encoding="ascii").strip() for path in (state / "built").glob("*")}


def record(state: Path, plan_digest: str) -> Path:
    """Where the id of the image of a plan is kept."""
    return state / "built" / plan_digest.replace(":", "-")


def need(plan: Plan, cached: int = 0) -> int:
    """Bytes of disk that building these images takes, wheels that they share counted once.

    `cached` bytes are in BuildKit's cache already, from an earlier build or one that was interrupted.
    """
    return max(int(plan.unique_bytes * UNPACKED * 2) - cached, 0) + SPARE


def check_disk(free: int, plan: Plan, where: str, cached: int = 0) -> None:
    """Raises DiskError before anything is begun if it cannot end well."""
    check_room(free, need(plan, cached), len(plan.images), where)


def check_room(free: int, wanted: int, count: int, where: str) -> None:
    """Raises DiskError if `wanted` bytes for `count` images are more than are free."""
    if free < wanted:
        raise DiskError(
            f"building {count} image(s) takes about {size(wanted)} in {where}, which has {size(free)}",
            hint=FREE_DISK,
        )


def run(
    work: Work, folder: str, row: str, context_tar: bytes, from_: Base, *, target: str = "", fresh: bool = False
) -> str:
    """Builds images/`folder`/Dockerfile, or its stage `target`, shown and logged as `row`; returns the image's id."""
    view, host = work.view, work.host
    log_path = work.project.logs / f"{row}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("w", encoding="utf-8") as log:
        hide = host.hide

        def write(line: str) -> None:
            log.write(line + "\n")
            log.flush()

        progress = BuildProgress(log=write, hide=hide)
        view.begin(row, "building", progress)
        messages = work.engine.build(
            context_tar,
            dockerfile=f"images/{folder}/Dockerfile",
            arguments={**host.proxies, "BASE": from_.reference},
            labels={RUN_LABEL: str(work.project.root)} if target else {f"{OCI}.base.name": from_.name},
            network=host.network,
            target=target,
            fresh=fresh,
        )
        image_id, error = "", ""
        for message in messages:
            if message.get("id") == "moby.buildkit.trace":
                view.steps(row, progress.feed(_decoded(row, message["aux"])))
            elif message.get("id") == "moby.image.id":
                image_id = message["aux"]["ID"]
            elif "error" in message:
                error = str(message["error"])
    if error or not image_id:
        raise _failure(row, progress, hide(error), log_path.relative_to(work.project.root))
    return image_id


def _decoded(row: str, aux: str) -> Status:
    try:
        return decode(aux)
    except ValueError as error:
        raise EngineError(f"{row}: Docker Engine's progress cannot be read: {error}") from error


def _failure(row: str, progress: BuildProgress, error: str, log: Path) -> BuilderError:
    step = progress.failed
    printed = "\n".join(f"  | {line}" for line in step.tail) if step else ""
    told = "\n".join(part for part in (error, printed) if part)
    if is_disk_full(told):
        return DiskError(f"{row}: the disk filled up during the build", hint=FREE_DISK)
    if not error or any(sign in error for sign in _INFRASTRUCTURE):
        return EngineError(
            f"{row}: {error or 'Docker Engine ended the build without a word'}",
            hint=f"This is no fault of the image; run the same command again. Whole log: {log}",
        )
    where = short_name(step.vertex.name) if step else "the build"
    return BuildError(f"{row}: failed at {where}\n{printed or '  | ' + error}", hint=f"Whole log: {log}")
