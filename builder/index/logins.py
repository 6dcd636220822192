"""The logins of the indexes that matrix.yaml names. They are read at the first use, and kept in memory only."""

from __future__ import annotations

import netrc
import os
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from shlex import quote
from urllib.parse import unquote, urlsplit

from builder.common.errors import UsageError
from builder.index.settings import IndexSettings, host_of, is_loopback, origin_of, read_pip_options

TOKEN_USER = "__token__"  # noqa: S105  the user of a token; the same on PyPI, GitLab, Artifactory and others
KEYRING_S = 60  # a keyring may prompt for its own password
DOCS = "docs/matrix.md, Package indexes"


_Reader = Callable[[IndexSettings, Mapping[str, str]], tuple[str, str] | None]


def variables(name: str) -> tuple[str, str]:
    """The environment variables of an index's user and password. The same as those of uv."""
    prefix = f"UV_INDEX_{name.upper().replace('-', '_')}"
    return f"{prefix}_USERNAME", f"{prefix}_PASSWORD"


def how_to_give(settings: IndexSettings) -> str:
    """The instructions for giving the login of an index."""
    user, password = variables(settings.name)
    places = {
        "environment": f"set {user} and {password} (for a token, only {password})",
        "netrc": f"add `machine {host_of(settings.url)} login USER password PASSWORD` to ~/.netrc",
        "pip": "add the address with the login to pip's `extra-index-url`",
        "keyring": f"run `keyring set {quote(settings.url)} {os.environ.get(user) or TOKEN_USER}`",
    }
    if settings.login_from:
        place = places[settings.login_from]
        return f"{place[0].upper()}{place[1:]}. See {DOCS}."
    return f"Give a login: {places['environment']}, or {places['netrc']}. See {DOCS}."


def find_login(
    settings: IndexSettings,
    environ: Mapping[str, str] | None = None,
    run: Callable[..., subprocess.CompletedProcess[bytes]] = subprocess.run,
) -> tuple[str, str] | None:
    """User and password of a named index; None if it has none. `run` runs the program `keyring`.

    Raises UsageError for a login that matrix.yaml expects and that is missing, and for one that would be sent
    unencrypted.
    """
    if settings.folder:
        return None
    environ = os.environ if environ is None else environ
    # A keyring is a program of its own, which may wait for its user: it runs only where matrix.yaml names it.
    readers: dict[str, _Reader] = {
        "environment": _of_environment,
        "netrc": _of_netrc,
        "pip": _of_pip,
        "keyring": partial(_of_keyring, run),
    }
    order = [settings.login_from] if settings.login_from else ["environment", "netrc", "pip"]
    for source in order:
        if login := readers[source](settings, environ):
            if not settings.url.startswith("https://") and not is_loopback(settings.url):
                raise UsageError(
                    f"the login of the index {settings.name} would be sent unencrypted",
                    hint="Use its address with https://, in `indexes` of matrix.yaml or with --index.",
                )
            return login
    if settings.login_from:
        raise UsageError(
            f"the index {settings.name} has no login: matrix.yaml takes it from {settings.login_from}",
            hint=how_to_give(settings),
        )
    return None


def netrc_of(indexes: Iterable[IndexSettings]) -> str:
    """The logins of indexes as a netrc file, for uv in a build step; empty if there are none. Raises UsageError."""
    lines = {}
    for settings in indexes:
        if login := find_login(settings):
            # uv reads a backslash and a quotation mark in netrc otherwise than Python does.
            if not all(re.fullmatch(r"[!#-\[\]-~]+", word) for word in login):
                raise UsageError(
                    f"the login of the index {settings.name} has characters that a netrc file cannot have",
                    hint="Build without --method dockerfile.",
                )
            host = host_of(settings.url)
            lines[f"machine {host} login {login[0]} password {login[1]}"] = host
    if len(set(lines.values())) < len(lines):
        raise UsageError("two indexes on one host have different logins", hint="Build without --method dockerfile.")
    return "".join(f"{line}\n" for line in lines)


def _of_environment(settings: IndexSettings, environ: Mapping[str, str]) -> tuple[str, str] | None:
    user, password = (environ.get(name, "") for name in variables(settings.name))
    return (user or TOKEN_USER, password) if password else None


def _of_netrc(settings: IndexSettings, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The entry of the index's host. Never `default`, which belongs to no host."""
    path = Path(environ.get("NETRC") or Path(environ.get("HOME") or Path.home()) / ".netrc")
    try:
        hosts = netrc.netrc(str(path)).hosts
    except FileNotFoundError:
        return None
    except netrc.NetrcParseError as error:
        # Without its message and its context, which may contain the password.
        raise UsageError(f"{path}: line {error.lineno} is invalid", hint="Correct it: see man netrc.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read ({type(error).__name__})") from None
    # An IPv6 address: uv looks it up in brackets, requests without them.
    names = host_of(settings.url), host_of(settings.url).strip("[]")
    user, _, password = next((hosts[name] for name in names if name in hosts), ("", "", ""))
    return (user or TOKEN_USER, password) if password else None


def _of_pip(settings: IndexSettings, environ: Mapping[str, str]) -> tuple[str, str] | None:
    """The login in the first of pip's addresses with the origin of the index."""
    options = read_pip_options(environ, Path(environ.get("HOME") or Path.home()))
    for address in f"{options.get('index-url', '')} {options.get('extra-index-url', '')}".split():
        if origin_of(address) == origin_of(settings.url) and (user := urlsplit(address).username) is not None:
            return unquote(user) or TOKEN_USER, unquote(urlsplit(address).password or "")
    return None


def _of_keyring(
    run: Callable[..., subprocess.CompletedProcess[bytes]], settings: IndexSettings, environ: Mapping[str, str]
) -> tuple[str, str] | None:
    """The password that the program `keyring` has for the address or, as pip stores it, for the host."""
    user = environ.get(variables(settings.name)[0]) or TOKEN_USER
    try:
        for service in (settings.url, urlsplit(settings.url).netloc):
            done = run(["keyring", "get", service, user], stdout=subprocess.PIPE, timeout=KEYRING_S, check=False)
            if done.returncode == 0 and (password := done.stdout.decode(errors="replace").rstrip("\n")):
                return user, password
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(
            f"the index {settings.name}: the program `keyring` failed ({type(error).__name__})",
            hint=f"Install and unlock it, or remove `login` from indexes.{settings.name} in matrix.yaml.",
        ) from None
    return None
