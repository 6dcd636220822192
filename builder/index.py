"""Which package index this machine uses, read from where pip and uv already have it.

Standard library only: the set-up script runs this file before any package is installed.
uv does not read pip's configuration, so what pip has is handed to uv unless uv has its own.
Only the *main* index is handed on: uv looks a package up in the first index that has it, so
an extra index that shadows a package would silently change what is resolved.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

UV_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL")


@dataclass(frozen=True, kw_only=True)
class IndexSettings:
    """`url` is empty when the clients' own default (PyPI) applies; `ca_bundle` likewise."""

    url: str = ""
    ca_bundle: str = ""

    @property
    def has_credentials(self) -> bool:
        return has_credentials(self.url)

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.url)

    def environment(self) -> dict[str, str]:
        """The variables that make both pip and uv use this index."""
        variables: dict[str, str] = {}
        if self.url:
            variables |= {"UV_DEFAULT_INDEX": self.url, "PIP_INDEX_URL": self.url}
        if self.ca_bundle:
            variables |= {"SSL_CERT_FILE": self.ca_bundle, "PIP_CERT": self.ca_bundle}
        return variables


def has_credentials(url: str) -> bool:
    """Whether an address holds a user name, a password or a token."""
    return "@" in _with_scheme(url).netloc


def is_loopback(url: str) -> bool:
    """Whether an address (`host:port` too) is on this machine's own loopback."""
    host = _with_scheme(url).hostname or ""
    return host in ("localhost", "::1") or bool(re.fullmatch(r"127(\.[0-9]{1,3}){3}", host, re.ASCII))


def _with_scheme(url: str) -> SplitResult:
    try:
        return urlsplit(url if "://" in url else f"//{url}")
    except ValueError:  # not an address
        return SplitResult("", "", "", "", "")


def pip_config_files(environ: Mapping[str, str], home: Path) -> list[Path]:
    """Configuration files in the order in which pip lets later ones override earlier ones.

    Source: pip documentation, "Configuration", "Location" (global, user, PIP_CONFIG_FILE).
    """
    override = environ.get("PIP_CONFIG_FILE")
    if override == os.devnull:
        return []
    everyone = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf")]
    if override and Path(override).is_file():
        return [*everyone, Path(override)]  # then pip does not read the user's
    user = Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip/pip.conf"
    return [*everyone, home / ".pip/pip.conf", user]


def read(environ: Mapping[str, str], home: Path) -> IndexSettings:
    """Settings from the environment, then pip's files; raises ValueError for a file that pip could not read."""
    # pip merges its files section by section; a command's own section counts more than [global].
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}}
    for path in pip_config_files(environ, home):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a pip configuration file: {error}") from error
        for section, found in sections.items():
            if parser.has_section(section):
                found |= {name.replace("_", "-"): value for name, value in parser.items(section)}
    from_pip = sections["global"] | sections["install"]
    url = next((environ[name] for name in UV_INDEX_VARIABLES if environ.get(name)), "")
    url = url or environ.get("PIP_INDEX_URL", "") or from_pip.get("index-url", "")
    ca_bundle = environ.get("SSL_CERT_FILE") or environ.get("PIP_CERT") or from_pip.get("cert", "")
    return IndexSettings(url=url.strip(), ca_bundle=ca_bundle.strip())


def main() -> int:
    """Prints `export NAME=value` lines for the set-up script."""
    try:
        settings = read(os.environ, Path.home())
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for name, value in settings.environment().items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
