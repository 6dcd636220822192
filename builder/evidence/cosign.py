"""The program cosign: finds it, warns if its version has known vulnerabilities, and runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from builder.common.errors import BuilderWarning, SigningError
from builder.common.text import one_line
from builder.matrix import pins

TIMEOUT_S = 300
RELEASES = "https://github.com/sigstore/cosign/releases"
_NUMBER = re.compile(r"(?:[0-9]+:)?v?([0-9]{1,4}(?:\.[0-9]{1,4}){1,3})(?![0-9])", re.ASCII)
# Messages of cosign, its client for registries (go-containerregistry) and Go's standard library. A failed request has
# its method and URL: `GET https://...: DENIED: ...`, `Get "https://...": EOF`.
_FAILED_REQUEST = re.compile(
    r"\b(GET|HEAD|PUT|POST|PATCH|DELETE|Get|Head|Put|Post|Patch|Delete) \"?https?://"
    r"|dial tcp|no such host|connection (refused|reset)|deadline exceeded|i/o timeout|unexpected EOF|tls: "
)
_DENIED = re.compile(r": (UNAUTHORIZED|DENIED)\b|: unexpected status code 40[13]\b")
_REPETITION = "\nerror during command execution: "
_SUBJECT = re.compile(r"^signing \S+: ")  # a long name
_QUERY = re.compile(r"\?[^\s\"]*[^\s\":]")  # of a URL: that of a signed URL is a credential


class CosignError(SigningError):
    """An error of cosign that is not about a server. Of `verify`: there is no such signature."""


@dataclass(frozen=True, kw_only=True)
class Cosign:
    """An installed cosign. `version` is its release (`2.5.0`), empty if unknown; `package` that of Debian's package."""

    path: str
    version: str = ""
    package: str = ""

    @property
    def name(self) -> str:
        """For messages: `cosign 2.5.0 (Debian's 2.5.0-2)`."""
        package = f" (Debian's {self.package})" if self.package else ""
        return f"cosign {self.version or 'of an unknown version'}{package}"

    @property
    def danger(self) -> str:
        """Its known vulnerabilities, and what to install; empty if it has none, or if its version is unknown."""
        known = pins.load_pins()
        if not self.version or not (listed := known.vulnerabilities("cosign", self.version)):
            return ""
        # Debian may fix it without a new release.
        check = " See the changelog of the package: Debian may have fixed them there." if "+deb" in self.package else ""
        return (
            f"{self.name} has known vulnerabilities: {pins.describe(listed)}\n"
            f"  -> Install cosign {', or '.join(known.safe_releases('cosign'))} or newer: {RELEASES}{check}"
        )


def find_cosign() -> Cosign | None:
    """The cosign on PATH; None if there is none."""
    if not (path := shutil.which("cosign")):
        return None
    with suppress(ValueError, AttributeError, TypeError):
        if match := _NUMBER.match(str(json.loads(_output("cosign", "version", "--json")).get("gitVersion"))):
            return Cosign(path=path, version=match[1])
    # Debian's cosign prints `devel` as its version.
    owner = _output("dpkg-query", "--search", os.path.realpath(path)).partition(":")[0]
    package = _output("dpkg-query", "--show", "--showformat=${Version}", owner).strip() if owner else ""
    match = _NUMBER.match(package)
    return Cosign(path=path, version=match[1] if match else "", package=package if match else "")


def _output(*command: str) -> str:
    """The output of a program; empty if it fails or does not exist."""
    with suppress(OSError, subprocess.TimeoutExpired):
        result = _run(command)
        return "" if result.returncode else result.stdout
    return ""


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8",
        errors="replace", timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


@cache
def warn_of_vulnerabilities(path: str) -> None:
    """Warns, once in a process, if the cosign at this path has known vulnerabilities."""
    if (installed := find_cosign()) and installed.danger:
        warnings.warn(installed.danger, BuilderWarning, stacklevel=2)


def run_cosign(*arguments: str) -> str:
    """Runs cosign; returns its output. Raises SigningError with its error, in which KEY stands for the key.

    It is a CosignError unless a request to a server failed, such as the registry.
    """
    path = shutil.which("cosign")
    if not path:
        raise SigningError(
            "the program cosign is not installed", hint=f"Install it from {RELEASES}. See docs/publish.md."
        )
    warn_of_vulnerabilities(path)
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
        if _DENIED.search(reason):
            hint = "Run `docker login` for this registry as a user with access, also to write if the command signs."
        else:
            hint = "Check the connection to the registry and, without a key, to Sigstore. Then run this again."
        raise SigningError(message, hint=hint)
    return result.stdout


def _error(stderr: str) -> str:
    """The error in the output of cosign, without progress, warnings, and the repetition of the error."""
    _, _, error = f"\n{stderr.partition(_REPETITION)[0]}".rpartition("\nError: ")
    return _QUERY.sub("", _SUBJECT.sub("", error.strip())) or "failed"
