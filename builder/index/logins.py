"""The logins of the indexes that matrix.yaml names. They are read at the first use, and kept in memory only."""

from __future__ import annotations

import netrc
import os
import re
from collections.abc import Iterable
from pathlib import Path

from builder.common.errors import UsageError
from builder.index.settings import IndexSettings, host_of, is_loopback

TOKEN_USER = "__token__"  # noqa: S105  the user of a token; the same on PyPI, GitLab, Artifactory and others
DOCS = "docs/matrix.md, Package indexes"


def variables(name: str) -> tuple[str, str]:
    """The environment variables with the user and the password of an index. uv reads the same variables."""
    prefix = f"UV_INDEX_{name.upper().replace('-', '_')}"
    return f"{prefix}_USERNAME", f"{prefix}_PASSWORD"


def how_to_give(settings: IndexSettings) -> str:
    """The instructions for giving the login of an index."""
    user, password = variables(settings.name)
    return (
        f"Give a login: set {user} and {password} (for a token, only {password}), or add `machine "
        f"{host_of(settings.url)} login USER password PASSWORD` to ~/.netrc. See {DOCS}."
    )


def find_login(settings: IndexSettings) -> tuple[str, str] | None:
    """User and password of a named index; None if it has none.

    Raises UsageError for a login that would be sent unencrypted.
    """
    if settings.folder:
        return None
    user, password = (os.environ.get(name, "") for name in variables(settings.name))
    login = (user or TOKEN_USER, password) if password else _of_netrc(settings)
    if login and not settings.url.startswith("https://") and not is_loopback(settings.url):
        raise UsageError(
            f"the login of the index {settings.name} would be sent unencrypted",
            hint="Use its address with https://, in `indexes` of matrix.yaml.",
        )
    return login


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


def _of_netrc(settings: IndexSettings) -> tuple[str, str] | None:
    """The entry of the index's host. Never `default`, which belongs to no host."""
    path = Path(os.environ.get("NETRC") or Path.home() / ".netrc")
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
