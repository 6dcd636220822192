"""Assembles images from layers: the default method. Makes every layer once, for all images that have it.

`start` starts all layers that the store lacks, at the same time: operating systems, layers of wheels, bytecode. `build`
waits for the layers of one image, writes its configuration and manifest, and loads it into the engine.
"""

from __future__ import annotations

import io
import sys
import tarfile
import threading
import zipfile
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, ThreadPoolExecutor, as_completed, wait
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from builder.build import operating_systems
from builder.build.operating_systems import SystemLayers
from builder.common import errors
from builder.common.console import Meter
from builder.common.errors import BuilderError, BuildError, DamagedError, VerifyError
from builder.engine.client import LONGEST_S
from builder.engine.load import Loader
from builder.engine.model import LoadedImage, Origin
from builder.engine.run import Run
from builder.index.download import CONNECTIONS, Fetcher, wheels_of_index
from builder.index.releases import Index
from builder.index.wheels import LockedWheel
from builder.layers import estargz, splice, stored_images, stored_layers
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import Image, Layer
from builder.layers.splice import Entry
from builder.layers.stored_images import UNTESTED
from builder.layers.wheel import FILE_MODE, PYTHON, SITE, new_folders, zipped
from builder.matrix.schema import Arch
from builder.plan import budget, plan
from builder.plan.layer_order import PlannedLayer
from builder.plan.plan import PlannedImage

ATTEMPTS = 4  # to splice wheels that another builder may remove meanwhile
COMPILE_S = LONGEST_S // 2  # before the container ends
_PROGRAM, _RESULT = "tmp/compile.py", "/tmp/bytecode.zip"  # noqa: S108  in a container that only this step uses


class Assembler:
    """Makes the images of one run. `start` begins to make all layers, `build` waits for the layers of one image.

    `jobs` operating systems are made at a time.
    """

    def __init__(self, systems: SystemLayers, *, jobs: int = 2) -> None:
        self._systems, self._lookup = systems, systems.lookup
        self._run = run = systems.run
        self._store = run.store
        self._loader = Loader(run.engine, run.store, str(run.project.root), run.view)
        self._fetcher: Fetcher[LockedWheel] | None = None

        # Files that `start` reads from the checkout.
        self._program = b""  # compiles bytecode
        self._compilers: dict[str, dict[str, Arch]] = {}  # operating systems, by the digest of their compiler
        self._files: dict[str, dict[str, Entry]] = {}  # by image
        self._unreadable: dict[str, BuilderError] = {}  # images with files that cannot be used

        # Everything that this run makes once, without layers of plain files. A future also carries the error of
        # making its layer, to every image that waits for it.
        self._layers: dict[str, Future[Layer]] = {}  # by inputs
        self._wheels: dict[str, Future[Path]] = {}  # by SHA-256
        self._uses: Counter[str] = Counter()  # layers that still need a wheel, by SHA-256
        self._os_images: dict[str, str] = {}  # ids of images of one operating system, to compile in, by its digest
        self._stopped = threading.Event()
        self._counting, self._loading, self._loading_system = threading.Lock(), threading.Lock(), threading.Lock()

        # More operating systems at once would delay the first image: one takes 28 s of processor time, 21 in mmdebstrap
        # and 7 to compress the layer. On two processors, four at once took 64-96 s each, a single one 15-27 s.
        self._making_systems = ThreadPoolExecutor(jobs, "system")
        self._fetching = ThreadPoolExecutor(CONNECTIONS, "fetch")
        # Most of these threads only wait for wheels. A splice keeps two processors busy and takes up to 150 MB.
        self._making_wheels = ThreadPoolExecutor(64, "wheels")
        self._splices = threading.Semaphore(max(1, jobs // 2))
        self._compiling = ThreadPoolExecutor(4, "container")

    def find(self, image: PlannedImage) -> LoadedImage | None:
        """The image, if store and engine both have it as planned."""
        return find_image(self._run, image, self._lookup.known)

    def start(self, images: Sequence[PlannedImage]) -> None:
        """Starts everything that the images need and the store lacks.

        Reads the files of the checkout now: a file that is edited during the build belongs to the next plan.
        """
        run, lookup, project = self._run, self._lookup, self._run.project
        self._program = project.path(plan.COMPILER).read_bytes()
        self._compilers = plan.systems(run.project)
        for image in images:
            try:
                self._files[image.id] = stored_layers.read_component_files(project, image)
            except BuilderError as error:
                self._unreadable[image.id] = error
            except OSError as error:
                self._unreadable[image.id] = errors.of_file(error)
        images = [image for image in images if image.id in self._files]

        # Operating systems, in the order of the images: from the store, a registry, or mmdebstrap.
        for image in {image.os_inputs: image for image in images}.values():
            if stored := lookup.in_store(image.os_inputs):
                self._layers[image.os_inputs] = _done(stored)
                continue
            try:
                inputs = operating_systems.read_inputs(project, image)
            except OSError as error:
                self._layers[image.os_inputs] = Future()
                self._layers[image.os_inputs].set_exception(errors.of_file(error))
                continue
            self._layers[image.os_inputs] = self._making_systems.submit(self._systems.provide, image, inputs)

        # Layers of wheels. The largest wheels are downloaded first, since they take longest; the layers are made in the
        # order in which their last wheels arrive.
        missing = []
        layers = (layer for image in images for layer in image.layers)
        for layer in {layer.inputs: layer for layer in layers if layer.kind == "wheels"}.values():
            if built := lookup.in_store(layer.inputs):
                self._layers[layer.inputs] = _done(built)
            else:
                missing.append(layer)
        if missing:
            self._uses = Counter(wheel.sha256 for layer in missing for wheel in layer.wheels)
            wheels = {wheel.sha256: wheel for layer in missing for wheel in layer.wheels}.values()
            total = sum(wheel.size for wheel in wheels)
            meter = Meter(run.view, "wheels", "downloaded", total, ends_row=True)
            source = wheels_of_index(Index(run.host.index))
            fetcher = self._fetcher = Fetcher(source, self._store.downloads, progress=meter.add)
            for wheel in sorted(wheels, key=lambda wheel: -wheel.size):
                self._wheels[wheel.sha256] = self._fetching.submit(fetcher.fetch, wheel)
            for layer in sorted(missing, key=lambda layer: -min(wheel.size for wheel in layer.wheels)):
                self._layers[layer.inputs] = self._making_wheels.submit(self._splice, layer, fetcher)

        # Bytecode, which needs an operating system and layers of wheels.
        for image in images:
            for layer in image.layers:
                if layer.kind == "bytecode" and layer.inputs not in self._layers:
                    self._layers[layer.inputs] = self._compiling.submit(self._compile, layer, image)

    def as_ready(self, images: Sequence[PlannedImage]) -> Iterator[PlannedImage]:
        """Yields an image when its layers are made or have failed: no image waits for the layers of another one."""
        waiting = list(images)
        while waiting:
            making = {
                image.id: [
                    future for layer in image.layers if (future := self._layers.get(layer.inputs)) and not future.done()
                ]
                for image in waiting
            }
            ready = [image for image in waiting if not making[image.id]]
            yield from ready
            waiting = [image for image in waiting if making[image.id]]
            if not ready:
                # Not for ever: Python handles a signal that arrives just before a wait begins only when the wait ends.
                wait(chain.from_iterable(making.values()), timeout=1, return_when=FIRST_COMPLETED)

    def build(self, image: PlannedImage) -> LoadedImage:
        """Assembles the image and loads it into the engine; its origin is `loaded` if the store had it before."""
        run = self._run
        run.view.begin(image.id, "assembling")
        known = {manifest.digest for manifest in self._store.images().values()}
        assembled = self.assemble(image)
        with self._loading:  # one at a time: two at once were not faster, and take more disk
            run.view.begin(image.id, "loading")
            meter = Meter(run.view, image.id, "loaded", 0)
            image_id = self._loader.load(assembled, meter.add)
        origin: Origin = "loaded" if assembled.manifest.digest in known else "built"
        return LoadedImage(id=image_id, digest=assembled.manifest.digest, origin=origin)

    def assemble(self, image: PlannedImage) -> Image:
        """Assembles the image in the store, named as untested. Raises the error of a layer that could not be made."""
        store, known = self._store, self._lookup.known
        if error := self._unreadable.get(image.id):
            raise error
        system = self._layers[image.os_inputs].result()
        stack = []
        for layer in image.layers:
            if layer.kind == "files":  # takes no time, so it is made here
                entries = stored_layers.component_file_entries(self._files[image.id], system.folders)
                stack.append(stored_layers.store_layer(store, layer, entries))
            else:
                stack.append(self._layers[layer.inputs].result())

        # Every machine must make the same layers: the first build records them in locks/layers.json.
        for planned, built in zip(image.layers, stack, strict=True):
            if planned.kind != "files":
                known.add(planned, built)
        known.write()

        # The paths of bytecode follow from the paths of the modules.
        contents = [
            (planned, stored_layers.read_stored_toc(store, built))
            for planned, built in zip(image.layers, stack, strict=True)
            if planned.kind not in ("os", "bytecode")
        ]
        for warning in stored_layers.check_paths(image.id, contents, set(system.taken)):
            self._run.view.say_once(warning)
        sizes = [(planned.name, built.size, built.unpacked) for planned, built in zip(image.layers, stack, strict=True)]
        budget.check_built(self._run.project.matrix, image.cell, sizes)
        assembled = stored_images.write_image(store, image, system, stack)
        stored_images.put_name(store, image, system, assembled, image.local_names[0] + UNTESTED)
        return assembled

    def record_tagged(self, image: PlannedImage) -> None:
        """Names the image in the store by its full tag, after it passed its tests and has its tags."""
        stored = stored_images.find_stored_image(self._store, image, self._lookup.known)
        system = self._lookup.in_store(image.os_inputs)
        if stored and system:
            name = image.local_names[0]
            stored_images.put_name(self._store, image, system, stored, name, instead_of=name + UNTESTED)

    def close(self) -> None:
        """Stops downloads and removes the images that containers ran in, after those containers ended.

        Waits for operating systems, layers and containers, but not after an interrupt, which is being handled while
        `closing` calls this.
        """
        wait = isinstance(sys.exception(), Exception | None)
        self._making_systems.shutdown(wait=wait, cancel_futures=True)
        if not wait:
            self._systems.runner.stop()
        self._stopped.set()
        if self._fetcher:
            self._fetcher.stop()
        for pool in (self._fetching, self._making_wheels, self._compiling):
            pool.shutdown(wait=wait, cancel_futures=True)
        for image_id in list(self._os_images.values()):
            with suppress(BuilderError):  # an earlier error is more useful; `sweep` removes the image
                self._run.engine.remove_image(image_id)

    # ---- layers

    def _splice(self, layer: PlannedLayer, fetcher: Fetcher[LockedWheel]) -> Layer:
        """Makes a layer of wheels when all are downloaded, then removes the wheels that no other layer needs."""
        for wheel in layer.wheels:
            self._wheels[wheel.sha256].result()
        built: Layer | None = None
        attempts = ATTEMPTS
        with self._splices:
            if self._stopped.is_set():
                raise CancelledError
            while built is None:
                try:
                    paths = [fetcher.path(wheel) for wheel in layer.wheels]
                    known = self._lookup.known.get(layer.inputs)
                    built = stored_layers.store_wheels(self._store, layer, paths, known)
                except FileNotFoundError:
                    # Another builder that shares the store may make the layer first, and then removes the wheels.
                    attempts -= 1
                    built = self._lookup.in_store(layer.inputs)
                    if built is None:
                        if not attempts:
                            raise
                        for wheel in layer.wheels:
                            fetcher.fetch(wheel)
        for wheel in layer.wheels:
            with self._counting:
                self._uses[wheel.sha256] -= 1
                is_last = not self._uses[wheel.sha256]
            if is_last:
                fetcher.drop(wheel)
        return built

    def _compile(self, layer: PlannedLayer, image: PlannedImage) -> Layer:
        """Makes a layer of bytecode: Debian's Python compiles the sources of layers of wheels, in a container.

        It is a layer of its own, so that a layer of wheels stays a pure function of its wheels. It is itself a pure
        function of the sources and of Debian's Python: unchecked-hash bytecode contains no timestamps, and the
        container compresses it with its own zlib. Raises BuildError, EngineError.
        """
        run, store, lookup = self._run, self._store, self._lookup
        if built := lookup.in_store(layer.inputs):
            return built
        if downloaded := lookup.download(image.id, layer.inputs):
            return downloaded

        # All operating systems with the image's Python give the same bytecode, so the first that is ready is used.
        # Those in the store are ready, even if no image of this run has them. Those of another architecture are slow.
        systems = {**self._compilers.get(image.compiler_inputs, {}), image.os_inputs: image.cell.arch}
        own = run.engine.info().arch
        candidates = sorted(systems, key=lambda inputs: (systems[inputs] != own, inputs != image.os_inputs, inputs))
        system = next(filter(None, map(lookup.in_store, candidates)), None)
        if system is None:
            started = [self._layers[inputs] for inputs in candidates if inputs in self._layers]
            ready = (future for future in as_completed(started) if not future.exception())
            system = next(ready, self._layers[image.os_inputs]).result()
        wheel_layers = [self._layers[inputs].result() for inputs in layer.compiled]
        # If several images need the layer, the row of the first image shows it.
        run.view.begin(image.id, f"compiling {layer.component}")
        with self._loading_system:
            if system.digest not in self._os_images:
                self._os_images[system.digest] = self._loader.load_bare(system)
            os_image = self._os_images[system.digest]

        with run.project.scratch() as scratch:
            tar_path, zip_path = Path(scratch) / "sources.tar", Path(scratch) / "bytecode.zip"
            try:
                with tarfile.open(tar_path, mode="w") as tar:
                    _add(tar, _PROGRAM, self._program)
                    for wheels in wheel_layers:  # of two files with one path, the later one stays
                        files = stored_layers.read_stored_toc(store, wheels)
                        with store.path(wheels.digest).open("rb") as blob:
                            for file in files:
                                is_in_site = file.name.startswith(f"{SITE}/")
                                if is_in_site and file.type == "reg" and file.name.endswith((".py", ".pyc")):
                                    _add(tar, file.name, estargz.read_content(blob, file))
            except (DamagedError, VerifyError):
                store.remove_damaged(wheels.digest for wheels in wheel_layers)
                raise
            output: deque[str] = deque(maxlen=15)
            command, variables = [PYTHON, "-B", f"/{_PROGRAM}", _RESULT], {"PYTHONHASHSEED": "0"}
            with (
                run.engine.running(os_image, checkout=str(run.project.root), network_mode="none") as container,
                tar_path.open("rb") as archive,
                zip_path.open("wb") as out,
            ):
                container.put(archive)
                if status := container.run_by_line(command, variables, COMPILE_S, output.append):
                    raise BuildError(
                        f"compile.py ended with status {status} in the container that compiles bytecode\n"
                        + "".join(output)
                    )
                container.read(_RESULT, out)
            with zip_path.open("rb") as archive:
                entries = splice.prefetched_first(_bytecode_entries(archive), layer.prefetch)
                return stored_layers.store_layer(store, layer, entries, lookup.known.get(layer.inputs))


def find_image(run: Run, image: PlannedImage, known: KnownLayers) -> LoadedImage | None:
    """The image, if store and engine both have it as planned."""
    try:
        stored = stored_images.find_stored_image(run.store, image, known)
    except DamagedError as error:
        run.view.say(f"{image.id}: {error}; it will be rebuilt")
        run.store.discard(error.blob)
        return None
    if stored is None:
        return None
    loaded = LoadedImage(id=stored.image_id(run.engine.info().store), digest=stored.manifest.digest)
    return loaded if run.engine.image(loaded.id) else None


def _done(layer: Layer) -> Future[Layer]:
    future: Future[Layer] = Future()
    future.set_result(layer)
    return future


def _add(tar: tarfile.TarFile, path: str, content: bytes) -> None:
    info = tarfile.TarInfo(path)
    info.size, info.mode = len(content), 0o644
    tar.addfile(info, io.BytesIO(content))


def _bytecode_entries(file: BinaryIO) -> Iterator[Entry]:
    """The zip that compile.py wrote, as entries of a layer."""
    folders: set[str] = set()
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if not member.filename.startswith(f"{SITE}/") or not member.filename.endswith(".pyc"):
                raise BuildError(f"the container that compiles bytecode returned {member.filename!r}")
            yield from new_folders(member.filename, folders)
            yield Entry(path=member.filename, mode=FILE_MODE, content=zipped(file, member, "bytecode.zip"))
