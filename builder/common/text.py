"""Text for people: bytes, seconds and counts, printable output of programs, redaction of hosts and logins. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise
from urllib.parse import urlsplit

_FACTORS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_SIZE = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,3}(?=[kMGT]))?)(?=[kMGTB])([kMGT]?)B?", re.ASCII)


def parse_size(text: str) -> int:
    """Bytes of 40GB, 4.3GB or 500M (decimal units, as registries and disks count). Raises ValueError."""
    if not (match := _SIZE.fullmatch(text)):
        raise ValueError(f"invalid size {text!r}: use e.g. 40GB")
    return int(Decimal(match[1]) * _FACTORS[match[2]])


def size(count: int) -> str:
    """Bytes as text: 4.1 GB."""
    value = float(count)
    for unit in ("B", "kB", "MB"):
        digits = 0 if unit in ("B", "kB") else 1
        if round(value, digits) < 1000:
            return f"{value:.{digits}f} {unit}"
        value /= 1000
    return f"{value:.1f} GB"


def duration(seconds: float) -> str:
    """3.2 s, 75 s or 4 min 5 s."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60)} s"


def counted(number: int, noun: str) -> str:
    """1 image, 2 images."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(names: Sequence[str], most: int) -> str:
    """a, b and 3 more: at most this many names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# ---- the output of programs

# Escape sequences of ECMA-48, which begin with ESC or, some of them, with one character of their own. No sequence
# contains the start of another one: otherwise, matching would take quadratic time.
_ESCAPES = re.compile(
    "(?:\x1b\\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, movements of the cursor
    "|(?:\x1b[]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x90\x98\x9c-\x9f]*(?:\x07|\x1b\\\\|\x9c)"  # titles, links
    "|\x1b[ -/]*[0-~]"
)


def printable(text: str) -> str:
    """External text without escape sequences. U+FFFD replaces other characters that cannot be printed.

    Keeps ends of lines and tabs; any other white space is a space.
    """
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in "\n\t" else " " if letter.isspace() else "\ufffd"
        for letter in _ESCAPES.sub("", text)
    )


def one_line(text: str) -> str:
    """The start of an external text, `printable` and on one line."""
    return re.sub("[\\n\\t]", " ", printable(text[:1200]))[:300]


# ---- host names and credentials

_CREDENTIALS = re.compile(r"(?<=://)[^/\s]+@")
_PRIVATE = (  # in the name of a value
    r"[\w-]*(?:token|pass(?:w|phrase|\b)|secret|cred|[_-]key\b|apikey|auth(?!ors?\b)|jwt)[\w-]*"
)
_LEAST_SECRET = 6  # characters: a shorter value, such as `true`, would be hidden everywhere


def secret_values(words: Sequence[str], environ: Mapping[str, str]) -> tuple[str, ...]:
    """The values in the words of a command, and in an environment, whose names mark them as secret."""
    found: list[str] = []
    for match in (match for word in words for match in re.finditer(rf"(?i){_PRIVATE}[=:]\s*(?=(.+))", word)):
        rest = re.sub("(?i)^(bearer|basic) ", "", match[1].strip())
        found += [rest, rest.split(" ")[0].strip("\"'")]  # of `TOKEN=x program` too
    found += [after for word, after in pairwise(words) if re.fullmatch(rf"(?i)-+{_PRIVATE}", word)]
    found += [value for name, value in environ.items() if re.fullmatch(rf"(?i){_PRIVATE}", name)]
    return tuple(sorted({text for text in found if len(text) >= _LEAST_SECRET}, key=len, reverse=True))


@dataclass(frozen=True)
class Redactor:
    """Replaces `hosts` with `<mirror>` and `secrets` with `***`, and removes user:password@ from every URL."""

    hosts: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()

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
            name = f"[{host}]" if ":" in host else host
            hosts |= {host, name}
            _, _, port = parts.netloc.rpartition(":")
            if port.isdecimal():
                hosts.add(f"{name}:{port}")
        return cls(tuple(sorted(hosts, key=lambda host: (-len(host), host))))

    def __call__(self, text: str) -> str:
        for secret in self.secrets:
            text = text.replace(secret, "***")
        text = _CREDENTIALS.sub("", text)
        for host in self.hosts:
            text = re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w-])", "<mirror>", text, flags=re.IGNORECASE)
        return text
