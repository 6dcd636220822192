"""Decodes BuildKit's progress, which Docker's API sends as `moby.buildkit.trace`: base64 of a protobuf message.

Schema: `StatusResponse` in moby/buildkit, api/services/control/control.proto. Only the fields that are shown are read;
unknown fields are skipped, as protobuf requires. Wire format: protobuf.dev, "Encoding".
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass

_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5


@dataclass(frozen=True, kw_only=True)
class Vertex:
    """A step of the build graph. Times are seconds since 1970, 0.0 if unknown."""

    digest: str = ""
    name: str = ""
    cached: bool = False
    started: float = 0.0
    completed: float = 0.0
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a part of a vertex, usually in bytes; `total` is 0 if unknown."""

    id: str = ""
    vertex: str = ""
    current: int = 0
    total: int = 0


@dataclass(frozen=True, kw_only=True)
class Output:
    """Output of a step."""

    vertex: str = ""
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Status:
    vertices: tuple[Vertex, ...] = ()
    progress: tuple[Progress, ...] = ()
    output: tuple[Output, ...] = ()


def decode(aux: str) -> Status:
    """One trace message; raises ValueError if it is not a StatusResponse."""
    try:
        blob = base64.b64decode(aux, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error
    parts = [
        (kind, dict(_fields(part))) for kind, part in _fields(blob) if kind in (1, 2, 3) and isinstance(part, bytes)
    ]
    return Status(
        vertices=tuple(
            Vertex(
                digest=_text(part.get(1)),
                name=_text(part.get(3)),
                cached=bool(part.get(4, 0)),
                started=_time(part.get(5)),
                completed=_time(part.get(6)),
                error=_text(part.get(7)),
            )
            for kind, part in parts
            if kind == 1
        ),
        progress=tuple(
            Progress(
                id=_text(part.get(1)), vertex=_text(part.get(2)), current=_int(part.get(4)), total=_int(part.get(5))
            )
            for kind, part in parts
            if kind == 2
        ),
        output=tuple(Output(vertex=_text(part.get(1)), text=_text(part.get(4))) for kind, part in parts if kind == 3),
    )


def _fields(blob: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Field number and value of each field; a repeated scalar field yields each of its values."""
    at = 0
    while at < len(blob):
        key, at = _varint(blob, at)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(blob, at)
            yield number, value
            continue
        if kind == _LEN:
            length, at = _varint(blob, at)
        elif kind in (_I64, _I32):
            length = 8 if kind == _I64 else 4
        else:
            raise ValueError(f"invalid wire type {kind}")
        if at + length > len(blob):
            raise ValueError("truncated message")
        yield number, blob[at : at + length]
        at += length


def _varint(blob: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(blob) or shift > 63:
            raise ValueError("truncated or too long varint")
        byte = blob[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def _text(value: int | bytes | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def _int(value: int | bytes | None) -> int:
    """int64: two's complement in 64 bits."""
    if not isinstance(value, int):
        return 0
    return value - (1 << 64) if value >> 63 else value


def _time(value: int | bytes | None) -> float:
    """google.protobuf.Timestamp: seconds in field 1, nanoseconds in field 2."""
    if not isinstance(value, bytes):
        return 0.0
    fields = dict(_fields(value))
    return _int(fields.get(1)) + _int(fields.get(2)) / 1e9
