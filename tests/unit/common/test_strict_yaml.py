"""The YAML reader: what it refuses, with which message and place."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder.common import strict_yaml
from builder.common.errors import MatrixError
from builder.common.strict_yaml import MAX_BYTES, MAX_DEPTH
from tests.fakes.engine import place

BOMB = b"""a: &a [x,x,x,x,x,x,x,x,x]
b: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]
c: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b]
d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c]
e: [*d,*d,*d,*d,*d,*d,*d,*d,*d]
"""

# The file, the place of the error, and part of its message.
REFUSED = {
    "duplicate key": (b"a: 1\nb:\n  c: 2\n  c: 3\n", "m.yaml:4:3", "duplicate key 'c'; first at m.yaml:3:3"),
    "duplicate key, quoted": (b'"a": 1\na: 2\n', "m.yaml:2:1", "duplicate key 'a'"),
    "anchor": (b"a: &x 1\n", "m.yaml:1:4", "anchors (&) and aliases (*)"),
    "alias": (b"a: *x\n", "m.yaml:1:4", "anchors (&) and aliases (*)"),
    "alias of a list": (b"a: &x [1]\nb: *x\n", "m.yaml:1:4", "anchors (&) and aliases (*)"),
    "alias bomb": (BOMB, "m.yaml:1:4", "anchors (&) and aliases (*)"),
    "glob that reads as an alias": (b"a: *-jupyter\n", "m.yaml:1:4", "anchors (&) and aliases (*)"),
    "tag": (b"a: !!python/object:os.system x\n", "m.yaml:1:4", "tags ("),
    "tag of a plain type": (b"a: !!str 1\n", "m.yaml:1:4", "tags ("),
    "local tag": (b"a: !x 1\n", "m.yaml:1:4", "tags ("),
    "two documents": (
        b"a: 1\n---\nb: 2\n",
        "m.yaml:2:1",
        "expected a single document in the stream, but found another document",
    ),
    "merge key": (b"a: 1\n<<: {b: 2}\n", "m.yaml:2:1", "a key must be a plain name"),
    "list as key": (b"? [a]\n: 1\n", "m.yaml:1:3", "a key must be a plain name"),
    "number as key": (b"a:\n  3.10: x\n", "m.yaml:2:3", "key 3.10 is read as a number, not text"),
    "truth value as key": (b"on: x\n", "m.yaml:1:1", "key on is read as true/false, not text"),
    "date as key": (b"2026-01-02: x\n", "m.yaml:1:1", "key 2026-01-02 is read as a timestamp, not text"),
    "nothing as key": (b"~: x\n", "m.yaml:1:1", "key ~ is read as null, not text"),
    "2,000 brackets": (b"a: " + b"[" * 2000 + b"]" * 2000, "m.yaml:1:15", "nested more than 12 levels deep"),
    "2,000 open brackets": (b"[" * 2000, "m.yaml:1:13", "nested more than 12 levels deep"),
    "2,000 dashes": (b"- " * 2000, "m.yaml:1:25", "nested more than 12 levels deep"),
    "bidi": (b"a: 1\nb: x\xe2\x80\xae y\n", "m.yaml:2:5", "character U+202E is not allowed"),
    "zero-width": (b"a\xe2\x80\x8b: 1\n", "m.yaml:1:2", "character U+200B is not allowed"),
    "byte-order mark": (b"\xef\xbb\xbfa: 1\n", "m.yaml:1:1", "character U+FEFF is not allowed"),
    "NUL": (b"a: 1\nb: x\x00y\n", "m.yaml:2", "character U+0000 is not allowed"),
    "escape": (b"a: 1\nb: \x1b[31m\n", "m.yaml:2", "character U+001B is not allowed"),
    "delete": (b"a: \x7f\n", "m.yaml:1", "character U+007F is not allowed"),
    "lone surrogate": (b"a: 1\nb: \xed\xa0\x80\n", "m.yaml:2", "not UTF-8 (byte 0xed)"),
    "Latin-1": (b"# caf\xe9\n", "m.yaml:1", "not UTF-8 (byte 0xe9)"),
    "UTF-16": ("a: 1".encode("utf-16"), "m.yaml:1", "not UTF-8 (byte 0xff)"),
    "date that is none": (b"a: 2026-13-45\n", "m.yaml:1:4", "month must be in 1..12"),
    "time zone that is none": (b"a: 2001-12-14 21:59:43 -99:99\n", "m.yaml:1:4", "2001-12-14"),
    "number without digits": (b"a: 0x_\n", "m.yaml:1:4", "'0x_'"),
    "number of 5,000 digits": (b"a: " + b"9" * 5000, "m.yaml:1:4", "9999"),
    "equals sign": (b"a: =\n", "m.yaml:1:4", "invalid YAML"),
    "unclosed": (b"a: [1\nb: 2\n", "m.yaml:2:2", "invalid YAML"),
    "tab": (b"a:\n\tb: 1\n", "m.yaml:2:1", "invalid YAML"),
    "escape that is none": (b'a: "\\q"\n', "m.yaml:1:5", "invalid YAML"),
    "directive": (b"%YAML 9.9\n---\na: 1\n", "m.yaml:1:1", "invalid YAML"),
}


@pytest.mark.parametrize(("blob", "where", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_rarely_meant_is_refused(blob: bytes, where: str, message: str) -> None:
    with pytest.raises(MatrixError) as caught:
        strict_yaml.parse_yaml(blob, "m.yaml")
    assert place(caught.value).startswith(where)
    assert message in str(caught.value)


@pytest.mark.parametrize("escape", [r"\U00110000", r"\UFFFFFFFF", r"\ud800", r"\u202e", r"\u200b", r"\0"])
@pytest.mark.parametrize("text", ['a: 1\nb: "x{}"\n', 'a: 1\n"x{}": 1\n'], ids=["value", "key"])
def test_escapes_of_characters_that_are_not_allowed(text: str, escape: str) -> None:
    with pytest.raises(MatrixError) as caught:
        strict_yaml.parse_yaml(text.format(escape).encode(), "m.yaml")
    assert place(caught.value).startswith("m.yaml:2")


def test_a_too_large_file_is_refused() -> None:
    with pytest.raises(MatrixError, match=rf"m.yaml: {MAX_BYTES + 1} bytes, more than the {MAX_BYTES} allowed"):
        strict_yaml.parse_yaml(b"#" * (MAX_BYTES + 1), "m.yaml")


def test_the_deepest_nesting_that_is_allowed_is_read() -> None:
    data = strict_yaml.parse_yaml(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH, "m.yaml").data
    for _ in range(MAX_DEPTH - 1):
        assert len(data) == 1
        data = data[0]
    assert data == []


@pytest.mark.parametrize("typed", ["3.10", "1.e+3", "017", "yes", "2026-01-02", "~", "1_000"])
def test_the_text_of_a_value_is_as_typed(typed: str) -> None:
    located = strict_yaml.parse_yaml(f"a:\n  - {typed}\n".encode(), "m.yaml")
    assert located.typed(("a", 0)) == typed
    assert located.data["a"][0] != typed


def test_every_value_has_its_place() -> None:
    located = strict_yaml.parse_yaml(b"a:\n  b: [x, {c: y}]\n", "m.yaml")
    assert located.data == {"a": {"b": ["x", {"c": "y"}]}}
    assert located.where(("a", "b", 0)) == "m.yaml:2:7"
    assert located.where(("a", "b"), key=True) == "m.yaml:2:3"
    assert located.where(("a", "b", 1, "c")) == "m.yaml:2:14"
    assert located.where(("a", "b", 1, "absent", "deeper")) == "m.yaml:2:10"
    assert located.where(()) == "m.yaml:1:1"


@pytest.mark.parametrize(("name", "message"), [("matrix.yaml", "No such file"), ("", "Is a directory")])
def test_a_file_that_cannot_be_read(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(MatrixError, match=message):
        strict_yaml.load_yaml(tmp_path / name)


@given(st.binary(max_size=60) | st.text(alphabet="ab:-[]{}&*!?|>%@\"'\\x0U \n\t#,<=~", max_size=60).map(str.encode))
def test_any_input_gives_data_or_one_error(blob: bytes) -> None:
    try:
        name = strict_yaml.parse_yaml(blob, "m.yaml").name + ":"
    except MatrixError as error:
        name = place(error)
    assert name.startswith("m.yaml:")
