"""Messages between the members: one JSON object per line."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

Message = dict[str, Any]
# Whoever sends a longer line is no member.
LONGEST_LINE = 4 * 2**20


class Lost(Exception):
    """The other side is gone, or is no member."""


class Wire:
    """A connection that sends and receives messages, each within a time."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._read = b""

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: Message) -> None:
        try:
            self._connection.settimeout(10)
            self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise Lost(str(error)) from error

    def receive(self, seconds: float) -> Message | None:
        """The next message; None if there is none in that time. Raises Lost."""
        deadline = time.monotonic() + seconds
        while True:
            line, found, rest = self._read.partition(b"\n")
            if found:
                self._read = rest
                return _parsed(line)
            if len(self._read) > LONGEST_LINE:
                raise Lost("sent no message but noise")
            left = deadline - time.monotonic()
            if left <= 0 and seconds > 0:
                return None
            try:
                self._connection.settimeout(max(left, 0.001))
                more = self._connection.recv(65536)
            except (BlockingIOError, TimeoutError, socket.timeout):  # noqa: UP041  (two things up to Python 3.9)
                return None
            except OSError as error:
                raise Lost(str(error)) from error
            if not more:
                raise Lost("the connection was closed")
            self._read += more

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.close()


def _parsed(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except ValueError as error:
        raise Lost("sent no message but noise") from error
    if not isinstance(message, dict):
        raise Lost("sent no message but noise")
    return message
