"""One round of measures of one framework, each kind in a process of its own; prints JSON lines, nothing else.

Runs in the images, on Python 3.9 and newer.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHILD = "builder.bench.inside.child"
STARTS = 5
MAX_WORKERS = 8
TAIL = 12
# What keeps TensorFlow and JAX from taking nearly all of a GPU's memory at once.
FRUGAL = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def main() -> None:
    asked: dict[str, Any] = json.loads(sys.argv[1])
    asked["workers"] = asked.get("workers") or min(len(os.sched_getaffinity(0)), MAX_WORKERS)
    tell(about=about(asked["gpu"]), workers=asked["workers"])
    if asked.get("warm"):
        tell(doing="reading the framework's files once")
        for kind in ("import", "train"):
            child(asked, kind, quiet=True)
    tell(doing="start of Python")
    for _ in range(STARTS):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        tell(measure="python", value=time.perf_counter() - began)
    for kind, doing in (
        ("import", "import, first operation, memory"),
        *([("frugal", "GPU memory without reserve")] if asked["gpu"] else []),
        ("product", "matrix product"),
        ("train", "training"),
        ("compiled", "training, compiled"),
        ("load", "data loading"),
    ):
        tell(doing=doing)
        child(asked, kind)


def tell(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def child(asked: dict[str, Any], kind: str, *, quiet: bool = False) -> None:
    """Passes on the JSON lines of a process for one kind; says how it failed, if it did."""
    # One GPU, and the same one for the framework and for NVML.
    chosen = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0" if asked["gpu"] else "-1"}
    environment = {**os.environ, **chosen, **(FRUGAL if kind == "frugal" else {})}
    command = [sys.executable, "-B", "-m", CHILD, json.dumps({**asked, "kind": kind})]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, timeout=asked["limit_s"]
        )
        out, err, code = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired:
        out, err, code = "", f"not done after {asked['limit_s']} s", 1
    if quiet:
        return
    for line in out.splitlines():
        if line.startswith("{"):
            print(line, flush=True)
    if code:
        tell(failed=kind, status=code, reason="\n".join(err.strip().splitlines()[-TAIL:]))


def about(gpu: bool) -> dict[str, Any]:
    """What the measures are taken on."""
    told: dict[str, Any] = {
        "python": platform.python_version(),
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": "",
        "driver": "",
    }
    if gpu and importlib.util.find_spec("pynvml") is None:
        told["gpu"] = told["driver"] = "unknown (the image has no pynvml)"
    elif gpu:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        told["gpu"] = text(nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0)))
        told["driver"] = text(nvml.nvmlSystemGetDriverVersion())
        nvml.nvmlShutdown()
    return told


def cpu() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1].strip() if found else platform.machine()


def text(value: str | bytes) -> str:
    """NVML's Python binding gave bytes in some releases."""
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":
    main()
