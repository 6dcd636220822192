"""Decodes BuildKit's progress, which Docker's API sends as `moby.buildkit.trace`: base64 of a protobuf message.

Schema: `StatusResponse` in moby/buildkit, api/services/control/control.proto. Only the fields that are shown
are read; unknown ones are skipped, as protobuf wants. Wire format: protobuf.dev, "Encoding".
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from dataclasses import dataclass

_VARINT, _I64, _LEN, _I32 = 0, 1, 2, 5


@dataclass(frozen=True, kw_only=True)
class Vertex:
    """A step of the build graph. Times are seconds since 1970, 0.0 when not yet known."""

    digest: str = ""
    name: str = ""
    cached: bool = False
    started: float = 0.0
    completed: float = 0.0
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a part of a vertex is, in bytes mostly; `total` is 0 when unknown."""

    id: str = ""
    vertex: str = ""
    current: int = 0
    total: int = 0


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a step printed."""

    vertex: str = ""
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Status:
    vertices: tuple[Vertex, ...] = ()
    progress: tuple[Progress, ...] = ()
    output: tuple[Output, ...] = ()


def decode(aux: str) -> Status:
    """One trace message; raises ValueError if it is no StatusResponse."""
    try:
        blob = base64.b64decode(aux, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64: {error}") from error
    vertices, progress, output = [], [], []
    for number, value in _fields(blob):
        if isinstance(value, bytes):
            if number == 1:
                vertices.append(_vertex(value))
            elif number == 2:
                progress.append(_progress(value))
            elif number == 3:
                output.append(_output(value))
    return Status(vertices=tuple(vertices), progress=tuple(progress), output=tuple(output))


def _vertex(blob: bytes) -> Vertex:
    fields = dict(_fields(blob))
    return Vertex(
        digest=_text(fields.get(1)),
        name=_text(fields.get(3)),
        cached=bool(fields.get(4, 0)),
        started=_time(fields.get(5)),
        completed=_time(fields.get(6)),
        error=_text(fields.get(7)),
    )


def _progress(blob: bytes) -> Progress:
    fields = dict(_fields(blob))
    return Progress(
        id=_text(fields.get(1)),
        vertex=_text(fields.get(2)),
        current=_int(fields.get(4)),
        total=_int(fields.get(5)),
    )


def _output(blob: bytes) -> Output:
    fields = dict(_fields(blob))
    return Output(vertex=_text(fields.get(1)), text=_text(fields.get(4)))


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
            raise ValueError(f"wire type {kind} is not protobuf")
        if at + length > len(blob):
            raise ValueError("message is cut short")
        yield number, blob[at : at + length]
        at += length


def _varint(blob: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(blob) or shift > 63:
            raise ValueError("varint is cut short or too long")
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
