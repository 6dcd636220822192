"""Pushes to a real registry, over a connection that is cut or stalls, and with logins.

Failures without a connection, retries and messages: tests/unit/registry. TLS: tests/integration, test_private_registry.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from builder.common.errors import RegistryError
from builder.common.reference import ImageRef
from builder.common.tasks import RetryPolicy
from builder.index.host import Host
from builder.layers.oci import Manifest
from builder.registry import transfer
from builder.registry.client import Repository
from builder.registry.transfer import Sent
from tests.integration import registry as registries
from tests.integration.registry import IMAGE, PASSWORD, USER, Fault, Image, Proxy, Server, Tokens, Trouble, image

MIB = 1024 * 1024
IMPATIENT = RetryPolicy(connect_s=5, read_s=2, commit_s=20, retries=2, first_delay_s=0.05, longest_delay_s=2)
UPLOADS, MANIFESTS = "/blobs/uploads/", "/manifests/"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One registry for all tests; each uses its own repositories."""
    with Server(folder=tmp_path_factory.mktemp("registry")).serving() as running:
        yield running


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server).serving() as running:
        yield running


@pytest.fixture(autouse=True)
def docker_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Docker's configuration without logins."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    return tmp_path / "config.json"


@pytest.fixture
def sample(tmp_path: Path) -> Image:
    """An image with a configuration, a large layer, and a small one."""
    return image(tmp_path / "blobs", 6 * MIB + 17, 1000)


def connect(address: str, repository: str) -> Repository:
    reference = ImageRef(registry=address, repository=repository)
    return Repository(reference, host=Host(), write=True, policy=IMPATIENT)


def push(registry: Repository, sample: Image, *mount_from: str) -> Sent:
    """Pushes an image; the registry has all of it then, and the progress is complete."""
    progress: list[int] = []
    pushed = transfer.send_blobs(registry, sample.files, mount_from=mount_from, progress=progress.append)
    registry.put_manifest(sample.digest, sample.manifest, IMAGE)
    assert sum(progress) == pushed.sent + pushed.present + pushed.mounted == sample.size
    assert registry.manifest(sample.digest) == Manifest.of(sample.manifest, IMAGE)
    for blob in sample.blobs:
        registry.download(blob.digest, blob.size, io.BytesIO(), lambda _: None)
    return pushed


def test_all_is_sent_once(proxy: Proxy, sample: Image) -> None:
    registry = connect(proxy.address, "plain/one")
    assert push(registry, sample).sent == sample.size
    assert proxy.got["PUT"] == sample.size + len(sample.manifest)
    proxy.heal()
    assert push(registry, sample).present == sample.size
    assert proxy.count("POST") == 0


@pytest.mark.parametrize(
    ("fault", "path", "is_repeated"),
    [
        (Fault.CUT_BEFORE_A_PROXY, UPLOADS, True),
        (Fault.STALLS, UPLOADS, True),
        (Fault.CUT, UPLOADS, True),
        (Fault.ANSWER_LOST, UPLOADS, False),
        (Fault.ANSWER_LOST, MANIFESTS, False),
    ],
)
def test_a_push_goes_on_after_a_fault(proxy: Proxy, sample: Image, fault: Fault, path: str, is_repeated: bool) -> None:
    registry = connect(proxy.address, f"fault/{fault.name}-{path[1]}".lower())
    proxy.troubles.append(Trouble(fault=fault, method="PUT", path=path))
    assert push(registry, sample).sent == sample.size
    assert proxy.troubles[0].times == 0
    assert proxy.count("POST", UPLOADS) == len(sample.blobs) + is_repeated


def test_a_login_with_a_password(sample: Image, tmp_path: Path, docker_config: Path) -> None:
    with Server(folder=tmp_path, auth=registries.htpasswd(tmp_path)).serving() as server:
        address = f"127.0.0.1:{server.port}"
        with pytest.raises(RegistryError):
            push(connect(address, "basic/one"), sample)
        login(docker_config, address)
        assert push(connect(address, "basic/one"), sample).sent == sample.size


def test_a_login_with_tokens(sample: Image, tmp_path: Path, docker_config: Path) -> None:
    """Tokens have only the needed scopes; a push renews expired tokens, but not forever."""
    with Tokens(tmp_path).serving() as tokens, Server(folder=tmp_path, auth=tokens.auth).serving() as server:
        address = f"127.0.0.1:{server.port}"
        login(docker_config, address)
        tokens.stale = 1
        push(connect(address, "bearer/one"), sample)
        assert tokens.asked == ["repository:bearer/one:pull,push"] * 2
        tokens.asked.clear()
        assert push(connect(address, "bearer/two"), sample, "bearer/one").mounted == sample.size
        both = "repository:bearer/two:pull,push repository:bearer/one:pull"
        assert set(tokens.asked) == {"repository:bearer/two:pull,push", both}
        tokens.stale = 10**6
        with pytest.raises(RegistryError):
            push(connect(address, "bearer/stale"), sample)


def login(docker_config: Path, address: str) -> None:
    secret = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    docker_config.write_text(json.dumps({"auths": {address: {"auth": secret}}}), encoding="utf-8")
