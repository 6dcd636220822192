"""The program cosign: finds it, warns if its version has known vulnerabilities, and runs it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

from builder.common.errors import BuilderWarning, SigningError
from builder.common.text import one_line
from builder.matrix import pins

TIMEOUT_S = 300
RELEASES = "https://github.com/sigstore/cosign/releases"
_WARNING = "WARNING: "
_NUMBER = re.compile(r"(?:[0-9]+:)?v?([0-9]{1,4}(?:\.[0-9]{1,4}){1,3})(?![0-9])", re.ASCII)
# Messages of cosign and of Go's standard library.
_UNREACHABLE = re.compile(
    r"dial tcp|no such host|connection (refused|reset)|deadline exceeded|i/o timeout|unexpected EOF|tls: |x509: "
    r"|status code (401|403|429|5[0-9]{2})|UNAUTHORIZED|DENIED|TOOMANYREQUESTS"
)


class CosignError(SigningError):
    """cosign ended with an error."""


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
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8", errors="replace",
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        return "" if result.returncode else result.stdout
    return ""


@cache
def warn_of_vulnerabilities(path: str) -> None:
    """Warns, once in a process, if the cosign at this path has known vulnerabilities."""
    if (installed := find_cosign()) and installed.danger:
        warnings.warn(installed.danger, BuilderWarning, stacklevel=2)


def run_cosign(*arguments: str) -> str:
    """Runs cosign; returns its output. Raises CosignError if it ends with an error, without the names of keys."""
    path = shutil.which("cosign")
    if not path:
        raise SigningError(
            "the program cosign is not installed", hint=f"Install it from {RELEASES}. See docs/publish.md."
        )
    warn_of_vulnerabilities(path)
    environment = {"COSIGN_PASSWORD": "", **os.environ}  # without it, cosign would prompt for the password of a key
    try:
        result = subprocess.run(
            ["cosign", *arguments],
            env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, encoding="utf-8",
            errors="replace", timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SigningError(f"cosign {arguments[0]}: {type(error).__name__}") from error
    if result.returncode < 0:
        raise SigningError(f"cosign {arguments[0]} was ended by signal {-result.returncode}")
    if result.returncode:
        if _UNREACHABLE.search(result.stderr):
            raise SigningError(
                f"cosign {arguments[0]}: a server does not answer",
                hint="Check the connection to the registry and, without a key, to Sigstore.",
            )
        lines = [line for line in result.stderr.splitlines() if line and not line.startswith(_WARNING)]
        raise CosignError(f"cosign {arguments[0]}: {one_line(lines[0]) if lines else 'failed'}")
    return result.stdout
