"""The environment variables of an image. Each component declares its own in /etc/variables.d/<component>.json.

The launcher checks all of them before it starts anything: an invalid value is an error at once, not later in a service.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from .refusal import Refusal

FOLDER = Path("/etc/variables.d")
SIZE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*(MB|GB|MiB|GiB)", re.ASCII)
# Kubernetes, and Docker's --link, set JUPYTER_PORT for a Service named jupyter in the namespace.
SERVICE = re.compile(r"(?:tcp|udp|sctp)://\S+")
FLAGS = {"1": "1", "yes": "1", "true": "1", "0": "0", "no": "0", "false": "0"}
_UNITS = {"MB": 10**6, "GB": 10**9, "MiB": 2**20, "GiB": 2**30}


@dataclass(frozen=True)
class Variable:
    """A variable. `kind` names the check of its values; `default` and `text` are shown in the help."""

    name: str
    kind: str
    default: str
    text: str


def declared(folder: Path = FOLDER) -> list[Variable]:
    """All variables of this image, sorted by component, in the order of its file."""
    return [Variable(**entry) for file in sorted(folder.glob("*.json")) for entry in json.loads(file.read_text())]


def check(environ: MutableMapping[str, str], known: list[Variable]) -> list[str]:
    """Sets flags to 1 or 0, removes ports of Kubernetes, returns warnings. Raises Refusal with every invalid value.

    Removes empty variables, which Compose makes of `${X:-}`; but an empty secret would turn off a login.
    """
    warnings = []
    for variable in known:
        if variable.kind != "secret" and environ.get(variable.name) == "":
            del environ[variable.name]
        if variable.kind == "port" and SERVICE.fullmatch(value := environ.get(variable.name, "")):
            del environ[variable.name]
            service = variable.name.removesuffix("_PORT").lower()
            warnings.append(
                f"{variable.name}={value} has no effect: Kubernetes sets it for a Service named {service}. To have no "
                "such variables, set `enableServiceLinks: false` in the pod"
            )
    errors = [
        f"{variable.name}={_shown(variable, environ[variable.name])}: {error}"
        for variable in known
        if variable.name in environ and (error := _error(variable.kind, environ[variable.name]))
    ]
    if errors:
        raise Refusal("\n".join(errors) + "\n`docker run --rm IMAGE --help` lists the variables of the image")
    for variable in known:
        if variable.kind == "secret" and variable.name in environ:  # a secret made with `echo` ends with a newline
            environ[variable.name] = environ[variable.name].strip()
        if variable.kind == "flag" and variable.name in environ:
            environ[variable.name] = FLAGS[environ[variable.name].lower()]
    names = [variable.name for variable in known]
    families = {name.split("_", 1)[0] for name in names}
    return warnings + [
        f"{name} is not a variable of this image; did you mean {close[0]}?"
        for name in environ
        if name not in names
        and name.split("_", 1)[0] in families
        and (close := difflib.get_close_matches(name, names, n=1, cutoff=0.85))
    ]


def table(known: list[Variable]) -> str:
    """A table of the variables for the help text."""
    width = max(len(variable.name) for variable in known)
    lines = []
    for variable in known:
        default = f" (default: {variable.default})" if variable.default else ""
        lines.append(f"  {variable.name:<{width}}  {variable.text}{default}")
    return "\n".join(lines)


def flag(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name) == "1"


def size(text: str) -> int:
    """The bytes of a size such as `8GB` or `512MiB`. Raises ValueError."""
    match = SIZE.fullmatch(text)
    if not match or not float(match[1]):
        raise ValueError("expected a size such as 8GB or 512MiB")
    return round(float(match[1]) * _UNITS[match[2]])


def _shown(variable: Variable, value: str) -> str:
    return "***" if variable.kind == "secret" else repr(value if len(value) <= 60 else value[:57] + "...")


def _error(kind: str, value: str) -> str:
    """The error of a value; empty if it is valid. Raises KeyError for an unknown kind, which is a bug of the image."""
    return _KINDS[kind](value)


def _flag(value: str) -> str:
    return "" if value.lower() in FLAGS else "expected 1, yes or true, or 0, no or false"


def _number(lowest: int, highest: int, expected: str, value: str) -> str:
    is_valid = re.fullmatch("[0-9]{1,10}", value, re.ASCII) and lowest <= int(value) <= highest
    return "" if is_valid else f"expected {expected}"


def _busy(value: str) -> str:
    return "" if value in ("start", "refuse", "wait") else "expected start, refuse or wait"


def _size(value: str) -> str:
    try:
        size(value)
    except ValueError as error:
        return str(error)
    return ""


def _path(value: str) -> str:
    return "" if value.startswith("/") and "\0" not in value else "expected an absolute path in the container"


def _file(value: str) -> str:
    if error := _path(value):
        return error
    try:
        return "" if Path(value).is_file() else "no such file in the container: mount it with -v"
    except OSError as failure:
        return f"cannot be read: {failure.strerror}"


def _url_path(value: str) -> str:
    """Jupyter redirects a browser to paths below it, and a browser reads `//x/` as a host and resolves `..`."""
    part = r"/(?!\.\.?(?:/|\Z))[A-Za-z0-9._~@-]+"
    return "" if re.fullmatch(f"/|(?:{part})+/?", value, re.ASCII) else "expected a path such as /team/gpu/"


def _hosts(value: str) -> str:
    """Jupyter compares only names: it refuses every address except the loopback's."""
    pattern = r"(?![0-9.]+$)[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?"
    is_valid = all(re.fullmatch(pattern, name, re.ASCII) for name in value.split(","))
    return "" if is_valid else "expected host names (not addresses), separated by commas"


def _any(_: str) -> str:
    return ""


_KINDS: dict[str, Callable[[str], str]] = {
    "flag": _flag,
    "port": partial(_number, 1, 65535, "a port from 1 to 65535"),
    # 4294967295 is (uid_t)-1, which means "unchanged".
    "id": partial(_number, 0, 2**32 - 2, "a number, such as that of `id -g`"),
    "busy": _busy,
    "size": _size,
    "url-path": _url_path,
    "hosts": _hosts,
    "path": _path,
    "file": _file,
    "text": _any,
    "secret": _any,
}
