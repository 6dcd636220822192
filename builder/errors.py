"""Every error a user can meet, in one tree, each class with its own exit code.

Caught once, in `builder.cli.main`. A message says what is wrong; `hint` says what to do next.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence

FREE_DISK = "Free some: `builder clean`, `docker system df`, `docker builder prune`."


class BuilderError(Exception):
    """Base of all errors that are shown without a traceback."""

    exit_code = 1
    title = "error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(BuilderError):
    """The command line asks for something that does not exist."""

    exit_code = 2
    title = "usage"


class MatrixError(BuilderError):
    """The matrix cannot be read or does not make sense."""

    exit_code = 3
    title = "matrix"


class LockError(BuilderError):
    """A cell cannot be resolved to wheels, or its lock file is damaged."""

    exit_code = 4
    title = "lock"


class UnreachableError(LockError):
    """The index could not be asked, so nothing is known of what it has."""


class StaleError(BuilderError):
    """A generated file (lock, rendered image) is not what its inputs give."""

    exit_code = 5
    title = "out of date"


class EngineError(BuilderError):
    """Docker Engine is missing, went away, or failed in a way that is no fault of the image."""

    exit_code = 6
    title = "engine"


class NoEngineError(EngineError):
    """No Docker Engine answers at all."""


class BuildError(BuilderError):
    """A step of an image's Dockerfile failed, its layers do not fit together, or it is too large."""

    exit_code = 7
    title = "build"


class ImageTestError(BuilderError):
    """An image's tests failed, or did not all run."""

    exit_code = 8
    title = "tests"


class BusyError(BuilderError):
    """Another builder works in this checkout, or with this store."""

    exit_code = 9
    title = "busy"


class DiskError(BuilderError):
    """The disk is full, or too small for what was asked."""

    exit_code = 10
    title = "disk"


class TemplateError(BuilderError):
    """A template is wrong; the message has its file and line."""

    exit_code = 11
    title = "template"


class FileError(BuilderError):
    """A file of the checkout, or a temporary one, cannot be read or written."""

    exit_code = 12
    title = "file"


class FetchError(BuilderError):
    """The index does not serve a wheel of a lock, or serves other bytes than the lock says."""

    exit_code = 13
    title = "wheels"


class RegistryError(BuilderError):
    """A registry did not do what it was asked to, or a tag is not what it has to be."""

    exit_code = 14
    title = "registry"


class VerifyError(BuilderError):
    """An image is not what its history says."""

    exit_code = 15
    title = "verify"


class RefusedError(BuilderError):
    """A combination does not work, or an image does not run on the GPU that is named."""

    exit_code = 16
    title = "refused"


ALL: tuple[type[BuilderError], ...] = (
    BuilderError,
    UsageError,
    MatrixError,
    LockError,
    StaleError,
    EngineError,
    BuildError,
    ImageTestError,
    BusyError,
    DiskError,
    TemplateError,
    FileError,
    FetchError,
    RegistryError,
    VerifyError,
    RefusedError,
)
INTERRUPTED = 130  # 128 + SIGINT, what shells report
TERMINATED = 143  # 128 + SIGTERM


def join(errors: Sequence[BuilderError], what: str = "images failed") -> BuilderError:
    """One error for several, of the first one's kind; `what` follows their number."""
    first = errors[0]
    if len(errors) == 1:
        return first
    parts = [f"{error}{chr(10) + '  -> ' + error.hint if error.hint else ''}" for error in errors]
    return type(first)(f"{len(errors)} {what}\n" + "\n".join(parts))


def of_file(error: OSError) -> BuilderError:
    """An error of the file system in our words: a full disk, or what is wrong with which file."""
    place = f" ({error.filename})" if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskError(f"full{place}", hint=FREE_DISK)
    return FileError(f"{(error.strerror or str(error)).lower()}{place}")
