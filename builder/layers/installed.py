"""The packages that the files of an image record as installed: dpkg's status, and the metadata of Python packages."""

from __future__ import annotations

import re
from email.parser import BytesHeaderParser
from typing import BinaryIO, Literal, NamedTuple

from packaging.utils import canonicalize_name, canonicalize_version

from builder.common.errors import VerifyError
from builder.debian import control_files
from builder.debian.control_files import NO_SOURCE, SourcePackage
from builder.layers.estargz import LayerReader

DPKG = "var/lib/dpkg/status"
WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"  # source: OCI image specification, "Image Layer Filesystem Changeset"
# Python packages of wheels. Those of Debian are in dist-packages, and have a record of dpkg. Images with a layer format
# before 6 have NVIDIA's in /opt/nvidia.
_METADATA = re.compile(r"(?:.*/site-packages|opt/nvidia)/[^/]+\.dist-info/METADATA", re.ASCII)


class InstalledPackage(NamedTuple):
    """`version` of a Python package is in its canonical form; it has no source package."""

    kind: Literal["deb", "pypi"]
    name: str
    version: str
    source: SourcePackage = NO_SOURCE


def python_package(name: str, version: str) -> InstalledPackage:
    return InstalledPackage("pypi", canonicalize_name(name), canonicalize_version(version))


class Installed:
    """The records in the layers that were added so far, lowest first."""

    def __init__(self) -> None:
        self._records: dict[str, set[InstalledPackage]] = {}  # by path

    @property
    def packages(self) -> set[InstalledPackage]:
        return set().union(*self._records.values())

    def add(self, layer: BinaryIO) -> None:
        """Reads a layer, a tar in gzip. Raises VerifyError if it is invalid."""
        added: dict[str, set[InstalledPackage]] = {}
        for member, content in LayerReader(layer):
            path = member.name.removeprefix("./")
            if not member.isdir():
                self._hide(path)
            if not member.isreg() or not (path == DPKG or _METADATA.fullmatch(path)):
                continue
            if content is None:
                raise VerifyError(f"the layer cannot be read: {path} has {member.size} bytes")
            try:
                if path == DPKG:
                    added[path] = debian_packages(content)
                else:
                    headers = BytesHeaderParser().parsebytes(content)
                    added[path] = {python_package(str(headers["Name"] or ""), str(headers["Version"] or ""))}
            except ValueError as error:
                raise VerifyError(f"the layer cannot be read: {error}") from error
        self._records |= added

    def _hide(self, path: str) -> None:
        """Drops the records of lower layers that a file, link or whiteout removes or replaces."""
        folder, _, name = path.rpartition("/")
        if name == OPAQUE:
            path = folder
        elif name.startswith(WHITEOUT):
            path = f"{folder}/{name.removeprefix(WHITEOUT)}".lstrip("/")
        for other in [other for other in self._records if f"/{other}/".startswith(f"/{path}/" if path else "/")]:
            del self._records[other]


def debian_packages(status: bytes) -> set[InstalledPackage]:
    """The installed packages in dpkg's status file. Raises ValueError for an invalid source package."""
    packages = set()
    for fields in control_files.stanzas(status.decode("utf-8", "replace")):
        if fields.get("Status", "").endswith(" installed"):
            name, version = fields.get("Package", ""), fields.get("Version", "")
            packages.add(
                InstalledPackage(
                    "deb", name, version, control_files.source_package(fields.get("Source", ""), name, version)
                )
            )
    return packages
