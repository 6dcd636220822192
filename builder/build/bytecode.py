"""Makes layers of bytecode: the image's Python, or one from the same packages, compiles sources in a container.

They are layers of their own, so that a wheel layer stays a pure function of its wheels. A bytecode layer is a pure
function of the sources and of Debian's Python: unchecked-hash bytecode holds no time, and the container compresses it
with its own zlib.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from builder.build.work import Work
from builder.common.errors import BuildError
from builder.layers import wheel, wheel_zip
from builder.layers.splice import Entry, Source
from builder.layers.store import Store
from builder.layers.wheel import Place

PYTHON = "/opt/venv/bin/python"
_PROGRAM, _RESULT = "tmp/compile.py", "/tmp/bytecode.zip"  # noqa: S108  in a container that only this step uses


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """What to compile, and where: `program` is the text of templates/steps/compile.py, run in the image `os_image`.

    `sources` are the Python files of each blob, by its digest.
    """

    os_image: str
    program: bytes
    place: Place
    sources: Sequence[tuple[str, Sequence[Source]]]


def compiled_entries(work: Work, store: Store, compilation: Compilation) -> Iterator[Entry]:
    """The entries of the layer. Raises BuildError, EngineError."""
    with work.project.scratch() as scratch:
        tar, bytecode = Path(scratch) / "sources.tar", Path(scratch) / "bytecode.zip"
        try:
            _write_sources(tar, store, compilation)
        except (gzip.BadGzipFile, EOFError, zlib.error):
            store.remove_damaged(blob for blob, _ in compilation.sources)
            raise
        output: deque[str] = deque(maxlen=15)
        with tar.open("rb") as files, bytecode.open("wb") as result:
            status = work.engine.run_to_file(
                compilation.os_image,
                checkout=str(work.project.root),
                command=[PYTHON, "-B", f"/{_PROGRAM}", _RESULT],
                files=files,
                result=_RESULT,
                out=result,
                on_line=output.append,
                network_mode="none",
                environment={"PYTHONHASHSEED": "0"},
            )
        if status:
            raise BuildError(
                f"compile.py ended with status {status} in the container that compiles bytecode\n{''.join(output)}"
            )
        with bytecode.open("rb") as file:
            yield from _entries(file, compilation.place)


def _write_sources(tar_path: Path, store: Store, compilation: Compilation) -> None:
    """A tar of the program and of the files in site-packages."""
    with tarfile.open(tar_path, mode="w") as tar:
        _add(tar, _PROGRAM, compilation.program)
        for digest, files in compilation.sources:
            with store.path(digest).open("rb") as blob:
                for file in files:
                    if file.path.startswith(f"{compilation.place.site}/"):
                        blob.seek(file.offset)
                        _add(tar, file.path, gzip.decompress(blob.read(file.length)) if file.length else b"")


def _add(tar: tarfile.TarFile, path: str, content: bytes) -> None:
    info = tarfile.TarInfo(path)
    info.size = len(content)
    info.mode = 0o644
    tar.addfile(info, io.BytesIO(content))


def _entries(file: BinaryIO, place: Place) -> Iterator[Entry]:
    """The zip that compile.py wrote, as entries of a layer."""
    folders: set[str] = set()
    with zipfile.ZipFile(file) as archive:
        for member in archive.infolist():
            if not member.filename.startswith(f"{place.site}/") or not member.filename.endswith(".pyc"):
                raise BuildError(f"the container that compiles bytecode returned {member.filename!r}")
            yield from wheel.new_folders(member.filename, folders)
            yield Entry(
                path=member.filename, mode=wheel.FILE_MODE, content=wheel_zip.zipped(file, member, "bytecode.zip")
            )
