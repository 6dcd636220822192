"""Builds images from their rendered Dockerfiles, with BuildKit: the context, the build, and what it was built from."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from builder.build import base, disk, locked_packages
from builder.build.base import Base
from builder.build.work import Method, Origin, Work, built_id, record_built
from builder.common import digest
from builder.common.errors import FREE_DISK, BuilderError, BuildError, DiskError, EngineError
from builder.engine.client import RUN_LABEL
from builder.engine.errors import is_disk_full
from builder.engine.model import BuildRequest
from builder.engine.progress import BuildProgress, lines, short_name
from builder.engine.trace import Status, decode
from builder.matrix.tags import PLAN_LABEL
from builder.plan.plan import COMMON_INPUTS, PlannedImage
from builder.plan.settings import built_labels

# Errors of the machine or the network, not of the image.
_INFRASTRUCTURE = (
    "failed to resolve source metadata",
    "connection reset",
    "error reading from server",
    "rpc error",
)


class DockerfileBuilder(Method):
    """Builds each image from its whole Dockerfile: slower than assembling, and easy to read and repeat by hand."""

    assembles = False

    def __init__(self, work: Work) -> None:
        self._work = work
        self._keys: dict[str, str] = {}
        self._builds: dict[str, Build] = {}

    def find(self, image: PlannedImage) -> str:
        """Id of the image that this checkout built for exactly this plan, if the engine still has it; empty if not.

        Found by our own record, not by label: an image derived from ours inherits its labels.
        """
        image_id = built_id(self._work.project.state, self._key(image))
        info = self._work.engine.image(image_id) if digest.is_digest(image_id) else None
        return image_id if info and info.labels.get(PLAN_LABEL) == image.digest else ""

    def prepare(self, images: Sequence[PlannedImage]) -> None:
        """Reads all contexts now: a file that is edited during the build belongs to the next plan."""
        work = self._work
        contexts = [_context(image, work) for image in images]
        self._keys = {image.id: self._key(image) for image in images}
        bases = {release: base.ensure(work, release) for release in dict.fromkeys(image.debian for image in images)}
        for image, tar in zip(images, contexts, strict=True):
            self._builds[image.id] = Build(image=image, name=image.id, context=tar, base=bases[image.debian])
        disk.check_dockerfile(work, images)

    def build(self, image: PlannedImage) -> tuple[str, Origin]:
        """Builds `image` and returns its id. Raises BuildError, EngineError or DiskError, as `run` does."""
        build = self._builds[image.id]
        image_id = locked_packages.build(
            self._work,
            image,
            build.context,
            partial(_context, image),
            lambda work, context: run(work, replace(build, context=context)),
        )
        record_built(self._work.project.state, self._keys[image.id], image_id)
        return image_id, "built"

    def _key(self, image: PlannedImage) -> str:
        """Digest of the plan and of every file that the Dockerfile reads."""
        root = self._work.project.root
        files = {path.relative_to(root).as_posix(): digest.of_tree(root, path) for path in context_files(root, image)}
        return digest.of_data([image.digest, files])


def _context(image: PlannedImage, work: Work) -> bytes:
    return context(work.project.root, image, work.host.files(image.debian))


def context_files(root: Path, image: PlannedImage) -> list[Path]:
    """The image's Dockerfile and the files that it reads."""
    lists = [wheel_list.path for wheel_list in image.lists]
    names = (*COMMON_INPUTS, image.dockerfile, image.system.path, f"{image.folder}/constraints.txt", *lists)
    files = [root / name for name in names if (root / name).is_file()]
    for component in image.components:
        files += digest.tree(root / f"templates/{component}")
    return sorted(set(files))


def context(root: Path, image: PlannedImage, host_files: Mapping[str, bytes]) -> bytes:
    """A tar of `context_files` and of `host_files` (path in the context -> content, from `Host.files`).

    The same bytes for the same files, whatever the machine's umask or clock.
    """
    paths = {path.relative_to(root).as_posix(): path for path in context_files(root, image)}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for name in sorted({*paths, *host_files}):
            info, content = tarfile.TarInfo(name), b""
            info.mode = 0o644
            if name in host_files:
                content = host_files[name]
            elif paths[name].is_symlink():
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, str(paths[name].readlink()), 0o777
            else:
                content = paths[name].read_bytes()
                info.mode = 0o755 if paths[name].stat().st_mode & 0o100 else 0o644
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


@dataclass(frozen=True, kw_only=True)
class Build:
    """One run of BuildKit. `name` is its row in the view and its log.

    `target` is a stage of the Dockerfile, by default the last.
    """

    image: PlannedImage
    name: str
    context: bytes
    base: Base
    target: str = ""

    def labels(self, checkout: Path) -> dict[str, str]:
        """A stage is marked for removal by `sweep`; an image gets the labels that are known only when it is built.

        The time of its newest package is not known before its layers are made.
        """
        if self.target:
            return {RUN_LABEL: str(checkout)}
        return {name: value for name, value in built_labels(self.image.digest, self.base.name, "").items() if value}


def run(work: Work, build: Build) -> str:
    """Builds an image or a stage of it and returns the id of the result.

    Raises BuildError with the last lines of the step that failed, EngineError or DiskError.
    """
    view, host, name = work.view, work.host, build.name
    log_path = work.project.logs / f"{name}.log"
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("w", encoding="utf-8", buffering=1) as log:

        def write(line: str) -> None:
            log.write(line + "\n")

        progress = BuildProgress(log=write, hide=host.hide)
        view.begin(name, "building", progress.summary)
        request = BuildRequest(
            context=build.context,
            dockerfile=build.image.dockerfile,
            arguments={**host.proxies, "BASE": build.base.reference},
            labels=build.labels(work.project.root),
            network=host.network,
            target=build.target,
        )
        image_id = error = ""
        for message in work.engine.build(request):
            if message.get("id") == "moby.buildkit.trace":
                steps = progress.feed(_decode(name, message["aux"]))
                for line in () if view.is_live else lines(steps):
                    view.say_once(f"{name}: {line}")  # BuildKit repeats a step that another build shares
            elif message.get("id") == "moby.image.id":
                image_id = message["aux"]["ID"]
            elif "error" in message:
                error = str(message["error"])
    if error or not image_id:
        raise _failure(name, progress, host.hide(error), log_path.relative_to(work.project.root))
    return image_id


def _decode(name: str, aux: str) -> Status:
    try:
        return decode(aux)
    except ValueError as error:
        raise EngineError(f"{name}: invalid progress message from Docker Engine: {error}") from error


def _failure(name: str, progress: BuildProgress, error: str, log: Path) -> BuilderError:
    step = progress.failed
    output = "\n".join(f"  | {line}" for line in step.tail) if step else ""
    if is_disk_full(f"{error}\n{output}"):
        return DiskError(f"{name}: the disk filled up during the build", hint=FREE_DISK)
    if not error or any(sign in error for sign in _INFRASTRUCTURE):
        return EngineError(
            f"{name}: {error or 'Docker Engine ended the build without an error message'}",
            hint=f"The image did not cause this: run the same command again. Full log: {log}",
        )
    where = short_name(step.vertex.name) if step else "the build"
    return BuildError(f"{name}: failed at {where}\n{output or '  | ' + error}", hint=f"Full log: {log}")
