"""BuildKit's progress messages: decoded correctly, with no error except ValueError."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.engine.trace import Output, Progress, Status, Vertex, decode


def varint(value: int) -> bytes:
    """Negative numbers as in protobuf: two's complement in 64 bits, ten bytes."""
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def scalar(number: int, value: int) -> bytes:
    return varint(number << 3) + varint(value)


def block(number: int, value: bytes | str) -> bytes:
    blob = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(blob)) + blob


def stamp(seconds: float) -> bytes:
    whole = int(seconds // 1)
    return scalar(1, whole) + scalar(2, round((seconds - whole) * 1e9))


def encode(status: Status) -> bytes:
    """The three kinds that are read, with the field numbers of moby's control.proto."""
    blob = b""
    for vertex in status.vertices:
        body = block(1, vertex.digest) + block(3, vertex.name) + scalar(4, int(vertex.cached))
        body += block(5, stamp(vertex.started)) if vertex.started else b""
        body += block(6, stamp(vertex.completed)) if vertex.completed else b""
        blob += block(1, body + block(7, vertex.error))
    for part in status.progress:
        blob += block(2, block(1, part.id) + block(2, part.vertex) + scalar(4, part.current) + scalar(5, part.total))
    for output in status.output:
        blob += block(3, block(1, output.vertex) + scalar(3, 1) + block(4, output.text))
    return blob


def aux(blob: bytes) -> str:
    return base64.b64encode(blob).decode()


FULL = Status(
    vertices=(
        Vertex(digest="sha256:1", name="[os 1/2] RUN x", started=1_700_000_000.5, completed=1_700_000_001.25),
        Vertex(digest="sha256:2", cached=True, error="exit code: 1"),
    ),
    progress=(Progress(id="pull", vertex="sha256:1", current=5, total=2**40),),
    output=(Output(vertex="sha256:1", text="línea\n"),),
)
TEXT = st.text(max_size=20)
INT64 = st.integers(-(2**63), 2**63 - 1)
TIME = st.integers(0, 2**40).map(lambda value: value / 4)  # exact in binary
STATUS = st.builds(
    Status,
    vertices=st.lists(
        st.builds(Vertex, digest=TEXT, name=TEXT, cached=st.booleans(), started=TIME, completed=TIME, error=TEXT),
        max_size=3,
    ).map(tuple),
    progress=st.lists(st.builds(Progress, id=TEXT, vertex=TEXT, current=INT64, total=INT64), max_size=3).map(tuple),
    output=st.lists(st.builds(Output, vertex=TEXT, text=TEXT), max_size=3).map(tuple),
)


def test_a_message_by_hand() -> None:
    """Without the encoder above: bytes as explained on protobuf.dev."""
    vertex = b"\x0a\x02ab" + b"\x1a\x01n" + b"\x20\x01" + b"\x2a\x02\x08\x07"
    assert decode(aux(b"\x0a" + bytes([len(vertex)]) + vertex)) == Status(
        vertices=(Vertex(digest="ab", name="n", cached=True, started=7.0),)
    )


def test_full() -> None:
    assert decode(aux(encode(FULL))) == FULL
    assert decode("") == Status()


@given(STATUS)
def test_round_trip(status: Status) -> None:
    assert decode(aux(encode(status))) == status


@pytest.mark.parametrize("value", [-1, -(2**63), 0, 2**63 - 1])
def test_int64(value: int) -> None:
    blob = block(2, scalar(4, value) + scalar(5, value))
    assert decode(aux(blob)) == Status(progress=(Progress(current=value, total=value),))


def test_times_before_1970() -> None:
    decoded = decode(aux(block(1, block(5, scalar(1, -1) + scalar(2, 500_000_000)))))
    assert decoded.vertices[0].started == -0.5


@pytest.mark.parametrize(
    "unknown",
    [
        scalar(9, 1),
        block(9, "x"),
        varint(9 << 3 | 1) + b"12345678",
        varint(9 << 3 | 5) + b"1234",
        scalar(2**28, 1),
        # A known field of another kind.
        scalar(1, 5),
        scalar(3, 5),
    ],
)
def test_unknown_fields_are_skipped(unknown: bytes) -> None:
    assert decode(aux(unknown + encode(FULL) + unknown)) == FULL


def test_unknown_fields_inside_are_skipped_and_the_last_of_a_field_counts() -> None:
    body = block(1, "first") + scalar(15, 3) + varint(14 << 3 | 5) + b"1234" + block(1, "last")
    assert decode(aux(block(1, body))).vertices == (Vertex(digest="last"),)


def test_text_that_is_not_utf8() -> None:
    assert decode(aux(block(3, block(4, b"a\xff")))).output == (Output(text="a\ufffd"),)


@pytest.mark.parametrize(
    "blob",
    [
        b"\x0a",  # a length is missing
        b"\x0a\x05ab",  # fewer bytes than the length says
        b"\x0a\x80",  # a truncated length
        b"\x09\x00",  # truncated 64 bits
        b"\x0d\x00",  # truncated 32 bits
        b"\x08" + b"\x80" * 11,  # a number that does not end
        b"\x0b",  # groups are deprecated
        b"\x0f",  # an invalid wire type
        block(1, b"\x0a\x05a"),  # broken inside
        block(1, block(5, b"\x08")),  # broken in a time
        b"\x0a" + varint(2**63) + b"a",  # a huge length
    ],
)
def test_broken(blob: bytes) -> None:
    with pytest.raises(ValueError, match=r"truncated|invalid wire type"):
        decode(aux(blob))


@pytest.mark.parametrize("text", ["a", "a===", "é", "\ud800", "YQ=\n=", "-_-_"])
def test_invalid_base64(text: str) -> None:
    with pytest.raises(ValueError, match=r"base64|ASCII"):
        decode(text)


@given(st.binary(max_size=80))
def test_garbage_gives_a_status_or_value_error(blob: bytes) -> None:
    try:
        decoded = decode(aux(blob))
    except ValueError:
        return
    assert isinstance(decoded, Status)


@given(STATUS, st.data())
def test_truncated_messages_give_a_status_or_value_error(status: Status, data: st.DataObject) -> None:
    blob = encode(status)
    cut = blob[: data.draw(st.integers(0, len(blob)))]
    try:
        decoded = decode(aux(cut))
    except ValueError:
        return
    assert decoded.vertices == status.vertices[: len(decoded.vertices)]
    assert decoded.progress == status.progress[: len(decoded.progress)]
    assert decoded.output == status.output[: len(decoded.output)]
