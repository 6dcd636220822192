"""A registry with an image that packages can be put on, without uv, an index, cosign and an engine."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pypi_simple import DistributionPackage

from builder.common.console import View
from builder.common.errors import LockError
from builder.common.reference import ImageRef
from builder.engine.client import Engine
from builder.engine.run import Run
from builder.evidence.signing import Signer, Trust
from builder.index.download import Fetcher
from builder.index.host import Host
from builder.index.releases import Index
from builder.index.wheels import LockedWheel
from builder.layers.oci import Descriptor
from builder.layers.store import Store
from builder.lock.uv import ListedWheels, Target, Uv
from builder.registry.client import Repository
from builder.release.additions import Addition, AdditionRequest, parse_requirement
from builder.release.image_sources import sources_in_registry
from builder.release.parent import Parent, read_parent
from builder.steps.add import AddOptions, add, repeated_addition
from tests.fakes.engine import FakeEngine, MemoryConsole
from tests.fakes.registry import MemoryRegistry, Registries
from tests.fakes.wire import Wire
from tests.unit.layers.test_wheel import Wheel
from tests.unit.release.parents import ParentImage, project

PARENT, TARGET = ImageRef.parse("registry.example.test/org/em:1"), ImageRef.parse("registry.example.test/team/vision:1")
LOCAL = ImageRef.parse("vision:1")
NOBODY = Trust(signers=(), root=Path())


class FakeUv:
    """The methods of `Uv`: chooses the wheels of `index`, and those of the parent where it has that version.

    `pages` has the releases that the index lists by package, version and day; uv finds no solution with those that it
    did not choose, nor for what is in `conflicts`.
    """

    def __init__(self) -> None:
        self.index: dict[str, Wheel] = {}
        self.pages: dict[str, dict[str, str]] = {}
        self.conflicts: list[str] = []
        self.calls: list[tuple[Target, list[str], list[str], Mapping[str, str] | None]] = []

    def versions(
        self, target: Target, packages: Sequence[str], constraints: Sequence[str], preferred: Mapping[str, str] | None
    ) -> dict[str, str]:
        self.calls.append((target, list(packages), list(constraints), preferred))
        chosen = [f"{locked(wheel).name}=={locked(wheel).version}" for wheel in self.index.values()]
        others = {f"{name}=={version}" for name, page in self.pages.items() for version in page}.difference(chosen)
        if unsolvable := [text for text in packages if text in self.conflicts or text in others]:
            raise LockError(f"no solution\nBecause {unsolvable[0]} depends on ember==3.0 and ember==1.9, ...")
        return {locked(wheel).name: locked(wheel).version for wheel in self.index.values()}

    def fetch(self, wanted: LockedWheel, folder: Path) -> Path:
        wheel, path = self.index[wanted.name], folder / f"{wanted.sha256}.whl"
        assert hashlib.sha256(wheel.content).hexdigest() == wanted.sha256
        path.write_bytes(wheel.content)
        return path

    def wheels(self, target: Target, packages: Sequence[str], constraints: Sequence[str]) -> ListedWheels:
        self.versions(target, packages, constraints, None)
        listed = {name: locked(wheel) for name, wheel in self.index.items()}
        for name, installed in target.installed.items():
            if name not in listed or listed[name].version == installed.wheel.version:
                listed[name] = installed.wheel
        return {name: (wheel, "") for name, wheel in listed.items()}

    def files(self, name: str) -> list[Any]:
        return [
            DistributionPackage.from_json_data(
                {"filename": f"{name}-{version}-py3-none-any.whl", "url": "https://x.test/", "hashes": {}}
                | ({"upload-time": f"{day}T12:00:00Z"} if day else {}),
                name,
            )
            for version, day in self.pages.get(name, {}).items()
        ]


def locked(wheel: Wheel) -> LockedWheel:
    name, version = wheel.name.split("-")[:2]
    sha256 = hashlib.sha256(wheel.content).hexdigest()
    return LockedWheel(
        name=name.replace("_", "-"), version=version, file=wheel.name, size=len(wheel.content), sha256=sha256
    )


@dataclass
class Bench:
    """A registry with a parent; `uv.index` has the wheels that can be added: einops 0.8."""

    store: Store
    registries: Registries = field(default_factory=Registries)
    uv: FakeUv = field(default_factory=FakeUv)
    console: MemoryConsole = field(default_factory=MemoryConsole)

    @classmethod
    def install(cls, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
        """Answers the requests to registries, and replaces uv and the index."""
        bench = cls(Store(folder))
        Wire.install(monkeypatch, bench.registries)
        monkeypatch.setattr(Repository, "confirm_s", 0)
        monkeypatch.setattr(Uv, "versions", lambda _, *arguments: bench.uv.versions(*arguments))
        monkeypatch.setattr(Uv, "wheels", lambda _, *arguments: bench.uv.wheels(*arguments))
        monkeypatch.setattr(Index, "files", lambda _, name, __: bench.uv.files(name))
        monkeypatch.setattr(Fetcher, "fetch", lambda _, wheel: bench.uv.fetch(wheel, bench.store.downloads))
        bench.push_parent()
        bench.offer(project("einops", version="0.8"))
        return bench

    def __post_init__(self) -> None:
        self.parent = ParentImage(self.registries[PARENT.name])

    @property
    def target(self) -> MemoryRegistry:
        return self.registries[TARGET.name]

    def push_parent(self) -> None:
        """Lets the target mount the blobs of the parent, as a registry does that has both."""
        self.parent.push("1")
        self.target.others = {PARENT.repository: set(self.parent.registry.contents)}

    def offer(self, *wheels: Wheel) -> None:
        self.uv.index = {locked(wheel).name: wheel for wheel in wheels}

    @property
    def shown(self) -> list[str]:
        """The lines of the steps."""
        return [re.sub(r"^(\w+) +", r"\1: ", line) for line in self.console.text.splitlines()]

    def run(self, engine: Engine | None = None) -> Run:
        return Run(
            checkout=None,
            host=Host(),
            store=self.store,
            view=View(self.console),
            connect=lambda: engine or Engine.connect(),
        )

    def add(self, *additions: Addition, engine: Engine | None = None, **options: Any) -> dict[ImageRef, str]:
        """With an engine, tests the images."""
        given = additions or (addition("einops"),)
        with self.store.used():
            return add(self.run(engine), given, AddOptions(test=engine is not None, **options))

    def repeat(self, trust: Trust = NOBODY) -> Addition:
        self.mount()
        with self.store.used():
            return repeated_addition(self.run(), TARGET, AddOptions(trust=trust))

    def mount(self) -> None:
        """Gives the target the blobs that it mounted."""
        self.target.contents |= {
            digest: content
            for digest, content in self.parent.registry.contents.items()
            if digest not in self.parent.registry.types
        }

    def config(self, tag: str = "1") -> dict[str, Any]:
        manifest = self.target.manifest(tag)
        assert manifest
        data: dict[str, Any] = json.loads(self.target.contents[json.loads(manifest.content)["config"]["digest"]])
        return data

    def history(self, tag: str = "1") -> list[str]:
        """The layers that were added, the lowest first."""
        return [line["created_by"] for line in self.config(tag)["history"]][len(self.parent.layers) :]

    def child(self) -> Parent:
        """The image that was pushed, as a parent."""
        self.mount()
        [source] = sources_in_registry(self.target, "1", "amd64")
        return read_parent(source)


def addition(
    *packages: str, parent: ImageRef = PARENT, target: ImageRef = TARGET, env: Mapping[str, str] = {},
    index: str = "", keep: bool = False,
) -> Addition:  # fmt: skip
    requested = tuple(parse_requirement(package, "test") for package in packages)
    request = AdditionRequest(requirements=requested, env=dict(env), index=index, keep=keep)
    return Addition(parent=parent, target=target, request=request)


class ImportingEngine(FakeEngine):
    """Imports fail with `errors` in its containers, and `pip check` prints `conflicts`, if there are any."""

    def __init__(self, errors: str = "", conflicts: str = "") -> None:
        super().__init__()
        self.errors, self.conflicts = errors, conflicts
        self.commands: list[list[str]] = []

    @contextmanager
    def running(self, image: str, *, checkout: str, **options: Any) -> Iterator[Any]:
        assert image in self.known
        yield Container(self)


@dataclass
class Container:
    engine: ImportingEngine

    def run(self, command: list[str], environment: Mapping[str, str], timeout_s: float) -> Any:
        self.engine.commands.append(command)
        errors, conflicts = self.engine.errors, self.engine.conflicts
        if command[1:] == ["-m", "pip", "check"]:
            return subprocess.CompletedProcess(command, int(bool(conflicts)), conflicts, "")
        return subprocess.CompletedProcess(command, int(bool(errors)), "" if errors else "einops\n", errors)


@dataclass(frozen=True, kw_only=True)
class RecordingSigner(Signer):
    """Signs nothing; `signed` has each digest with its annotations and statements."""

    signed: list[tuple[str, Mapping[str, str], Mapping[str, bytes]]] = field(default_factory=list)

    def sign_manifest(
        self,
        repository: Any,
        subject: Descriptor,
        annotations: Mapping[str, str] = {},
        statements: Mapping[str, bytes] = {},
    ) -> None:
        self.signed.append((subject.digest, annotations, statements))
