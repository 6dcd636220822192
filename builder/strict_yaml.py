"""A YAML reader that refuses what people do not mean, and knows where every value stands.

Refused: duplicate keys, anchors and aliases, explicit tags, several documents, deep nesting, control and
bidirectional characters, files over a megabyte. Built on PyYAML's SafeLoader; numbers stay what YAML says
they are (an unquoted 3.10 is the float 3.1), and `Located.raw` keeps what was typed, so that the error can
show both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from builder.errors import MatrixError

MAX_BYTES = 1_000_000
MAX_DEPTH = 12
# Characters that change how a line is displayed without being seen (Unicode TR36 and CVE-2021-42574).
HIDDEN = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
# What no value may hold, also not by an escape such as "\\u202e" or "\\0".
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")

Key = tuple[str | int, ...]


@dataclass(frozen=True)
class Mark:
    """A place in a file; line and column count from 1."""

    line: int
    column: int


@dataclass(frozen=True)
class Located:
    """Parsed data with the place and the typed text of every node, by path."""

    name: str
    data: Any
    marks: dict[Key, Mark] = field(repr=False)
    keys: dict[Key, Mark] = field(repr=False)
    raw: dict[Key, str] = field(repr=False)

    def where(self, path: Key, *, key: bool = False) -> str:
        """`file:line:column` of the value (or the key) at `path`, or of its nearest parent."""
        if key and path in self.keys:
            mark = self.keys[path]
            return f"{self.name}:{mark.line}:{mark.column}"
        while path and path not in self.marks:
            path = path[:-1]
        mark = self.marks.get(path, Mark(1, 1))
        return f"{self.name}:{mark.line}:{mark.column}"


def load(path: Path, *, name: str = "") -> Located:
    """Reads `path`; raises MatrixError naming file, line, column and what to do."""
    name = name or path.name
    try:
        blob = path.read_bytes()
    except OSError as error:
        raise MatrixError(f"{name}: {error.strerror or error}") from error
    return parse(blob, name)


def parse(blob: bytes, name: str) -> Located:
    """Parses bytes of YAML; see `load`."""
    if len(blob) > MAX_BYTES:
        raise MatrixError(f"{name}: {len(blob)} bytes; a matrix has at most {MAX_BYTES}")
    try:
        text = blob.decode("utf-8")
    except UnicodeDecodeError as error:
        line = blob[: error.start].count(b"\n") + 1
        raise MatrixError(f"{name}:{line}: not UTF-8 (byte {blob[error.start]:#04x})") from error
    if found := HIDDEN.search(text):
        line = text.count("\n", 0, found.start()) + 1
        column = found.start() - (text.rfind("\n", 0, found.start()) + 1) + 1
        raise MatrixError(
            f"{name}:{line}:{column}: invisible character U+{ord(found.group()):04X}",
            hint="Delete it: it can make a line look like another one.",
        )
    try:
        _check_events(text, name)
        return _compose(text, name)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise MatrixError(f"{name}{place}: not YAML: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        character = error.character  # documented as a character, but PyYAML gives its number
        number = character if isinstance(character, int) else ord(character[:1] or b"\0")
        raise MatrixError(f"{name}:{line}: character U+{number:04X} is not allowed") from error


def _check_events(text: str, name: str) -> None:
    """Walks the event stream, which does not recurse, before anything that does."""
    depth = documents = 0
    loader = yaml.SafeLoader(text)
    while True:
        try:
            if not loader.check_event():
                return
            event: yaml.Event = loader.get_event()  # type: ignore[no-untyped-call]
        except (ValueError, OverflowError) as error:  # an escape for a number that is no character
            here = loader.get_mark()
            raise MatrixError(f"{name}:{here.line + 1}:{here.column + 1}: not YAML: {error}") from error
        mark = event.start_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        if isinstance(event, yaml.DocumentStartEvent):
            documents += 1
            if documents > 1:
                raise MatrixError(f"{place}: a second document starts here; one file holds one matrix")
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise MatrixError(
                f"{place}: anchors (&) and aliases (*) are not used here",
                hint="Write the value out, or quote it.",
            )
        if tag := getattr(event, "tag", None):
            raise MatrixError(f"{place}: tags ({tag}) are not used here", hint="Quote the value if it is text.")
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
            if depth > MAX_DEPTH:
                raise MatrixError(f"{place}: nested more than {MAX_DEPTH} deep")
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1


def _compose(text: str, name: str) -> Located:
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        located = Located(name=name, data=None, marks={}, keys={}, raw={})
        data = _construct(root, (), loader, located) if root is not None else None
    finally:
        loader.dispose()
    return Located(name=name, data=data, marks=located.marks, keys=located.keys, raw=located.raw)


def _construct(node: yaml.Node, path: Key, loader: yaml.SafeLoader, located: Located) -> Any:
    located.marks[path] = _mark(node)
    if isinstance(node, yaml.MappingNode):
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            place = f"{located.name}:{_mark(key_node).line}:{_mark(key_node).column}"
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag == "tag:yaml.org,2002:merge":
                raise MatrixError(f"{place}: a key must be a plain name")
            if key_node.tag != "tag:yaml.org,2002:str":
                raise MatrixError(
                    f"{place}: key {key_node.value} is read as {_kind(key_node)}, not text",
                    hint=f'Quote it: "{key_node.value}"',
                )
            key = _plain(str(key_node.value), place)
            if key in result:
                first = located.keys[(*path, key)]
                raise MatrixError(f"{place}: key {key!r} stands twice; first on line {first.line}")
            located.keys[(*path, key)] = _mark(key_node)
            result[key] = _construct(value_node, (*path, key), loader, located)
        return result
    if isinstance(node, yaml.SequenceNode):
        return [_construct(item, (*path, index), loader, located) for index, item in enumerate(node.value)]
    place = f"{located.name}:{_mark(node).line}:{_mark(node).column}"
    located.raw[path] = _plain(str(node.value), place)
    try:
        return loader.construct_object(node, deep=True)
    except ValueError as error:  # a date such as 2026-13-45
        shown = located.raw[path][:40]
        raise MatrixError(f"{place}: {shown!r}: {str(error)[:80]}", hint="Quote it if it is text.") from error


def _plain(text: str, place: str) -> str:
    if found := UNPRINTABLE.search(text):
        raise MatrixError(f"{place}: an escape stands for U+{ord(found.group()):04X}, which is not allowed")
    return text


def _mark(node: yaml.Node) -> Mark:
    return Mark(node.start_mark.line + 1, node.start_mark.column + 1)


def _kind(node: yaml.ScalarNode) -> str:
    return {"float": "a number", "int": "a number", "bool": "true/false", "null": "nothing"}.get(
        node.tag.rsplit(":", 1)[-1], "a " + node.tag.rsplit(":", 1)[-1]
    )
