"""One run of one framework, each kind of measure in a process of its own; prints JSON lines.

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

from benchmarks.inside.shared import emit

CHILD = "benchmarks.inside.child"
STARTS = 5
MAX_WORKERS = 8
TAIL = 12  # lines of a failed process to print
# Without these TensorFlow and JAX reserve nearly all of a GPU's memory at once.
FRUGAL = {"TF_FORCE_GPU_ALLOW_GROWTH": "true", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def main() -> None:
    request: dict[str, Any] = json.loads(sys.argv[1])
    request["workers"] = request.get("workers") or min(len(os.sched_getaffinity(0)), MAX_WORKERS)
    emit(about=about(request["gpu"]), workers=request["workers"])
    if request.get("warm"):
        emit(doing="reading the framework's files into the page cache")
        for kind in ("import", "train"):
            child(request, kind, quiet=True)
    emit(doing="Python start and exit")
    for _ in range(STARTS):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        emit(measure="python", value=time.perf_counter() - began)
    for kind, doing in (
        ("import", "import, first operation, memory"),
        *([("frugal", "GPU memory without preallocation")] if request["gpu"] else []),
        ("product", "matrix product"),
        ("train", "training"),
        ("compiled", "training, compiled"),
        ("load", "data loading"),
    ):
        emit(doing=doing)
        child(request, kind)


def child(request: dict[str, Any], kind: str, *, quiet: bool = False) -> None:
    """Prints the JSON lines of a process that measures one kind, and one more if it failed."""
    # The framework and NVML use the same single GPU.
    device = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "0" if request["gpu"] else "-1"}
    environment = {**os.environ, **device, **(FRUGAL if kind == "frugal" else {})}
    command = [sys.executable, "-B", "-m", CHILD, json.dumps({**request, "kind": kind})]
    limit = request["limit_s"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=limit)
        out, err, status = done.stdout, done.stderr, done.returncode
    except subprocess.TimeoutExpired:
        out, err, status = "", f"not done after {limit} s", 1
    if quiet:
        return
    for line in out.splitlines():
        if line.startswith("{"):
            print(line, flush=True)
    if status:
        emit(failed=kind, status=status, reason="\n".join(err.strip().splitlines()[-TAIL:]))


def about(gpu: bool) -> dict[str, Any]:
    """The device and the Python of the image."""
    cpu = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    device = {
        "python": platform.python_version(),
        "cpu": cpu[1].strip() if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": "",
        "driver": "",
    }
    if gpu and importlib.util.find_spec("pynvml") is None:
        device["gpu"] = device["driver"] = "unknown (the image has no pynvml)"
    elif gpu:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        device["gpu"] = text(nvml.nvmlDeviceGetName(nvml.nvmlDeviceGetHandleByIndex(0)))
        device["driver"] = text(nvml.nvmlSystemGetDriverVersion())
        nvml.nvmlShutdown()
    return device


def text(value: str | bytes) -> str:
    """Some releases of NVML's Python binding return bytes."""
    return value.decode() if isinstance(value, bytes) else value


if __name__ == "__main__":
    main()
