"""A registry without a network: everything is in memory."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, urlsplit

from builder.common.errors import BuilderError
from builder.common.files import digest_of_bytes, is_digest
from builder.common.reference import ImageRef
from builder.index.host import Host
from builder.layers import oci
from builder.layers.oci import MANIFEST_TYPE, Descriptor, Manifest
from builder.registry import artifacts
from builder.registry.client import Repository
from builder.registry.failures import RejectedError
from builder.release.staging import StagingArea
from tests.fakes.wire import Reply, Sent, part


class MemoryRegistry(Repository):
    """A repository in memory; `calls` are the changes, in order.

    `has` are blobs without contents, `others` those of other repositories by name. `api` is what its referrers API
    answers, None without one. `before_put` are called before the next manifests under a fallback tag are stored.
    """

    def __init__(
        self, *, has: Iterable[Descriptor] = (), others: dict[str, Sequence[Descriptor]] | None = None
    ) -> None:
        self.confirm_s = 0  # nobody else writes
        self.name = "registry.example.test/a/b"
        self.has = {blob.digest for blob in has}
        self.known = set[str]()
        self.others = {name: {blob.digest for blob in blobs} for name, blobs in (others or {}).items()}
        self.tags: dict[str, str] = {}
        self.contents: dict[str, bytes] = {}
        self.types: dict[str, str] = {}
        self.calls: list[str] = []
        self.api: list[bytes] | None = None
        self.before_put: list[Callable[[], object]] = []
        self.on_upload: Callable[[str], None] = lambda _: None
        self.on_put: Callable[[str], None] = lambda _: None
        self.stop = threading.Event()
        self.running = self.most = 0
        self._lock = threading.Lock()

    def stoppable(self, stop: threading.Event) -> Repository:
        self.stop = stop
        return self

    def retry_program(self, run: Callable[[], str], digest: str) -> str:
        return run()

    # ---- blobs

    def has_blob(self, digest: str) -> bool:
        return digest in self.has or digest in self.contents

    def mount(self, digest: str, source: str) -> bool:
        self.calls.append(f"mount from {source}")
        return digest in self.others.get(source, set())

    def upload(self, digest: str, path: Path, size: int, sent: Callable[[int], None]) -> None:
        with self._lock:
            self.calls.append(f"upload {size}")
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            sent(size)
            self.on_upload(digest)
            content = path.read_bytes()
            if digest_of_bytes(content) != digest:
                raise RejectedError("no", status=400, code="DIGEST_INVALID")
            self.contents[digest] = content
        finally:
            with self._lock:
                self.running -= 1

    def read_blob(self, digest: str) -> bytes:
        if digest not in self.contents:
            raise RejectedError("no such blob", status=404)
        return self.contents[digest]

    def read_range(self, digest: str, start: int, end: int) -> bytes:
        self.calls.append(f"read {end - start} bytes")
        return self.read_blob(digest)[start:end]

    def download(self, digest: str, size: int, out: BinaryIO, read: Callable[[int], None]) -> None:
        content = self.read_blob(digest)
        assert len(content) == size
        out.write(content)
        read(size)

    # ---- manifests and tags

    def digest_of(self, reference: str) -> str | None:
        return self.tags.get(reference)

    def list_tags(self) -> list[str]:
        return [tag for tag in self.tags if not is_digest(tag)]

    def manifest(self, reference: str) -> Manifest | None:
        digest = self.tags.get(reference, reference)
        content = self.contents.get(digest)
        if not content:
            return None
        return Manifest(
            digest=digest_of_bytes(content), media_type=self.types.get(digest, MANIFEST_TYPE), content=content
        )

    def put_manifest(self, reference: str, content: bytes, media_type: str) -> str:
        self.put_manifest_once(reference, content, media_type)
        self.on_put(reference)
        return digest_of_bytes(content)

    def put_manifest_once(self, reference: str, content: bytes, media_type: str) -> None:
        if self.before_put and reference.startswith("sha256-"):
            self.before_put.pop(0)()
        self.calls.append(f"put {reference}")
        digest = digest_of_bytes(content)
        self.contents[digest] = content
        self.types[digest] = media_type
        self.tags[reference] = digest

    def referrers(self, digest: str) -> list[bytes] | None:
        return self.api

    def listed(self, tag: str) -> list[dict[str, Any]]:
        """The entries of the index under a fallback tag."""
        return list(json.loads(self.contents[self.tags[tag]])["manifests"])

    def add_image(self, config: object) -> str:
        """Adds an image without layers; returns its digest. `config` is JSON data, by default for amd64, or bytes."""
        data = {"architecture": "amd64"} | config if isinstance(config, dict) else config
        content = data if isinstance(data, bytes) else json.dumps(data).encode()
        blob = {"digest": digest_of_bytes(content), "size": len(content)}
        manifest = json.dumps({"config": blob, "layers": []}).encode()
        self.contents |= {digest_of_bytes(content): content, digest_of_bytes(manifest): manifest}
        return digest_of_bytes(manifest)

    def add_index(self, **images: str) -> str:
        """Adds an index of images, whose digests are by architecture; returns its digest."""
        descriptors = {
            arch: Descriptor(media_type=MANIFEST_TYPE, digest=digest, size=len(self.contents[digest]))
            for arch, digest in images.items()
        }
        index = oci.platform_index(descriptors)
        digest = digest_of_bytes(index)
        self.contents[digest], self.types[digest] = index, oci.INDEX_TYPE
        return digest


class Registries(dict[str, MemoryRegistry]):
    """Repositories by their names, HOST/PATH, each made when it is first used. Answers the requests of a `Wire`.

    Source: OCI distribution specification.
    """

    def __missing__(self, name: str) -> MemoryRegistry:
        self[name] = MemoryRegistry()
        return self[name]

    def __call__(self, sent: Sent) -> Reply | Exception:
        address = urlsplit(sent.url)
        path, query = address.path.removeprefix("/v2/"), dict(parse_qsl(address.query))
        name, kind, reference = re.split("/(manifests|blobs|tags|referrers)/", path, maxsplit=1)
        registry = self[f"{address.netloc}/{name}"]
        try:
            if kind == "manifests":
                return self._manifest(registry, reference, sent)
            if kind == "blobs":
                return self._blob(registry, reference, query, sent)
        except BuilderError as error:
            return error
        pages = [json.dumps({"tags": registry.list_tags()}).encode()] if kind == "tags" else registry.api
        return Reply(404) if pages is None else Reply(body=pages[0])

    def _manifest(self, registry: MemoryRegistry, reference: str, sent: Sent) -> Reply:
        if sent.method == "PUT":
            registry.put_manifest(reference, sent.body, sent.headers["Content-Type"])
            return Reply(201)
        manifest = registry.manifest(reference)
        if manifest is None:
            return Reply(404)
        headers = {"Content-Type": manifest.media_type, "Docker-Content-Digest": manifest.digest}
        return Reply(body=manifest.content, headers=headers)

    def _blob(self, registry: MemoryRegistry, reference: str, query: Mapping[str, str], sent: Sent) -> Reply:
        if sent.method == "POST" and "mount" in query:
            return Reply(201 if registry.mount(query["mount"], query["from"]) else 202)
        if sent.method == "POST":
            return Reply(202, headers={"Location": f"{sent.url}1"})
        if sent.method == "PUT":
            assert digest_of_bytes(sent.body) == query["digest"]
            registry.calls.append(f"upload {len(sent.body)}")
            registry.on_upload(query["digest"])
            registry.contents[query["digest"]] = sent.body
            return Reply(201)
        if not registry.has_blob(reference):
            return Reply(404)
        if "Range" in sent.headers:
            return part(registry.contents[reference], sent)
        return Reply(body=registry.contents.get(reference, b""))


class MemoryArea(StagingArea):
    """A staging area whose repositories are in memory: `registry_of` returns the one of a reference."""

    def __init__(self, text: str, registry_of: Callable[[ImageRef], MemoryRegistry]) -> None:
        super().__init__(text, "", Host())
        self._registry_of = registry_of

    def open(self, name: str, *, write: bool = False) -> Repository:
        return self._registry_of(self.repository(name))


def attach(
    repository: Repository,
    subject: Descriptor,
    kind: str,
    documents: Mapping[str, bytes],
    notes: Mapping[str, str] = {},
) -> None:
    """Attaches one artifact, as in `artifact_manifest`, to an image."""
    with artifacts.attaching(repository, subject) as attachments:
        attachments.add(kind, documents, notes)


def documents(repository: Repository, subject: str, artifact_type: str) -> list[dict[str, bytes]]:
    """The documents of each artifact of a type that is attached to an image."""
    found = artifacts.attached(repository, subject, artifact_type)
    return [artifacts.read_artifact(repository, artifact, artifact_type, subject) or {} for artifact in found]
