#!/usr/bin/env python3
"""GPU smoke tests: checks that a framework gives the same results on this GPU as on the CPU.

It needs only a GPU, its driver, and Python 3.9 or newer with PyTorch, TensorFlow or JAX:

    python tests/gpu/run.py                                  all checks of all installed frameworks
    python tests/gpu/run.py --list                           list the checks
    python tests/gpu/run.py --framework pytorch --only ddp   one check; both options can be repeated
    python tests/gpu/run.py --device 1 --json result.json    on one GPU, by its number in nvidia-smi

In a container:

    docker run --rm --gpus all --shm-size 1g -v "$PWD/tests/gpu:/gpu:ro" org/pt-cuda:2.9 python /gpu/run.py

Each check runs in its own process, so that a crash or a hang fails only that check. `passed` means that all figures are
within their limits. `not applicable` means that there was nothing to check, with the reason (such as TF32 on a GPU
without it); the check has not passed.

Exit code: 0 if at least one check passed and none failed, 1 if not, 2 if the command line is invalid. Without a GPU,
all checks fail: they never run on the CPU instead.
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
TIMEOUT_S = 300  # a compilation by XLA or Triton takes a minute on a slow CPU
FORMAT = 1
TAIL = 12  # lines of a crashed check's output to show
# `tests.gpu` if this module is imported from a checkout, empty if it is run as a program.
_PREFIX = f"{__package__}." if __package__ else ""


def _module(name: str) -> Any:
    return importlib.import_module(f"{_PREFIX}checks.{name}")


def checks_of(framework: str) -> dict[str, Check]:
    """A framework's checks by name. Does not import the framework."""
    checks: dict[str, Check] = _module(framework).CHECKS
    return checks


def installed() -> list[str]:
    """The frameworks that are installed in this Python."""
    return [name for name, package in PACKAGES.items() if importlib.util.find_spec(package)]


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.child:
        return _child(options.child[0], options.child[1], Path(options.child[2]))
    if options.list:
        for framework in options.framework or PACKAGES:
            for check in checks_of(framework).values():
                print(f"{framework:<11} {check.name:<12} {check.summary}")
        return 0
    frameworks = options.framework or installed()
    if not frameworks:
        parser.exit(1, f"{sys.executable} has none of {', '.join(PACKAGES.values())}: install one of them\n")
    known = {name for framework in frameworks for name in checks_of(framework)}
    if unknown := sorted(set(options.only) - known):
        parser.error(f"no check {', '.join(unknown)} for {', '.join(frameworks)}: see --list")

    environment = _environment(options.device)
    system: System = _module("nvml").read(environment.get("CUDA_VISIBLE_DEVICES"))
    if options.device is not None and system.gpus and not system.visible:
        parser.error(f"no GPU {options.device}: NVML has {len(system.gpus)} GPUs, numbered from 0")
    # With `--json -`, standard output has only the JSON.
    out = sys.stderr if options.json == "-" else sys.stdout
    results = []
    _print_system(system, out)
    for framework in frameworks:
        for name, check in checks_of(framework).items():
            if options.only and name not in options.only:
                continue
            results.append(_result(framework, check, system, environment, options.timeout))
            _print_result(results[-1], out)
    data = _report(system, results)
    if options.json == "-":
        print(json.dumps(data, indent=1))
    elif options.json:
        Path(options.json).write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    print(data["summary"], file=out)
    return 0 if data["passed"] else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--framework", action="append", choices=list(PACKAGES), default=[], help="default: all that are installed"
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="name of a check, see --list")
    parser.add_argument("--list", action="store_true", help="list the checks and exit")
    parser.add_argument("--device", type=int, metavar="N", help="number of a GPU in NVML; default: all visible GPUs")
    parser.add_argument("--json", default="", metavar="FILE", help="file for the results; `-` is standard output")
    parser.add_argument(
        "--timeout", type=int, default=TIMEOUT_S, metavar="S", help="for each check (default %(default)s)"
    )
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    return parser


def _environment(device: int | None) -> dict[str, str]:
    """The environment of the checks: GPUs are numbered as in NVML, and no framework allocates all memory at once."""
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
    started = time.monotonic()
    gpus = system.visible if check.uses_all else system.visible[:1]
    version: dict[str, str] = {}
    if system.error:
        outcome = _failed(f"no GPU: {system.error}")
    else:
        outcome, version = _in_process(framework, check.name, environment, timeout)
    return {
        "framework": framework,
        "version": version.get("version", ""),
        "cuda": version.get("cuda", ""),
        "check": check.name,
        "device": _named(gpus),
        "driver": system.driver,
        **outcome,
        "seconds": round(time.monotonic() - started, 1),
    }


def _failed(detail: str) -> dict[str, Any]:
    outcome: Outcome = _module("common").Outcome("failed", [], detail)
    return outcome.as_data()


def _in_process(
    framework: str, name: str, environment: dict[str, str], timeout: int
) -> tuple[dict[str, Any], dict[str, str]]:
    """The outcome of one check, and the version of the framework. A process without an answer has failed."""
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
            data = json.loads(answer.read_text(encoding="utf-8"))
            return data["outcome"], data["framework"]
        if status is None:
            why = f"not finished within {timeout} s"
        elif status < 0:
            why = f"killed by {signal.Signals(-status).name}"
        else:
            why = f"ended with status {status}"
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
        return _failed("\n".join([why, *tail])), {}


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kills the process and its children, which may hang in NCCL."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _child(framework: str, name: str, answer: Path) -> int:
    """Runs one check in this process. A crash has no answer, only a status and output."""
    common = _module("common")
    module, setup = _module(framework), None
    try:
        setup = module.begin(_module("nvml").read())
        outcome = common.judge(module.CHECKS[name].run(setup.module, setup.device))
    except common.NotApplicable as reason:
        outcome = common.Outcome("not applicable", [], str(reason))
    except common.Failed as reason:
        outcome = common.Outcome("failed", [], str(reason))
    version = {"version": setup.version, "cuda": setup.cuda} if setup else {}
    answer.write_text(json.dumps({"outcome": outcome.as_data(), "framework": version}), encoding="utf-8")
    return 0


def _named(gpus: Iterable[Gpu]) -> str:
    """Numbers and names of GPUs: `0: NVIDIA H100 80GB HBM3`."""
    return ", ".join(f"{gpu.index}: {gpu.name}" for gpu in gpus)


def _report(system: System, results: list[dict[str, Any]]) -> dict[str, Any]:
    states = [result["state"] for result in results]
    count = {state: states.count(state) for state in ("passed", "failed", "not applicable")}
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


def _print_system(system: System, out: TextIO) -> None:
    if system.error:
        print(f"no GPU: {system.error}", file=out)
        print("In a container: docker run --gpus all, and NVIDIA_DRIVER_CAPABILITIES=compute,utility", file=out)
    else:
        newest = f", runs CUDA {system.cuda} at most" if system.cuda else ""
        print(f"driver {system.driver}{newest}; {_named(system.visible)}", file=out)
    print(f"{'check':<24} {'result':<15} {'s':>6}  device and figure", file=out)


def _print_result(result: dict[str, Any], out: TextIO) -> None:
    name = f"{result['framework']} {result['check']}"
    first, *rest = (result["detail"] or result["figure"]).splitlines() or [""]
    print(f"{name:<24} {result['state']:<15} {result['seconds']:>6}  {result['device'] or 'none'}; {first}", file=out)
    for line in rest:
        print(f"    {line}", file=out)
    out.flush()


if __name__ == "__main__":
    sys.exit(main())
