"""The report of a check, with its verdict. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import advice, plan
from .advice import Problem

Result = Mapping[str, Any]
DONE = "done"
READ_LOG = "read the log of the ranks below"


def bus_factor(world: int) -> float:
    """The bytes that an all-reduce moves over the slowest link, divided by the size of the data.

    It makes the bandwidth comparable with the speed of a link, for any number of ranks. Source: nccl-tests,
    doc/PERFORMANCE.md.
    """
    return 2 * (world - 1) / world


def unstarted(hellos: Sequence[plan.Hello], problems: Sequence[Problem], address: str) -> dict[str, Any]:
    """The report of a check that could not start. `address` is that of the first member."""
    problems_data = _as_data(problems)
    return {
        "ok": False,
        "started": False,
        "at": address,
        "nodes": _nodes(hellos),
        "problems": problems_data,
        "notes": [],
    }


def report(
    hellos: Sequence[plan.Hello],
    job: plan.Plan,
    library: str,
    results: Sequence[Result],
    problems: Sequence[Problem],
    *,
    timeout: float,
) -> dict[str, Any]:
    by_rank = {result["rank"]: result for result in results}
    ranks = [_rank(rank, hellos, by_rank.get(rank.rank), library) for rank in job.ranks]
    all_problems = [*problems, *_stopped(ranks, timeout, len(hellos)), *_wrong(ranks)]
    missing = [rank["rank"] for rank in ranks if rank["stage"] != DONE]
    if missing and not all_problems:
        all_problems.append(Problem(f"{advice.numbered(missing)} did not finish", (READ_LOG,)))
    checks = _checks(ranks)
    if not missing and not checks:
        all_problems.append(Problem("no sum was compared"))
    transports = [name for rank in ranks for name in rank["transports"]]
    alone = [advice.ALONE] if len(ranks) == 1 else []
    notes = alone + advice.notes(hellos, on_gpus=job.library == plan.GPU, transports=transports)
    return {
        "ok": not all_problems,
        "started": True,
        "framework": hellos[0]["framework"],
        "versions": hellos[0]["versions"],
        "library": library,
        "why": job.why,
        "world": len(ranks),
        "nodes": _nodes(hellos),
        "ranks": ranks,
        "checks": checks,
        "bandwidth": _bandwidth(ranks) if not missing else [],
        "problems": _as_data(all_problems),
        "notes": _as_data([*notes, *_other_interfaces(ranks, hellos, library)]),
    }


def _nodes(hellos: Sequence[plan.Hello]) -> list[dict[str, Any]]:
    names = (
        "index",
        "host",
        "address",
        "interface",
        "gpus",
        "shm_bytes",
        "memlock",
        "infiniband",
        "versions",
        "variables",
    )
    return [{name: hello[name] for name in names} for hello in hellos]


def _as_data(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    """For JSON, without duplicates."""
    return [{"what": problem.what, "fix": list(problem.fix)} for problem in dict.fromkeys(problems)]


def _rank(rank: plan.Rank, hellos: Sequence[plan.Hello], result: Result | None, library: str) -> dict[str, Any]:
    hello = hellos[rank.member]
    own = result or {}
    nccl = own.get("nccl") or {}
    transports = [*nccl.get("transports", [])]
    used = sorted({address for address, _ in own.get("connections", [])})
    by_address = {address: name for name, address in hello["interfaces"].items()}
    interfaces = [by_address.get(address) or _loopback(address) for address in used]
    if not transports and used and library != "nccl":  # NCCL's TCP connections are not the path of its data
        transports = ["TCP"]
    return {
        "rank": rank.rank,
        "node": rank.member,
        "host": hello["host"],
        "device": own.get("device", "?"),
        "stage": own.get("stage", "unknown"),
        "interfaces": list(dict.fromkeys(interfaces)) or ([nccl["interface"]] if nccl.get("interface") else []),
        "addresses": used or ([nccl["address"]] if nccl.get("address") else []),
        "peers": sorted({peer for _, peer in own.get("connections", [])}),
        "transports": list(dict.fromkeys(transports)),
        "cards": nccl.get("cards", []),
        "checks": own.get("checks", []),
        "measured": own.get("measured", []),
        "state": own.get("state", "lost"),
        "error": own.get("error", ""),
        "log": own.get("log", ""),
        "library": library,
    }


def _loopback(address: str) -> str:
    return "lo" if address.startswith("127.") or address == "::1" else "?"


def _stopped(ranks: Sequence[Result], timeout: float, nodes: int) -> list[Problem]:
    """Each cause of a failure once; without failures, the ranks that hang."""
    failed = [rank for rank in ranks if rank["state"] == "failed"]
    causes: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for rank in failed:
        known = advice.known(f"{rank['error']}\n{rank['log']}")
        what = known.what if known else f"{rank['error'] or 'ended without a message'} (while {rank['stage']})"
        fix = known.fix if known else (READ_LOG,)
        causes.setdefault((what, fix), []).append(rank["rank"])
    if causes:
        return [Problem(f"{advice.numbered(numbers)}: {what}", fix) for (what, fix), numbers in causes.items()]
    stages: dict[str, list[int]] = {}
    for rank in ranks:
        if rank["state"] == "stuck":
            stages.setdefault(rank["stage"], []).append(rank["rank"])
    return [advice.stuck(numbers, stage, timeout, nodes) for stage, numbers in stages.items()]


def _wrong(ranks: Sequence[Result]) -> list[Problem]:
    wrong: dict[tuple[str, int], tuple[list[int], str]] = {}
    for rank in ranks:
        for check in rank["checks"]:
            if check["wrong"]:
                key = check["dtype"], check["elements"]
                wrong.setdefault(key, ([], check.get("sample", "another shape")))[0].append(rank["rank"])
    return [advice.wrong(numbers, *key, sample) for key, (numbers, sample) in wrong.items()]


def _checks(ranks: Sequence[Result]) -> list[dict[str, Any]]:
    """The ranks with a wrong sum, by type and size; only for checks that every rank has done."""
    if not ranks:
        return []
    shortest = min((rank["checks"] for rank in ranks), key=len)
    return [
        {
            "dtype": check["dtype"],
            "elements": check["elements"],
            "wrong_ranks": [rank["rank"] for rank in ranks if rank["checks"][at]["wrong"]],
        }
        for at, check in enumerate(shortest)
    ]


def _bandwidth(ranks: Sequence[Result]) -> list[dict[str, Any]]:
    """Bytes per second of the slowest rank: of the data (`algorithm`), and of the link (`bus`)."""
    rows = []
    for at in range(min(len(rank["measured"]) for rank in ranks)):
        size = ranks[0]["measured"][at]["bytes"]
        seconds = max(rank["measured"][at]["seconds"] for rank in ranks)
        algorithm = size / seconds
        rows.append(
            {"bytes": size, "seconds": seconds, "algorithm": algorithm, "bus": algorithm * bus_factor(len(ranks))}
        )
    return rows


def _other_interfaces(ranks: Sequence[Result], hellos: Sequence[plan.Hello], library: str) -> list[Problem]:
    """Ranks whose data does not use the interface towards the first node; only for several nodes."""
    if len(hellos) == 1:
        return []
    problems = []
    for rank in ranks:
        expected = hellos[rank["node"]]["interface"]
        if rank["interfaces"] and expected not in rank["interfaces"] and expected not in ("lo", "?"):
            problems.append(advice.other_interface(expected, rank["interfaces"], library))
    return problems
