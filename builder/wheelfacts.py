"""What framework wheels on an index say of the CUDA and the GPUs that they were compiled for.

They are not fetched whole: a wheel is a zip, whose directory and single files can be read by HTTP range requests.
"""

from __future__ import annotations

import ast
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit
from zipfile import BadZipFile

import requests
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from builder.errors import FetchError, UsageError
from builder.fetch import Session, words_of
from builder.index import IndexSettings

if TYPE_CHECKING:
    from zipfile import ZipFile

_TIMEOUT = (10, 60)
_FLAGS = re.compile(rb"((?:(?:sm|compute)_[0-9]{2,3}[af]? )+(?:sm|compute)_[0-9]{2,3}[af]?)\0")
# "Release Notes" of the PTX ISA, table "PTX Release History": the first CUDA with each version of PTX.
_CUDA_OF_PTX = {
    "8.0": "12.0", "8.1": "12.1", "8.2": "12.2", "8.3": "12.3", "8.4": "12.4", "8.5": "12.5", "8.6": "12.7",
    "8.7": "12.8", "8.8": "12.9", "9.0": "13.0", "9.1": "13.1", "9.2": "13.2", "9.3": "13.3",
}  # fmt: skip
# A fat binary begins with this, its format (1) and the length of its header (16), then the length of what follows.
_FATBIN = struct.Struct("<8sQ")
_FATBIN_START = bytes.fromhex("50ed55ba01001000")
# Kind (1 PTX, 2 machine code), format, lengths of header and content, 8 bytes, version (minor, major), architecture.
_ENTRY = struct.Struct("<HHIQ8xHHI")
_PTX = 1


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """What a wheel was compiled for; see `builder.facts.Build`."""

    cuda: str
    cudnn: str = ""
    architectures: tuple[str, ...]
    source: str


class Wheels:
    """The wheels of an index."""

    def __init__(self, settings: IndexSettings) -> None:
        # Not at the top: it takes 0.1 s, which every command would pay.
        from pypi_simple import PYPI_SIMPLE_ENDPOINT, PyPISimple  # noqa: PLC0415

        self._index = urlsplit(settings.url or PYPI_SIMPLE_ENDPOINT)
        self._session = Session(settings)
        self._simple = PyPISimple(self._index.geturl(), session=self._session)

    def compiled(self, package: str, release: str) -> Compiled:
        """Raises a FetchError if the index does not serve it, else a UsageError: an unknown package, no version."""
        if package not in _READERS:
            raise UsageError(
                f"nothing is known of how {package} says what it was compiled for",
                hint=f"Known: {', '.join(_READERS)}.",
            )
        try:
            wanted = Version(release)
        except InvalidVersion as error:
            raise UsageError(f"{package}: {release!r} is no exact release", hint="Write it as 2.9.1.") from error
        from remotezip import RemoteZip, RemoteZipError  # noqa: PLC0415

        name = "the index"
        try:
            url, name = self._find(package, wanted)
            with RemoteZip(
                url,
                session=self._session,
                timeout=_TIMEOUT,
                auth=self._login(url),
                headers={"Accept-Encoding": "identity"},
            ) as wheel:
                return _READERS[package](wheel)
        except (requests.RequestException, ConnectionError) as error:
            raise FetchError(f"{package} {release}: {words_of(error)}", hint="Run again.") from error
        except (RemoteZipError, BadZipFile, OSError) as error:
            raise FetchError(
                f"{package} {release}: single files of its wheel cannot be read ({type(error).__name__})",
                hint="Run again; the index has to serve parts of files (HTTP ranges).",
            ) from error
        except (KeyError, ValueError, SyntaxError, struct.error) as error:
            raise FetchError(
                f"{package} {release}: {name} does not say what it was compiled for where such wheels do",
                hint="It may be a build for CPUs. Otherwise builder/wheelfacts.py has to learn where it says it.",
            ) from error

    def _find(self, package: str, release: Version) -> tuple[str, str]:
        """Address and name of a wheel for Linux on x86-64."""
        from pypi_simple import NoSuchProjectError  # noqa: PLC0415

        try:
            page = self._simple.get_project_page(package, timeout=_TIMEOUT)
        except NoSuchProjectError as error:
            raise FetchError(
                f"{package}: the index does not have it", hint="`builder doctor` shows the index."
            ) from error
        for one in sorted(page.packages, key=lambda one: one.filename):
            if _is_of(one.filename, release):
                return one.url, one.filename
        raise FetchError(
            f"{package} {release}: the index lists no wheel of it for Linux on x86-64", hint="Is it a release?"
        )

    def _login(self, url: str) -> tuple[str, str] | None:
        """Links of a page may leave out the login of the index; nobody else is told it."""
        mine, its = self._index, urlsplit(url)
        if not mine.username or (mine.scheme, mine.hostname, mine.port) != (its.scheme, its.hostname, its.port):
            return None
        return unquote(mine.username), unquote(mine.password or "")


def _is_of(filename: str, release: Version) -> bool:
    try:
        _, version, _, tags = parse_wheel_filename(filename)
    except InvalidWheelFilename:  # a source distribution
        return False
    return version == release and any("linux" in tag.platform and "x86_64" in tag.platform for tag in tags)


def _torch(wheel: ZipFile) -> Compiled:
    cuda = _constants(wheel.read("torch/version.py").decode()).get("cuda")
    if not cuda:
        raise ValueError(cuda)
    name = "torch/lib/libtorch_python.so"
    flags = _FLAGS.search(wheel.read(name))
    if not flags:
        raise ValueError("no flags")
    return Compiled(
        cuda=str(cuda),
        architectures=tuple(flags[1].decode().split()),
        source=f"torch/version.py; torch._C._cuda_getArchFlags() in {name}",
    )


def _tensorflow(wheel: ZipFile) -> Compiled:
    name = "tensorflow/python/platform/build_info.py"
    source = wheel.read(name).decode()
    value = _constants(source)["build_info"]
    if not isinstance(value, list):
        raise ValueError("no list of pairs")
    info = dict(value)
    return Compiled(
        cuda=info["cuda_version"],
        cudnn=str(info["cudnn_version"]).split(".", maxsplit=1)[0],
        architectures=tuple(info["cuda_compute_capabilities"]),
        source=name,
    )


def _plugin(wheel: ZipFile) -> Compiled:
    """JAX's wheels say it nowhere in words: the headers of the fat binaries in their libraries do."""
    entries: set[tuple[str, str, int]] = set()
    for info in wheel.infolist():
        if info.filename.endswith(".so"):
            entries.update(fat_binaries(wheel.read(info)))
    ptx = max(Version(version) for version, kind, _ in entries if kind == "compute")
    return Compiled(
        cuda=_CUDA_OF_PTX[str(ptx)],
        architectures=tuple(
            f"{kind}_{number}" for kind, number in sorted({(kind, number) for _, kind, number in entries}, key=_order)
        ),
        source="headers of the fat binaries in the wheel",
    )


_READERS: dict[str, Callable[[ZipFile], Compiled]] = {
    "torch": _torch,
    "tensorflow": _tensorflow,
    "jax-cuda12-plugin": _plugin,
    "jax-cuda13-plugin": _plugin,
}


def fat_binaries(library: bytes) -> Iterator[tuple[str, str, int]]:
    """Version, `sm` or `compute`, and number of every piece of GPU code in a library, as `cuobjdump` lists them."""
    start = library.find(_FATBIN_START)
    while start >= 0:
        _, size = _FATBIN.unpack_from(library, start)
        place = start + _FATBIN.size
        end = place + size
        while place < end:
            kind, _, header, length, minor, major, number = _ENTRY.unpack_from(library, place)
            yield f"{major}.{minor}", "compute" if kind == _PTX else "sm", number
            if not header:
                raise ValueError("a fat binary's entry without a header")
            place += header + length
        start = library.find(_FATBIN_START, end)


def _order(architecture: tuple[str, int]) -> tuple[bool, int]:
    """Machine code before PTX, older before newer."""
    return architecture[0] != "sm", architecture[1]


def _constants(source: str) -> dict[str, object]:
    """Names and values that a module assigns as literals; the module is not run."""
    values: dict[str, object] = {}
    for node in ast.parse(source).body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values[name] = _literal(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=value):
                values[name] = _literal(value)
    return values


def _literal(node: ast.expr | None) -> object:
    """The value of a literal; of a call such as collections.OrderedDict([...]) that of its argument; else None."""
    if isinstance(node, ast.Call) and len(node.args) == 1:
        node = node.args[0]
    try:
        return ast.literal_eval(node) if node else None
    except ValueError:
        return None
