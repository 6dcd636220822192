"""What this machine or container has, as far as it matters to processes that compute together."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import os
import platform
import resource
import socket
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SIOCGIFADDR = 0x8915  # linux/sockios.h
ESTABLISHED = "01"  # net/tcp_states.h
Facts = dict[str, Any]


def facts(*, framework: str, distribution: str, toward: str) -> Facts:
    """What the members tell one another. `toward` is the first member's address: the way there shows the interface."""
    address = address_toward(toward)
    return {
        "host": socket.gethostname(),
        "address": address,
        "interface": interface_of(address),
        "interfaces": interfaces(),
        "name_resolves_to": _resolved(socket.gethostname()),
        "gpus": gpus(os.environ),
        "shm_bytes": _size("/dev/shm"),
        "memlock": _memlock(),
        "infiniband_cards": _listed("/sys/class/infiniband"),
        "infiniband_device": Path("/dev/infiniband").is_dir(),
        "framework": framework,
        "versions": versions(distribution),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("NCCL_", "GLOO_")) or name == "CUDA_VISIBLE_DEVICES"
        },
    }


def versions(distribution: str) -> dict[str, str]:
    """Of what must agree between the ranks; read from metadata, since an import takes seconds."""
    found = {"python": platform.python_version()}
    for name in (distribution, "jaxlib", "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found["nccl" if name.startswith("nvidia-nccl") else name] = importlib.metadata.version(name)
    # tensorflow-cpu is TensorFlow too.
    if distribution == "tensorflow" and distribution not in found:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[distribution] = importlib.metadata.version("tensorflow-cpu")
    return found


def gpus(environment: Mapping[str, str]) -> int:
    """How many GPUs a process here may use; loads no CUDA."""
    present = _gpus_present()
    chosen = environment.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    # CUDA stops reading at the first one that is none: "-1" and "" mean no GPU at all.
    named = 0
    for one in chosen.split(","):
        if not one.strip() or one.strip().startswith("-"):
            break
        named += 1
    return min(named, present) if not chosen.startswith("MIG-") else named


def _gpus_present() -> int:
    try:
        import pynvml  # noqa: PLC0415  (not in every image)
    except ModuleNotFoundError:
        return len([one for one in _listed("/dev") if one.startswith("nvidia") and one[len("nvidia") :].isdigit()])
    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0  # no driver


def address_toward(host: str) -> str:
    """Our own address on the way to `host`. Nothing is sent: connecting a datagram socket only asks for the route."""
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect(target)
        return str(asking.getsockname()[0])


def interfaces() -> dict[str, str]:
    """Name -> IPv4 address, of the interfaces that have one."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for name in _listed("/sys/class/net"):
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                found[name] = socket.inet_ntoa(fcntl.ioctl(asking.fileno(), SIOCGIFADDR, request)[20:24])
    return found


def interface_of(address: str) -> str:
    """The interface that has this address; all of 127.0.0.0/8 is the loopback's."""
    if address.startswith("127.") or address == "::1":
        return "lo"
    named = [name for name, its in interfaces().items() if its == address]
    if not named and ":" in address:
        named = [name for name, its in _ipv6(Path("/proc/net/if_inet6")).items() if address in its]
    return named[0] if named else "?"


def _ipv6(table: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for line in table.read_text().splitlines():
            fields = line.split()
            found.setdefault(fields[5], []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0])))
    return found


def connections(*, ignore: Iterable[int] = ()) -> list[tuple[str, str]]:
    """(Our address, theirs) of every open TCP connection of this process, but those to or from the ports to ignore.

    What a library says it uses is one thing; these are the connections that it has.
    """
    own = set()
    for descriptor in _listed("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(str(Path("/proc/self/fd", descriptor).readlink()))
    found = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            text = Path("/proc/self/net", name).read_text()
            found += [pair for inode, pair in table_of_connections(text, set(ignore)) if f"socket:[{inode}]" in own]
    return found


def table_of_connections(text: str, ignored_ports: set[int]) -> list[tuple[str, tuple[str, str]]]:
    """Established connections in /proc/net/tcp or tcp6: inode, and our address and theirs. Source: proc(5)."""
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != ESTABLISHED:
            continue
        (own, own_port), (their, their_port) = _end(fields[1]), _end(fields[2])
        if not {own_port, their_port} & ignored_ports:
            found.append((fields[9], (own, their)))
    return found


def _end(text: str) -> tuple[str, int]:
    """Address and port, written as 32-bit words in the byte order of the machine (all of ours are little-endian)."""
    words, port = text.split(":")
    raw = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    if len(raw) == 16 and raw.startswith(b"\0" * 10 + b"\xff\xff"):
        raw = raw[12:]  # IPv4 in IPv6
    family = socket.AF_INET if len(raw) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, raw), int(port, 16)


def _resolved(name: str) -> str | None:
    try:
        return str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def _memlock() -> int | None:
    """The most memory that may be locked, in bytes; None if as much as there is."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _size(path: str) -> int | None:
    try:
        told = os.statvfs(path)
    except OSError:
        return None
    return told.f_frsize * told.f_blocks


def _listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []
