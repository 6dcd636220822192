"""Processors and memory that this process may use, within the limits of its container."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
BINFMT = Path("/proc/sys/fs/binfmt_misc")
# Bytes of memory that a job may use: the tests of a PyTorch image start several processes with the framework.
JOB_MEMORY = 4 << 30
MOST_JOBS = 32


def processors() -> int:
    """The number of processors that this process may use. Source: cgroup v2, cpu.max; sched_getaffinity(2)."""
    count, (quota, *period) = len(os.sched_getaffinity(0)), _limit("cpu.max").split()
    return count if quota == "max" else max(1, min(count, math.ceil(int(quota) / int(period[0]))))


def memory() -> int:
    """Bytes of memory that this process may use. Source: proc(5), MemTotal; cgroup v2, memory.max."""
    total, limit = _meminfo("MemTotal"), _limit("memory.max")
    return total if limit == "max" else min(total, int(limit))


def free_memory() -> int:
    """Bytes that programs can use without swapping. Source: proc(5), MemAvailable; cgroup v2, memory.max."""
    free, limit = _meminfo("MemAvailable"), _limit("memory.max")
    if limit == "max":
        return free
    used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
    return min(free, int(limit) - used)


def default_jobs() -> int:
    """The number of images to process at the same time: one for each processor and each JOB_MEMORY of memory."""
    return max(1, min(processors(), memory() // JOB_MEMORY, MOST_JOBS))


def emulates(platform: str) -> bool:
    """True if the kernel runs programs of another processor, such as aarch64, with QEMU.

    Also in containers and chroots. For these, it must have opened QEMU already: flag F. Source: Linux,
    admin-guide/binfmt-misc.rst.
    """
    try:
        entry = (BINFMT / f"qemu-{platform}").read_text(encoding="ascii")
    except OSError:
        return False
    return entry.startswith("enabled") and re.search(r"^flags: \w*F", entry, re.MULTILINE) is not None


def _meminfo(name: str) -> int:
    match = re.search(rf"^{name}:\s+(\d+) kB$", MEMINFO.read_text(encoding="ascii"), re.MULTILINE)
    return int(match[1]) << 10 if match else 0


def _limit(name: str) -> str:
    """A limit of the control group; `max` without one."""
    try:
        return (CGROUP / name).read_text(encoding="ascii").strip()
    except OSError:  # the root group, which has no limit, or version 1
        return "max"
