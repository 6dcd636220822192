"""Makes operating systems, the `os` layers: from a registry, or with mmdebstrap from locked Debian packages.

The builder downloads the locked packages by their SHA-256 and keeps them in the store; mmdebstrap installs them from a
local repository, without the network. It runs on this machine, or in a container of Debian. Both run
templates/steps/mmdebstrap.sh on the same files, and give the same bytes. This machine can run it as root, on Debian or
Ubuntu; a container can run wherever the engine does. The result has Debian's own addresses. Source: mmdebstrap(1).
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

from builder.build.layer_lookup import LayerLookup
from builder.build.programs import Program, Programs, last_lines
from builder.common import machine
from builder.common.console import Meter
from builder.common.errors import FREE_DISK, BuilderError, BuildError, DiskError, EngineError
from builder.common.files import digest_of_data, digests_of_tree, short_digest
from builder.common.reference import ImageRef
from builder.debian import mmdebstrap as installation
from builder.debian.apt import AptRunner
from builder.debian.archives import CONNECTIONS, Archives
from builder.debian.os_lock import OsLock
from builder.engine.client import KILLED, LONGEST_S
from builder.engine.model import is_disk_full
from builder.engine.run import Run
from builder.index.download import Fetcher
from builder.index.host import FOLDER as HOST_FOLDER
from builder.index.host import RunProgram
from builder.index.wheels import arch_of
from builder.layers import stored_layers
from builder.layers.oci import Layer
from builder.layers.store import BLOBS, PACKAGES
from builder.lock.python_builds import PythonBuilds, uv_program
from builder.matrix.project import Project
from builder.plan import layer_order
from builder.plan.plan import BOOTSTRAP_INPUTS, STEPS, PlannedImage

ROW = "os-"  # begins the name of every operating system in the view
TIMEOUT_S = LONGEST_S // 2  # before the container ends
APT_S = 300
TMPFS = 5 << 30  # bytes of a file system in memory
FREE_MEMORY = TMPFS + (1 << 30)  # bytes that must be available for one system
_TAIL = 8  # lines of output in a message
_RESULT = "root.tar"
_DEBS = "debs"  # the folder of the local repository
_BIN = "bin"  # the first folder of the PATH of mmdebstrap.sh
_HOST = "host"  # the folder of the settings for installing mmdebstrap in a container
CONTAINER_FOLDER = "/build"
# Messages of mmdebstrap, and what the view shows for them.
_STEPS = {
    r"I: running apt-get update": "reading the lists of packages",
    r"I: downloading packages": "copying packages",
    r"I: extracting archives": "unpacking the release",
    r"I: installing essential": "installing the release",
    r"I: installing remaining": "installing the image's packages",
    r"I: running --customize-hook .*os\.sh": "setting up the user and Python",
    r"I: creating tarball": "packing",
}
# Processes of packages end with mmdebstrap, and it ends with the builder.
_ISOLATED = ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
# In a container: mmdebstrap itself, from the archives that this machine uses for the container's release.
_IN_CONTAINER = f"""\
ln -s {CONTAINER_FOLDER}/{_HOST} /mnt/host
. /mnt/host/env.sh
export DEBIAN_FRONTEND=noninteractive
apt-get update -q
apt-get install -q -y --no-install-recommends {" ".join(installation.PACKAGES)}
unset APT_CONFIG
cd {CONTAINER_FOLDER}
PATH={CONTAINER_FOLDER}/{_BIN}:$PATH
exec "$@"
"""

# For a file system of another architecture, instead of mmdebstrap. In mmdebstrap.sh, this would change every layer.
_FOR_ARCH = """\
#!/bin/sh
exec /usr/bin/mmdebstrap --architectures={arch} "$@"
"""

# In the new file system, instead of uv: mmdebstrap.sh calls it as `uv python install ... RELEASE`.
_INSTALL_PYTHON = """\
#!/bin/sh
exec sh /mnt/steps/uv-python.sh {interpreter} \
/mnt/steps/uv "$@" --offline --python-downloads-json-url /mnt/steps/python.json
"""


def row(image: PlannedImage) -> str:
    """The name of an image's operating system in the view, and of its log."""
    return f"{ROW}{image.os_request.name}-py{image.cell.python}-{short_digest(image.os_inputs)[:6]}"


def read_inputs(project: Project, image: PlannedImage) -> dict[str, bytes]:
    """The files that mmdebstrap.sh reads for an image's operating system: path in its directory -> content."""
    files = {**_read_steps(project), "packages.json": (project.root / image.os_request.path).read_bytes()}
    if python := image.locked_python:  # `SystemLayers` adds the archive itself
        # A list of builds for uv with one entry: the archive, in the folder of the steps. uv checks the SHA-256.
        major, minor, patch = map(int, python.release.split("."))
        entry = {
            "name": "cpython", "major": major, "minor": minor, "patch": patch, "prerelease": "", "variant": None,
            "os": "linux", "arch": {"family": "x86_64", "variant": None}, "libc": "gnu",
            "url": f"file:///mnt/steps/{quote(python.file)}", "sha256": python.sha256,
        }  # fmt: skip
        files["uv"] = _INSTALL_PYTHON.format(interpreter=image.interpreter).encode()
        files["steps/uv"] = Path(uv_program()).read_bytes()
        files["steps/python.json"] = json.dumps({python.key: entry}).encode()
    return files


@dataclass(frozen=True)
class SystemLayers:
    """Gets the `os` layers of one run into the store. Every method may be called from several threads."""

    run: Run
    lookup: LayerLookup
    runner: DebianRunner
    archives: Archives

    @classmethod
    def of(cls, lookup: LayerLookup) -> SystemLayers:
        run = lookup.run
        runner = DebianRunner(run)
        return cls(run, lookup, runner, Archives(run.project.matrix, run.host, runner))

    def provide(self, image: PlannedImage, files: Mapping[str, bytes]) -> Layer:
        """Downloads the operating system that a registry has; otherwise, or if that fails, makes it from `files`.

        Raises BuildError as `DebianRunner.make_system`, and if the operating system is not the known one.
        """
        view, name = self.run.view, row(image)
        if self.lookup.in_registry(image.os_inputs) and (downloaded := self.lookup.download(name, image.os_inputs)):
            view.end(name, "done", f"layer {short_digest(downloaded.digest)}, from the registry")
            return downloaded

        system = self._make(image, files)
        view.end(name, "done", f"layer {short_digest(system.digest)}")
        return system

    def _make(self, image: PlannedImage, files: Mapping[str, bytes]) -> Layer:
        """Makes an operating system of the locked packages and records it, with the packages that it is made of."""
        run, name, packages = self.run, row(image), image.os_lock.packages
        known = self.lookup.known.get(image.os_inputs)
        blobs = [f"sha256:{package.sha256}" for package in packages]
        arguments = [image.debian, str(layer_order.MTIME), image.interpreter, *([image.uv] if image.uv else [])]

        fetcher = Fetcher(
            self.archives.packages(image.os_lock, image.id),
            self.run.store.root / BLOBS,
            self.run.store.downloads,
            progress=Meter(run.view, name, "downloaded", sum(package.size for package in packages)).add,
            stopped=self.runner.programs.stopped,
        )
        debs = fetcher.fetch_all(packages, CONNECTIONS)
        if python := image.locked_python:
            run.view.begin(name, f"downloading Python {python.release}")
            python_fetcher = Fetcher(
                PythonBuilds(run.host).archives(),
                self.run.store.root / BLOBS,
                self.run.store.downloads,
                progress=Meter(run.view, name, "downloaded", 0).add,
                stopped=self.runner.programs.stopped,
            )
            path = python_fetcher.fetch(python)
            files = {**files, f"steps/{python.file}": path.read_bytes()}
            blobs.append(f"sha256:{python.sha256}")

        run.view.begin(name, "building")
        with run.project.scratch() as scratch:
            tar = self.runner.make_system(name, arguments, files, Path(scratch), image.os_lock, debs)
            run.view.note(name, "compressing")
            layer = stored_layers.store_system(self.run.store, image.os_layer, tar, known)
        # A record of its own: earlier builders that share the store refuse a record of a layer with more fields.
        record = {"digest": layer.digest, "size": layer.size, PACKAGES: blobs}
        self.run.store.put_record(f"{image.os_inputs}.{PACKAGES}", record)
        return layer


def obstacle_here() -> str:
    """The reason that this machine cannot run mmdebstrap; empty if it can, or could after installing it."""
    if os.geteuid() != 0:
        return "only root can run it"
    if not installation.is_installed() and not shutil.which("apt-get"):
        return "it is not installed"
    if not all(map(shutil.which, ("setpriv", "unshare"))):
        return "setpriv and unshare are not installed"
    probe = subprocess.run([*_ISOLATED, "true"], capture_output=True, check=False)
    return "this machine does not allow it to create namespaces" if probe.returncode else ""


class DebianRunner(AptRunner):
    """Runs mmdebstrap, here or in a container of the newest Debian release in matrix.yaml, and apt in such a container.

    An object serves one run. Every method may be called from several threads.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run.view)
        self._run = run
        self.programs = Programs()
        self._choosing, self._pulling, self._counting = threading.Lock(), threading.Lock(), threading.Lock()
        self._image: str | None = None  # the image to run mmdebstrap in; empty: this machine
        self._bases: dict[str, str | EngineError] = {}  # by release; or the error
        self._in_memory = 0  # file systems in memory now

    def stop(self) -> None:
        """Kills all that runs, on this machine and in containers of this checkout; nothing starts from now on."""
        self.programs.stop()
        if self._image:
            with suppress(BuilderError):  # the next run removes them
                self._run.engine.sweep(str(self._run.project.root))

    @contextmanager
    def container(self) -> Iterator[RunProgram]:
        """Starts a container; yields a function that runs programs in it, with the parameters of subprocess.run.

        The folder of `$APT_CONFIG`, with the files that apt reads, is copied to the same path at the first use. apt's
        lists of packages stay in the container. Raises EngineError if there is no engine, or no image of Debian.
        """
        project, host = self._run.project, self._run.host
        image = self.base_image(project.matrix.newest_debian)
        copied: set[Path] = set()
        network, checkout = host.network or None, str(project.root)
        with self._run.engine.running(image, checkout=checkout, network_mode=network) as container:

            def run(
                command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = APT_S, **_: object
            ) -> subprocess.CompletedProcess[str]:
                environment = {name: value for name, value in (env or {}).items() if name != "PATH"}
                folder = Path(environment["APT_CONFIG"]).parent if "APT_CONFIG" in environment else None
                if folder and folder not in copied:
                    container.copy(folder, str(folder))
                    copied.add(folder)
                return container.run(command, environment, timeout)

            yield run

    def make_system(
        self, name: str, arguments: Sequence[str], files: Mapping[str, bytes], folder: Path, lock: OsLock,
        debs: Mapping[str, Path],
    ) -> Path:  # fmt: skip
        """Makes an operating system of locked packages in an empty `folder`; returns the path of its tar.

        `name` names the row in the view and the log. `arguments` are passed to mmdebstrap.sh, the Debian release first;
        the script reads `files` (path -> content). `debs` are the files of the packages, by SHA-256. Raises BuildError
        with the last lines of the output, DiskError, EngineError.
        """
        engine, image = self._run.engine, self._choose_image()
        place = CONTAINER_FOLDER if image else str(folder)

        # A repository of the packages, whose hashes were checked: this machine's archives are not read.
        sources = f"deb [trusted=yes] copy:{quote(place)}/{_DEBS}/ ./\n"
        own = engine.info().arch if image else arch_of(platform.machine())
        _write_files(folder, {**files, "sources.list": sources.encode(), **_for_arch(lock.arch, own)})
        _write_files(folder / _DEBS, installation.repository_lists(lock, debs))
        for package in lock.packages:
            (folder / _DEBS / package.file).symlink_to(debs[package.sha256])
        if image:
            _write_files(folder / _HOST, self._container_settings())

        words = ["sh", "steps/mmdebstrap.sh", *arguments]
        # Unpacked, packages take four to six times their size. The memory of a remote engine is unknown.
        is_small = 8 * sum(package.size for package in lock.packages) < TMPFS
        with self._memory(is_small and (not image or engine.info().is_local)) as is_in_memory:
            if self.programs.stopped.is_set():
                raise BuildError(f"{name}: stopped")
            if image:
                status = self._run_in_container(image, name, words, folder, is_in_memory=is_in_memory)
            else:
                status = self._run_here(name, words, folder, is_in_memory=is_in_memory)
        self._check(name, folder, status)
        return folder / _RESULT

    def _run_here(self, name: str, words: Sequence[str], folder: Path, *, is_in_memory: bool = False) -> int:
        """Runs mmdebstrap on this machine, in its own namespaces; returns its exit status."""
        path = f"{folder}/{_BIN}:{os.environ.get('PATH', os.defpath)}"
        environment = {"PATH": path, "HOME": os.environ.get("HOME", "/"), **self._environment()}
        if is_in_memory:
            environment["TMPFS"] = str(TMPFS)
        command = [*_ISOLATED, *words]
        program = Program(
            command=command, environment=environment, folder=folder, log=self._log(name), timeout_s=TIMEOUT_S
        )
        return self.programs.run(program, partial(self._on_line, name))

    def _run_in_container(
        self, image: str, name: str, words: Sequence[str], folder: Path, *, is_in_memory: bool
    ) -> int:
        """Runs mmdebstrap in a container, in a copy of `folder`, and copies the result back; returns its status."""
        command = ["sh", "-euc", _IN_CONTAINER, "sh", *words]
        with self._run.engine.running(
            image,
            checkout=str(self._run.project.root),
            network_mode=self._run.host.network or None,
            # For the mounts of the new file system; the default profiles forbid them.
            cap_add=["SYS_ADMIN"],
            security_opt=["apparmor=unconfined", "seccomp=unconfined", "label=disable"],
            tmpfs={f"{CONTAINER_FOLDER}/tmp": f"exec,suid,dev,size={TMPFS}"} if is_in_memory else {},  # noqa: S108  in the container
        ) as container:
            if self.programs.stopped.is_set():  # `stop` found no container yet
                raise BuildError(f"{name}: stopped")
            container.copy(folder, CONTAINER_FOLDER)
            with self._log(name).open("w", encoding="utf-8", buffering=1) as log:
                status = container.run_by_line(
                    command, self._environment(), TIMEOUT_S, lambda line: log.write(self._on_line(name, line))
                )
            if status == 0:
                with (folder / _RESULT).open("wb") as out:
                    container.read(f"{CONTAINER_FOLDER}/{_RESULT}", out)
        return status

    def _environment(self) -> dict[str, str]:
        # Nothing else of this machine: packages have scripts. apt reads the names of proxies in lower case.
        proxies = self._run.host.proxies
        return {"LC_ALL": "C.UTF-8", **proxies, **{key.lower(): value for key, value in proxies.items()}}

    def _log(self, name: str) -> Path:
        log = self._run.project.logs / f"{name}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        return log

    def _on_line(self, name: str, line: str) -> str:
        """Shows the step that a line of the output begins; returns the line for the log."""
        line = self._run.host.hide(line)
        if step := next((step for pattern, step in _STEPS.items() if re.match(pattern, line)), ""):
            self._run.view.note(name, step)
        return line

    def _check(self, name: str, folder: Path, status: int) -> None:
        """Raises BuildError or DiskError, with the end of the log, unless mmdebstrap ended well."""
        if status == 0:
            return
        log = self._log(name)
        output = last_lines(log, _TAIL)
        if is_disk_full(output):
            raise DiskError(f"{name}: the disk of {folder} is full\n{output}", hint=FREE_DISK)
        is_killed = status in (-signal.SIGKILL, KILLED)
        how = f"was killed: after {TIMEOUT_S} s, or because memory ran out" if is_killed else "failed"
        raise BuildError(
            f"{name}: mmdebstrap {how} (status {status})\n{output}",
            hint=f"Full log: {log.relative_to(self._run.project.root)}",
        )

    def base_image(self, release: str) -> str:
        """The name in the engine of Debian's image of a release, for the engine's architecture.

        Pulls it. If no registry has it, makes an image of the release's current packages. Raises EngineError.
        """
        with self._pulling:
            if release not in self._bases:
                try:
                    self._bases[release] = self._pull_or_make(release)
                except EngineError as error:  # every image that needs it gets this error at once
                    self._bases[release] = error
            base = self._bases[release]
        if isinstance(base, EngineError):
            raise base
        return base

    def _pull_or_make(self, release: str) -> str:
        run = self._run
        image = run.project.matrix.debian[release].image
        if run.engine.image(image):
            return image
        base = run.project.base(STEPS)
        recipe = digest_of_data([release, *(digests_of_tree(base, base / script) for script in BOOTSTRAP_INPUTS)])
        local = ImageRef(repository="gpu-images/base", tag=f"{release}-{short_digest(recipe)}")
        if run.engine.image(str(local)):
            return str(local)
        try:
            run.view.say(f"base image: pulling {image}")
            run.engine.pull(image)
            return image
        except EngineError as error:
            pull_error = run.host.hide(str(error))
        if obstacle := self._obstacle():
            raise EngineError(
                f"base image: cannot be pulled ({pull_error}), and mmdebstrap cannot make it: {obstacle}",
                hint="As root on Debian or Ubuntu: apt-get install mmdebstrap debian-archive-keyring",
            )
        run.view.say(f"base image: cannot be pulled; making {local} from Debian packages (about 15 s)")
        name = f"base-{release}"
        with run.project.scratch() as scratch:
            folder = Path(scratch)
            own = _for_arch(run.engine.info().arch, arch_of(platform.machine()))
            _write_files(folder, {**_read_steps(run.project), **own, **self._archive_settings(release, folder)})
            try:
                self._check(name, folder, self._run_here(name, ["sh", "steps/mmdebstrap.sh", release], folder))
            except BuildError as failure:
                raise EngineError(str(failure), hint=f"Error of the registry: {pull_error}") from failure
            run.engine.import_tar(folder / _RESULT, local)
        return str(local)

    def _archive_settings(self, release: str, folder: Path) -> dict[str, bytes]:
        """The files in `folder` for the archives that this machine uses. Raises UsageError for one with a password."""
        host = self._run.host.for_release(self._run.project.matrix.debian[release])
        host.files(release, with_index=False)  # refuses a password, which the scripts of packages could read
        files, options = dict[str, bytes](), host.apt_options(release)
        if host.ca:
            files["ca.crt"] = host.ca
            options.append(f'Acquire::https::CAInfo "{folder}/ca.crt";')
        if options:
            files["apt.conf"] = "".join(f"{option}\n" for option in options).encode()
        if sources := host.sources_list(release):
            files["sources.list"] = sources.encode()
        return files

    def _choose_image(self) -> str:
        """The image of the container to run in; empty if this machine can run mmdebstrap, which is then installed."""
        with self._choosing:
            if self._image is None:
                image = ""
                if obstacle := self._obstacle():
                    newest = self._run.project.matrix.newest_debian
                    message = f"mmdebstrap cannot run here ({obstacle}): running it in a container of Debian {newest}"
                    self._run.view.say_once(message)
                    image = self.base_image(newest)
                self._image = image
            return self._image

    def _obstacle(self) -> str:
        """Installs mmdebstrap if it is missing.

        Returns the reason that this machine cannot run it, or an empty string.
        """
        return self._run.host.hide(obstacle_here() or installation.install_mmdebstrap(self._run.view))

    def _container_settings(self) -> dict[str, bytes]:
        """The files for installing mmdebstrap in the container.

        It is installed from today's archives: the container's image may be newer than a snapshot.
        """
        project, host = self._run.project, self._run.host
        newest = project.matrix.newest_debian
        host = host.for_release(project.matrix.debian[newest])
        files = {Path(path).name: content for path, content in host.files(newest, with_index=False).items()}
        return {**files, "env.sh": project.path(f"{HOST_FOLDER}/env.sh").read_bytes()}

    @contextmanager
    def _memory(self, is_small: bool) -> Iterator[bool]:
        """Reserves memory for a small file system while the block runs; yields True if it fits.

        Counts those that other threads write to memory now.
        """
        with self._counting:
            fits = is_small and machine.free_memory() >= FREE_MEMORY + self._in_memory * TMPFS
            self._in_memory += fits
        try:
            yield fits
        finally:
            with self._counting:
                self._in_memory -= fits


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes inputs of mmdebstrap.sh."""
    for path, content in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
        (folder / path).chmod(0o755)


def _for_arch(arch: str, own: str) -> dict[str, bytes]:
    """The program that mmdebstrap.sh runs in place of mmdebstrap, for another architecture than its machine's `own`."""
    return {} if arch == own else {f"{_BIN}/mmdebstrap": _FOR_ARCH.format(arch=arch).encode()}


def _read_steps(project: Project) -> dict[str, bytes]:
    """The scripts that mmdebstrap.sh runs: path in its working directory -> content."""
    return {f"steps/{path.name}": path.read_bytes() for path in sorted(project.path(STEPS).iterdir()) if path.is_file()}
