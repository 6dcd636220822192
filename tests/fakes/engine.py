"""Fakes of the engine, the image tests, other programs and the terminal."""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import subprocess
import tarfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from docker.models.containers import Container
from rich.console import Console

from builder.build.dockerfile import DockerfileBuilder
from builder.build.gpu_command import GpuCommand, StagedTarget
from builder.build.image_tests import NO_RESULTS, Tester
from builder.common.errors import BuilderError, EngineError, ImageTestError
from builder.common.files import digest_of_bytes, digest_of_data
from builder.common.reference import ImageRef
from builder.engine.client import Engine, RunningContainer
from builder.engine.model import EngineInfo, ImageInfo, LoadedImage
from builder.evidence.results import OWN, Coverage, Evidence, Proof, coverage_of
from builder.matrix.tags import PLAN_LABEL
from builder.plan.plan import PlannedImage

_CONNECT = socket.socket.connect  # unit tests replace it

INFO = EngineInfo(
    version="26.1.5",
    store="overlay2",
    root="/nowhere",
    architecture="x86_64",
    cpus=4,
    memory=8_000_000_000,
    is_local=False,
)


class MemoryConsole(Console):
    """A console whose output is `text`."""

    def __init__(self, *, terminal: bool = False) -> None:
        self.memory = io.StringIO()
        super().__init__(file=self.memory, width=200, force_terminal=terminal, color_system=None)

    @property
    def text(self) -> str:
        return self.memory.getvalue()


class FakeEngine(Engine):
    """Images in a dict; `calls` are the calls that change something, in order.

    `diff_ids` are the layers of loaded images, `loaded` the names in each archive, `pulled` the blobs of each image
    that was pulled from this process; `files` are those of images, by id and path. With `broken`, no container starts.
    """

    def __init__(self, *, registry: bool = True, is_remote: bool = False, info: EngineInfo = INFO) -> None:
        self.registry = registry
        self.is_remote = is_remote
        self.settings = info
        self.calls: list[str] = []
        self.known: dict[str, ImageInfo] = {}
        self.diff_ids: dict[str, tuple[str, ...]] = {}
        self.loaded: list[list[str]] = []
        self.pulled: list[list[str]] = []
        self.blobs: set[str] = set()
        self.broken = ""

    def check(self) -> None:
        """It answers."""

    def info(self) -> EngineInfo:
        return self.settings

    def add_image(self, reference: str, *, labels: Mapping[str, str] | None = None) -> str:
        """Adds an image; returns its id, a digest of its labels or else of its name."""
        seed = labels or reference
        tags = () if reference.startswith("sha256:") else (reference,)
        image = ImageInfo(id=digest_of_data(seed), labels=dict(labels or {}), tags=tags, created="2026")
        self.known[reference] = image
        return image.id

    def add_contents(self, image_id: str, info: ImageInfo, image: PlannedImage) -> None:
        """What an image consists of, under its id: the diff ids of its layers are their inputs."""
        self.known[image_id] = replace(info, layers=tuple(layer.inputs for layer in image.layers))

    def image(self, reference: str) -> ImageInfo | None:
        return self.known.get(reference)

    def images(self, label: str) -> list[ImageInfo]:
        key, _, value = label.partition("=")
        unique = {info.id: info for info in self.known.values()}
        return [info for info in unique.values() if key in info.labels and value in ("", info.labels[key])]

    def pull(self, reference: str) -> None:
        self.calls.append(f"pull {reference}")
        if not self.registry:
            raise EngineError(f"pulling {reference}: no registry answers")
        self.add_image(reference)

    def pull_local(self, reference: str) -> Generator[Mapping[str, Any]]:
        """As an engine does: only the layers that it lacks, each checked."""
        if self.is_remote:
            raise EngineError("connection refused")
        registry, _, rest = reference.partition("/")
        name, _, manifest_digest = rest.partition("@")
        yield {"status": "Pulling from it", "id": "it"}
        with closing(Loopback(registry)) as connection:
            manifest = json.loads(connection.content(f"/v2/{name}/manifests/{manifest_digest}", manifest_digest))
            image_id = manifest["config"]["digest"]
            config = json.loads(connection.content(f"/v2/{name}/blobs/{image_id}", image_id))
            chain = tuple(config["rootfs"]["diff_ids"])
            self.pulled.append([])
            for number, blob in enumerate(layer["digest"] for layer in manifest["layers"]):
                if self._has(chain, number, blob):
                    continue
                size = len(connection.content(f"/v2/{name}/blobs/{blob}", blob))
                for status in ("Downloading", "Extracting"):
                    yield {"status": status, "progressDetail": {"current": size, "total": size}, "id": blob}
                self.pulled[-1].append(blob)
                self.blobs.add(blob)
        image_id = manifest_digest if self.settings.store == "containerd" else image_id
        labels = config["config"].get("Labels") or {}
        image = ImageInfo(id=image_id, labels=labels, tags=(), created="2026", layers=chain)
        self.known |= {image_id: image, reference: image}
        self.diff_ids[image_id] = chain

    def import_tar(self, path: Path, reference: ImageRef) -> str:
        self.calls.append(f"import {reference}")
        return self.add_image(str(reference))

    def tag(self, image_id: str, reference: ImageRef) -> None:
        self.calls.append(f"tag {reference}")
        image = next(info for info in self.known.values() if info.id == image_id)
        self.known[str(reference)] = replace(image, tags=(*image.tags, str(reference)))

    def remove_image(self, reference: str) -> None:
        if reference.startswith("127.0.0.1:"):  # the last name of a temporary image
            image = self.known.pop(reference)
            del self.known[image.id], self.diff_ids[image.id]
        else:
            self.calls.append(f"remove {reference}")

    def sweep(self, checkout: str) -> None:
        self.calls.append("sweep")

    @contextmanager
    def running(self, image: str, *, checkout: str, **options: Any) -> Iterator[RunningContainer]:
        if self.broken:
            raise EngineError(f"starting {image}: {self.broken}")
        yield RunningContainer(Container())

    def load(self, archive: Iterable[bytes]) -> None:
        """As the engine does: an archive may omit the first layers if an image of the engine has them too."""
        with tarfile.open(fileobj=io.BytesIO(b"".join(archive))) as tar:
            contents = {member.name: _read(tar, member) for member in tar}
        self.loaded.append(list(contents))
        docker = json.loads(contents["manifest.json"])[0]
        config = json.loads(contents[docker["Config"]])
        chain = tuple(config["rootfs"]["diff_ids"])
        for number, path in enumerate(docker["Layers"]):
            blob = path.removeprefix("blobs/").replace("/", ":")
            if path in contents:
                self.blobs.add(blob)
            elif not self._has(chain, number, blob):
                raise EngineError(f"loading: {path} is not in the archive")
        manifest = json.loads(contents["index.json"])["manifests"][0]["digest"]
        image_id = manifest if self.settings.store == "containerd" else digest_of_bytes(contents[docker["Config"]])
        self.calls.append(f"load {image_id}")
        labels = config["config"].get("Labels") or {}
        self.known[image_id] = ImageInfo(id=image_id, labels=labels, tags=(), created="2026", layers=chain)
        self.diff_ids[image_id] = chain

    def _has(self, chain: tuple[str, ...], number: int, blob: str) -> bool:
        if self.settings.store == "containerd":
            return blob in self.blobs
        return any(chain[: number + 1] == other[: number + 1] for other in self.diff_ids.values())


class Loopback(http.client.HTTPConnection):
    """A connection to this process, which a unit test may open."""

    def connect(self) -> None:
        self.sock = socket.socket()
        _CONNECT(self.sock, (self.host, self.port))

    def content(self, path: str, expected: str) -> bytes:
        """The content at a path. Raises EngineError, as an engine does, if it does not match its digest."""
        self.request("GET", path)
        response = self.getresponse()
        try:
            data = response.read()
        except http.client.IncompleteRead as error:
            raise EngineError("unexpected EOF") from error
        if response.status != http.client.OK or digest_of_bytes(data) != expected:
            raise EngineError(f"status {response.status}, or verification failed for digest {expected}")
        return data


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    content = tar.extractfile(member)
    assert content is not None
    return content.read()


@dataclass
class FakeMaker(DockerfileBuilder):
    """Records builds. `broken` are the errors by cell; `before` is called first; `layers` are being made.

    `lost`: `find` returns no image, as if the engine had lost it.
    """

    fake: FakeEngine
    broken: dict[str, BuilderError] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)
    before: Callable[[str], None] = lambda _: None
    layers: dict[str, Future[None]] = field(default_factory=dict)
    lost: bool = False

    def find(self, image: PlannedImage) -> LoadedImage | None:
        made = "" if self.lost else self.made.get(image.id, "")
        return LoadedImage(id=made, digest=made) if made else None

    def start(self, images: Sequence[PlannedImage]) -> None:
        self.before("start")
        self.fake.calls.append(f"start {' '.join(image.id for image in images)}")

    def as_ready(self, images: Sequence[PlannedImage]) -> Iterator[PlannedImage]:
        yield from (image for image in images if image.id not in self.layers)
        for image in images:
            if image.id in self.layers:
                self.layers[image.id].result(10)
                yield image

    def build(self, image: PlannedImage) -> LoadedImage:
        self.before(image.id)
        self.fake.calls.append(f"build {image.id}")
        if image.id in self.broken:
            raise self.broken[image.id]
        self.made[image.id] = self.fake.add_image(f"sha256:{image.id}", labels={PLAN_LABEL: image.plan})
        self.fake.add_contents(self.made[image.id], self.fake.known[f"sha256:{image.id}"], image)
        return LoadedImage(id=self.made[image.id], digest=self.made[image.id], origin="built")

    def record_tagged(self, image: PlannedImage) -> None:
        self.fake.calls.append(f"name {image.id}")

    def close(self) -> None:
        self.fake.calls.append("close")


@dataclass
class FakeTester(Tester):
    """All images pass but those in `failing`; keeps the results by image, and the thorough components of each test."""

    fake: FakeEngine
    failing: frozenset[str] = frozenset()
    thorough: dict[str, frozenset[str]] = field(default_factory=dict)
    results: dict[str, Coverage] = field(default_factory=dict)
    stopped: int = 0
    gpu_command: GpuCommand | None = None

    def coverage(self, image: PlannedImage, loaded: LoadedImage) -> Coverage:
        return self.results.get(loaded.digest, Coverage())

    def is_complete(self, image: PlannedImage, coverage: Coverage) -> bool:
        return not coverage.failure

    def test(
        self, image: PlannedImage, loaded: LoadedImage, known: Coverage = NO_RESULTS, target: StagedTarget | None = None
    ) -> Coverage:
        self.fake.calls.append(f"test {image.id}")
        self.thorough[image.id] = image.thorough
        bad = image.id in self.failing
        evidence = Evidence(
            image=loaded.digest, cell=image.id, plan=image.plan, suite={}, kind="image",
            passed=("test_other",), failed=("test_it",) if bad else (),
        )  # fmt: skip
        self.results[loaded.digest] = coverage_of([Proof(evidence=evidence, signer=OWN)])
        if bad:
            raise ImageTestError(f"{image.id}: 1 of 2 tests failed", hint="look")
        return coverage_of([*known.reports, *self.results[loaded.digest].reports])

    def stop(self) -> None:
        self.stopped += 1


@dataclass
class Programs:
    """A fake of subprocess.run: `answer` returns exit status, output and errors of a command.

    `calls` are the commands, `files` the text of the files in their `setting=path` arguments.
    """

    answer: Callable[[list[str]], tuple[int, str, str]]
    calls: list[list[str]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)

    def __call__(self, command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        self.calls.append(list(command))
        for word in command:
            name = word.partition("=")[2]
            if name.startswith("/") and Path(name).is_file():
                self.files[name] = Path(name).read_text()
        code, out, err = self.answer(list(command))
        return subprocess.CompletedProcess(list(command), code, out, err)


def place(error: BuilderError) -> str:
    """The `file:line:column` at the start of an error's message."""
    match = re.match(r"[\w./-]+(:[0-9]+){1,2}(?=: )", str(error))
    assert match, f"no place in: {error}"
    return match[0]
