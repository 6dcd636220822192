"""Settings of the build host for its builds: CA certificates, package index, proxies, apt sources. Never in a layer.

They are read from the configuration of pip, uv and apt, so nothing is configured twice. The files are in the build
context under templates/host/ (see the README there); the steps that download bind-mount them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from shlex import quote
from urllib.parse import urlsplit

from builder.common.errors import UsageError
from builder.common.text import Redactor
from builder.index import settings as index
from builder.index.settings import IndexSettings
from builder.matrix.project import Project
from builder.matrix.schema import Debian

PROXY_NAMES = ("HTTP_PROXY", "HTTPS_PROXY", "FTP_PROXY", "NO_PROXY", "ALL_PROXY")
SYSTEM_BUNDLE = Path("/etc/ssl/certs/ca-certificates.crt")
LOCAL_AUTHORITIES = Path("/usr/local/share/ca-certificates")
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"
FOLDER = "templates/host"
SNAPSHOT_ID = "@SNAPSHOTID@"  # in apt's addresses of snapshot archives: a time
SNAPSHOTS = "Acquire::Snapshots::URI"
_FORMAT = "$(REPO_URI) $(ORIGIN) $(CODENAME) $(COMPONENT)"
TARGETS = ("apt-get", "indextargets", "--format", _FORMAT, "Created-By: Packages")
RunProgram = Callable[..., subprocess.CompletedProcess[str]]  # runs a program, as subprocess.run


@dataclass(frozen=True, kw_only=True)
class AptSource:
    """A Debian archive that this machine uses: `kind` is main, updates or security."""

    kind: str
    uri: str


@dataclass(frozen=True, kw_only=True)
class Apt:
    """Debian archives, and a proxy for them.

    `snapshots` are the main and the security archive of a snapshot service, with SNAPSHOT_ID in their addresses; none
    if apt is older than 2.7.1.
    """

    sources: tuple[AptSource, ...] = ()
    proxy: str = ""
    snapshots: tuple[AptSource, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RegistrySettings:
    """Registries that are reached over plain http, according to matrix.yaml."""

    insecure: tuple[str, ...] = ()

    def allow_http(self, address: str) -> bool:
        """True if plain http may be used for an address (also `host:port`)."""
        server = index.split(address).netloc.lower()
        return index.is_loopback(address) or server in (name.lower() for name in self.insecure)


@dataclass(frozen=True, kw_only=True)
class Host:
    """Settings of the build host. `ca` is PEM text; `proxies` are build arguments that Docker keeps out of history.

    `expired` are Debian releases whose Release files may have expired. Without `archives`, `apt` reads the settings of
    this machine's apt.
    """

    index: IndexSettings = field(default_factory=IndexSettings, repr=False)
    ca: bytes = field(default=b"", repr=False)
    proxies: Mapping[str, str] = field(default_factory=dict)
    expired: frozenset[str] = frozenset()
    archives: Apt | None = field(default_factory=Apt, repr=False)
    registries: RegistrySettings = field(default_factory=RegistrySettings)

    @cached_property
    def apt(self) -> Apt:
        """The archives, read on first use: apt takes 0.5 s, which a run without work does not spend."""
        return _apt() if self.archives is None else self.archives

    @property
    def names(self) -> tuple[str, ...]:
        """The hosts in these settings, with and without port."""
        return self._redactor.hosts

    def hide(self, text: str) -> str:
        """Replaces the hosts in these settings, for logs and messages."""
        return self._redactor(text)

    @cached_property
    def _redactor(self) -> Redactor:
        return Redactor.for_urls(url if "://" in url else f"//{url}" for url in self._urls)

    @property
    def network(self) -> str:
        """`host` if an index, archive or proxy is on the loopback, which a bridge cannot reach; else empty."""
        return "host" if any(index.is_loopback(url) for url in self._urls) else ""

    @property
    def _urls(self) -> list[str]:
        proxies = [value for name, value in self.proxies.items() if name.upper() != "NO_PROXY"]
        indexes = [self.index.url, *(settings.url for settings in self.index.named.values())]
        clients = [*indexes, self.index.python_mirror, self.apt.proxy]
        return [*clients, *(source.uri for source in self.apt.sources), *proxies]

    def with_snapshot(self, address: str, time: str) -> Host:
        """The same with a snapshot archive instead of this machine's archives, at a time such as 20261122T210000Z."""
        return self.with_archives(f"{address}/debian/{time}", f"{address}/debian-security/{time}")

    def for_release(self, debian: Debian) -> Host:
        """The same, with the archives that a release has moved to, if matrix.yaml names them."""
        address = debian.archive
        return self.with_archives(f"{address}/debian", f"{address}/debian-security") if address else self

    def with_archives(self, main: str, security: str) -> Host:
        """The same with these archives instead of this machine's."""
        uris = {"main": main, "updates": main, "security": security}
        sources = tuple(AptSource(kind=kind, uri=uri) for kind, uri in uris.items())
        return replace(self, archives=replace(self.apt, sources=sources))

    def sources_list(self, release: str) -> str:
        """apt's one-line sources for a Debian release from this machine's archives; empty: the image keeps its own."""
        suites = {"main": release, "updates": f"{release}-updates", "security": f"{release}-security"}
        return "".join(
            f"deb [signed-by={KEYRING}] {source.uri} {suites[source.kind]} main\n" for source in self.apt.sources
        )

    def apt_options(self, release: str) -> list[str]:
        """Lines of apt's configuration for a Debian release."""
        options = [f'Acquire::http::Proxy "{self.apt.proxy}";'] if self.apt.proxy else []
        return [*options, 'Acquire::Check-Valid-Until "false";'] if release in self.expired else options

    def files(self, release: str, *, with_index: bool = True) -> dict[str, bytes]:
        """Path in the build context -> content. Raises UsageError if a secret would enter the build.

        `with_index`: include the settings of the package index, for steps that install Python packages.
        """
        urls = {"apt's proxy": self.apt.proxy} | ({"the package index": self.index.url} if with_index else {})
        urls |= {"uv's mirror of Pythons": self.index.python_mirror} if with_index else {}
        urls |= {f"apt's {source.kind} archive": source.uri for source in self.apt.sources}
        for name, url in urls.items():
            if index.has_credentials(url):
                raise UsageError(
                    f"the address of {name} contains a user name or password, which build steps could read",
                    hint="Use a mirror without a login, or a local proxy that adds the credentials.",
                )
        files: dict[str, bytes] = {}
        if self.ca:
            files["ca.crt"] = self.ca
        if with_index and (variables := self.index.for_builds()):
            lines = [f"export {name}={quote(value)}\n" for name, value in sorted(variables.items())]
            files["index.env"] = "".join(lines).encode()
        settings = []
        if sources := self.sources_list(release):
            files["sources.list"] = sources.encode()
            settings += ['Dir::Etc::SourceList "/mnt/host/sources.list";', 'Dir::Etc::SourceParts "-";']
        settings += self.apt_options(release)
        if self.ca:
            settings.append('Acquire::https::CAInfo "/mnt/host/ca.crt";')
        if settings:
            files["apt.conf"] = ("\n".join(settings) + "\n").encode()
        return {f"{FOLDER}/{name}": content for name, content in files.items()}


def read_host() -> Host:
    """This machine's settings; raises UsageError if one cannot be read."""
    try:
        settings = index.read_index_settings(os.environ, Path.home())
    except ValueError as error:
        raise UsageError(str(error)) from error
    proxies = {name: value for name, value in os.environ.items() if name.upper() in PROXY_NAMES and value}
    return Host(index=settings, ca=_ca(settings), proxies=proxies, archives=None)


def host_for_project(project: Project) -> Host:
    """This machine's settings, with the matrix's settings for indexes, registries and archives. Raises UsageError."""
    matrix = project.matrix
    registries = RegistrySettings(insecure=tuple(matrix.insecure))
    expired = frozenset(release for release, debian in matrix.debian.items() if debian.ignore_valid_until)
    machine = read_host()
    settings = machine.index
    for name, place in matrix.indexes.items():
        folder = matrix.folder_of(name)
        settings = settings.with_index(name, "" if folder else place, project.root / folder if folder else None)
    return replace(machine, index=settings, registries=registries, expired=expired)


def _ca(settings: IndexSettings) -> bytes:
    """The configured bundle, or that of the system if a CA was added to it by hand."""
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
            hint="Correct SSL_CERT_FILE, PIP_CERT, REQUESTS_CA_BUNDLE or pip's `cert` setting.",
        ) from error


def _apt() -> Apt:
    """Debian archives and the proxy that apt on this machine uses; nothing on other distributions."""
    if not is_debian() or not shutil.which("apt-get"):
        return Apt()
    targets = _output(TARGETS)
    if not targets and os.geteuid() == 0:  # the package lists were never downloaded, or were removed
        _output(["apt-get", "update", "-q"])
        targets = _output(TARGETS)
    proxy = re.search(r"PROXY='([^'\s]+)'", _output(["apt-config", "shell", "PROXY", "Acquire::http::Proxy"]))
    return Apt(
        sources=parse_targets(targets),
        proxy=proxy[1] if proxy and proxy[1] != "DIRECT" else "",
        snapshots=parse_snapshots(_output(["apt-config", "dump", SNAPSHOTS])),
    )


def apt_of_debian(run: RunProgram) -> Apt:
    """The archives that apt in a new Debian uses, which has no lists of packages yet; `run` runs it there."""
    command = [word.replace("$(ORIGIN) $(CODENAME)", "Debian $(RELEASE)") for word in TARGETS]
    targets = _output([*command[:2], "--no-release-info", *command[2:]], run)
    snapshots = parse_snapshots(_output(["apt-config", "dump", SNAPSHOTS], run))
    return Apt(sources=parse_targets(targets), snapshots=snapshots)


def _output(command: Sequence[str], run: RunProgram = subprocess.run) -> str:
    return run(command, capture_output=True, text=True, check=False).stdout


def parse_snapshots(dump: str) -> tuple[AptSource, ...]:
    """Debian's snapshot archives, from the output of apt-config dump. Source: apt.conf(5), `Snapshots::URI`."""
    addresses = dict(re.findall(rf'^{SNAPSHOTS}::(\S+) "([^"]*)";$', dump, re.MULTILINE))
    sources = []
    for kind, label in (("main", "Debian"), ("security", "Debian-Security")):
        names = (f"Override::Label::{label}", "Override::Origin::Debian", f"Label::{label}", "Origin::Debian")
        uri = next((addresses[name] for name in names if name in addresses), "")
        if SNAPSHOT_ID in uri and urlsplit(uri).scheme in ("http", "https"):  # `no`: there is none
            sources.append(AptSource(kind=kind, uri=uri))
    return tuple(sources)


def parse_targets(targets: str) -> tuple[AptSource, ...]:
    """Debian's archives, one of each kind, from lines `uri origin codename component` of apt-get indextargets."""
    sources: dict[str, AptSource] = {}
    for line in targets.splitlines():
        fields = line.split()
        if len(fields) != 4 or fields[1] != "Debian" or fields[3] != "main":
            continue
        suffix = fields[2].rpartition("-")[2] if "-" in fields[2] else "main"
        if suffix in ("main", "updates", "security") and urlsplit(fields[0]).scheme in ("http", "https"):
            sources.setdefault(suffix, AptSource(kind=suffix, uri=fields[0]))
    return tuple(sources[kind] for kind in ("main", "updates", "security") if kind in sources)


def os_release() -> dict[str, str]:
    """Fields of /etc/os-release; empty if there is no such file."""
    try:
        text = Path("/etc/os-release").read_text(encoding="utf-8")
    except OSError:
        return {}
    return {key: value.strip('"') for key, _, value in (line.partition("=") for line in text.splitlines()) if key}


def is_debian() -> bool:
    return os_release().get("ID") == "debian"
