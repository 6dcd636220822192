"""Plain http, and certificates of a registry. Connections with certificates: tests/integration."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from requests.utils import DEFAULT_CA_BUNDLE_PATH

from builder.common.errors import FileError, RegistryError
from builder.index.host import Host, RegistrySettings
from builder.index.settings import IndexSettings
from builder.registry import transport
from builder.registry.failures import RejectedError
from tests.fakes.wire import CONTENT, DIGEST, HOST, Reply, Sent, Wire, connect
from tests.unit.registry.fixtures import Lay

PLAIN, OTHER = "plain.example.test:5000", "other.example.test"
PLAIN_HOST = Host(registries=RegistrySettings(insecure=("Plain.example.test:5000", OTHER)))


@pytest.mark.parametrize(
    ("registry", "url"),
    [
        (PLAIN, f"http://{PLAIN}/v2/a/b/"),
        (PLAIN.upper(), f"http://{PLAIN}/v2/a/b/"),
        ("127.0.0.1:5000", "http://127.0.0.1:5000/v2/a/b/"),
        ("localhost", "http://localhost/v2/a/b/"),
        ("[::1]:5000", "http://[::1]:5000/v2/a/b/"),
        (HOST, f"https://{HOST}/v2/a/b/"),
        ("10.0.0.1:5000", "https://10.0.0.1:5000/v2/a/b/"),
        ("localhost.example.test", "https://localhost.example.test/v2/a/b/"),
        ("plain.example.test", "https://plain.example.test/v2/a/b/"),
        ("plain.example.test:5001", "https://plain.example.test:5001/v2/a/b/"),
        ("a.plain.example.test:5000", "https://a.plain.example.test:5000/v2/a/b/"),
        ("docker.io", "https://registry-1.docker.io/v2/a/b/"),
        ("", "https://registry-1.docker.io/v2/a/b/"),
    ],
)
def test_plain_http_without_a_proxy_is_for_loopback_and_listed_registries_only(
    lay: Lay, monkeypatch: pytest.MonkeyPatch, registry: str, url: str
) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://proxy.example.test")
    wire = lay(lambda _: Reply(status=404))
    connect(registry=registry, host=PLAIN_HOST).has_blob(DIGEST)
    [sent] = wire.seen
    assert sent.url == f"{url}blobs/{DIGEST}"
    assert bool(sent.options["proxies"]) == url.startswith("https:")


def test_an_image_of_docker_hub_without_a_namespace_is_in_library(lay: Lay) -> None:
    wire = lay(lambda _: Reply(status=404))
    connect(registry="", repository="b").has_blob(DIGEST)
    assert wire.seen[0].url.startswith("https://registry-1.docker.io/v2/library/b/")


@pytest.mark.parametrize(
    ("registry", "url", "is_followed"),
    [
        (PLAIN, f"http://{PLAIN}/x", True),
        (PLAIN, f"http://{OTHER}/x", True),
        (PLAIN, f"https://{HOST}/x", True),
        (PLAIN, f"http://{HOST}/x", False),
        (PLAIN, "http://plain.example.test/x", False),
        (PLAIN, f"http://me@{PLAIN}/x", False),
        (PLAIN, "http://127.0.0.1:2375/x", False),
        (PLAIN, "http://[", False),
        (PLAIN, f"ftp://{PLAIN}/x", False),
        ("127.0.0.1:5000", "http://127.0.0.1:5001/x", True),
        (HOST, f"http://{HOST}/x", False),
        (HOST, f"http://{PLAIN}/x", False),
    ],
)
@pytest.mark.parametrize("kind", ["redirect", "upload", "token", "page"])
def test_where_a_registry_may_lead(
    lay: Lay, tmp_path: Path, kind: str, registry: str, url: str, is_followed: bool
) -> None:
    """A registry with TLS never leads to plain http, a registry without it only to those that are listed."""
    (tmp_path / "blob").write_bytes(CONTENT)

    def answer(sent: Sent) -> Reply:
        if sent.url.startswith(url):
            return {
                "redirect": Reply(body=CONTENT),
                "upload": Reply(status=201),
                "token": Reply(body=b'{"token": "t"}'),
                "page": Reply(body=b"{}"),
            }[kind]
        if kind == "token" and "Authorization" in sent.headers:
            return Reply(body=CONTENT)
        return {
            "redirect": Reply(status=307, headers={"Location": url}),
            "upload": Reply(status=202, headers={"Location": url}),
            "token": Reply(status=401, headers={"WWW-Authenticate": f'Bearer realm="{url}",service="s"'}),
            "page": Reply(body=b"{}", headers={"Link": f'<{url}>; rel="next"'}),
        }[kind]

    wire = lay(answer)
    client = connect(registry=registry, host=PLAIN_HOST)

    def act() -> None:
        if kind == "upload":
            client.upload(DIGEST, tmp_path / "blob", len(CONTENT), lambda _: None)
        elif kind == "page":
            assert client.referrers(DIGEST) == [b"{}"] * 2
        else:
            assert client.read_blob(DIGEST) == CONTENT

    if is_followed:
        act()
        assert any(sent.url.startswith(url) for sent in wire.seen)
    else:
        with pytest.raises(RejectedError):
            act()
        assert len(wire.seen) == 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a registry in certs.d, with files without certificates."""
    monkeypatch.setattr(transport, "FOLDER", tmp_path / "certs.d")
    (tmp_path / "certs.d" / HOST).mkdir(parents=True)
    return tmp_path / "certs.d" / HOST


def test_an_invalid_certificate_is_named(folder: Path) -> None:
    (folder / "ca.crt").write_text("not PEM")
    with pytest.raises(RegistryError, match=re.escape(f"{folder}/ca.crt cannot be used: ")):
        connect()
    connect(registry=OTHER)
    connect(host=Host(registries=RegistrySettings(insecure=(HOST,))))


def test_requests_use_the_certificates_of_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire(lambda _: Reply(status=404))
    monkeypatch.setattr(transport.Transport, "adapter", lambda _: wire)
    for registry in (HOST, "127.0.0.1:5000"):
        connect(registry=registry).has_blob(DIGEST)
    assert [sent.url.partition("/v2/")[0] for sent in wire.seen] == [f"https://{HOST}", "http://127.0.0.1:5000"]


def test_authorities_count_with_and_without_a_proxy(folder: Path) -> None:
    shutil.copy(DEFAULT_CA_BUNDLE_PATH, folder / "ca.crt")
    adapter = connect().transport.adapter()
    for manager in (adapter.poolmanager, adapter.proxy_manager_for("http://proxy.example.test")):
        assert manager.connection_pool_kw["ssl_context"].get_ca_certs()


def test_a_bundle_that_is_missing_is_named(tmp_path: Path) -> None:
    reached = connect(host=Host(index=IndexSettings(ca_bundle=f"{tmp_path}/none.pem"))).transport
    with pytest.raises(FileError, match=f"{tmp_path}/none.pem"):
        _ = reached.pem


def test_other_files_in_certs_d_are_ignored(folder: Path) -> None:
    (folder / "README").touch()
    reached = connect().transport
    assert (reached.authorities, reached.pem) == ((), b"")


def test_a_file_instead_of_a_folder(folder: Path) -> None:
    folder.rmdir()
    folder.touch()
    with pytest.raises(FileError):
        connect()
