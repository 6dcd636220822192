"""A YAML reader that refuses input that is rarely intended, and keeps the place of every value.

Refused: duplicate keys, anchors and aliases, explicit tags, several documents, deep nesting, control and bidirectional
characters, files over a megabyte. Built on PyYAML's SafeLoader. Numbers stay numbers (an unquoted 3.10 is the float
3.1), and `Located.typed` has the text as typed, so that an error can show both.
"""

from __future__ import annotations

import re
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from yaml.composer import Composer
from yaml.reader import Reader

from builder.common.errors import MatrixError

MAX_BYTES = 1_000_000
MAX_DEPTH = 12  # PyYAML recurses: input with deeper nesting could exhaust Python's stack
# Invisible characters that change how a line is displayed (Unicode TR36 and CVE-2021-42574).
_HIDDEN = "\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff"
_FORBIDDEN = re.compile(f"[{_HIDDEN}]|{Reader.NON_PRINTABLE.pattern}")
# Characters that no value may contain, not even as an escape such as "\\u202e" or "\\0".
_UNPRINTABLE = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff{_HIDDEN}]")
_KINDS = {"float": "a number", "int": "a number", "bool": "true/false", "null": "null"}

Key = tuple[str | int, ...]


class Position(NamedTuple):
    """The positions of a value and of its key, as `file:line:column`, and the text of the value, if it is a scalar.

    An item of a list has no key: both positions are its own.
    """

    value: str
    key: str
    typed: str


@dataclass(frozen=True)
class Located:
    """Parsed data, with the place of every value by its path."""

    name: str
    data: Any
    places: MutableMapping[Key, Position] = field(repr=False)

    def where(self, path: Key, *, key: bool = False) -> str:
        """`file:line:column` of the value (or the key) at `path`, or of its nearest parent."""
        if key and path in self.places:
            return self.places[path].key
        while path and path not in self.places:
            path = path[:-1]
        return self.places[path].value if path in self.places else f"{self.name}:1:1"

    def typed(self, path: Key) -> str:
        """The text as typed of the value at `path`; empty if there is none."""
        return self.places[path].typed if path in self.places else ""


def load_yaml(path: Path, name: str = "") -> Located:
    """Reads `path`, which messages call `name` (default: its file name).

    Raises MatrixError with file, line, column and what to do.
    """
    try:
        blob = path.read_bytes()
    except OSError as error:
        raise MatrixError(f"{name or path.name}: {error.strerror or error}") from error
    return parse_yaml(blob, name or path.name)


def parse_yaml(blob: bytes, name: str) -> Located:
    """Parses the contents of the file `name`; see `load_yaml`."""
    if len(blob) > MAX_BYTES:
        raise MatrixError(f"{name}: {len(blob)} bytes, more than the {MAX_BYTES} allowed")
    try:
        text = blob.decode("utf-8")
    except UnicodeDecodeError as error:
        line = blob[: error.start].count(b"\n") + 1
        raise MatrixError(f"{name}:{line}: not UTF-8 (byte {blob[error.start]:#04x})") from error
    if match := _FORBIDDEN.search(text):
        before = text[: match.start()]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise MatrixError(
            f"{name}:{line}:{column}: character U+{ord(match.group()):04X} is not allowed",
            hint="Delete it. It may be invisible, and change how the line is displayed.",
        )
    loader = _StrictLoader(text, name)
    try:
        root = loader.get_single_node()
        return Located(name, loader.data_of(root, ()) if root else None, loader.places)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        problem = ", ".join(filter(None, (error.context, error.problem)))
        raise MatrixError(f"{_place(name, mark) if mark else name}: invalid YAML: {problem}") from error
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        raise MatrixError(f"{name}: invalid YAML: {error}") from error


class _StrictLoader(Composer, yaml.CSafeLoader):
    """Refuses deep nesting, anchors, aliases and explicit tags while it reads, before it recurses.

    LibYAML reads the events, five times as fast as PyYAML's own parser.
    """

    def __init__(self, text: str, name: str) -> None:
        yaml.CSafeLoader.__init__(self, text)
        self.anchors = {}
        self._file = name
        self._depth = 0
        self.places: dict[Key, Position] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event: Any = self.peek_event()
        place = _place(self._file, event.start_mark)
        if isinstance(event, yaml.AliasEvent) or event.anchor:
            raise MatrixError(
                f"{place}: anchors (&) and aliases (*) are not supported", hint="Write the value out, or quote it."
            )
        if event.tag:
            raise MatrixError(f"{place}: tags ({event.tag}) are not supported", hint="Quote the value if it is text.")
        self._depth += isinstance(event, yaml.CollectionStartEvent)
        if self._depth > MAX_DEPTH:
            raise MatrixError(f"{place}: nested more than {MAX_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self._depth -= isinstance(event, yaml.CollectionStartEvent)
        return node

    def data_of(self, node: yaml.Node, path: Key, key_place: str = "") -> Any:
        """The data of a node; keeps its place and those of all nodes in it."""
        place = _place(self._file, node.start_mark)
        typed = _printable(str(node.value), place) if isinstance(node, yaml.ScalarNode) else ""
        self.places[path] = Position(place, key_place or place, typed)
        if isinstance(node, yaml.MappingNode):
            mapping: dict[str, Any] = {}
            for key_node, value_node in node.value:
                place = _place(self._file, key_node.start_mark)
                kind = key_node.tag.rsplit(":", 1)[-1]
                if not isinstance(key_node, yaml.ScalarNode) or kind == "merge":
                    raise MatrixError(f"{place}: a key must be a plain name")
                if kind != "str":
                    raise MatrixError(
                        f"{place}: key {key_node.value} is read as {_KINDS.get(kind, f'a {kind}')}, not text",
                        hint=f'Quote it: "{key_node.value}"',
                    )
                key = _printable(str(key_node.value), place)
                if key in mapping:
                    raise MatrixError(f"{place}: duplicate key {key!r}; first at {self.places[*path, key].key}")
                mapping[key] = self.data_of(value_node, (*path, key), place)
            return mapping
        if isinstance(node, yaml.SequenceNode):
            items = []
            for index, item in enumerate(node.value):
                items.append(self.data_of(item, (*path, index)))
                if isinstance(item, yaml.ScalarNode):  # a list of names may stand for a mapping, with names as keys
                    self.places[*path, item.value] = self.places[*path, index]
            return items
        try:
            return self.construct_object(node, deep=True)
        except ValueError as error:  # a date such as 2026-13-45
            raise MatrixError(f"{place}: {typed[:40]!r}: {str(error)[:80]}", hint="Quote it if it is text.") from error


def _printable(text: str, place: str) -> str:
    if match := _UNPRINTABLE.search(text):
        raise MatrixError(f"{place}: escaped character U+{ord(match.group()):04X} is not allowed")
    return text


def _place(file: str, mark: Any) -> str:
    """`file:line:column` of a mark of PyYAML, which counts from 0."""
    return f"{file}:{mark.line + 1}:{mark.column + 1}"
