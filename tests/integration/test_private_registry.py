"""Registries in a private network: plain http where it is allowed, certificates, repositories that must be created."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.common.errors import RegistryError
from builder.common.reference import ImageRef
from builder.common.tasks import RetryPolicy
from builder.evidence import signing
from builder.evidence.signing import Signer
from builder.index.host import Host
from builder.registry import transfer, transport
from builder.registry.client import Repository
from tests.integration import registry as registries
from tests.integration.checkout import Checkout, docker
from tests.integration.registry import IMAGE, Server, image

IMPATIENT = RetryPolicy(connect_s=5, read_s=5, retries=0)


@pytest.fixture(scope="module")
def bridge() -> str:
    """An address of this machine that is not its loopback."""
    return docker("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}")


def connect(address: str) -> Repository:
    reference = ImageRef(registry=address, repository="private/one")
    return Repository(reference, host=Host(), write=True, policy=IMPATIENT)


def test_certificates(bridge: str, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An authority in certs.d, for pushes and for cosign."""
    monkeypatch.setattr(transport, "FOLDER", tmp_path / "certs.d")
    monkeypatch.setenv("COSIGN_PASSWORD", "")
    (tmp_path / "server").mkdir()
    tls = registries.certificate(tmp_path / "server", bridge)
    sample = image(tmp_path / "image", 3000)
    with Server(folder=tmp_path / "server", ip=bridge, tls=tls).serving() as server:
        with pytest.raises(RegistryError, match="is not trusted") as caught:
            connect(server.address).list_tags()
        folder = tmp_path / "certs.d" / server.address
        assert f"/etc/docker/certs.d/{server.address}/ca.crt" in caught.value.hint

        folder.mkdir(parents=True)
        (folder / "ca.crt").symlink_to(tmp_path / "server/cert.pem")
        registry = connect(server.address)
        transfer.send_blobs(registry, sample.files)
        registry.put_manifest(sample.digest, sample.manifest, IMAGE)
        stored = registry.manifest(sample.digest)
        assert stored
        Signer(key=str(keys / "ours.key")).sign_manifest(registry, stored.descriptor, {"cell": "c"})
        assert signing.has_signature(registry, sample.digest)


def test_plain_http(released: Checkout, bridge: str, tmp_path: Path) -> None:
    with Server(folder=tmp_path / "registry", ip=bridge).serving() as server:
        settings = f"staging: {server.address}/staging\n"
        released.edit("matrix.yaml", 'registry: ""\n', f'registry: ""\n{settings}')
        output = released.builder("stage", code=14)
        assert "the registry does not use https" in output
        assert f"add {server.address} to `insecure` in matrix.yaml" in output

        released.edit("matrix.yaml", "staging: ", f"insecure: [{server.address}]\nstaging: ")
        released.builder("stage")
