"""Runs `uv pip compile` against the configured index, and those that matrix.yaml names, and reads its output."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import tomllib
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import unquote, urlsplit

import requests
from packaging.utils import BuildTag, InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from builder.common.errors import CHOOSE_AGAIN, FetchError, LockError
from builder.common.http import Fault, failure_sentence
from builder.common.tasks import thread_pool
from builder.index.host import Host
from builder.index.local_index import LocalIndex, serve_index
from builder.index.releases import UPLOAD_AGAIN, Index
from builder.index.session import DOCTOR, POOL, IndexSession, authority_hint
from builder.index.settings import IndexSettings
from builder.index.wheels import PLATFORMS, InstalledWheel, LockedWheel, tag_ranks
from builder.lock.python_builds import uv_program
from builder.matrix import cells
from builder.matrix.cells import Cell
from builder.matrix.schema import Arch, Matrix

TIMEOUT_S = 900
OTHER_INDEXES = ("UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_INDEX_STRATEGY", "UV_TORCH_BACKEND")
LOGINS = re.compile(r"UV_INDEX_[A-Z0-9_]+_(USERNAME|PASSWORD)")  # uv needs none: see builder.index.local_index
UV_NEWEST_GLIBC = 40  # uv 0.13 has platforms up to manylinux_2_40; newer C libraries run what older ones do
# Lines of uv 0.13. Words such as "dns" also occur in names of packages. A failed request is "Failed to fetch:",
# whatever its cause. Where an index refuses a login, uv only adds a hint to "No solution found".
_UNREACHABLE = re.compile(
    r"(?m)^(error| +cause): (Failed to fetch: |error sending request|error decoding response body)"
    r"|^error: (Unsupported|Missing) `Content-Type`|^hint: An index (URL )?\("
)
NO_WHEEL = (
    "Pin a version that has a wheel for this Python. Or build a wheel once, with `uv build` or `pip wheel` (in "
    "an image with -devel if it needs nvcc), and put it on an index or into a folder of wheels: see docs/matrix.md."
)
IN_DOCKERFILE = "A Dockerfile builds it from source: `FROM` this image, then `RUN uv pip install` it. "
_LIBC = ctypes.CDLL(None)
ListedWheels = dict[str, tuple[LockedWheel, str]]  # name -> wheel, of size 0 if none is listed, and its address


@dataclass(frozen=True, kw_only=True)
class Target:
    """The image that wheels are chosen for; `name` is for messages.

    `indexes` are the named indexes of packages. `installed` are wheels that the image has; a package in `held` has no
    other choice. `conflict` is the hint if the requirements do not fit together.
    """

    name: str
    python: str
    arch: Arch
    glibc: str
    indexes: Mapping[str, str] = field(default_factory=dict)
    installed: Mapping[str, InstalledWheel] = field(default_factory=dict)
    held: Collection[str] = ()
    conflict: str = "Change a version in matrix.yaml so that the requirements fit together."

    @classmethod
    def of(cls, matrix: Matrix, cell: Cell) -> Target:
        return cls(
            name=cell.id,
            python=cell.python,
            arch=cell.arch,
            glibc=matrix.debian[matrix.python[cell.python].debian].glibc,
            indexes=cells.indexes_of_packages(matrix, cell),
        )

    @property
    def uv_glibc(self) -> str:
        """glibc of the image, or the newest that uv supports."""
        return f"2.{min(int(self.glibc.split('.')[1]), UV_NEWEST_GLIBC)}"


class Uv:
    """uv with the settings of this machine: `run` runs it. `scratch` makes a folder for temporary files.

    `catalogue` has the packages of named indexes; `serve` serves it to uv.
    """

    def __init__(self, host: Host, scratch: Callable[[], TemporaryDirectory[str]] = TemporaryDirectory) -> None:
        self.run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
        self.catalogue = Index(host.index)
        self.serve: Callable[..., AbstractContextManager[tuple[str, LocalIndex]]] = serve_index
        self._scratch = scratch
        self._index = host.index
        # The main index alone: uv would take a package from the first index that has it.
        environ = {
            name: value
            for name, value in os.environ.items()
            if name not in OTHER_INDEXES and not LOGINS.fullmatch(name)
        }
        self._environ = {**environ, **host.index.environment()}
        self._hide = host.hide

    def versions(
        self, target: Target, packages: Sequence[str], constraints: Sequence[str], preferred: Mapping[str, str]
    ) -> dict[str, str]:
        """Name -> version of all that packages need; the preferred ones where they fit. Raises as `_compile`."""
        return _parse_versions(self._compile(target, packages, constraints, "out.txt", preferred))

    def wheels(self, target: Target, packages: Sequence[str], constraints: Sequence[str]) -> ListedWheels:
        """The wheels that an installer would take for all that packages need. Raises as `_compile`."""
        tables = tomllib.loads(self._compile(target, packages, constraints, "pylock.toml", {}))["packages"]  # PEP 751
        wheels: ListedWheels = {}
        for table in tables:
            name = canonicalize_name(table["name"])
            wheel, url = _best_wheel(target, name, table)
            installed, index = target.installed.get(name), target.indexes.get(name, "")
            if installed and installed.wheel.version == wheel.version:
                wheel, url = installed.wheel, ""
            elif target.indexes or target.installed:  # the address is on the local index
                url = next(file.url for file in self.catalogue.files(name, index) if file.filename == wheel.file)
                wheel = replace(wheel, index=index)
            wheels[name] = wheel, url
        return wheels

    def _compile(
        self,
        target: Target,
        packages: Sequence[str],
        constraints: Sequence[str],
        name: str,
        preferred: Mapping[str, str],
    ) -> str:
        """What uv writes to a file of this name, which decides its format: lines `name==version`, or pylock.toml.

        Raises LockError, and FetchError if an index does not answer as it should.
        """
        with ExitStack() as stack:
            here, environ, local = Path(stack.enter_context(self._scratch())), self._environ, None
            indexes = target.indexes
            if indexes or target.installed:
                address, local = stack.enter_context(self.serve(self.catalogue, indexes, target.installed, target.held))
                no_proxy = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1")
                # A cache of its own: the user's one would keep the pages of private packages.
                environ = environ | {"UV_DEFAULT_INDEX": address, "UV_CACHE_DIR": str(here / "cache"), **no_proxy}
                environ["UV_HTTP_TIMEOUT"] = str(TIMEOUT_S)  # the local index may have to download a whole wheel
            (here / "in.txt").write_text(_lines(packages))
            (here / "bounds.txt").write_text(_lines(constraints))
            out = here / name
            if preferred:
                out.write_text(_lines(pinned(preferred)))
            command = [
                uv_program(), "pip", "compile", str(here / "in.txt"), "-o", str(out),
                "--no-header", "--no-config",
                "--only-binary", ":all:", "--no-annotate", "--color", "never",
                # In an image that has been made, as `uv pip install` there: sglang needs a beta of flash-attn-4.
                "--prerelease", "if-necessary-or-explicit" if target.installed else "explicit",
                "--python-version", target.python, "--no-sources", "--no-python-downloads",
                "--python-platform", f"{PLATFORMS[target.arch]}-manylinux_{target.uv_glibc.replace('.', '_')}",
                "--constraint", str(here / "bounds.txt"),
                *(f"--prerelease-package={name}=allow" for name in target.held),
            ]  # fmt: skip
            try:
                done = self.run(
                    command,
                    env=environ,
                    cwd=here,
                    capture_output=True,
                    text=True,
                    timeout=TIMEOUT_S,
                    check=False,
                    preexec_fn=_end_with_parent,  # no other thread runs yet, but that of a local index, which waits
                )
            except subprocess.TimeoutExpired as error:
                raise FetchError(
                    f"{target.name}: uv timed out after {TIMEOUT_S} s", hint=f"Run again. {DOCTOR}"
                ) from error
            if local and local.failures:  # even if uv ended without an error
                failure = local.failures[0]
                raise FetchError(f"{target.name}: {failure}", hint=failure.hint) from failure
            output = self._hide(done.stderr).strip()
            if done.returncode:
                if absent := [name for name in (local.absent if local else ()) if name in indexes]:
                    raise LockError(
                        f"{target.name}: the index {indexes[absent[0]]} has no package {absent[0]}",
                        hint="Publish it there, or correct `index` or the name of the package in matrix.yaml.",
                    )
                kind = FetchError if _UNREACHABLE.search(output) else LockError
                lines = [re.sub(r"^ *(error: |cause: )?", "", line) for line in output.splitlines()]
                explanation = "\n".join(f"  {line}" for line in lines if line and not line.startswith("warning:"))
                raise kind(
                    f"{target.name}: cannot be resolved to wheels\n{explanation}",
                    hint=_hint(output, self._index, target),
                )
            if yanked := re.search(r"`([^\s`]+)` (is yanked[^\n]*)", output):
                raise LockError(
                    f"{target.name}: {yanked[1]} {yanked[2]}",
                    hint=f"It was withdrawn: pin another version in matrix.yaml. If none is pinned: {CHOOSE_AGAIN}",
                )
            return out.read_text(encoding="utf-8")

    def sizes(self, target: Target, wheels: Mapping[str, tuple[LockedWheel, str]]) -> dict[str, int]:
        """The sizes of wheels as the indexes answer, by the keys of `wheels`. Raises FetchError."""
        with thread_pool(POOL, "sizes") as pool:
            sizes = pool.map(
                lambda item: _size(target, self.catalogue.session(item[0].index), item[1]), wheels.values()
            )
            return dict(zip(wheels, sizes, strict=True))


def _parse_versions(text: str) -> dict[str, str]:
    """Name -> version, of lines `name==version`."""
    pairs = re.findall(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==(\S+)", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in pairs}


def pinned(versions: Mapping[str, str]) -> list[str]:
    return [f"{name}=={version}" for name, version in versions.items()]


def _lines(texts: Sequence[str]) -> str:
    return "".join(f"{text}\n" for text in texts)


def _end_with_parent() -> None:
    """Called in the child: uv must not outlive a builder that is killed."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, linux/prctl.h


def _best_wheel(target: Target, name: str, package: Mapping[str, Any]) -> tuple[LockedWheel, str]:
    """The wheel that an installer would take: the one with the most specific tag, then the highest build number."""
    ranks = tag_ranks(target.python, target.uv_glibc, PLATFORMS[target.arch])
    ranked: list[tuple[int, BuildTag, str, str, str, str, int]] = []
    for entry in package.get("wheels", []):
        url = str(entry.get("url") or entry.get("path"))
        file = _file_name(url)
        try:
            _, version, build, tags = parse_wheel_filename(file)
        except InvalidWheelFilename as error:
            raise LockError(f"{target.name}: the index lists an invalid wheel file name: {file!r}") from error
        if fitting := [ranks[tag] for tag in tags if tag in ranks]:
            sha256, size = entry["hashes"].get("sha256", ""), entry.get("size", 0)
            ranked.append((-min(fitting), build, file, str(version), sha256, url, size))
    if not ranked:
        raise LockError(
            f"{target.name}: {name} {package.get('version', '')} has no wheel for Python {target.python} on "
            f"{PLATFORMS[target.arch]}",
            hint=NO_WHEEL,
        )
    best = max(ranked)
    _, _, file, number, sha256, url, size = best
    if rivals := [other[2] for other in ranked if other[:2] == best[:2] and other[4] != sha256]:
        raise LockError(f"{target.name}: {name} has two builds that fit equally: {file}, {rivals[0]}")
    if not sha256:
        raise LockError(f"{target.name}: the index has no SHA-256 for {file}", hint="Use an index that has hashes.")
    return LockedWheel(name=name, version=number, file=file, size=size, sha256=sha256), url


def _file_name(url: str) -> str:
    return unquote(urlsplit(url).path.rsplit("/", 1)[-1])


def _size(target: Target, session: IndexSession, url: str) -> int:
    """Bytes of a wheel; the index may also be a folder."""
    try:
        parts = urlsplit(url)
        if parts.scheme in ("", "file"):
            return Path(unquote(parts.path)).stat().st_size
        return session.file_size(url)
    except (OSError, ValueError) as error:
        is_request = isinstance(error, requests.RequestException)
        server = session.server
        invalid = Fault.INVALID.sentence.format(server)
        reason = failure_sentence(error, server) if is_request else getattr(error, "strerror", None) or invalid
        raise FetchError(
            f"{target.name}: {server} does not serve {_file_name(url)}: {reason}",
            hint=session.hint(error, "Run again. If it fails again, the index lists a file that it does not have."),
        ) from error


def _hint(output: str, index: IndexSettings, target: Target) -> str:
    if "invalid peer certificate: UnknownIssuer" in output:
        return authority_hint(index.ca_bundle)
    if _UNREACHABLE.search(output):
        return f"The package index did not respond correctly. {DOCTOR}"
    if re.search(r"(?i)source distribution|building from source|no usable wheels|no wheels", output):
        return f"{IN_DOCKERFILE if target.installed else ''}{NO_WHEEL}"
    if "but pre-releases weren't enabled" in output:
        return (
            "Add the pre-release to the `packages` of the framework version in matrix.yaml, such as triton==3.6.0rc1. "
            "Other pre-releases are never selected."
        )
    if re.search(r"(?i)hash mismatch", output):
        return "The index serves files that do not match its hashes. Do not use it until the reason is known."
    if re.search(r"(?i)invalid package format|failed to extract archive", output):
        return UPLOAD_AGAIN
    return target.conflict
