"""The `os` layer: a tar of a file system, the same bytes for the same files.

Files have the times in their packages, at most the time of the newest package: the times of files written during the
build would differ from one build to the next. Source: OCI image specification, "Image Layer Filesystem Changeset".
"""

from __future__ import annotations

import tarfile
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import BinaryIO

from builder.layers import estargz, splice
from builder.layers.oci import Layer
from builder.layers.splice import Entry


def write_system(tar: BinaryIO, out: BinaryIO, prefetch: Collection[str] = ()) -> Layer:
    """Writes the file system of a tar as a layer; a pure function of its files. Raises tarfile.TarError, OSError.

    `prefetch` are the paths that come first, see `estargz.prefetch_order`.
    """
    with tarfile.open(fileobj=tar) as source:
        files = {name: info for info in source if (name := _plain(info.name))}
        newest = _newest(source, files)

        def entries() -> Iterator[Entry]:
            # Links last: a hard link needs its target before it.
            links = sorted(name for name, info in files.items() if info.islnk())
            for name in [*estargz.prefetch_order(sorted(files.keys() - set(links)), prefetch), *links]:
                if name not in files:
                    yield splice.PREFETCH
                    continue
                info, header = files[name], tarfile.TarInfo(name)
                header.type = tarfile.REGTYPE if info.isreg() else info.type
                header.mode, header.uid, header.gid = info.mode & 0o7777, info.uid, info.gid
                # Folders have the time of the build; dpkg keeps a link to a folder that another version of the package
                # made.
                header.mtime = newest if info.isdir() or info.issym() else min(int(info.mtime), newest)
                xattrs = {key: value for key, value in info.pax_headers.items() if key.startswith("SCHILY.xattr.")}
                header.pax_headers = xattrs
                header.devmajor, header.devminor = info.devmajor, info.devminor
                header.size = info.size if info.isreg() else 0
                header.linkname = _plain(info.linkname) if info.islnk() else info.linkname
                content = source.extractfile(info) if info.isreg() else None
                yield Entry(path=name, mode=header.mode, header=header, content=content.read() if content else None)

        layer = splice.write_layer(entries(), out)
    folders = {name: (info.mode & 0o7777, info.uid, info.gid) for name, info in files.items() if info.isdir()}
    return replace(
        layer,
        created=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(newest)),
        taken=tuple(sorted(name for name, info in files.items() if name.startswith("opt/") and not info.isdir())),
        folders=tuple(sorted(name for name, attributes in folders.items() if attributes != (0o755, 0, 0))),
    )


def _plain(name: str) -> str:
    """A path without a slash at either end; empty for the root."""
    return "" if name == "." else name.removeprefix("./").strip("/")


def _newest(source: tarfile.TarFile, files: Mapping[str, tarfile.TarInfo]) -> int:
    """Time of the newest file of a Debian package. Files in /etc are left out: the build may have edited them."""
    times = [0]
    for path, info in files.items():
        if path.startswith("var/lib/dpkg/info/") and path.endswith(".list") and (content := source.extractfile(info)):
            for line in content.read().decode("utf-8", "replace").splitlines():
                owned = files.get(line.strip("/"))
                if owned and owned.isreg() and not line.startswith("/etc/"):
                    times.append(int(owned.mtime))
    return max(times)
