"""Reads requirements as pip does, and refuses all but packages of an index.

Source: pip documentation, "Requirements File Format"; PEP 508.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from builder.common.errors import LockError, UsageError, of_file
from builder.common.files import SHA256_HEX
from builder.index.wheels import LockedWheel

LONGEST = 4000  # characters of a requirement; packaging fails for longer numbers
_COMMENT = re.compile(r"(^|\s)#.*$")
_HASH = re.compile(rf"--hash[=\s]\s*sha256:({SHA256_HEX})", re.ASCII)
_FILE = re.compile(r"@|://|^[./]|\.(whl|tar\.gz|zip)$")
_ADVICE = {
    "-e": "Editable packages cannot be in a layer: publish a wheel on the index.",
    "-r": "Pass each file to builder: -r FILE -r OTHER.",
    "-c": "List the versions as requirements: only the constraints of the parent are used.",
}


@dataclass(frozen=True, kw_only=True)
class Requested:
    """A requirement (PEP 508), and the SHA-256 that its wheel may have, any if there are none."""

    text: str
    hashes: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def requirement(self) -> Requirement:
        return Requirement(self.text)

    def __str__(self) -> str:
        return " ".join([self.text, *(f"--hash=sha256:{sha256}" for sha256 in sorted(self.hashes))])


def read_requirements(path: Path) -> list[Requested]:
    """The requirements in a file. Raises UsageError, with the line, for anything else."""
    if path.suffix in (".toml", ".yml", ".yaml"):
        raise UsageError(
            f"{path} is not a file of requirements as for pip", hint="For a pyproject.toml: docs/team-images.md."
        )
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a text file") from error
    except OSError as error:
        raise of_file(error) from error
    return [parse_requirement(text, f"{path}:{number}") for number, text in _joined_lines(lines)]


def _joined_lines(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The requirements in lines, without comments, with the numbers of their first lines."""
    joined, first = "", 1
    for number, line in enumerate(lines, 1):
        # A comment ends its line, even if the line before it continues.
        text = _COMMENT.sub("", line)
        joined, first = (joined + text, first) if joined else (text, number)
        if joined.endswith("\\") and number < len(lines):
            joined = f"{joined[:-1]} "
            continue
        if joined.strip():
            yield first, joined.strip().removesuffix("\\")
        joined = ""


def parse_requirement(text: str, place: str) -> Requested:
    """One requirement, with its hashes. Raises UsageError."""
    bare = _HASH.sub("", text).strip()
    shown = re.sub(r"://\S*@", "://", bare)[:100]  # an address may have a login
    if option := re.search(r"(?:^|\s)(-[A-Za-z]|--[a-z][a-z-]*)", bare):
        advice = _ADVICE.get(option[1], "The index is that of this machine's pip and uv; only --hash=sha256: is read.")
        raise UsageError(f"{place}: the option {option[1]} is not supported", hint=advice)
    if _FILE.search(bare):
        raise UsageError(
            f"{place}: {shown!a} is an address or a path",
            hint="Download the wheel into a folder, and give the folder with --index.",
        )
    try:
        Requirement(bare if len(bare) <= LONGEST else "")
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{place}: {shown!a} is not a requirement",
            hint="Name a package of the index, such as einops>=0.8.",
        ) from error
    return Requested(text=bare, hashes=frozenset(_HASH.findall(text)))


def check_hashes(requested: Iterable[Requested], wheels: Mapping[str, LockedWheel]) -> None:
    """As pip: if a requirement has a hash, every wheel must have one that its package lists. Raises LockError."""
    allowed: dict[str, set[str]] = {}
    for requirement in requested:
        allowed.setdefault(requirement.name, set()).update(requirement.hashes)
    if not any(allowed.values()):
        return
    for name, wheel in wheels.items():
        if wheel.sha256 not in allowed.get(name, ()):
            known = "does not have one of its hashes" if allowed.get(name) else "has no hash in the requirements"
            raise LockError(
                f"{wheel.file} {known}",
                hint="Make the file again for this index and Python: uv pip compile --generate-hashes, or uv lock.",
            )
