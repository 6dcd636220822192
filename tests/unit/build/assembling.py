"""Fakes for the tests of assembling: wheels, Debian and the containers that compile."""

from __future__ import annotations

import io
import json
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from builder.build.assemble import Assembler
from builder.build.layer_lookup import LayerLookup
from builder.build.operating_systems import SystemLayers
from builder.common.errors import BuilderError, RegistryError
from builder.common.files import digest_of_bytes, digest_of_data, replacing, short_digest
from builder.common.reference import ImageRef
from builder.common.tasks import RetryPolicy
from builder.debian.archives import Archives
from builder.engine.client import RunningContainer
from builder.engine.run import Run
from builder.index.download import Fetcher, FileSource
from builder.index.host import Host
from builder.index.wheels import LockedWheel, Wheel
from builder.layers import oci, stored_images, stored_layers
from builder.layers.oci import Image
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.layer_order import PlannedLayer
from builder.plan.plan import PlannedImage
from builder.registry.client import Repository
from tests.fakes import locks
from tests.fakes.engine import FakeEngine, MemoryConsole
from tests.fakes.mmdebstrap import DAY, FakeDebian, file_system
from tests.fakes.run import new_run
from tests.unit.layers import test_wheel

EMBER, JUPYTER, QUARTZ, BOARD = locks.LOCKED
NOTEBOOK = "notebook"
CUDA = ["nvidia-cuda-runtime-cu12", "nvidia-sums-cu12"]
NOTHING: tuple[list[str], list[str], list[str], int] = ([], [], [], 0)


def pack(wheel: Wheel, more: Mapping[str, bytes]) -> bytes:
    """A wheel of one module, the same bytes every time."""
    name = wheel.name.replace("-", "_")
    module = f"nvidia/{name}/lib/lib.so" if wheel.component == "cuda" else f"{name}/__init__.py"
    files = {module: f"# {wheel.file}".encode(), **more}
    return test_wheel.pack(files, name=wheel.file, info=f"{name}-{wheel.version}.dist-info").content


@dataclass
class World:
    """The surroundings of the assembler, and what it did there. Wheels are identified by their names.

    `more` are files that a wheel has besides its module; `packages` stands for Debian's current packages.
    """

    broken: dict[str, BuilderError] = field(default_factory=dict)
    damaged: dict[str, bytes] = field(default_factory=dict)
    more: dict[str, dict[str, bytes]] = field(default_factory=dict)
    packages: str = "1"
    python: str = locks.PYTHON
    taken: tuple[str, ...] = ()
    folders: tuple[str, ...] = ("home/user", "workspace")
    broken_systems: dict[str, BuilderError] = field(default_factory=dict)
    before_fetch: Callable[[str], None] = lambda _: None
    before_splice: Callable[[PlannedLayer, Sequence[Path]], None] = lambda *_: None
    on_stop: Callable[[], None] = lambda: None
    fetched: list[str] = field(default_factory=list)
    systems: list[str] = field(default_factory=list)
    spliced: list[str] = field(default_factory=list)
    compiled: list[list[str]] = field(default_factory=list)
    programs: set[bytes] = field(default_factory=set)
    before_compile: Callable[[str], object] = lambda _: None
    compile_error: str = ""
    bytecode_path: Callable[[str], str] = lambda source: f"{source}c"
    system_inputs: set[str] = field(default_factory=set)
    before_system: Callable[[], object] = lambda: None
    registry: dict[str, bytes] = field(default_factory=dict)
    registry_error: RegistryError | None = None
    downloaded: list[str] = field(default_factory=list)

    def did(self) -> tuple[list[str], list[str], list[str], int]:
        """Wheels fetched, layers of wheels made, systems built, layers of bytecode, since the last call of this."""
        result = (sorted(self.fetched), sorted(self.spliced), list(self.systems), len(self.compiled))
        for log in (self.fetched, self.spliced, self.systems, self.compiled):
            log.clear()
        return result

    def make_system(self, name: str, arguments: Sequence[str], files: Mapping[str, bytes]) -> bytes:
        """The file system that the fake of mmdebstrap makes."""
        self.before_system()
        self.systems.append(name.rpartition("-")[0])
        self.system_inputs.add(digest_of_data({path: digest_of_bytes(content) for path, content in files.items()}))
        for inputs, error in self.broken_systems.items():
            if name.endswith(short_digest(inputs)[:6]):
                raise error
        content = f"{arguments} {self.packages}".encode()
        return file_system(content, self.taken, self.folders, DAY + 86400 * (int(self.packages) - 1))

    def compile(self, program: bytes, sources: Sequence[str]) -> bytes:
        """The zip that compile.py writes for these sources."""
        self.compiled.append(list(sources))
        self.programs.add(program)
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in sources:
                archive.writestr(zipfile.ZipInfo(self.bytecode_path(path)), self.python, zipfile.ZIP_DEFLATED)
        return buffer.getvalue()


class CompilingContainer(RunningContainer):
    """Compiles the files of a tar."""

    def __init__(self, world: World) -> None:
        self.world = world

    def put(self, files: BinaryIO) -> None:
        with tarfile.open(fileobj=files) as tar:
            self.contents = {f"/{member.name}": file.read() for member in tar if (file := tar.extractfile(member))}

    def run_by_line(
        self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float,
        on_line: Callable[[str], object],
    ) -> int:  # fmt: skip
        assert environment == {"PYTHONHASHSEED": "0"}
        *python, program, self.result = command
        assert python == ["/opt/venv/bin/python", "-B"]
        if self.world.compile_error:
            on_line(self.world.compile_error)
            return 1
        self.program = self.contents.pop(program)
        return 0

    def read(self, path: str, out: BinaryIO) -> None:
        assert path == self.result
        out.write(self.world.compile(self.program, [path.removeprefix("/") for path in self.contents]))


class CompilingEngine(FakeEngine):
    """Its containers compile bytecode; `before_compile` of the world gets the image that each one runs."""

    def __init__(self, world: World, *, registry: bool = True) -> None:
        super().__init__(registry=registry)
        self.world = world

    @contextmanager
    def running(self, image: str, *, checkout: str, **options: Any) -> Iterator[RunningContainer]:
        assert self.image(image), "no system to compile in"
        assert options == {"network_mode": "none"}
        self.world.before_compile(image)
        yield CompilingContainer(self.world)


class FakeRepository(Repository):
    """A repository with the blobs of the world's registry. Downloads are listed in `downloaded`."""

    def __init__(self, world: World, reference: ImageRef, *, host: Host, write: bool, policy: RetryPolicy) -> None:
        assert not write
        self.world = world
        self.name = str(reference)

    def has_blob(self, digest: str) -> bool:
        if self.world.registry_error:
            raise self.world.registry_error
        return digest in self.world.registry

    def stoppable(self, _: threading.Event) -> FakeRepository:
        return self

    def download(self, digest: str, size: int, out: BinaryIO, read: Callable[[int], None]) -> None:
        self.world.downloaded.append(self.name)
        content = self.world.registry[digest]
        if len(content) != size:
            raise RegistryError(f"content does not match {digest}")
        out.write(content)
        read(size)


class WorldFetcher(Fetcher[LockedWheel]):
    """Makes the wheels that it fetches."""

    def __init__(
        self, world: World, source: FileSource[LockedWheel], folder: Path, *, progress: Callable[[int], None]
    ) -> None:
        super().__init__(source, folder, progress=progress)
        self.world = world

    def fetch(self, wheel: LockedWheel) -> Path:
        assert isinstance(wheel, Wheel)
        self.world.before_fetch(wheel.name)
        self.world.fetched.append(wheel.name)
        if wheel.name in self.world.broken:
            raise self.world.broken[wheel.name]
        content = self.world.damaged.get(wheel.name) or pack(wheel, self.world.more.get(wheel.name, {}))
        with replacing(self.path(wheel)) as file:  # another builder may be reading the wheel, as with a real download
            file.write(content)
        self._progress(wheel.size)
        return self.path(wheel)

    def stop(self) -> None:
        self.world.on_stop()


class AssemblyBench:
    """A checkout, an engine and a store, with a world around them."""

    def __init__(self, project: Project, root: Path) -> None:
        self.world = World()
        self.engine: FakeEngine = CompilingEngine(self.world)
        self.console = MemoryConsole()
        self.store = Store(root)
        self.store.prepare()
        self.project = project
        self.assemblers: list[Assembler] = []

    @property
    def context(self) -> Run:
        return new_run(self.project, engine=self.engine, store=self.store, console=self.console)

    def images(self, *cells: str) -> list[PlannedImage]:
        planned = plan.make_locked_plan(self.project, self.project.select(cells))
        by_id = {image.id: image for image in planned.images}
        return [by_id[cell] for cell in cells]

    def assembler(self) -> Assembler:
        run, lookup = self.context, LayerLookup.of(self.context)
        runner = FakeDebian(run, self.world.make_system)
        return Assembler(SystemLayers(run, lookup, runner, Archives(self.project.matrix, run.host, runner)))

    def begin(self, images: Sequence[PlannedImage]) -> Assembler:
        assembler = self.assembler()
        self.assemblers.append(assembler)
        assembler.start(images)
        return assembler

    def run(self, *cells: str) -> dict[str, str]:
        """Assembles the images of these cells in one run; returns their ids by cell."""
        images = self.images(*cells)
        assembler = self.begin(images)
        ids = {image.id: assembler.build(image).id for image in images}
        assembler.close()
        return ids

    def record_tagged(self, cell: str) -> None:
        self.assembler().record_tagged(self.images(cell)[0])

    def refresh(self, python: str = locks.PYTHON) -> None:
        """Locks newer Debian packages, and makes operating systems of them from now on."""
        self.world.packages, self.world.python = "2", python
        locks.write_os_locks(self.project, "2.0-1", python)

    def find(self, cell: str) -> str:
        loaded = self.assembler().find(self.images(cell)[0])
        return loaded.id if loaded else ""

    def stored(self, cell: str) -> Image:
        """The image of a cell, which the store must have."""
        image = stored_images.find_stored_image(self.store, self.images(cell)[0])
        assert image is not None
        return image

    def layer(self, name: str, cell: str) -> oci.Layer:
        """A layer of wheels of a cell's image, which the store must have."""
        [planned] = [layer for layer in self.images(cell)[0].layers if layer.name == name]
        layer = stored_layers.stored_layer(self.store, planned.inputs)
        assert layer is not None
        return layer

    def config(self, image_id: str) -> dict[str, Any]:
        config: dict[str, Any] = json.loads(self.store.read(image_id))
        return config
