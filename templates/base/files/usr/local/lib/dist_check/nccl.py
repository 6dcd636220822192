"""Parses the log of NCCL with NCCL_DEBUG=INFO: interfaces, transports, kinds of links. Pure.

The patterns match NCCL 2.8 to 2.28. The format is not stable, so unknown lines are ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# Only for the processes of the check.
VARIABLES = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET,GRAPH,P2P,SHM"}

CHANNEL = re.compile(r"Channel \d+(?:/\d+)? ?: \d+\[\w+\] -> \d+\[\w+\](?: \[(?:send|receive)\])? via (\S+)")
BOOTSTRAP = re.compile(r"Bootstrap ?: Using \[?(?:\d+\])?([^\s:\]]+):(\S+?)<")
SOCKETS = re.compile(r"NET/Socket ?: Using (\[.*)")
SOCKET = re.compile(r"\[\d+\]([^\s:]+):([^\s<]+)<")
CARDS = re.compile(r"NET/IB ?: Using (\[[^;]*)")
CARD = re.compile(r"\[\d+\](\S+?):\d+/(\w+)")
LINKS = re.compile(r"Pattern \d+,.* type (\w+)/(\w+)")
VERSION = re.compile(r"NCCL version ([\d.]+)")
WARNING = re.compile(r"NCCL WARN (.*)")
# Kinds of links between GPUs, by their names in NCCL's topology. Source: NCCL, src/graph/topo.h.
LINK_NAMES = {
    "NVL": "NVLink",
    "NVB": "NVLink",
    "C2C": "NVLink-C2C",
    "PIX": "PCIe",
    "PXB": "PCIe",
    "PHB": "PCIe",
    "SYS": "PCIe across CPUs",
}


@dataclass(frozen=True)
class NcclLog:
    """The facts from the log of a rank."""

    version: str = ""
    interface: str = ""
    address: str = ""
    transports: tuple[str, ...] = ()
    cards: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())


def parse(log: str) -> NcclLog:
    version = VERSION.search(log)
    bootstrap = BOOTSTRAP.search(log)
    sockets = SOCKETS.search(log)
    first = SOCKET.search(sockets[1]) if sockets else None
    cards = CARDS.search(log)
    links = LINKS.search(log)
    address = first or bootstrap
    return NcclLog(
        version=version[1] if version else "",
        interface=address[1] if address else "",
        address=address[2] if address else "",
        transports=_transports(log, LINK_NAMES.get(links[1], "") if links else ""),
        cards=tuple(f"{name} ({kind})" for name, kind in CARD.findall(cards[1])) if cards else (),
        warnings=tuple(dict.fromkeys(WARNING.findall(log))),
    )


def _transports(log: str, link: str) -> tuple[str, ...]:
    """P2P/CUMEM/read -> P2P over NVLink; NET/IB/0/GDRDMA -> NET/IB with GPUDirect RDMA."""
    names = []
    for via in CHANNEL.findall(log):
        parts = via.split("/")
        if parts[0] == "P2P":
            name = f"P2P over {link}" if link else "P2P"
        elif parts[0] == "NET" and len(parts) > 1:
            name = f"NET/{parts[1]}" + (" with GPUDirect RDMA" if "GDRDMA" in parts else "")
        else:
            name = parts[0]
        names.append(name)
    if "NVLS" in log and re.search(r"NVLS comm|NVLS Head|via NVLS", log):
        names.append("NVLS (NVLink SHARP)")
    return tuple(dict.fromkeys(names))
