"""What an installer makes of a wheel, as entries of a layer: schemes, scripts, RECORD, INSTALLER, REQUESTED, modes.

Nothing is unpacked: an entry of the layer points at the entry of the zip. Pure but for reading the wheel.
Sources: "Binary distribution format", "Recording installed projects" and "Entry points" of the PyPA specifications;
where they leave a choice, what uv does, so that both methods of building give the same files.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import io
import os
import struct
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import BinaryIO

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from builder import splice
from builder.splice import Entry, SpliceError, Zipped

FILE_MODE, PROGRAM_MODE, FOLDER_MODE = 0o644, 0o755, 0o755
_UNICODE_PATH = 0x7075  # an extra field of zip entries
MAX_METADATA = 64 << 20  # bytes of one text that is read whole; the longest RECORD known (torch) has 2 MB
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
    """A wheel that must not be installed: damaged, hostile, or at odds with another one."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where wheels go, as paths without a leading slash; `python` is what scripts begin with.

    `link` is a name in `site` that no wheel may use, because a link stands there.
    """

    prefix: str
    site: str
    headers: str
    python: str = "/opt/venv/bin/python"
    version: str = ""
    link: str = ""

    def scheme(self, name: str, project: str) -> str:
        """The folder of a `.data` scheme; raises KeyError for one that does not exist."""
        return {
            "purelib": self.site,
            "platlib": self.site,
            "headers": f"{self.headers}/{project}",
            "scripts": f"{self.prefix}/bin",
            "data": self.prefix,
        }[name]


# As of `--target`: no Python owns it.
CUDA = Place(prefix="opt/nvidia", site="opt/nvidia", headers="opt/nvidia/include")


def environment(python: str) -> Place:
    """The virtual environment in /opt/venv for a Python of two numbers."""
    return Place(
        prefix="opt/venv",
        site=f"opt/venv/lib/python{python}/site-packages",
        headers=f"opt/venv/include/site/python{python}",
        version=python,
        link="nvidia",
    )


def layer_entries(wheels: Iterable[tuple[str, BinaryIO]], place: Place) -> Iterator[Entry]:
    """Entries of a layer of several wheels (file name, file), each folder before what is in it.

    Raises WheelError where two wheels have different bytes for one path, or a wheel is not as it should be.
    """
    seen: dict[str, tuple[Entry, str]] = {}
    folders: set[str] = set()
    for name, file in wheels:
        for entry in install(name, file, place):
            if known := seen.get(entry.path):
                _same(known, (entry, name))
                continue
            if entry.path in folders:
                raise WheelError(f"{name}: has /{entry.path} as a file, which is a folder there or in an earlier wheel")
            for folder in new_folders(entry.path, folders):
                if folder.path in seen:
                    first = seen[folder.path][1]
                    raise WheelError(f"{name}: has /{folder.path} as a folder, which is a file in {first}")
                yield folder
            seen[entry.path] = (entry, name)
            yield entry


def new_folders(path: str, folders: set[str]) -> Iterator[Entry]:
    """Entries for the folders above `path` that `folders` lacks, outermost first; adds them to it."""
    missing = []
    name = path.rpartition("/")[0]
    while name and name not in folders:
        missing.append(name)
        name = name.rpartition("/")[0]
    for name in reversed(missing):
        folders.add(name)
        yield Entry(path=name, mode=FOLDER_MODE)


def _same(one: tuple[Entry, str], other: tuple[Entry, str]) -> None:
    """Two wheels of one namespace may both have a file, if it is the same; raises WheelError if not."""
    (first, first_name), (second, second_name) = one, other
    if first.mode != second.mode:
        raise WheelError(f"{first_name} and {second_name} both have /{first.path}, with different modes")
    try:
        is_same = _size(first) == _size(second) and _sha256(first) == _sha256(second)
    except SpliceError as error:
        raise WheelError(str(error)) from error
    if not is_same:
        raise WheelError(f"{first_name} and {second_name} both have /{first.path}, with different bytes")


def install(name: str, file: BinaryIO, place: Place) -> Iterator[Entry]:
    """Entries for one wheel, in the order of its zip, what an installer adds last. Raises WheelError."""
    try:
        yield from _Wheel(name, file, place).entries()
    except WheelError:
        raise
    except SpliceError as error:
        raise WheelError(str(error)) from error
    # What the standard library raises for zip files and texts that are none, or not as it knows them.
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError, csv.Error) as error:
        raise WheelError(f"{name}: {error}") from error


class _Wheel:
    def __init__(self, name: str, file: BinaryIO, place: Place) -> None:
        self._name = name
        self._file = file
        self._place = place
        try:
            self._project, self._version, _, _ = parse_wheel_filename(name)
        except InvalidWheelFilename as error:
            raise WheelError(f"{name}: is no name of a wheel") from error
        self._items: dict[str, zipfile.ZipInfo] = {}
        end = 0
        with zipfile.ZipFile(file) as archive:
            for item in sorted(archive.infolist(), key=lambda item: item.header_offset):
                if item.header_offset < end:
                    raise WheelError(f"{name}: {item.filename!r} begins before the entry in front of it ends")
                end = item.header_offset + item.compress_size
            for item in archive.infolist():
                if not item.filename.endswith("/"):  # `is_dir` fails for an empty name
                    self._check(item)
                    self._items[item.filename] = item
        self._info = self._find_info()
        self._records: dict[str, tuple[str, str]] = {}
        self._written: dict[str, Entry] = {}

    def entries(self) -> Iterator[Entry]:
        self._check_metadata()
        self._records = self._read_record()
        rows: dict[str, tuple[str, str]] = {}
        programs = dict(self._programs())
        replaced = {f"{self._info}/{part}" for part in ("RECORD", *_ADDED)}
        for path, item in self._items.items():
            if path in replaced:
                continue
            target, is_script = self._target(path)
            if target in programs or (is_script and any(target.removesuffix(end) in programs for end in _WRAPPERS)):
                continue  # a declared entry point counts more than a file of its name
            entry = Entry(path=target, mode=_mode(item, is_script=is_script), content=self._zipped(item))
            row = self._records.get(path, ("", ""))
            if is_script and (fixed := self._with_our_python(entry)):
                entry = fixed
                row = _row(entry)
            rows[self._relative(target)] = row
            yield self._once(entry)
        # What has a row in the wheel's RECORD without being in the wheel (a signature, as PEP 427 has it) keeps it.
        for path, row in self._records.items():
            if path not in self._items and path not in replaced:
                rows.setdefault(path, row)
        ours = {f"{self._place.site}/{self._info}/{part}": text for part, text in _ADDED.items()}
        added = [Entry(path=path, mode=FILE_MODE, content=content) for path, content in ours.items()]
        added += [Entry(path=path, mode=PROGRAM_MODE, content=content) for path, content in programs.items()]
        for entry in added:
            rows[self._relative(entry.path)] = _row(entry)
            yield self._once(entry)
        rows[f"{self._info}/RECORD"] = ("", "")
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows((path, *rows[path]) for path in sorted(rows, key=str.encode))
        record = f"{self._info}/RECORD"
        mode = _mode(self._items[record], is_script=False)
        yield self._once(Entry(path=f"{self._place.site}/{record}", mode=mode, content=text.getvalue().encode()))

    def _once(self, entry: Entry) -> Entry:
        """Two entries of one wheel that come to one path: which of them would win depends on the installer."""
        if entry.path in self._written:
            raise WheelError(f"{self._name}: two of its files come to /{entry.path}")
        self._written[entry.path] = entry
        return entry

    def _check(self, item: zipfile.ZipInfo) -> None:
        name = item.filename
        parts = name.split("/")
        if name.startswith("/") or any(part in ("", ".", "..") for part in parts) or "\0" in item.orig_filename:
            raise WheelError(f"{self._name}: holds the path {name!r}")
        if _has_other_name(item) or any(ord(one) < 32 or ord(one) == 127 for one in name):
            raise WheelError(f"{self._name}: holds the path {name!r}, which not everyone reads alike")
        if name in self._items:
            raise WheelError(f"{self._name}: holds {name!r} twice")
        if item.flag_bits & 0x1:
            raise WheelError(f"{self._name}: {name!r} is encrypted")
        if item.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise WheelError(f"{self._name}: {name!r} is compressed in a way that wheels are not")

    def _find_info(self) -> str:
        found = {path.split("/")[0] for path in self._items if path.split("/")[0].endswith(".dist-info")}
        if len(found) != 1:
            raise WheelError(f"{self._name}: has {len(found)} .dist-info folders, not one")
        info = found.pop()
        project, _, version = info.removesuffix(".dist-info").partition("-")
        if canonicalize_name(project) != self._project or not version:
            raise WheelError(f"{self._name}: holds {info}, which is another project's")
        return info

    def _text(self, part: str) -> str | None:
        item = self._items.get(f"{self._info}/{part}")
        if item is None:
            return None
        if item.file_size > MAX_METADATA:
            raise WheelError(f"{self._name}: its {part} has {item.file_size} bytes")
        return splice.read(self._zipped(item)).decode("utf-8")

    def _check_metadata(self) -> None:
        text = self._text("WHEEL")
        version = HeaderParser().parsestr(text or "").get("Wheel-Version", "").strip()
        if version.split(".")[0] != "1":
            raise WheelError(f"{self._name}: is of wheel version {version or 'none'}; 1 is known")

    def _read_record(self) -> dict[str, tuple[str, str]]:
        text = self._text("RECORD")
        if text is None:
            raise WheelError(f"{self._name}: has no RECORD")
        return {row[0]: (row[1], row[2]) for row in csv.reader(io.StringIO(text)) if len(row) == 3}

    def _target(self, path: str) -> tuple[str, bool]:
        """Where a path of the wheel goes, and whether it is a script."""
        first, _, rest = path.partition("/")
        if not first.endswith(".data"):
            return self._checked(path, f"{self._place.site}/{path}"), False
        scheme, _, inside = rest.partition("/")
        if canonicalize_name(first.split("-")[0]) != self._project or not inside:
            raise WheelError(f"{self._name}: holds {path}, which belongs to no scheme")
        try:
            folder = self._place.scheme(scheme, self._project)
        except KeyError:
            raise WheelError(f"{self._name}: holds {path}, and there is no scheme {scheme!r}") from None
        return self._checked(path, f"{folder}/{inside}"), scheme == "scripts"

    def _checked(self, path: str, target: str) -> str:
        """The target, unless it lies where the link is."""
        link = f"{self._place.site}/{self._place.link}"
        if self._place.link and f"{target}/".startswith(f"{link}/"):
            raise WheelError(f"{self._name}: has {path}, and /{link} is a link to the shared libraries")
        return target

    def _relative(self, target: str) -> str:
        """A path as RECORD has it: relative to the folder that .dist-info is in."""
        inside = self._place.site + "/"
        return target[len(inside) :] if target.startswith(inside) else os.path.relpath(target, self._place.site)

    def _zipped(self, item: zipfile.ZipInfo) -> Zipped:
        return zipped(self._file, item, self._name)

    def _with_our_python(self, entry: Entry) -> Entry | None:
        """The script with its first line made to name our Python, if it begins with the placeholder `#!python`."""
        assert isinstance(entry.content, Zipped)
        if entry.content.size > MAX_METADATA:
            return None  # a program, not a text
        text = splice.read(entry.content)
        if not text.startswith(b"#!python"):
            return None
        fixed = b"#!" + self._place.python.encode() + b"\n" + text.partition(b"\n")[2]
        return Entry(path=entry.path, mode=entry.mode, content=fixed)

    def _programs(self) -> Iterator[tuple[str, bytes]]:
        """Path and text of every console and GUI script."""
        try:
            points = _EntryPoints(self._text("entry_points.txt")).entry_points
        except TypeError as error:  # the standard library's, for a line without `=`
            raise WheelError(f"{self._name}: its entry_points.txt cannot be read") from error
        for point in points:
            if point.group not in ("console_scripts", "gui_scripts"):
                continue
            if point.name in ("", ".", "..") or not point.name.isprintable() or set(point.name) & set(" /\\'\""):
                raise WheelError(f"{self._name}: declares a script named {point.name!r}")
            try:
                module, attribute = point.module, point.attr
            except (AttributeError, AssertionError):  # the one until Python 3.12, the other since
                module, attribute = "", ""
            if not attribute or not all(part.isidentifier() for part in f"{module}.{attribute}".split(".")):
                raise WheelError(f"{self._name}: its script {point.name} names no function: {point.value!r}")
            text = _SCRIPT.format(
                python=self._place.python, module=module, name=attribute.split(".")[0], function=attribute
            ).encode()
            yield f"{self._place.prefix}/bin/{point.name}", text
            if self._project == "pip" and point.name == "pip" and self._place.version:
                yield f"{self._place.prefix}/bin/pip{self._place.version}", text  # as ensurepip and uv do


# What setuptools may call a script that it made for an entry point; pip and uv know these names too.
_WRAPPERS = (".exe", "-script.py", ".pya")
# uv's name, since the readable Dockerfiles use uv; nothing that reads this file cares which installer it was.
_ADDED = {"INSTALLER": b"uv", "REQUESTED": b""}


class _EntryPoints(importlib.metadata.Distribution):
    """Lets the standard library read entry points, as it does for installed distributions."""

    def __init__(self, text: str | None) -> None:
        self._entry_points = text

    def read_text(self, filename: str) -> str | None:
        return self._entry_points if filename == "entry_points.txt" else None

    def locate_file(self, path: object) -> Path:
        raise NotImplementedError


def zipped(file: BinaryIO, item: zipfile.ZipInfo, archive: str) -> Zipped:
    """Where the entry's data begin: after its local header, which has a length of its own (APPNOTE.TXT, 4.3.7).

    `archive` is for messages. Raises WheelError for a header that is another entry's than the directory says.
    """
    file.seek(item.header_offset)
    header = file.read(30)
    if len(header) < 30 or header[:4] != b"PK\x03\x04":
        raise WheelError(f"{archive}: {item.filename!r} has no header where it should be")
    flags, method = struct.unpack("<HH", header[6:10])
    name, extra = struct.unpack("<HH", header[26:30])
    own = file.read(name).decode("utf-8" if flags & 0x800 else "cp437", "replace")
    if (own, method) != (item.orig_filename, item.compress_type):
        raise WheelError(f"{archive}: {item.filename!r} is another file by its own header: {own!r}")
    return Zipped(
        name=f"{archive}: {item.filename}",
        file=file,
        offset=item.header_offset + 30 + name + extra,
        length=item.compress_size,
        is_deflated=item.compress_type == zipfile.ZIP_DEFLATED,
        crc=item.CRC,
        size=item.file_size,
    )


def _sha256(entry: Entry) -> str:
    if isinstance(entry.content, Zipped):
        return splice.sha256(entry.content)
    return hashlib.sha256(entry.content or b"").hexdigest()


def _has_other_name(item: zipfile.ZipInfo) -> bool:
    """Whether an extra field gives the entry a second name, which some readers take (APPNOTE.TXT, 4.6.9)."""
    extra = item.extra
    while len(extra) >= 4:
        kind, length = struct.unpack("<HH", extra[:4])
        if kind == _UNICODE_PATH:
            return True
        extra = extra[4 + length :]
    return item.filename != item.orig_filename


def _size(entry: Entry) -> int:
    return entry.content.size if isinstance(entry.content, Zipped) else len(entry.content or b"")


def _mode(item: zipfile.ZipInfo, *, is_script: bool) -> int:
    return PROGRAM_MODE if is_script or (item.external_attr >> 16) & 0o111 else FILE_MODE


def _row(entry: Entry) -> tuple[str, str]:
    assert isinstance(entry.content, bytes)
    hashed = base64.urlsafe_b64encode(hashlib.sha256(entry.content).digest()).decode().rstrip("=")
    return f"sha256={hashed}", str(len(entry.content))
