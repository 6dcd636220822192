"""Packages are put on an image: its own packages and files stay, and only the new layers are sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from builder.common.console import View
from builder.common.errors import FetchError, LockError, RefusedError, RegistryError, UsageError
from builder.common.reference import ImageRef
from builder.host import Host
from builder.index.download import Fetcher
from builder.index.local_index import serve_index
from builder.index.releases import Index
from builder.index.wheels import LockedWheel
from builder.layers.store import Store
from builder.lock.requirements import Requested
from builder.lock.uv import Built, ListedWheels, Target, Uv
from builder.release.image_sources import sources_in_registry
from builder.release.parent import read_parent
from builder.steps.add import Added, Addition, add
from tests.fakes.engine import MemoryConsole
from tests.fakes.registry import MemoryRegistry
from tests.unit.layers.test_wheel import Wheel
from tests.unit.release.parents import ParentImage, project

PARENT, TARGET = ImageRef.parse("registry.example.test/org/em:1"), ImageRef.parse("registry.example.test/team/vision:1")


class FakeUv(Uv):
    """Chooses the wheels of `index`, and those of the parent where it has them."""

    def __init__(self) -> None:
        super().__init__(Host(), lambda *_, **__: pytest.fail("uv ran"), Index(Host().index), serve_index)
        self.index: dict[str, Wheel] = {}
        self.calls: list[tuple[Target, list[str], list[str], Mapping[str, str] | None]] = []
        self.failure: LockError | None = None

    def compile(
        self,
        target: Target,
        packages: Sequence[str],
        constraints: Sequence[str],
        preferred: Mapping[str, str] | None,
        built: Built,
    ) -> tuple[str, Mapping[tuple[str, str], Any]]:
        self.calls.append((target, list(packages), list(constraints), preferred))
        if self.failure:
            raise self.failure
        return "", {}

    def wheels(self, target: Target, pylock: str, built: Built) -> ListedWheels:
        found: ListedWheels = {name: (locked(wheel), "") for name, wheel in self.index.items()}
        return found | {name: (built[name, ""].wheel, "") for name, _ in built}


def locked(wheel: Wheel) -> LockedWheel:
    name, version = wheel.name.split("-")[:2]
    sha256 = hashlib.sha256(wheel.content).hexdigest()
    return LockedWheel(name=name, version=version, file=wheel.name, size=len(wheel.content), sha256=sha256)


@dataclass
class Bench:
    """A registry with a parent; `index` has the wheels that can be added. `shown` are the lines of the steps."""

    store: Store
    registries: dict[str, MemoryRegistry] = field(default_factory=dict)
    uv: FakeUv = field(default_factory=FakeUv)
    shown: list[str] = field(default_factory=list)
    console: MemoryConsole = field(default_factory=MemoryConsole)

    def __post_init__(self) -> None:
        self.parent = ParentImage(self.registry(PARENT))

    def registry(self, reference: ImageRef, **_: Any) -> MemoryRegistry:
        return self.registries.setdefault(reference.name, MemoryRegistry())

    @property
    def target(self) -> MemoryRegistry:
        return self.registry(TARGET)

    def share(self) -> None:
        """Lets the target mount the blobs of the parent, as a registry does that has both."""
        self.target.others = {PARENT.repository: set(self.parent.registry.contents)}

    def offer(self, *wheels: Wheel) -> None:
        self.uv.index = {locked(wheel).name: wheel for wheel in wheels}

    def fetcher(self, settings: Any, folder: Path, **_: Any) -> Fetcher:
        bench = self

        class MemoryFetcher(Fetcher):
            def fetch(self, wanted: Any) -> Path:
                wheel = bench.uv.index[wanted.name]
                assert hashlib.sha256(wheel.content).hexdigest() == wanted.sha256
                self.path(wanted).write_bytes(wheel.content)
                return self.path(wanted)

        return MemoryFetcher(settings, folder)

    def add(self, *additions: Addition, **options: Any) -> list[Added]:
        given = additions or (addition("einops"),)
        view = View(self.console)

        def show(step: str, result: str) -> None:
            self.shown.append(f"{step}: {result}")

        with self.store.used():
            return add(
                given, None, Host(), self.store, view, show, program=self.uv, new_fetcher=self.fetcher,
                new_repository=self.registry, **options,
            )  # fmt: skip

    def config(self, tag: str = "1", registry: MemoryRegistry | None = None) -> dict[str, Any]:
        registry = registry or self.target
        manifest = registry.manifest(tag)
        assert manifest
        data: dict[str, Any] = json.loads(registry.contents[json.loads(manifest.content)["config"]["digest"]])
        return data


def addition(*packages: str, **fields: Any) -> Addition:
    requested = [Requested(text=package) for package in packages]
    return replace(Addition(parent=PARENT, target=TARGET, requested=requested), **fields)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(Store(tmp_path / "store"))
    bench.parent.push("1")
    bench.offer(project("einops", version="0.8"))
    bench.share()
    return bench


def test_only_the_new_layer_is_sent(bench: Bench) -> None:
    [added] = bench.add()
    [image] = added.images
    [target, packages, constraints, _] = bench.uv.calls[0]
    assert (target.python, target.arch, target.glibc) == ("3.11", "amd64", "2.36")
    assert target.sources == {"ember": False, "tinylib": False}, "uv has only the versions of the parent"
    assert (packages, constraints) == (["einops"], ["ember==1.9"])
    assert [wheel.file for wheel in image.wheels] == ["einops-0.8-py3-none-any.whl"]

    uploads = [call for call in bench.target.calls if call.startswith("upload")]
    assert len(uploads) == 2, "the layer and the configuration"
    assert added.sent
    assert added.sent.mounted == sum(layer.size for _, layer in bench.parent.layers)
    assert bench.target.calls[-1] == "put 1", "the tag is last"
    assert bench.shown[1] == "resolve: 1 new, 2 kept, ember 1.9 unchanged: einops 0.8"
    assert bench.shown[-1].startswith(f"pushed: {TARGET}@{bench.target.tags['1']}")
    assert list(bench.store.downloads.iterdir()) == []


def test_the_configuration_says_what_the_image_is(bench: Bench) -> None:
    [added] = bench.add()
    config = bench.config()
    parent = bench.parent.registry.tags["1"]
    labels = config["config"].pop("Labels")
    assert config["config"] == {"User": "1000:0", "Env": ["PATH=/usr/bin", "LANG=C.UTF-8"]}
    assert config["rootfs"]["diff_ids"] == [layer.diff_id for layer in added.images[0].image.layers]
    assert config["history"][-1]["created_by"].startswith("wheels format=6 python=3.11: einops-0.8-py3-none-any.whl@")
    assert labels["gpu-images.parent"] == labels["org.opencontainers.image.base.digest"] == parent
    assert labels["org.opencontainers.image.base.name"] == str(PARENT)
    assert labels["gpu-images.parent.cell"] == "em-1-cpu-py311"
    assert labels["gpu-images.cuda"] == "cpu", "GPU checks need it"
    assert not {"gpu-images.cell", "gpu-images.plan", "org.opencontainers.image.title"} & labels.keys()
    record = json.loads(labels["gpu-images.added"])
    assert record["request"]["requirements"] == ["einops"]
    assert record["lock"]["wheels"][0][0] == "einops-0.8-py3-none-any.whl"


def test_the_same_request_gives_the_same_bytes(bench: Bench, tmp_path: Path) -> None:
    [first] = bench.add()
    bench.store = Store(tmp_path / "other")
    [second] = bench.add()
    assert first.digest == second.digest


def test_the_image_is_a_parent_itself(bench: Bench, tmp_path: Path) -> None:
    bench.add()
    bench.target.contents |= bench.parent.registry.contents  # which were mounted
    [source] = sources_in_registry(bench.target, "1", tmp_path, "amd64")
    child = read_parent(source)
    assert sorted(child.packages) == ["einops", "ember", "tinylib"]
    assert child.cell == "em-1-cpu-py311"
    assert child.built["einops", ""].metadata.startswith(b"Metadata-Version")

    bench.offer(project("tqdm", version="4"))
    other = replace(TARGET, tag="2")
    [added] = bench.add(addition("tqdm", parent=TARGET, target=other))
    assert len(added.images[0].image.layers) == 5
    assert bench.config("2")["config"]["Labels"]["gpu-images.parent.cell"] == "em-1-cpu-py311"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"ember/__init__.py": b"evil\n"}, "have different files for /opt/venv/lib/python/site-packages/ember/__init"),
        ({"einops-0.8.data/data/pyvenv.cfg": b"home = /tmp\n"}, "have different files for /opt/venv/pyvenv.cfg"),
        ({"einops-0.8.data/scripts/python": b"#!python\n"}, "have different files for /opt/venv/bin/python"),
        ({"einops-0.8.data/data/bin": b"a file"}, "/opt/venv/bin is a folder in the parent"),
    ],
)
def test_a_wheel_that_replaces_a_file_of_the_parent(bench: Bench, files: dict[str, bytes], message: str) -> None:
    bench.offer(project("einops", files, version="0.8"))
    with pytest.raises(RefusedError) as caught:
        bench.add()
    assert message in str(caught.value)
    assert bench.target.calls == []


def test_an_equal_file_may_be_in_both(bench: Bench) -> None:
    bench.offer(project("einops", {"ember/__init__.py": b"ember = 1\n"}, version="0.8"))
    bench.add()
    assert "1" in bench.target.tags


def test_nothing_outside_the_environment_is_written(bench: Bench) -> None:
    bench.offer(project("einops", {"../../../../../usr/local/bin/start": b"evil\n"}, version="0.8"))
    with pytest.raises(FetchError, match="invalid path"):
        bench.add()


def test_a_conflict_names_the_package_of_the_parent(bench: Bench) -> None:
    bench.uv.failure = LockError("no solution: only ember==1.9 is available", hint="Do something.")
    with pytest.raises(LockError) as caught:
        bench.add()
    assert caught.value.hint.startswith("The parent has ember 1.9. Do something.")


def test_hashes_of_the_request_are_compared(bench: Bench) -> None:
    requested = [Requested(text="einops", hashes=frozenset(["1" * 64]))]
    with pytest.raises(LockError, match="does not have one of its hashes"):
        bench.add(addition(requested=requested))


def test_a_dry_run_changes_nothing(bench: Bench) -> None:
    [added] = bench.add(dry_run=True)
    assert [wheel.name for wheel in added.images[0].wheels] == ["einops"]
    assert (added.digest, bench.target.calls, bench.shown[-1][:8]) == ("", [], "resolve:")


def test_the_tag_of_the_parent_is_never_replaced(bench: Bench) -> None:
    with pytest.raises(UsageError, match="is the parent itself"):
        bench.add(addition("einops", target=PARENT))


def test_all_tags_or_none(bench: Bench) -> None:
    """The second image cannot be pushed, so the first has no tag."""
    other = ImageRef.parse("other.example.test/team/audio:1")

    def refuse(digest: str) -> None:
        raise RegistryError("full")

    bench.registry(other).on_upload = refuse
    with pytest.raises(RegistryError, match="full"):
        bench.add(addition("einops"), addition("einops", target=other))
    assert "1" not in bench.target.tags
    bench.registry(other).on_upload = lambda _: None
    bench.add(addition("einops"), addition("einops", target=other))
    assert bench.target.tags["1"] == bench.registry(other).tags["1"]


def test_layers_that_cannot_be_mounted_pass_this_machine(bench: Bench) -> None:
    bench.target.others = {}
    [added] = bench.add()
    assert added.sent
    assert added.sent.mounted == 0
    assert all(layer.digest in bench.target.contents for layer in added.images[0].image.layers)


def test_a_parent_for_several_architectures(bench: Bench) -> None:
    first = bench.parent.push()
    bench.parent.arch = "arm64"
    second = bench.parent.push()
    index = bench.parent.registry.add_index(amd64=first, arm64=second)
    bench.parent.registry.tags["1"] = index
    bench.share()
    [added] = bench.add()
    assert {each.parent.arch for each in added.images} == {"amd64", "arm64"}
    manifest = bench.target.manifest("1")
    assert manifest
    platforms = {each["platform"]["architecture"]: each["digest"] for each in json.loads(manifest.content)["manifests"]}
    assert platforms == {each.parent.arch: each.image.manifest.digest for each in added.images}
    assert {call[0].arch for call in bench.uv.calls} == {"amd64", "arm64"}

    bench.uv.calls.clear()
    [added] = bench.add(arch="arm64")
    assert [call[0].arch for call in bench.uv.calls] == ["arm64"]


def test_a_layer_of_the_store_is_not_made_again(bench: Bench) -> None:
    bench.add()
    new_fetcher: Callable[..., Fetcher] = Fetcher  # downloads, which unit tests cannot
    bench.fetcher = new_fetcher  # type: ignore[method-assign]
    [added] = bench.add(addition("einops", target=replace(TARGET, tag="2")))
    assert added.digest == bench.target.tags["1"]
