"""Settings of the package index, read from the configuration of pip and uv.

Standard library only: the set-up script runs this file before any package is installed.
uv does not read pip's configuration, so the index of pip is passed to uv unless uv has its own.
Only the *main* index is used: uv takes a package from the first index that has it, so an extra index that has a
package of the same name would silently change what is resolved.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

UV_INDEX_VARIABLES = ("UV_DEFAULT_INDEX", "UV_INDEX_URL")
ETC = Path("/etc")
PYTHON_MIRROR = "UV_PYTHON_INSTALL_MIRROR"
CA_VARIABLES = ("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE")
DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, kw_only=True)
class IndexSettings:
    """The settings of a package index. `url` and `ca_bundle` are empty for the defaults of the clients.

    The defaults are PyPI, and the CA certificates of each client. `proxy` is apt's proxy, for archives. `python_mirror`
    has uv's builds of Python; empty for uv's default. `named` are the indexes of matrix.yaml and of additions. Such an
    index has a `name`, and a `folder` if it is a folder of wheels.
    """

    url: str = ""
    ca_bundle: str = ""
    proxy: str = ""
    python_mirror: str = ""
    name: str = ""
    folder: Path | None = None
    named: Mapping[str, IndexSettings] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The index in messages, which never have the address of the default one."""
        return f"the index {self.name}" if self.name else "the index"

    def of(self, name: str) -> IndexSettings:
        """The index of matrix.yaml with this name; the default one without a name. Raises LookupError."""
        return self.named[name] if name else self

    def with_index(self, name: str, url: str, folder: Path | None = None) -> IndexSettings:
        """The same with a named index, which has this machine's certificates and proxy too."""
        other = replace(self, name=name, url=url, folder=folder, named={})
        return replace(self, named={**self.named, name: other})

    def for_builds(self) -> dict[str, str]:
        """Variables for pip and uv inside a build step, which has CA certificates at a path of its own."""
        variables: dict[str, str] = {}
        if self.url:
            variables |= {"UV_DEFAULT_INDEX": self.url, "PIP_INDEX_URL": self.url}
        if self.python_mirror:
            variables[PYTHON_MIRROR] = self.python_mirror
        return variables

    def environment(self) -> dict[str, str]:
        """Variables that make pip and uv on this machine use this index."""
        variables = self.for_builds()
        if self.ca_bundle:
            variables |= {"SSL_CERT_FILE": self.ca_bundle, "PIP_CERT": self.ca_bundle}
        return variables


def host_of(url: str) -> str:
    """The host of an address in lower case, an IPv6 address in brackets; empty for an address without one."""
    host = split(url).hostname or ""
    return f"[{host}]" if ":" in host else host


def origin_of(url: str) -> str:
    """Scheme, host and port of an address, without the default port; empty for an invalid address (RFC 6454)."""
    try:
        parts = urlsplit(url)
        port = "" if parts.port in (None, DEFAULT_PORTS.get(parts.scheme)) else f":{parts.port}"
    except ValueError:
        return ""
    return f"{parts.scheme}://{host_of(url)}{port}" if parts.hostname else ""


def has_credentials(url: str) -> bool:
    """True if an address contains a user name, a password or a token."""
    return "@" in split(url).netloc


def is_loopback(url: str) -> bool:
    """True if an address (also `host:port`) is on this machine's loopback."""
    host = split(url).hostname or ""
    return host in ("localhost", "::1") or bool(re.fullmatch(r"127(\.[0-9]{1,3}){3}", host, re.ASCII))


def split(url: str) -> SplitResult:
    """The parts of an address (also `host:port`); all are empty for an invalid one."""
    try:
        return urlsplit(url if "://" in url else f"//{url}")
    except ValueError:  # not an address
        return SplitResult("", "", "", "", "")


def read_index_settings(environ: Mapping[str, str], home: Path) -> IndexSettings:
    """Settings from the environment, then from files of the user in `home` and of the system in `ETC`.

    Raises ValueError for a file that is not a configuration file.
    """
    user = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    pip = read_pip_options(environ, home)
    own = environ.get("UV_CONFIG_FILE")
    uv_files = [Path(own)] if own else [user / "uv/uv.toml", ETC / "uv/uv.toml"]
    uv_index, uv_mirror = _uv_settings(uv_files)
    url = (_first(environ, *UV_INDEX_VARIABLES) or uv_index or pip.get("index-url", "")).strip()
    try:
        is_address = urlsplit(url).port != 0
    except ValueError:  # its message may contain the address
        is_address = False
    if not is_address:
        raise ValueError("the address of the package index is invalid")
    return IndexSettings(
        url=url,
        ca_bundle=(_first(environ, *CA_VARIABLES) or pip.get("cert", "")).strip(),
        python_mirror=(_first(environ, PYTHON_MIRROR) or uv_mirror).strip(),
    )


def _first(environ: Mapping[str, str], *names: str) -> str:
    """The first of these variables that is not empty; empty if all are."""
    return next((environ[name] for name in names if environ.get(name)), "")


def read_pip_options(environ: Mapping[str, str], home: Path) -> dict[str, str]:
    """The options that `pip install` takes from its environment variables and its configuration files.

    Raises ValueError for a file that is not a configuration file. Source: pip documentation, "Configuration",
    "Location" (global, user, PIP_CONFIG_FILE), "Precedence".
    """
    override = environ.get("PIP_CONFIG_FILE", "")
    user = Path(environ.get("XDG_CONFIG_HOME") or home / ".config")
    files = [ETC / "xdg/pip/pip.conf", ETC / "pip.conf"]  # later ones override earlier ones
    if override == os.devnull:
        files = []
    elif override and Path(override).is_file():
        files.append(Path(override))  # pip then ignores the files of the user
    else:
        files += [home / ".pip/pip.conf", user / "pip/pip.conf"]
    # pip merges its files section by section; the section of a command takes precedence over [global].
    sections: dict[str, dict[str, str]] = {"global": {}, "install": {}}
    for path in files:
        parser = configparser.RawConfigParser()
        try:
            parser.read(path, encoding="utf-8")
        except configparser.ParsingError as error:  # its message has the line, which may have a password
            number = error.lineno if isinstance(error, configparser.MissingSectionHeaderError) else error.errors[0][0]
            raise ValueError(f"{path} is not a pip configuration file: line {number} is invalid") from None
        except (configparser.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a pip configuration file: {error}") from error
        for section, options in sections.items():
            if parser.has_section(section):
                options |= {name.replace("_", "-"): value for name, value in parser.items(section)}
    variables = {"index-url": environ["PIP_INDEX_URL"]} if environ.get("PIP_INDEX_URL") else {}
    return sections["global"] | sections["install"] | variables


def _uv_settings(files: Sequence[Path]) -> tuple[str, str]:
    """The default index and the mirror of Pythons, from the first of uv's configuration files that has one, or "".

    Source: uv documentation, "Settings".
    """
    index = mirror = ""
    for path in files:
        try:
            settings = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not a uv configuration file: {error}") from error
        defaults = [entry["url"] for entry in settings.get("index", []) if entry.get("default") and entry.get("url")]
        defaults += [settings.get("index-url"), settings.get("pip", {}).get("index-url")]
        index = index or str(next(filter(None, defaults), ""))
        mirror = mirror or str(settings.get("python-install-mirror", ""))
    return index, mirror


def main() -> int:
    """Prints `export NAME=value` lines for the set-up script."""
    try:
        settings = read_index_settings(os.environ, Path.home())
    except ValueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    for name, value in settings.environment().items():
        sys.stdout.write(f"export {name}={shlex.quote(value)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
