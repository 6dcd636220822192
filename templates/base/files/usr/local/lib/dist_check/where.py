"""Who this process is among those that check together: from the options, or from what started it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_PORT = 29500  # as torchrun's


class Unclear(Exception):
    """What is asked or found contradicts itself; the text says what to do."""


@dataclass(frozen=True)
class Place:
    """One member of the check: a machine or container with some ranks, or a single rank that a launcher started."""

    index: int
    members: int
    host: str  # of the first member
    port: int
    processes: int | None  # None: as many as there are GPUs
    first_device: int  # the GPU of this member's first rank
    how: str  # how we know, in words

    @property
    def alone(self) -> bool:
        return self.members == 1


def find(
    *,
    nodes: int | None,
    rank: int | None,
    master: str | None,
    processes: int | None,
    environment: Mapping[str, str],
) -> Place:
    """Options count first; then torchrun, Slurm and an Indexed Job; else this machine alone. Raises Unclear."""
    if nodes is None and rank is None and master is None:
        started = _torchrun(environment) or _slurm(environment)
        if started:
            if processes not in (None, 1):
                raise Unclear(f"{started.how} started one process for each rank already: leave -n out")
            return started
    if rank is None and "JOB_COMPLETION_INDEX" in environment:
        return _indexed_job(nodes, master, processes, environment)
    if nodes is None and rank is None and master is None:
        return Place(0, 1, "127.0.0.1", 0, processes, 0, "this machine alone")
    if nodes is None or rank is None or master is None:
        missing = [
            f"--{name}" for name, value in (("nodes", nodes), ("rank", rank), ("master", master)) if value is None
        ]
        raise Unclear(
            f"several machines need --nodes, --rank and --master; {' and '.join(missing)} is missing. "
            "On the first: dist-check --nodes 2 --rank 0 --master FIRST:29500; on the other the same with --rank 1"
        )
    return _several(nodes, rank, master, processes, "--nodes and --rank")


def _several(nodes: int, rank: int, master: str, processes: int | None, how: str) -> Place:
    if nodes < 1:
        raise Unclear(f"--nodes {nodes}: must be at least 1")
    if not 0 <= rank < nodes:
        raise Unclear(f"--rank {rank}: with --nodes {nodes}, ranks are 0 to {nodes - 1}, each on one machine")
    host, port = address(master)
    return Place(rank, nodes, host, port, processes, 0, how)


def address(text: str) -> tuple[str, int]:
    """host, host:port or [IPv6]:port."""
    matched = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:\[\]/]+))(?::([0-9]{1,5}))?", text)
    port = int(matched[3]) if matched and matched[3] else DEFAULT_PORT
    if not matched or not 0 < port < 65536:
        raise Unclear(f"--master {text!r}: write host:port, such as 10.0.0.5:{DEFAULT_PORT}")
    return matched[1] or matched[2], port


def joined(host: str, port: int) -> str:
    """As `address` reads it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except KeyError:
        raise Unclear(f"the variable {name} is missing, though others of its kind are set") from None
    except ValueError:
        raise Unclear(f"the variable {name} is {environment[name]!r}, which is no number") from None


def _torchrun(environment: Mapping[str, str]) -> Place | None:
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    if "MASTER_ADDR" not in environment:
        raise Unclear("RANK and WORLD_SIZE are set, but not MASTER_ADDR: which machine has rank 0?")
    rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise Unclear(f"RANK is {rank} and WORLD_SIZE is {world}: ranks are 0 to WORLD_SIZE-1")
    port = int(environment.get("MASTER_PORT") or DEFAULT_PORT)
    agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place(
        index=rank,
        members=world,
        host=environment["MASTER_ADDR"],
        # torchrun itself listens on MASTER_PORT.
        port=port + 1 if agent else port,
        processes=1,
        first_device=int(environment.get("LOCAL_RANK") or 0),
        how="torchrun" if agent else "RANK and WORLD_SIZE",
    )


def _slurm(environment: Mapping[str, str]) -> Place | None:
    """`srun` sets these for each task. Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES"."""
    if "SLURM_PROCID" not in environment or int(environment.get("SLURM_NTASKS") or 1) < 2:
        return None
    listed = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    host = environment.get("MASTER_ADDR") or first_host(listed)
    if not host:
        raise Unclear("Slurm started this, but neither MASTER_ADDR nor SLURM_JOB_NODELIST says where rank 0 is")
    # Jobs that share a machine must not meet at the same port.
    port = 20000 + int(environment.get("SLURM_JOB_ID") or 0) % 10000
    return Place(
        index=_number(environment, "SLURM_PROCID"),
        members=_number(environment, "SLURM_NTASKS"),
        host=host,
        port=int(environment.get("MASTER_PORT") or port),
        processes=1,
        first_device=int(environment.get("SLURM_LOCALID") or 0),
        how="Slurm",
    )


def first_host(listed: str) -> str:
    """The first of a list as Slurm writes it: `gpu[03-07,12],login1` -> `gpu03`."""
    matched = re.match(r"([^,\[\]]+)(?:\[([^\]]*)\])?([^,]*)", listed)
    if not matched:
        return ""
    inside = re.split(r"[-,]", matched[2])[0] if matched[2] else ""
    return f"{matched[1]}{inside}{matched[3]}"


def _indexed_job(nodes: int | None, master: str | None, processes: int | None, environment: Mapping[str, str]) -> Place:
    """Kubernetes tells each pod of an Indexed Job only its index."""
    index = _number(environment, "JOB_COMPLETION_INDEX")
    if nodes is None and "WORLD_SIZE" in environment:
        nodes = _number(environment, "WORLD_SIZE")
    if master is None and "MASTER_ADDR" in environment:
        master = f"{environment['MASTER_ADDR']}:{environment.get('MASTER_PORT') or DEFAULT_PORT}"
    if nodes is None or master is None:
        raise Unclear(
            "this is a pod of an Indexed Job: say how many pods there are and where the one of index 0 is, with "
            "--nodes and --master or the variables WORLD_SIZE and MASTER_ADDR"
        )
    return _several(nodes, index, master, processes, "Indexed Job")
