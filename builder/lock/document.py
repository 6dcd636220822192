"""Lock files as text: one line for each entry, for readable diffs, and an error for whatever was edited by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from builder.common.errors import LockError

KNOWN_LAYERS = "locks/layers.json"  # not a lock of versions: see builder.layers.known_layers
_Lock = TypeVar("_Lock")


def block(opened: str, lines: Sequence[str], closed: str) -> str:
    """A JSON array or object with one line for each entry, one level deep."""
    inner = ",\n  ".join(lines)
    return f"{opened}\n  {inner}\n {closed}" if lines else f"{opened}{closed}"


def read_text(file: Path, hint: str) -> str | None:
    """The text of a lock file; None if there is none. Raises LockError if it cannot be read."""
    try:
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise LockError(f"{file.name}: {error}", hint=hint) from error


def validate(adapter: TypeAdapter[_Lock], text: str, name: str, expected: int, hint: str) -> _Lock:
    """A lock of the format `expected` from its text, `name` in messages. Raises LockError."""
    try:
        return adapter.validate_json(text)
    except ValidationError as error:
        try:
            version = json.loads(text).get("format")
        except (ValueError, AttributeError, RecursionError):
            version = None
        if version not in (None, expected):
            raise LockError(
                f"{name} has lock format {version}; this builder reads format {expected}", hint=hint
            ) from error
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "file"
        raise LockError(f"{name} is damaged: {place}: {first['msg']}", hint=hint) from error
