"""Locked Debian packages from a snapshot archive, when the archives of the build host no longer have them."""

from __future__ import annotations

import http.server
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.index import host
from tests.integration.checkout import PLAIN, Checkout

APT_CONFIG = """\
Dir::Etc::SourceList "{folder}/sources.list";
Dir::Etc::SourceParts "-";
Dir::State "{folder}";
Dir::State::Status "{folder}/status";
Dir::Cache "{folder}/cache";
APT::Sandbox::User "";
"""


class Archives:
    """Debian's archives on the loopback, as `/now/...` until they are `gone`, and as a snapshot `/archive/...`."""

    def __init__(self) -> None:
        self.real = {
            "debian-security" if source.kind == "security" else "debian": source.uri.rstrip("/")
            for source in host.read_host().apt.sources
        }
        self.gone = False
        self.requests: list[str] = []
        archives = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                archives.requests.append(self.path)
                archives.answer(self)

            def log_message(self, *_: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        match = re.fullmatch(r"/(?:now|archive)/(debian|debian-security)(?:/[0-9]{8}T[0-9]{6}Z)?(/.*)", handler.path)
        if not match or (self.gone and handler.path.startswith("/now/")):
            handler.send_error(404)
            return
        try:
            with urllib.request.urlopen(self.real[match[1]] + match[2], timeout=60) as answer:
                handler.send_response(200)
                handler.send_header("Content-Length", answer.headers["Content-Length"])
                handler.end_headers()
                shutil.copyfileobj(answer, handler.wfile)
        except urllib.error.HTTPError as error:
            handler.send_error(error.code)


@pytest.fixture
def archives() -> Iterator[Archives]:
    running = Archives()
    yield running
    running.close()


@pytest.fixture
def apt_config(archives: Archives, tmp_path: Path) -> str:
    """The configuration of a machine whose apt uses these archives, and has downloaded their lists."""
    folder = tmp_path / "apt"
    for name in ("lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    (folder / "status").touch()
    lines = [
        f"deb [signed-by={host.KEYRING}] {archives.address}/now/{name} {suite} main\n"
        for name, suite in (("debian", "bookworm"), ("debian-security", "bookworm-security"))
    ]
    (folder / "sources.list").write_text("".join(lines), encoding="utf-8")
    path = folder / "apt.conf"
    path.write_text(APT_CONFIG.format(folder=folder), encoding="utf-8")
    subprocess.run(["apt-get", "update", "-q"], env={"APT_CONFIG": str(path), "PATH": "/usr/bin:/bin"}, check=True)
    return str(path)


def test_packages_that_are_gone_are_taken_from_a_snapshot(
    checkout: Checkout, archives: Archives, apt_config: str
) -> None:
    matrix = (checkout.root / "matrix.yaml").read_text(encoding="utf-8")
    with_snapshot = re.sub(r"(\n +)(glibc: \"2.36\")", rf"\1\2\1snapshot: {archives.address}/archive", matrix)
    assert with_snapshot != matrix
    (checkout.root / "matrix.yaml").write_text(with_snapshot, encoding="utf-8")
    checkout.builder("lock", APT_CONFIG=apt_config)
    checkout.builder("render")
    [path] = (checkout.root / "locks").glob("os-*.json")
    time = re.search(r'"time": "([^"]+)"', path.read_text(encoding="utf-8"))
    assert time
    dated = f"/archive/debian/{time[1]}/"
    assert [name for name in archives.requests if name.startswith(f"{dated}dists/")], "it is locked from the snapshot"
    assert not [name for name in archives.requests if name.startswith(f"{dated}pool/")]

    checkout.take_store()
    archives.gone = True
    output = checkout.builder("build", PLAIN, APT_CONFIG=apt_config)
    assert f"{PLAIN}: apt failed; trying again with the snapshot archive of bookworm" in output
    assert f"{PLAIN}: done" in output
    assert [name for name in archives.requests if name.startswith(f"{dated}pool/")]
    assert archives.address.removeprefix("http://") not in checkout.os_log().read_text(encoding="utf-8")
