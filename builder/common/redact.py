"""Keeps host names of mirrors and credentials out of everything that is shown, logged or stored."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

_CREDENTIALS = re.compile(r"(?<=://)[^/\s]+@")


@dataclass(frozen=True)
class Redactor:
    """Replaces `hosts` with `<mirror>`, and removes user:password@ from every URL."""

    hosts: tuple[str, ...] = ()

    @classmethod
    def for_urls(cls, urls: Iterable[str]) -> Redactor:
        """A redactor of the hosts of these URLs, with and without port."""
        hosts: set[str] = set()
        for url in urls:
            try:
                parts = urlsplit(url)
                host = parts.hostname
            except ValueError:  # not a URL, so it has no host
                continue
            if not host:
                continue
            hosts.add(host)
            _, _, port = parts.netloc.rpartition(":")
            if port.isdecimal():
                hosts.add(f"{host}:{port}")
        return cls(tuple(sorted(hosts, key=lambda host: (-len(host), host))))

    def __call__(self, text: str) -> str:
        text = _CREDENTIALS.sub("", text)
        for host in self.hosts:
            text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "<mirror>", text, flags=re.IGNORECASE)
        return text
