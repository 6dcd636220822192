"""Every error that is shown to users, in one tree. Each class has its own exit code.

Caught once, in `builder.cli.main`. A message says what is wrong; `hint` says what to do next.
"""

from __future__ import annotations

import difflib
import errno
import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

_Input = TypeVar("_Input")
_Output = TypeVar("_Output")
FREE_DISK = "Free disk space: `docker image prune`, `docker system df`, `docker builder prune`."
FREE_STORE = "`builder gc` removes what no image uses; `builder gc --forget NAME` removes images too."


class BuilderError(Exception):
    """Base of all errors that are shown without a traceback."""

    exit_code = 1
    title = "error"

    def __init_subclass__(cls, exit_code: int = 0, title: str = "") -> None:
        """A new kind of error has a title and an exit code; any other subclass inherits both from its base."""
        if exit_code:
            cls.exit_code, cls.title = exit_code, title

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(BuilderError, exit_code=2, title="usage"):
    """The command line is invalid, or something that it needs is missing."""


class MatrixError(BuilderError, exit_code=3, title="matrix"):
    """The matrix cannot be read or is invalid."""


class LockError(BuilderError, exit_code=4, title="lock"):
    """A cell does not resolve to wheels and packages, or a lock is damaged."""


class StaleError(BuilderError, exit_code=5, title="out of date"):
    """A generated file (lock, rendered image) does not match its inputs."""


class EngineError(BuilderError, exit_code=6, title="engine"):
    """Docker Engine is missing, stopped, or failed for its own reasons."""


class NoEngineError(EngineError):
    """Docker Engine cannot be reached."""


class BuildError(BuilderError, exit_code=7, title="build"):
    """An image cannot be built from its layers or Dockerfile, or is too large."""


class ImageTestError(BuilderError, exit_code=8, title="tests"):
    """An image's tests failed, or did not all run."""


class BusyError(BuilderError, exit_code=9, title="busy"):
    """Another builder is using this checkout or this store."""


class DiskError(BuilderError, exit_code=10, title="disk"):
    """The disk is full, or too small for the command."""


class TemplateError(BuilderError, exit_code=11, title="template"):
    """A template is invalid; the message has its file and line."""


class FileError(BuilderError, exit_code=12, title="file"):
    """A file of the checkout or the store is damaged, unreadable or read-only."""


class DamagedError(FileError):
    """The blob `blob` of the store is missing, or its bytes do not match its digest."""

    def __init__(self, message: str, *, hint: str = "", blob: str = "") -> None:
        super().__init__(message, hint=hint)
        self.blob = blob


class FetchError(BuilderError, exit_code=13, title="download"):
    """An index does not respond, or a locked file is missing or different."""


class RegistryError(BuilderError, exit_code=14, title="registry"):
    """A request to a registry failed, or a tag moved meanwhile."""


class NoRegistryError(RegistryError):
    """The registry cannot be reached, so other requests to it would fail too."""


class VerifyError(BuilderError, exit_code=15, title="verify"):
    """A check of an image, its attachments or the registry failed."""


class RefusedError(BuilderError, exit_code=16, title="refused"):
    """A combination or GPU does not fit, a scan fails, or support has ended."""


class SigningError(BuilderError, exit_code=17, title="signing"):
    """A signature cannot be made or checked."""


class IncompleteError(BuilderError, exit_code=18, title="incomplete"):
    """Part of the work failed, and the rest is done."""


class BuilderWarning(UserWarning):
    """A danger that does not stop the command. Shown once, without the line of code: see `builder.cli`."""


class Terminated(BaseException):
    """The process received SIGTERM."""


ALL: tuple[type[BuilderError], ...] = (BuilderError, *BuilderError.__subclasses__())
INTERRUPTED = 130  # 128 + SIGINT, what shells report
TERMINATED = 143  # 128 + SIGTERM
SHOWN_CELLS = 5  # ids in a hint
CHOOSE_AGAIN = "Choose another version: builder lock --upgrade-package PACKAGE CELLS && builder render"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def join(errors: Sequence[BuilderError], what: str = "images failed") -> BuilderError:
    """One error for several, of the class of the first; `what` follows their number. A shared hint is shown once."""
    first = errors[0]
    if len(errors) == 1:
        return first
    shared = first.hint if all(error.hint == first.hint for error in errors) else ""
    parts = [f"{error}\n  -> {error.hint}" if error.hint and not shared else str(error) for error in errors]
    return type(first)("\n".join([f"{len(errors)} {what}", *parts]), hint=shared)


def collect(
    function: Callable[[_Input], _Output], inputs: Iterable[_Input], what: str = "images failed"
) -> list[_Output]:
    """Calls the function for each input and returns the results. At the end, raises one error for all, as `join`.

    Stops at the first registry that cannot be reached.
    """
    results: list[_Output] = []
    failures: list[BuilderError] = []
    for item in inputs:
        try:
            results.append(function(item))
        except BuilderError as error:
            failures.append(error)
            if isinstance(error, NoRegistryError):
                break
    if failures:
        raise join(failures, what)
    return results


def causes(error: BaseException) -> list[BaseException]:
    """An error and those in it, the outermost first: requests and urllib3 wrap the errors of Python and OpenSSL."""
    chain: list[BaseException] = []
    inner: BaseException | None = error
    while inner is not None and inner not in chain:
        chain.append(inner)
        wrapped = [cause for cause in (getattr(inner, "reason", None), *inner.args) if isinstance(cause, BaseException)]
        inner = wrapped[-1] if wrapped else inner.__cause__ or inner.__context__
    return chain


def of_file(error: OSError) -> BuilderError:
    """The error to show for an error of the file system: DiskError for a full disk, else FileError."""
    place = f" ({error.filename})" if error.filename else ""
    if error.errno in _DISK_FULL:
        return DiskError(f"full{place}", hint=FREE_DISK)
    return FileError(f"{(error.strerror or str(error)).lower()}{place}")


def store_error(error: OSError, root: Path) -> Exception:
    """The error to raise if writing to the store failed: DiskError for a full disk, else `error` itself."""
    if error.errno in _DISK_FULL:
        return DiskError(f"the disk of the store is full ({root})", hint=FREE_STORE)
    return error


def for_cells(command: str, ids: Sequence[str]) -> str:
    """A command for a hint, with ids or patterns of cells.

    Leaves out a list of more than SHOWN_CELLS: without ids, the command applies to all cells.
    """
    return " ".join([command, *(map(shlex.quote, ids) if len(ids) <= SHOWN_CELLS else ())])


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean ...?` with the nearest known name, or the known names if they are few; may be empty."""
    names = list(known)
    if close := difflib.get_close_matches(word, names, n=1, cutoff=0.5):
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(names)}" if 0 < len(names) <= 12 else ""
