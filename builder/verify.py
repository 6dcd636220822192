"""Whether an image is what its history says: every wheel layer is made again from the index and compared by digest.

Works on an image of the store and on one in a registry, whose layers are not pulled. The `os` layer and what was
compiled or written by people cannot be derived from wheels; that is said.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from builder import digest, oci, splice, wheel
from builder.errors import FetchError, VerifyError
from builder.fetch import CONNECTIONS, Fetcher
from builder.lock import Wheel
from builder.oci import WheelsOf
from builder.splice import SpliceError
from builder.wheel import WheelError

SHOWN = 6  # wheels of a layer that are named
LONGEST = 255  # characters of a file name; to parse one with thousands of tags would take hours
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}", re.ASCII)
State = Literal["same", "different", "not derived", "failed"]


class Source(Protocol):
    """Where an image lies: a store or a registry."""

    def manifest(self) -> bytes: ...
    def read_blob(self, digest: str) -> bytes: ...
    def has_blob(self, digest: str) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What became of one layer; `detail` says more."""

    layer: str
    digest: str
    state: State
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class _Layer:
    digest: str
    diff_id: str
    line: str


def verify(source: Source, fetcher: Fetcher) -> Iterator[Finding]:
    """One finding a layer, lowest first, as they come. Raises VerifyError for an image that does not hold together."""
    layers = _layers(source)
    wanted = {sha256: file for layer in layers if (of := _wheels(layer)) for file, sha256 in of.wheels}
    wheels = [_wheel(file, sha256) for sha256, file in wanted.items()]
    pool = ThreadPoolExecutor(CONNECTIONS)
    coming = {one.sha256: pool.submit(fetcher.fetch, one) for one in wheels}
    try:
        for layer in layers:
            yield _missing(layer, source) or _finding(layer, coming)
    finally:
        fetcher.stop()
        pool.shutdown(wait=False, cancel_futures=True)
        for one in wheels:
            fetcher.drop(one)


def _layers(source: Source) -> list[_Layer]:
    manifest = _json(source.manifest(), "manifest")
    try:
        blob = _digest(manifest["config"]["digest"])
        config = _json(source.read_blob(blob), "configuration")
        blobs = [_digest(one["digest"]) for one in manifest["layers"]]
        diff_ids = [_digest(one) for one in config["rootfs"]["diff_ids"]]
        lines = [_plain(str(one.get("created_by", ""))) for one in config["history"] if not one.get("empty_layer")]
    except (KeyError, TypeError, AttributeError) as error:
        raise VerifyError(
            f"its manifest or configuration lacks {error}", hint="It was not made by this builder."
        ) from error
    if not len(blobs) == len(diff_ids) == len(lines):
        raise VerifyError(f"it has {len(blobs)} layers, {len(diff_ids)} diff ids and {len(lines)} lines of history")
    return [
        _Layer(digest=blob, diff_id=diff_id, line=line)
        for blob, diff_id, line in zip(blobs, diff_ids, lines, strict=True)
    ]


def _digest(value: Any) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise VerifyError("its manifest or configuration names something by what is no SHA-256")
    return value


def _plain(text: str) -> str:
    """Without what could change what a terminal has shown already, or cannot be printed at all."""
    return "".join(one if one.isprintable() else "\ufffd" for one in text)


def _json(data: bytes, what: str) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise VerifyError(f"its {what} cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise VerifyError(f"its {what} is no JSON object")
    return found


def _wheels(layer: _Layer) -> WheelsOf | None:
    try:
        return oci.parse_history(layer.line)
    except ValueError as error:
        raise VerifyError(f"its history cannot be read: {error}") from error


def _wheel(file: str, sha256: str) -> Wheel:
    try:
        if len(file) > LONGEST:
            raise InvalidWheelFilename(f"{len(file)} characters")
        name, version, _, _ = parse_wheel_filename(file)
        return Wheel(component="none", name=name, version=str(version), file=file, size=0, sha256=sha256)
    except (InvalidWheelFilename, ValueError) as error:
        raise VerifyError(f"its history names {file[:100]!r}, which is no wheel's name") from error


def _missing(layer: _Layer, source: Source) -> Finding | None:
    if source.has_blob(layer.digest):
        return None
    return Finding(layer=layer.line[:40], digest=layer.digest, state="different", detail="its blob is not there")


def _finding(layer: _Layer, coming: dict[str, Future[Path]]) -> Finding:
    of = _wheels(layer)
    name = layer.line if of is None else _named([file.split("-")[0] for file, _ in of.wheels])

    def found(state: State, detail: str = "") -> Finding:
        return Finding(layer=name, digest=layer.digest, state=state, detail=detail)

    if of is None:
        return found("not derived")
    if of.format != splice.FORMAT:
        return found("failed", f"layer format {of.format}; this builder writes {splice.FORMAT}")
    try:
        made = _derive(of, [coming[sha256].result() for _, sha256 in of.wheels])
    except (WheelError, SpliceError) as error:
        return found("different", str(error))
    except (FetchError, FileNotFoundError) as error:  # a builder that shares the store may have dropped it
        return found("failed", str(error))
    if (made.digest, made.diff_id) != (layer.digest, layer.diff_id):
        return found("different", f"its wheels give {digest.short(made.digest)}")
    return found("same")


def _named(wheels: Sequence[str]) -> str:
    shown = ", ".join(wheels[:SHOWN])
    return shown if len(wheels) <= SHOWN else f"{shown} and {len(wheels) - SHOWN} more"


def _derive(of: WheelsOf, paths: Sequence[Path]) -> splice.Layer:
    place = wheel.environment(of.python) if of.python else wheel.CUDA
    with ExitStack() as stack:
        opened = [
            (file, stack.enter_context(path.open("rb", buffering=splice.CHUNK)))
            for (file, _), path in zip(of.wheels, paths, strict=True)
        ]
        return splice.write(wheel.layer_entries(opened, place), cast("BinaryIO", _Nowhere()))


class _Nowhere(io.RawIOBase):
    def write(self, data: Any) -> int:
        return len(data)
