"""Which package index this machine uses, read from where pip and uv already have it.

Standard library only: the set-up script runs this file before any package is installed.
uv does not read pip's configuration, so what pip has is handed to uv unless uv has its own.
Only the *main* index is handed on: uv looks a package up in the first index that has it, so
an extra index that shadows a package would silently change what is resolved.
"""

from __future__ import annotations

import configparser
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

UV_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL")


@dataclass(frozen=True, kw_only=True)
class IndexSettings:
    """`url` is empty when the clients' own default (PyPI) applies; `ca_bundle` likewise."""

    url: str = ""
    ca_bundle: str = ""

    @property
    def has_credentials(self) -> bool:
        return "@" in urlsplit(self.url).netloc

    @property
    def is_loopback(self) -> bool:
        host = urlsplit(self.url).hostname or ""
        return host in ("localhost", "::1") or host.startswith("127.")

    def environment(self) -> dict[str, str]:
        """The variables that make both pip and uv use this index."""
        variables: dict[str, str] = {}
        if self.url:
            variables |= {"UV_DEFAULT_INDEX": self.url, "PIP_INDEX_URL": self.url}
        if self.ca_bundle:
            variables |= {"SSL_CERT_FILE": self.ca_bundle, "PIP_CERT": self.ca_bundle}
        return variables


def pip_config_files(environ: Mapping[str, str], home: Path) -> list[Path]:
    """Configuration files in the order in which pip lets later ones override earlier ones.

    Source: pip documentation, "Configuration", "Location" (global, user, PIP_CONFIG_FILE).
    """
    override = environ.get("PIP_CONFIG_FILE")
    if override == os.devnull:
        return []
    files = [Path("/etc/xdg/pip/pip.conf"), Path("/etc/pip.conf"), home / ".pip/pip.conf"]
    files.append(Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip/pip.conf")
    if override:
        files.append(Path(override))
    return files


def read(environ: Mapping[str, str], home: Path) -> IndexSettings:
    """Settings from the environment, then pip's files; raises ValueError for a file that pip could not read."""
    from_pip: dict[str, str] = {}
    for path in pip_config_files(environ, home):
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except (configparser.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a pip configuration file: {error}") from error
        for section in ("global", "install"):
            if parser.has_section(section):
                from_pip |= parser.items(section)
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
