"""Packages are put on an image: its own packages and files stay, and only the new layers are sent."""

from __future__ import annotations

import hashlib
import io
import json
import posixpath
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from pypi_simple import DistributionPackage

from builder.common.console import View
from builder.common.errors import (
    BuilderError,
    FetchError,
    ImageTestError,
    LockError,
    RefusedError,
    UsageError,
    VerifyError,
)
from builder.common.reference import ImageRef
from builder.common.text import size
from builder.engine.client import Engine
from builder.engine.run import Run
from builder.evidence import reports, signing
from builder.evidence.results import Evidence
from builder.evidence.signing import Signer, Trust
from builder.index.download import Fetcher
from builder.index.host import Host
from builder.index.releases import Index
from builder.index.wheels import LockedWheel
from builder.layers.store import Store
from builder.lock.uv import ListedWheels, Target, Uv
from builder.matrix import facts
from builder.matrix.schema import Trusted
from builder.registry import artifacts
from builder.registry.client import Repository
from builder.release.additions import Addition, AdditionRequest, parse_requirement
from builder.release.image_sources import sources_in_registry
from builder.release.parent import Parent, read_parent
from builder.steps.add import IMPORTS, AddOptions, add, repeated_addition
from tests.fakes.engine import FakeEngine, MemoryConsole
from tests.fakes.registry import MemoryRegistry, Registries
from tests.fakes.wire import Wire
from tests.unit.layers.test_wheel import Wheel, pack
from tests.unit.release.parents import ParentImage, plain, project

PARENT, TARGET = ImageRef.parse("registry.example.test/org/em:1"), ImageRef.parse("registry.example.test/team/vision:1")


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
        found: ListedWheels = {name: (locked(wheel), "") for name, wheel in self.index.items()}
        kept: ListedWheels = {name: (kept.wheel, "") for name, kept in target.kept.items()}
        is_kept = {
            name for name, (wheel, _) in kept.items() if name in found and found[name][0].version == wheel.version
        }
        return kept | {name: listing for name, listing in found.items() if name not in is_kept}

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
    """A registry with a parent; `index` has the wheels that can be added."""

    store: Store
    registries: Registries = field(default_factory=Registries)
    uv: FakeUv = field(default_factory=FakeUv)
    console: MemoryConsole = field(default_factory=MemoryConsole)

    def __post_init__(self) -> None:
        self.parent = ParentImage(self.registry(PARENT))

    def registry(self, reference: ImageRef) -> MemoryRegistry:
        return self.registries[reference.name]

    @property
    def target(self) -> MemoryRegistry:
        return self.registry(TARGET)

    def share(self) -> None:
        """Lets the target mount the blobs of the parent, as a registry does that has both."""
        self.target.others = {PARENT.repository: set(self.parent.registry.contents)}

    def offer(self, *wheels: Wheel) -> None:
        self.uv.index = {locked(wheel).name: wheel for wheel in wheels}

    @property
    def shown(self) -> list[str]:
        """The lines of the steps."""
        return [re.sub(r"^(\w+) +", r"\1: ", line) for line in self.console.text.splitlines()]

    def run(self, engine: Engine | None = None) -> Run:
        return Run(checkout=None, host=Host(), store=self.store, view=View(self.console), connected=engine)

    def add(self, *additions: Addition, engine: Engine | None = None, **options: Any) -> dict[ImageRef, str]:
        """With an engine, tests the images."""
        given = additions or (addition("einops"),)
        with self.store.used():
            return add(self.run(engine), given, AddOptions(test=engine is not None, **options))

    def history(self, tag: str = "1") -> list[str]:
        """The layers that were added, the lowest first."""
        lines = [str(line["created_by"]) for line in self.config(tag)["history"]]
        return lines[len(self.parent.layers) :]

    def config(self, tag: str = "1", registry: MemoryRegistry | None = None) -> dict[str, Any]:
        registry = registry or self.target
        manifest = registry.manifest(tag)
        assert manifest
        data: dict[str, Any] = json.loads(registry.contents[json.loads(manifest.content)["config"]["digest"]])
        return data


def addition(*packages: str, env: Mapping[str, str] = {}, **fields: Any) -> Addition:
    requested = tuple(parse_requirement(package, "test") for package in packages)
    request = AdditionRequest(requirements=requested, env=dict(env))
    return Addition(**{"parent": PARENT, "target": TARGET, "request": request, **fields})


@dataclass
class Container:
    """A container in which imports fail with `errors`, and `pip check` prints `conflicts`, if there are any."""

    errors: str = ""
    conflicts: str = ""
    commands: list[list[str]] = field(default_factory=list)

    def run(self, command: list[str], environment: Mapping[str, str], timeout_s: float) -> Any:
        self.commands.append(command)
        is_check = command[1:] == ["-m", "pip", "check"]
        output = self.conflicts if is_check else "" if self.errors else "einops\n"
        status = int(bool(self.conflicts if is_check else self.errors))
        return subprocess.CompletedProcess(command, status, output, "" if is_check else self.errors)


class ImportingEngine(FakeEngine):
    def __init__(self, errors: str = "", conflicts: str = "") -> None:
        super().__init__()
        self.container = Container(errors, conflicts)

    @contextmanager
    def running(self, image: str, *, checkout: str, **options: Any) -> Iterator[Any]:
        assert image in self.known
        yield self.container


def install(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers the requests to registries, and replaces uv and the index."""
    Wire.install(monkeypatch, bench.registries)
    monkeypatch.setattr(Repository, "confirm_s", 0)
    monkeypatch.setattr(Uv, "versions", lambda _, *arguments: bench.uv.versions(*arguments))
    monkeypatch.setattr(Uv, "wheels", lambda _, *arguments: bench.uv.wheels(*arguments))
    monkeypatch.setattr(Index, "files", lambda _, name, __: bench.uv.files(name))
    monkeypatch.setattr(Fetcher, "fetch", lambda _, wheel: bench.uv.fetch(wheel, bench.store.downloads))


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    bench = Bench(Store(tmp_path / "store"))
    install(bench, monkeypatch)
    bench.parent.push("1")
    bench.offer(project("einops", version="0.8"))
    bench.share()
    return bench


def test_only_the_new_layer_is_sent(bench: Bench) -> None:
    bench.add()
    [target, packages, constraints, _] = bench.uv.calls[0]
    assert (target.python, target.arch, target.glibc) == ("3.11", "amd64", "2.36")
    assert (set(target.kept), set(target.held)) == ({"ember", "tinylib"}, {"ember"}), "what the constraints name"
    assert (packages, constraints) == (["einops"], ["ember==1.9"])

    uploads = [call for call in bench.target.calls if call.startswith("upload")]
    assert len(uploads) == 2, "the layer and the configuration"
    assert bench.target.calls[-1] == "put 1", "the tag is last"
    assert bench.shown[1:3] == ["resolve: einops 0.8", "resolve: 1 new, 0 moved, 2 kept, ember 1.9 unchanged"]
    assert bench.shown[-1].startswith(f"pushed: {TARGET}@{bench.target.tags['1']}")
    assert bench.shown[-1].endswith(f"{size(sum(layer.size for _, layer in bench.parent.layers))} mounted")
    assert list(bench.store.downloads.iterdir()) == []


def test_the_configuration_says_what_the_image_is(bench: Bench) -> None:
    bench.add(addition("einops", env={"LANG": "de_DE.UTF-8", "TEAM": "vision"}))
    config = bench.config()
    parent = bench.parent.registry.tags["1"]
    labels = config["config"].pop("Labels")
    assert config["config"] == {"User": "1000:0", "Env": ["PATH=/usr/bin", "LANG=de_DE.UTF-8", "TEAM=vision"]}
    assert config["rootfs"]["diff_ids"][:-1] == [layer.diff_id for _, layer in bench.parent.layers]
    [line] = bench.history()
    assert line.startswith("wheels format=6 python=3.11: einops-0.8-py3-none-any.whl@")
    assert labels["io.github.gpu-images.parent"] == labels["org.opencontainers.image.base.digest"] == parent
    assert labels["org.opencontainers.image.base.name"] == str(PARENT)
    assert labels["io.github.gpu-images.parent.cell"] == "em-1-cpu-py311"
    assert labels["io.github.gpu-images.cuda"] == "cpu", "GPU checks need it"
    assert (
        not {"io.github.gpu-images.cell", "io.github.gpu-images.plan", "org.opencontainers.image.title"} & labels.keys()
    )
    assert json.loads(labels["io.github.gpu-images.added"]) == {
        "requirements": ["einops"],
        "env": {"LANG": "de_DE.UTF-8", "TEAM": "vision"},
    }


def test_the_same_request_gives_the_same_bytes(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, used = bench.add(), bench.store
    bench.store = Store(tmp_path / "other")
    assert bench.add() == first
    bench.store = used
    monkeypatch.setattr(Fetcher, "fetch", lambda *_: pytest.fail("downloaded, though the store has the layer"))
    assert bench.add() == first


def test_the_image_is_a_parent_itself(bench: Bench, tmp_path: Path) -> None:
    bench.add()
    child = added_image(bench)
    assert sorted(child.packages) == ["einops", "ember", "tinylib"]
    assert child.source.lowest_cell == "em-1-cpu-py311"
    assert child.kept["einops"].metadata.startswith(b"Metadata-Version")

    bench.offer(project("tqdm", version="4"))
    other = replace(TARGET, tag="2")
    bench.add(addition("tqdm", parent=TARGET, target=other))
    assert len(bench.history("2")) == 2
    assert bench.config("2")["config"]["Labels"]["io.github.gpu-images.parent.cell"] == "em-1-cpu-py311"


def added_image(bench: Bench) -> Parent:
    """The image that was pushed, as a parent."""
    bench.target.contents |= bench.parent.registry.contents  # which were mounted
    [source] = sources_in_registry(bench.target, "1", "amd64")
    return read_parent(source)


NOBODY = Trust(signers=(), root=Path())
TINY = "opt/venv/lib/python/site-packages/tinylib"


def test_a_package_of_the_parent_moves_and_its_files_are_hidden(bench: Bench) -> None:
    """Its bytecode too: Python would load that of the old version."""
    bytecode = {f"{TINY}/__pycache__/__init__.cpython-311.pyc": b"old", f"{TINY}/made.by.a.person": b""}
    bench.parent.layers.append(("files: ember bytecode", bench.parent.layer(plain(bytecode))))
    bench.parent.push("1")
    bench.share()
    bench.offer(project("einops", version="0.8"), project("tinylib", {"tinylib/new.py": b""}, version="1.8"))
    bench.add()
    assert bench.shown[1:4] == [
        "resolve: einops 0.8",
        "resolve: tinylib 1.9 -> 1.8",
        "resolve: 1 new, 1 moved, 1 kept, ember 1.9 unchanged",
    ]
    assert bench.config()["history"][-2]["created_by"] == "files: replaced packages"
    child = added_image(bench)
    assert child.packages["tinylib"].version == "1.8"
    assert b"Version: 1.8" in child.kept["tinylib"].metadata
    below = sorted(path for path in child.files if path.startswith(TINY) and child.files[path][1].type != "dir")
    assert [path.removeprefix(TINY) for path in below] == [
        *(f"-1.8.dist-info/{name}" for name in ("INSTALLER", "METADATA", "RECORD", "REQUESTED", "WHEEL")),
        "/made.by.a.person",
        "/new.py",
    ]
    assert f"{TINY}-1.9.dist-info" not in child.files, "importlib.metadata would find it"


@pytest.mark.parametrize("path", ["ember/__init__.py", "../../../../../usr/local/bin/start", "../../../pyvenv.cfg"])
def test_a_record_hides_no_file_of_others(bench: Bench, path: str) -> None:
    """An old wheel may list any path: those of the framework, the launcher and the system stay."""
    record = {"RECORD": f"tinylib.py,,\n{path},,\n".encode()}
    name, info = "tinylib-1.9-py3-none-any.whl", "tinylib-1.9.dist-info"
    evil = pack({"tinylib.py": b""}, name=name, info=info, parts=record)
    bench.parent.layers[0] = bench.parent.wheels(project("ember"), evil)
    bench.parent.push("1")
    bench.share()
    bench.offer(project("einops", version="0.8"), project("tinylib", version="1.8"))
    bench.add()
    child = added_image(bench)
    assert posixpath.normpath(f"opt/venv/lib/python/site-packages/{path}") in child.files
    assert "opt/venv/lib/python/site-packages/tinylib.py" not in child.files


def test_another_package_of_the_parent_may_have_to_move_too(bench: Bench) -> None:
    bench.offer(project("einops", version="0.8"), project("tinylib", version="1.8"))
    bench.uv.conflicts = ["ember"]  # of the rest of the parent
    with pytest.raises(LockError):
        bench.add()
    packages = [packages for _, packages, _, _ in bench.uv.calls]
    assert packages == [["einops"], ["einops==0.8", "tinylib==1.8", "ember"], ["einops", "ember", "tinylib"]]
    assert bench.uv.calls[1][0].held == {"ember"}
    assert bench.uv.calls[2][2] == ["ember==1.9", "einops==0.8"], "the requested package stays"


def test_all_packages_can_be_kept(bench: Bench) -> None:
    bench.add(addition("einops", request=AdditionRequest(requirements=EINOPS.request.requirements, keep=True)))
    assert bench.uv.calls[0][0].held == {"ember", "tinylib"}
    assert repeat(bench).request.keep


DAYS = {"0.8": "2026-01-26", "0.9": "2026-05-01"}
CHOICES = [
    ("einops", DAYS, "einops 0.8 (2026-01-26; the newest, 0.9, needs ember 3.0)"),
    ("einops<0.9", DAYS, "einops 0.8 (2026-01-26; the newest is 0.9)"),
    ("einops", {"0.8": "2026-01-26"}, "einops 0.8 (2026-01-26)"),
    ("einops", {"0.8": "2026-01-26", "0.9rc1": "2026-05-01"}, "einops 0.8 (2026-01-26)"),
    ("einops", DAYS | {"0.8": ""}, "einops 0.8 (the newest, 0.9, needs ember 3.0)"),
    ("einops==0.8", DAYS | {"0.8": "2023-11-19"}, "einops 0.8 (2023-11-19; the newest is 0.9)"),
    ("einops<2", DAYS | {"0.8": "2023-11-19"}, "einops 0.8 (2023-11-19; the newest, 0.9, needs ember 3.0)"),
]


@pytest.mark.parametrize(("requested", "page", "line"), CHOICES)
def test_a_requested_package_has_its_day_and_what_keeps_it_back(
    bench: Bench, requested: str, page: dict[str, str], line: str
) -> None:
    bench.uv.pages = {"einops": page}
    bench.add(addition(requested), dry_run=True)
    assert bench.shown[1] == f"resolve: {line}"


@pytest.mark.parametrize("requested", ["einops", "einops>=0.5"])
def test_a_version_of_years_ago_is_not_chosen_without_a_word(bench: Bench, requested: str) -> None:
    """vLLM 0.2.2 of 2023 was, as the numpy of the parent did not fit a newer one."""
    bench.uv.pages = {"einops": DAYS | {"0.8": "2023-11-19"}}
    with pytest.raises(
        RefusedError, match=r"einops 0\.8 is more than a year older .* 0\.9, needs ember 3\.0"
    ) as caught:
        bench.add(addition(requested), dry_run=True)
    assert "einops==0.8" in caught.value.hint


def test_the_index_of_a_request(bench: Bench, tmp_path: Path) -> None:
    """Only what it has comes from there."""
    bench.uv.pages = {"einops": {"0.8": ""}}
    requested = tuple(parse_requirement(text, "test") for text in ("einops", "other"))
    bench.add(addition(request=AdditionRequest(requirements=requested, index=str(tmp_path))), dry_run=True)
    target, packages, _, _ = bench.uv.calls[0]
    assert packages == ["einops", "other"]
    assert target.indexes.keys() == {"einops"}
    bench.uv.pages = {}
    with pytest.raises(UsageError, match="has none of einops"):
        bench.add(addition(request=AdditionRequest(requirements=requested, index=str(tmp_path))))
    secrets = ("me:SECRET@x.test/simple", "x.test/simple?token=SECRET", "x.test/simple#SECRET")
    for place in ("none", "HTTPS://x.test?SECRET", *(f"https://{address}" for address in secrets)):
        with pytest.raises(UsageError, match="index") as caught:
            bench.add(addition(request=AdditionRequest(requirements=requested, index=place)))
        assert "SECRET" not in str(caught.value), "an image, and the log of a job, can be read by others"


def test_a_folder_of_wheels_is_recorded_by_its_name_and_never_replaced_by_the_default_index(
    bench: Bench, tmp_path: Path
) -> None:
    (tmp_path / "own-wheels").mkdir()
    bench.uv.pages = {"einops": {"0.8": ""}}
    bench.add(addition(request=request("einops", index=f"{tmp_path}/own-wheels")))
    assert str(tmp_path) not in json.dumps(bench.config())
    assert repeat(bench).request.index == "./own-wheels"
    with pytest.raises(UsageError, match=r"no index '\./own-wheels'"):
        bench.add(repeat(bench))


def request(requested: str, **fields: Any) -> AdditionRequest:
    return AdditionRequest(requirements=(parse_requirement(requested, "test"),), **fields)


REBUILT = project("tinylib", {"tinylib/new.py": b""})


def test_another_file_of_a_version_of_the_parent_is_taken(bench: Bench) -> None:
    bench.uv.pages = {"tinylib": {"1.9": ""}}
    bench.offer(REBUILT)
    bench.add(addition(request=request("tinylib", index=".")))
    assert locked(REBUILT).sha256 in bench.history()[-1]
    assert "resolve: tinylib 1.9 (another file)" in bench.shown
    (first, *_), (second, packages, *_) = bench.uv.calls
    assert ("tinylib" in first.kept, second.held, packages) == (False, {"ember"}, ["tinylib==1.9", "ember"])


@pytest.mark.parametrize(("requested", "keep"), [("ember", False), ("tinylib", True)])
def test_another_file_of_a_package_that_stays_is_refused(bench: Bench, requested: str, keep: bool) -> None:
    bench.uv.pages = {"tinylib": {"1.9": ""}, "ember": {"1.9": ""}}
    with pytest.raises(RefusedError, match=r"another (tinylib|ember)-1\.9-py3-none-any\.whl is requested"):
        bench.add(addition(request=request(requested, index=".", keep=keep)))


def cuda_wheel(name: str) -> Wheel:
    """A wheel of NVIDIA for every Python."""
    file = name.replace("-", "_")
    packed = project(file, version="1")
    return replace(packed, name=f"{file}-1-py3-none-manylinux_2_17_x86_64.whl")


FOLDER = "/opt/venv/lib/python/site-packages/ember/__init"
EINOPS = addition("einops")
OFFERS: list[tuple[dict[str, bytes], type[BuilderError], str]] = [
    ({"ember/__init__.py": b"evil\n"}, RefusedError, f"have different files for {FOLDER}"),
    ({"einops-0.8.data/data/pyvenv.cfg": b"home = /tmp\n"}, RefusedError, "different files for /opt/venv/pyvenv.cfg"),
    ({"einops-0.8.data/scripts/python": b"#!python\n"}, RefusedError, "different files for /opt/venv/bin/python"),
    ({"einops-0.8.data/data/bin": b"a file"}, RefusedError, "/opt/venv/bin is a folder in the parent"),
    ({"../../../../../usr/local/bin/start": b"evil\n"}, FetchError, "invalid path"),
]
CUDAS = [
    ("cpu", "nvidia-cublas-cu12", "not for the CPU, as the parent is: nvidia-cublas-cu12"),
    ("12.8", "nvidia-cublas-cu13", "not for CUDA 12, as the parent is: nvidia-cublas-cu13"),
    ("12.8", "nvidia-cublas", "not for CUDA 12, as the parent is: nvidia-cublas"),
    ("13.0", "nvidia-cublas-cu12", "not for CUDA 13, as the parent is: nvidia-cublas-cu12"),
]
PLAIN = project("einops", version="0.8")
REFUSED: list[tuple[str, Wheel, Addition, type[BuilderError], str]] = [
    *(("cpu", project("einops", files, version="0.8"), EINOPS, kind, message) for files, kind, message in OFFERS),
    *((cuda, cuda_wheel(name), EINOPS, RefusedError, message) for cuda, name, message in CUDAS),
    ("cpu", PLAIN, addition(f"einops --hash=sha256:{'1' * 64}"), LockError, "does not have one of its hashes"),
    (
        "cpu",
        project("tinylib"),
        addition(f"tinylib --hash=sha256:{'1' * 64}"),
        LockError,
        "tinylib-1.9-py3-none-any.whl",
    ),
]


@pytest.mark.parametrize(("cuda", "wheel", "given", "kind", "message"), REFUSED, ids=lambda value: str(value)[:40])
def test_what_is_refused(
    bench: Bench, cuda: str, wheel: Wheel, given: Addition, kind: type[BuilderError], message: str
) -> None:
    bench.parent.labels["io.github.gpu-images.cuda"] = cuda
    bench.parent.push("1")
    bench.offer(wheel)
    with pytest.raises(kind, match=re.escape(message)):
        bench.add(given)
    assert bench.target.calls == []


def test_an_equal_file_may_be_in_both(bench: Bench) -> None:
    bench.offer(project("einops", {"ember/__init__.py": b"ember = 1\n"}, version="0.8"))
    bench.add()
    assert "1" in bench.target.tags


def test_libraries_of_the_same_cuda_are_a_layer_for_every_python(bench: Bench) -> None:
    bench.parent.labels["io.github.gpu-images.cuda"] = "12.8"
    bench.parent.push("1")
    bench.share()
    bench.offer(cuda_wheel("nvidia-nvshmem-cu12"), project("einops", version="0.8"))
    bench.add()
    assert [line.partition(":")[0] for line in bench.history()] == [
        "wheels format=6 python=none",
        "wheels format=6 python=3.11",
    ]


def test_a_known_conflict(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    trap = facts.load_facts().traps[0]
    wanted, other = trap.package, trap.other

    def violations(_: object, versions: Mapping[str, str]) -> list[str]:
        return [f"{wanted} needs another {other}"] if "einops" in versions else ["of the parent alone"]

    monkeypatch.setattr(facts.Facts, "violations", violations)
    with pytest.raises(RefusedError, match=f"{wanted} needs another {other}"):
        bench.add()


def test_a_parent_of_the_store(bench: Bench) -> None:
    engine, local = ImportingEngine(), ImageRef.parse("vision:1")
    bench.add(addition("einops", target=local), engine=engine)
    bench.offer(project("tqdm", version="4"))
    bench.target.others = {}
    bench.add(addition("tqdm", parent=local))
    assert bench.shown[-1].endswith("sent"), "nothing is mounted"
    assert bench.config()["config"]["Labels"]["org.opencontainers.image.base.name"] == "vision:1"


def test_a_dry_run_changes_nothing(bench: Bench) -> None:
    assert bench.add(dry_run=True) == {}
    assert (bench.target.calls, bench.shown[-1][:8]) == ([], "resolve:")


def test_layers_that_cannot_be_mounted_pass_this_machine(bench: Bench) -> None:
    bench.target.others = {}
    bench.add()
    assert "mounted" not in bench.shown[-1]
    assert all(layer.digest in bench.target.contents for _, layer in bench.parent.layers)


def test_a_parent_for_several_architectures(bench: Bench) -> None:
    first = bench.parent.push()
    bench.parent.arch = "arm64"
    second = bench.parent.push()
    index = bench.parent.registry.add_index(amd64=first, arm64=second)
    bench.parent.registry.tags["1"] = index
    bench.share()
    bench.add()
    manifest = bench.target.manifest("1")
    assert manifest
    entries = json.loads(manifest.content)["manifests"]
    assert [entry["platform"]["architecture"] for entry in entries] == ["amd64", "arm64"]
    assert all(entry["digest"] in bench.target.contents for entry in entries)
    assert {call[0].arch for call in bench.uv.calls} == {"amd64", "arm64"}

    bench.uv.calls.clear()
    bench.add(arch="arm64")
    assert {call[0].arch for call in bench.uv.calls} == {"arm64"}


def test_a_parent_for_another_architecture_is_refused(bench: Bench) -> None:
    with pytest.raises(UsageError, match=f"^{PARENT} is for amd64, not arm64$"):
        bench.add(arch="arm64")


def test_a_tag_with_a_date_never_moves(bench: Bench) -> None:
    target = replace(TARGET, tag="1-20261127")
    bench.add(addition("einops", target=target))
    bench.add(addition("einops", target=target))
    with pytest.raises(RefusedError):
        bench.add(addition("einops", target=target, env={"A": "b"}))


# ---- again


def repeat(bench: Bench, trust: Trust = NOBODY) -> Addition:
    bench.target.contents |= bench.parent.registry.contents  # which were mounted
    with bench.store.used():
        return repeated_addition(bench.run(), TARGET, AddOptions(trust=trust))


def test_the_same_additions_on_the_next_release(bench: Bench) -> None:
    bench.add(addition("einops>=0.7", env={"TEAM": "vision"}))
    bench.parent.layers[0] = bench.parent.wheels(project("ember", version="1.10"), project("tinylib"))
    bench.parent.push("1")
    bench.share()
    bench.uv.calls.clear()
    again = repeat(bench)
    assert again.parent == PARENT
    assert again.request == AdditionRequest(
        requirements=(parse_requirement("einops>=0.7", "test"),), env={"TEAM": "vision"}
    )
    bench.add(again)

    [(_, _, _, preferred), (_, packages, _, _)] = bench.uv.calls
    assert preferred == {"einops": "0.8", "ember": "1.10", "tinylib": "1.9"}, "what was chosen before, where it fits"
    assert packages == ["einops==0.8"], "what uv chose"
    assert bench.config()["config"]["Labels"]["io.github.gpu-images.parent"] == bench.parent.registry.tags["1"]
    assert "resolve: ember 1.9 -> 1.10" in bench.shown


def test_the_earlier_image_must_be_signed_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its label has the whole request: whoever can push the tag would choose what the job signs."""
    bench.add()
    asked: list[object] = []

    def nobody(
        repository: object, digest: str, annotations: Mapping[str, str], trust: object
    ) -> tuple[str, list[object]]:
        asked.append(annotations["image"])
        return "", []

    monkeypatch.setattr(signing, "signer_of_manifest", nobody)
    trust = Trust(signers=[Trusted.model_construct(key="k.pub")], root=Path.cwd())
    with pytest.raises(VerifyError):
        repeat(bench, trust)
    assert asked == ["vision"]


def test_an_image_whose_parent_is_the_same_stays(bench: Bench) -> None:
    bench.add()
    again = repeat(bench)
    before = list(bench.target.calls)
    assert bench.add(again) == {}
    assert [call for call in bench.target.calls if call.startswith(("put", "upload"))] == [
        call for call in before if call.startswith(("put", "upload"))
    ]
    assert bench.shown[-1] == f"parent: {PARENT} is still the same: {TARGET} is up to date"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("io.github.gpu-images.added", "", f"^{TARGET} was not made by `builder add`$"),
        ("io.github.gpu-images.added", "{", "invalid label io.github.gpu-images.added"),
        ("io.github.gpu-images.added", '{"requirements": ["-e ."]}', "the option -e is not supported"),
        (
            "io.github.gpu-images.added",
            '{"requirements": [], "apt": ["tmux"]}',
            "invalid label io.github.gpu-images.added",
        ),
        (
            "io.github.gpu-images.added",
            '{"requirements": [], "env": {"PATH": "/tmp"}}',
            "every image sets PATH",
        ),
        ("org.opencontainers.image.base.name", "NO NAME", "invalid label org.opencontainers.image.base.name"),
        ("org.opencontainers.image.base.name", f"a/b@sha256:{'1' * 64}", "was put on a digest"),
    ],
)
def test_a_record_that_cannot_be_repeated(bench: Bench, name: str, value: str, message: str) -> None:
    child = ParentImage(bench.target)
    child.labels |= {
        "io.github.gpu-images.added": '{"requirements": ["einops"]}',
        "org.opencontainers.image.base.name": str(PARENT),
        name: value,
    }
    child.push("1")
    with pytest.raises(BuilderError, match=message):
        repeat(bench)


# ---- in an engine


def test_packages_are_imported_before_anything_is_pushed(bench: Bench) -> None:
    engine = ImportingEngine("Traceback\nImportError: no libx.so")
    with pytest.raises(ImageTestError, match=r"cannot be imported\n.*\nImportError: no libx\.so"):
        bench.add(engine=engine)
    assert bench.target.calls == []

    engine = ImportingEngine()
    bench.add(engine=engine)
    assert engine.container.commands[0][-1] == "einops"
    assert "tests: 1 module imported, pip check passed (amd64)" in bench.shown
    assert engine.calls[0] == "sweep", "what a killed builder left"
    assert engine.calls[-1].startswith("remove "), "the engine keeps nothing"
    assert bench.target.calls[-1] == "put 1"


def test_nothing_is_pushed_or_kept_if_pip_check_fails(bench: Bench) -> None:
    for target in (TARGET, ImageRef.parse("vision:1")):
        engine = ImportingEngine(conflicts="einops 0.8 requires torch, which is not installed.\n")
        with pytest.raises(ImageTestError, match=r"pip check failed\n.*einops 0\.8 requires torch"):
            bench.add(addition("einops", target=target), engine=engine)
        assert bench.target.calls == []
        assert engine.calls[-1].startswith("remove ")
        assert "vision:1" not in bench.store.images()


def test_results_are_attached_before_the_tag_is_set(bench: Bench) -> None:
    digest = bench.add(engine=ImportingEngine())[TARGET]
    [artifact] = artifacts.attached(bench.target, digest, reports.TYPE)
    documents = artifacts.read_artifact(bench.target, artifact, reports.TYPE, digest)
    assert documents
    evidence = Evidence.model_validate_json(documents[reports.TYPE])
    assert (evidence.kind, evidence.image) == ("image", digest)
    assert evidence.passed == ("import einops", "pip check")
    assert evidence.gpu_state == "not run (the image is for the CPU)"
    assert bench.target.calls[-1] == "put 1"


def test_an_image_without_a_registry_stays_in_the_engine(bench: Bench) -> None:
    engine, local = ImportingEngine(), ImageRef.parse("vision:1")
    digests = bench.add(addition("einops", target=local), engine=engine)
    assert engine.calls[-1] == "tag vision:1"
    assert digests == {local: bench.store.images()["vision:1"].digest}
    assert bench.registries.keys() == {PARENT.name, TARGET.name}, "nothing is pushed"


def test_the_program_that_imports(tmp_path: Path, programs: None) -> None:
    """It runs in the image, for the names of projects."""
    (tmp_path / "site").mkdir()
    contents = {"einops/__init__.py": b"", "single.py": b"", "tests/__init__.py": b"1/0", "not-a-module.py": b"1/0"}
    spaced = {"space/one/__init__.py": b"", "space/one/deep/__init__.py": b"1/0"}
    greeting = project("greeting", {"greeting.py": b"print('Hello')"})
    for packed in (
        project("einops", contents),
        project("spaced", spaced),
        project("broken", {"broken.py": b"1/0"}),
        greeting,
    ):
        with zipfile.ZipFile(io.BytesIO(packed.content)) as archive:
            archive.extractall(tmp_path / "site")

    def run(*names: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", IMPORTS, *names]
        environ = {"PYTHONPATH": str(tmp_path / "site")}
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)

    assert run("greeting").stdout.split() == ["greeting"], "without what it prints"
    assert run("einops", "spaced").stdout.split() == ["einops", "single", "space.one"]
    assert "ZeroDivisionError" in run("broken").stderr


# ---- signed


def test_statements_name_packages_and_parent(bench: Bench) -> None:
    signed: list[tuple[str, Mapping[str, str], Any]] = []

    class FakeSigner(Signer):
        def sign_manifest(
            self,
            repository: Any,
            digest: str,
            annotations: Mapping[str, str] = {},
            statements: Mapping[str, bytes] = {},
            is_same: Any = None,
        ) -> None:
            assert "1" not in bench.target.tags
            signed.append((digest, annotations, {kind: json.loads(text) for kind, text in statements.items()}))

    bench.uv.pages = {"einops": {"0.8": ""}}
    asked = request("einops", env={"TEAM": "secret", "A": "b"}, index="https://git.test/TOKEN")
    bench.add(addition(request=asked), signer=FakeSigner(key="k"))
    [(digest, annotations, statements)] = signed
    statement, sbom = statements["slsaprovenance1"], statements["cyclonedx"]
    assert annotations == {"cell": "", "image": "vision", "tag": "1"}, "nobody can offer it under another name"
    assert digest == bench.target.tags["1"]
    stated = statement["buildDefinition"]["externalParameters"]["request"]
    assert stated == {"requirements": ["einops"], "env": ["A", "TEAM"]}, "a public log may show it"
    assert "TEAM=secret" in bench.config()["config"]["Env"]
    dependencies = statement["buildDefinition"]["resolvedDependencies"]
    parent = bench.parent.registry.tags["1"].removeprefix("sha256:")
    assert dependencies[0] == {"uri": f"oci:{PARENT.name}", "digest": {"sha256": parent}}
    assert dependencies[1]["uri"] == "pkg:pypi/einops@0.8"
    components = {each["purl"]: each for each in sbom["components"]}
    assert sorted(components) == [
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u14?distro=debian-&upstream=glibc",
        "pkg:pypi/einops@0.8",
        "pkg:pypi/ember@1.9",
        "pkg:pypi/tinylib@1.9",
    ]
    assert "properties" not in components["pkg:pypi/ember@1.9"], "its index is not known"
    assert sbom["metadata"]["component"]["version"] == digest


@pytest.mark.parametrize(
    ("signer", "notes", "message"),
    [
        ("", [], "no trusted signer signed it as cell 'em-1-cpu-py311' of em"),
        ("k.pub", [{"tag": "2"}], "signed for 2, not for 1"),
        ("k.pub", [{"tag": "1"}], ""),
    ],
)
def test_the_signature_of_the_parent(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, signer: str, notes: list[dict[str, str]], message: str
) -> None:
    monkeypatch.setattr(signing, "signer_of_manifest", lambda *_: (signer, notes))
    monkeypatch.setattr(signing, "statements_of_image", lambda *_: [])
    trust = Trust(signers=[Trusted.model_construct(key="k.pub")], root=Path.cwd())
    if not message:
        bench.add(trust=trust)
        assert "signature checked, tests: no statement of a trusted signer" in bench.shown[0]
        return
    with pytest.raises(VerifyError) as caught:
        bench.add(trust=trust)
    assert message in str(caught.value)
    assert bench.uv.calls == [], "nothing else is done with it"


def test_images_of_the_store_have_no_signature(bench: Bench) -> None:
    engine, local = ImportingEngine(), ImageRef.parse("vision:1")
    bench.add(addition("einops", target=local), engine=engine)
    trust = Trust(signers=[Trusted.model_construct(key="k.pub")], root=Path.cwd())
    with pytest.raises(UsageError):
        bench.add(addition("einops", parent=local), trust=trust)
