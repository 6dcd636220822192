"""How long things take here: medians of several runs of the real commands, in a copy of this checkout.

The cold build first empties BuildKit's cache on this engine (of all projects): nothing is left to reuse but the base
image. The copy has a namespace of its own; the images that people use are not touched.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from builder.engine import Engine
from builder.view import duration

ROOT = Path(__file__).resolve().parent.parent
BUILDER = str(Path(sys.executable).parent / "builder")
NAMESPACE = "builder-bench"


def main() -> int:
    """Runs the benchmarks and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="runs of each step (default 5)")
    parser.add_argument("--cold", type=int, default=3, help="runs of the cold build; 0 leaves it out (default 3)")
    chosen = parser.parse_args()
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="builder-bench-") as scratch:
        checkout = copy(Path(scratch) / "checkout")
        try:
            rows = [(name, measure(checkout, arguments, chosen.repeat, console)) for name, arguments in STEPS.items()]
            cold = [cold_run(checkout, console) for _ in range(chosen.cold)]
            if cold:
                for index, name in enumerate(("cold: build", "tests of both images, and tags")):
                    rows.append((name, [run[index] for run in cold]))
                rows.append(("nothing to do: images", measure(checkout, ["images"], chosen.repeat, console)))
        finally:
            remove_images()
    table = Table("what", "median", "fastest", "slowest", "runs", box=None)
    for name, times in rows:
        table.add_row(
            name, duration(statistics.median(times)), duration(min(times)), duration(max(times)), str(len(times))
        )
    console.print(table)
    return 0


STEPS = {
    "start of the program (--help)": ["--help"],
    "lock --check": ["lock", "--check"],
    "lock (index asked, warm uv cache)": ["lock"],
    "plan": ["plan"],
    "render --check": ["render", "--check"],
}


def copy(target: Path) -> Path:
    """The working tree under another namespace, rendered."""
    shutil.copytree(ROOT, target, ignore=shutil.ignore_patterns(".git", ".venv", ".builder", "__pycache__", ".*_cache"))
    matrix = target / "matrix.yaml"
    lines = matrix.read_text(encoding="utf-8").splitlines(keepends=True)
    text = "".join(f"namespace: {NAMESPACE}\n" if line.startswith("namespace:") else line for line in lines)
    matrix.write_text(text, encoding="utf-8")
    run(target, ["render"])
    return target


def run(checkout: Path, arguments: list[str]) -> float:
    """Seconds that a command took; a command that fails ends the benchmark."""
    began = time.perf_counter()
    done = subprocess.run([BUILDER, "--root", str(checkout), *arguments], capture_output=True, text=True, check=False)
    took = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"builder {' '.join(arguments)} failed:\n{done.stderr}")
    return took


def measure(checkout: Path, arguments: list[str], repeat: int, console: Console) -> list[float]:
    console.print(f"builder {' '.join(arguments)}: {repeat} runs")
    return [run(checkout, arguments) for _ in range(repeat)]


def cold_run(checkout: Path, console: Console) -> tuple[float, float]:
    """Seconds to build from an empty build cache, and to test and tag."""
    console.print("cold build: emptying the build cache, then building and testing (minutes)")
    remove_images()
    Engine.connect().prune_cache()
    run(checkout, ["base"])
    return run(checkout, ["build"]), run(checkout, ["images"])


def remove_images() -> None:
    """Removes the benchmark's images: those built for its namespace, tagged or not."""
    engine = Engine.connect()
    for image in engine.images("org.opencontainers.image.ref.name"):
        if image.labels["org.opencontainers.image.ref.name"].startswith(f"{NAMESPACE}/"):
            for tag in image.tags:
                engine.remove_image(tag)
            engine.remove_image(image.id)


if __name__ == "__main__":
    sys.exit(main())
