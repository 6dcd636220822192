"""The position of this process in the job: from the options, or from the variables of a launcher."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_PORT = 29500  # as torchrun's


class SettingsError(Exception):
    """Options or variables are missing, invalid or contradictory."""


@dataclass(frozen=True)
class Place:
    """One member of the check: a machine or container with some ranks, or a single rank that a launcher started."""

    index: int
    members: int
    host: str  # of the first member
    port: int
    processes: int | None  # None: one for each GPU
    first_device: int  # the GPU of this member's first rank
    how: str  # the source of these values, for messages

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
    """The place by options, torchrun, Slurm or an Indexed Job; else this machine alone. Raises SettingsError."""
    if nodes is None and rank is None and master is None:
        place = _torchrun(environment) or _slurm(environment)
        if place:
            if processes not in (None, 1):
                raise SettingsError(f"{place.how} already started one process for each rank: remove -n")
            return place
    if rank is None and "JOB_COMPLETION_INDEX" in environment:
        return _indexed_job(nodes, master, processes, environment)
    if nodes is None and rank is None and master is None:
        return Place(0, 1, "127.0.0.1", 0, processes, 0, "this machine alone")
    if nodes is None or rank is None or master is None:
        missing = [
            f"--{name}" for name, value in (("nodes", nodes), ("rank", rank), ("master", master)) if value is None
        ]
        raise SettingsError(
            f"several machines need --nodes, --rank and --master; {' and '.join(missing)} is missing. "
            "On the first: dist-check --nodes 2 --rank 0 --master FIRST:29500; on the other, the same with --rank 1"
        )
    return _several(nodes, rank, master, processes, "--nodes and --rank")


def _several(nodes: int, rank: int, master: str, processes: int | None, how: str) -> Place:
    if nodes < 1:
        raise SettingsError(f"--nodes {nodes}: must be at least 1")
    if not 0 <= rank < nodes:
        raise SettingsError(f"--rank {rank}: with --nodes {nodes}, ranks are 0 to {nodes - 1}, each on one machine")
    host, port = address(master)
    return Place(rank, nodes, host, port, processes, 0, how)


def address(text: str) -> tuple[str, int]:
    """Parses host, host:port or [IPv6]:port. Raises SettingsError."""
    matched = re.fullmatch(r"(?:\[([0-9a-fA-F:.]+)\]|([^\s:\[\]/]+))(?::([0-9]{1,5}))?", text)
    port = int(matched[3]) if matched and matched[3] else DEFAULT_PORT
    if not matched or not 0 < port < 65536:
        raise SettingsError(f"invalid --master {text!r}: use host:port, e.g. 10.0.0.5:{DEFAULT_PORT}")
    return matched[1] or matched[2], port


def joined(host: str, port: int) -> str:
    """The inverse of `address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except KeyError:
        raise SettingsError(f"the variable {name} is not set, but others of its launcher are: set it too") from None
    except ValueError:
        raise SettingsError(f"invalid {name}={environment[name]!r}: expected a number") from None


def _torchrun(environment: Mapping[str, str]) -> Place | None:
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return None
    if "MASTER_ADDR" not in environment:
        raise SettingsError(
            "RANK and WORLD_SIZE are set, but not MASTER_ADDR: set it to the address of the machine with rank 0"
        )
    rank, world = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    if not 0 <= rank < world:
        raise SettingsError(f"invalid RANK={rank} with WORLD_SIZE={world}: ranks are 0 to WORLD_SIZE-1")
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
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST") or ""
    host = environment.get("MASTER_ADDR") or first_host(nodes)
    if not host:
        raise SettingsError("Slurm has set no SLURM_JOB_NODELIST: set MASTER_ADDR to the address of rank 0")
    # Jobs that share a machine must not use the same port.
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


def first_host(nodes: str) -> str:
    """The first host of a list in Slurm's format: `gpu[03-07,12],login1` -> `gpu03`."""
    matched = re.match(r"([^,\[\]]+)(?:\[([^\]]*)\])?([^,]*)", nodes)
    if not matched:
        return ""
    number = re.split(r"[-,]", matched[2])[0] if matched[2] else ""
    return f"{matched[1]}{number}{matched[3]}"


def _indexed_job(nodes: int | None, master: str | None, processes: int | None, environment: Mapping[str, str]) -> Place:
    """Kubernetes sets only the index of each pod of an Indexed Job."""
    index = _number(environment, "JOB_COMPLETION_INDEX")
    if nodes is None and "WORLD_SIZE" in environment:
        nodes = _number(environment, "WORLD_SIZE")
    if master is None and "MASTER_ADDR" in environment:
        master = f"{environment['MASTER_ADDR']}:{environment.get('MASTER_PORT') or DEFAULT_PORT}"
    if nodes is None or master is None:
        raise SettingsError(
            "this is a pod of an Indexed Job: give the number of pods and the address of the pod with index 0, with "
            "--nodes and --master or the variables WORLD_SIZE and MASTER_ADDR"
        )
    return _several(nodes, index, master, processes, "Indexed Job")
