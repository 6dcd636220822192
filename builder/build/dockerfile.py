"""Builds images from their rendered Dockerfiles with `docker buildx build`: slower than assembling, easy to follow."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from builder.build.operating_systems import SystemLayers
from builder.build.programs import Program, Programs, last_lines
from builder.common.errors import FREE_DISK, BuildError, DiskError, EngineError
from builder.common.files import files_below
from builder.engine.model import LoadedImage, is_disk_full
from builder.index.host import FOLDER
from builder.index.logins import netrc_of
from builder.matrix.project import Project
from builder.matrix.tags import PLAN_LABEL
from builder.plan.plan import COMMON_INPUTS, PlannedImage
from builder.plan.settings import built_labels

TIMEOUT_S = 2 * 3600
_TAIL = 40  # lines of output in a message: buildx repeats ten lines of the failed step, and the Dockerfile's
_STEP = re.compile(r"#\d+ (\[(?!internal).*)")  # of buildx's plain progress


class DockerfileBuilder:
    """Builds each image from its whole Dockerfile. BuildKit's cache decides what must be built."""

    def __init__(self, systems: SystemLayers) -> None:
        self._run, self._archives, self._runner = systems.run, systems.archives, systems.runner
        self._programs = Programs()

    def find(self, image: PlannedImage) -> LoadedImage | None:
        """None: only BuildKit can find out, when it builds the image."""

    def start(self, images: Sequence[PlannedImage]) -> None:
        """Raises EngineError without the `docker` command."""
        if not shutil.which("docker"):
            raise EngineError(
                "--method dockerfile needs the `docker` command and its plugin buildx",
                hint="Install both. On Debian, the packages are docker-cli and docker-buildx.",
            )

    def as_ready(self, images: Sequence[PlannedImage]) -> Iterator[PlannedImage]:
        """All of them: they share nothing but BuildKit's cache."""
        yield from images

    def build(self, image: PlannedImage) -> LoadedImage:
        """Builds the image in a copy of the files that its Dockerfile reads, with the settings of the build host.

        Raises BuildError with the last lines of the output, DiskError, or EngineError for another architecture.
        """
        run, root = self._run, self._run.project.root
        if image.cell.arch != (arch := run.engine.info().arch):
            raise EngineError(
                f"{image.id}: --method dockerfile can make images only for {arch} on this machine",
                hint=f"Leave out --method, or run this on a machine for {image.cell.arch}.",
            )
        host = run.host.for_release(run.project.matrix.debian[image.debian])
        base = self._runner.base_image(image.debian)
        with run.project.scratch() as scratch:
            context, id_file = Path(scratch) / "context", Path(scratch) / "id"
            for name, path in context_files(run.project, image).items():
                copy = context / name
                copy.parent.mkdir(parents=True, exist_ok=True)
                # The copy has the time of now: buildx sends a file again only if its time or its size differs. With a
                # constant time, an image got the wheel list of another lock, which had the same size.
                shutil.copyfile(path, copy, follow_symlinks=False)
                if not copy.is_symlink():  # COPY keeps the mode
                    copy.chmod(0o755 if path.stat().st_mode & 0o100 else 0o644)
            for name, content in host.files(image.debian).items():
                (context / name).write_bytes(content)
            # Where the assembler looks for locked Debian packages.
            pools = "".join(f"{pool}\n" for _, pool in self._archives.pools(image.os_lock))
            (context / FOLDER / "pools").write_text(pools, encoding="ascii")

            command = ["docker", "buildx", "build", "--builder=default", "--progress=plain", "--load"]
            command += ["--provenance=false", f"--iidfile={id_file}", f"--file={context / image.dockerfile}"]
            # Proxies by name: their values, which may have passwords, are read from the environment.
            command += [f"--build-arg={argument}" for argument in (f"BASE={base}", *host.proxies)]
            command += [f"--label={name}={value}" for name, value in built_labels(image.plan, "").items() if value]
            if host.network:
                command.append(f"--network={host.network}")
            # The engine of this run, with its own buildx builder, even if another one is selected.
            environment = {**os.environ, **run.engine.address.variables, **host.proxies}
            environment.pop("BUILDX_BUILDER", None)
            if logins := netrc_of(
                host.index.of(name) for name in sorted({wheel_list.index for wheel_list in image.lists}) if name
            ):
                command.append("--secret=id=netrc,env=GPU_IMAGES_NETRC")
                environment["GPU_IMAGES_NETRC"] = logins  # on no disk

            def on_line(line: str) -> str:
                line = host.hide(line)
                if step := _STEP.match(line):
                    run.view.note(image.id, re.sub(r"--mount=\S+\s*", "", step[1]))
                return line

            run.view.begin(image.id, "building")
            present = {info.id for info in run.engine.images(f"{PLAN_LABEL}={image.plan}")}
            log = run.project.logs / f"{image.id}.log"
            program = Program(
                command=[*command, str(context)], environment=environment, folder=context, log=log, timeout_s=TIMEOUT_S
            )
            if self._programs.run(program, on_line):
                run.engine.check()  # buildx also fails if the engine has stopped
                output = last_lines(log, _TAIL)
                if is_disk_full(output):
                    raise DiskError(f"{image.id}: the disk filled up during the build", hint=FREE_DISK)
                hint = f"Full log: {log.relative_to(root)}"
                raise BuildError(f"{image.id}: docker buildx build failed\n{output}", hint=hint)
            image_id = id_file.read_text(encoding="ascii").strip()
        return LoadedImage(id=image_id, digest=image_id, origin="present" if image_id in present else "built")

    def record_tagged(self, image: PlannedImage) -> None:
        """Does nothing: the store does not have the image."""

    def close(self) -> None:
        self._programs.stop()
        self._runner.stop()


def context_files(project: Project, image: PlannedImage) -> dict[str, Path]:
    """The image's Dockerfile and the files that it reads, by their names in the build context."""
    lists = [wheel_list.path for wheel_list in image.lists]
    lists += [
        f"{wheel_list.folder}/{wheel.file}"
        for wheel_list in image.lists
        if wheel_list.folder
        for wheel in wheel_list.wheels
    ]
    names = (
        *COMMON_INPUTS,
        image.dockerfile,
        image.os_request.path,
        f"{image.folder}/constraints.txt",
        *lists,
    )
    files = {name: path for name in names if (path := project.path(name)).is_file()}
    for component in image.components:
        base = project.base(f"templates/{component}")
        files |= {path.relative_to(base).as_posix(): path for path in files_below(base / f"templates/{component}")}
    return files
