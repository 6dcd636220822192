"""Pushes over a real connection: cut, stalled, lost answers, logins, TLS, a full disk.

Statuses, retries and messages: tests/unit/registry.
"""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.common.errors import FileError, RegistryError
from builder.common.reference import ImageRef
from builder.common.tasks import RetryPolicy
from builder.host import Host
from builder.index.settings import IndexSettings
from builder.layers.oci import Manifest
from builder.registry import transfer, upload
from builder.registry.client import Repository
from builder.registry.transfer import Sent
from tests.integration import registry as registries
from tests.integration.registry import IMAGE, PASSWORD, USER, Fault, Image, Proxy, Server, Tokens, Trouble, image

MIB = 1024 * 1024
TWO_RETRIES = RetryPolicy(connect_s=5, read_s=20, commit_s=20, retries=2, first_delay_s=0.05, longest_delay_s=2)
UPLOADS = "/blobs/uploads/"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One registry for all tests; each uses its own repositories."""
    registries.install()
    with Server(folder=tmp_path_factory.mktemp("registry")).serving() as running:
        yield running


@pytest.fixture(scope="module")
def _proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server).serving() as running:
        yield running


@pytest.fixture
def proxy(_proxy: Proxy) -> Iterator[Proxy]:
    """The proxy of the registry, without troubles at the start and at the end of a test."""
    _proxy.heal()
    yield _proxy
    _proxy.heal()


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ignores logins of this machine's user; makes chunks small, so that small blobs have many."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setattr(upload, "CHUNK", MIB)


@pytest.fixture
def sample(tmp_path: Path) -> Image:
    """An image with a configuration, a layer of seven chunks, and a small layer."""
    return image(tmp_path / "blobs", 6 * MIB + 17, 1000)


def connect(address: str, repository: str, policy: RetryPolicy = TWO_RETRIES) -> Repository:
    reference = ImageRef(registry=address, repository=repository)
    return Repository(reference, host=Host(), write=True, policy=policy)


def push(registry: Repository, sample: Image, *, mount_from: tuple[str, ...] = ()) -> Sent:
    """Pushes an image; checks that the progress is complete and no thread is left."""
    progress: list[int] = []
    manifest = Manifest.of(sample.manifest, IMAGE)
    pushed = transfer.push_image(registry, manifest, sample.files, mount_from=mount_from, progress=progress.append)
    assert sum(progress) == sample.size
    assert pushed.sent + pushed.present + pushed.mounted == sample.size
    assert threads() == []
    return pushed


def threads() -> list[str]:
    """Running threads of a push."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("transfer")]


def fails(registry: Repository, sample: Image) -> RegistryError:
    """Runs a push that must fail; the error names the registry and has no secret."""
    with pytest.raises(RegistryError) as caught:
        push(registry, sample)
    assert threads() == []
    shown = f"{caught.value} {caught.value.hint} {caught.value!r}"
    assert "127.0.0.1:" in shown
    assert "_state" not in shown
    assert PASSWORD not in shown
    return caught.value


def is_whole(registry: Repository, sample: Image) -> bool:
    """Whether the registry has the manifest, and all blobs with the right bytes."""
    manifest_there = registry.manifest(sample.digest)
    for blob in sample.blobs:
        registry.download(blob.digest, blob.size, io.BytesIO(), lambda _: None)
    return (
        manifest_there is not None and manifest_there.content == sample.manifest and manifest_there.media_type == IMAGE
    )


def test_all_is_sent_once(proxy: Proxy, sample: Image, tmp_path: Path) -> None:
    registry = connect(proxy.address, "plain/one")
    assert push(registry, sample).sent == sample.size
    assert proxy.got["PATCH"] == 6 * MIB
    assert proxy.got["PATCH"] + proxy.got["PUT"] == sample.size + len(sample.manifest)
    assert is_whole(registry, sample)
    proxy.heal()
    assert push(registry, sample).present == sample.size
    assert proxy.count("POST") == proxy.count("PATCH") == 0


def test_a_broken_connection_is_resumed(proxy: Proxy, sample: Image, tmp_path: Path) -> None:
    """Complete chunks are not sent again."""
    registry = connect(proxy.address, "cut/resumed")
    proxy.troubles.append(Trouble(fault=Fault.CUT_BEFORE_A_PROXY, method="PATCH", path=UPLOADS, after=3))
    assert push(registry, sample).sent == sample.size
    assert proxy.count("PATCH") == 7
    assert proxy.got["PATCH"] == 6 * MIB + MIB // 2
    assert proxy.count("POST") == len(sample.blobs), "an upload was started again"
    assert is_whole(registry, sample)


def test_a_lost_upload_starts_again(proxy: Proxy, sample: Image, tmp_path: Path) -> None:
    """docker-registry 2.8 loses an upload after an incomplete chunk."""
    registry = connect(proxy.address, "cut/anew")
    proxy.troubles.append(Trouble(fault=Fault.CUT, method="PATCH", path=UPLOADS, after=3))
    assert push(registry, sample).sent == sample.size
    assert proxy.count("POST") == len(sample.blobs) + 1
    assert is_whole(registry, sample)


@pytest.mark.parametrize(("method", "path"), [("PATCH", UPLOADS), ("PUT", UPLOADS), ("PUT", "/manifests/")])
def test_a_lost_answer(proxy: Proxy, sample: Image, tmp_path: Path, method: str, path: str) -> None:
    """The registry processed the request; the push checks that before it repeats it."""
    registry = connect(proxy.address, f"lost/{method.lower()}-{path[1]}")
    proxy.troubles.append(Trouble(fault=Fault.ANSWER_LOST, method=method, path=path))
    assert push(registry, sample).sent == sample.size
    assert proxy.troubles[0].times == 0
    if method == "PUT":
        assert proxy.count(method, path) == (1 if path == "/manifests/" else len(sample.blobs))
    assert is_whole(registry, sample)


def test_a_registry_that_stalls_is_given_up_and_resumed_by_another_push(proxy: Proxy, sample: Image) -> None:
    policy = RetryPolicy(connect_s=5, read_s=1, commit_s=5, retries=1, first_delay_s=0.05)
    registry = connect(proxy.address, "stall/one", policy)
    proxy.troubles.append(Trouble(fault=Fault.STALLS, method="PATCH", path=UPLOADS, times=10**6))
    start = time.monotonic()
    error = fails(registry, sample)
    assert time.monotonic() - start < 30
    assert "request timed out: tried 2 times" in str(error)
    proxy.heal()
    proxy.troubles.append(Trouble(fault=Fault.STALLS, method="PATCH", path=UPLOADS))
    patient = RetryPolicy(connect_s=5, read_s=2, commit_s=5, retries=5, first_delay_s=0.05)
    push(connect(proxy.address, "stall/one", patient), sample)
    assert proxy.troubles[0].times == 0


def test_another_run_sends_only_missing_blobs(proxy: Proxy, sample: Image, tmp_path: Path) -> None:
    registry = connect(proxy.address, "rerun/one")
    small = [blob for blob in sample.blobs if blob.size < MIB]
    proxy.troubles.append(Trouble(fault=Fault.STATUS_500, method="PATCH", path=UPLOADS, after=5, times=10**6))
    fails(registry, sample)
    assert registry.manifest(sample.digest) is None
    for blob in small:
        assert registry.has_blob(blob.digest), "the small ones were done long before"
    proxy.heal()
    pushed = push(registry, sample)
    assert pushed.present == sum(blob.size for blob in small)
    assert proxy.got["PATCH"] + proxy.got["PUT"] == sample.blobs[1].size + len(sample.manifest)
    assert is_whole(registry, sample)


def test_blobs_of_another_repository_are_mounted(proxy: Proxy, sample: Image, tmp_path: Path) -> None:
    push(connect(proxy.address, "mount/source"), sample)
    proxy.heal()
    registry = connect(proxy.address, "mount/target")
    pushed = push(registry, sample, mount_from=("mount/none", "mount/source"))
    assert pushed.mounted == sample.size
    assert proxy.count("PATCH") == 0
    assert proxy.got["PUT"] == len(sample.manifest)
    assert is_whole(registry, sample)
    uploads = proxy.server.data / "docker/registry/v2/repositories/mount/target/_uploads"
    assert proxy.count("DELETE", UPLOADS) == len(sample.blobs)
    assert list(uploads.rglob("startedat")) == [], "a mount that did not work left an upload"


def test_a_damaged_file_is_named(proxy: Proxy, sample: Image) -> None:
    registry = connect(proxy.address, "damaged/file")
    path = sample.files[sample.blobs[1]]
    content = bytearray(path.read_bytes())
    content[3 * MIB] ^= 1
    path.write_bytes(content)
    with pytest.raises(FileError, match="damaged: its SHA-256 is not") as caught:
        push(registry, sample)
    assert str(path) in str(caught.value)
    assert not registry.has_blob(sample.blobs[1].digest)
    assert registry.manifest(sample.digest) is None


@pytest.fixture
def docker_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Docker's configuration, with a credential helper `test` that returns USER and PASSWORD, and logs its calls."""
    helper = tmp_path / "bin/docker-credential-test"
    helper.parent.mkdir()
    answer = json.dumps({"ServerURL": "x", "Username": USER, "Secret": PASSWORD})
    helper.write_text(f"#!/bin/sh\necho \"$1 $(cat)\" >> {tmp_path}/helped\necho '{answer}'\n", encoding="utf-8")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{helper.parent}:{os.environ['PATH']}")
    config = tmp_path / "docker/config.json"
    config.parent.mkdir()
    return config


def test_basic_login_with_a_credential_helper(sample: Image, tmp_path: Path, docker_config: Path) -> None:
    with Server(folder=tmp_path, auth=registries.htpasswd(tmp_path)).serving() as server:
        address = f"127.0.0.1:{server.port}"
        error = fails(connect(address, "basic/none"), sample)
        assert f"docker login {address}" in error.hint
        docker_config.write_text(json.dumps({"credHelpers": {address: "test"}}), encoding="utf-8")
        registry = connect(address, "basic/helped")
        assert push(registry, sample).sent == sample.size
        assert f"get {address}" in (tmp_path / "helped").read_text()
        wrong = json.dumps({"auths": {address: {"auth": "dGVzdGVyOndyb25n"}}})  # tester:wrong
        docker_config.write_text(wrong, encoding="utf-8")
        assert "401 twice" in str(fails(connect(address, "basic/wrong"), sample))


def test_bearer_tokens(sample: Image, tmp_path: Path, docker_config: Path) -> None:
    """Tokens have only the needed scopes; a push renews expired tokens, but not forever."""
    docker_config.write_text(json.dumps({"credsStore": "test"}), encoding="utf-8")
    with Tokens(tmp_path).serving() as tokens, Server(folder=tmp_path, auth=tokens.auth).serving() as server:
        address = f"127.0.0.1:{server.port}"
        tokens.stale = 1
        push(connect(address, "bearer/one"), sample)
        assert tokens.asked == ["repository:bearer/one:pull,push"] * 2
        tokens.asked.clear()
        assert push(connect(address, "bearer/two"), sample, mount_from=("bearer/one",)).mounted == sample.size
        assert set(tokens.asked) == {
            "repository:bearer/two:pull,push",
            "repository:bearer/two:pull,push repository:bearer/one:pull",
        }
        tokens.stale = 10**6
        assert "401 twice" in str(fails(connect(address, "bearer/stale"), sample))


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> str:
    """A host name for the loopback that is not localhost, and needs no proxy."""
    real = socket.getaddrinfo
    name = "registry.example.test"
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest: real("127.0.0.1" if host == name else host, *rest))
    monkeypatch.setenv("NO_PROXY", name)
    return name


def test_tls(sample: Image, tmp_path: Path, named: str) -> None:
    """Hosts other than the loopback need https, with a certificate of the machine's bundle."""
    with Server(folder=tmp_path, tls=registries.certificate(tmp_path, named)).serving() as server:
        address = f"{named}:{server.port}"
        reference = ImageRef(registry=address, repository="tls/one")
        host = Host(index=IndexSettings(ca_bundle=str(tmp_path / "cert.pem")))
        registry = Repository(reference, host=host, write=True, policy=TWO_RETRIES)
        assert push(registry, sample).sent == sample.size
        assert is_whole(registry, sample)
        with pytest.raises(RegistryError, match="certificate not trusted") as caught:
            connect(address, "tls/unknown").digest_of("1.0")
        assert "SSL_CERT_FILE" in caught.value.hint


def test_no_plain_http_to_another_host(server: Server, named: str) -> None:
    with pytest.raises(RegistryError, match="the server does not use https"):
        connect(f"{named}:{server.port}", "plain/http").digest_of("1.0")


def test_disk_full_on_the_registry(sample: Image, tmp_path: Path) -> None:
    server = Server(folder=tmp_path)
    server.data.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={4 * MIB}", "tmpfs", str(server.data)], check=True, timeout=30)
    try:
        with server.serving(), Proxy(server).serving() as proxy:
            error = fails(connect(proxy.address, "disk/full"), sample)
            assert "the registry's disk is full" in str(error)
            assert "Free space on the registry" in error.hint
            # The first failure stops the uploads that have not begun.
            assert proxy.count("POST") <= len(sample.blobs), "a useless retry"
            resize = ["mount", "-o", f"remount,size={64 * MIB}", str(server.data)]
            subprocess.run(resize, check=True, timeout=30)
            registry = connect(proxy.address, "disk/full")
            push(registry, sample)
            assert is_whole(registry, sample)
    finally:
        subprocess.run(["umount", str(server.data)], check=True, timeout=30)
