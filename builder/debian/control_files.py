"""Debian's control files, source packages, and the packages that dpkg records as installed.

Security advisories name source packages, not the binary packages built from them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

DPKG = "var/lib/dpkg/status"
_FIELD = re.compile(r"([a-z0-9][a-z0-9+.-]{1,99})(?: \(([A-Za-z0-9][A-Za-z0-9.+~:-]{0,99})\))?", re.ASCII)


def stanzas(text: str) -> Iterator[dict[str, str]]:
    """The fields of each paragraph of a control file, without the continued lines. Source: deb-control(5)."""
    for paragraph in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in paragraph.splitlines() if re.match(r"[A-Z][\w-]*: ", line))
        if fields:
            yield fields


class SourcePackage(NamedTuple):
    name: str
    version: str


NO_SOURCE = SourcePackage("", "")


class InstalledPackage(NamedTuple):
    name: str
    version: str
    source: SourcePackage


def source_package(field: str, name: str, version: str) -> SourcePackage:
    """The source of a binary package of this name and version. Raises ValueError.

    `field` is its field `Source`, e.g. `openssl` or `bash (5.2.15-2)`; empty if name and version are the same.
    Source: Debian Policy, section 5.6.1.
    """
    match = _FIELD.fullmatch(field or name)
    if not match:
        raise ValueError(f"invalid source package {field[:100]!r}: use e.g. openssl or bash (5.2.15-2)")
    return SourcePackage(match[1], match[2] or version)


def installed_packages(status: bytes) -> set[InstalledPackage]:
    """The installed packages in dpkg's status file. Raises ValueError for an invalid source package."""
    packages = set()
    for fields in stanzas(status.decode("utf-8", "replace")):
        if fields.get("Status", "").endswith(" installed"):
            name, version = fields.get("Package", ""), fields.get("Version", "")
            source = source_package(fields.get("Source", ""), name, version)
            packages.add(InstalledPackage(name, version, source))
    return packages
