"""Keeps names of mirrors and credentials out of everything that is shown, logged or stored."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

_CREDENTIALS = re.compile(r"(?<=://)[^/\s]+@")


@dataclass(frozen=True)
class Hider:
    """Replaces the hosts that it was given by `<mirror>`, and user:password@ in any address by nothing."""

    hosts: tuple[str, ...] = ()

    @classmethod
    def for_urls(cls, urls: Iterable[str]) -> Hider:
        """A hider for the hosts (with port, and without) of these addresses."""
        found: set[str] = set()
        for url in urls:
            try:
                parts = urlsplit(url)
                host = parts.hostname
            except ValueError:  # no address: nothing of it can appear as a host
                continue
            if not host:
                continue
            found.add(host)
            _, _, port = parts.netloc.rpartition(":")
            if port.isdecimal():
                found.add(f"{host}:{port}")
        return cls(tuple(sorted(found, key=lambda host: (-len(host), host))))

    def __call__(self, text: str) -> str:
        text = _CREDENTIALS.sub("", text)
        for host in self.hosts:
            text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "<mirror>", text, flags=re.IGNORECASE)
        return text
