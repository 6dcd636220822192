"""The ranks, GPUs and library of the check, which the first member chooses from the facts of all members. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import advice
from .advice import Problem

CPU, GPU = "cpu", "gpu"
# The values of --backend; each framework has its own names for its libraries.
LIBRARY_OF = {"auto": None, "cpu": CPU, "gloo": CPU, "ring": CPU, "gpu": GPU, "nccl": GPU}

# Bytes of the measured all-reduces, and the largest by library, so that the check takes only seconds.
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
    """The plan; with `problems`, the check cannot start."""

    library: str
    why: str
    ranks: tuple[Rank, ...]
    problems: tuple[Problem, ...]

    def of_member(self, member: int) -> list[Rank]:
        return [rank for rank in self.ranks if rank.member == member]


def make(hellos: Sequence[Hello], backend: str) -> Plan:
    """The plan of a complete list of hellos, in the order of the members. `backend` is the value of --backend."""
    library, why, problems = _library(hellos, backend)
    ranks: list[Rank] = []
    for hello in hellos:
        for local in range(hello["processes"]):
            # Slurm can restrict each task to its own GPU, which then has the number 0.
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
    """The sizes to measure, up to `largest` or the default of the library; always at least the smallest."""
    return [size for size in SIZES if size <= (largest or LARGEST[library])] or [SIZES[0]]


def node(hello: Hello) -> str:
    return f"node {hello['index']} ({hello['host']})"


def _library(hellos: Sequence[Hello], backend: str) -> tuple[str, str, list[Problem]]:
    chosen = LIBRARY_OF[backend]
    with_gpus = [hello for hello in hellos if hello["gpus"]]
    without = [hello for hello in hellos if not hello["gpus"]]
    if chosen == CPU:
        return CPU, f"chosen with --backend {backend}", []
    if chosen == GPU and not with_gpus:
        return GPU, f"chosen with --backend {backend}", [advice.no_gpu([node(hello) for hello in without])]
    if with_gpus and without:
        return GPU, "some nodes have GPUs", [advice.no_gpu([node(hello) for hello in without])]
    if with_gpus:
        return GPU, "every node has GPUs", []
    return CPU, "no GPU is visible here", []


def _too_few_gpus(hellos: Sequence[Hello], ranks: Sequence[Rank]) -> list[Problem]:
    problems = []
    for hello in hellos:
        devices = [rank.device for rank in ranks if rank.member == hello["index"]]
        if hello["gpus"] and max(devices) >= hello["gpus"]:
            problems.append(advice.too_few_gpus(node(hello), max(devices) + 1, hello["gpus"]))
    return problems


def _differing(hellos: Sequence[Hello]) -> list[Problem]:
    """Different versions of the framework or NCCL make ranks hang or give wrong results; Python may differ."""
    problems = []
    first = hellos[0]
    for hello in hellos[1:]:
        if hello["framework"] != first["framework"]:
            problems.append(advice.different(node(first), first["framework"], node(hello), hello["framework"]))
            continue
        for name in sorted(set(first["versions"]) | set(hello["versions"])):
            own, other = first["versions"].get(name, "none"), hello["versions"].get(name, "none")
            if own != other and name != "python":
                problems.append(advice.different(node(first), f"{name} {own}", node(hello), f"{name} {other}"))
    return problems


def _unreachable(hellos: Sequence[Hello]) -> list[Problem]:
    """Members whose only address is 127.0.0.1, in a job on several machines."""
    if len({hello["host"] for hello in hellos}) == 1:
        return []
    return [
        advice.loopback(node(hello), hello["address"])
        for hello in hellos
        if hello["address"].startswith("127.") or hello["address"] == "::1"
    ]
