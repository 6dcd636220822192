"""Lock files as text: one line for each entry, for readable diffs, and an error for edits by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from builder.common.errors import FileError, LockError
from builder.common.files import write_atomically
from builder.common.validation import message_of

KNOWN_LAYERS = "locks/layers.json"  # not a lock of versions: see builder.layers.known_layers
_Lock = TypeVar("_Lock")
_Key = TypeVar("_Key")


def json_block(opened: str, lines: Sequence[str], closed: str) -> str:
    """A JSON array or object with one line for each entry, one level deep."""
    inner = ",\n  ".join(lines)
    return f"{opened}\n  {inner}\n {closed}" if lines else f"{opened}{closed}"


def read_lock_text(file: Path, hint: str) -> str | None:
    """The text of a lock file; None if there is none. Raises LockError if it cannot be read."""
    try:
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(f"{file.name}: {error}", hint=hint) from error


def validate_lock(adapter: TypeAdapter[_Lock], text: str, name: str, expected: int, hint: str) -> _Lock:
    """A lock of the format `expected` from its text, `name` in messages. Raises LockError if it is damaged.

    Raises FileError if a newer builder wrote it: a damaged lock may be made again, but not this one.
    """
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        try:
            version = json.loads(text).get("format")
        except (ValueError, AttributeError, RecursionError):
            version = None
        if type(version) is int and version != expected:  # a truth value is an int too
            message = f"{name} has lock format {version}; this builder reads format {expected}"
            if version > expected:
                raise FileError(message, hint="A newer builder wrote this file: update this builder.") from error
            raise LockError(message, hint=hint) from error
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "file"
        raise LockError(f"{name} is damaged: {place}: {message_of(first)}", hint=hint) from error


@dataclass(frozen=True, kw_only=True)
class LockFiles(Generic[_Key, _Lock]):
    """One kind of lock: a file in locks/ for each key, which must be as `dump` writes it.

    `path` is the path of the file in a checkout, `hint` what to do about a damaged one, and `faults` the contradictions
    in a lock that was edited.
    """

    adapter: TypeAdapter[_Lock]
    version: int
    path: Callable[[_Key], str]
    hint: Callable[[_Key], str]
    dump: Callable[[_Lock], str]
    faults: Callable[[_Lock, _Key], Iterator[str]]

    def read(self, root: Path, key: _Key) -> _Lock | None:
        """The lock of a key; None if it has none. Raises LockError for a damaged or edited file."""
        text = read_lock_text(root / self.path(key), self.hint(key))
        return None if text is None else self.parse(text, key)

    def find(self, root: Path, key: _Key) -> _Lock | None:
        """The lock of a key; None if it is missing or damaged. Raises FileError for a lock of a newer builder."""
        with suppress(LockError):
            return self.read(root, key)
        return None

    def check(self, root: Path, key: _Key) -> list[str]:
        """A line if the lock of a key is missing, damaged or edited. Raises FileError for a lock of a newer builder."""
        try:
            return [f"{self.path(key)}: missing"] if self.read(root, key) is None else []
        except LockError as error:
            return [str(error)]

    def parse(self, text: str, key: _Key) -> _Lock:
        """The lock in the text of its file. Raises LockError if it is damaged or was edited."""
        name, hint = self.path(key), self.hint(key)
        lock = validate_lock(self.adapter, text, name, self.version, hint)
        if self.dump(lock) != text:
            raise LockError(f"{name} was edited by hand or is incomplete", hint=hint)
        if fault := next(self.faults(lock, key), ""):
            raise LockError(f"{name} was edited by hand: {fault}", hint=hint)
        return lock

    def write(self, root: Path, key: _Key, lock: _Lock) -> bool:
        """Writes a lock; False if the file has this text already."""
        path, text = root / self.path(key), self.dump(lock)
        if path.exists() and path.read_bytes() == text.encode():
            return False
        write_atomically(path, text)
        return True
