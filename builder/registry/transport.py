"""The connection to a registry: plain http or TLS, and the authorities in /etc/docker/certs.d.

Source: Docker documentation, "Verify repository client with certificates".
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

from requests.adapters import HTTPAdapter
from requests.utils import DEFAULT_CA_BUNDLE_PATH
from urllib3.util import create_urllib3_context

from builder.common.errors import RegistryError, of_file
from builder.index import settings as index
from builder.index.host import Host, RegistrySettings

FOLDER = Path("/etc/docker/certs.d")
CONNECTIONS = 16  # kept open; more are made when needed
_PRIVATE = tuple(map(ip_network, ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")))


@dataclass(frozen=True, kw_only=True)
class Transport:
    """The connection to a registry. `bundle` is a file with the usual authorities, empty for the default.

    `authorities` are trusted besides the usual authorities.
    """

    registry: str
    registries: RegistrySettings
    bundle: str = ""
    authorities: tuple[Path, ...] = ()

    @classmethod
    def of(cls, registry: str, host: Host) -> Transport:
        """The connection to a registry (`host:port`). Raises FileError."""
        files: list[Path] = []
        if not host.registries.allow_http(registry):
            try:
                files = sorted((FOLDER / registry).iterdir())
            except FileNotFoundError:
                pass  # most registries have a certificate of a usual authority
            except OSError as error:
                raise of_file(error) from error
        return cls(
            registry=registry,
            registries=host.registries,
            bundle=host.index.ca_bundle,
            authorities=tuple(path for path in files if path.suffix == ".crt"),
        )

    @property
    def is_plain(self) -> bool:
        """True if the registry is reached over plain http."""
        return self.registries.allow_http(self.registry)

    @property
    def may_lose_tls(self) -> bool:
        """True if cosign falls back to plain http without TLS: for private addresses and names in .local.

        Source: go-containerregistry, pkg/name, `Registry.Scheme`.
        """
        host = index.split(self.registry).hostname or ""
        try:
            is_private = any(ip_address(host) in network for network in _PRIVATE)
        except ValueError:
            is_private = host.endswith((".local", ".localhost"))
        return is_private and not self.is_plain

    def allows(self, url: str) -> bool:
        """True if a URL from the registry may be used: no TLS only if the registry itself has none.

        Only a registry on the loopback may name another server there.
        """
        scheme = index.split(url).scheme
        if scheme != "http":
            return scheme == "https"
        is_near = index.is_loopback(self.registry) or not index.is_loopback(url)
        return self.is_plain and is_near and self.registries.allow_http(url)

    def adapter(self) -> HTTPAdapter:
        """An adapter that uses these authorities. Raises RegistryError for an authority that cannot be used."""
        if not self.authorities:
            return HTTPAdapter(pool_maxsize=CONNECTIONS)
        context = create_urllib3_context()
        for path in self.authorities:
            try:
                context.load_verify_locations(path)
            except OSError as error:  # also of OpenSSL
                raise RegistryError(f"{path} cannot be used: {error.strerror}", hint="Use a PEM file.") from None
        return _Adapter(context)

    @property
    def pem(self) -> bytes:
        """All authorities, for programs that take one file; empty for their default. Raises FileError."""
        if not (self.authorities or self.bundle):
            return b""
        try:
            bundle = Path(self.bundle or DEFAULT_CA_BUNDLE_PATH)
            return b"\n".join(path.read_bytes() for path in (*self.authorities, bundle))
        except OSError as error:
            raise of_file(error) from error


class _Adapter(HTTPAdapter):
    """Adds the certificate authorities that requests uses to a context."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        super().__init__(pool_maxsize=CONNECTIONS)

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, **options, ssl_context=self._context)

    def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
        return super().proxy_manager_for(proxy, **options, ssl_context=self._context)
