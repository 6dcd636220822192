"""Bytes, seconds and counts: how they are printed, and how sizes are read. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal

_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,3}(?=[kMGT]))?)([kMGT]?)B?", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of 40GB, 4.3GB, 500M or plain digits (decimal units, as registries and disks count). Raises ValueError."""
    if not (match := _SIZE.fullmatch(text)):
        raise ValueError(f"invalid size {text!r}: use e.g. 40GB")
    return int(Decimal(match[1]) * _FACTORS[match[2]])


def size(count: int) -> str:
    """Bytes as text: 4.1 GB."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        digits = 0 if unit in ("B", "kB") else 1
        if round(value, digits) < 1000:
            return f"{value:.{digits}f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def duration(seconds: float) -> str:
    """3.2 s, 75 s or 4 min 5 s."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def counted(number: int, noun: str, plural: str = "") -> str:
    """1 image, 2 images; `plural` where an s is not enough: `counted(2, "library", "libraries")`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def listed(names: Sequence[str], most: int) -> str:
    """a, b and 3 more: at most this many names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
