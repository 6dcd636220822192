"""The Debian packages that dpkg's status file of an image records as installed."""

from __future__ import annotations

from typing import NamedTuple

from builder.debian import control_files
from builder.debian.control_files import SourcePackage

DPKG = "var/lib/dpkg/status"


class InstalledPackage(NamedTuple):
    name: str
    version: str
    source: SourcePackage


def debian_packages(status: bytes) -> set[InstalledPackage]:
    """The installed packages in dpkg's status file. Raises ValueError for an invalid source package."""
    packages = set()
    for fields in control_files.stanzas(status.decode("utf-8", "replace")):
        if fields.get("Status", "").endswith(" installed"):
            name, version = fields.get("Package", ""), fields.get("Version", "")
            source = control_files.source_package(fields.get("Source", ""), name, version)
            packages.add(InstalledPackage(name, version, source))
    return packages
