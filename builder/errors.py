"""Every error a user can meet, in one tree, each class with its own exit code.

Caught once, in `builder.cli.main`. A message says what is wrong; `hint` says what to do next.
"""

from __future__ import annotations


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


class StaleError(BuilderError):
    """A generated file (lock, rendered image) is not what its inputs give."""

    exit_code = 5
    title = "out of date"


class EngineError(BuilderError):
    """Docker Engine is missing, went away, or failed in a way that is no fault of the image."""

    exit_code = 6
    title = "engine"


class BuildError(BuilderError):
    """A step of an image's Dockerfile failed."""

    exit_code = 7
    title = "build"


class ImageTestError(BuilderError):
    """An image's tests failed, or did not all run."""

    exit_code = 8
    title = "tests"


class BusyError(BuilderError):
    """Another builder works in this checkout."""

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
)
INTERRUPTED = 130  # 128 + SIGINT, what shells report
TERMINATED = 143  # 128 + SIGTERM
