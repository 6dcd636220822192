"""Makes layers of bytecode: the image's own Python compiles the sources of wheel layers, in a container.

Apart from the wheel layers, so that those stay a pure function of their wheels. The result is one too, of the sources
and of Debian's version of Python: unchecked-hash bytecode holds no time, and the container compresses it with its own
zlib.
"""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from builder import splice, wheel
from builder.engine import Engine
from builder.errors import BuildError
from builder.project import Project
from builder.splice import Entry, Layer, Source
from builder.store import Store
from builder.wheel import Place

PYTHON = "/opt/venv/bin/python"
_PROGRAM, _RESULT = "tmp/compile.py", "/tmp/bytecode.zip"  # noqa: S108  in a container of ours


def make(
    engine: Engine,
    project: Project,
    store: Store,
    os_image: str,
    program: bytes,
    place: Place,
    sources: Sequence[tuple[str, Sequence[Source]]],
    out: BinaryIO,
) -> Layer:
    """Writes the layer for `sources` (digest of a blob, files in it) to `out`; `program` is compile.py of templates/.

    Raises BuildError, EngineError.
    """
    with project.scratch() as scratch:
        given, archive, packed = (Path(scratch) / name for name in ("sources.tar", "result.tar", "bytecode.zip"))
        with given.open("wb") as file:
            try:
                _write_sources(file, program, [(store.path(blob), files) for blob, files in sources], place)
            except (gzip.BadGzipFile, EOFError, zlib.error):
                store.check(blob for blob, _ in sources)
                raise
        with given.open("rb") as files, archive.open("wb") as result:
            engine.transform(
                os_image,
                checkout=str(project.root),
                command=[PYTHON, "-B", f"/{_PROGRAM}", _RESULT],
                files=files,
                result=_RESULT,
                out=result,
            )
        with tarfile.open(archive) as tar:
            content = tar.extractfile(Path(_RESULT).name)
            if content is None:
                raise BuildError("the container that compiles bytecode gave no file back")
            with packed.open("wb") as file:
                while chunk := content.read(1 << 20):
                    file.write(chunk)
        with packed.open("rb") as file:
            return splice.write(_entries(file, place), out)


def _write_sources(out: BinaryIO, program: bytes, blobs: Sequence[tuple[Path, Sequence[Source]]], place: Place) -> None:
    """A tar of the program and of the files that lie in site-packages."""
    with tarfile.open(fileobj=out, mode="w") as tar:
        _add(tar, _PROGRAM, program)
        for path, files in blobs:
            with path.open("rb") as blob:
                for file in files:
                    if file.path.startswith(f"{place.site}/"):
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
        for item in archive.infolist():
            if not item.filename.startswith(f"{place.site}/") or not item.filename.endswith(".pyc"):
                raise BuildError(f"the container that compiles bytecode gave back {item.filename!r}")
            yield from wheel.new_folders(item.filename, folders)
            yield Entry(path=item.filename, mode=wheel.FILE_MODE, content=wheel.zipped(file, item, "bytecode.zip"))
