"""Runs the program cosign."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from builder.common.errors import SigningError
from builder.common.text import one_line
from builder.registry.failures import IMMUTABLE, IMMUTABLE_HINT, RUN_AGAIN, TransientError

TIMEOUT_S = 300
RELEASES = "https://github.com/sigstore/cosign/releases"
# Messages of cosign, its client for registries (go-containerregistry) and Go's standard library. A failed request has
# its method and URL: `GET https://...: DENIED: ...`, `Get "https://...": EOF`.
_FAILED_REQUEST = re.compile(
    r"\b(GET|HEAD|PUT|POST|PATCH|DELETE|Get|Head|Put|Post|Patch|Delete) \"?https?://"
    r"|dial tcp|no such host|connection (refused|reset)|deadline exceeded|i/o timeout|unexpected EOF|tls: "
)
# After the URL, cosign prints the registry's error code or, without one, the status.
_TRANSIENT = re.compile(
    r": (TOOMANYREQUESTS|UNAVAILABLE)\b|\bunexpected status code (408|425|429|50[02-46]|5[1-9]\d)\b"
    r"|\bEOF\b|connection reset|deadline exceeded|i/o timeout|TLS handshake timeout"
)
_DENIED = re.compile(r": (UNAUTHORIZED|DENIED)\b|: unexpected status code 40[13]\b")
_REPETITION = "\nerror during command execution: "
_SUBJECT = re.compile(r"^signing \S+: ")  # a long name
_QUERY = re.compile(r"\?[^\s\"]*[^\s\":]")  # of a URL: that of a signed URL is a credential


class CosignError(SigningError):
    """An error of cosign that is not about a server. Of `verify`: there is no such signature."""


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8",
        errors="replace", timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def run_cosign(*arguments: str) -> str:
    """Runs cosign; returns its output. Raises SigningError with its error, in which KEY stands for the key.

    It is a CosignError unless a request to a server, such as the registry, failed. Raises TransientError if the request
    may succeed at a later attempt.
    """
    if not shutil.which("cosign"):
        raise SigningError(
            "the program cosign is not installed", hint=f"Install it from {RELEASES}. See docs/publish.md."
        )
    environment = {"COSIGN_PASSWORD": "", **os.environ}  # without it, cosign would prompt for the password of a key
    try:
        result = _run(["cosign", *arguments], environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SigningError(f"cosign {arguments[0]}: {type(error).__name__}") from error
    if result.returncode < 0:
        raise SigningError(f"cosign {arguments[0]} was ended by signal {-result.returncode}")
    if result.returncode:
        reason = _error(result.stderr)
        for key in (word.removeprefix("--key=") for word in arguments if word.startswith("--key=")):
            reason = reason.replace(key, "KEY")
        message = f"cosign {arguments[0]}: {one_line(reason)}"
        if not _FAILED_REQUEST.search(reason):
            hint = "Set COSIGN_PASSWORD to the password of the key." if "decryption failed" in reason else ""
            raise CosignError(message, hint=hint)
        if _TRANSIENT.search(reason):
            raise TransientError(message, hint=RUN_AGAIN)
        if _DENIED.search(reason):
            hint = "Run `docker login` for this registry as a user with access, also to write if the command signs."
        elif IMMUTABLE.search(reason):
            hint = IMMUTABLE_HINT
        else:
            hint = "Check the connection to the registry and, without a key, to Sigstore. Then run this again."
        raise SigningError(message, hint=hint)
    return result.stdout


def _error(stderr: str) -> str:
    """The error in the output of cosign, without progress, warnings, and the repetition of the error."""
    _, _, error = f"\n{stderr.partition(_REPETITION)[0]}".rpartition("\nError: ")
    return _QUERY.sub("", _SUBJECT.sub("", error.strip())) or "failed"
