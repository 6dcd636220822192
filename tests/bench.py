"""How long things take here: medians of several runs, and their ratios to the named alternative, in one go.

Works in a copy of this checkout with a namespace and a store of its own, and with a registry (Debian's docker-registry)
on the loopback. Cold runs empty BuildKit's cache on this engine, of all projects: nothing is left but the base image.
The images that people use are not touched.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import requests
from isal import isal_zlib
from rich.console import Console
from rich.table import Table

from builder import assemble, host, load, plan, push, splice, wheel
from builder.assemble import Assembler
from builder.cells import CUDA
from builder.engine import Engine
from builder.fetch import Fetcher
from builder.plan import PlannedImage
from builder.project import Project
from builder.push import Blob
from builder.reference import ImageRef
from builder.registry import Registry
from builder.store import MANIFEST_TYPE, Store
from builder.view import View, duration, size
from builder.work import Work
from tests import bench_start

ROOT = Path(__file__).resolve().parent.parent
BUILDER = str(Path(sys.executable).parent / "builder")
NAMESPACE = "builder-bench"
PLAIN, JUPYTER, OTHER_PYTHON = "pt-2.9-cu128-py311", "pt-2.9-cu128-py311-jupyter", "pt-2.9-cu128-py313"
PORT = 5057
REPOSITORY = f"{NAMESPACE}/pt-cuda"


@dataclass
class Results:
    """Name of a measurement -> seconds of each run; `facts` are figures that are no times."""

    times: dict[str, list[float]] = field(default_factory=dict)
    facts: dict[str, None] = field(default_factory=dict)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        os.sync()  # what was written before is not for this run to wait for
        began = time.perf_counter()
        yield
        self.times.setdefault(name, []).append(time.perf_counter() - began)
        print(f"  {name}: {self.times[name][-1]:.1f} s", file=sys.stderr, flush=True)

    def median(self, name: str) -> float:
        return statistics.median(self.times[name])


def main() -> int:
    """Runs the benchmarks and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each short step (default 5)")
    parser.add_argument("--cold", type=int, default=3, help="cold runs of each method; 0 leaves them out (default 3)")
    parser.add_argument("--publish", nargs=3, metavar=("CHECKOUT", "STORE", "CELL"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.publish:
        checkout, store, cell = chosen.publish
        print(json.dumps(publish(Path(checkout), Store(Path(store)), cell)))
        return 0
    results = Results()
    start_of_jupyter(results, chosen.repeat)
    with tempfile.TemporaryDirectory(prefix="builder-bench-") as scratch:
        bench = Bench(Path(scratch), results)
        try:
            bench.steps(chosen.repeat)
            bench.wheels(chosen.repeat)
            for _ in range(chosen.cold):
                bench.assembled()
                bench.dockerfile()
            bench.nothing_to_do(chosen.repeat)
        finally:
            bench.remove_images()
    show(results)
    return 0


def start_of_jupyter(results: Results, repeat: int) -> None:
    """Of an image of this checkout, as people have it."""
    found = bench_start.measure(Engine.connect(), Project(ROOT), results.timed, repeat)
    if found is None:
        results.facts["start of Jupyter: not measured, no Jupyter image is built (builder images '*-jupyter')"] = None
        return
    ratio = results.median(found[0]) / results.median(found[1])
    results.facts[f"start of Jupyter: {ratio:.1f} times as long as a container that does nothing"] = None


class Bench:
    """One benchmark in a folder of its own."""

    def __init__(self, scratch: Path, results: Results) -> None:
        self._scratch = scratch
        self._results = results
        self._checkout = copy(scratch / "checkout")
        self._engine = Engine.connect()
        self._lent = host.read()
        self._store = scratch / "store"
        _run(self._checkout, self._store, ["base"])

    # ---- short steps

    def steps(self, repeat: int) -> None:
        for name, arguments in STEPS.items():
            for _ in range(repeat):
                with self._results.timed(name):
                    _run(self._checkout, self._store, arguments)

    def nothing_to_do(self, repeat: int) -> None:
        """`builder images` over the whole matrix when all is done."""
        _run(self._checkout, self._store, ["images"])
        for _ in range(repeat):
            with self._results.timed("nothing to do: images"):
                _run(self._checkout, self._store, ["images"])

    # ---- wheel to layer

    def wheels(self, repeat: int) -> None:
        """Splicing one wheel, against inflating it and hashing that in one thread."""
        store = Store(self._store)
        store.prepare()
        image = next(one for one in self._plan() if one.id == PLAIN)
        fetcher = Fetcher(self._lent.index, self._store / "downloads")
        for name in ("torch", "nvidia-cudnn-cu12"):
            locked = next(one for one in image.wheels if one.name == name)
            path = fetcher.fetch(locked)
            place = wheel.CUDA if locked.component == CUDA else wheel.environment(image.cell.python)
            unpacked = 0
            for _ in range(repeat):
                with self._results.timed(f"{name}: inflate and SHA-256 alone"):
                    unpacked = inflate_alone(path, locked.file, place)
                with self._results.timed(f"{name}: wheel to layer"), path.open("rb", buffering=splice.CHUNK) as file:
                    store.write(lambda out: splice.write(wheel.layer_entries([(locked.file, file)], place), out).digest)  # noqa: B023
            alone, spliced = (
                self._results.median(f"{name}: {what}") for what in ("inflate and SHA-256 alone", "wheel to layer")
            )
            fact = (
                f"{name}: {unpacked / spliced / 1e9:.2f} GB/s to a layer on disk, {unpacked / alone / 1e9:.2f} GB/s "
                f"inflate and SHA-256 alone: {alone / spliced:.2f} of it"
            )
            self._results.facts[fact] = None
            fetcher.drop(locked)

    # ---- to a registry

    def assembled(self) -> None:
        """Cold; then a second variant; then a second Python: each to a registry that serves it."""
        shutil.rmtree(self._store, ignore_errors=True)
        self.remove_images()
        self._engine.prune_cache()
        with registry(self._scratch / "registry"):
            with self._results.timed("assembled, cold, to the registry"):
                first = self._publish(PLAIN)
            with self._results.timed("assembled, second variant, to the registry"):
                self._publish(JUPYTER)
            with self._results.timed("assembled, second Python, to the registry"):
                second = self._publish(OTHER_PYTHON)
            loaded, later = self._load(PLAIN), self._load(OTHER_PYTHON)
        self._results.facts |= {
            f"memory of the assembling process, cold: {size(first['memory'])}": None,
            f"second Python: {size(second['fetched'])} fetched, {size(second['sent'])} sent, {size(second['skipped'])} "
            f"in the registry already; loaded {size(later)} after {size(loaded)} for the first": None,
        }

    def dockerfile(self) -> None:
        """The same by the rendered Dockerfile and `docker push`."""
        self.remove_images()
        self._engine.prune_cache()
        with registry(self._scratch / "registry"):
            for cell, name in ((PLAIN, "cold"), (JUPYTER, "second variant")):
                with self._results.timed(f"Dockerfile and docker push, {name}, to the registry"):
                    _run(self._checkout, self._store, ["build", "--method", "dockerfile", cell])
                    reference = ImageRef(registry=f"127.0.0.1:{PORT}", repository=REPOSITORY, tag=cell)
                    newest = self._engine.images(f"gpu-images.cell={cell}")[0].id
                    self._engine.tag(newest, reference)
                    subprocess.run(["docker", "push", "--quiet", str(reference)], check=True, capture_output=True)
                    served(cell)

    def _publish(self, cell: str) -> dict[str, int]:
        """In a process of its own, whose start counts, as it does for `builder build`."""
        command = [sys.executable, __file__, "--publish", str(self._checkout), str(self._store), cell]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{cell} was not published:\n{done.stderr}")
        found: dict[str, int] = json.loads(done.stdout)
        served(cell)
        return found

    def _plan(self) -> Sequence[PlannedImage]:
        project = Project(self._checkout)
        return plan.make_locked(project, project.cells).images

    def _load(self, cell: str) -> int:
        """Bytes that went to the engine for an image of the store."""
        store = Store(self._store)
        made = assemble.find(store, next(one for one in self._plan() if one.id == cell))
        assert made is not None
        sent: list[int] = []
        load.load(self._engine, store, made, sent.append)
        return sum(sent)

    def remove_images(self) -> None:
        """Removes the benchmark's images: those built for its namespace, tagged or not."""
        for image in self._engine.images("org.opencontainers.image.ref.name"):
            if image.labels["org.opencontainers.image.ref.name"].startswith(f"{NAMESPACE}/"):
                for tag in image.tags:
                    self._engine.remove_image(tag)
                self._engine.remove_image(image.id)


STEPS = {
    "start of the program (--help)": ["--help"],
    "lock --check": ["lock", "--check"],
    "lock (index asked, warm uv cache)": ["lock"],
    "plan": ["plan"],
    "render --check": ["render", "--check"],
}


def publish(checkout: Path, store: Store, cell: str) -> dict[str, int]:
    """Assembles an image and pushes it under its id; bytes fetched, sent, there already, and of memory at most.

    Without tests, which the other method's figure is without too; `builder push` does not publish such images.
    """
    project, lent = Project(checkout), host.read()
    image = next(one for one in plan.make_locked(project, project.cells).images if one.id == cell)
    work = Work(engine=Engine.connect(), project=project, host=lent, view=View(Console(quiet=True)))
    with store.used():
        assembler = Assembler(work, store)
        known = {layer.inputs for layer in image.layers if store.recall(layer.inputs)}
        assembler.prepare([image])
        made = assembler.assemble(image)
        assembler.close()
        reference = ImageRef(registry=f"127.0.0.1:{PORT}", repository=REPOSITORY, tag=cell)
        target, manifest = Registry(reference, host=lent, write=True), store.read(made.manifest.digest)
        blobs = [made.config, *(layer.descriptor for layer in made.layers)]
        pushed = push.push(
            target,
            manifest=manifest,
            media_type=MANIFEST_TYPE,
            blobs=[Blob(digest=one.digest, size=one.size, path=store.path(one.digest)) for one in blobs],
            mount_from=(),
            progress=lambda _: None,
        )
        push.tag(target, pushed.digest, manifest, MANIFEST_TYPE, versioned=[], moving=[cell])
    return {
        "fetched": sum(layer.bytes for layer in image.layers if layer.wheels and layer.inputs not in known),
        "sent": pushed.sent,
        "skipped": pushed.skipped,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def inflate_alone(path: Path, file: str, place: wheel.Place) -> int:
    """Inflates every entry of a wheel and hashes what comes, in one thread; bytes that came."""
    hashed, count = hashlib.sha256(), 0
    with path.open("rb", buffering=splice.CHUNK) as opened:
        for entry in wheel.install(file, opened, place):
            content = entry.content
            if not isinstance(content, splice.Zipped):
                continue
            opened.seek(content.offset)
            stream, left = isal_zlib.decompressobj(-15), content.length
            while left:
                chunk = opened.read(min(splice.CHUNK, left))
                left -= len(chunk)
                plain = stream.decompress(chunk) if content.is_deflated else chunk
                hashed.update(plain)
                count += len(plain)
    return count


@contextmanager
def registry(folder: Path) -> Iterator[None]:
    """Debian's docker-registry, empty, on the loopback."""
    if not shutil.which("docker-registry"):
        subprocess.run(["apt-get", "install", "-y", "-q", "docker-registry"], check=True, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    settings = folder / "config.yml"
    settings.write_text(
        "version: 0.1\nlog: {level: error}\n"
        f"storage: {{filesystem: {{rootdirectory: {folder}/data}}}}\nhttp: {{addr: 127.0.0.1:{PORT}}}\n"
    )
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(settings)], stdout=log, stderr=log)
    try:
        for _ in range(100):
            try:
                requests.get(f"http://127.0.0.1:{PORT}/v2/", timeout=5)
                break
            except requests.ConnectionError:
                time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def served(tag: str) -> None:
    """The registry serves the image: its manifest, and every blob of it is there."""
    base = f"http://127.0.0.1:{PORT}/v2/{REPOSITORY}"
    kinds = f"{MANIFEST_TYPE}, application/vnd.docker.distribution.manifest.v2+json"
    found = requests.get(f"{base}/manifests/{tag}", headers={"Accept": kinds}, timeout=30).json()
    for blob in (found["config"], *found["layers"]):
        requests.head(f"{base}/blobs/{blob['digest']}", timeout=30).raise_for_status()


def copy(target: Path) -> Path:
    """The working tree under another namespace, with a second Python, locked and rendered."""
    ignored = shutil.ignore_patterns(".git", ".venv", ".builder", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, target, symlinks=True, ignore=ignored)
    matrix = target / "matrix.yaml"
    text = matrix.read_text(encoding="utf-8")
    lines = [f"namespace: {NAMESPACE}" if line.startswith("namespace:") else line for line in text.splitlines()]
    text = "\n".join(lines).replace('cuda: ["12.8"], python: ["3.11"]', 'cuda: ["12.8"], python: ["3.11", "3.13"]')
    matrix.write_text(text + "\n", encoding="utf-8")
    _run(target, target / "no-store", ["lock"])
    _run(target, target / "no-store", ["render"])
    return target


def _run(checkout: Path, store: Path, arguments: list[str]) -> None:
    """A command of the program; one that fails ends the benchmark."""
    command = [BUILDER, "--root", str(checkout), "--store", str(store), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"builder {' '.join(arguments)} failed:\n{done.stderr}")


def show(results: Results) -> None:
    console = Console(highlight=False)
    table = Table("what", "median", "fastest", "slowest", "runs", box=None)
    for name, times in results.times.items():
        table.add_row(name, duration(results.median(name)), duration(min(times)), duration(max(times)), str(len(times)))
    console.print(table)
    for fact in results.facts:
        console.print(fact)
    for name in ("cold", "second variant"):
        ours, theirs = f"assembled, {name}, to the registry", f"Dockerfile and docker push, {name}, to the registry"
        if ours in results.times:
            console.print(f"{name}: {results.median(theirs) / results.median(ours):.1f} times faster than {theirs}")
    if "assembled, second variant, to the registry" in results.times:
        cold = results.median("Dockerfile and docker push, cold, to the registry")
        ratio = cold / results.median("assembled, second variant, to the registry")
        console.print(f"second variant: {ratio:.1f} times faster than a first image by Dockerfile and docker push")


if __name__ == "__main__":
    sys.exit(main())
