#!/usr/bin/env python3
"""GPU smoke tests: checks that a framework gives the same results on this GPU as on the CPU.

It needs only a GPU, its driver, and Python 3.9 or newer with PyTorch, TensorFlow or JAX:

    python tests/gpu/run.py                                  all checks of all installed frameworks
    python tests/gpu/run.py --list                           list the checks
    python tests/gpu/run.py --framework pytorch --only ddp   one check; both options can be repeated
    python tests/gpu/run.py --device 1 --json result.json    on one GPU, by its number in nvidia-smi

In a container:

    docker run --rm --gpus all --shm-size 1g -v "$PWD/tests/gpu:/gpu:ro" org/pt-cuda:2.9 python /gpu/run.py

The checks of a framework share a process, whose start takes seconds. A check that fails, crashes or hangs ends it, and
the next check starts a new one. `passed` means that all figures are within their limits. `not applicable` means that
there was nothing to check, with the reason (such as TF32 on a GPU without it); the check has not passed.

Exit code: 0 if at least one check passed and none failed, 1 if not, 2 if the command line is invalid. Without a GPU,
all checks fail: they never run on the CPU instead.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
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
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tests.gpu.checks.common import Check, Outcome
    from tests.gpu.checks.nvml import Gpu, System

PACKAGES = {"pytorch": "torch", "tensorflow": "tensorflow", "jax": "jax", "vllm": "vllm", "sglang": "sglang"}
TIMEOUT_S = 300  # a compilation by XLA or Triton takes a minute on a slow CPU
FORMAT = 1
TAIL = 12  # lines of a crashed check's output to show
POLL_S = 0.05
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
        return _child(options.child[0], Path(options.child[1]), options.child[2:])
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
        checks = [check for name, check in checks_of(framework).items() if not options.only or name in options.only]
        for result in _results(framework, checks, system, environment, options.timeout):
            results.append(result)
            _print_result(result, out)
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
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
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


def _results(
    framework: str, checks: list[Check], system: System, environment: dict[str, str], timeout: int
) -> Iterator[dict[str, Any]]:
    """The result of each check, in order, as soon as it is there."""
    names = [check.name for check in checks]
    outcomes = _outcomes(framework, names, environment, timeout) if not system.error else None
    for check in checks:
        started = time.monotonic()
        outcome, version = next(outcomes) if outcomes else (_failed(f"no GPU: {system.error}"), {})
        yield {
            "framework": framework,
            "version": version.get("version", ""),
            "cuda": version.get("cuda", ""),
            "check": check.name,
            "device": _named(system.visible if check.uses_all else system.visible[:1]),
            "driver": system.driver,
            **outcome,
            "seconds": round(time.monotonic() - started, 1),
        }


def _failed(detail: str) -> dict[str, Any]:
    outcome: Outcome = _module("common").Outcome("failed", [], detail)
    return outcome.as_data()


def _outcomes(
    framework: str, names: list[str], environment: dict[str, str], timeout: int
) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
    """The outcome of each check, and the version of the framework. A check without an answer has failed.

    A new process runs the checks after one that failed: an error of CUDA, for example, stays until its process ends.
    """
    done = 0
    while done < len(names):
        with tempfile.TemporaryDirectory() as folder:
            answers, log = Path(folder, "answers.jsonl"), Path(folder, "log")
            answers.touch()
            with log.open("wb") as stream:
                child = subprocess.Popen(
                    [sys.executable, str(Path(__file__).resolve()), "--child", framework, str(answers), *names[done:]],
                    stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
                    env=environment, start_new_session=True,
                )  # fmt: skip
            try:
                state, before = "", done
                while done < len(names) and state != "failed":
                    line, why = _answer(child, answers, done - before, timeout)
                    done += 1
                    if why:
                        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-TAIL:]
                        data = {"outcome": _failed("\n".join([why, *tail])), "framework": {}}
                    else:
                        data = json.loads(line)
                    state = data["outcome"]["state"]
                    if done == len(names) or state == "failed":
                        _end(child)  # its log and its memory of the GPU, before anyone reads the result
                    yield data["outcome"], data["framework"]
            finally:
                _end(child)


def _answer(child: subprocess.Popen[bytes], answers: Path, number: int, timeout: int) -> tuple[str, str]:
    """The answer with this number, or the reason why there is none. A line that is incomplete is no answer."""
    deadline = time.monotonic() + timeout
    while True:
        status = child.poll()  # before the answers: a process may write its last one and end
        lines = answers.read_text(encoding="utf-8").split("\n")[:-1]
        if len(lines) > number:
            return lines[number], ""
        if status is not None:
            return "", f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        if time.monotonic() > deadline:
            return "", f"not finished within {timeout} s"
        time.sleep(POLL_S)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kills the process and its children, which may hang in NCCL."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _child(framework: str, answers: Path, names: list[str]) -> int:
    """Runs checks in this process, until one fails. A crash has no answer, only a status and output."""
    common = _module("common")
    module = _module(framework)
    for name in names:
        setup = None
        try:
            setup = module.begin(_module("nvml").read())  # for each check: it sets the seeds
            outcome = common.judge(module.CHECKS[name].run(setup.module, setup.device))
        except common.NotApplicable as reason:
            outcome = common.Outcome("not applicable", [], str(reason))
        except common.Failed as reason:
            outcome = common.Outcome("failed", [], str(reason))
        version = {"version": setup.version, "cuda": setup.cuda} if setup else {}
        with answers.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"outcome": outcome.as_data(), "framework": version}) + "\n")
        if outcome.state == "failed":
            break
        gc.collect()  # memory of this check must not be released while the next one measures it
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
