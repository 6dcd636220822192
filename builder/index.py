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
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

UV_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL")
CA_VARIABLES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE")
PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "all_proxy")


@dataclass(frozen=True, kw_only=True)
class IndexSettings:
    """`url` is empty when the clients' own default (PyPI) applies; `ca_bundle` likewise.

    `trusted_host` may be reached without a certificate; `proxy` is pip's own, where the environment names none.
    """

    url: str = ""
    ca_bundle: str = ""
    trusted_host: str = ""
    proxy: str = ""

    def for_builds(self) -> dict[str, str]:
        """Variables that make pip and uv use this index inside a build step, where certificates lie elsewhere."""
        variables: dict[str, str] = {}
        if self.url:
            variables |= {"UV_DEFAULT_INDEX": self.url, "PIP_INDEX_URL": self.url}
        if self.trusted_host:
            variables |= {"UV_INSECURE_HOST": self.trusted_host, "PIP_TRUSTED_HOST": self.trusted_host}
        return variables

    def environment(self) -> dict[str, str]:
        """The variables that make both pip and uv on this machine use this index."""
        variables = self.for_builds()
        if self.proxy:
            variables |= {"HTTP_PROXY": self.proxy, "HTTPS_PROXY": self.proxy}
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
    url = url or _from_uv(environ, home) or environ.get("PIP_INDEX_URL", "") or from_pip.get("index-url", "")
    ca_bundle = next((environ[name] for name in CA_VARIABLES if environ.get(name)), "") or from_pip.get("cert", "")
    trusted = environ.get("UV_INSECURE_HOST") or environ.get("PIP_TRUSTED_HOST") or from_pip.get("trusted-host", "")
    has_proxy = any(environ.get(name) for name in PROXY_VARIABLES)
    return IndexSettings(
        url=url.strip(),
        ca_bundle=ca_bundle.strip(),
        trusted_host=" ".join(trusted.split()),
        proxy="" if has_proxy else (environ.get("PIP_PROXY") or from_pip.get("proxy", "")).strip(),
    )


def _from_uv(environ: Mapping[str, str], home: Path) -> str:
    """The default index of uv's configuration files, the user's before the system's."""
    named = environ.get("UV_CONFIG_FILE")
    user = Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "uv/uv.toml"
    for path in [Path(named)] if named else [user, Path("/etc/uv/uv.toml")]:
        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a uv configuration file: {error}") from error
        for entry in settings.get("index", []):
            if entry.get("default") and entry.get("url"):
                return str(entry["url"])
        if url := settings.get("index-url") or settings.get("pip", {}).get("index-url"):
            return str(url)
    return ""


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
