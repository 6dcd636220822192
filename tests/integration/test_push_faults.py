"""Pushing to a registry that misbehaves: it gets there all the same, or says clearly why not, and a rerun finishes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder import push as pushing
from builder import registry_upload
from builder.errors import FileError, RegistryError
from builder.host import Host
from builder.index import IndexSettings
from builder.push import Blob, Pushed
from builder.reference import ImageRef
from builder.registry import Registry
from builder.registry_http import Patience
from tests.integration import registry as registries
from tests.integration.checkout import ROOT
from tests.integration.registry import IMAGE, PASSWORD, USER, Fault, Image, Proxy, Server, Tokens, Trouble, image

MIB = 1024 * 1024
IMPATIENT = Patience(connect_s=5, read_s=2, commit_s=5, retries=2, first_s=0.05, longest_s=2)
UPLOADS = "/blobs/uploads/"
SHORT = {"read_s": 1, "commit_s": 1}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One registry for all tests, which use repositories of their own."""
    registries.install()
    with Server(folder=tmp_path_factory.mktemp("registry")).serving() as running:
        yield running


@pytest.fixture(scope="module")
def _proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server).serving() as running:
        yield running


@pytest.fixture
def proxy(_proxy: Proxy) -> Iterator[Proxy]:
    """The registry as the tests see it, without troubles at the start and at the end."""
    _proxy.heal()
    yield _proxy
    _proxy.heal()


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No login of this machine's user counts; chunks are small enough for small blobs to have many."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setattr(registry_upload, "CHUNK", MIB)


@pytest.fixture
def made(tmp_path: Path) -> Image:
    """A configuration, a layer of seven chunks, and a small one."""
    return image(tmp_path / "blobs", 6 * MIB + 17, 1000)


def connect(address: str, repository: str, patience: Patience = IMPATIENT) -> Registry:
    reference = ImageRef(registry=address, repository=repository)
    return Registry(reference, host=Host(), write=True, patience=patience)


def push(registry: Registry, made: Image, *, mount_from: tuple[str, ...] = ()) -> Pushed:
    """Pushes, and checks that progress came to an end and no thread is left."""
    told: list[int] = []
    pushed = pushing.push(
        registry, manifest=made.manifest, media_type=IMAGE, blobs=made.blobs, mount_from=mount_from,
        progress=told.append,
    )  # fmt: skip
    assert sum(told) == made.size
    assert pushed.digest == made.digest
    assert pushed.sent + pushed.skipped + pushed.mounted == made.size
    assert threads() == []
    return pushed


def threads() -> list[str]:
    """Those of a push that still run."""
    return [one.name for one in threading.enumerate() if "(_work)" in one.name]


def fails(registry: Registry, made: Image) -> RegistryError:
    """A push that ends with an error, which names the registry and holds no secret."""
    with pytest.raises(RegistryError) as caught:
        push(registry, made)
    assert threads() == []
    shown = f"{caught.value} {caught.value.hint} {caught.value!r}"
    assert "127.0.0.1:" in shown
    assert "_state" not in shown
    assert PASSWORD not in shown
    return caught.value


def is_whole(registry: Registry, made: Image, tmp_path: Path) -> bool:
    """Whether the registry has the manifest, and every blob with the right bytes."""
    found = registry.manifest(made.digest)
    for blob in made.blobs:
        with (tmp_path / "read").open("wb") as file:
            registry.fetch_blob(blob.digest, blob.size, file)
    return found is not None and found.content == made.manifest and found.media_type == IMAGE


def test_all_is_sent_once(proxy: Proxy, made: Image, tmp_path: Path) -> None:
    registry = connect(proxy.address, "plain/one")
    assert push(registry, made).sent == made.size
    assert proxy.got["PATCH"] == 6 * MIB
    assert proxy.got["PATCH"] + proxy.got["PUT"] == made.size + len(made.manifest)
    assert is_whole(registry, made, tmp_path)
    proxy.heal()
    assert push(registry, made).skipped == made.size
    assert proxy.count("POST") == proxy.count("PATCH") == 0


@pytest.mark.parametrize(
    ("method", "path"),
    [("HEAD", "/blobs/"), ("POST", UPLOADS), ("PATCH", UPLOADS), ("PUT", UPLOADS), ("PUT", "/manifests/")],
)
def test_500_for_a_while(proxy: Proxy, made: Image, tmp_path: Path, method: str, path: str) -> None:
    registry = connect(proxy.address, "status/passes")
    made = image(tmp_path / "blobs", 2 * MIB, seed=len(method + path))
    proxy.troubles.append(Trouble(fault=Fault.STATUS_500, method=method, path=path, times=2))
    assert push(registry, made).sent == made.size
    assert proxy.troubles[0].times == 0
    assert is_whole(registry, made, tmp_path)


def test_500_for_ever(proxy: Proxy, made: Image) -> None:
    proxy.troubles.append(Trouble(fault=Fault.STATUS_500, method="POST", path=UPLOADS, times=10**6))
    error = fails(connect(proxy.address, "status/stays"), made)
    assert "uploading blob" in str(error)
    assert "status/stays: answered 500 Internal Server Error" in str(error)
    assert "tried 3 times" in str(error)
    assert "again" in error.hint
    # Three blobs side by side; the first that gives up ends the others.
    assert 3 <= proxy.count("POST") <= 9


def test_429_says_when_to_come_back(proxy: Proxy, made: Image) -> None:
    proxy.troubles.append(Trouble(fault=Fault.STATUS_429, method="PUT", path="/manifests/"))
    start = time.monotonic()
    push(connect(proxy.address, "status/busy"), made)
    assert time.monotonic() - start >= 1
    assert proxy.count("PUT", "/manifests/") == 2


def test_a_broken_connection_is_resumed(proxy: Proxy, made: Image, tmp_path: Path) -> None:
    """The whole chunks that arrived are not sent again."""
    registry = connect(proxy.address, "cut/resumed")
    proxy.troubles.append(Trouble(fault=Fault.CUT_BEFORE_A_PROXY, method="PATCH", path=UPLOADS, after=3))
    assert push(registry, made).sent == made.size
    assert proxy.count("PATCH") == 7
    assert proxy.got["PATCH"] == 6 * MIB + MIB // 2
    assert proxy.count("POST") == len(made.blobs), "an upload was begun anew"
    assert is_whole(registry, made, tmp_path)


def test_an_upload_that_is_gone_begins_anew(proxy: Proxy, made: Image, tmp_path: Path) -> None:
    """docker-registry 2.8 cannot go on where it has half a chunk: it knows the upload no more."""
    registry = connect(proxy.address, "cut/anew")
    proxy.troubles.append(Trouble(fault=Fault.CUT, method="PATCH", path=UPLOADS, after=3))
    assert push(registry, made).sent == made.size
    assert proxy.count("POST") == len(made.blobs) + 1
    assert is_whole(registry, made, tmp_path)


def test_a_registry_that_always_cuts_ends_in_an_error(proxy: Proxy, made: Image) -> None:
    proxy.troubles.append(Trouble(fault=Fault.CUT, method="PATCH", path=UPLOADS, after=2, times=10**6))
    start = time.monotonic()
    error = fails(connect(proxy.address, "cut/ever"), made)
    assert "uploading blob" in str(error)
    assert "connection" in str(error)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(("method", "path"), [("PATCH", UPLOADS), ("PUT", UPLOADS), ("PUT", "/manifests/")])
def test_a_lost_answer(proxy: Proxy, made: Image, tmp_path: Path, method: str, path: str) -> None:
    """The registry did it, and is asked before it is done again."""
    registry = connect(proxy.address, f"lost/{method.lower()}-{path[1]}")
    proxy.troubles.append(Trouble(fault=Fault.ANSWER_LOST, method=method, path=path))
    assert push(registry, made).sent == made.size
    assert proxy.troubles[0].times == 0
    if method == "PUT":
        assert proxy.count(method, path) == (1 if path == "/manifests/" else len(made.blobs))
    assert is_whole(registry, made, tmp_path)


def test_a_lost_answer_for_a_tag(proxy: Proxy, made: Image) -> None:
    """Even where every answer is lost: the tag is where it should be, and that is what counts."""
    registry = connect(proxy.address, "lost/tag")
    push(registry, made)
    proxy.troubles.append(Trouble(fault=Fault.ANSWER_LOST, method="PUT", path="/manifests/1.0", times=10**6))
    told = pushing.tag(registry, made.digest, made.manifest, IMAGE, ["1.0"], [])
    assert told == [f"{registry.name}:1.0 is {made.digest}"]
    assert proxy.count("PUT", "/manifests/1.0") == 1


def test_401_at_the_last_request(proxy: Proxy, made: Image) -> None:
    registry = connect(proxy.address, "login/last")
    proxy.troubles.append(Trouble(fault=Fault.STATUS_401, method="PUT", path="/manifests/"))
    push(registry, made)
    assert proxy.count("PUT", "/manifests/") == 2


def test_401_twice(proxy: Proxy, made: Image) -> None:
    proxy.troubles.append(Trouble(fault=Fault.STATUS_401, method="PUT", path="/manifests/", times=2))
    error = fails(connect(proxy.address, "login/twice"), made)
    assert "writing login/twice@" in str(error)
    assert "401 twice" in str(error)
    assert f"docker login {proxy.address}" in error.hint
    assert proxy.count("PUT", "/manifests/") == 2


@pytest.mark.parametrize(("method", "path"), [("HEAD", "/blobs/"), ("PATCH", UPLOADS), ("PUT", "/manifests/")])
def test_a_stall_once_and_for_ever(proxy: Proxy, made: Image, method: str, path: str) -> None:
    patience = Patience(connect_s=5, retries=1, first_s=0.05, **SHORT)
    registry = connect(proxy.address, f"stall/{method.lower()}", patience)
    proxy.troubles.append(Trouble(fault=Fault.STALLS, method=method, path=path, times=10**6))
    start = time.monotonic()
    error = fails(registry, made)
    assert time.monotonic() - start < 6
    assert "no answer in time: tried 2 times" in str(error)
    assert f"stall/{method.lower()}" in str(error)
    proxy.heal()
    proxy.troubles.append(Trouble(fault=Fault.STALLS, method=method, path=path))
    push(registry, made)
    assert proxy.troubles[0].times == 0


def test_a_rerun_sends_only_what_is_missing(proxy: Proxy, made: Image, tmp_path: Path) -> None:
    registry = connect(proxy.address, "rerun/one")
    small = [blob for blob in made.blobs if blob.size < MIB]
    proxy.troubles.append(Trouble(fault=Fault.STATUS_500, method="PATCH", path=UPLOADS, after=5, times=10**6))
    fails(registry, made)
    assert registry.manifest(made.digest) is None
    for blob in small:
        assert registry.has_blob(blob.digest), "the small ones were done long before"
    proxy.heal()
    pushed = push(registry, made)
    assert pushed.skipped == sum(blob.size for blob in small)
    assert proxy.got["PATCH"] + proxy.got["PUT"] == made.blobs[1].size + len(made.manifest)
    assert is_whole(registry, made, tmp_path)


def test_blobs_of_another_repository_are_taken_over(proxy: Proxy, made: Image, tmp_path: Path) -> None:
    push(connect(proxy.address, "mount/source"), made)
    proxy.heal()
    registry = connect(proxy.address, "mount/target")
    pushed = push(registry, made, mount_from=("mount/none", "mount/source"))
    assert pushed.mounted == made.size
    assert proxy.count("PATCH") == 0
    assert proxy.got["PUT"] == len(made.manifest)
    assert is_whole(registry, made, tmp_path)
    uploads = proxy.server.data / "docker/registry/v2/repositories/mount/target/_uploads"
    assert proxy.count("DELETE", UPLOADS) == len(made.blobs)
    assert list(uploads.rglob("startedat")) == [], "a mount that did not work left an upload"


def test_a_blob_that_nobody_has(proxy: Proxy, made: Image) -> None:
    blobs = tuple(Blob(digest=blob.digest, size=blob.size, path=None) for blob in made.blobs)
    error = fails(connect(proxy.address, "lacks/one"), Image(manifest=made.manifest, blobs=blobs))
    assert "lacks blob sha256:" in str(error)


def test_a_damaged_file_is_named(proxy: Proxy, made: Image) -> None:
    registry = connect(proxy.address, "damaged/file")
    path = made.blobs[1].path
    assert path is not None
    content = bytearray(path.read_bytes())
    content[3 * MIB] ^= 1
    path.write_bytes(content)
    with pytest.raises(FileError, match="damaged: its SHA-256 is not") as caught:
        push(registry, made)
    assert str(path) in str(caught.value)
    assert not registry.has_blob(made.blobs[1].digest)
    assert registry.manifest(made.digest) is None


def test_tags(proxy: Proxy, made: Image, tmp_path: Path) -> None:
    """Versioned tags stay, moving ones move, and a race is noticed by the one who loses it."""
    registry = connect(proxy.address, "tags/one")
    other = image(tmp_path / "other", 2000, seed=7)
    for one in (made, other):
        push(registry, one)
    pushing.tag(registry, other.digest, other.manifest, IMAGE, ["1.0.0"], ["1.0"])
    told = pushing.tag(registry, made.digest, made.manifest, IMAGE, ["1.0.0", "1.0.1"], ["1.0"])
    assert registry.digest_of("1.0.0") == other.digest
    assert registry.digest_of("1.0.1") == registry.digest_of("1.0") == made.digest
    assert [line.split(" ")[0].rpartition(":")[2] for line in told] == ["1.0.0", "1.0.1", "1.0"]
    assert f"stays at {other.digest}" in told[0]

    def race() -> None:
        connect(f"127.0.0.1:{proxy.server.port}", "tags/one").put_manifest("1.0", made.manifest, IMAGE)

    proxy.troubles.append(Trouble(fault=Fault.MEANWHILE, method="PUT", path="/manifests/1.0", meanwhile=race))
    with pytest.raises(RegistryError, match=f"tag 1.0 moved from {other.digest} to {made.digest}"):
        pushing.tag(registry, other.digest, other.manifest, IMAGE, [], ["1.0"])


@pytest.fixture
def docker_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Docker's configuration, with a credential helper `test` that knows USER's PASSWORD, and says what it did."""
    helper = tmp_path / "bin/docker-credential-test"
    helper.parent.mkdir()
    answer = json.dumps({"ServerURL": "x", "Username": USER, "Secret": PASSWORD})
    helper.write_text(f"#!/bin/sh\necho \"$1 $(cat)\" >> {tmp_path}/helped\necho '{answer}'\n", encoding="utf-8")
    helper.chmod(0o755)
    monkeypatch.setenv("PATH", f"{helper.parent}:{os.environ['PATH']}")
    config = tmp_path / "docker/config.json"
    config.parent.mkdir()
    return config


def test_basic_login_by_a_credential_helper(made: Image, tmp_path: Path, docker_config: Path) -> None:
    with Server(folder=tmp_path, auth=registries.htpasswd(tmp_path)).serving() as server:
        address = f"127.0.0.1:{server.port}"
        error = fails(connect(address, "basic/none"), made)
        assert f"docker login {address}" in error.hint
        docker_config.write_text(json.dumps({"credHelpers": {address: "test"}}), encoding="utf-8")
        registry = connect(address, "basic/helped")
        assert push(registry, made).sent == made.size
        assert f"get {address}" in (tmp_path / "helped").read_text()
        wrong = json.dumps({"auths": {address: {"auth": "dGVzdGVyOndyb25n"}}})  # tester:wrong
        docker_config.write_text(wrong, encoding="utf-8")
        assert "401 twice" in str(fails(connect(address, "basic/wrong"), made))


def test_bearer_tokens(made: Image, tmp_path: Path, docker_config: Path) -> None:
    """Tokens for what is done, renewed where the registry finds them too old, and none for ever."""
    docker_config.write_text(json.dumps({"credsStore": "test"}), encoding="utf-8")
    with Tokens(tmp_path).serving() as tokens, Server(folder=tmp_path, auth=tokens.auth).serving() as server:
        address = f"127.0.0.1:{server.port}"
        tokens.stale = 1
        push(connect(address, "bearer/one"), made)
        assert tokens.asked == ["repository:bearer/one:pull,push"] * 2
        tokens.asked.clear()
        assert push(connect(address, "bearer/two"), made, mount_from=("bearer/one",)).mounted == made.size
        assert set(tokens.asked) == {
            "repository:bearer/two:pull,push",
            "repository:bearer/two:pull,push repository:bearer/one:pull",
        }
        tokens.stale = 10**6
        assert "401 twice" in str(fails(connect(address, "bearer/stale"), made))


@pytest.fixture
def named(monkeypatch: pytest.MonkeyPatch) -> str:
    """A name that is not loopback's, but leads there; no proxy is asked for it."""
    real = socket.getaddrinfo
    name = "registry.example.test"
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *rest: real("127.0.0.1" if host == name else host, *rest))
    monkeypatch.setenv("NO_PROXY", name)
    return name


def test_tls(made: Image, tmp_path: Path, named: str) -> None:
    """Another host than loopback needs https, with a certificate that the machine's bundle knows."""
    with Server(folder=tmp_path, tls=registries.certificate(tmp_path, named)).serving() as server:
        address = f"{named}:{server.port}"
        reference = ImageRef(registry=address, repository="tls/one")
        host = Host(index=IndexSettings(ca_bundle=str(tmp_path / "cert.pem")))
        registry = Registry(reference, host=host, write=True, patience=IMPATIENT)
        assert push(registry, made).sent == made.size
        assert is_whole(registry, made, tmp_path)
        with pytest.raises(RegistryError, match="its certificate is not accepted") as caught:
            connect(address, "tls/unknown").digest_of("1.0")
        assert "SSL_CERT_FILE" in caught.value.hint


def test_no_plain_http_to_another_host(server: Server, named: str) -> None:
    with pytest.raises(RegistryError, match="it does not speak https there"):
        connect(f"{named}:{server.port}", "plain/http").digest_of("1.0")


def test_disk_full_on_the_registry(made: Image, tmp_path: Path) -> None:
    server = Server(folder=tmp_path)
    server.data.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={4 * MIB}", "tmpfs", str(server.data)], check=True, timeout=30)
    try:
        with server.serving(), Proxy(server).serving() as proxy:
            error = fails(connect(proxy.address, "disk/full"), made)
            assert "the registry's disk is full" in str(error)
            assert "Free space on the registry" in error.hint
            assert proxy.count("POST") == len(made.blobs), "what cannot help was tried again"
            resize = ["mount", "-o", f"remount,size={64 * MIB}", str(server.data)]
            subprocess.run(resize, check=True, timeout=30)
            registry = connect(proxy.address, "disk/full")
            push(registry, made)
            assert is_whole(registry, made, tmp_path)
    finally:
        subprocess.run(["umount", str(server.data)], check=True, timeout=30)


SCRIPT = """\
import sys
from pathlib import Path
from builder import registry_upload
from tests.integration import test_push_faults as tests
from tests.integration.registry import image
registry_upload.CHUNK = tests.MIB
address, folder, seed = sys.argv[1:]
tests.push(tests.connect(address, "killed/one"), image(Path(folder), *tests.KILLED, seed=int(seed)))
"""
KILLED = (3 * MIB, 5 * MIB)


def test_killed_in_the_middle(proxy: Proxy, tmp_path: Path) -> None:
    made = image(tmp_path / "blobs", *KILLED, seed=99)
    registry = connect(proxy.address, "killed/one")
    proxy.troubles.append(Trouble(fault=Fault.STALLS, method="PATCH", path=UPLOADS, after=4, times=10**6))
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, proxy.address, str(tmp_path / "blobs"), "99"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        assert proxy.stalled.wait(20), "the upload did not get that far"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(10)
    assert process.returncode == -signal.SIGKILL
    assert registry.manifest(made.digest) is None, "the manifest was there before its blobs"
    proxy.heal()
    pushed = push(registry, made)
    assert pushed.skipped >= made.blobs[0].size, "the configuration was there"
    assert is_whole(registry, made, tmp_path)
