#!/usr/bin/env python3
"""GPU smoke tests: does a framework do on this GPU what it does on the CPU?

It needs a GPU, its driver, and a Python (3.9 or newer) that has PyTorch, TensorFlow or JAX; nothing else:

    python tests/gpu/run.py                                  every framework that is installed, every check
    python tests/gpu/run.py --list                           what is checked
    python tests/gpu/run.py --framework pytorch --only ddp   one check; both options may be given again
    python tests/gpu/run.py --device 1 --json result.json    on one GPU, as nvidia-smi counts them

In a container:

    docker run --rm --gpus all --shm-size 1g -v "$PWD/tests/gpu:/gpu:ro" org/pt-cuda:2.9 python /gpu/run.py

Each check runs in a process of its own, so that a crash or a hang is the failure of one. `passed` means that every
figure kept to its limit. `not applicable` says why there was nothing to check (TF32 on a card that has none), and is
no pass.

Exit code: 0 if at least one check passed and none failed, 1 if not, 2 if the command line is wrong. Without a GPU
every check fails: nothing is ever run on the CPU instead.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tests.gpu.checks.common import Check, Outcome
    from tests.gpu.checks.nvml import Gpu, System

PACKAGES = {"pytorch": "torch", "tensorflow": "tensorflow", "jax": "jax"}
TIMEOUT_S = 300  # a compilation by XLA or Triton takes a minute where the CPU is slow
FORMAT = 1
TAIL = 12  # lines of a crashed check's output that are shown
# `tests.gpu` where the checkout is imported from, nothing where this file is run.
_PREFIX = f"{__package__}." if __package__ else ""


def _module(name: str) -> Any:
    return importlib.import_module(f"{_PREFIX}checks.{name}")


def checks_of(framework: str) -> dict[str, Check]:
    """A framework's checks by name. Imports no framework."""
    found: dict[str, Check] = _module(framework).CHECKS
    return found


def installed() -> list[str]:
    """Frameworks that this Python has."""
    return [name for name, package in PACKAGES.items() if importlib.util.find_spec(package)]


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    asked = parser.parse_args(arguments)
    if asked.child:
        return _child(asked.child[0], asked.child[1], Path(asked.child[2]))
    if asked.list:
        for framework in asked.framework or PACKAGES:
            for check in checks_of(framework).values():
                print(f"{framework:<11} {check.name:<12} {check.summary}")
        return 0
    wanted = asked.framework or installed()
    if not wanted:
        parser.exit(1, f"{sys.executable} has none of {', '.join(PACKAGES.values())}: nothing can be checked\n")
    known = {name for framework in wanted for name in checks_of(framework)}
    if unknown := sorted(set(asked.only) - known):
        parser.error(f"no check is named {', '.join(unknown)} for {', '.join(wanted)}: see --list")

    environment = _environment(asked.device)
    system: System = _module("nvml").read(environment.get("CUDA_VISIBLE_DEVICES"))
    if asked.device is not None and system.gpus and not system.visible:
        parser.error(f"NVML has no GPU {asked.device}: it has {len(system.gpus)}")
    # With `--json -`, standard output is the JSON alone.
    out = sys.stderr if asked.json == "-" else sys.stdout
    results = []
    _say_system(system, out)
    for framework in wanted:
        for name, check in checks_of(framework).items():
            if asked.only and name not in asked.only:
                continue
            results.append(_result(framework, check, system, environment, asked.timeout))
            _say_result(results[-1], out)
    data = _report(system, results)
    if asked.json == "-":
        print(json.dumps(data, indent=1))
    elif asked.json:
        Path(asked.json).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(data["summary"], file=out)
    return 0 if data["passed"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--framework", action="append", choices=list(PACKAGES), default=[], help="default: those that are installed"
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="a check, as --list names it")
    parser.add_argument("--list", action="store_true", help="say what is checked, and do nothing")
    parser.add_argument("--device", type=int, metavar="N", help="a GPU by NVML's number; default: all that are visible")
    parser.add_argument("--json", default="", metavar="FILE", help="write results there; `-` is standard output")
    parser.add_argument(
        "--timeout", type=int, default=TIMEOUT_S, metavar="S", help="for each check (default %(default)s)"
    )
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    return parser


def _environment(device: int | None) -> dict[str, str]:
    """For the checks' processes. GPUs are counted as NVML counts them, and no framework takes all memory at once."""
    environment = {
        "TF_CPP_MIN_LOG_LEVEL": "1",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        **os.environ,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONFAULTHANDLER": "1",
    }
    if device is not None:
        environment["CUDA_VISIBLE_DEVICES"] = str(device)
    return environment


def _result(framework: str, check: Check, system: System, environment: dict[str, str], timeout: int) -> dict[str, Any]:
    began = time.monotonic()
    gpus = system.visible if check.uses_all else system.visible[:1]
    version: dict[str, str] = {}
    if system.error:
        told = _failed(f"no GPU: {system.error}")
    else:
        told, version = _in_process(framework, check.name, environment, timeout)
    return {
        "framework": framework,
        "version": version.get("version", ""),
        "cuda": version.get("cuda", ""),
        "check": check.name,
        "device": _named(gpus),
        "driver": system.driver,
        **told,
        "seconds": round(time.monotonic() - began, 1),
    }


def _failed(detail: str) -> dict[str, Any]:
    outcome: Outcome = _module("common").Outcome("failed", [], detail)
    return outcome.as_data()


def _in_process(
    framework: str, name: str, environment: dict[str, str], timeout: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """The outcome of one check, and of which version of the framework; a process that says nothing has failed."""
    with tempfile.TemporaryDirectory() as folder:
        answer, log = Path(folder, "answer.json"), Path(folder, "log")
        with log.open("wb") as stream:
            child = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), "--child", framework, name, str(answer)],
                stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
                env=environment, start_new_session=True,
            )  # fmt: skip
            try:
                status = child.wait(timeout)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(child)
        if status == 0 and answer.exists():
            told = json.loads(answer.read_text(encoding="utf-8"))
            return told["outcome"], told["framework"]
        if status is None:
            why = f"not done within {timeout} s"
        elif status < 0:
            why = f"ended by {signal.Signals(-status).name}"
        else:
            why = f"ended with status {status}"
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
        return _failed("\n".join([why, *tail])), {}


def _end(child: subprocess.Popen[bytes]) -> None:
    """Ends the process and those that it started, which NCCL may keep waiting for each other."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _child(framework: str, name: str, answer: Path) -> int:
    """One check, in this process. What it cannot say by its answer, it says by its status and its output."""
    common = _module("common")
    module, begun = _module(framework), None
    try:
        begun = module.begin(_module("nvml").read())
        outcome = common.judge(module.CHECKS[name].run(begun.module, begun.device))
    except common.NotApplicable as reason:
        outcome = common.Outcome("not applicable", [], str(reason))
    except common.Failed as reason:
        outcome = common.Outcome("failed", [], str(reason))
    told = {"version": begun.version, "cuda": begun.cuda} if begun else {}
    answer.write_text(json.dumps({"outcome": outcome.as_data(), "framework": told}), encoding="utf-8")
    return 0


def _named(gpus: Iterable[Gpu]) -> str:
    """Names of GPUs with their numbers: `0: NVIDIA H100 80GB HBM3`."""
    return ", ".join(f"{gpu.index}: {gpu.name}" for gpu in gpus)


def _report(system: System, results: list[dict[str, Any]]) -> dict[str, Any]:
    count = {state: sum(one["state"] == state for one in results) for state in ("passed", "failed", "not applicable")}
    return {
        "format": FORMAT,
        "python": platform.python_version(),
        "driver": system.driver,
        "driver_cuda": system.cuda,
        "devices": [
            {
                "index": gpu.index,
                "name": gpu.name,
                "uuid": gpu.uuid,
                "capability": gpu.capability,
                "memory": gpu.memory,
                "free": gpu.free,
            }
            for gpu in system.visible
        ],
        "results": results,
        "passed": bool(count["passed"] and not count["failed"]),
        "summary": ", ".join(f"{number} {state}" for state, number in count.items()),
    }


def _say_system(system: System, out: TextIO) -> None:
    if system.error:
        print(f"no GPU: {system.error}", file=out)
        print("In a container: docker run --gpus all, and NVIDIA_DRIVER_CAPABILITIES=compute,utility", file=out)
    else:
        runs = f", runs CUDA {system.cuda} at most" if system.cuda else ""
        print(f"driver {system.driver}{runs}; {_named(system.visible)}", file=out)
    print(f"{'check':<24} {'result':<15} {'s':>6}  device and figure", file=out)


def _say_result(result: dict[str, Any], out: TextIO) -> None:
    name = f"{result['framework']} {result['check']}"
    first, *rest = (result["detail"] or result["figure"]).splitlines() or [""]
    print(f"{name:<24} {result['state']:<15} {result['seconds']:>6}  {result['device'] or 'none'}; {first}", file=out)
    for line in rest:
        print(f"    {line}", file=out)
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
