"""The endpoint that an engine pulls from: what it serves, to whom, and for how long."""

from __future__ import annotations

import gzip
import http.client
import random
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from http.client import HTTPResponse

import pytest

from builder.common.files import digest_of_bytes
from builder.engine import endpoint as endpoints
from builder.engine.endpoint import Content, Endpoint
from builder.layers.oci import LAYER_TYPE, MANIFEST_TYPE, PLAIN_LAYER_TYPE
from builder.layers.store import Store
from tests.fakes.engine import Loopback

MANIFEST = b'{"layers":[]}'
PLAIN = random.Random(1).randbytes(1000) + bytes(3_000_000)
MEMBERS = b"".join(gzip.compress(PLAIN[at : at + 100_000], mtime=0) for at in range(0, len(PLAIN), 100_000))
OTHER = "sha256:" + "0" * 64


@dataclass
class Served:
    """An endpoint with a manifest, a layer as it is in the store, and the same layer inflated."""

    endpoint: Endpoint
    store: Store
    packed: str

    def ask(self, kind: str, of: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
        """The answer for a manifest or blob of the image."""
        name = self.endpoint.reference(of).partition("/")[2].partition("@")[0]
        return self.request(f"/v2/{name}/{kind}/{of}", method, **headers)

    def request(self, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
        with closing(self.connection()) as connection:
            connection.request(method, path, headers=headers)
            response = connection.getresponse()
            return response, response.read()

    def connection(self) -> Loopback:
        return Loopback(f"127.0.0.1:{self.endpoint.port}", timeout=20)


PLAIN_DIGEST, MANIFEST_DIGEST = digest_of_bytes(PLAIN), digest_of_bytes(MANIFEST)


@pytest.fixture
def served(store: Store) -> Iterator[Served]:
    packed = store.put(MEMBERS, LAYER_TYPE)
    contents = {
        MANIFEST_DIGEST: Content.of(MANIFEST, MANIFEST_TYPE),
        packed.digest: Content(media_type=LAYER_TYPE, size=packed.size, read=partial(store.chunks, packed.digest)),
        PLAIN_DIGEST: Content(
            media_type=PLAIN_LAYER_TYPE, size=len(PLAIN), read=partial(store.inflated, packed.digest)
        ),
    }
    with Endpoint(contents) as endpoint:
        yield Served(endpoint, store, packed.digest)


def test_a_manifest_and_a_layer_as_stored(served: Served) -> None:
    response, body = served.ask("manifests", MANIFEST_DIGEST)
    assert (response.status, body) == (200, MANIFEST)
    assert response.headers["Content-Type"] == MANIFEST_TYPE
    assert response.headers["Docker-Content-Digest"] == MANIFEST_DIGEST
    assert not served.endpoint.is_used, "an engine has the image only when it has its blobs"
    response, body = served.ask("blobs", served.packed)
    assert (response.status, body) == (200, MEMBERS)
    assert response.headers["Content-Type"] == LAYER_TYPE
    assert served.endpoint.is_used


def test_a_layer_of_many_members_inflated(served: Served) -> None:
    response, body = served.ask("blobs", PLAIN_DIGEST)
    assert response.status == 200
    assert int(response.headers["Content-Length"]) == len(PLAIN)
    assert digest_of_bytes(body) == PLAIN_DIGEST
    head, body = served.ask("blobs", PLAIN_DIGEST, "HEAD")
    assert (head.status, body) == (200, b"")
    for name in ("Content-Length", "Docker-Content-Digest"):
        assert head.headers[name] == response.headers[name]
    assert not served.endpoint.is_broken


@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_nothing_is_served_without_the_secret(served: Served, method: str) -> None:
    name = served.endpoint.reference(PLAIN_DIGEST).split("/")[1]
    paths = [
        f"/v2/image/blobs/{PLAIN_DIGEST}",
        f"/v2//image/blobs/{PLAIN_DIGEST}",
        f"/v2/{'0' * len(name)}/image/blobs/{PLAIN_DIGEST}",
        f"/v2/{name[:-1]}/image/blobs/{PLAIN_DIGEST}",
        f"/v2/{name}0/image/blobs/{PLAIN_DIGEST}",
        "/v2/_catalog",
        "/",
    ]
    for path in paths:
        response, body = served.request(path, method)
        assert (response.status, body) == (404, b""), path
        assert set(response.headers) <= {"Content-Length", "Connection"}
    assert not served.endpoint.is_used


def test_nothing_else_of_the_store_is_served(served: Served) -> None:
    other = served.store.put(b"of another image", LAYER_TYPE)
    for of in (other.digest, OTHER):
        response, body = served.ask("blobs", of)
        assert (response.status, body) == (404, b"")
    name = served.endpoint.reference(OTHER).split("/")[1]
    for end in (
        "tags/list",
        "blobs/../../index.json",
        "manifests/latest",
        f"blobs/{PLAIN_DIGEST}?x=1",
        "blobs/uploads/",
    ):
        response, body = served.request(f"/v2/{name}/image/{end}")
        assert (response.status, body) == (404, b""), end


@pytest.mark.parametrize("method", ["PUT", "POST", "PATCH", "DELETE", "OPTIONS"])
def test_nothing_can_be_changed(served: Served, method: str) -> None:
    response, body = served.ask("blobs", served.packed, method)
    assert (response.status, body) == (405, b"")
    assert response.headers["Allow"] == "GET, HEAD"
    assert served.store.matches(served.packed)


@pytest.mark.parametrize("damage", ["truncated", "changed", "missing"])
def test_a_damaged_layer_is_cut_off(served: Served, damage: str) -> None:
    path = served.store.path(served.packed)
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(MEMBERS[:-50] if damage == "truncated" else MEMBERS[:1000] + b"\0" * 9 + MEMBERS[1009:])
    with pytest.raises(http.client.IncompleteRead):
        served.ask("blobs", PLAIN_DIGEST)
    assert served.endpoint.is_broken


@pytest.mark.parametrize(
    "sent",
    [bytes([0x16, 3, 1, 0, 200]) + bytes(200), b"GET /a b c d HTTP/1.1\r\n\r\n"],
    ids=["TLS", "too many words"],
)
def test_an_invalid_request_gets_no_text(served: Served, capfd: pytest.CaptureFixture[str], sent: bytes) -> None:
    """Engines try TLS first, and fall back to HTTP only for an answer in HTTP."""
    with closing(served.connection()) as connection:
        connection.connect()
        connection.sock.sendall(sent)
        answer = connection.sock.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.endswith(b"\r\n\r\n")
    assert capfd.readouterr() == ("", "")


def test_a_client_that_hangs_up_is_no_fault(
    served: Served, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builder.layers.store.PLAIN_CHUNK", 1000)
    with closing(served.connection()) as connection:
        name = served.endpoint.reference(PLAIN_DIGEST).split("/")[1]
        connection.request("GET", f"/v2/{name}/image/blobs/{PLAIN_DIGEST}")
        connection.getresponse().read(10)
    response, _ = served.request("/v2/")
    assert response.status == 200
    assert not served.endpoint.is_broken
    assert capfd.readouterr() == ("", "")


def test_nothing_is_served_afterwards(store: Store) -> None:
    with Endpoint({}) as endpoint:
        served = Served(endpoint, store, OTHER)
        assert served.request("/v2/")[0].status == 200
    with pytest.raises(ConnectionRefusedError):
        served.request("/v2/")


def test_each_endpoint_has_a_secret_of_its_own_on_this_machine_alone() -> None:
    names = set()
    for _ in range(2):
        with Endpoint({}) as endpoint:
            address, name, _ = endpoint.reference(OTHER).split("/")
            names.add(name)
            assert address == f"127.0.0.1:{endpoint.port}"
            assert endpoint._server.server_address[0] == "127.0.0.1"
    assert [len(name) for name in names] == [32, 32]
    assert endpoints.SILENCE_S > 60, "an engine reads nothing while its disk is busy"
