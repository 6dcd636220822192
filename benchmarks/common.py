"""What the benchmarks of builder share: results, a copy of the checkout, a registry on the loopback."""

from __future__ import annotations

import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import requests

ROOT = Path(__file__).resolve().parent.parent
BUILDER = str(Path(sys.executable).parent / "builder")
NAMESPACE = "builder-bench"
PORT = 5057


@dataclass
class Results:
    """Seconds of each run by measurement, and figures that are not times."""

    times: dict[str, list[float]] = field(default_factory=dict)
    facts: list[str] = field(default_factory=list)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        os.sync()  # earlier writes do not count
        began = time.perf_counter()
        yield
        self.times.setdefault(name, []).append(time.perf_counter() - began)
        print(f"  {name}: {self.times[name][-1]:.1f} s", file=sys.stderr, flush=True)

    def median(self, name: str) -> float:
        return statistics.median(self.times[name])


@contextmanager
def registry(folder: Path) -> Iterator[Path]:
    """Debian's docker-registry, empty, on the loopback. Its log has a line for each request."""
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
        yield folder / "log"
    finally:
        process.kill()
        process.wait()
        shutil.rmtree(folder)


def copy(target: Path) -> Path:
    """The working tree in another namespace, locked and rendered."""
    ignored = shutil.ignore_patterns(".git", ".venv", ".builder", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, target, symlinks=True, ignore=ignored)
    matrix = target / "matrix.yaml"
    text = re.sub("(?m)^namespace: .*", f"namespace: {NAMESPACE}", matrix.read_text(encoding="utf-8"))
    matrix.write_text(text, encoding="utf-8")
    for step in ("lock", "render"):
        run(target, target / "no-store", step)
    return target


def run(checkout: Path, store: Path, *arguments: str) -> None:
    """Runs `builder`; a failure ends the benchmark."""
    command = [BUILDER, "--root", str(checkout), "--store", str(store), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"builder {' '.join(arguments)} failed:\n{done.stderr}")
