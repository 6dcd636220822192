"""The zip file of a wheel: its entries, after checks that reject a hostile or damaged archive.

Source: APPNOTE.TXT of the zip format.
"""

from __future__ import annotations

import io
import struct
import zipfile
from typing import BinaryIO

from builder.layers.splice import Zipped

_UNICODE_PATH = 0x7075  # an extra field of zip entries
# A wheel may unpack to so many times its size (layers of real wheels grow two to five times), or to so many bytes in
# any case.
MAX_GROWTH, MAX_UNPACKED = 50, 100_000_000


class WheelError(ValueError):
    """A wheel that must not be installed: it is damaged, or hostile."""


class OverlapError(WheelError):
    """A wheel that must not be installed together with another one."""


def read_items(wheel: str, file: BinaryIO) -> dict[str, zipfile.ZipInfo]:
    """The files of the zip by path, in its order; `wheel` is for messages. Raises WheelError or zipfile.BadZipFile."""
    with zipfile.ZipFile(file) as archive:
        items = archive.infolist()
    end = 0
    for item in sorted(items, key=lambda item: item.header_offset):
        if item.header_offset < end:
            raise WheelError(f"{wheel}: {item.filename!r} overlaps the previous entry")
        end = item.header_offset + item.compress_size
    packed, unpacked = file.seek(0, io.SEEK_END), sum(item.file_size for item in items)
    if unpacked > max(MAX_UNPACKED, MAX_GROWTH * packed):
        raise WheelError(f"{wheel}: {packed} bytes unpack to {unpacked}, more than {MAX_GROWTH} times as many")
    files: dict[str, zipfile.ZipInfo] = {}
    for item in items:
        path = item.filename
        if path.endswith("/"):  # `is_dir` fails for an empty name
            continue
        # No folder above the root, and no path that two programs read as two files.
        if path.startswith("/") or {"", ".", ".."} & set(path.split("/")) or "\0" in item.orig_filename:
            raise WheelError(f"{wheel}: invalid path {path!r}")
        if _has_other_name(item) or any(ord(character) < 32 or ord(character) == 127 for character in path):
            raise WheelError(f"{wheel}: ambiguous path {path!r}")
        if item.flag_bits & 0x1:
            raise WheelError(f"{wheel}: {path!r} is encrypted")
        if item.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise WheelError(f"{wheel}: {path!r} has a compression method that wheels do not use")
        if path in files:
            raise WheelError(f"{wheel}: duplicate path {path!r}")
        files[path] = item
    return files


def _has_other_name(item: zipfile.ZipInfo) -> bool:
    """True if an extra field gives the entry a second name, which some readers use (APPNOTE.TXT, 4.6.9)."""
    extra = item.extra
    while len(extra) >= 4:
        kind, length = struct.unpack("<HH", extra[:4])
        if kind == _UNICODE_PATH:
            return True
        extra = extra[4 + length :]
    return item.filename != item.orig_filename


def zipped(file: BinaryIO, item: zipfile.ZipInfo, archive: str) -> Zipped:
    """The content of an entry. It begins after the entry's local header, which has its own length (APPNOTE.TXT, 4.3.7).

    `archive` is for messages. Raises WheelError for a local header that differs from the zip's directory.
    """
    file.seek(item.header_offset)
    header = file.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise WheelError(f"{archive}: {item.filename!r} has no local header")
    flags, method = struct.unpack("<HH", header[6:10])
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    name = file.read(name_length).decode("utf-8" if flags & 0x800 else "cp437", "replace")
    if (name, method) != (item.orig_filename, item.compress_type):
        raise WheelError(f"{archive}: {item.filename!r} differs from its local header: {name!r}")
    return Zipped(
        name=f"{archive}: {item.filename}",
        file=file,
        offset=item.header_offset + 30 + name_length + extra_length,
        length=item.compress_size,
        is_deflated=item.compress_type == zipfile.ZIP_DEFLATED,
        crc=item.CRC,
        size=item.file_size,
    )
