"""Failed requests to a registry: their errors, with a hint and whether a retry may succeed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import requests
from urllib3 import Retry
from urllib3.exceptions import HTTPError, InvalidHeader

from builder.common.errors import NoRegistryError, RegistryError
from builder.common.http import TRANSIENT, Fault, failure_of, failure_sentence, status_text
from builder.common.text import one_line
from builder.registry.auth import login_hint
from builder.registry.transport import FOLDER

LONGEST_BODY = 1024 * 1024  # bytes of an error's body that are read
BLOB_UNKNOWN = "MANIFEST_BLOB_UNKNOWN"  # docker-registry sends DIGEST_INVALID before it
UNREACHABLE_HINT = (
    "Check the registry's name and port and the network, and that the registry is running. Then run this again."
)
RUN_AGAIN = "Run this again: data already in the registry is not sent again."
# Harbor answers 412, Amazon ECR 400 with TAG_INVALID; both name the setting.
IMMUTABLE = re.compile(r"\bimmutable\b|\bPRECONDITION\b|status code 412\b", re.IGNORECASE)
IMMUTABLE_HINT = (
    "The registry lets no one move this tag: make only the stamped tags immutable. "
    'See "Tags and retention" in docs/registries.md.'
)
_NOT_ALLOWED = "The registry does not allow this: see docs/registries.md."
_HINTS = {
    Fault.CERTIFICATE: "Save the certificate of its authority as {certificates}/ca.crt, or set SSL_CERT_FILE.",
    Fault.CLIENT_CERTIFICATE: "Client certificates are not supported: use a proxy that presents one, such as stunnel.",
    Fault.NO_TLS: "To allow plain http, add {registry} to `insecure` in matrix.yaml.",
}
_HINTS_BY_STATUS: dict[int, str] = {
    HTTPStatus.UNAUTHORIZED: "{login}",
    HTTPStatus.FORBIDDEN: "{login}",
    HTTPStatus.METHOD_NOT_ALLOWED: _NOT_ALLOWED,
    HTTPStatus.PRECONDITION_FAILED: IMMUTABLE_HINT,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "Raise the request size limit of the proxy in front of the registry.",
}
_HINTS_BY_CODE = {
    BLOB_UNKNOWN: "If this happens again, look for what the registry lost: crane validate --remote IMAGE",
    "UNSUPPORTED": _NOT_ALLOWED,
}
# Registries send these with 404, also if the login has no access. With 400, they mean an invalid name: no hint then.
_NO_REPOSITORY = ("NAME_UNKNOWN", "NAME_INVALID")
# In words, or as the error number in docker-registry's JSON: ENOSPC, EDQUOT.
_DISK_FULL = re.compile(r'no space left on device|disk quota exceeded|"Err":\s*(?:28|122)\b', re.IGNORECASE)


class RejectedError(RegistryError):
    """A failure that would happen again. `code` is the registry's own error code, if it sent any: the main one."""

    def __init__(self, message: str, *, hint: str = "", status: int = 0, code: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status
        self.code = code


class TransientError(RegistryError):
    """A failure that may not happen again at a retry, after at least `wait` seconds.

    `is_connected`: there was a connection.
    """

    def __init__(self, message: str, *, hint: str = "", wait: float = 0, is_connected: bool = True) -> None:
        super().__init__(message, hint=hint)
        self.wait = wait
        self.is_connected = is_connected


class StoppedError(RegistryError):
    """The caller set the stop event: the request did not fail."""


def error_of_response(
    registry: str, action: str, response: requests.Response, hide: Callable[[str], str]
) -> RegistryError:
    """The error for a response with an unexpected status. `hide` removes secrets from its text."""
    body = b""
    with suppress(HTTPError, OSError):  # the status is enough
        body = response.raw.read(LONGEST_BODY, decode_content=False) or b""
    status, text = response.status_code, hide(body.decode("utf-8", "replace"))
    errors: list[Mapping[str, Any]] = []
    with suppress(ValueError, AttributeError, TypeError, RecursionError):  # a proxy before the registry answers in HTML
        errors = [error for error in json.loads(text).get("errors", ()) if isinstance(error, dict)]
    codes = [str(error.get("code", "")) for error in errors]
    code = BLOB_UNKNOWN if BLOB_UNKNOWN in codes else codes[0] if codes else ""
    words = []
    for error in errors[:3]:
        parts = (error.get("code"), error.get("message"), error.get("detail"))
        words.append(": ".join(part for part in parts if isinstance(part, str) and part))
    detail = one_line("; ".join(filter(None, words)))
    answer = f"answered {status_text(status)}" + (f" ({detail})" if detail else "")
    if status == HTTPStatus.INSUFFICIENT_STORAGE or (status >= 500 and _DISK_FULL.search(text)):
        message = f"{registry}: {action}: the registry's disk is full: {answer}"
        return RejectedError(message, hint="Free space on the registry, then run this again.", status=status)
    message = f"{registry}: {action}: {answer}"
    if status in TRANSIENT:
        wait = 0.0
        with suppress(InvalidHeader, ValueError, OverflowError):  # a number of seconds, or a date
            wait = Retry().parse_retry_after(response.headers.get("Retry-After", ""))
        return TransientError(message, hint=RUN_AGAIN, wait=wait)
    hint = _HINTS_BY_CODE.get(code) or _HINTS_BY_STATUS.get(status, "")
    if IMMUTABLE.search(detail):
        hint = IMMUTABLE_HINT
    elif status == HTTPStatus.NOT_FOUND and code in _NO_REPOSITORY:
        hint = "Create the repository on the registry first. If it exists: {login}"
    return RejectedError(message, hint=hint.format(login=login_hint(registry)), status=status, code=code)


def error_of_exception(registry: str, action: str, error: Exception) -> RegistryError:
    """The error for a request without a response.

    It holds no URL: a URL to which a registry redirected may be signed, and so a credential.
    """
    failure = failure_of(error)
    detail = f" ({failure.detail})" if failure.detail and not failure.fault.is_final else ""
    message = f"{registry}: {action}: {failure_sentence(error, 'the registry')}{detail}"
    if failure.fault.is_final or failure.fault is Fault.OTHER:
        hint = _HINTS.get(failure.fault, "").format(registry=registry, certificates=f"{FOLDER}/{registry}")
        return RejectedError(message, hint=hint)
    if failure.is_unreachable:
        return NoRegistryError(message, hint=UNREACHABLE_HINT)
    return TransientError(message, hint=RUN_AGAIN, is_connected=failure.is_connected)
