"""Stand-ins for the engine, the image tests, other programs and the terminal."""

from __future__ import annotations

import io
import json
import re
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console

from builder import digest
from builder.engine import Engine, EngineInfo, ImageInfo
from builder.errors import BuilderError, EngineError, ImageTestError
from builder.evidence import Evidence
from builder.imagetest import Tester
from builder.plan import PlannedImage
from builder.reference import ImageRef
from builder.settings import PLAN_LABEL

INFO = EngineInfo(
    version="26.1.5",
    store="overlay2",
    root="/nowhere",
    buildkit=True,
    runtimes=("runc",),
    architecture="x86_64",
    cpus=4,
    memory=8_000_000_000,
    is_local=False,
)


class MemoryConsole(Console):
    """A console whose output is `text`; no terminal unless told so."""

    def __init__(self, *, terminal: bool = False) -> None:
        self.memory = io.StringIO()
        super().__init__(file=self.memory, width=200, force_terminal=terminal, color_system=None)

    @property
    def text(self) -> str:
        return self.memory.getvalue()


class FakeEngine(Engine):
    """Images in a dict; `calls` says what was done, in order.

    `diff_ids` are the layers of images that were loaded; `loaded` the names in each archive; `saved` what `save` gives.
    """

    def __init__(self, *, registry: bool = True, info: EngineInfo = INFO) -> None:
        self.registry = registry
        self.told = info
        self.calls: list[str] = []
        self.known: dict[str, ImageInfo] = {}
        self.broken: dict[str, dict[str, Any]] = {}
        self.contexts: dict[str, bytes] = {}
        self.labels: dict[str, dict[str, str]] = {}
        self.builds: list[tuple[str, bool]] = []
        self.diff_ids: dict[str, tuple[str, ...]] = {}
        self.loaded: list[list[str]] = []
        self.saved: bytes = b""

    def info(self) -> EngineInfo:
        return self.told

    def have(self, reference: str, *, labels: Mapping[str, str] | None = None) -> str:
        """Puts an image in; returns its id, which follows from its labels or else its name."""
        seed = labels or reference
        tags = () if reference.startswith("sha256:") else (reference,)
        made = ImageInfo(id=digest.of_data(seed), labels=dict(labels or {}), tags=tags, size=1, created="2026")
        self.known[reference] = made
        return made.id

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
        self.have(reference)

    def import_tar(self, path: Path, reference: ImageRef) -> str:
        self.calls.append(f"import {reference}")
        return self.have(str(reference))

    def tag(self, image_id: str, reference: ImageRef) -> None:
        self.calls.append(f"tag {reference}")
        found = next(info for info in self.known.values() if info.id == image_id)
        self.known[str(reference)] = replace(found, tags=(*found.tags, str(reference)))

    def remove_image(self, reference: str) -> bool:
        self.calls.append(f"remove {reference}")
        return True

    def sweep(self, checkout: str) -> int:
        self.calls.append("sweep")
        return 0

    def cache_bytes(self) -> int:
        return 0

    def prune_cache(self) -> int:
        self.calls.append("prune")
        return 5_000_000_000

    def has_remote(self, reference: str) -> bool:
        return self.registry

    def build(
        self,
        context: bytes,
        *,
        dockerfile: str,
        arguments: Mapping[str, str],
        labels: Mapping[str, str],
        network: str = "",
        target: str = "",
        fresh: bool = False,
    ) -> Iterator[dict[str, Any]]:
        cell = Path(dockerfile).parent.name
        self.calls.append(f"build {cell} on {arguments['BASE']}")
        self.builds.append((target, fresh))
        self.contexts[cell] = context
        self.labels[cell] = dict(labels)
        if cell in self.broken:
            yield self.broken[cell]
            return
        with tarfile.open(fileobj=io.BytesIO(context)) as tar:
            member = tar.extractfile(dockerfile)
            assert member is not None
            plan = re.findall(rf'{re.escape(PLAN_LABEL)}="(.*?)"', member.read().decode())
        image_id = digest.of_data({PLAN_LABEL: plan[0]})
        self.have(image_id, labels={PLAN_LABEL: plan[0]})
        yield {"id": "moby.image.id", "aux": {"ID": image_id}}

    def save(self, image_id: str, out: BinaryIO) -> None:
        self.calls.append(f"save {image_id}")
        out.write(self.saved)

    def chains(self) -> set[tuple[str, ...]]:
        return set(self.diff_ids.values())

    def load(self, archive: Iterable[bytes]) -> None:
        """As the engine: an archive may leave out layers that an image which is there begins with."""
        with tarfile.open(fileobj=io.BytesIO(b"".join(archive))) as tar:
            contents = {member.name: _read(tar, member) for member in tar}
        self.loaded.append(list(contents))
        docker = json.loads(contents["manifest.json"])[0]
        config = json.loads(contents[docker["Config"]])
        chain = tuple(config["rootfs"]["diff_ids"])
        for number, path in enumerate(docker["Layers"]):
            if path not in contents and not self._has(chain, number, path):
                raise EngineError(f"loading: {path} is not in the archive")
        manifest = json.loads(contents["index.json"])["manifests"][0]["digest"]
        image_id = manifest if self.told.store == "containerd" else digest.of_bytes(contents[docker["Config"]])
        self.calls.append(f"load {image_id}")
        labels = config["config"].get("Labels") or {}
        self.known[image_id] = ImageInfo(id=image_id, labels=labels, tags=(), size=1, created="2026")
        self.diff_ids[image_id] = chain

    def _has(self, chain: tuple[str, ...], number: int, path: str) -> bool:
        if self.told.store == "containerd":
            return any(path in names for names in self.loaded[:-1])
        return any(chain[: number + 1] == other[: number + 1] for other in self.chains())


def _read(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    content = tar.extractfile(member)
    assert content is not None
    return content.read()


@dataclass
class FakeMethod:
    """Builds images by writing it down. `broken` says which fail, and how; `before` is called first.

    `fresh` is one that has to build before it knows.
    """

    fake: FakeEngine
    broken: dict[str, BuilderError] = field(default_factory=dict)
    made: dict[str, str] = field(default_factory=dict)
    before: Callable[[str], None] = lambda _: None
    fresh: bool = False

    def find(self, image: PlannedImage) -> str:
        return "" if self.fresh else self.made.get(image.id, "")

    def prepare(self, images: Sequence[PlannedImage]) -> None:
        self.before("prepare")
        self.fake.calls.append(f"prepare {' '.join(image.id for image in images)}")

    def build(self, image: PlannedImage) -> str:
        self.before(image.id)
        self.fake.calls.append(f"build {image.id}")
        if image.id in self.broken:
            raise self.broken[image.id]
        self.made[image.id] = self.fake.have(f"sha256:{image.id}", labels={PLAN_LABEL: image.digest})
        return self.made[image.id]

    def tagged(self, image: PlannedImage) -> None:
        self.fake.calls.append(f"name {image.id}")

    def close(self) -> None:
        self.fake.calls.append("close")


@dataclass
class FakeTester(Tester):
    """Passes every image but those in `failing`; keeps what it found as evidence."""

    fake: FakeEngine
    failing: frozenset[str] = frozenset()
    kept: dict[str, Evidence] = field(default_factory=dict)
    stopped: int = 0

    def known(self, image: PlannedImage, image_id: str) -> Evidence | None:
        return self.kept.get(image_id)

    def test(self, image: PlannedImage, image_id: str) -> Evidence:
        self.fake.calls.append(f"test {image.id}")
        bad = image.id in self.failing
        self.kept[image_id] = evidence_of(image, image_id, failed=("test_it",) if bad else ())
        if bad:
            raise ImageTestError(f"{image.id}: 1 of 2 tests failed", hint="look")
        return self.kept[image_id]

    def stop(self) -> None:
        self.stopped += 1


def evidence_of(image: PlannedImage, image_id: str, *, failed: tuple[str, ...] = ()) -> Evidence:
    return Evidence(
        image_id=image_id,
        cell=image.id,
        plan=image.digest,
        suite="sha256:0",
        passed=("test_other",),
        failed=failed,
        gpu="not run",
    )


@dataclass
class Programs:
    """Stands in for subprocess.run: `answer` gives what a command did.

    `calls` keeps the commands, `files` the text of the files that they named by `setting=path`.
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
    """The `file:line:column` that an error's message begins with."""
    found = re.match(r"[\w./-]+(:[0-9]+){1,2}(?=: )", str(error))
    assert found, f"no place in: {error}"
    return found[0]
