"""Measures staging and releasing: a first release, one without changes, one with a changed component, one with another
operating system, and a new variant from a machine with an empty store.

The images are real ones, with evidence that this program writes: it runs none of their tests. The registry is on the
loopback, so the seconds are those of the program and the registry; bytes and requests are the same elsewhere.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.common import BUILDER, PORT, Results, copy, registry, run
from builder.build.assemble import Assembler
from builder.build.layer_lookup import LayerLookup
from builder.build.operating_systems import SystemLayers
from builder.common.console import View
from builder.common.text import size
from builder.engine.run import Run
from builder.evidence import results
from builder.evidence.results import Evidence
from builder.evidence.suite import IMAGE_TESTS, Suite
from builder.index import host
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan import plan

GROUPS = ("pt-2.9-cu128-py313", "tf-2.21-cu128-py311", "jax-0.10-cu128-py311")
FEW = (*GROUPS, f"{GROUPS[0]}-jupyter", f"{GROUPS[0]}-full")
MORE = 23
VARIANTS = ("", "-jupyter", "-full", *(f"-v{number}" for number in range(1, MORE)))
ALL = tuple(f"{group}{variant}" for group in GROUPS for variant in VARIANTS)
NEW, NEW_VARIANT = f"{GROUPS[0]}-v1", "a new image of known layers, staged from a machine with an empty store"
COMPONENT, SYSTEM = "templates/jupyter/files/etc/services.d/jupyter/run", "templates/os.j2"
REQUEST = re.compile(rb'"(GET|HEAD|PUT|POST|PATCH|DELETE) ')


class Machine:
    """A checkout whose matrix names a registry, and a store."""

    def __init__(self, checkout: Path, store: Path, log: Path) -> None:
        self.checkout, self.store, self.log = checkout, store, log

    def assemble(self, cells: Sequence[str]) -> list[str]:
        """Assembles images in the store and writes evidence for them; returns their cells."""
        project, store = Project(self.checkout), Store(self.store)
        images = plan.make_locked_plan(project, project.select(cells)).images
        settings, view = host.host_for_project(project), View(Console(quiet=True))
        run = Run(checkout=project, host=settings, store=store, view=view)
        suite = Suite.of(self.checkout)
        with store.used():
            assembler = Assembler(SystemLayers.of(LayerLookup.of(run)))
            assembler.start(images)
            for image in images:
                assembled = assembler.assemble(image)
                proof = Evidence(
                    image=assembled.manifest.digest,
                    cell=image.id,
                    plan=image.plan,
                    suite=dict(suite.files),
                    kind="image",
                    passed=tuple(sorted(suite.of_image(image.components, IMAGE_TESTS))),
                    failed=(),
                )
                results.write_evidence(project.state, proof)
            assembler.close()
        return [image.id for image in images]

    def measure(self, results: Results, name: str, *arguments: str) -> str:
        """Times a command, and notes its summary and requests; returns what it wrote to standard output."""
        before = len(REQUEST.findall(self.log.read_bytes()))
        with results.timed(name):
            command = [BUILDER, "--root", str(self.checkout), "--store", str(self.store), *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"builder {' '.join(arguments)} failed:\n{done.stderr}")
        requests = len(REQUEST.findall(self.log.read_bytes())) - before
        summary = [line for line in done.stderr.splitlines() if line.startswith("release ")][-1:]
        results.facts.append(f"{name}: {', '.join([*summary, f'{requests} requests'])}")
        return done.stdout


def measure(results: Results, scratch: Path, store: Path) -> None:
    """Stages and releases images that are assembled in `store`."""
    with registry(scratch / "registry") as log:
        key = _key(results, scratch)
        machine = Machine(prepared(scratch / "release"), store, log)
        for cells in (FEW, ALL):
            machine.assemble(cells)
            _release(machine, results, cells, key, "first")
            if cells == FEW:
                _new_machine(results, scratch, machine, key)
            _release(machine, results, cells, key, "nothing changed")
            for what, path in (("a component changed", COMPONENT), ("Debian packages changed", SYSTEM)):
                with (machine.checkout / path).open("a", encoding="utf-8") as file:
                    file.write(f"# {len(cells)}\n" if path == COMPONENT else f"RUN echo {len(cells)} > /etc/changed\n")
                run(machine.checkout, machine.store, "render")
                machine.assemble(cells)
                _release(machine, results, cells, key, what)


def _release(machine: Machine, results: Results, cells: Sequence[str], key: Sequence[str], what: str) -> None:
    name = f"{len(cells)} images, {what}"
    output = machine.measure(results, f"stage {name}", "stage", *cells, *key, "--format", "github")
    stamp = output.strip().removeprefix("stamp=")
    machine.measure(results, f"release {name}", "release", stamp, "--allow-untested-gpu", *key)


def _new_machine(results: Results, scratch: Path, machine: Machine, key: Sequence[str]) -> None:
    """A variant of the same components as another one, from a machine without layers and images."""
    checkout, store = scratch / "other", Store(scratch / "other-store")
    shutil.copytree(machine.checkout, checkout, symlinks=True, ignore=shutil.ignore_patterns(".builder"))
    other = Machine(checkout, store.root, machine.log)
    other.measure(results, NEW_VARIANT, "stage", NEW, "--untested", *key)
    results.facts.append(f"{NEW_VARIANT}: {size(store.size())} downloaded or written")


def prepared(target: Path) -> Path:
    """The checkout with a registry, and with more variants."""
    checkout = copy(target)
    matrix = checkout / "matrix.yaml"
    text = matrix.read_text(encoding="utf-8")
    text = re.sub("(?m)^registry: .*", f'registry: "127.0.0.1:{PORT}"', text)
    more = "".join(f"  v{number}: [tools, tensorboard, science, jupyter]\n" for number in range(1, MORE))
    text = text.replace("variants:\n", f"variants:\n{more}")
    matrix.write_text(text, encoding="utf-8")
    for step in ("lock", "render"):
        run(checkout, checkout / "no-store", step)
    return checkout


def _key(results: Results, scratch: Path) -> list[str]:
    """The option to sign with a new key."""
    os.environ["COSIGN_PASSWORD"] = ""
    if not shutil.which("cosign"):
        results.facts.append("releases are not signed: cosign is not installed")
        return []
    command = ["cosign", "generate-key-pair", f"--output-key-prefix={scratch / 'bench'}"]
    subprocess.run(command, check=True, capture_output=True)
    return ["--sign", str(scratch / "bench.key")]
