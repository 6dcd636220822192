"""A stand-in for NVIDIA's management library (NVML), for machines without a GPU; what it can say is in nvml_stub.c.

On this machine, for a process of its own, since the library is loaded once:

    library = nvml.build(tmp_path)
    subprocess.run([...], env=nvml.environment(library, nvml.state("570.86.10", Card("NVIDIA H100"))))

In a container, where pynvml and nvidia-smi's callers look for the driver's library:

    docker run -v LIBRARY:/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1:ro -e NVML_STUB='driver 570.86.10; ...' IMAGE
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("nvml_stub.c")
NAME = "libnvidia-ml.so.1"
IN_CONTAINER = f"/usr/lib/x86_64-linux-gnu/{NAME}"
VARIABLE = "NVML_STUB"
DRIVER_NOT_LOADED = "error driver-not-loaded"


@dataclass(frozen=True)
class Card:
    """A GPU; `total`, `used` and of these `reserved` in MiB, `total` None where the driver does not tell."""

    name: str = "NVIDIA A100-SXM4-80GB"
    capability: str = "8.0"
    total: int | None = 81559
    used: int = 0
    utilization: int = 0
    reserved: int = 0
    processes: int = 0
    mig: int = 0


def build(folder: Path) -> Path:
    """Compiles the library into a folder; returns its path."""
    if not shutil.which("cc"):  # a bare machine; the tests run as root there
        command = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "gcc", "libc6-dev"]
        subprocess.run(command, check=True, capture_output=True)
    library = folder / NAME
    subprocess.run(
        [
            "cc", "-std=c99", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden",
            f"-Wl,-soname,{NAME}", "-o", str(library), str(SOURCE),
        ],
        timeout=60, check=True,
    )  # fmt: skip
    library.chmod(0o755)  # whatever the umask: a container's user reads it too
    return library


def state(driver: str, *cards: Card, cuda: int = 0) -> str:
    """What the library is to say; `cuda` as 12080, 0 where the driver does not tell."""
    lines = [f"driver {driver}"]
    if cuda:
        lines.append(f"cuda {cuda}")
    for card in cards:
        memory = "- -" if card.total is None else f"{card.total} {card.used}"
        lines.append(f"gpu {memory} {card.capability} {card.name}")
        lines += [f"{name} {getattr(card, name)}" for name in ("utilization", "reserved", "processes", "mig")]
    return "\n".join(lines)


def environment(library: Path, said: str, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """For a process of this machine that is to see these GPUs; `said` is a state, or the path of a file with one."""
    return {**base, "LD_LIBRARY_PATH": str(library.parent), VARIABLE: said}
