"""A registry on the loopback (Debian's docker-registry), and a proxy in front of it with configurable troubles."""

from __future__ import annotations

import hashlib
import http.client
import json
import random
import re
import socket
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path

from builder.common.files import digest_of_bytes
from builder.common.reference import ImageRef
from builder.index.host import Host
from builder.layers.oci import CONFIG_TYPE, PLAIN_LAYER_TYPE, Descriptor
from builder.registry.client import Repository
from tests.fakes.loopback import STALL_S, Loopback, Request
from tests.integration import programs
from tests.integration.checkout import until

PROGRAM = "docker-registry"
START_S = 20
IMAGE = "application/vnd.oci.image.manifest.v1+json"
CONFIG = """\
version: 0.1
log: {{level: error, accesslog: {{disabled: true}}}}
storage:
  filesystem: {{rootdirectory: {data}}}
  delete: {{enabled: true}}
http: {{addr: "{address}", secret: the same after a restart{tls}}}
"""


@dataclass(kw_only=True)
class Server:
    """The registry itself. Its storage is in `folder`; `tls` is a part of its configuration.

    `fixed_port` is 0 for a free one.
    """

    folder: Path
    ip: str = "127.0.0.1"
    tls: str = ""
    fixed_port: int = 0
    port: int = 0
    _process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def address(self) -> str:
        return f"{self.ip}:{self.port}"

    def repository(self, name: str) -> Repository:
        return Repository(ImageRef(registry=self.address, repository=name), host=Host(), write=True)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(encoding="utf-8", errors="replace")

    @property
    def _config(self) -> Path:
        return self.folder / "config.yml"

    @contextmanager
    def serving(self) -> Iterator[Server]:
        programs.install(PROGRAM)
        self.data.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            free.bind((self.ip, self.fixed_port))
            self.port = free.getsockname()[1]
        text = CONFIG.format(data=self.data, address=self.address, tls=self.tls)
        self._config.write_text(text, encoding="utf-8")
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [PROGRAM, "serve", str(self._config)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        try:
            until(self._answers, "the registry to answer", seconds=START_S)
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        if self._process:
            self._process.kill()
            self._process.wait(10)

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log
        try:
            socket.create_connection((self.ip, self.port), timeout=1).close()
        except OSError:
            return False
        return True


def certificate(folder: Path, name: str) -> str:
    """Configuration for https under a name, with a self-signed certificate: `cert.pem`."""
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN={name}",
            "-addext", f"subjectAltName={'IP' if name[0].isdigit() else 'DNS'}:{name}",
            "-keyout", str(folder / "key.pem"), "-out", str(folder / "cert.pem"),
        ],
        capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    return f", tls: {{certificate: {folder}/cert.pem, key: {folder}/key.pem}}"


class Fault(Enum):
    """A fault of a request."""

    STATUS_507 = auto()
    STALLS = auto()


@dataclass(kw_only=True)
class Trouble:
    """A fault of some requests: `times` of them, after `after` requests of this kind without it."""

    fault: Fault
    method: str
    path: str
    times: int = 1
    after: int = 0


class Habit(Enum):
    """What another registry does all the time."""

    # GitLab: a tag `sha256-<hex>` that does not exist is the manifest with this digest.
    TAG_IS_DIGEST = auto()
    # To `builder`, not to cosign: a redirect to a web page instead of the referrers API, and 200 for what was stored.
    ODD_ANSWERS = auto()


class Proxy(Loopback):
    """A proxy for a registry. `troubles` and `habits` can change while it runs; `got` counts the bytes of bodies by
    method, `asked` the requests by program, without reads of a fallback list of attachments: while another process
    changes one, it is read until it settles.
    """

    def __init__(self, server: Server) -> None:
        super().__init__()
        self.server = server
        self.troubles: list[Trouble] = []
        self.habits: set[Habit] = set()
        self.requests: list[str] = []
        self.got: Counter[str] = Counter()
        self.asked: Counter[str] = Counter()
        self._lock = threading.Lock()

    def repository(self, name: str) -> Repository:
        return Repository(ImageRef(registry=self.address, repository=name), host=Host(), write=True)

    def heal(self) -> None:
        """Removes all troubles and habits, resets the counts, and ends waiting requests."""
        self.troubles.clear()
        self.habits.clear()
        self.requests.clear()
        self.got.clear()
        self.asked.clear()
        super().heal()

    def count(self, method: str, path: str = "") -> int:
        """The number of requests of a kind."""
        return sum(bool(re.match(rf"{method} .*{path}", request)) for request in self.requests)

    def trouble(self, method: str, path: str) -> Trouble | None:
        """Counts a request; returns its fault."""
        with self._lock:
            self.requests.append(f"{method} {path}")
            for trouble in self.troubles:
                if trouble.method == method and re.search(trouble.path, path) and trouble.times:
                    if trouble.after:
                        trouble.after -= 1
                        return None
                    trouble.times -= 1
                    return trouble
        return None

    def took(self, method: str, size: int) -> None:
        with self._lock:
            self.got[method] += size

    def answer(self, request: Request) -> None:
        # How often a list of artifacts is read until it is confirmed depends on other writers.
        if not (request.command == "GET" and re.search("/manifests/sha256-[0-9a-f]{64}$", request.path)):
            with self._lock:
                self.asked[request.headers.get("User-Agent", "").partition("/")[0]] += 1
        trouble = self.trouble(request.command, request.path)
        fault = trouble.fault if trouble else None
        size = int(request.headers.get("Content-Length", "0"))
        is_odd = Habit.ODD_ANSWERS in self.habits and request.headers["User-Agent"] == "builder"
        if fault is Fault.STALLS:
            self.stall(request)
        elif fault is Fault.STATUS_507:
            self.took(request.command, len(request.rfile.read(size)))
            request.reply(507, b"{}")
        elif is_odd and "/referrers/" in request.path:
            request.reply(302, headers=[("Location", "https://pages.example.test/")])
        else:
            self._forward(request, size, is_odd=is_odd)

    def _forward(self, request: Request, left: int, *, is_odd: bool) -> None:
        registry = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=STALL_S)
        try:
            registry.putrequest(request.command, request.path, skip_host=True, skip_accept_encoding=True)
            for name, value in request.headers.items():
                registry.putheader(name, value)  # Host too: the registry names addresses that lead here again
            registry.endheaders()
            while left and (piece := request.rfile.read(min(left, 65536))):
                self.took(request.command, len(piece))
                registry.send(piece)
                left -= len(piece)
            answer = registry.getresponse()
            body = answer.read()
            digest = re.sub(r"/manifests/sha256-(?=[0-9a-f]{64}$)", "/manifests/sha256:", request.path)
            if Habit.TAG_IS_DIGEST in self.habits and answer.status == 404 and digest != request.path:
                registry.request(request.command, digest, headers=dict(request.headers))
                answer = registry.getresponse()
                body = answer.read()
        finally:
            registry.close()
        dropped = ("transfer-encoding", "connection") + (() if request.command == "HEAD" else ("content-length",))
        headers = [(name, value) for name, value in answer.getheaders() if name.lower() not in dropped]
        request.reply(200 if answer.status == 201 and is_odd else answer.status, body, headers)


@dataclass(frozen=True, kw_only=True)
class Image:
    """An image: a manifest, and blobs in files, the configuration first."""

    manifest: bytes
    files: Mapping[Descriptor, Path]

    @property
    def blobs(self) -> list[Descriptor]:
        return list(self.files)

    @property
    def digest(self) -> str:
        return digest_of_bytes(self.manifest)

    @property
    def size(self) -> int:
        return sum(blob.size for blob in self.blobs)


def image(folder: Path, *sizes: int, seed: int = 0) -> Image:
    """An image with layers of these sizes, with random bytes that depend only on size and seed."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "seed": seed}).encode()
    contents = [config, *(random.Random(f"{seed}-{size}").randbytes(size) for size in sizes)]
    files: dict[Descriptor, Path] = {}
    for content in contents:
        sha256 = hashlib.sha256(content).hexdigest()
        (folder / sha256).write_bytes(content)
        media_type = PLAIN_LAYER_TYPE if files else CONFIG_TYPE
        files[Descriptor(media_type=media_type, digest=f"sha256:{sha256}", size=len(content))] = folder / sha256
    listed = [blob.as_data() for blob in files]
    manifest = {"schemaVersion": 2, "mediaType": IMAGE, "config": listed[0], "layers": listed[1:]}
    return Image(manifest=json.dumps(manifest).encode(), files=files)
