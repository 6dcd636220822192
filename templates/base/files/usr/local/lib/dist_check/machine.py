"""Facts about this machine or container that matter for distributed training."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib.metadata
import os
import platform
import re
import resource
import socket
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

SIOCGIFADDR = 0x8915  # linux/sockios.h
ESTABLISHED = "01"  # net/tcp_states.h
CAP_IPC_LOCK = 14  # linux/capability.h
INITIAL_USER_NAMESPACE = ["0", "0", "4294967295"]  # in /proc/self/uid_map
Facts = dict[str, Any]


def facts(*, framework: str, distribution: str, toward: str) -> Facts:
    """The facts that members exchange. `toward` is the first member's address: the route to it gives the interface."""
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
        "infiniband": {**infiniband(Path("/")), "verbs": verbs_cards()},
        "framework": framework,
        "versions": versions(distribution),
        "variables": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(("NCCL_", "GLOO_")) or name == "CUDA_VISIBLE_DEVICES"
        },
    }


def versions(distribution: str) -> dict[str, str]:
    """The versions that all ranks must share, from metadata, because an import takes seconds."""
    result = {"python": platform.python_version()}
    for name in (distribution, "jaxlib", "nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            result["nccl" if name.startswith("nvidia-nccl") else name] = importlib.metadata.version(name)
    # tensorflow-cpu is TensorFlow too.
    if distribution == "tensorflow" and distribution not in result:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            result[distribution] = importlib.metadata.version("tensorflow-cpu")
    return result


def gpus(environment: Mapping[str, str]) -> int:
    """The number of GPUs that a process here can use; does not load CUDA."""
    present = _gpus_present()
    selected = environment.get("CUDA_VISIBLE_DEVICES")
    if selected is None:
        return present
    # CUDA ignores everything after the first invalid entry: "-1" and "" mean no GPU at all.
    count = 0
    for entry in selected.split(","):
        if not entry.strip() or entry.strip().startswith("-"):
            break
        count += 1
    return min(count, present) if not selected.startswith("MIG-") else count


def _gpus_present() -> int:
    try:
        import pynvml  # noqa: PLC0415  (not in every image)
    except ModuleNotFoundError:
        return len([name for name in _listed("/dev") if name.startswith("nvidia") and name[len("nvidia") :].isdigit()])
    try:
        pynvml.nvmlInit()
        try:
            return int(pynvml.nvmlDeviceGetCount())
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return 0  # no driver


def infiniband(root: Path) -> Facts:
    """The cards for InfiniBand or RoCE with the states of their ports, and their device files with the error of each.

    The kernel shows the cards in every container, but the device files only in those that get them.
    """
    cards: dict[str, list[str]] = {}
    for name in _listed(str(root / "sys/class/infiniband")):
        cards[name] = []
        for path in sorted((root / "sys/class/infiniband" / name / "ports").glob("*/state")):
            with contextlib.suppress(OSError):  # the card was removed meanwhile
                cards[name].append(path.read_text().partition(":")[2].strip())  # 4: ACTIVE
    devices = {}
    for path in sorted((root / "dev/infiniband").glob("uverbs*")):
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
            devices[path.name] = ""
        except OSError as error:
            devices[path.name] = error.strerror or str(error)
    return {"cards": cards, "devices": devices}


def verbs_cards() -> list[str] | None:
    """The cards that libibverbs finds, which are those that NCCL can use; None without libibverbs."""
    try:
        verbs = ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return None
    verbs.ibv_get_device_list.restype = ctypes.POINTER(ctypes.c_void_p)
    verbs.ibv_get_device_name.argtypes = [ctypes.c_void_p]
    verbs.ibv_get_device_name.restype = ctypes.c_char_p
    count = ctypes.c_int(0)
    cards = verbs.ibv_get_device_list(ctypes.byref(count))
    if not cards:  # the kernel has no driver for any card
        return []
    names = [verbs.ibv_get_device_name(cards[at]).decode() for at in range(count.value)]
    verbs.ibv_free_device_list(cards)
    return names


def address_toward(host: str) -> str:
    """This machine's address on the route to `host`.

    Sends nothing: connecting a datagram socket only looks up the route.
    """
    family, _, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def interfaces() -> dict[str, str]:
    """The IPv4 address by interface, for interfaces that have one."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name in _listed("/sys/class/net"):
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                addresses[name] = socket.inet_ntoa(fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)[20:24])
    return addresses


def interface_of(address: str) -> str:
    """The interface with this address; all of 127.0.0.0/8 is the loopback's."""
    if address.startswith("127.") or address == "::1":
        return "lo"
    names = [name for name, own in interfaces().items() if own == address]
    if not names and ":" in address:
        names = [name for name, own in _ipv6(Path("/proc/net/if_inet6")).items() if address in own]
    return names[0] if names else "?"


def _ipv6(table: Path) -> dict[str, list[str]]:
    addresses: dict[str, list[str]] = {}
    with contextlib.suppress(OSError):
        for line in table.read_text().splitlines():
            fields = line.split()
            addresses.setdefault(fields[5], []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0])))
    return addresses


def connections(*, ignore: Iterable[int] = ()) -> list[tuple[str, str]]:
    """(Own address, peer address) of every open TCP connection of this process, except those of the ports to ignore.

    The connections show the path of the data, whatever the library logs.
    """
    sockets = set()
    for descriptor in _listed("/proc/self/fd"):
        with contextlib.suppress(OSError):
            sockets.add(str(Path("/proc/self/fd", descriptor).readlink()))
    pairs = []
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            text = Path("/proc/self/net", name).read_text()
            pairs += [pair for inode, pair in table_of_connections(text, set(ignore)) if f"socket:[{inode}]" in sockets]
    return pairs


def table_of_connections(text: str, ignored_ports: set[int]) -> list[tuple[str, tuple[str, str]]]:
    """Established connections in /proc/net/tcp or tcp6: inode, own address and peer address. Source: proc(5)."""
    connected = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) < 10 or fields[3] != ESTABLISHED:
            continue
        (own, own_port), (peer, peer_port) = _address(fields[1]), _address(fields[2])
        if not {own_port, peer_port} & ignored_ports:
            connected.append((fields[9], (own, peer)))
    return connected


def _address(text: str) -> tuple[str, int]:
    """Parses address and port, which are 32-bit words in the byte order of the machine (here always little-endian)."""
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
    """The limit of locked memory in bytes; None if unlimited, as it is for a process with the capability IPC_LOCK.

    A container's user other than root does not have it, although `--cap-add IPC_LOCK` was given; in a user namespace,
    it does not count.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    effective = re.search(r"^CapEff:\s*([0-9a-f]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    try:
        is_initial = Path("/proc/self/uid_map").read_text().split() == INITIAL_USER_NAMESPACE
    except FileNotFoundError:  # the kernel has no user namespaces
        is_initial = True
    can_lock = is_initial and effective is not None and int(effective[1], 16) >> CAP_IPC_LOCK & 1
    return None if soft == resource.RLIM_INFINITY or can_lock else soft


def _size(path: str) -> int | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_frsize * status.f_blocks


def _listed(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []
