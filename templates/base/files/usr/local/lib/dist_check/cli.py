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
Can these processes, GPUs and machines compute together? Every rank adds up numbers with all others (all-reduce) by the
library that training uses, and compares with the exact sum; then it is measured. Says which interface and transport
carry the data, and what to fix. Nothing is changed: variables are set for the check's own processes only.

one machine
  dist-check                  as many ranks as GPUs; 2 on a machine without
  dist-check -n 4 --backend cpu
two machines or containers: the same on both, but for --rank (a number for each machine); the first listens at the port
  dist-check --nodes 2 --rank 0 --master 10.0.0.5:29500
  dist-check --nodes 2 --rank 1 --master 10.0.0.5:29500
under a launcher that tells each process its rank (RANK, WORLD_SIZE, MASTER_ADDR; Slurm; JOB_COMPLETION_INDEX)
  torchrun --nproc-per-node=2 --no-python dist-check
  srun --ntasks=8 --gpus-per-task=1 dist-check
"""
END = """\
bus bandwidth is the data's bandwidth times 2(n-1)/n: with that factor it can be compared with the speed of the slowest
link, for any number of ranks. Large sizes should come near the speed of NVLink or of the network; small ones show the
latency.

exit code: 0 every rank got every sum right; 1 something failed; 2 the command makes no sense
"""


def main(arguments: Sequence[str]) -> int:
    if len(arguments) == 1 and arguments[0].startswith("--events="):
        from . import rank  # noqa: PLC0415  (NumPy takes a while, and only ranks need it)

        return rank.main(int(arguments[0].partition("=")[2]))
    options = _parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, _end)
    try:
        framework = options.framework or _framework(_frameworks())
        place = where.find(
            nodes=options.nodes,
            rank=options.rank,
            master=options.master,
            processes=options.processes,
            environment=os.environ,
        )
    except where.Unclear as error:
        print(f"dist-check: {error}", file=sys.stderr)
        return USAGE_ERROR
    backend = importlib.import_module(f"{BACKENDS.name}.{framework}")
    asked = member.Asked(
        backend=options.backend,
        timeout=options.timeout,
        largest=options.max_size,
        framework=framework,
        program=str(Path(sys.argv[0]).resolve()),
    )
    try:
        report = member.check(place, asked, backend, lambda text: print(text, file=sys.stderr, flush=True))
    except KeyboardInterrupt:
        print("dist-check: interrupted", file=sys.stderr)
        return 130
    _print(report, place, as_json=options.json)
    return 0 if report["ok"] else 1


def _print(report: show.Report, place: where.Place, *, as_json: bool) -> None:
    """The first member's is the report; the others say shortly what became of it, unless it could not reach them."""
    if as_json and place.index == 0:
        print(json.dumps(report, indent=2))
    elif place.index == 0 or not report["nodes"]:
        print(show.text(report), file=sys.stderr if place.index else sys.stdout)
    else:
        verdict = "ok" if report["ok"] else "failed: " + "; ".join(one["what"] for one in report["problems"])
        print(f"dist-check: node {place.index}: {verdict} (the report is on the first node)", file=sys.stderr)


def _end(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _frameworks() -> list[str]:
    return sorted(path.parent.name for path in BACKENDS.glob("*/__init__.py"))


def _framework(found: Sequence[str]) -> str:
    if not found:
        raise where.Unclear(f"no framework of this image has its part in {BACKENDS}")
    if len(found) > 1:
        raise where.Unclear(f"there are several frameworks here: say --framework, one of {', '.join(found)}")
    return found[0]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "dist-check", description=HELP, epilog=END, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-n", dest="processes", type=_count, metavar="N", help="ranks on this machine")
    parser.add_argument("--nodes", type=_count, metavar="M", help="how many machines or containers")
    parser.add_argument("--rank", type=int, metavar="R", help="the number of this machine, from 0")
    parser.add_argument("--master", metavar="HOST:PORT", help=f"where the first listens (port {where.DEFAULT_PORT})")
    parser.add_argument(
        "--backend",
        choices=list(LIBRARY_OF),
        default="auto",
        help="auto: GPUs where every machine has them, else cpu; gloo and ring mean cpu, nccl means gpu",
    )
    parser.add_argument("--framework", choices=_frameworks() or None, help="where an image has several")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=60.0,
        metavar="S",
        help="seconds for others to come, and for any one step (60)",
    )
    parser.add_argument(
        "--max-size", type=_bytes, metavar="SIZE", help="largest all-reduce that is measured (256M on GPUs, else 16M)"
    )
    parser.add_argument("--json", action="store_true", help="the report as JSON on standard output")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if not 1 <= number <= 1024:
        raise argparse.ArgumentTypeError(f"{text}: 1 to 1024")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not 0 < number <= 86400:
        raise argparse.ArgumentTypeError(f"{text}: more than 0 s, at most a day")
    return number


def _bytes(text: str) -> int:
    matched = re.fullmatch(r"([0-9]{1,6})([KMG]?)(?:i?B)?", text)
    if not matched or not int(matched[1]):
        raise argparse.ArgumentTypeError(f"{text}: a size such as 64M")
    return int(matched[1]) << 10 * " KMG".index(matched[2] or " ")
