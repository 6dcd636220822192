"""Builds wheels from source: an sdist, a git commit, or a folder of the checkout, in a container without the network.

The container is one of an image of the group, with its framework and compilers. The source and the wheels that the
build needs are fetched before, by hash; this machine runs nothing of the package. The wheel is kept in the store, named
by group and package.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import posixpath
import re
import shutil
import signal
import tarfile
import tomllib
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, cast

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import parse_wheel_filename
from packaging.version import Version

from builder.build.assemble import PYTHON, Assembler
from builder.build.layer_lookup import LayerLookup
from builder.common import git
from builder.common.console import View
from builder.common.errors import BuildError, FetchError, StaleError, UsageError
from builder.common.files import digest_of_data, digests_of_tree, files_below
from builder.common.text import size
from builder.engine.client import Engine
from builder.engine.run import Run
from builder.host import Host
from builder.index.download import Fetcher
from builder.index.releases import parse_metadata
from builder.index.wheels import LONGEST, PLATFORMS, BuiltWheel, LockedWheel, Sdist, tag_ranks
from builder.layers import wheel_zip
from builder.layers.blobs import wheel_file
from builder.layers.store import Store
from builder.layers.wheel_zip import WheelError
from builder.lock import lockfile
from builder.lock.sources import WheelBuild
from builder.matrix.project import Project
from builder.plan import layer_order, plan

# 73 files of flash-attn take hours on 2 cores. A build that hangs ends before: see templates/build_wheel.py.
TIMEOUT_S = 24 * 3600
MOST_BYTES = 2_000_000_000  # of a source, unpacked, and of a commit as git sends it
LARGEST_SETTINGS = 1 << 20  # bytes of a pyproject.toml
LARGEST_LOG = 64 << 20  # characters
MOST_PROCESSES = 4096  # of a build
GIT_S = 1800  # for fetching a commit
DEFAULT_REQUIREMENTS = ["setuptools", "wheel"]  # without pyproject.toml. Source: PEP 517, PEP 518
_TAIL = 15  # lines of output in a message
_INPUTS, _SOURCE = "mnt/build", "mnt/build/source"
_PROGRAM, _RESULT = "templates/build_wheel.py", "/tmp/build/result.tar"  # noqa: S108  in the container
# A line with the progress of ninja (`[3/73]`) or CMake (`[ 12%]`). pip indents the output of a build.
_STEP = re.compile(r"\s*\[ *[0-9]+(/[0-9]+|%)\] ")
NOTE_S = 60  # between lines of progress without a terminal
_NOTE = 100  # characters: a command of nvcc has 2000
_KILLED = re.compile(r"(?im)died due to signal 9|killed signal|^\W*killed$")  # nvcc, g++, a shell
_PIPS_NOTES = "error: subprocess-exited-with-error"  # below it, pip writes 15 lines that do not name the reason
# Of gcc, `file:1:2: error: ...`, and of nvcc, `file(1): error: ...` or `nvcc fatal   : ...`.
_COMPILER_ERROR = re.compile(r"(?m)^.*(?:(?::[0-9]+|\([0-9]+\)): (?:fatal )?error: |nvcc fatal +: ).*$")
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")
_NO_NETWORK = re.compile(
    r"(?i)name resolution|network is unreachable|could not resolve|name or service not known|no matching distribution"
)


class SourceBuilder:
    """Builds wheels in one run. `connect` connects to the engine, `scratch` is a folder for files of this run."""

    def __init__(
        self,
        project: Project,
        host: Host,
        view: View,
        store: Store,
        scratch: Path,
        *,
        connect: Callable[[], Engine] = Engine.connect,
        new_fetcher: Callable[..., Fetcher] = Fetcher,
    ) -> None:
        self._project, self._host, self._view, self._store, self._scratch = project, host, view, store, scratch
        self._connect = connect
        self._new_fetcher = new_fetcher
        self._archives: dict[str, Path] = {}

    @cached_property
    def _run(self) -> Run:
        return Run(
            checkout=self._project, host=self._host, store=self._store, view=self._view, connected=self._connect()
        )

    @cached_property
    def _lookup(self) -> LayerLookup:
        return LayerLookup.of(self._run)

    def requirements(self, build: WheelBuild) -> list[str]:
        """The requirements of a build, in the pyproject.toml of its source. Raises BuildError, FetchError."""
        try:
            with tarfile.open(self._archive(build)) as tar:
                if f"{_SOURCE}/pyproject.toml" not in tar.getnames():
                    return list(DEFAULT_REQUIREMENTS)
                file = tar.extractfile(f"{_SOURCE}/pyproject.toml")
                text = file.read(LARGEST_SETTINGS) if file else b""
            system = tomllib.loads(text.decode()).get("build-system", {"requires": DEFAULT_REQUIREMENTS})
            if not isinstance(system["requires"], list):
                raise TypeError("`requires` is not a list")
            requirements = [Requirement(each) for each in system["requires"]]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError, InvalidRequirement) as error:
            raise BuildError(f"{build.name}: its pyproject.toml has no valid [build-system]: {error}") from error
        if direct := [each.name for each in requirements if each.url]:
            raise BuildError(f"{build.name}: its build needs {direct[0]} from an address, not from an index")
        return list(map(str, requirements))

    def built(self, wheel: LockedWheel, group: str) -> BuiltWheel | None:
        """A wheel that was built before, if the store or a registry has it."""
        with self._store.used():
            try:
                path = self._lookup.built_wheel(wheel)
            except FetchError:
                return None
            self._store.name_file(f"wheels/{group}/{wheel.name}", wheel_file(wheel))
            return BuiltWheel(wheel=wheel, metadata=_metadata(wheel.file, path))

    def build(self, build: WheelBuild, wheels: Sequence[LockedWheel]) -> BuiltWheel:
        """Builds a wheel with `wheels`, besides those of the image, and keeps it in the store.

        Takes the one that an earlier run built with the same inputs, unless that is to be compared with the locked one.
        Raises BuildError with the last lines of the output, FetchError, EngineError, DiskError.
        """
        inputs_key = self._inputs(build, wheels)
        record = None if build.locked else self._store.get_record(inputs_key)
        # Without it, a failure of another package after a build of hours would repeat that: no lock has the wheel yet.
        if record and (built := self.built(LockedWheel(**record["wheel"]), build.cell.group)):
            self._view.say(f"{build.cell.group}: an earlier run built {built.wheel.file}")
            return built
        run, store, root = self._run, self._store, self._project.root
        log = self._project.logs / f"source-{build.cell.group}-{build.name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        archive, inputs, result = self._archive(build), self._scratch / "inputs.tar", self._scratch / "result.tar"
        with store.used():
            fetcher = self._new_fetcher(run.host.index, store.downloads, built=self._lookup.built_wheel)
            shutil.copyfile(archive, inputs)
            with tarfile.open(inputs, "a") as tar:
                for wheel in wheels:
                    tar.add(fetcher.fetch(wheel), f"{_INPUTS}/wheels/{wheel.file}")
                    fetcher.drop(wheel)
                tar.add(self._project.path(_PROGRAM), f"{_INPUTS}/build_wheel.py")
            image_id = self._image(build)

            run.view.begin(build.name, f"building, log: {log.relative_to(root)}")
            state, note = "failed", ""
            try:
                with run.view.live():
                    self._run_build(build, image_id, inputs, result, log)
                built = self._keep(build, result, inputs_key)
                state, note = "done", f"{built.wheel.file}, {size(built.wheel.size)}"
            finally:
                run.view.end(build.name, state, note)
            return built

    def _run_build(self, build: WheelBuild, image_id: str, inputs: Path, result: Path, log: Path) -> None:
        """Runs a build in a container, which writes the tar `result`. Raises BuildError with its last lines."""
        run, root = self._run, self._project.root
        tail: deque[str] = deque(maxlen=_TAIL)
        has_steps = has_ended = False
        # People read the log while the build runs.
        with (
            log.open("w", encoding="utf-8", buffering=1) as log_file,
            inputs.open("rb") as files,
            result.open("wb") as out,
        ):

            def on_line(line: str) -> None:
                nonlocal has_steps, has_ended
                if log_file.tell() < LARGEST_LOG:
                    log_file.write(line)
                has_ended |= line.strip() == _PIPS_NOTES
                if not has_ended:
                    tail.append(f"  | {line.rstrip()}")
                is_step = bool(_STEP.match(line))
                has_steps |= is_step
                if is_step or not has_steps:
                    run.view.note(build.name, line.strip()[:_NOTE], pause_s=NOTE_S)

            status = run.engine.run_to_file(
                image_id,
                checkout=str(root),
                entrypoint=[PYTHON, "-B"],
                command=[f"/{_INPUTS}/build_wheel.py"],
                files=files,
                result=_RESULT,
                out=out,
                on_line=on_line,
                timeout_s=TIMEOUT_S,
                most_bytes=MOST_BYTES,
                network_mode="none",
                healthcheck={"test": ["NONE"]},  # that of the image would count as work of the build
                pids_limit=MOST_PROCESSES,
                cap_drop=["ALL"],
                security_opt=["no-new-privileges"],
                environment={
                    "PYTHONHASHSEED": "0", "SOURCE_DATE_EPOCH": str(layer_order.MTIME), "TZ": "UTC",
                    "LC_ALL": "C.UTF-8", **build.recipe.env,
                },
            )  # fmt: skip
        if status:
            path, text = log.relative_to(root), log.read_text(encoding="utf-8", errors="replace")
            raise _failure(build, status, "\n".join(tail), text, path)

    def _inputs(self, build: WheelBuild, wheels: Sequence[LockedWheel]) -> str:
        """The digest of what determines a wheel."""
        image = lockfile.of_cell(self._project.matrix, build.cell, build.lock).wheels
        return digest_of_data([
            build.name, build.source, build.index, build.recipe.model_dump(), build.cell.id,
            [wheel.sha256 for wheel in image], [wheel.sha256 for wheel in wheels],
            self._project.path(_PROGRAM).read_text(encoding="utf-8"),
        ])  # fmt: skip

    def _keep(self, build: WheelBuild, result: Path, inputs: str) -> BuiltWheel:
        """Checks the wheel in the tar that the container wrote, and puts it into the store. Raises BuildError."""

        def refused(reason: str) -> BuildError:
            return BuildError(f"{build.name}: its build gave no usable wheel: {reason}")

        try:
            with tarfile.open(result) as tar, self._store.new_blob() as blob:
                member = tar.next()
                content = tar.extractfile(member) if member else None
                if not member or not content:
                    raise refused("no file")
                if member.issparse() or member.size > MOST_BYTES or len(member.name) > LONGEST:
                    raise refused("its file is sparse, or its size or name is excessive")
                hash_ = hashlib.sha256()
                while piece := content.read(1 << 20):
                    blob.file.write(piece)
                    hash_.update(piece)
                blob.digest = f"sha256:{hash_.hexdigest()}"
            file, path = member.name, self._store.path(blob.digest)
            name, version, _, tags = parse_wheel_filename(file)
            metadata = _metadata(file, path)
            about = parse_metadata(file, metadata)
            wheel = LockedWheel(
                name=name, version=str(version), file=file, size=path.stat().st_size,
                sha256=blob.digest.removeprefix("sha256:"), index=build.index, source=build.source,
            )  # fmt: skip
        except (tarfile.TarError, zipfile.BadZipFile, zlib.error, ValueError, FetchError) as error:
            raise refused(str(error)) from error
        if (name, version) != (build.name, Version(about.version)) or about.name != name:
            raise refused(f"{file} is {about.name} {about.version}, not {build.name}")
        debian = self._project.matrix.debian[self._project.matrix.python[build.cell.python].debian]
        platform = PLATFORMS[build.cell.arch]
        if tag_ranks(build.cell.python, debian.glibc, platform).keys().isdisjoint(tags):
            raise refused(f"{file} is not for Python {build.cell.python} of the image on {platform}")
        self._store.put_record(inputs, {"digest": blob.digest, "size": wheel.size, "wheel": asdict(wheel)})
        if build.locked and build.locked.sha256 != wheel.sha256:
            again = f"builder lock --upgrade-package {build.name} {build.cell.id}"
            raise BuildError(
                f"{build.cell.group}: the source of {build.name} gives another wheel than the locked one: {file} with "
                f"SHA-256 {wheel.sha256}, the lock has {build.locked.file} with {build.locked.sha256}",
                hint="The build is not reproducible. Take the locked wheel from a registry (docs/matrix.md), or lock a "
                f"new one: {again} && builder render",
            )
        # The next wheel of this package for the group gets the name.
        self._store.name_file(f"wheels/{build.cell.group}/{wheel.name}", wheel_file(wheel))
        return BuiltWheel(wheel=wheel, metadata=metadata)

    def _image(self, build: WheelBuild) -> str:
        """The id of the image to build in, which is assembled if the engine lacks it."""
        planned, run = plan.make_plan(self._project, [build.cell], {build.cell.group: build.lock}), self._run
        if planned.unlocked:
            raise StaleError(
                f"{build.name} is built in the image of {build.cell.id}, whose operating system is not locked",
                hint=f"Lock it too: builder lock {build.cell.id}",
            )
        [image] = planned.images
        if error := run.engine.info().foreign_error(image.cell.arch):
            raise error
        assembler = Assembler(run, lookup=self._lookup)
        with run.view.live(), closing(assembler):
            if loaded := assembler.find(image):
                return loaded.id
            assembler.start([image])
            loaded = assembler.build(image)
            run.view.end(image.id, "done", f"{loaded.origin}, for the build")
            return loaded.id

    # ---- sources

    def _archive(self, build: WheelBuild) -> Path:
        """A tar of the source, as it is put into the container. Raises FetchError, BuildError."""
        if build.source not in self._archives:
            path = self._scratch / f"source-{len(self._archives)}.tar"
            with tarfile.open(path, "w") as tar:
                if build.source.startswith("git+"):
                    self._add_commit(build, tar)
                elif build.source.startswith("./"):
                    self._add_folder(build, tar)
                else:
                    self._add_sdist(build, tar)
            self._archives[build.source] = path
        return self._archives[build.source]

    def _add_sdist(self, build: WheelBuild, tar: tarfile.TarFile) -> None:
        file, _, sha256 = build.source.partition("#sha256=")
        sdist = Sdist(name=build.name, file=file, sha256=sha256, index=build.index)
        self._store.prepare()
        fetcher = self._new_fetcher(self._host.index, self._store.downloads)
        path = fetcher.fetch(sdist)
        try:
            with gzip.open(path) as content:
                copy_source(file, cast("BinaryIO", content), tar, strip=1)
        finally:
            fetcher.drop(sdist)

    def _add_commit(self, build: WheelBuild, tar: tarfile.TarFile) -> None:
        address, _, commit = build.source.removeprefix("git+").rpartition("@")
        repository = self._scratch / f"git-{commit}"
        repository.mkdir(exist_ok=True)
        try:
            git.run_git(repository, "init", "--quiet", "--bare")
            fetch = ["fetch", "--quiet", "--depth=1", "--no-tags", address, commit]
            git.run_git(repository, *fetch, timeout_s=GIT_S, most_bytes=MOST_BYTES)
            git.run_git(repository, "cat-file", "-e", f"{commit}^{{commit}}")
            if git.run_git(repository, "ls-tree", "--name-only", commit, ".gitmodules").strip():
                raise BuildError(
                    f"{build.name}: the commit has submodules, which are not fetched",
                    hint="Use the sdist, or a repository that has the files.",
                )
            with git.archive(repository, commit) as content:
                copy_source(build.name, content, tar, strip=0)
        except UsageError as error:
            raise FetchError(
                f"{build.name}: cannot fetch commit {commit[:12]}: {self._host.hide(str(error))}",
                hint=f"Check sources.{build.name} of matrix.yaml, and git's own settings for logins.",
            ) from error

    def _add_folder(self, build: WheelBuild, tar: tarfile.TarFile) -> None:
        name, _, digest = build.source.removeprefix("./").partition("#sha256=")
        folder = self._project.root / name
        for path in files_below(folder):
            item = tar.gettarinfo(path, f"{_SOURCE}/{path.relative_to(folder).as_posix()}")
            with path.open("rb") if item.isreg() else io.BytesIO() as content:
                tar.addfile(_cleaned(item), content)
        if digest_of_data(digests_of_tree(folder, folder)) != f"sha256:{digest}":
            raise StaleError(f"{name} changed while {build.name} was built", hint="Run the same command again.")


def _failure(build: WheelBuild, status: int, output: str, text: str, log: Path) -> BuildError:
    """The error of a build that ended with `status`; `output` are its last lines, `text` is all that is in the log."""
    how, place = f"status {status}", f"sources.{build.name}"
    if status == 128 + signal.SIGKILL:
        how += f": it was killed, after {TIMEOUT_S // 3600} hours or because memory ran out"
    if error := _COMPILER_ERROR.search(text):
        # The first one. Thousands of lines can follow it, and the last ones are a traceback of torch.
        output = f"  | {error[0].strip()}\n  | ...\n{output}"
    hint = f"Full log: {log}"
    if _KILLED.search(text):
        hint = (
            "A program of the build was killed; usually, memory ran out. Let fewer run at the same time, with MAX_JOBS "
            f"or another variable that the package reads, in {place}.env of matrix.yaml. {hint}"
        )
    elif module := _NO_MODULE.search(output):
        hint = f"The build needs the module {module[1]}. List its package in {place}.requires of matrix.yaml. {hint}"
    elif _NO_NETWORK.search(text):
        hint = f"A build has no network. If it misses packages, list them in {place}.requires of matrix.yaml. {hint}"
    return BuildError(f"{build.cell.group}: {build.name} cannot be built ({how})\n{output}", hint=hint)


class _Limited(io.RawIOBase):
    """A file of at most MOST_BYTES: an archive that unpacks to more raises BuildError."""

    def __init__(self, name: str, file: BinaryIO) -> None:
        self._name, self._file, self._left = name, file, MOST_BYTES

    def read(self, size: int = -1) -> bytes:
        data = self._file.read(min(size, 1 << 20) if size >= 0 else 1 << 20)
        self._left -= len(data)
        if self._left < 0:
            raise BuildError(f"{self._name}: unpacks to more than {MOST_BYTES // 10**9} GB")
        return data


def copy_source(name: str, content: BinaryIO, out: tarfile.TarFile, *, strip: int) -> None:
    """Copies a tar to the folder of the source in `out`; `strip` folders are removed from its paths.

    Nothing is unpacked on this machine. Raises BuildError for paths and links out of the source, other kinds of files,
    and an archive that is damaged or too large.
    """

    def refused(reason: str) -> BuildError:
        return BuildError(f"{name}: {reason}", hint="Do not use this source until the reason is known.")

    try:
        with tarfile.open(fileobj=_Limited(name, content), mode="r|") as source:
            total = 0
            for member in source:
                total += member.size
                if member.issparse():  # a few bytes of one can be terabytes
                    raise refused(f"{member.name!r} is a sparse file")
                if total > MOST_BYTES:
                    raise refused(f"it unpacks to more than {MOST_BYTES // 10**9} GB")
                path = posixpath.normpath(member.name)
                parts = member.name.rstrip("/").split("/")
                if member.name.startswith("/") or ".." in parts or "\0" in member.name:
                    raise refused(f"invalid path {member.name!r}")
                parts = path.split("/")[strip:]
                if member.isdir() or not parts:
                    continue
                if member.issym():
                    target = posixpath.normpath(posixpath.join(*parts[:-1], member.linkname))
                    if member.linkname.startswith("/") or target.split("/")[0] == "..":
                        raise refused(f"{member.name!r} is a link out of the source")
                elif not member.isreg():
                    raise refused(f"{member.name!r} is neither a file nor a symbolic link")
                member.name = f"{_SOURCE}/{'/'.join(parts)}"
                out.addfile(_cleaned(member), source.extractfile(member) if member.isreg() else None)
    except (tarfile.TarError, OSError, EOFError, zlib.error, ValueError) as error:
        raise refused(f"not a valid archive: {error}") from error


def _cleaned(item: tarfile.TarInfo) -> tarfile.TarInfo:
    """The entry without owners and times, which the build could put into the wheel."""
    item.uid = item.gid = 0
    item.uname = item.gname = ""
    item.mtime = layer_order.MTIME
    item.mode = 0o755 if item.mode & 0o100 else 0o644
    item.pax_headers = {}
    return item


def _metadata(file: str, path: Path) -> bytes:
    """The METADATA of a wheel. Raises WheelError, BadZipFile."""
    with path.open("rb") as content:
        items = wheel_zip.read_items(file, content)
        (name,) = [name for name in items if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)][:1] or [""]
        if not name or items[name].file_size > LARGEST_SETTINGS:
            raise WheelError(f"{file} has no METADATA")
        with zipfile.ZipFile(content) as archive:
            return archive.read(name)
