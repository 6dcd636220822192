"""Benchmarks builder itself: medians of several runs, and their ratios to the alternatives, in one go.

Works in a copy of this checkout with its own namespace and store, and with a registry (Debian's docker-registry) on the
loopback. Cold runs empty the engine's BuildKit cache for all projects: only the base image is left. Images outside the
benchmark's namespace are not touched.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import requests
from isal import isal_zlib
from rich.console import Console
from rich.table import Table

from benchmarks import release, start
from benchmarks.common import NAMESPACE, PORT, ROOT, Results, copy, registry, run
from builder.build.assemble import Assembler
from builder.build.layer_lookup import LayerLookup
from builder.build.operating_systems import SystemLayers
from builder.common.console import View
from builder.common.reference import ImageRef
from builder.common.text import duration, size
from builder.engine.client import Engine
from builder.engine.load import Loader, docker_archive
from builder.engine.run import Run
from builder.index import host
from builder.index.download import Fetcher, wheels_of_index
from builder.index.releases import Index
from builder.layers import splice, stored_images, wheel
from builder.layers.estargz import CHUNK
from builder.layers.oci import MANIFEST_TYPE, Layer, Manifest
from builder.layers.splice import Entry
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.matrix.tags import CELL_LABEL
from builder.plan import plan
from builder.plan.plan import PlannedImage
from builder.registry import transfer
from builder.registry.client import Repository

PLAIN, JUPYTER, OTHER_PYTHON = "pt-2.9-cu128-py313", "pt-2.9-cu128-py313-jupyter", "pt-2.9-cu128-py311"
REPOSITORY = f"{NAMESPACE}/pt-cuda"
STEPS = {
    "start of the program (--help)": ["--help"],
    "lock --check": ["lock", "--check"],
    "lock (queries the index, warm uv cache)": ["lock"],
    "plan": ["plan"],
    "render --check": ["render", "--check"],
}
PARTS = ("start", "steps", "wheels", "cold", "nothing", "release")
LOADS = "first image into the engine", "first image into the engine by docker load"
ASSEMBLED, BY_DOCKERFILE = "assembled, {}, to the registry", "Dockerfile and docker push, {}, to the registry"


def main() -> int:
    """Runs the benchmarks and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each short step (default 5)")
    parser.add_argument("--cold", type=int, default=3, help="cold runs of each method (default 3)")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this part; repeat it for several")
    parser.add_argument("--publish", nargs=3, metavar=("CHECKOUT", "STORE", "CELL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.publish:
        checkout, store, cell = options.publish
        print(json.dumps(publish(Path(checkout), Store(Path(store)), cell)))
        return 0
    results, parts = Results(), options.part or PARTS
    if "start" in parts:
        jupyter_start(results, options.repeat)
    with tempfile.TemporaryDirectory(prefix="builder-bench-") as scratch:
        bench = Bench(Path(scratch), results)
        measurements = {
            "steps": lambda: bench.steps(options.repeat),
            "wheels": lambda: bench.wheels(options.repeat),
            "cold": lambda: bench.cold(options.cold, options.repeat),
            "nothing": lambda: bench.nothing_to_do(options.repeat),
            "release": lambda: release.measure(results, Path(scratch), bench.store),
        }
        try:
            for part in parts:
                if part in measurements:
                    measurements[part]()
        finally:
            bench.remove_images()
    show(results)
    return 0


def jupyter_start(results: Results, repeat: int) -> None:
    """Measures a Jupyter image of this checkout."""
    if names := start.measure(Engine.connect(), Project(ROOT), results.timed, repeat):
        ratio = results.median(names[0]) / results.median(names[1])
        results.facts.append(f"start of Jupyter: {ratio:.1f} times as long as a container that does nothing")
    else:
        results.facts.append("start of Jupyter: not measured, no Jupyter image is built (builder images '*-jupyter')")


class Bench:
    """One benchmark in its own folder."""

    def __init__(self, scratch: Path, results: Results) -> None:
        self._scratch = scratch
        self._results = results
        self._checkout = copy(scratch / "checkout")
        self.store = scratch / "store"
        self._engine = Engine.connect()

    def _run(self, *arguments: str) -> None:
        run(self._checkout, self.store, *arguments)

    def _repeat(self, name: str, repeat: int, *arguments: str) -> None:
        for _ in range(repeat):
            with self._results.timed(name):
                self._run(*arguments)

    def steps(self, repeat: int) -> None:
        for name, arguments in STEPS.items():
            self._repeat(name, repeat, *arguments)

    def nothing_to_do(self, repeat: int) -> None:
        """`builder images` when all default images are built and tested."""
        self._run("images")
        self._repeat("nothing to do: images", repeat, "images")

    def wheels(self, repeat: int) -> None:
        """Wheel to layer, new and known, against inflating and hashing the same wheel in one thread."""
        store = Store(self.store)
        store.prepare()
        image = planned(self._checkout, PLAIN)
        fetcher = Fetcher(wheels_of_index(Index(host.read_host().index)), self.store / "downloads")
        for locked in (each for each in image.wheels if each.name in ("torch", "nvidia-cudnn-cu12")):
            path = fetcher.fetch(locked)
            alone, layer, known = (
                f"{locked.name}: {what}" for what in ("inflate and SHA-256 alone", "wheel to layer", "to a known layer")
            )
            unpacked = 0
            for _ in range(repeat):
                with self._results.timed(alone):
                    unpacked = inflate_alone(path, locked.file, image.cell.python)
                with self._results.timed(layer), path.open("rb", buffering=CHUNK) as file:
                    entries = wheel.layer_entries([(locked.file, file)], image.cell.python)
                    written = _store(store, entries, "")
                store.discard(written.digest)
                with self._results.timed(known), path.open("rb", buffering=CHUNK) as file:
                    entries = wheel.layer_entries([(locked.file, file)], image.cell.python)
                    _store(store, entries, written.diff_id)
                store.discard(written.digest)
            rates = [unpacked / self._results.median(name) / 1e9 for name in (layer, alone)]
            self._results.facts.append(
                f"{locked.name}: {rates[0]:.2f} GB/s to a layer on disk, {rates[1]:.2f} GB/s inflate and SHA-256 "
                f"alone: ratio {rates[0] / rates[1]:.2f}; a known layer takes "
                f"{self._results.median(known) / self._results.median(layer):.2f} of a new one's time"
            )
            fetcher.drop(locked)

    def cold(self, runs: int, repeat: int) -> None:
        """Both methods, several times; then the load of an assembled image."""
        for _ in range(runs):
            self.assembled()
            self.dockerfile()
        self.load(repeat)

    def assembled(self) -> None:
        """Cold, then a second variant, then a second Python, each until the registry serves it."""
        shutil.rmtree(self.store, ignore_errors=True)
        self._clear()
        with registry(self._scratch / "registry"):
            published = {}
            for cell, name in ((PLAIN, "cold"), (JUPYTER, "second variant"), (OTHER_PYTHON, "second Python")):
                with self._results.timed(ASSEMBLED.format(name)):
                    published[cell] = self._publish(cell)
            loaded = {cell: size(self._load(cell)) for cell in (PLAIN, OTHER_PYTHON)}
        counts = {name: size(count) for name, count in published[OTHER_PYTHON].items()}
        self._results.facts += [
            f"memory of the assembling process, cold: {size(published[PLAIN]['memory'])}",
            f"second Python: {counts['fetched']} fetched, {counts['sent']} sent, {counts['present']} already in the "
            f"registry; loaded {loaded[OTHER_PYTHON]} after {loaded[PLAIN]} for the first",
        ]

    def dockerfile(self) -> None:
        """The same by the rendered Dockerfile and `docker push`."""
        self._clear()
        with registry(self._scratch / "registry"):
            for cell, name in ((PLAIN, "cold"), (JUPYTER, "second variant")):
                with self._results.timed(BY_DOCKERFILE.format(name)):
                    self._run("build", "--method", "dockerfile", cell)
                    newest = self._engine.images(f"{CELL_LABEL}={cell}")[0]
                    self._engine.tag(newest.id, reference(cell))
                    subprocess.run(["docker", "push", "--quiet", str(reference(cell))], check=True, capture_output=True)
                    check_served(cell)

    def load(self, repeat: int) -> None:
        """The first image into the engine, and `docker load` of an archive of the same image, already written."""
        self.remove_images()
        if self._engine.images(CELL_LABEL):
            self._results.facts.append("first load: not measured, the engine has other images, which may share layers")
            return
        store = Store(self.store)
        image = stored_images.find_stored_image(store, planned(self._checkout, PLAIN))
        assert image is not None
        path = self._scratch / "archive.tar"
        with path.open("wb") as out:
            out.writelines(docker_archive(store, image))
        for _ in range(min(repeat, 3)):
            self.remove_images()
            with self._results.timed(LOADS[0]):
                self._load(PLAIN)
            self.remove_images()
            with self._results.timed(LOADS[1]):
                subprocess.run(["docker", "load", "--quiet", "--input", str(path)], check=True, capture_output=True)
            self._engine.tag(image.image_id(self._engine.info().store), reference(PLAIN))
        path.unlink()

    def _clear(self) -> None:
        self.remove_images()
        subprocess.run(["docker", "builder", "prune", "--all", "--force"], check=True, capture_output=True)

    def _publish(self, cell: str) -> dict[str, int]:
        """In a process of its own: its start counts, as it does for `builder build`."""
        command = [sys.executable, "-m", "benchmarks.build", "--publish", str(self._checkout), str(self.store), cell]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
        if done.returncode:
            raise SystemExit(f"publishing {cell} failed:\n{done.stderr}")
        counts: dict[str, int] = json.loads(done.stdout)
        check_served(cell)
        return counts

    def _load(self, cell: str) -> int:
        """Loads an image of the store into the engine; returns the bytes of layers that the engine unpacked."""
        store = Store(self.store)
        image = stored_images.find_stored_image(store, planned(self._checkout, cell))
        assert image is not None
        unpacked: list[int] = []
        loader = Loader(self._engine, store, str(self._checkout), View(Console(quiet=True)))
        self._engine.tag(loader.load(image, unpacked.append), reference(cell))
        return sum(unpacked)

    def remove_images(self) -> None:
        """Removes the tags of the benchmark's namespace, and the images that have no other tag."""
        for image in self._engine.images(CELL_LABEL):
            for tag in image.tags:
                if ImageRef.parse(tag).repository.startswith(f"{NAMESPACE}/"):
                    self._engine.remove_image(tag)


def planned(checkout: Path, cell: str) -> PlannedImage:
    project = Project(checkout)
    return plan.make_locked_plan(project, project.select([cell])).images[0]


def reference(cell: str) -> ImageRef:
    return ImageRef(registry=f"127.0.0.1:{PORT}", repository=REPOSITORY, tag=cell)


def publish(checkout: Path, store: Store, cell: str) -> dict[str, int]:
    """Assembles an image and pushes it, tagged with its id; returns bytes fetched, sent and already present, and peak
    memory.

    Without tests, as by the other method; `builder stage` does not stage untested images.
    """
    image, settings = planned(checkout, cell), host.read_host()
    run = Run(checkout=Project(checkout), host=settings, store=store, view=View(Console(quiet=True)))
    with store.used():
        assembler = Assembler(SystemLayers.of(LayerLookup.of(run)))
        missing = [layer for layer in image.layers if layer.wheels and not store.get_record(layer.inputs)]
        assembler.start([image])
        assembled = assembler.assemble(image)
        assembler.close()
        target = Repository(reference(cell), host=settings, write=True)
        manifest = Manifest.of(store.read(assembled.manifest.digest), MANIFEST_TYPE)
        blobs = [assembled.config, *(layer.descriptor for layer in assembled.layers)]
        pushed = transfer.send_blobs(target, {blob: store.path(blob.digest) for blob in blobs})
        target.put_manifest(cell, manifest.content, manifest.media_type)
    return {
        "fetched": sum(layer.bytes for layer in missing),
        "sent": pushed.sent,
        "present": pushed.present,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _store(store: Store, entries: Iterable[Entry], diff_id: str) -> Layer:
    with store.new_blob() as blob:
        layer = splice.write_layer(entries, blob.file, diff_id=diff_id)
        blob.stored_as = layer.digest
    return layer


def inflate_alone(path: Path, file: str, python: str) -> int:
    """Inflates every entry of a wheel and hashes the content, in one thread; returns the bytes inflated."""
    sha256, count = hashlib.sha256(), 0
    with path.open("rb", buffering=CHUNK) as opened:
        for entry in wheel.install(file, opened, python):
            content = entry.content
            if not isinstance(content, splice.Zipped):
                continue
            opened.seek(content.offset)
            stream, left = isal_zlib.decompressobj(-15), content.length
            while left:
                chunk = opened.read(min(CHUNK, left))
                left -= len(chunk)
                plain = stream.decompress(chunk) if content.is_deflated else chunk
                sha256.update(plain)
                count += len(plain)
    return count


def check_served(tag: str) -> None:
    """Raises requests.HTTPError unless the registry has the image's manifest and every blob of it."""
    base = f"http://127.0.0.1:{PORT}/v2/{REPOSITORY}"
    types = f"{MANIFEST_TYPE}, application/vnd.docker.distribution.manifest.v2+json"
    answer = requests.get(f"{base}/manifests/{tag}", headers={"Accept": types}, timeout=30)
    answer.raise_for_status()
    manifest = answer.json()
    for blob in (manifest["config"], *manifest["layers"]):
        requests.head(f"{base}/blobs/{blob['digest']}", timeout=30).raise_for_status()


def show(results: Results) -> None:
    console = Console(highlight=False)
    table = Table("measurement", "median", "fastest", "slowest", "runs", box=None)
    for name, times in results.times.items():
        table.add_row(name, duration(results.median(name)), duration(min(times)), duration(max(times)), str(len(times)))
    console.print(table)
    for fact in dict.fromkeys(results.facts):
        console.print(fact)
    if LOADS[0] in results.times:
        ratio = results.median(LOADS[1]) / results.median(LOADS[0])
        console.print(f"{LOADS[0]}: {ratio:.1f} times faster than docker load")
    for name, other in (("cold", "cold"), ("second variant", "second variant"), ("second variant", "cold")):
        ours, theirs = ASSEMBLED.format(name), BY_DOCKERFILE.format(other)
        if ours in results.times:
            console.print(f"{ours}: {results.median(theirs) / results.median(ours):.1f} times faster than {theirs}")


if __name__ == "__main__":
    sys.exit(main())
