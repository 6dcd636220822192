"""Builds images from their rendered Dockerfiles with `docker buildx build`: slower than assembling, easy to follow."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from builder.build import disk
from builder.build.layer_lookup import LayerLookup
from builder.build.operating_systems import Mmdebstrap
from builder.build.programs import Program, Programs
from builder.build.work import ImageProvider, LoadedImage, RunContext, built_id, record_built
from builder.common.errors import FREE_DISK, BuildError, DiskError, EngineError, choose_again
from builder.common.files import digest_of_data, digest_of_file, files_below, is_digest
from builder.engine.model import is_disk_full
from builder.index.host import Host
from builder.index.logins import netrc_of
from builder.matrix.schema import NO_SNAPSHOT
from builder.matrix.tags import PLAN_LABEL
from builder.plan.plan import COMMON_INPUTS, PlannedImage
from builder.plan.settings import built_labels

TIMEOUT_S = 2 * 3600
BUILT = "built"  # the stage with wheels that were built from source, and their folder
_TAIL = 15  # lines of output in a message
_INSTALL = "Install both. On Debian, the packages are docker-cli and docker-buildx."
# Errors of the machine or the network, not of the image.
_INFRASTRUCTURE = (
    "failed to resolve source metadata",
    "connection reset",
    "error reading from server",
    "rpc error",
)
# Errors of apt, and lines that templates/steps/packages.sh prints, in the output of a step.
_OF_PACKAGES = re.compile(
    r"^\s*\|.*(no installation candidate|version .* was not found|unable to locate package|\be: failed to fetch"
    r"|hash sum mismatch|held broken packages|unmet dependencies|does not have a release file|are not the locked ones"
    r"|[<>] \S+ \S+ (amd64|arm64|all) [0-9a-f]{64})",
    re.MULTILINE | re.IGNORECASE,
)
_GONE_WHEEL = re.compile(r"error: Failed to download `([\w.-]+)==.*404 Not Found", re.DOTALL)  # of uv
_STEP = re.compile(r"#\d+ (\[(?!internal).*)")  # of buildx's plain progress
_FAILED = re.compile(r"^#(\d+) ERROR", re.MULTILINE)


class DockerfileBuilder(ImageProvider):
    """Builds each image from its whole Dockerfile."""

    assembles = False

    def __init__(
        self,
        work: RunContext,
        programs: Programs | None = None,
        mmdebstrap: Mmdebstrap | None = None,
        lookup: LayerLookup | None = None,
    ) -> None:
        """`lookup` finds wheels that were built from source; without it, the images have none."""
        self._work = work
        self._lookup = lookup
        self._programs = programs or Programs()
        self._mmdebstrap = mmdebstrap or Mmdebstrap(work)
        self._keys: dict[str, str] = {}

    def find(self, image: PlannedImage) -> LoadedImage | None:
        """The image that this checkout built for exactly this plan, if the engine still has it.

        Reads the record of this checkout, not the labels: an image derived from ours inherits them.
        """
        root = self._work.project.root
        image_id = built_id(self._work.project.state, _key(image, root, context_files(root, image)))
        info = self._work.engine.image(image_id) if is_digest(image_id) else None
        is_there = info is not None and info.labels.get(PLAN_LABEL) == image.digest
        return LoadedImage(id=image_id, digest=image_id) if is_there else None

    def systems_to_make(self, images: Sequence[PlannedImage]) -> list[PlannedImage]:
        """One image for each operating system of the images that the engine lacks."""
        return list({image.os_inputs: image for image in images if not self.find(image)}.values())

    def prepare(self, images: Sequence[PlannedImage]) -> None:
        """Raises DiskError, or EngineError without the `docker` command."""
        if not shutil.which("docker"):
            raise EngineError(
                "--method dockerfile needs the `docker` command and its plugin buildx",
                hint=_INSTALL,
            )
        disk.check_dockerfile(self._work, images)
        root = self._work.project.root
        self._keys = {image.id: _key(image, root, context_files(root, image)) for image in images}

    def build(self, image: PlannedImage) -> LoadedImage:
        """Builds `image`.

        Raises BuildError with the last lines of the output, EngineError or DiskError.
        """
        with self._work.project.scratch() as scratch:
            context = Path(scratch) / "context"
            root = self._work.project.root
            names = [path.relative_to(root) for path in context_files(root, image)]
            for name in names:
                (context / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / name, context / name, follow_symlinks=False)
                # COPY keeps the mode. The time must be new: buildx sends a file again only if its time or size differs.
                # With a constant time, an image got the wheel list of another lock, which had the same size.
                if not (context / name).is_symlink():
                    (context / name).chmod(0o755 if (root / name).stat().st_mode & 0o100 else 0o644)
            if _key(image, context, [context / name for name in names]) != self._keys[image.id]:
                raise BuildError(
                    f"{image.id}: files of the checkout changed during the build", hint="Run the same command again."
                )
            built = Path(scratch) / BUILT
            built.mkdir()
            if self._lookup and (from_source := [wheel for wheel in image.wheels if wheel.source]):
                with self._lookup.store.used():
                    for wheel in from_source:
                        shutil.copyfile(self._lookup.built_wheel(wheel), built / wheel.file)
            base = self._mmdebstrap.base_image(image.debian, image.cell.arch)
            image_id = self._run_with_archives(image, base, Path(scratch))
        record_built(self._work.project.state, self._keys[image.id], image_id)
        return LoadedImage(id=image_id, digest=image_id, origin="built")

    def close(self) -> None:
        self._programs.stop()
        self._mmdebstrap.stop()

    def _run_with_archives(self, image: PlannedImage, base: str, scratch: Path) -> str:
        """Runs buildx, whose apt uses this machine's archives; returns the id of the image.

        If that fails because of packages, runs it with the archives that matrix.yaml names: `archive`, then `snapshot`
        at the time of the lock. Raises the errors of `_run`, with a hint.
        """
        work, debian = self._work, self._work.project.matrix.debian[image.debian]
        hosts = {"": work.host}
        if debian.archive:
            hosts["archive"] = work.host.for_release(debian)
        if debian.snapshot not in ("", NO_SNAPSHOT):
            hosts["snapshot archive"] = work.host.with_snapshot(debian.snapshot, image.os_lock.time)
        failure: BuildError | None = None
        for name, host in hosts.items():
            if name:
                work.view.say(f"{image.id}: apt failed; trying again with the {name} of {image.debian}")
            try:
                return self._run(image, host, base, scratch)
            except BuildError as error:
                if not _OF_PACKAGES.search(str(error)):
                    raise
                failure = error
        assert failure
        hint = f"If the archives no longer have a locked package, lock the current versions: builder refresh {image.id}"
        raise BuildError(str(failure), hint=f"{hint}   {failure.hint}") from failure.__cause__

    def _run(self, image: PlannedImage, host: Host, base: str, scratch: Path) -> str:
        """Runs buildx in the folder `context` of `scratch`, and returns the id of the image."""
        work, name, context, id_file = self._work, image.id, scratch / "context", scratch / "id"
        arch = image.cell.arch
        for path, content in host.files(image.debian).items():
            (context / path).write_bytes(content)
        logins = netrc_of(host.index.of(index) for index in sorted({item.index for item in image.lists}) if index)
        labels = {label: value for label, value in built_labels(image.digest, "").items() if value}
        # The values of proxies, which may have passwords, are read from the environment.
        arguments = [f"BASE={base}", *host.proxies]
        log = work.project.logs / f"{name}.log"

        def on_line(line: str) -> str:
            line = host.hide(line)
            if step := _STEP.match(line):
                work.view.note(name, short_name(step[1]))
            return line

        # The engine of this run, with its own buildx builder, even if another one is selected.
        environment = {**os.environ, **work.engine.address.variables, **host.proxies}
        if logins:
            environment["GPU_IMAGES_NETRC"] = logins  # on no disk
        environment.pop("BUILDX_BUILDER", None)
        work.view.begin(name, "building")
        status = self._programs.run(
            Program(
                command=[
                    *("docker", "buildx", "build", "--builder=default", "--progress=plain", "--load"),
                    "--provenance=false",
                    *([f"--platform=linux/{arch}"] if arch != work.engine.info().arch else []),
                    *(f"--build-arg={argument}" for argument in arguments),
                    *(f"--label={label}={value}" for label, value in labels.items()),
                    *([f"--network={host.network}"] if host.network else []),
                    *(
                        [f"--build-context={BUILT}={scratch / BUILT}"]
                        if any(item.is_built for item in image.lists)
                        else []
                    ),
                    *(["--secret=id=netrc,env=GPU_IMAGES_NETRC"] if logins else []),
                    *(f"--iidfile={id_file}", f"--file={context / image.dockerfile}", str(context)),
                ],
                environment=environment,
                folder=context,
                log=log,
                timeout_s=TIMEOUT_S,
            ),
            on_line,
        )
        if status == 0:
            return id_file.read_text(encoding="ascii").strip()
        work.engine.check()  # buildx also fails if the engine has stopped
        output = "\n".join(f"  | {line}" for line in _failed_output(log.read_text(encoding="utf-8")))
        hint = f"Full log: {log.relative_to(work.project.root)}"
        if "is not a docker command" in output:
            raise EngineError(f"{name}: Docker's plugin buildx is not installed", hint=_INSTALL)
        if is_disk_full(output):
            raise DiskError(f"{name}: the disk filled up during the build", hint=FREE_DISK)
        if any(sign in output for sign in _INFRASTRUCTURE):
            hint = f"The image did not cause this: run the same command again. {hint}"
            raise EngineError(f"{name}: docker buildx build failed\n{output}", hint=hint)
        if wheel := _GONE_WHEEL.search(output):
            hint = f"The index no longer has this file. {choose_again(wheel[1], [name])}   {hint}"
        raise BuildError(f"{name}: docker buildx build failed\n{output}", hint=hint)


def _failed_output(log: str) -> list[str]:
    """The end of the failed step's output in buildx's plain progress, and the error that buildx ends with.

    Between the two, after a line of dashes, buildx repeats ten lines of the step and quotes the Dockerfile. Steps of
    other stages run at the same time.
    """
    progress, _, summary = log.partition("\n------\n")
    failed = _FAILED.search(progress)
    lines = re.findall(rf"^#{failed[1]} [0-9.]+ (.*)", progress, re.MULTILINE) if failed else progress.splitlines()
    errors = [line for line in summary.splitlines() if line.startswith("ERROR")]
    return [*[line.rstrip() for line in lines if line.strip()][-_TAIL:], *errors]


def _key(image: PlannedImage, root: Path, files: Sequence[Path]) -> str:
    """Digest of the plan and of every file that the Dockerfile reads."""
    contents = {path.relative_to(root).as_posix(): digest_of_file(path) for path in files}
    return digest_of_data([image.digest, contents])


def context_files(root: Path, image: PlannedImage) -> list[Path]:
    """The image's Dockerfile and the files that it reads."""
    lists = [wheel_list.path for wheel_list in image.lists]
    names = (*COMMON_INPUTS, image.dockerfile, image.os_request.path, f"{image.folder}/constraints.txt", *lists)
    files = [root / name for name in names if (root / name).is_file()]
    for component in image.components:
        files += files_below(root / f"templates/{component}")
    return sorted(set(files))


def short_name(step: str) -> str:
    """A step of buildx in a few words: a rendered RUN line is long and begins with its mounts."""
    stage, _, command = step.partition("] ")
    if wheels := re.search(r"source=images/[^/,]+/(?:wheels-)?([a-z0-9-]+)\.txt", command):
        return f"{stage}] install {wheels[1]} wheels"
    if "/mnt/steps/os.sh" in command:
        return f"{stage}] install Debian packages"
    return " ".join(re.sub(r"--mount=\S+\s*", "", step).split())
