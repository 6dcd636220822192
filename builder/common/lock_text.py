"""Lock files as text: one line for each entry, for readable diffs, and an error for edits by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from builder.common.errors import FileError, LockError
from builder.common.validation import message_of

KNOWN_LAYERS = "locks/layers.json"  # not a lock of versions: see builder.layers.known_layers
_Lock = TypeVar("_Lock")


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
