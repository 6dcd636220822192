"""One report of everything, with a verdict. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from . import advice, plan
from .advice import Problem

Result = Mapping[str, Any]
DONE = "done"


def bus_factor(world: int) -> float:
    """What an all-reduce must move over the slowest link, by the size of the data.

    With it the figure can be compared with a link's speed, whatever the number of ranks. Source: nccl-tests,
    doc/PERFORMANCE.md.
    """
    return 2 * (world - 1) / world


def unstarted(hellos: Sequence[plan.Hello], problems: Sequence[Problem], at: str) -> dict[str, Any]:
    """No rank computed anything."""
    return {"ok": False, "started": False, "at": at, "nodes": _nodes(hellos), "problems": _told(problems), "notes": []}


def report(
    hellos: Sequence[plan.Hello],
    made: plan.Plan,
    library: str,
    results: Sequence[Result],
    problems: Sequence[Problem],
    *,
    timeout: float,
) -> dict[str, Any]:
    by_rank = {result["rank"]: result for result in results}
    ranks = [_rank(one, hellos, by_rank.get(one.rank), library) for one in made.ranks]
    found = [*problems, *_stopped(ranks, timeout, len(hellos)), *_wrong(ranks)]
    missing = [rank["rank"] for rank in ranks if rank["stage"] != DONE]
    if missing and not found:
        found.append(Problem(f"{advice.numbered(missing)} did not finish", ("look at the log of the ranks, below",)))
    checks = _checks(ranks)
    if not missing and not checks:
        found.append(Problem("no sum was compared"))
    transports = [name for rank in ranks for name in rank["transports"]]
    alone = [advice.ALONE] if len(ranks) == 1 else []
    notes = alone + advice.notes(hellos, on_gpus=made.library == plan.GPU, transports=transports)
    return {
        "ok": not found,
        "started": True,
        "framework": hellos[0]["framework"],
        "versions": hellos[0]["versions"],
        "library": library,
        "why": made.why,
        "world": len(ranks),
        "nodes": _nodes(hellos),
        "ranks": ranks,
        "checks": checks,
        "bandwidth": _bandwidth(ranks) if not missing else [],
        "problems": _told(found),
        "notes": _told([*notes, *_other_interfaces(ranks, hellos, library)]),
    }


def _nodes(hellos: Sequence[plan.Hello]) -> list[dict[str, Any]]:
    names = ("index", "host", "address", "interface", "gpus", "shm_bytes", "memlock", "versions", "variables")
    return [{name: hello[name] for name in names} for hello in hellos]


def _told(problems: Sequence[Problem]) -> list[dict[str, Any]]:
    return [{"what": one.what, "fix": list(one.fix)} for one in dict.fromkeys(problems)]


def _rank(one: plan.Rank, hellos: Sequence[plan.Hello], result: Result | None, library: str) -> dict[str, Any]:
    hello = hellos[one.member]
    told = result or {}
    nccl = told.get("nccl") or {}
    ways = [*nccl.get("transports", [])]
    used = sorted({address for address, _ in told.get("connections", [])})
    by_address = {address: name for name, address in hello["interfaces"].items()}
    interfaces = [by_address.get(address) or _loopback(address) for address in used]
    if not ways and used and library != "nccl":  # NCCL's connections say nothing about the data's way
        ways = ["TCP"]
    return {
        "rank": one.rank,
        "node": one.member,
        "host": hello["host"],
        "device": told.get("device", "?"),
        "stage": told.get("stage", "not heard of"),
        "interfaces": list(dict.fromkeys(interfaces)) or ([nccl["interface"]] if nccl.get("interface") else []),
        "addresses": used or ([nccl["address"]] if nccl.get("address") else []),
        "peers": sorted({peer for _, peer in told.get("connections", [])}),
        "transports": list(dict.fromkeys(ways)),
        "cards": nccl.get("cards", []),
        "checks": told.get("checks", []),
        "measured": told.get("measured", []),
        "state": told.get("state", "lost"),
        "error": told.get("error", ""),
        "log": told.get("log", ""),
        "library": library,
    }


def _loopback(address: str) -> str:
    return "lo" if address.startswith("127.") or address == "::1" else "?"


def _stopped(ranks: Sequence[Result], timeout: float, nodes: int) -> list[Problem]:
    """Ranks that failed, each cause once; then, if none did, ranks that hang."""
    found: list[Problem] = []
    failed = [rank for rank in ranks if rank["state"] == "failed"]
    causes: dict[tuple[str, tuple[str, ...]], list[int]] = {}
    for rank in failed:
        known = advice.known(f"{rank['error']}\n{rank['log']}")
        what = known.what if known else f"{rank['error'] or 'ended without a word'} (while {rank['stage']})"
        fix = known.fix if known else ("look at the log of the ranks, below",)
        causes.setdefault((what, fix), []).append(rank["rank"])
    found += [Problem(f"{advice.numbered(numbers)}: {what}", fix) for (what, fix), numbers in causes.items()]
    if found:
        return found
    stages: dict[str, list[int]] = {}
    for rank in ranks:
        if rank["state"] == "stuck":
            stages.setdefault(rank["stage"], []).append(rank["rank"])
    return [advice.stuck(numbers, stage, timeout, nodes) for stage, numbers in stages.items()]


def _wrong(ranks: Sequence[Result]) -> list[Problem]:
    found: dict[tuple[str, int], tuple[list[int], str]] = {}
    for rank in ranks:
        for check in rank["checks"]:
            if check["wrong"]:
                key = check["dtype"], check["elements"]
                found.setdefault(key, ([], check.get("sample", "another shape")))[0].append(rank["rank"])
    return [advice.wrong(numbers, *key, sample) for key, (numbers, sample) in found.items()]


def _checks(ranks: Sequence[Result]) -> list[dict[str, Any]]:
    """By type and size: which ranks got another sum. Only what every rank has told."""
    if not ranks:
        return []
    common = min((rank["checks"] for rank in ranks), key=len)
    return [
        {
            "dtype": check["dtype"],
            "elements": check["elements"],
            "wrong_ranks": [rank["rank"] for rank in ranks if rank["checks"][at]["wrong"]],
        }
        for at, check in enumerate(common)
    ]


def _bandwidth(ranks: Sequence[Result]) -> list[dict[str, Any]]:
    """The slowest rank counts. Bytes per second: of the data (`algorithm`), and of the link (`bus`)."""
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
    """Data that went another way than the one to the first node; between nodes only, where it matters."""
    if len(hellos) == 1:
        return []
    found = []
    for rank in ranks:
        expected = hellos[rank["node"]]["interface"]
        if rank["interfaces"] and expected not in rank["interfaces"] and expected not in ("lo", "?"):
            found.append(advice.other_interface(expected, rank["interfaces"], library))
    return found
