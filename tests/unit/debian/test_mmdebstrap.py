"""The addresses of Debian's archives, as mmdebstrap knows them. (For its installation, see build/test_bootstrap.py.)"""

from __future__ import annotations

import re

import pytest

from builder.debian import mmdebstrap
from builder.index.host import AptSource
from tests.fakes.engine import Programs

WRITTEN = """\
deb http://archive.example.test/debian newbird main
deb [signed-by="/x.gpg"] http://archive.example.test/debian-security newbird-security main
"""


def test_the_addresses_that_mmdebstrap_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its hook prints them and ends it, before it has downloaded anything."""

    def answer(command: list[str]) -> tuple[int, str, str]:
        hook = next(word for word in command if word.startswith("--setup-hook="))
        mark = re.search(r's/\^/(.+)/" "\$1/etc/apt/sources.list" >&2; exit 1$', hook)
        assert mark
        return 1, "", "".join(f"{mark[1]}{line}\n" for line in WRITTEN.splitlines()) + "E: command failed\n"

    programs = Programs(answer)
    monkeypatch.setattr("subprocess.run", programs)
    assert mmdebstrap.sources("newbird") == (
        AptSource(kind="main", uri="http://archive.example.test/debian"),
        AptSource(kind="security", uri="http://archive.example.test/debian-security"),
    )
    assert programs.calls[0][-2:] == ["newbird", "/dev/null"]
    assert "--mode=chrootless" in programs.calls[0], "other modes need root or namespaces"


def test_there_are_none_if_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", Programs(lambda _: (25, "", "E: mount failed")))
    assert mmdebstrap.sources("newbird") == ()
