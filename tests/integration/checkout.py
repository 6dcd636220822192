"""A small project with two cells in a separate folder, and runs of the `builder` program on it."""

from __future__ import annotations

import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from unittest.mock import patch

from rich.console import Console

from builder.build.layer_lookup import LayerLookup
from builder.build.operating_systems import SystemLayers
from builder.common.console import View
from builder.common.files import digest_of_data, digests_of_tree
from builder.common.lock_text import KNOWN_LAYERS
from builder.engine.run import Run
from builder.index import host
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan import plan
from tests.integration import stores, wheels
from tests.integration.builder_process import BuilderProcess
from tests.integration.index import Index

ROOT = Path(__file__).resolve().parents[2]
BUILDER = Path(sys.executable).parent / "builder"
TIMEOUT_S = 900
OURS = ("UV_", "PIP_", "DOCKER_", "GPU_IMAGES_", "COLUMNS")  # variables of this machine that tests do not inherit
PLAIN, EXTRA = "ty-1.0-cu128-py311", "ty-1.0-cu128-py311-extra"
MATRIX = """\
registry: ""
namespace: {namespace}
source: {source}
{debian}
python:
  "3.11": {{debian: bookworm, apt: [python3]}}
cuda:
  "12.8": {{}}
frameworks:
  tiny:
    short: ty
    image: ty-cuda
    package: tinyframe
    versions:
      "1.0": {{release: {release}, cuda: ["12.8"], python: ["3.11"]}}
components:
  base: {{apt: [libnss-extrausers, tini]}}
  python: {{needs: [base], packages: [pip, nvidia-ml-py]}}
  cuda: {{needs: [python]}}
  tiny: {{needs: [cuda], env: {{TINY_EMPTY: "", TINY_FLAGS: '--list=a,b --home=$HOME ${{HOME}} #"x" \\$PATH \\'}}}}
  extra: {{needs: [python], packages: [tinyextra=={extra}]}}
variants:
  plain: []
  extra: [extra]
"""
TESTS = {
    "cuda": """\
def test_library(host):
    assert host.file("/opt/venv/lib/python/site-packages/nvidia/cuda_runtime/lib/libcudart.so.12").is_file
""",
    "tiny": """\
def test_command(host, subject):
    assert host.check_output("tinyframe") == subject.cell["release"]
""",
    "extra": """\
def test_import(python):
    assert python("import tinyextra; print(len(tinyextra.VERSION))")
""",
}
USER = """\
def test_user(host):
    assert host.check_output("id -un") == "user"
"""
UNTESTED = ".untested"  # suffix of an image name in the store, until it has its tags
SHARED_RELEASE = "1.0.0"  # of wheels that other checkouts may have fetched
MAKES_OS = re.compile(r"^os-bookworm-py3\.11\S*: building$", re.MULTILINE)
IN_CONTAINER = "mmdebstrap cannot run here (setpriv and unshare are not installed): running it in a container"
OS_SCRIPT = "templates/steps/os.sh"
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}  # exit codes by signal
SOURCE = "https://example.com/"  # with the namespace: a label that no image of another checkout has
_OS_LOCKS: dict[str, str] = {}  # those that checkouts made, by file name
# What checkouts made, by what they were made from: the namespace, and the files of locks/ and images/.
_RENDERED: dict[str, tuple[str, dict[str, bytes]]] = {}
# Image tests for integration tests of something else.
SHORT = {"base": USER, "python": USER}


def docker(*arguments: str, host: str = "", timeout: int = TIMEOUT_S) -> str:
    """Runs the `docker` command; returns its output."""
    environment = {**os.environ, **({"DOCKER_HOST": host} if host else {})}
    result = subprocess.run(
        ["docker", *arguments], env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    assert result.returncode == 0, f"docker {' '.join(arguments)}\n{result.stderr}"
    return result.stdout.strip()


def today() -> str:
    """The day as in stamps; a constant would be that of yesterday in tests that run after midnight UTC."""
    return time.strftime("%Y%m%d", time.gmtime())


def without(folder: Path, program: str) -> str:
    """A PATH of this machine's programs but one."""
    bin_folder = folder / f"without-{program}"
    bin_folder.mkdir(exist_ok=True)
    for directory in reversed(os.environ["PATH"].split(":")):
        for path in Path(directory).iterdir() if Path(directory).is_dir() else ():
            (bin_folder / path.name).unlink(missing_ok=True)
            if path.name != program:
                (bin_folder / path.name).symlink_to(path)
    return str(bin_folder)


def until(probe: Callable[[], object], what: str, *, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not probe():
        assert time.monotonic() < deadline, f"{what}: not within {seconds} s"
        time.sleep(0.05)


@dataclass
class Running:
    """A running `builder`; `output` is what it printed so far."""

    process: BuilderProcess
    path: Path
    check: Callable[[str], None]

    @property
    def output(self) -> str:
        return self.path.read_text(encoding="utf-8", errors="replace") if self.path.exists() else ""

    def reaches(self, probe: Callable[[], bool], *, seconds: float = 60) -> None:
        """Waits until `probe` returns True; fails if the program ends before."""
        until(lambda: probe() or self.process.poll() is not None, self.output, seconds=seconds)
        assert probe(), self.output

    def says(self, text: str) -> None:
        self.reaches(lambda: text in self.output)

    def stops(self, number: signal.Signals) -> str:
        """Sends a signal, which must end the program as it should; returns the output."""
        self.process.send_signal(number)
        return self.ends(CODES[number])

    def ends(self, code: int, within_s: float = TIMEOUT_S) -> str:
        """Waits for the end; returns the output."""
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # prints the traceback of every thread
            self.process.wait(10)
        assert self.process.returncode == code, self.output
        self.check(self.output)
        return self.output


@dataclass(kw_only=True)
class Checkout:
    """A project with the framework `release`, and `extra` of tinyextra; `environ` is the environment of `builder`.

    `engine` is the DOCKER_HOST of an engine other than the machine's.
    """

    root: Path
    namespace: str
    release: str
    index: Index
    environ: dict[str, str]
    extra: str = SHARED_RELEASE
    engine: str = ""
    _outputs: Iterator[int] = field(default_factory=count)

    def builder(self, *arguments: str, code: int = 0, **environ: str) -> str:
        """Runs `builder`; returns its output, which must have no traceback and not name the index."""
        with self.running(*arguments, **environ) as run:
            return run.ends(code)

    def publish(self, registry: str, *cells: str) -> str:
        """Stages and releases cells, without a signature and GPU tests; returns the output of the release."""
        self.use_registry(registry)
        self.builder("stage", *cells)
        return self.builder("release", "--allow-untested-gpu")

    def use_registry(self, registry: str, staging: str = "staging") -> None:
        """Sets the registry of matrix.yaml, and the place there to stage images."""
        path = self.root / "matrix.yaml"
        text = re.sub(r"(?m)^(registry|staging): .*\n", "", path.read_text(encoding="utf-8"))
        path.write_text(f"registry: {registry}\nstaging: {registry}/{staging}\n{text}", encoding="utf-8")

    @contextmanager
    def running(self, *arguments: str, **environ: str) -> Iterator[Running]:
        """Starts `builder` in its own process group; kills it at the end if it still runs."""
        output = self.root.parent / f"output-{next(self._outputs)}.txt"
        process = BuilderProcess(["--root", str(self.root), *arguments], {**self._environ(), **environ}, output)
        try:
            yield Running(process, output, self._check_words)
        finally:
            if process.poll() is None:
                with suppress(ProcessLookupError):  # it may not lead a group yet
                    os.killpg(process.pid, signal.SIGKILL)
                process.kill()
                process.wait(10)

    def _environ(self) -> dict[str, str]:
        return {**self.environ, **({"DOCKER_HOST": self.engine} if self.engine else {})}

    def _check_words(self, output: str) -> None:
        for forbidden in ("Traceback", "internal error", self.index.address):
            assert forbidden not in output, output

    @property
    def store(self) -> Path:
        return Path(self.environ["GPU_IMAGES_STORE"])

    def take_store(self, *, like: Path | None = None) -> Path:
        """Changes the checkout's store to a new one: empty, or a copy."""
        store = self.root.parent / f"store-{next(self._outputs)}"
        if like:
            shutil.copytree(like, store, ignore=shutil.ignore_patterns("*.part", "*.whl"))
        self.environ["GPU_IMAGES_STORE"] = str(store)
        return store

    def stored(self) -> dict[str, str]:
        """Digests of the manifests of this project's images in the store, tested or not, by full reference."""
        digests = {name.removesuffix(UNTESTED): digest for name, digest in stores.images(self.store).items()}
        return {name: digest for name, digest in digests.items() if name.startswith(self.namespace)}

    def os_log(self) -> Path:
        """The log of the only build of an operating system."""
        (log,) = (self.root / ".builder/logs").glob("os-bookworm-py3.11*.log")
        return log

    def _systems(self) -> SystemLayers:
        """What makes operating systems, with the machine's own engine."""
        project = Project(self.root)
        settings, view = host.host_for_project(project), View(Console(file=io.StringIO()))
        run = Run(checkout=project, host=settings, store=Store(self.root / "store"), view=view)
        return SystemLayers.of(LayerLookup.of(run))

    def base_image(self, release: str = "bookworm") -> str:
        """The base image of a Debian release in the machine's own engine, which is made if it cannot be pulled."""
        return self._systems().runner.base_image(release)

    def host_files(self) -> dict[str, bytes]:
        """The settings of the build host by their paths, without `pools`."""
        with patch.dict(os.environ, self.environ, clear=True):
            return host.read_host().files("bookworm")

    def pools(self) -> bytes:
        """The folders of Debian's packages, as the builder gives them to its own builds (templates/host/README.md)."""
        systems = self._systems()
        [image] = plan.make_locked_plan(systems.run.project, systems.run.project.select([PLAIN])).images
        return "".join(f"{pool}\n" for _, pool in systems.archives.pools(image.os_lock)).encode()

    def plain_docker_build(self, index: bytes = b"", pools: bytes = b"") -> str:
        """The image of PLAIN by `docker build` without the builder (templates/host/README.md).

        `index` is appended to `index.env`; `pools`, unless empty, is the content of the file `pools`.
        """
        base, files = self.base_image(), self.host_files()
        files["templates/host/index.env"] += index
        files |= {"templates/host/pools": pools} if pools else {}
        for path, content in files.items():
            (self.root / path).write_bytes(content)
        name = f"{self.namespace}/plain"
        command = ["docker", "build", "--quiet", "--network", "host", "--build-arg", f"BASE={base}", "--tag", name]
        command += ["--no-cache-filter", "image"]  # only Debian packages may be cached
        result = subprocess.run(
            [*command, "--file", f"images/{PLAIN}/plain.Dockerfile", "."],
            cwd=self.root, env={**os.environ, "DOCKER_BUILDKIT": "1"}, capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        for path in files:
            (self.root / path).unlink()
        assert result.returncode == 0, result.stderr
        return name

    def docker(self, *arguments: str) -> str:
        return docker(*arguments, host=self.engine)

    def edit(self, file: str, old: str, new: str) -> None:
        path = self.root / file
        text = path.read_text(encoding="utf-8")
        assert text.count(old) == 1, f"{old!r} is {text.count(old)} times in {file}"
        path.write_text(text.replace(old, new), encoding="utf-8")

    def write_tests(self, tests: Mapping[str, str]) -> None:
        for name, text in tests.items():
            (self.root / f"tests/images/test_{name}.py").write_text(text, encoding="utf-8")

    def lock(self, *cells: str) -> str:
        """Runs `lock`, for which another checkout may have resolved the Debian packages; returns its output.

        With a lock of another time, BuildKit would install the same packages again.
        """
        for name, text in _OS_LOCKS.items():  # `lock` removes what is not needed
            (self.root / "locks" / name).write_text(text, encoding="utf-8")
        return self.builder("lock", *cells)

    def lock_and_render(self, *cells: str) -> None:
        """Runs `lock` and `render`, or copies what a checkout with the same inputs got from them."""
        inputs = self._inputs()
        if inputs in _RENDERED:
            namespace, files = _RENDERED[inputs]
            shutil.rmtree(self.root / "images", ignore_errors=True)
            for path in (self.root / "locks").glob("*.json"):
                if path.name != Path(KNOWN_LAYERS).name:
                    path.unlink()
            for name, content in files.items():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                (self.root / name).write_bytes(content.replace(namespace.encode(), self.namespace.encode()))
            return
        self.lock(*cells)
        self.builder("render", *cells)
        self.remember()

    def remember(self) -> None:
        """Lets other checkouts copy its locks and rendered files."""
        _OS_LOCKS.update({path.name: path.read_text("utf-8") for path in (self.root / "locks").glob("os-*.json")})
        if self.release == SHARED_RELEASE:
            files = self.files("locks") | self.files("images")
            files.pop(KNOWN_LAYERS, None)  # written by builds
            _RENDERED[self._inputs()] = self.namespace, files

    def _inputs(self) -> str:
        """A digest of what its locks and rendered files depend on, without its namespace."""
        matrix = (self.root / "matrix.yaml").read_text(encoding="utf-8").replace(self.namespace, "")
        return digest_of_data([matrix, digests_of_tree(self.root, self.root / "templates")])

    def references(self, suffix: str = "") -> list[str]:
        """The expected tags of a cell, the full one first."""
        tags = [f"{self.release}-cu128-py311", "1.0-cu128-py311", self.release, "1.0"]
        return [f"{self.namespace}/ty-cuda:{tag}{suffix}" for tag in tags]

    def tags(self) -> dict[str, str]:
        """Image ids by reference, of all tags in this project's namespace."""
        form = "{{.Repository}}:{{.Tag}} {{.ID}}"
        listed = self.docker("image", "ls", "--no-trunc", "--format", form, "--filter", f"reference={self.namespace}/*")
        return dict(line.split(maxsplit=1) for line in listed.splitlines())

    @property
    def label(self) -> str:
        """The filter for images of this project, whatever made them."""
        return f"label=org.opencontainers.image.source={SOURCE}{self.namespace}"

    def image_ids(self) -> set[str]:
        """Ids of all images of this project, tagged or not."""
        return set(self.docker("image", "ls", "-q", "--no-trunc", "--filter", self.label).split())

    def working_images(self) -> list[str]:
        """Temporary images of a run."""
        return self.docker("image", "ls", "-aq", "--filter", f"label=io.github.gpu-images.run={self.root}").split()

    def containers(self) -> list[str]:
        return self.docker("ps", "-aq", "--filter", f"label=io.github.gpu-images.run={self.root}").split()

    def files(self, name: str) -> dict[str, bytes]:
        """The content of a file, or of all files below a folder, by path."""
        top = self.root / name
        paths = [top] if top.is_file() else sorted(path for path in top.rglob("*") if path.is_file())
        return {path.relative_to(self.root).as_posix(): path.read_bytes() for path in paths}

    def processes(self) -> dict[int, str]:
        """The command lines by process id, of processes that name this checkout: those that a builder started.

        A builder itself is a fork without a command line of its own; `running` waits for it or kills it.
        """
        commands = {}
        for path in Path("/proc").iterdir():
            try:
                line = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:  # no process, or one that has ended
                continue
            if str(self.root) in line and path.name.isdigit():
                commands[int(path.name)] = line
        return commands

    def remove(self) -> None:
        """Kills its processes; removes its containers and images from the engine."""
        for process in self.processes():
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if containers := self.containers():
            self.docker("rm", "-f", "-v", *containers)
        # The newest first: an image with children cannot be removed.
        if images := self.docker("image", "ls", "-q", "--no-trunc", "--filter", self.label).split():
            self.docker("image", "rm", "-f", *images)
        if images := self.working_images():
            self.docker("image", "rm", "-f", *images)


def make(root: Path, *, namespace: str, release: str, extra: str, index: Index, environ: Mapping[str, str]) -> Checkout:
    """Writes the project and publishes its wheels."""
    shutil.copytree(
        ROOT / "templates", root / "templates", symlinks=True, ignore=shutil.ignore_patterns("host", "__pycache__")
    )
    copies = ["templates/host/env.sh", "templates/host/README.md", "locks/uv.txt", ".dockerignore", "pyproject.toml"]
    copies += [f"tests/images/{name}.py" for name in ("conftest", "containers", "packages", "test_base", "test_python")]
    for name in copies:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, root / name)
    block = re.search(r"^debian:\n(?:[ #].*\n)+", (ROOT / "matrix.yaml").read_text(encoding="utf-8"), re.MULTILINE)
    assert block, "matrix.yaml has no block `debian:`"
    values = {"namespace": namespace, "source": SOURCE + namespace, "debian": block[0].rstrip()}
    text = MATRIX.format(**values, release=release, extra=extra)
    (root / "matrix.yaml").write_text(text, encoding="utf-8")
    index.publish(wheels.framework(release), wheels.extra(extra))
    temporary = root.parent / "tmp"
    temporary.mkdir()
    new = Checkout(
        root=root, namespace=namespace, release=release, extra=extra, index=index,
        environ={**environ, "TMPDIR": str(temporary)},
    )  # fmt: skip
    new.write_tests(TESTS)
    prefetch = root / "templates/extra/prefetch.txt"  # the history of an image does not have this order of files
    prefetch.parent.mkdir()
    prefetch.write_text("opt/venv/lib/python*/site-packages/tinyextra/__init__.py\n", encoding="utf-8")
    return new
