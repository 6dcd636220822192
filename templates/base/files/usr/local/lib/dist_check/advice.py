"""Problems and how to fix them. Pure functions of facts and logs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 2**20
# Docker's default, too little for data loaders and NCCL.
SMALL_SHM = 64 * MIB


@dataclass(frozen=True)
class Problem:
    """A problem. `fix` lists what to do, the most likely fix first."""

    what: str
    fix: tuple[str, ...] = ()


@dataclass(frozen=True)
class Known:
    """A known error: a pattern in the log of a rank, its cause and fixes."""

    pattern: str
    what: str
    fix: tuple[str, ...]


SHM_FIX = ("docker run --shm-size=8g ... (or --ipc=host); Kubernetes: an emptyDir with medium: Memory at /dev/shm",)
# Without IPC_LOCK: no user but root has the capabilities that a container gets, and images run as user 1000.
INFINIBAND_FIX = (
    "docker run --network host --device=/dev/infiniband --ulimit memlock=-1 ...",
    "Compose: network_mode: host, devices: [/dev/infiniband], ulimits: {memlock: -1}",
    "Kubernetes: the resource of the RDMA device plugin in `limits`; LimitMEMLOCK=infinity for containerd on each node",
    "Slurm: LimitMEMLOCK=infinity for slurmd and PropagateResourceLimitsExcept=MEMLOCK in slurm.conf; if enroot "
    "restricts /dev, export MELLANOX_VISIBLE_DEVICES=all; no --contain for Apptainer",
)
INFINIBAND_LIBRARY_FIX = "an image with CUDA has them; in another one: apt-get install libibverbs1 ibverbs-providers"
ALONE = Problem("only one rank: no data was sent", ("use -n 2 --backend cpu, or add machines with --nodes",))
# The first match counts, so the most specific patterns come first.
KNOWN = (
    Known(
        r"Duplicate GPU detected",
        "two ranks use the same GPU, which NCCL refuses",
        ("start one rank for each GPU: dist-check without -n",),
    ),
    Known(
        r"/dev/shm|No space left on device|shared memory|Bus error|SIGBUS",
        "shared memory (/dev/shm) is too small or full",
        SHM_FIX,
    ),
    Known(
        r"ibv_reg_mr|ibv_create_cq|Cannot allocate memory|memlock",
        "InfiniBand cannot lock memory",
        INFINIBAND_FIX,
    ),
    Known(
        r"no socket interface found|Unable to find address for|Unable to resolve|no interfaces? found",
        "the requested interface does not exist",
        ("unset NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, or name an interface of this machine (ls /sys/class/net)",),
    ),
    Known(
        r"gloo/transport/tcp/device",
        "gloo needs the address of this machine's own name, and there is none",
        ("docker run --hostname NAME --add-host NAME:ADDRESS ...; with --network none, ADDRESS is 127.0.0.1",),
    ),
    Known(
        r"CUDA driver version is insufficient|forward compatibility was attempted|no kernel image is available",
        "the GPU's driver is too old for this image, or the image has no code for this GPU",
        ("nvidia-smi shows driver and GPU; use an image with an older CUDA, or update the driver",),
    ),
    Known(
        r"system not yet initialized",
        "the NVSwitch fabric is not running",
        ("on the host: systemctl start nvidia-fabricmanager (it must have the version of the driver)",),
    ),
    Known(
        r"out of memory",
        "a GPU has no memory left",
        ("nvidia-smi shows which processes use it; or use smaller sizes: --max-size 16M",),
    ),
    Known(
        r"killed by signal 9",
        "the process was killed, most likely because the container ran out of memory",
        ("raise docker run --memory, or the limit of the pod; dmesg on the host shows the killed process",),
    ),
    Known(
        r"Address already in use|EADDRINUSE",
        "another program uses the port",
        ("use another port: --master HOST:PORT, or MASTER_PORT",),
    ),
    Known(
        r"No module named|cannot open shared object file|ImportError",
        "the framework does not load",
        ("read its error above; a package in ~/.local may hide the image's: python -m pip list --user",),
    ),
)


def known(log: str) -> Known | None:
    return next((error for error in KNOWN if re.search(error.pattern, log, re.IGNORECASE)), None)


def no_gpu(nodes: Sequence[str]) -> Problem:
    return Problem(
        f"no GPU is visible on {', '.join(nodes)}",
        (
            "docker run --gpus all ... (with CDI: --device nvidia.com/gpu=all); Kubernetes: limits: nvidia.com/gpu; "
            "then check nvidia-smi in the container",
            "check the network alone: --backend cpu",
        ),
    )


def too_few_gpus(node: str, ranks: int, gpus: int) -> Problem:
    return Problem(
        f"{node} has {gpus} GPU{'s' * (gpus != 1)} for {ranks} ranks; NCCL refuses two ranks on one GPU",
        (f"-n {gpus}, or --nproc-per-node={gpus} for torchrun", "check the network alone: --backend cpu"),
    )


def different(node: str, value: str, other_node: str, other_value: str) -> Problem:
    return Problem(
        f"{node} has {value}, {other_node} has {other_value}",
        (
            "start every rank from the same image, by its digest or the tag of a release",
            "python -m pip list --user shows your own packages",
        ),
    )


def loopback(node: str, address: str) -> Problem:
    return Problem(
        f"{node} has the address {address}, which other nodes cannot reach",
        ("set --master (or MASTER_ADDR) to an address that all nodes can reach: hostname -I on the first node",),
    )


def absent(ranks: str, address: str, seconds: float, command: str) -> Problem:
    port = address.rsplit(":", 1)[1]
    return Problem(
        f"{ranks} did not connect to {address} within {seconds:g} s",
        (
            f"if it is not running, start it there: {command}",
            f"use the same Docker network (or --network host), and open TCP port {port} in firewalls",
            "if it starts later, wait longer: --timeout 300",
        ),
    )


def no_meeting(address: str, reason: str, seconds: float) -> Problem:
    """This member could not reach the first one. `reason` is the error of the operating system."""
    error = reason.lower()
    fix: tuple[str, ...]
    if "refused" in error:
        fix = (
            f"start dist-check with --rank 0 and the same --master there: nothing listens at {address}",
            "for a container, use the address of the container, or publish the port",
        )
    elif "name" in error or "address family" in error or "resolve" in error:
        fix = ("the name cannot be resolved: use the IP address, or put both containers in one Docker network",)
    elif "unreachable" in error or "no route" in error:
        fix = ("there is no route to that network: use the same Docker network for both containers, or --network host",)
    else:
        fix = (
            "packets are lost: check the address, and open the TCP port in firewalls and network policies",
            "with several interfaces, use an address in the network that both machines share",
        )
    return Problem(f"could not reach the first node at {address} within {seconds:g} s: {reason}", fix)


def blocked(node: str, other: str, address: str, reason: str) -> Problem:
    return Problem(
        f"{node} cannot reach {other} at {address}: {reason}",
        (
            "one port is open, but the libraries use more: open all TCP ports between the nodes, in both directions",
            "for containers, use one Docker network, or --network host",
        ),
    )


def lost(node: str, reason: str) -> Problem:
    return Problem(f"lost {node} during the check: {reason}", ("read its own output; it may have run out of memory",))


def interface_variables(node: str, variables: Mapping[str, str], interfaces: Iterable[str]) -> list[Problem]:
    """Variables with an interface that does not exist. NCCL's may be prefixes; `=` means exact names, `^` excludes."""
    problems = []
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = variables.get(name, "")
        if not value or value.startswith("^"):
            continue
        is_exact = name.startswith("GLOO") or value.startswith("=")
        names = [part.strip() for part in value.lstrip("=").split(",") if part.strip()]
        present = list(interfaces)
        if not any(there == part or (not is_exact and there.startswith(part)) for part in names for there in present):
            text = f"{name}={value} on {node}: no such interface (it has {', '.join(sorted(present)) or 'none'})"
            problems.append(Problem(text, (f"unset {name}, or set it to one of these interfaces",)))
    return problems


def stuck(ranks: Sequence[int], stage: str, seconds: float, nodes: int) -> Problem:
    fix: tuple[str, ...] = ("read the log of the ranks below, or allow more time: --timeout 300",)
    if nodes > 1:
        fix = (
            "open all TCP ports between the nodes, in both directions",
            "if the interface above does not connect the nodes, set GLOO_SOCKET_IFNAME (on GPUs NCCL_SOCKET_IFNAME)",
            *fix,
        )
    return Problem(f"{numbered(ranks)} made no progress for {seconds:g} s while {stage}", fix)


def wrong(ranks: Sequence[int], dtype: str, elements: int, sample: str) -> Problem:
    return Problem(
        f"{numbered(ranks)} got a wrong sum of {elements} {dtype} values: {sample}",
        (
            "on GPUs, try NCCL_P2P_DISABLE=1: with an IOMMU, direct transfers between GPUs may be corrupted",
            "then check the hardware: dcgmi diag -r 2, Xid messages in dmesg",
        ),
    )


def notes(hellos: Sequence[Mapping[str, Any]], *, on_gpus: bool, transports: Iterable[str]) -> list[Problem]:
    """Problems that make training slow or fail later, but not this check."""
    problems = []
    used = " ".join(transports)
    # With a launcher, each rank is a member, and several members are on one machine.
    for hello in {hello["host"]: hello for hello in reversed(hellos)}.values():
        node = f"node {hello['index']} ({hello['host']})"
        shm = hello["shm_bytes"]
        if shm is not None and shm <= SMALL_SHM:
            problems.append(
                Problem(f"{node}: /dev/shm has only {shm // MIB} MiB, too little for data loaders and NCCL", SHM_FIX)
            )
        if on_gpus and len(hellos) > 1 and "NET/IB" not in used:
            problems += _unused_infiniband(node, hello["infiniband"], hello["memlock"], used)
    return problems


def _unused_infiniband(node: str, facts: Mapping[str, Any], limit: int | None, used: str) -> list[Problem]:
    """Why NCCL does not use the cards of a node: all that is missing, or else the most likely reason."""
    cards, devices, verbs = facts["cards"], facts["devices"], facts["verbs"]
    if not cards:
        return []
    has = f"{node}: has {', '.join(cards)}"
    missing, fix = [], list[str]()
    if not devices:
        missing.append("no /dev/infiniband in the container")
    elif all(devices.values()):
        missing += [f"/dev/infiniband/{name}: {error}" for name, error in devices.items()]
    if limit is not None:
        missing.append(f"only {limit // 1024} KiB may be locked (ulimit -l)")
    if missing:
        fix += INFINIBAND_FIX
    if verbs is None:
        missing.append("no libibverbs.so.1 in the image")
        fix.append(INFINIBAND_LIBRARY_FIX)
    elif devices and not verbs:
        missing.append("libibverbs has no library for them")
        fix.append(INFINIBAND_LIBRARY_FIX)
    if missing:
        return [Problem(f"{has}, which NCCL cannot use: {'; '.join(missing)}", tuple(fix))]
    ports = {f"{name} {state}" for name, states in cards.items() for state in states}
    if not any(port.endswith(" ACTIVE") for port in ports):
        check = "ibv_devinfo shows the ports; check the cables, and for InfiniBand the subnet manager"
        return [Problem(f"{has}, but no port is active: {', '.join(sorted(ports))}", (check,))]
    if "NET/Socket" in used:
        return [
            Problem(
                f"{has}, but NCCL used sockets",
                (
                    "check NCCL_IB_DISABLE and NCCL_IB_HCA; run with NCCL_DEBUG=INFO and search for NET/IB",
                    "RoCE needs the network of the host: docker run --network host; Kubernetes: hostNetwork: true",
                ),
            )
        ]
    return []


def other_interface(expected: str, used: Sequence[str], library: str) -> Problem:
    variable = "NCCL_SOCKET_IFNAME" if library == "nccl" else "GLOO_SOCKET_IFNAME"
    return Problem(
        f"data used {', '.join(used)}, but the route to the first node is {expected}",
        (f"if {expected} is faster: {variable}={expected}",),
    )


def numbered(ranks: Sequence[int]) -> str:
    text = ", ".join(str(rank) for rank in sorted(ranks))
    return f"rank{'s' * (len(ranks) != 1)} {text}"
