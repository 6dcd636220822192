"""What this machine lends to its builds: certificates, index, proxies, apt sources. Read once, never stored in a layer.

Each is read from where the machine already has it, so nothing is configured twice. The files appear in the build
context under templates/host/ (see the README there) and are bind-mounted by the steps that download.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from shlex import quote
from urllib.parse import urlsplit

from builder import index
from builder.errors import UsageError
from builder.hide import Hider
from builder.index import IndexSettings

PROXY_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
SYSTEM_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
LOCAL_AUTHORITIES = Path("/usr/local/share/ca-certificates")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
FOLDER = "templates/host"


@dataclass(frozen=True, kw_only=True)
class AptSource:
    """One Debian archive that this machine uses: `kind` is main, updates or security."""

    kind: str
    uri: str


@dataclass(frozen=True, kw_only=True)
class Host:
    """`ca` is PEM text; `proxies` are build arguments that Docker keeps out of history."""

    index: IndexSettings = field(default_factory=IndexSettings, repr=False)
    ca: bytes = field(default=b"", repr=False)
    proxies: Mapping[str, str] = field(default_factory=dict)
    apt_sources: tuple[AptSource, ...] = ()
    apt_proxy: str = ""

    @property
    def hide(self) -> Hider:
        """Keeps every host named here out of logs."""
        addresses = [self.index.url, self.apt_proxy, *(source.uri for source in self.apt_sources)]
        addresses += [value if "://" in value else f"//{value}" for value in self._proxy_addresses]
        return Hider.for_urls(addresses)

    @property
    def network(self) -> str:
        """`host` if an index or proxy is on this machine's own loopback, which a bridge does not reach."""
        addresses = [self.index.url, self.apt_proxy, *self._proxy_addresses]
        addresses += [source.uri for source in self.apt_sources]
        return "host" if any(index.is_loopback(address) for address in addresses) else ""

    @property
    def _proxy_addresses(self) -> list[str]:
        return [value for name, value in self.proxies.items() if name.upper() != "NO_PROXY"]

    def sources_list(self, release: str) -> str:
        """apt's one-line sources for a Debian release from this machine's archives; empty to leave the image's own."""
        suites = {"main": release, "updates": f"{release}-updates", "security": f"{release}-security"}
        return "".join(
            f"deb [signed-by={KEYRING}] {source.uri} {suites[source.kind]} main\n" for source in self.apt_sources
        )

    def files(self, release: str, *, index_too: bool = True) -> dict[str, bytes]:
        """Path in the build context -> content. Raises UsageError where a secret would enter the build.

        `index_too` for steps that install Python packages; others are not told of the index.
        """
        addresses = {"apt's proxy": self.apt_proxy} | ({"the package index": self.index.url} if index_too else {})
        addresses |= {f"apt's {source.kind} archive": source.uri for source in self.apt_sources}
        for what, address in addresses.items():
            if index.has_credentials(address):
                raise UsageError(
                    f"the address of {what} holds a user name or password, which a build step would see",
                    hint="Use a mirror on this network that needs none, or a local proxy that adds the credentials.",
                )
        lent: dict[str, bytes] = {}
        if self.ca:
            lent["ca.crt"] = self.ca
        if index_too and (variables := self.index.for_builds()):
            lines = [f"export {name}={quote(value)}\n" for name, value in sorted(variables.items())]
            lent["index.env"] = "".join(lines).encode()
        settings = []
        if sources := self.sources_list(release):
            lent["sources.list"] = sources.encode()
            settings += ['Dir::Etc::SourceList "/mnt/host/sources.list";', 'Dir::Etc::SourceParts "-";']
        if self.apt_proxy:
            settings.append(f'Acquire::http::Proxy "{self.apt_proxy}";')
        if self.ca:
            settings.append('Acquire::https::CAInfo "/mnt/host/ca.crt";')
        if settings:
            lent["apt.conf"] = ("\n".join(settings) + "\n").encode()
        return {f"{FOLDER}/{name}": content for name, content in lent.items()}


def read(environ: Mapping[str, str] | None = None) -> Host:
    """This machine's settings; raises UsageError for one that cannot be read."""
    environ = os.environ if environ is None else environ
    try:
        settings = index.read(environ, Path.home())
    except ValueError as error:
        raise UsageError(str(error)) from error
    sources, apt_proxy = _apt()
    return Host(
        index=settings,
        ca=_ca(settings),
        proxies=_proxies(environ, settings),
        apt_sources=sources,
        apt_proxy=apt_proxy,
    )


def _proxies(environ: Mapping[str, str], settings: IndexSettings) -> dict[str, str]:
    found = {name: value for name, value in environ.items() if name.upper() in PROXY_NAMES and value}
    return {"HTTP_PROXY": settings.proxy, "HTTPS_PROXY": settings.proxy, **found} if settings.proxy else found


def _ca(settings: IndexSettings) -> bytes:
    """The bundle that is configured, or the system's own if an authority was added to it by hand."""
    path = Path(settings.ca_bundle) if settings.ca_bundle else None
    if path is None and any(LOCAL_AUTHORITIES.glob("**/*.crt")):
        path = SYSTEM_BUNDLE
    if path is None:
        return b""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(
            f"the certificate bundle {path} cannot be read: {error.strerror}",
            hint="It is named by SSL_CERT_FILE, PIP_CERT, REQUESTS_CA_BUNDLE or pip's `cert` setting.",
        ) from error


def _apt() -> tuple[tuple[AptSource, ...], str]:
    """Debian archives and proxy that apt on this machine uses; nothing elsewhere than on Debian."""
    if not is_debian() or not shutil.which("apt-get"):
        return (), ""
    command = [
        "apt-get",
        "indextargets",
        "--format",
        "$(REPO_URI) $(ORIGIN) $(CODENAME) $(COMPONENT)",
        "Created-By: Packages",
    ]
    listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    if not listed and os.geteuid() == 0:  # lists were never fetched, or were cleaned away
        subprocess.run(["apt-get", "update", "-q"], capture_output=True, check=False)
        listed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    proxy = subprocess.run(
        ["apt-config", "shell", "PROXY", "Acquire::http::Proxy"], capture_output=True, text=True, check=False
    ).stdout
    found = re.search(r"PROXY='([^'\s]+)'", proxy)
    return parse_targets(listed), found[1] if found and found[1] != "DIRECT" else ""


def parse_targets(listed: str) -> tuple[AptSource, ...]:
    """Lines `uri origin codename component` of apt-get indextargets to Debian's archives, one of each kind."""
    sources: dict[str, AptSource] = {}
    for line in listed.splitlines():
        fields = line.split()
        if len(fields) != 4 or fields[1] != "Debian" or fields[3] != "main":
            continue
        suffix = fields[2].rpartition("-")[2] if "-" in fields[2] else "main"
        if suffix in ("main", "updates", "security") and urlsplit(fields[0]).scheme in ("http", "https"):
            sources.setdefault(suffix, AptSource(kind=suffix, uri=fields[0]))
    return tuple(sources[kind] for kind in ("main", "updates", "security") if kind in sources)


def os_release() -> dict[str, str]:
    """Fields of /etc/os-release; empty where there is none."""
    try:
        text = Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return {}
    return {key: value.strip('"') for key, _, value in (line.partition("=") for line in text.splitlines()) if key}


def is_debian() -> bool:
    return os_release().get("ID") == "debian"
