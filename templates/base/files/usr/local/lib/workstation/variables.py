"""The environment variables that an image knows. Each component declares its own in /etc/variables.d/<component>.json.

All are checked before anything starts, so that a typing error is told at once and not by a service an hour later.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .refusal import Refusal

FOLDER = Path("/etc/variables.d")
SIZE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*(MB|GB|MiB|GiB)", re.ASCII)
_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Variable:
    """`kind` says what it must look like; `default` and `text` are for people."""

    name: str
    kind: str
    default: str
    text: str


def declared(folder: Path = FOLDER) -> list[Variable]:
    """All variables of this image, by component and in the order of its file."""
    return [Variable(**entry) for file in sorted(folder.glob("*.json")) for entry in json.loads(file.read_text())]


def check(environ: Mapping[str, str], known: list[Variable]) -> list[str]:
    """Raises Refusal with every variable that is wrong; returns warnings of names that are almost right."""
    faults = [
        f"{one.name}={_shown(one, environ[one.name])}: {told}"
        for one in known
        if one.name in environ and (told := _fault(one.kind, environ[one.name]))
    ]
    if faults:
        raise Refusal("\n".join(faults) + "\n`docker run --rm IMAGE --help` lists the variables of the image")
    names = [one.name for one in known]
    families = {name.split("_", 1)[0] for name in names}
    return [
        f"{name} is not a variable of this image; did you mean {close[0]}?"
        for name in environ
        if name not in names
        and name.split("_", 1)[0] in families
        and (close := difflib.get_close_matches(name, names, n=1, cutoff=0.85))
    ]


def table(known: list[Variable]) -> str:
    """The variables for a terminal."""
    width = max(len(one.name) for one in known)
    lines = []
    for one in known:
        default = f" (default: {one.default})" if one.default else ""
        lines.append(f"  {one.name:<{width}}  {one.text}{default}")
    return "\n".join(lines)


def flag(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name) == "1"


def size(text: str) -> int:
    """Bytes of `8GB` or `512MiB`; raises ValueError."""
    found = SIZE.fullmatch(text)
    if not found or not float(found[1]):
        raise ValueError("expected a size such as 8GB or 512MiB")
    return round(float(found[1]) * _UNITS[found[2]])


def _shown(one: Variable, value: str) -> str:
    return "***" if one.kind == "secret" else repr(value if len(value) <= 60 else value[:57] + "...")


def _fault(kind: str, value: str) -> str:
    """What is wrong with a value of a kind; empty if nothing. An unknown kind is a KeyError: a fault of the image."""
    return _KINDS[kind](value)


def _flag(value: str) -> str:
    return "" if value in ("0", "1", "") else "expected 1 (yes) or 0 (no)"


def _number(lowest: int, highest: int, what: str, value: str) -> str:
    good = re.fullmatch("[0-9]{1,10}", value, re.ASCII) and lowest <= int(value) <= highest
    return "" if good else f"expected {what}"


def _size(value: str) -> str:
    try:
        size(value)
    except ValueError as error:
        return str(error)
    return ""


def _path(value: str) -> str:
    return "" if value.startswith("/") and "\0" not in value else "expected an absolute path in the container"


def _file(value: str) -> str:
    if told := _path(value):
        return told
    try:
        return "" if Path(value).is_file() else "no such file in the container: mount it with -v"
    except OSError as error:
        return f"cannot be read: {error.strerror}"


def _free(_: str) -> str:
    return ""


_KINDS: dict[str, Callable[[str], str]] = {
    "flag": _flag,
    "port": partial(_number, 1, 65535, "a port from 1 to 65535"),
    # 0 is root, and 4294967295 is (uid_t)-1, which means "leave it".
    "id": partial(_number, 1, 2**32 - 2, "a number from 1 on, such as that of `id -u`"),
    "group": partial(_number, 0, 2**32 - 2, "a number, such as that of `id -g`"),
    "size": _size,
    "path": _path,
    "file": _file,
    "text": _free,
    "secret": _free,
}
