"""From requirements to exact wheels, with uv against the index that this machine is set up for.

The only step that asks an index which versions exist. All frameworks of one CUDA and Python are resolved together
first; each cell then gets the part that it needs, so that they share every common wheel, CUDA's above all.
"""

from __future__ import annotations

import ctypes
import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import requests
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import BuildTag, InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from builder import lock, lockcheck
from builder.cells import Cell
from builder.errors import FetchError, LockError, UnreachableError
from builder.hide import Hider
from builder.host import Host
from builder.index import IndexSettings
from builder.lock import Lock, Wheel
from builder.matrix import Matrix
from builder.project import Project

TIMEOUT_S = 900
OTHER_INDEXES = ("UV_INDEX", "UV_EXTRA_INDEX_URL", "UV_FIND_LINKS", "UV_INDEX_STRATEGY", "UV_TORCH_BACKEND")
UV_NEWEST_GLIBC = 40  # uv 0.13 knows platforms up to manylinux_2_40; newer C libraries run what older ones do
_UNREACHABLE = re.compile(r"(?i)failed to fetch|connect|timed? ?out|error sending request|dns")
_LIBC = ctypes.CDLL(None)


class Resolver:
    """Resolves groups of cells; remembers sizes so that a wheel shared by many cells is asked for once."""

    def __init__(
        self,
        project: Project,
        host: Host,
        *,
        environ: Mapping[str, str],
        say: Callable[[str], None],
        matrix: Matrix | None = None,
        sizes: Mapping[str, int] | None = None,
    ) -> None:
        """`matrix` in place of the project's own; `sizes` of wheels that are known already, by SHA-256."""
        self._project = project
        self._matrix = matrix or project.matrix
        self._index = host.index
        # The main index alone: uv would take a package from the first index that has it.
        own = {name: value for name, value in environ.items() if name not in OTHER_INDEXES}
        self._environ = {**own, **host.index.environment()}
        self._say = say
        self._hide = host.hide
        self._sizes: dict[str, int] = dict(sizes or {})
        self._pins: dict[tuple[tuple[str, ...], tuple[str, ...], str], dict[str, str] | LockError] = {}

    def resolve(self, group: Sequence[Cell], together: Sequence[Cell], known: Mapping[str, str]) -> list[Lock]:
        """Locks for all cells of one group, which is resolved with the cells `together`.

        `known` maps package names to versions to keep where they still fit. Raises LockError.
        """
        first = group[0]
        pins = self._joint(first, group, together, known)
        parts: dict[tuple[str, ...], dict[str, Any]] = {}
        drafts = [self._draft(cell, pins, parts) for cell in group]
        urls = {wheel.sha256: url for draft in drafts for wheel, url in draft}
        self._measure(first, urls)
        locks = []
        for cell, draft in zip(group, drafts, strict=True):
            wheels = [replace(wheel, size=self._sizes[wheel.sha256]) for wheel, _ in draft]
            lockcheck.check(cell, wheels)
            locks.append(
                Lock(
                    cell=cell.id,
                    inputs=lock.inputs(self._matrix, cell, together),
                    requirements=lock.requirements(self._matrix, cell),
                    wheels=tuple(sorted(wheels, key=lambda wheel: (wheel.component, wheel.name))),
                )
            )
        return locks

    def reason(self, cell: Cell) -> str:
        """Why a cell, in the matrix or not, does not resolve to wheels by itself; empty if it does.

        Raises FetchError if the index cannot be asked.
        """
        try:
            pins = self._versions([cell], {})
            lockcheck.check(cell, [wheel for wheel, _ in self._draft(cell, pins, {})])
        except UnreachableError as error:
            raise FetchError(str(error), hint=error.hint) from error
        except LockError as error:
            return str(error)
        return ""

    def _joint(
        self, first: Cell, group: Sequence[Cell], together: Sequence[Cell], known: Mapping[str, str]
    ) -> Mapping[str, str]:
        """Name -> version for all that these cells need.

        A group that does not fit to the others is resolved alone: its images work, they only share less.
        """
        bounds = lock.joint_constraints(self._matrix, together)
        key = tuple(lock.joint_requirements(self._matrix, together)), tuple(bounds), first.python
        others = sorted({cell.group for cell in together} - {first.group})
        if key not in self._pins:
            self._say(f"{', '.join([first.group, *others])}: resolving {len(key[0])} requirements together")
            try:
                self._pins[key] = self._versions(together, known)
            except LockError as error:
                if not others or isinstance(error, UnreachableError):
                    raise
                self._pins[key] = error
        found = self._pins[key]
        if not isinstance(found, LockError):
            return found
        told = str(found).split("\n", maxsplit=1)[-1].strip()
        self._say(f"{first.group}: resolved alone, for it does not fit to {', '.join(others)}: {told}")
        return self._versions(group, known)

    def _versions(self, together: Sequence[Cell], known: Mapping[str, str]) -> dict[str, str]:
        found = self._compile(
            together[0],
            lock.joint_requirements(self._matrix, together),
            bounds=lock.joint_constraints(self._matrix, together),
            pins={},
            known=known,
        )
        return {name: package["version"] for name, package in found.items()}

    def _draft(
        self, cell: Cell, pins: Mapping[str, str], parts: dict[tuple[str, ...], dict[str, Any]]
    ) -> list[tuple[Wheel, str]]:
        """The cell's wheels with their addresses; sizes are still 0."""
        found: dict[str, tuple[Wheel, str]] = {}
        so_far: list[str] = []
        ranks = tag_ranks(cell.python, self._glibc(cell))
        for component, wanted in lock.requirements(self._matrix, cell).items():
            so_far += wanted
            key = tuple(so_far)
            if key not in parts:
                parts[key] = self._compile(cell, so_far, bounds=(), pins=pins, known={})
            for name, package in parts[key].items():
                if name not in found:
                    wheel, url = _best_wheel(cell, name, package, ranks)
                    place = "cuda" if lock.is_cuda_wheel(wheel.file) else component
                    found[name] = (replace(wheel, component=place), url)
        return list(found.values())

    def _glibc(self, cell: Cell) -> str:
        """glibc of the cell's Debian release, or the newest that uv can resolve for."""
        glibc = self._matrix.debian[self._matrix.python[cell.python].debian].glibc
        return f"2.{min(int(glibc.split('.')[1]), UV_NEWEST_GLIBC)}"

    def _compile(
        self,
        cell: Cell,
        wanted: Sequence[str],
        *,
        bounds: Sequence[str],
        pins: Mapping[str, str],
        known: Mapping[str, str],
    ) -> dict[str, Any]:
        """Runs `uv pip compile`; canonical name -> package table of its pylock output (PEP 751).

        Without `pins`, the versions of all packages, only that is found out.
        """
        glibc = self._glibc(cell)
        with self._project.scratch() as scratch:
            here = Path(scratch)
            (here / "in.txt").write_text("\n".join(wanted) + "\n")
            (here / "bounds.txt").write_text(
                "".join(f"{one}\n" for one in (*bounds, *(f"{name}=={version}" for name, version in pins.items())))
            )
            (here / "out.txt").write_text("".join(f"{name}=={version}\n" for name, version in known.items()))
            out = here / ("pylock.toml" if pins else "out.txt")
            command = [
                _uv(), "pip", "compile", str(here / "in.txt"), "-o", str(out), "--no-header", "--no-config",
                "--only-binary", ":all:", "--prerelease", "disallow", "--no-annotate", "--color", "never",
                "--python-version", cell.python, "--no-sources", "--no-python-downloads",
                "--python-platform", f"{lock.PLATFORM}-manylinux_{glibc.replace('.', '_')}",
                "--constraint", str(here / "bounds.txt"),
            ]  # fmt: skip
            self._run(cell, command, here)
            text = out.read_text(encoding="utf-8")
        if not pins:
            pairs = re.findall(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==(\S+)", text, re.MULTILINE)
            return {canonicalize_name(name): {"version": version} for name, version in pairs}
        packages = tomllib.loads(text)["packages"]
        return {canonicalize_name(package["name"]): package for package in packages}

    def _run(self, cell: Cell, command: Sequence[str], cwd: Path) -> None:
        try:
            done = subprocess.run(
                command,
                env=self._environ,
                cwd=cwd,
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
                check=False,
                preexec_fn=_end_with_parent,  # no thread of ours runs yet
            )
        except subprocess.TimeoutExpired as error:
            raise UnreachableError(
                f"{cell.id}: the package index gave no answer in {TIMEOUT_S} s",
                hint="Try again; `builder doctor`.",
            ) from error
        told = self._hide(done.stderr).strip()
        if done.returncode:
            kind = UnreachableError if _UNREACHABLE.search(told) else LockError
            raise kind(f"{cell.id}: cannot be resolved to wheels\n{_explain(told)}", hint=_hint(told))
        if yanked := re.search(r"`?(\S+==\S+?)`? is yanked[^\n]*", told):
            raise LockError(
                f"{cell.id}: {yanked[0].strip('` ')}",
                hint="Its makers withdrew it: pin another version in matrix.yaml.",
            )

    def _measure(self, cell: Cell, urls: Mapping[str, str]) -> None:
        """Asks the size of every wheel that is not known yet (sha256 -> address)."""
        missing = {sha256: url for sha256, url in urls.items() if sha256 not in self._sizes}
        if not missing:
            return
        self._say(f"{cell.group}: asking the size of {len(missing)} wheels")
        with _session(self._index) as session, ThreadPoolExecutor(8) as pool:

            def ask(item: tuple[str, str]) -> tuple[str, int]:
                sha256, url = item
                try:
                    return sha256, _size(session, url)
                except (requests.RequestException, OSError, ValueError, KeyError) as error:
                    file = _file_name(url)
                    raise LockError(
                        f"{cell.id}: the index does not serve {file}: {Hider.for_urls([url])(str(error))}",
                        hint="Try again; if it stays so, the index lists a file that it does not have.",
                    ) from error

            self._sizes |= dict(pool.map(ask, missing.items()))


def _end_with_parent() -> None:
    """Called in the child: a builder that is killed must not leave a uv that waits for an index."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG, linux/prctl.h


def _uv() -> str:
    """The locked uv beside this Python, else the one on PATH."""
    beside = Path(sys.executable).parent / "uv"
    return str(beside) if beside.exists() else "uv"


def _best_wheel(cell: Cell, name: str, package: Mapping[str, Any], ranks: Mapping[Tag, int]) -> tuple[Wheel, str]:
    """The wheel that an installer would take: the one with the most specific tag, then the highest build number."""
    ranked: list[tuple[int, BuildTag, str, str, str, str]] = []
    for entry in package.get("wheels", []):
        url = str(entry.get("url") or entry.get("path"))
        file = _file_name(url)
        try:
            _, parsed, build, tags = parse_wheel_filename(file)
        except InvalidWheelFilename as error:
            raise LockError(f"{cell.id}: the index lists {file!r}, which is no wheel's name") from error
        fitting = [ranks[tag] for tag in tags if tag in ranks]
        sha256 = entry["hashes"].get("sha256", "")
        if fitting:
            ranked.append((-min(fitting), build, file, str(parsed), sha256, url))
    if not ranked:
        raise LockError(
            f"{cell.id}: {name} {package.get('version', '')} has no wheel for Python {cell.python} on {lock.PLATFORM}",
            hint="Only wheels can be installed for now; pin a version that has one.",
        )
    best = max(ranked)
    if rivals := [other[2] for other in ranked if other[:2] == best[:2] and other[4] != best[4]]:
        raise LockError(f"{cell.id}: {name} has two builds that fit equally: {best[2]}, {rivals[0]}")
    _, _, file, version, sha256, url = best
    if not sha256:
        raise LockError(f"{cell.id}: the index gives no SHA-256 for {file}", hint="Use an index that does.")
    return Wheel(component="none", name=name, version=version, file=file, size=0, sha256=sha256), url


def tag_ranks(python: str, glibc: str) -> dict[Tag, int]:
    """Wheel tags that CPython `python` on glibc `glibc` accepts, 0 the most specific.

    Source: PEP 425, PEP 600 (manylinux_x_y) and its legacy aliases.
    """
    version = tuple(int(part) for part in python.split("."))
    newest = int(glibc.split(".")[1])
    aliases = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    platforms = []
    for minor in range(newest, 4, -1):
        platforms.append(f"manylinux_2_{minor}_{lock.PLATFORM}")
        if minor in aliases:
            platforms.append(f"{aliases[minor]}_{lock.PLATFORM}")
    platforms.append(f"linux_{lock.PLATFORM}")
    interpreter = "cp" + python.replace(".", "")
    accepted = [
        *cpython_tags(version, [interpreter], platforms),
        *compatible_tags(version, interpreter, platforms),
    ]
    return {tag: rank for rank, tag in reversed(list(enumerate(accepted)))}


def _file_name(url: str) -> str:
    return unquote(urlsplit(url).path.rsplit("/", 1)[-1])


def _session(index: IndexSettings) -> requests.Session:
    session = requests.Session()
    retry = Retry(total=4, backoff_factor=0.5, status_forcelist=(500, 502, 503, 504), allowed_methods=("HEAD", "GET"))
    for scheme in ("https://", "http://"):
        session.mount(scheme, HTTPAdapter(max_retries=retry, pool_maxsize=8))
    if index.ca_bundle:
        session.verify = index.ca_bundle
    return session


def _size(session: requests.Session, url: str) -> int:
    parts = urlsplit(url)
    if parts.scheme in ("", "file"):
        return Path(unquote(parts.path)).stat().st_size
    answer = session.head(url, allow_redirects=True, timeout=(10, 30), headers={"Accept-Encoding": "identity"})
    answer.raise_for_status()
    return int(answer.headers["Content-Length"])


def _explain(told: str) -> str:
    """uv's own words, without its decoration."""
    lines = [re.sub(r"^[^A-Za-z`<(]+", "", line) for line in told.splitlines()]
    return "\n".join(f"  {line}" for line in lines if line and not line.startswith("warning:"))


def _hint(told: str) -> str:
    if re.search(r"(?i)source distribution|building from source|no usable wheels|no wheels", told):
        return "Only wheels can be installed for now: pin a version that has one for this Python."
    if re.search(r"(?i)hash mismatch", told):
        return "The index serves other bytes than it promises; do not use it until that is explained."
    if _UNREACHABLE.search(told):
        return "The package index did not answer as it should; `builder doctor` shows which settings are used."
    return "Change a version in matrix.yaml so that the requirements fit together."
