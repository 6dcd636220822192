"""What to do about what was found. Pure: facts and texts in, problems out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 2**20
# Docker's default, and what data loaders and NCCL soon fill.
SMALL_SHM = 64 * MIB


@dataclass(frozen=True)
class Problem:
    """`fix` are things to do, most likely first."""

    what: str
    fix: tuple[str, ...] = ()


@dataclass(frozen=True)
class Known:
    """A text in the log of a rank whose cause is known."""

    pattern: str
    what: str
    fix: tuple[str, ...]


SHM_FIX = ("docker run --shm-size=8g ... (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at /dev/shm",)
IB_FIX = (
    "docker run --device=/dev/infiniband --cap-add=IPC_LOCK --ulimit memlock=-1 ...; Kubernetes: RDMA device plugin",
)
ALONE = Problem("one rank alone: no data went anywhere", ("-n 2 --backend cpu; or add machines with --nodes",))
# The most telling first: the first that is found counts.
KNOWN = (
    Known(
        r"Duplicate GPU detected",
        "two ranks were given the same GPU, which NCCL refuses",
        ("start one rank for each GPU: dist-check without -n",),
    ),
    Known(
        r"/dev/shm|No space left on device|shared memory|Bus error|SIGBUS",
        "shared memory (/dev/shm) is too small or full",
        SHM_FIX,
    ),
    Known(
        r"ibv_reg_mr|ibv_create_cq|Cannot allocate memory|memlock",
        "InfiniBand could not lock memory",
        IB_FIX,
    ),
    Known(
        r"no socket interface found|Unable to find address for|Unable to resolve|no interfaces? found",
        "the interface that was asked for is not there",
        ("unset NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, or name an interface of this machine (ls /sys/class/net)",),
    ),
    Known(
        r"gloo/transport/tcp/device",
        "gloo asks for the address of this machine's own name, and there is none",
        ("docker run --hostname NAME --add-host NAME:ADDRESS ...; with --network none, ADDRESS is 127.0.0.1",),
    ),
    Known(
        r"CUDA driver version is insufficient|forward compatibility was attempted|no kernel image is available",
        "the GPU's driver is too old for this image, or the image has no code for this GPU",
        ("nvidia-smi shows driver and GPU; take an image of an older CUDA, or a newer driver",),
    ),
    Known(
        r"system not yet initialized",
        "the NVSwitch fabric is not up",
        ("on the host: systemctl start nvidia-fabricmanager, of the driver's version",),
    ),
    Known(
        r"out of memory",
        "a GPU has no memory left",
        ("nvidia-smi shows who uses it; or check with less: --max-size 16M",),
    ),
    Known(
        r"ended by signal 9",
        "it was killed, most likely because the container's memory was used up",
        ("docker run --memory, or the limit of the pod; dmesg on the host names what was killed",),
    ),
    Known(
        r"Address already in use|EADDRINUSE",
        "a port was taken by another program",
        ("give another: --master host:PORT, or MASTER_PORT",),
    ),
    Known(
        r"No module named|cannot open shared object file|ImportError",
        "the framework does not load",
        ("read its error above; a package in ~/.local may hide that of the image: python -m pip list --user",),
    ),
)


def known(log: str) -> Known | None:
    return next((one for one in KNOWN if re.search(one.pattern, log, re.IGNORECASE)), None)


def no_gpu(nodes: Sequence[str]) -> Problem:
    return Problem(
        f"no GPU is visible on {', '.join(nodes)}",
        (
            "docker run --gpus all ...; Kubernetes: limits: nvidia.com/gpu; then check nvidia-smi in the container",
            "check the network alone: --backend cpu",
        ),
    )


def too_few_gpus(node: str, ranks: int, gpus: int) -> Problem:
    return Problem(
        f"{node} has {gpus} GPU{'s' * (gpus != 1)} for {ranks} ranks; NCCL refuses two ranks on one GPU",
        (f"-n {gpus}, or --nproc-per-node={gpus} for torchrun", "check the network alone: --backend cpu"),
    )


def different(one: str, its: str, other: str, theirs: str) -> Problem:
    return Problem(
        f"{one} has {its}, {other} has {theirs}",
        (
            "start every rank from the same image, by its full tag or digest",
            "python -m pip list --user shows your own packages",
        ),
    )


def loopback(node: str, address: str) -> Problem:
    return Problem(
        f"{node} would tell the others to find it at {address}, which is itself for each of them",
        ("give --master (or MASTER_ADDR) the address that the others see: hostname -I on the first node",),
    )


def absent(ranks: str, at: str, seconds: float, command: str) -> Problem:
    port = at.rsplit(":", 1)[1]
    return Problem(
        f"{ranks} did not come to {at} within {seconds:g} s",
        (
            f"is it started? There: {command}",
            f"can it reach {at}? Same Docker network (or --network host), and TCP port {port} open in firewalls",
            "does it start later? Wait longer: --timeout 300",
        ),
    )


def no_meeting(at: str, reason: str, seconds: float) -> Problem:
    """This member could not reach the first one. `reason` is the operating system's word."""
    low = reason.lower()
    fix: tuple[str, ...]
    if "refused" in low:
        fix = (
            f"no dist-check listens at {at}: start the one with --rank 0 and the same --master there",
            "in a container: is the address that of the container, or its port published?",
        )
    elif "name" in low or "address family" in low or "resolve" in low:
        fix = ("that name is not known here: give the IP address, or put both containers in one Docker network",)
    elif "unreachable" in low or "no route" in low:
        fix = ("there is no way to that network from here: containers need the same Docker network, or --network host",)
    else:
        fix = (
            "packets are lost on the way: is the address right, and TCP port open in firewalls and network policies?",
            "several interfaces? Give the address of the one that both machines share",
        )
    return Problem(f"could not reach the first node at {at} within {seconds:g} s: {reason}", fix)


def blocked(one: str, other: str, at: str, reason: str) -> Problem:
    return Problem(
        f"{one} cannot reach {other} at {at}: {reason}",
        (
            "one port is open, but the libraries use more: open all TCP ports between the nodes, both ways",
            "or containers: one Docker network, or --network host",
        ),
    )


def lost(node: str, reason: str) -> Problem:
    return Problem(
        f"{node} went away during the check: {reason}", ("look at its own output; was it killed for memory?",)
    )


def interface_variables(node: str, variables: Mapping[str, str], interfaces: Iterable[str]) -> list[Problem]:
    """Variables that name an interface which is not there. NCCL's may be prefixes, `=` means exactly, `^` not those."""
    found = []
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = variables.get(name, "")
        if not value or value.startswith("^"):
            continue
        exact = name.startswith("GLOO") or value.startswith("=")
        wanted = [part.strip() for part in value.lstrip("=").split(",") if part.strip()]
        here = list(interfaces)
        if not any(one == want or (not exact and one.startswith(want)) for want in wanted for one in here):
            text = f"{name}={value} on {node}: it has no such interface, but {', '.join(sorted(here)) or 'none'}"
            found.append(Problem(text, (f"unset {name}, or set it to one of those",)))
    return found


def stuck(ranks: Sequence[int], stage: str, seconds: float, nodes: int) -> Problem:
    who = numbered(ranks)
    fix: tuple[str, ...] = ("look at the log of the ranks, below; more time: --timeout 300",)
    if nodes > 1:
        fix = (
            "open all TCP ports between the nodes, both ways",
            "does the interface above join the nodes? If not: GLOO_SOCKET_IFNAME, or NCCL_SOCKET_IFNAME on GPUs",
            *fix,
        )
    return Problem(f"{who} stopped answering while {stage}, for {seconds:g} s", fix)


def wrong(ranks: Sequence[int], dtype: str, elements: int, sample: str) -> Problem:
    return Problem(
        f"{numbered(ranks)} got a wrong sum of {elements} {dtype} values: {sample}",
        (
            "on GPUs, try NCCL_P2P_DISABLE=1: with an IOMMU, direct transfers between GPUs may be corrupted",
            "then look for failing hardware: dcgmi diag -r 2, dmesg for Xid messages",
        ),
    )


def notes(hellos: Sequence[Mapping[str, Any]], *, on_gpus: bool, transports: Iterable[str]) -> list[Problem]:
    """What is no failure, but makes it slow or fails later."""
    found = []
    used = " ".join(transports)
    # A launcher's ranks are members of their own, but many on one machine.
    for hello in {hello["host"]: hello for hello in reversed(hellos)}.values():
        node = f"node {hello['index']} ({hello['host']})"
        shm, limit = hello["shm_bytes"], hello["memlock"]
        if shm is not None and shm <= SMALL_SHM:
            found.append(
                Problem(f"{node}: /dev/shm has only {shm // MIB} MiB, too little for data loaders and NCCL", SHM_FIX)
            )
        if on_gpus and hello["infiniband_cards"] and len(hellos) > 1:
            cards = ", ".join(hello["infiniband_cards"])
            if not hello["infiniband_device"]:
                found.append(
                    Problem(f"{node}: has {cards}, but no /dev/infiniband in the container, so it is not used", IB_FIX)
                )
            elif limit is not None:
                found.append(
                    Problem(f"{node}: only {limit // 1024} KiB may be locked, too little for InfiniBand", IB_FIX)
                )
            elif "NET/Socket" in used:
                fix = ("look for NCCL_IB_DISABLE, NCCL_IB_HCA; run with NCCL_DEBUG=INFO and search for NET/IB",)
                found.append(Problem(f"{node}: has {cards}, but NCCL went over sockets", fix))
    return found


def other_interface(expected: str, used: Sequence[str], library: str) -> Problem:
    variable = "NCCL_SOCKET_IFNAME" if library == "nccl" else "GLOO_SOCKET_IFNAME"
    return Problem(
        f"data went over {', '.join(used)}, while the way to the first node is {expected}",
        (f"if that is the slower one: {variable}={expected}",),
    )


def numbered(ranks: Sequence[int]) -> str:
    text = ", ".join(str(one) for one in sorted(ranks))
    return f"rank{'s' * (len(ranks) != 1)} {text}"
