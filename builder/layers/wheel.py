"""Installs wheels as entries of a layer: schemes, scripts, RECORD, INSTALLER, REQUESTED, modes.

Nothing is unpacked: an entry of the layer refers to the entry of the zip. Pure except for reading the wheel.
Sources: "Binary distribution format", "Recording installed projects" and "Entry points" of the PyPA specifications;
APPNOTE.TXT of the zip format.
Where they leave a choice, does the same as uv, so that both methods of building give the same files.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import os
import struct
import warnings
import zipfile
from collections.abc import Iterable, Iterator
from email.parser import HeaderParser
from pathlib import Path
from typing import BinaryIO

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from builder.common.errors import BuilderWarning
from builder.common.text import listed
from builder.layers import splice
from builder.layers.splice import Entry, SpliceError, Zipped

FILE_MODE, PROGRAM_MODE, FOLDER_MODE = 0o644, 0o755, 0o755
ENVIRONMENT, ENVIRONMENT_FOLDER_MODE = "opt/venv", 0o775  # group 0, of the image's user, installs and removes packages
# In the operating system's layer, lib/python3.11 is a link to lib/python, so CUDA's layers are the same for every
# Python: docs/decisions/0034-one-plain-environment.md.
SITE = f"{ENVIRONMENT}/lib/python/site-packages"
PYTHON = f"/{ENVIRONMENT}/bin/python"
_UNICODE_PATH = 0x7075  # an extra field of zip entries
# A wheel may unpack to so many times its size (layers of real wheels grow two to five times), or to so many bytes in
# any case.
MAX_GROWTH, MAX_UNPACKED = 50, 100_000_000
MAX_METADATA = 64 << 20  # bytes of a text that is read into memory; the longest known RECORD (torch) has 2 MB
# The text that uv writes, including its lines for Windows: both methods of building must give the same files.
_SCRIPT = """\
#!{python}
# -*- coding: utf-8 -*-
import sys
from {module} import {name}
if __name__ == "__main__":
    if sys.argv[0].endswith("-script.pyw"):
        sys.argv[0] = sys.argv[0][:-11]
    elif sys.argv[0].endswith(".exe"):
        sys.argv[0] = sys.argv[0][:-4]
    sys.exit({function}())
"""


class WheelError(ValueError):
    """A wheel that must not be installed: it is damaged, or hostile."""


class OverlapError(WheelError):
    """A wheel that must not be installed together with another one."""


def layer_entries(wheels: Iterable[tuple[str, BinaryIO]], python: str, *, may_overlap: bool = False) -> list[Entry]:
    """Entries of a layer of several wheels (file name, file), a folder before its contents.

    `python` is the version, such as 3.11, empty for wheels that do not depend on it.
    Wheels of one namespace may share a file. Of different files for one path, the later wheel's is taken, as it would
    be after installing the wheels in this order, with a warning; raises OverlapError unless they `may_overlap`. Raises
    WheelError for an invalid wheel.
    """
    entries: dict[str, Entry] = {}
    owners: dict[str, str] = {}  # the wheel of each file, and the first one with each folder
    overlaps: dict[tuple[str, str], list[str]] = {}
    folders: set[str] = set()
    for name, file in wheels:
        for entry in install(name, file, python):
            path = entry.path
            if path in folders:
                kind = WheelError if owners[path] == name else OverlapError
                raise kind(f"{name}: /{path} is a file, and a folder in {owners[path]}")
            if path in owners:
                if _identity(entries[path]) == _identity(entry):
                    continue
                overlaps.setdefault((owners[path], name), []).append(f"/{path}")
            for folder in new_folders(path, folders):
                if folder.path in owners:
                    kind = WheelError if owners[folder.path] == name else OverlapError
                    raise kind(f"{name}: /{folder.path} is a folder, and a file in {owners[folder.path]}")
                entries[folder.path], owners[folder.path] = folder, name
            entries[path], owners[path] = entry, name
    for (first, second), paths in overlaps.items():
        message = f"{first} and {second} have different files for {listed(paths, 3)}"
        if not may_overlap:
            raise OverlapError(message)
        warnings.warn(f"{message}; the later wheel's are used", BuilderWarning, stacklevel=2)
    return list(entries.values())


def _identity(entry: Entry) -> tuple[int, str, object]:
    """Equal for files with the same bytes and for equal links. Reads nothing: writing checks CRC-32 and SHA-256."""
    content = entry.content
    data = (content.size, content.crc, entry.sha256) if isinstance(content, Zipped) else content
    return entry.mode, entry.link, data


def new_folders(path: str, folders: set[str]) -> Iterator[Entry]:
    """Entries for the folders above `path` that `folders` lacks, outermost first; adds them to it."""
    missing = []
    name = path.rpartition("/")[0]
    while name and name not in folders:
        missing.append(name)
        name = name.rpartition("/")[0]
    for name in reversed(missing):
        folders.add(name)
        is_in_environment = f"{name}/".startswith(f"{ENVIRONMENT}/")
        mode = ENVIRONMENT_FOLDER_MODE if is_in_environment else FOLDER_MODE
        yield Entry(path=name, mode=mode)


def install(name: str, file: BinaryIO, python: str) -> Iterator[Entry]:
    """Entries of one wheel in the order of its zip, then those that an installer adds. Raises WheelError."""
    try:
        wheel = _WheelInstaller(name, file, python)
        written: set[str] = set()
        for entry in wheel.entries():
            if entry.path in written:  # which of the two files is installed would depend on the installer
                raise WheelError(f"{name}: two files are installed as /{entry.path}")
            written.add(entry.path)
            yield entry
    except WheelError:
        raise
    except SpliceError as error:
        raise WheelError(str(error)) from error
    # Raised by the standard library for invalid or unsupported zip files and texts.
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, csv.Error) as error:
        raise WheelError(f"{name}: {error}") from error


class _WheelInstaller:
    """Installs one wheel; `info` is the name of its .dist-info folder."""

    def __init__(self, name: str, file: BinaryIO, python: str) -> None:
        self._name = name
        self._file = file
        self._python = python
        try:
            self._project, self._version, _, _ = parse_wheel_filename(name)
        except InvalidWheelFilename as error:
            raise WheelError(f"{name}: invalid file name of a wheel") from error
        self._items = _read_items(name, file)
        tops = {path.split("/")[0] for path in self._items}
        folders = [top for top in tops if top.endswith(".dist-info")]
        if len(folders) != 1:
            raise WheelError(f"{name}: has {len(folders)} .dist-info folders instead of one")
        [self.info] = folders
        project, _, version = self.info.removesuffix(".dist-info").partition("-")
        if not self._is_own(project, version):
            raise WheelError(f"{name}: {self.info} is of another project or version")

    def entries(self) -> Iterator[Entry]:
        """The wheel's files in the order of the zip, then INSTALLER, REQUESTED, scripts of entry points, and RECORD."""
        version = HeaderParser().parsestr(self._text("WHEEL") or "").get("Wheel-Version", "").strip()
        if version.split(".")[0] != "1":
            raise WheelError(f"{self._name}: unsupported Wheel-Version {version or 'none'}: must be 1.x")
        metadata = HeaderParser().parsestr(self._text("METADATA") or "")
        if metadata and not self._is_own(metadata.get("Name", ""), metadata.get("Version", "")):
            name = f"{metadata.get('Name', '')} {metadata.get('Version', '')}"
            raise WheelError(f"{self._name}: METADATA is of another project or version: {name[:100]!r}")
        text = self._text("RECORD")
        if text is None:
            raise WheelError(f"{self._name}: has no RECORD")
        record = {row[0]: (row[1], row[2]) for row in csv.reader(io.StringIO(text)) if len(row) == 3}
        programs = dict(self._programs())

        rows: dict[str, tuple[str, str]] = {}  # of the new RECORD
        replaced = {f"{self.info}/{part}" for part in ("RECORD", *_ADDED)}
        for path, item in self._items.items():
            if path in replaced:
                continue
            target, is_script = self._target(path)
            if target in programs or (is_script and any(target.removesuffix(end) in programs for end in _WRAPPERS)):
                continue  # a declared entry point overrides a file of its name
            content: Zipped | bytes
            content = shipped = zipped(self._file, item, self._name)
            row = record.get(path, ("", ""))
            if is_script and item.file_size <= MAX_METADATA:  # a larger file is a binary
                script = splice.read_zipped(shipped)
                if script.startswith(b"#!python"):  # a placeholder for the interpreter of the image
                    content = b"#!" + PYTHON.encode() + b"\n" + script.partition(b"\n")[2]
                    row = _row(content)
            rows[self._relative(target)] = row
            # Another content than the wheel's is small, and hashed when it is written.
            sha256 = _sha256(row[0]) if content is shipped and self._name not in WRONG_RECORDS else ""
            yield Entry(path=target, mode=_mode(item, is_script=is_script), content=content, sha256=sha256)
        # A row in the wheel's RECORD for a file that is not in the wheel (a signature, see PEP 427) is kept.
        for path, row in record.items():
            if path not in self._items and path not in replaced:
                rows.setdefault(path, row)

        info = f"{SITE}/{self.info}"
        added = [Entry(path=f"{info}/{part}", mode=FILE_MODE, content=data) for part, data in _ADDED.items()]
        added += [Entry(path=path, mode=PROGRAM_MODE, content=data) for path, data in programs.items()]
        for entry in added:
            assert isinstance(entry.content, bytes)
            rows[self._relative(entry.path)] = _row(entry.content)
            yield entry
        rows[f"{self.info}/RECORD"] = ("", "")
        out = io.StringIO()
        ordered = sorted(rows.items(), key=lambda row: row[0].encode())
        csv.writer(out, lineterminator="\n").writerows((path, *row) for path, row in ordered)
        mode = _mode(self._items[f"{self.info}/RECORD"], is_script=False)
        yield Entry(path=f"{info}/RECORD", mode=mode, content=out.getvalue().encode())

    def _is_own(self, project: str, version: str) -> bool:
        """Compares a name and a version with the wheel's file name. Ignores local versions; 1.0 equals 1.0.0."""
        try:
            public, own = (Version(Version(str(number)).public) for number in (version, self._version))
        except InvalidVersion:
            return False
        return canonicalize_name(project) == self._project and public == own

    def _text(self, part: str) -> str | None:
        """A text of .dist-info; None if the wheel lacks it."""
        item = self._items.get(f"{self.info}/{part}")
        if item is None:
            return None
        if item.file_size > MAX_METADATA:
            raise WheelError(f"{self._name}: {part} is too large: {item.file_size} bytes")
        return splice.read_zipped(zipped(self._file, item, self._name)).decode("utf-8")

    def _target(self, path: str) -> tuple[str, bool]:
        """The installed path of a file, and True if the file is a script."""
        first, _, rest = path.partition("/")
        scheme, inside, folder = "", path, SITE
        if first.endswith(".data"):
            scheme, _, inside = rest.partition("/")
            if canonicalize_name(first.split("-")[0]) != self._project or not inside:
                raise WheelError(f"{self._name}: {path} is in no scheme")
            folders = {
                "purelib": SITE,
                "platlib": SITE,
                "headers": f"{ENVIRONMENT}/include/site/python{self._python}/{self._project}",
                "scripts": f"{ENVIRONMENT}/bin",
                "data": ENVIRONMENT,
            }
            if scheme not in folders:
                raise WheelError(f"{self._name}: {path} has unknown scheme {scheme!r}")
            folder = folders[scheme]
        target = f"{folder}/{inside}"
        linked = f"{ENVIRONMENT}/lib/python{self._python}/"
        if target.startswith(linked):
            target = f"{ENVIRONMENT}/lib/python/{target[len(linked) :]}"
        return target, scheme == "scripts"

    def _relative(self, target: str) -> str:
        """A path as in RECORD: relative to the parent folder of .dist-info."""
        return target[len(SITE) + 1 :] if target.startswith(f"{SITE}/") else os.path.relpath(target, SITE)

    def _programs(self) -> Iterator[tuple[str, bytes]]:
        """Path and text of every console and GUI script."""
        try:
            points = _EntryPoints(self._text("entry_points.txt")).entry_points
        except TypeError as error:  # from the standard library, for a line without `=`
            raise WheelError(f"{self._name}: invalid entry_points.txt") from error
        for point in points:
            if point.group not in ("console_scripts", "gui_scripts"):
                continue
            if point.name in ("", ".", "..") or not point.name.isprintable() or set(point.name) & set(" /\\'\""):
                raise WheelError(f"{self._name}: invalid name of a script: {point.name!r}")
            try:
                module, attribute = point.module, point.attr
            except (AttributeError, AssertionError):  # until Python 3.12, and since
                module, attribute = "", ""
            if not attribute or not all(part.isidentifier() for part in f"{module}.{attribute}".split(".")):
                raise WheelError(f"{self._name}: script {point.name} has an invalid function: {point.value!r}")
            text = _SCRIPT.format(
                python=PYTHON, module=module, name=attribute.split(".")[0], function=attribute
            ).encode()
            yield f"{ENVIRONMENT}/bin/{point.name}", text
            if self._project == "pip" and point.name == "pip" and self._python:
                yield f"{ENVIRONMENT}/bin/pip{self._python}", text  # as ensurepip and uv do


# Wheels whose RECORD has other hashes than their files. pip and uv install them, and a lock has the hash of the wheel.
WRONG_RECORDS = ("pynvvideocodec-2.0.4-cp313-cp313-manylinux_2_28_x86_64.whl",)  # required by vLLM 0.33.0
# Suffixes of scripts that setuptools generates for entry points; pip and uv skip them too.
_WRAPPERS = (".exe", "-script.py", ".pya")
# The installer is uv, as in the rendered Dockerfiles; readers of this file do not depend on its name.
_ADDED = {"INSTALLER": b"uv", "REQUESTED": b""}


class _EntryPoints(importlib.metadata.Distribution):
    """Reads entry points with the standard library, as for installed distributions."""

    def __init__(self, text: str | None) -> None:
        self._entry_points = text

    def read_text(self, filename: str) -> str | None:
        return self._entry_points if filename == "entry_points.txt" else None

    def locate_file(self, path: object) -> Path:
        """Required by the base class; only entry points are read, which needs no file."""
        raise NotImplementedError


def _mode(item: zipfile.ZipInfo, *, is_script: bool) -> int:
    return PROGRAM_MODE if is_script or (item.external_attr >> 16) & 0o111 else FILE_MODE


def _sha256(value: str) -> str:
    """A hash of RECORD in hex; empty if it is of another kind. Source: "Recording installed projects"."""
    kind, _, text = value.partition("=")
    if kind != "sha256":
        return ""
    try:
        digest = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError:
        return ""
    return digest.hex() if len(digest) == hashlib.sha256().digest_size else ""


def _row(content: bytes) -> tuple[str, str]:
    """Hash and size of a file, as in RECORD."""
    hashed = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    return f"sha256={hashed}", str(len(content))


# ---- the zip file


def _read_items(wheel: str, file: BinaryIO) -> dict[str, zipfile.ZipInfo]:
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
