"""Who computes what with what, decided by the first member from what all of them told. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import advice
from .advice import Problem

CPU, GPU = "cpu", "gpu"
# What people call the two, whatever the framework calls its library.
LIBRARY_OF = {"auto": None, "cpu": CPU, "gloo": CPU, "ring": CPU, "gpu": GPU, "nccl": GPU}

# Bytes of the all-reduces that are measured, and the largest of them by the library: what takes seconds.
SIZES = (2**10, 2**16, 2**20, 2**24, 2**26, 2**28, 2**30)
LARGEST = {CPU: 2**24, GPU: 2**28}

Hello = Mapping[str, Any]


@dataclass(frozen=True)
class Rank:
    """One process of the check."""

    rank: int
    member: int
    device: int
    address: str
    port: int


@dataclass(frozen=True)
class Plan:
    """`problems` are those with which it makes no sense to start."""

    library: str
    why: str
    ranks: tuple[Rank, ...]
    problems: tuple[Problem, ...]

    def of_member(self, member: int) -> list[Rank]:
        return [one for one in self.ranks if one.member == member]


def make(hellos: Sequence[Hello], asked: str) -> Plan:
    """`hellos` are in the order of the members, and complete."""
    library, why, problems = _library(hellos, asked)
    ranks: list[Rank] = []
    for hello in hellos:
        for local in range(hello["processes"]):
            # Slurm may show each task its own GPU only, as number 0.
            device = 0 if hello["gpus"] == 1 and hello["processes"] == 1 else hello["first_device"] + local
            ranks.append(Rank(len(ranks), hello["index"], device, hello["address"], hello["ports"][local]))
    if library == GPU:
        problems += _too_few_gpus(hellos, ranks)
    problems += _differing(hellos)
    problems += _unreachable(hellos)
    for hello in hellos:
        problems += advice.interface_variables(node(hello), hello["variables"], hello["interfaces"])
    return Plan(library, why, tuple(ranks), tuple(problems))


def sizes(library: str, largest: int | None) -> list[int]:
    """Those that are asked for, or else that fit the library; the smallest always."""
    return [one for one in SIZES if one <= (largest or LARGEST[library])] or [SIZES[0]]


def node(hello: Hello) -> str:
    return f"node {hello['index']} ({hello['host']})"


def _library(hellos: Sequence[Hello], asked: str) -> tuple[str, str, list[Problem]]:
    chosen = LIBRARY_OF[asked]
    with_gpus = [hello for hello in hellos if hello["gpus"]]
    without = [hello for hello in hellos if not hello["gpus"]]
    if chosen == CPU:
        return CPU, f"asked for with --backend {asked}", []
    if chosen == GPU and not with_gpus:
        return GPU, f"asked for with --backend {asked}", [advice.no_gpu([node(hello) for hello in without])]
    if with_gpus and without:
        return GPU, "some nodes have GPUs", [advice.no_gpu([node(hello) for hello in without])]
    if with_gpus:
        return GPU, "every node has GPUs", []
    return CPU, "no GPU is visible here", []


def _too_few_gpus(hellos: Sequence[Hello], ranks: Sequence[Rank]) -> list[Problem]:
    found = []
    for hello in hellos:
        devices = [one.device for one in ranks if one.member == hello["index"]]
        if hello["gpus"] and max(devices) >= hello["gpus"]:
            found.append(advice.too_few_gpus(node(hello), max(devices) + 1, hello["gpus"]))
    return found


def _differing(hellos: Sequence[Hello]) -> list[Problem]:
    """Ranks with another framework or NCCL hang or compute nonsense; another Python may be."""
    found = []
    first = hellos[0]
    for hello in hellos[1:]:
        if hello["framework"] != first["framework"]:
            found.append(advice.different(node(first), first["framework"], node(hello), hello["framework"]))
            continue
        for name in sorted(set(first["versions"]) | set(hello["versions"])):
            own, other = first["versions"].get(name, "none"), hello["versions"].get(name, "none")
            if own != other and name != "python":
                found.append(advice.different(node(first), f"{name} {own}", node(hello), f"{name} {other}"))
    return found


def _unreachable(hellos: Sequence[Hello]) -> list[Problem]:
    """A member that knows itself only as 127.0.0.1, while others are on other machines."""
    if len({hello["host"] for hello in hellos}) == 1:
        return []
    return [
        advice.loopback(node(hello), hello["address"])
        for hello in hellos
        if hello["address"].startswith("127.") or hello["address"] == "::1"
    ]
