"""Makes `os` layers from the `os` stage of a Dockerfile: by mmdebstrap, or by BuildKit where that cannot run.

mmdebstrap makes the Debian release and runs the stage's commands in it: there is one description of an operating
system, and the engine is not needed. All packages are locked. The store records the layer by the stage's inputs.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from pathlib import Path
from shlex import join, quote
from typing import BinaryIO, Literal

from builder.build import base, bootstrap, dockerfile, locked_packages
from builder.build.bootstrap import Bootstrap, BootstrapError
from builder.build.dockerfile import Build
from builder.build.os_commands import Command, commands
from builder.build.programs import Programs
from builder.build.work import Work
from builder.common import digest
from builder.common.errors import BuildError, UsageError
from builder.layers import known_layers, os_layer
from builder.layers.known_layers import KnownLayers
from builder.layers.os_layer import OsLayer
from builder.layers.store import Store
from builder.plan.plan import STEPS, PlannedImage

Way = Literal["auto", "mmdebstrap", "buildkit"]
ROW = "os-"  # begins the name of every stage in the view
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # as in containers of Debian's image


@dataclass(frozen=True, kw_only=True)
class OsStage(Build):
    """The `os` stage of an image: `commands` are those that mmdebstrap runs in `base`.

    Without commands, BuildKit builds the stage on `base`, an image of the engine.
    """

    target: str = "os"
    commands: tuple[Command, ...] = ()


def read(work: Work, images: Sequence[PlannedImage], way: Way) -> list[OsStage]:
    """The stages of images, one for each operating system, with the base images that BuildKit needs.

    Raises UsageError if mmdebstrap is required and cannot make one, and EngineError if there is no base image.
    """
    reason = "" if not images else "it was not chosen" if way == "buildkit" else _reason_not(work)
    if reason and way == "auto":
        work.view.say(f"operating systems: BuildKit builds them, mmdebstrap cannot: {reason}")
    ensure = cache(partial(base.ensure, work))
    stages = []
    for image in images:
        text = (work.project.root / image.dockerfile).read_text(encoding="utf-8")
        stage_commands = () if reason else commands(text, "os") or ()
        if way == "mmdebstrap" and not stage_commands:
            raise UsageError(
                f"{image.id}: mmdebstrap cannot make the operating system: "
                f"{reason or 'the stage has instructions other than RUN'}",
                hint="Leave out --os-layer, or use --os-layer buildkit.",
            )
        stage = OsStage(
            image=image,
            name=row(image),
            context=_context(image, work),
            base=base.bootstrapped(image.debian) if stage_commands else ensure(image.debian),
            commands=stage_commands,
        )
        stages.append(stage)
    return stages


def _reason_not(work: Work) -> str:
    """Why mmdebstrap cannot run here; empty if it can."""
    return work.host.hide(bootstrap.prepare(work.view.say))


def _context(image: PlannedImage, work: Work) -> bytes:
    host_files = work.host.files(image.debian, with_index=False)  # the stage does not use the package index
    return dockerfile.context(work.project.root, image, host_files)


def make(work: Work, store: Store, stage: OsStage, programs: Programs, known: KnownLayers) -> OsLayer:
    """Makes an `os` layer and records it. Raises BuildError, EngineError or DiskError.

    Raises BuildError too if it is not the one that is `known`.
    """
    image = stage.image
    make_tars = _by_mmdebstrap if stage.commands else _by_buildkit

    def attempt(current: Work, context: bytes) -> OsLayer:
        with make_tars(current, replace(stage, context=context), programs) as paths:
            return store.write(lambda out: _write(paths, stage, known, out))

    layer = locked_packages.build(work, image, stage.context, partial(_context, image), attempt)
    store.put_record(image.os, asdict(layer))
    return layer


def _write(paths: Sequence[Path], stage: OsStage, known: KnownLayers, out: BinaryIO) -> OsLayer:
    layer = replace(os_layer.write(paths, out), base=stage.base.name)
    if recorded := known.system(stage.image.os, layer.base):
        known_layers.check_system(stage.image.os, recorded, layer)
    return layer


def row(image: PlannedImage) -> str:
    """The stage's name in the view and of its log."""
    return f"{ROW}{image.debian}-py{image.cell.python}-{digest.short(image.os)[:6]}"


@contextmanager
def _by_buildkit(work: Work, stage: OsStage, _: Programs) -> Iterator[list[Path]]:
    """The tars of the layers, lowest first."""
    image_id = dockerfile.run(work, stage)
    try:
        with work.project.scratch() as scratch:
            archive = Path(scratch) / "saved.tar"
            with archive.open("wb") as out:
                work.engine.save(image_id, out)
            paths = os_layer.saved_layers(archive, archive.parent)
            archive.unlink()
            yield paths
    finally:
        work.engine.remove_image(image_id)


@contextmanager
def _by_mmdebstrap(work: Work, stage: OsStage, programs: Programs) -> Iterator[list[Path]]:
    """The tar of the file system."""
    image, name = stage.image, stage.name
    work.view.begin(name, "building")
    log = work.project.logs / f"{name}.log"
    with work.project.scratch() as scratch:
        folder = Path(scratch)
        _unpack(stage, folder / "context")
        hook = folder / "run-commands"
        hook.write_text(_script(stage.commands, folder / "context", work.host.proxies), encoding="utf-8")
        hook.chmod(0o700)
        context = folder / "context"
        request = Bootstrap(
            release=image.debian, steps=context / STEPS, log=log, lock=context / image.system.path, hook=hook
        )
        try:
            tar_path = bootstrap.run(request, work.host, folder, programs, lambda text: work.view.note(name, text))
        except BootstrapError as error:
            hint = f"Full log: {log.relative_to(work.project.root)}   Without mmdebstrap: --os-layer buildkit"
            raise BuildError(f"{name}: {error}", hint=hint) from error
        work.view.note(name, "compressing")
        yield [tar_path]


def _unpack(stage: OsStage, folder: Path) -> None:
    """Writes the part of the build context that mmdebstrap needs; other parts have links into an image."""
    needed = {STEPS, *(source for command in stage.commands for source in command.mounts.values())}
    with tarfile.open(fileobj=io.BytesIO(stage.context)) as tar:
        members = [
            member
            for member in tar
            if any(member.name == name or member.name.startswith(f"{name}/") for name in needed)
        ]
        tar.extractall(folder, members=members, filter="tar")  # "data" refuses absolute links, which a mount may have


def _script(stage_commands: Sequence[Command], context: Path, proxies: Mapping[str, str]) -> str:
    """A program for mmdebstrap that runs the commands in the new root folder, with copies of what they mount."""
    variables = [f"PATH={_PATH}", "HOME=/root", *(f"{key}={value}" for key, value in sorted(proxies.items()))]
    lines = ["#!/bin/sh", "set -eu"]
    for command in stage_commands:
        targets = [f'"$1"{quote(target)}' for target in command.mounts]
        for source, target in zip(command.mounts.values(), targets, strict=True):
            path = context / source
            is_folder = path.is_dir()
            lines += [f"mkdir -p {target}" if is_folder else f'mkdir -p "$(dirname {target})"']
            lines += [f"cp -R {quote(str(path))}{'/.' if is_folder else ''} {target}"]
        lines += [f'chroot "$1" {join(["env", "-i", *variables, "/bin/sh", "-c", command.text])}']
        lines += [f"rm -rf {' '.join(targets)}"] if targets else []
    return "\n".join(lines) + "\n"
