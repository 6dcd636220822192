"""The body of an upload: a file that is read while it is sent."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from builder.common.errors import FileError, of_file

PIECE = 64 * 1024  # one write to a connection, which must complete within `connect_s`


@dataclass(frozen=True, kw_only=True)
class FileBody:
    """A file as the body of a request. `at` is called with the position reached."""

    file: BinaryIO
    size: int
    at: Callable[[int], None]

    def __len__(self) -> int:
        return self.size

    def __iter__(self) -> Iterator[bytes]:
        position = 0
        while position < self.size:
            try:
                piece = os.pread(self.file.fileno(), min(PIECE, self.size - position), position)
            except OSError as error:
                error.filename = self.file.name
                raise of_file(error) from error
            if not piece:
                raise FileError(f"file was truncated during the upload ({self.file.name})")
            position += len(piece)
            yield piece
            self.at(position)
