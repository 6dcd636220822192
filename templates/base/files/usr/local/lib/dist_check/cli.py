"""The command line of dist-check."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from . import member, show, where
from .plan import LIBRARY_OF

USAGE_ERROR = 2
BACKENDS = Path(__file__).resolve().parent.parent / "dist_check_backends"

HELP = """\
Checks whether processes, GPUs and machines can compute together. All ranks add up numbers (all-reduce) with the library
that training uses, compare the result with the exact sum, and measure the bandwidth. The report has the interfaces and
transports in use, and how to fix problems. It sets variables only for its own processes.

one machine
  dist-check                  as many ranks as GPUs; 2 on a machine without
  dist-check -n 4 --backend cpu
two machines or containers: the same command on both, except for --rank; the first one listens on the port
  dist-check --nodes 2 --rank 0 --master 10.0.0.5:29500
  dist-check --nodes 2 --rank 1 --master 10.0.0.5:29500
with a launcher that sets the rank of each process (RANK, WORLD_SIZE, MASTER_ADDR; Slurm; JOB_COMPLETION_INDEX)
  torchrun --nproc-per-node=2 --no-python dist-check
  srun --ntasks=8 --gpus-per-task=1 dist-check
"""
END = """\
bus bandwidth is the bandwidth of the data times 2(n-1)/n. For any number of ranks, it can be compared with the speed of
the slowest link. Large sizes should be close to the speed of NVLink or of the network; small sizes show the latency.

exit code: 0 all sums of all ranks are right; 1 something failed; 2 invalid options or variables
"""


def main(arguments: Sequence[str]) -> int:
    if len(arguments) == 1 and arguments[0].startswith("--events="):
        from . import rank  # noqa: PLC0415  (only ranks need NumPy, which loads slowly)

        return rank.main(int(arguments[0].partition("=")[2]))
    parsed = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)
    try:
        framework = parsed.framework or _framework(_frameworks())
        place = where.find(
            nodes=parsed.nodes,
            rank=parsed.rank,
            master=parsed.master,
            processes=parsed.processes,
            environment=os.environ,
        )
    except where.SettingsError as error:
        print(f"dist-check: {error}", file=sys.stderr)
        return USAGE_ERROR
    backend = importlib.import_module(f"{BACKENDS.name}.{framework}")
    options = member.Options(
        backend=parsed.backend,
        timeout=parsed.timeout,
        largest=parsed.max_size,
        framework=framework,
        program=str(Path(sys.argv[0]).resolve()),
    )
    try:
        report = member.check(place, options, backend, lambda text: print(text, file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        print("dist-check: interrupted", file=sys.stderr)
        return 130
    _print(report, place, as_json=parsed.json)
    return 0 if report["ok"] else 1


def _print(report: show.Report, place: where.Place, *, as_json: bool) -> None:
    """Prints the report on the first member; on the others one line, or the report if they did not reach the first."""
    if as_json and place.index == 0:
        print(json.dumps(report, indent=2))
    elif place.index == 0 or not report["nodes"]:
        print(show.text(report), file=sys.stderr if place.index else sys.stdout)
    else:
        verdict = "ok" if report["ok"] else "failed: " + "; ".join(problem["what"] for problem in report["problems"])
        print(f"dist-check: node {place.index}: {verdict} (the report is on the first node)", file=sys.stderr)


def _end(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _frameworks() -> list[str]:
    return sorted(path.parent.name for path in BACKENDS.glob("*/__init__.py"))


def _framework(names: Sequence[str]) -> str:
    if not names:
        raise where.SettingsError(f"no framework in {BACKENDS}: install dist-check with the image of a framework")
    if len(names) > 1:
        raise where.SettingsError(f"several frameworks: choose one with --framework: {', '.join(names)}")
    return names[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "dist-check", description=HELP, epilog=END, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", dest="processes", type=_count, metavar="N", help="ranks on this machine")
    parser.add_argument("--nodes", type=_count, metavar="M", help="number of machines or containers")
    parser.add_argument("--rank", type=int, metavar="R", help="number of this machine, from 0")
    parser.add_argument("--master", metavar="HOST:PORT", help=f"of the first machine (port {where.DEFAULT_PORT})")
    parser.add_argument(
        "--backend",
        choices=list(LIBRARY_OF),
        default="auto",
        help="auto: GPUs if every machine has them, else cpu; gloo and ring mean cpu, nccl means gpu",
    )
    parser.add_argument("--framework", choices=_frameworks() or None, help="for an image with several frameworks")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="seconds to wait for other machines, and for each step (60)",
    )
    parser.add_argument(
        "--max-size", type=_bytes, metavar="SIZE", help="largest all-reduce to measure (256M on GPUs, else 16M)"
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON on standard output")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 1024:
        raise argparse.ArgumentTypeError(f"invalid number {text}: use 1 to 1024")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number <= 86400:
        raise argparse.ArgumentTypeError(f"invalid time {text}: use more than 0, at most 86400 seconds")
    return number


def _bytes(text: str) -> int:
    matched = re.fullmatch(r"([0-9]{1,6})([KMG]?)(?:i?B)?", text)
    if not matched or not int(matched[1]):
        raise argparse.ArgumentTypeError(f"invalid size {text}: use e.g. 64M")
    return int(matched[1]) << 10 * " KMG".index(matched[2] or " ")
