"""Messages between the members: one JSON object per line."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from typing import Any

Message = dict[str, Any]
# A peer that sends a longer line is not a member.
LONGEST_LINE = 4 * 2**20


class Lost(Exception):
    """The connection is closed, or the peer is not a member."""


class Wire:
    """A connection that sends and receives messages, with timeouts."""

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
        """The next message; None if there is none within `seconds`. Raises Lost."""
        deadline = time.monotonic() + seconds
        while True:
            line, newline, rest = self._read.partition(b"\n")
            if newline:
                self._read = rest
                return _parsed(line)
            if len(self._read) > LONGEST_LINE:
                raise Lost("invalid message")
            left = deadline - time.monotonic()
            if left <= 0 and seconds > 0:
                return None
            try:
                self._connection.settimeout(max(left, 0.001))
                data = self._connection.recv(65536)
            except (BlockingIOError, TimeoutError, socket.timeout):  # noqa: UP041  (different classes up to Python 3.9)
                return None
            except OSError as error:
                raise Lost(str(error)) from error
            if not data:
                raise Lost("the connection was closed")
            self._read += data

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.close()


def _parsed(line: bytes) -> Message:
    try:
        message = json.loads(line)
    except ValueError as error:
        raise Lost("invalid message") from error
    if not isinstance(message, dict):
        raise Lost("invalid message")
    return message
