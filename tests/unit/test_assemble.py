"""Assembling: every layer made once and by whom it is needed, the same image again, and what a failure leaves."""

from __future__ import annotations

import io
import json
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from builder import assemble, build, bytecode, digest, made, oci, osstage, plan, splice
from builder.assemble import Assembler
from builder.base import Base
from builder.errors import BuilderError, BuildError, DiskError, EngineError, FetchError
from builder.fetch import CONNECTIONS
from builder.host import Host
from builder.layers import PlannedLayer
from builder.lock import Wheel
from builder.osstage import OsLayer
from builder.plan import PlannedImage
from builder.project import Project
from builder.splice import Entry, Source
from builder.store import LAYER_TYPE, Store
from builder.view import View
from builder.wheel import Place
from builder.work import Work
from tests.unit import tiny_locks
from tests.unit.fakes import INFO, FakeEngine, MemoryConsole
from tests.unit.test_context import members

Edit = Callable[[str, str], Project]
EMBER, JUPYTER, QUARTZ, BOARD = tiny_locks.LOCKED
NOTEBOOK = "notebook"


def pack(one: Wheel, more: Mapping[str, bytes]) -> bytes:
    """A wheel of one module, the same bytes every time."""
    name = one.name.replace("-", "_")
    info = f"{name}-{one.version}.dist-info"
    module = f"nvidia/{name}/lib/lib.so" if one.component == "cuda" else f"{name}/__init__.py"
    files = {
        module: f"# {one.file}".encode(),
        **more,
        f"{info}/METADATA": b"Metadata-Version: 2.1\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\n",
        f"{info}/RECORD": b"",
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in files.items():
            archive.writestr(zipfile.ZipInfo(path), content, zipfile.ZIP_DEFLATED)
    return packed.getvalue()


@dataclass
class World:
    """What the assembler finds outside, and what it did there. Wheels are known by their names.

    `more` are files that a wheel has besides its module; `packages` stands for what Debian has today.
    """

    broken: dict[str, BuilderError] = field(default_factory=dict)
    damaged: dict[str, bytes] = field(default_factory=dict)
    more: dict[str, dict[str, bytes]] = field(default_factory=dict)
    packages: str = "1"
    python: str = "3.11.2-6"
    taken: tuple[str, ...] = ()
    folders: tuple[str, ...] = ("home/user", "workspace")
    broken_systems: dict[str, BuilderError] = field(default_factory=dict)
    before_fetch: Callable[[str], None] = lambda _: None
    before_splice: Callable[[PlannedLayer, Sequence[Path]], None] = lambda *_: None
    on_stop: Callable[[], None] = lambda: None
    fetched: list[str] = field(default_factory=list)
    systems: list[tuple[str, bool]] = field(default_factory=list)
    spliced: list[str] = field(default_factory=list)
    compiled: list[list[str]] = field(default_factory=list)
    programs: set[bytes] = field(default_factory=set)
    contexts: set[bytes] = field(default_factory=set)

    def did(self) -> tuple[list[str], list[str], list[str], int]:
        """Wheels fetched, layers of wheels made, systems built, layers of bytecode; forgotten afterwards."""
        result = (sorted(self.fetched), sorted(self.spliced), [name for name, _ in self.systems], len(self.compiled))
        for what in (self.fetched, self.spliced, self.systems, self.compiled):
            what.clear()
        return result


@dataclass
class FakeFetcher:
    world: World
    folder: Path
    got: Callable[[int], None]

    def fetch(self, one: Wheel) -> Path:
        self.world.before_fetch(one.name)
        self.world.fetched.append(one.name)
        if one.name in self.world.broken:
            raise self.world.broken[one.name]
        content = self.world.damaged.get(one.name) or pack(one, self.world.more.get(one.name, {}))
        self.path(one).write_bytes(content)
        self.got(one.size)
        return self.path(one)

    def path(self, one: Wheel) -> Path:
        return self.folder / f"{one.sha256}.whl"

    def drop(self, one: Wheel) -> None:
        self.path(one).unlink(missing_ok=True)

    def stop(self) -> None:
        self.world.on_stop()


class Bench:
    """A checkout, an engine and a store, with a world around them."""

    def __init__(self, project: Project, root: Path) -> None:
        self.world = World()
        self.engine = FakeEngine()
        self.console = MemoryConsole()
        self.store = Store(root)
        self.store.prepare()
        self.project = project
        self.begun: list[Assembler] = []

    @property
    def work(self) -> Work:
        return Work(engine=self.engine, project=self.project, host=Host(), view=View(self.console))

    def images(self, *cells: str) -> list[PlannedImage]:
        made_plan = plan.make_locked(self.project, self.project.select(cells))
        by_id = {image.id: image for image in made_plan.images}
        return [by_id[cell] for cell in cells]

    def begin(self, images: Sequence[PlannedImage], *, fresh: bool = False) -> Assembler:
        for image in images:  # as if rendered
            dockerfile = self.project.root / f"images/{image.id}/Dockerfile"
            dockerfile.parent.mkdir(parents=True, exist_ok=True)
            dockerfile.write_text("FROM scratch\n")
        assembler = Assembler(self.work, self.store, fresh=fresh)
        self.begun.append(assembler)
        assembler.prepare(images)
        return assembler

    def run(self, *cells: str, fresh: bool = False) -> dict[str, str]:
        """Cell -> id of its image, all of them assembled in one run."""
        images = self.images(*cells)
        assembler = self.begin(images, fresh=fresh)
        ids = {image.id: assembler.build(image) for image in images}
        assembler.close()
        return ids

    def tagged(self, cell: str) -> None:
        Assembler(self.work, self.store).tagged(self.images(cell)[0])

    def find(self, cell: str, *, fresh: bool = False) -> str:
        return Assembler(self.work, self.store, fresh=fresh).find(self.images(cell)[0])

    def config(self, image_id: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.store.read(image_id))
        return found


@pytest.fixture
def benches(tiny: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Bench]]:
    """Makes machines, each with a store and an engine of its own; the world is the last one's."""
    made_benches: list[Bench] = []

    def world() -> World:
        return made_benches[-1].world

    def fetcher(_: object, folder: Path, *, got: Callable[[int], None]) -> FakeFetcher:
        return FakeFetcher(world(), folder, got)

    def make_os(work: Work, store: Store, image: PlannedImage, tar: bytes, from_: Base, *, fresh: bool) -> OsLayer:
        world().systems.append((osstage.row(image).rpartition("-")[0], fresh))
        assert f"images/{image.id}/Dockerfile" in members(tar), "the build begins with it"
        world().contexts.add(tar)
        if image.os in world().broken_systems:
            raise world().broken_systems[image.os]
        content = f"{image.debian} {image.cell.python} {world().packages}".encode()
        blob = store.put(content, LAYER_TYPE)
        layer = OsLayer(
            digest=blob.digest,
            diff_id=digest.of_bytes(b"tar of " + content),
            size=blob.size,
            created=f"2026-01-0{world().packages}T00:00:00Z",
            base=from_.name,
            python=world().python,
            taken=world().taken,
            folders=world().folders,
        )
        store.remember(image.os, asdict(layer))
        return layer

    def compile_(
        engine: FakeEngine,
        project: Project,
        store: Store,
        os_image: str,
        program: bytes,
        place: Place,
        sources: Sequence[tuple[str, Sequence[Source]]],
        out: BinaryIO,
    ) -> splice.Layer:
        assert engine.image(os_image), "there is a system to compile in"
        assert all(store.path(blob).exists() for blob, _ in sources)
        paths = [one.path for _, of_layer in sources for one in of_layer]
        world().compiled.append(paths)
        world().programs.add(program)
        content = world().python.encode()
        return splice.write([Entry(path=f"{path}c", mode=0o644, content=content) for path in paths], out)

    splice_wheels = made.wheels

    def wheels(store: Store, layer: PlannedLayer, files: Sequence[Path]) -> oci.BuiltLayer:
        world().spliced.append(layer.name)
        world().before_splice(layer, files)
        return splice_wheels(store, layer, files)

    monkeypatch.setattr(assemble, "Fetcher", fetcher)
    monkeypatch.setattr(osstage, "make", make_os)
    monkeypatch.setattr(bytecode, "make", compile_)
    monkeypatch.setattr(made, "wheels", wheels)

    def bench() -> Bench:
        made_benches.append(Bench(tiny, tmp_path / f"store{len(made_benches)}"))
        return made_benches[-1]

    yield bench
    for one in made_benches:
        for assembler in one.begun:
            assembler.close()


@pytest.fixture
def bench(benches: Callable[[], Bench]) -> Bench:
    return benches()


def layer_of(bench: Bench, name: str) -> oci.BuiltLayer:
    """A layer of EMBER in the store."""
    [layer] = [layer for layer in bench.images(EMBER)[0].layers if layer.name == name]
    found = made.recall(bench.store, layer)
    assert found is not None
    return found


CUDA = ["nvidia-cuda-runtime-cu12", "nvidia-sums-cu12"]
NOTHING: tuple[list[str], list[str], list[str], int] = ([], [], [], 0)


# ---- once


def test_each_layer_is_made_once_for_two_images(bench: Bench) -> None:
    ids = bench.run(EMBER, JUPYTER)
    assert len(set(ids.values())) == 2
    assert bench.world.did() == (
        ["board", "ember", "ember-extra", "emberkit", NOTEBOOK, *CUDA, "pip"],
        ["board", "cuda", "ember", "jupyter", "python"],
        ["os-newbird-py3.11"],
        4,
    )


def test_what_the_store_has_is_not_made_again(bench: Bench) -> None:
    first = bench.run(EMBER, JUPYTER)
    bench.world.did()
    bench.engine = FakeEngine(registry=False)  # nor is a base image asked for
    assert bench.run(EMBER, JUPYTER) == first
    assert bench.world.did() == NOTHING
    assert not [call for call in bench.engine.calls if call.startswith("pull")]


def test_another_image_of_known_layers_adds_what_it_alone_has(bench: Bench) -> None:
    bench.run(EMBER)
    bench.world.did()
    bench.run(JUPYTER)
    assert bench.world.did() == (["board", NOTEBOOK], ["board", "jupyter"], [], 2)


def test_a_lost_layer_is_made_again_alone(bench: Bench) -> None:
    first = bench.run(EMBER)
    bench.world.did()
    bench.store.path(layer_of(bench, "python").digest).unlink()
    bench.engine.known.clear()
    assert bench.run(EMBER) == first
    assert bench.world.did() == (["pip"], ["python"], [], 0)


def test_wheels_are_dropped_when_their_layer_is_there(bench: Bench) -> None:
    bench.run(EMBER, JUPYTER)
    assert list((bench.store.root / "downloads").iterdir()) == []


def test_the_second_image_is_loaded_without_what_the_first_brought(bench: Bench) -> None:
    bench.run(EMBER, JUPYTER)
    [first, second] = bench.images(EMBER, JUPYTER)
    found = assemble.find(bench.store, second)
    assert found is not None
    shared = 0
    while first.layers[shared] == second.layers[shared]:
        shared += 1
    names = bench.engine.loaded[-1]
    sent = [f"blobs/{layer.digest.replace(':', '/')}" in names for layer in found.layers]
    assert sent == [False] * shared + [True] * (len(found.layers) - shared)
    assert shared == len(first.layers) - 1, "all but the files, which lie on top"


class OtherBuilder:
    """Shares the store, and at first takes a wheel away before it is spliced here."""

    def __init__(self, bench: Bench, *, makes_the_layer: bool) -> None:
        self._bench, self._makes, self._left = bench, makes_the_layer, 1
        self._splice = made.wheels
        bench.world.before_splice = self

    def __call__(self, layer: PlannedLayer, paths: Sequence[Path]) -> None:
        if layer.name != "python" or not self._left:
            return
        self._left -= 1
        if self._makes:
            self._splice(self._bench.store, layer, paths)
        for path in paths:
            path.unlink()


def test_a_wheel_that_another_builder_dropped_is_fetched_again(bench: Bench) -> None:
    expected = bench.run(EMBER)
    bench.store.path(layer_of(bench, "python").digest).unlink()
    bench.engine.known.clear()
    bench.world.did()
    OtherBuilder(bench, makes_the_layer=False)
    assert bench.run(EMBER) == expected
    assert bench.world.did() == (["pip", "pip"], ["python", "python"], [], 0)


def test_a_layer_that_another_builder_made_meanwhile_is_taken(bench: Bench) -> None:
    OtherBuilder(bench, makes_the_layer=True)
    assert bench.run(EMBER)
    fetched, *_ = bench.world.did()
    assert fetched.count("pip") == 1


# ---- the image


def test_the_layers_lie_as_planned(bench: Bench) -> None:
    [image_id] = bench.run(JUPYTER).values()
    [image] = bench.images(JUPYTER)
    config = bench.config(image_id)
    assert [entry["created_by"] for entry in config["history"]] == [oci.describe(layer) for layer in image.layers]
    found = assemble.find(bench.store, image)
    assert found is not None
    assert [layer.diff_id for layer in found.layers] == config["rootfs"]["diff_ids"]
    assert [layer.planned for layer in found.layers] == list(image.layers)
    for layer in found.layers:
        assert digest.of_bytes(bench.store.path(layer.digest).read_bytes()) == layer.digest


def test_what_its_configuration_says(bench: Bench) -> None:
    """Its time is that of its newest package: the clock of who built it is nowhere."""
    [image_id] = bench.run(JUPYTER).values()
    config = bench.config(image_id)
    assert config["created"] == "2026-01-01T00:00:00Z"
    assert config["config"]["Labels"]["org.opencontainers.image.base.name"] == f"example/base:new@sha256:{'2' * 64}"
    assert config["config"]["Labels"]["gpu-images.cell"] == JUPYTER
    assert config["config"]["Cmd"] == ["start-jupyter"]


def test_it_has_its_full_tag_in_the_store_when_it_is_tagged(bench: Bench) -> None:
    """Until then its name says that it was not tested, and who had the full tag before has it still."""
    [image] = bench.images(EMBER)
    full, untested = image.references[0], f"{image.references[0]}.untested"
    bench.tagged(EMBER)
    assert bench.store.images() == {}
    bench.run(EMBER)
    assert not [call for call in bench.engine.calls if call.startswith("tag")]
    first = bench.store.images()[untested]
    assert bench.store.images() == {untested: first}
    bench.tagged(EMBER)
    bench.tagged(EMBER)
    assert bench.store.images() == {full: first}
    bench.world.packages = "2"
    bench.run(EMBER, fresh=True)
    second = bench.store.images()[untested]
    assert bench.store.images() == {full: first, untested: second}
    bench.tagged(EMBER)
    assert bench.store.images() == {full: second}
    assert first != second


def test_what_is_edited_while_images_are_built_belongs_to_the_next_plan(benches: Callable[[], Bench]) -> None:
    reference = benches()
    expected = reference.run(EMBER)
    bench, may_come = benches(), threading.Event()

    def before(_: str) -> None:
        assert may_come.wait(10)

    bench.world.before_fetch = before
    [image] = bench.images(EMBER)
    assembler = bench.begin([image])
    root = bench.project.root
    edited = [root / plan.COMPILER, root / "templates/base/files/etc/profile.d/10-venv.sh"]
    program = edited[0].read_bytes()
    for path in edited:
        path.write_text("edited")
    may_come.set()
    assert {EMBER: assembler.build(image)} == expected
    assert bench.world.programs == {program}
    assert bench.world.contexts == reference.world.contexts
    assert bench.find(EMBER) == "", "which is another plan"


def test_clean_knows_it_as_ours(bench: Bench) -> None:
    """The one before a rebase too, which nobody else would remove."""
    [old] = bench.run(EMBER).values()
    assert build.built_ids(bench.project.state) == {old}
    bench.world.packages = "2"
    [new] = bench.run(EMBER, fresh=True).values()
    assert build.built_ids(bench.project.state) == {old, new}


def test_bytecode_is_of_the_modules_of_its_component(bench: Bench) -> None:
    bench.run(EMBER)
    site = "opt/venv/lib/python3.11/site-packages"
    assert sorted(map(sorted, bench.world.compiled)) == [
        [f"{site}/{name}/__init__.py" for name in ("ember", "ember_extra", "emberkit")],
        [f"{site}/pip/__init__.py"],
    ]


def test_the_system_that_compiled_is_removed(bench: Bench) -> None:
    ids = bench.run(EMBER)
    removed = [call for call in bench.engine.calls if call.startswith("remove ")]
    [loaded] = {call.split()[1] for call in bench.engine.calls if call.startswith("load ")} - set(ids.values())
    assert removed == [f"remove {loaded}"]


@pytest.mark.parametrize("kind", ["overlay2", "containerd"])
def test_two_machines_make_the_same_images(benches: Callable[[], Bench], kind: str) -> None:
    """Whatever they were asked for first, and together with what."""
    ids = []
    for order in ([EMBER, JUPYTER], [JUPYTER, EMBER], [QUARTZ, EMBER, BOARD, JUPYTER]):
        bench = benches()
        bench.engine.told = replace(INFO, store=kind)
        made_ids = bench.run(*order)
        ids.append((made_ids[EMBER], made_ids[JUPYTER]))
    assert ids[0] == ids[1] == ids[2]


def test_an_image_is_the_same_whichever_image_a_shared_layer_was_made_for(benches: Callable[[], Bench]) -> None:
    """Two components of one matrix may have the same wheels: the layer is one, its name in the history is not."""

    def renamed(image: PlannedImage) -> PlannedImage:
        stack = tuple(
            replace(layer, name=layer.name.replace("board", "panel"), component="panel")
            if layer.component == "board"
            else layer
            for layer in image.layers
        )
        return replace(image, layers=stack, references=("example/panel:1",), digest="sha256:panel")

    alone, together = benches(), benches()
    [image] = together.images(JUPYTER)
    assembler = together.begin([image, renamed(image)])
    assembled = [assembler.assemble(one) for one in (image, renamed(image))]
    expected = alone.begin([renamed(image)]).assemble(renamed(image))
    assert assembled[1] == expected
    assert assembled[0].manifest != expected.manifest


# ---- found again


def test_nothing_is_found_until_it_was_assembled(bench: Bench) -> None:
    assert bench.find(EMBER) == ""
    assert assemble.find(bench.store, bench.images(EMBER)[0]) is None
    ids = bench.run(EMBER)
    assert bench.find(EMBER) == ids[EMBER]
    assert bench.find(JUPYTER) == ""


@pytest.mark.parametrize("kind", ["overlay2", "containerd"])
def test_found_by_the_id_that_the_engine_gives_it(bench: Bench, kind: str) -> None:
    bench.engine.told = replace(INFO, store=kind)
    [image_id] = bench.run(EMBER).values()
    assert bench.find(EMBER) == image_id
    found = assemble.find(bench.store, bench.images(EMBER)[0])
    assert found is not None
    assert image_id == (found.manifest if kind == "containerd" else found.config).digest


def test_what_the_engine_lost_is_not_found_and_only_loaded(bench: Bench) -> None:
    ids = bench.run(EMBER)
    bench.world.did()
    bench.engine.known.clear()
    assert bench.find(EMBER) == ""
    assert bench.run(EMBER) == ids
    assert bench.world.did() == NOTHING


def test_what_the_store_lost_is_not_found(bench: Bench) -> None:
    """The engine still has it, but it could not be pushed."""
    bench.run(EMBER)
    found = assemble.find(bench.store, bench.images(EMBER)[0])
    assert found is not None
    bench.store.path(found.layers[0].digest).unlink()
    assert bench.find(EMBER) == ""


def test_another_plan_is_another_image(bench: Bench) -> None:
    bench.run(EMBER)
    (bench.project.root / "templates/base/files/etc/new").write_text("x")
    assert bench.find(EMBER) == ""


def test_what_gc_leaves_is_found(bench: Bench) -> None:
    ids = bench.run(EMBER)
    bench.store.gc()
    assert bench.find(EMBER) == ids[EMBER]
    bench.world.did()
    bench.engine.known.clear()
    assert bench.run(EMBER) == ids
    assert bench.world.did() == NOTHING


# ---- on today's packages


def test_a_rebase_on_the_same_packages_gives_the_same_image(bench: Bench) -> None:
    ids = bench.run(EMBER, JUPYTER)
    bench.world.did()
    assert bench.find(EMBER, fresh=True) == "", "not known until the system was built anew"
    images = bench.images(EMBER, JUPYTER)
    assembler = bench.begin(images, fresh=True)
    assert [assembler.build(image) for image in images] == list(ids.values())
    assert bench.world.systems == [("os-newbird-py3.11", True)]
    assert bench.world.did() == ([], [], ["os-newbird-py3.11"], 0)
    assert assembler.find(images[0]) == ids[EMBER]


def test_a_rebase_moves_the_system_alone(bench: Bench) -> None:
    before_id = bench.run(EMBER)[EMBER]
    [image] = bench.images(EMBER)
    before = assemble.find(bench.store, image)
    bench.world.did()
    bench.world.packages = "2"
    after_id = bench.run(EMBER, fresh=True)[EMBER]
    after = assemble.find(bench.store, image)
    assert before is not None
    assert after is not None
    assert before_id != after_id
    assert bench.find(EMBER) == after_id
    moved = [new.planned.name for old, new in zip(before.layers, after.layers, strict=True) if old != new]
    assert moved == ["os"]
    assert bench.world.did() == ([], [], ["os-newbird-py3.11"], 0)
    old, new = bench.config(before.config.digest), bench.config(after.config.digest)
    assert new["created"] == "2026-01-02T00:00:00Z"
    assert {**old, "created": 0, "rootfs": 0, "history": 0} == {**new, "created": 0, "rootfs": 0, "history": 0}
    assert bench.store.images() == {f"{image.references[0]}.untested": after.manifest}


def test_after_a_rebase_images_that_stand_on_the_old_system_are_not_up_to_date(bench: Bench) -> None:
    ids = bench.run(EMBER, QUARTZ)
    bench.world.packages = "2"
    bench.run(EMBER, fresh=True)
    assert bench.find(QUARTZ) == ""
    bench.world.did()
    assert bench.run(QUARTZ)[QUARTZ] != ids[QUARTZ]
    assert bench.world.did() == NOTHING, "all of its layers are there"


def test_another_python_of_debian_compiles_again(bench: Bench) -> None:
    bench.run(EMBER)
    bench.world.did()
    bench.world.packages, bench.world.python = "2", "3.11.2-7"
    bench.run(EMBER, fresh=True)
    assert bench.world.did() == ([], [], ["os-newbird-py3.11"], 2)


# ---- failures


def test_a_wheel_that_fails_is_named_and_fails_only_the_images_that_need_it(bench: Bench) -> None:
    bench.world.broken[NOTEBOOK] = FetchError("notebook-2.0-py3-none-any.whl: gone")
    images = bench.images(EMBER, JUPYTER, QUARTZ)
    assembler = bench.begin(images)
    assert assembler.build(images[0])
    with pytest.raises(FetchError, match=r"notebook-2\.0-py3-none-any\.whl: gone"):
        assembler.build(images[1])
    assert assembler.build(images[2])
    assembler.close()
    assert bench.find(EMBER)
    assert bench.find(JUPYTER) == ""
    assert f"{bench.images(JUPYTER)[0].references[0]}.untested" not in bench.store.images()


def test_a_rerun_fetches_only_what_is_missing(bench: Bench) -> None:
    bench.world.broken[NOTEBOOK] = FetchError("gone")
    images = bench.images(JUPYTER)
    assembler = bench.begin(images)
    with pytest.raises(FetchError):
        assembler.build(images[0])
    assembler.close()
    bench.world.broken.clear()
    bench.world.did()
    bench.run(JUPYTER)
    fetched, spliced, systems, _ = bench.world.did()
    assert (fetched, spliced, systems) == ([NOTEBOOK], ["jupyter"], [])


def test_a_damaged_wheel_is_named(bench: Bench) -> None:
    bench.world.damaged["pip"] = b"no zip"
    images = bench.images(EMBER)
    with pytest.raises(FetchError, match=r"^pip-2\.0-py3-none-any\.whl: ") as caught:
        bench.begin(images).build(images[0])
    assert "pin another version" in caught.value.hint
    assert not list((bench.store.root / "tmp").iterdir())


def test_two_layers_with_different_files_for_one_path(bench: Bench) -> None:
    bench.world.more = {"board": {"shared/x.txt": b"one"}, NOTEBOOK: {"shared/x.txt": b"other"}}
    images = bench.images(JUPYTER, BOARD)
    assembler = bench.begin(images)
    says = f"^{JUPYTER}: board and jupyter have different files for /opt/venv/.*/site-packages/shared/x.txt$"
    with pytest.raises(BuildError, match=says) as caught:
        assembler.build(images[0])
    assert "pin other versions" in caught.value.hint
    assert assembler.build(images[1]), "which has only one of them"


def test_two_layers_with_the_same_file(bench: Bench) -> None:
    """As namespace packages have."""
    bench.world.more = {"board": {"shared/x.txt": b"same"}, NOTEBOOK: {"shared/x.txt": b"same"}}
    assert bench.run(JUPYTER)


def test_a_wheel_with_a_file_that_the_system_has(bench: Bench) -> None:
    bench.world.taken = ("opt/venv/lib/python3.11/site-packages/pip/__init__.py",)
    images = bench.images(EMBER)
    with pytest.raises(BuildError, match=f"^{EMBER}: /opt/venv/.*/pip/__init__.py is in the os layer and in python$"):
        bench.begin(images).build(images[0])


def test_a_file_in_a_folder_that_the_system_has_with_an_owner_of_its_own(bench: Bench) -> None:
    bench.world.folders = ("etc",)
    images = bench.images(EMBER)
    with pytest.raises(BuildError, match=r"^templates/ has a file for /etc/"):
        bench.begin(images).build(images[0])


def test_a_system_that_fails_fails_only_the_images_on_it(benches: Callable[[], Bench], edit: Edit) -> None:
    project = edit("board: {needs: [python]", "board: {apt: [git], needs: [python]")
    bench = benches()
    bench.project = project
    images = bench.images(QUARTZ, BOARD)
    assert images[0].os != images[1].os
    bench.world.broken_systems[images[1].os] = BuildError("apt failed")
    assembler = bench.begin(images)
    assert assembler.build(images[0])
    with pytest.raises(BuildError, match="apt failed"):
        assembler.build(images[1])
    assembler.close()
    bench.world.broken_systems.clear()
    bench.world.did()
    assert bench.run(QUARTZ, BOARD)
    fetched, spliced, systems, _ = bench.world.did()
    assert (fetched, spliced, len(systems)) == ([], [], 1)


def test_bytecode_that_fails_is_made_at_the_next_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise BuildError("compile.py ended with status 1")

    images = bench.images(EMBER)
    with monkeypatch.context() as patch:
        patch.setattr(bytecode, "make", fail)
        assembler = bench.begin(images)
        with pytest.raises(BuildError, match=r"compile\.py"):
            assembler.build(images[0])
        assembler.close()
    bench.world.did()
    assert bench.run(EMBER)
    assert bench.world.did() == ([], [], [], 2)


def test_what_fetches_when_it_is_closed_leaves_nobody_waiting(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """As after Ctrl-C: wheels come when there is nobody left to splice them."""
    is_fetching, may_come = threading.Barrier(5), threading.Event()
    ended: list[BaseException] = []

    def before(_: str) -> None:
        is_fetching.wait(10)
        assert may_come.wait(10)

    def build_it() -> None:
        try:
            assembler.assemble(images[0])
        except BaseException as error:  # noqa: BLE001  told below
            ended.append(error)

    images = bench.images(QUARTZ)
    assert len(images[0].wheels) == CONNECTIONS == 4, "all of them come at once"
    bench.world.before_fetch = before
    assembler = bench.begin(images)
    waiting = threading.Thread(target=build_it, daemon=True)
    waiting.start()
    is_fetching.wait(10)
    try:
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        assembler.close()
    may_come.set()
    waiting.join(10)
    assert not waiting.is_alive()
    assert len(ended) == 1
    assert caplog.records == []


def test_what_is_fetched_is_stopped_when_it_is_closed(bench: Bench) -> None:
    """After a failure it is not waited for: gigabytes may be left."""
    is_stopped = threading.Event()

    def before(name: str) -> None:
        assert is_stopped.wait(10)
        raise FetchError(f"{name}: the download was stopped")

    bench.world.before_fetch, bench.world.on_stop = before, is_stopped.set
    bench.begin(bench.images(EMBER)).close()
    assert is_stopped.is_set()
    assert bench.world.fetched == []


def test_what_went_wrong_first_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that the engine, which may be why, does not remove images either."""
    images, asked = bench.images(EMBER), []
    assembler = bench.begin(images)
    assembler.build(images[0])

    def remove(image_id: str) -> bool:
        asked.append(image_id)
        raise EngineError("Docker Engine went away")

    def fail() -> None:
        try:
            raise BuildError("first")
        finally:
            assembler.close()

    monkeypatch.setattr(bench.engine, "remove_image", remove)
    with pytest.raises(BuildError, match="first"):
        fail()
    assert len(asked) == 1


# ---- room


def test_bytes_that_are_to_come(bench: Bench) -> None:
    images = bench.images(EMBER, JUPYTER)
    wheels = {one.sha256: one.size for image in images for one in image.wheels}
    assert assemble.missing_bytes(bench.store, images) == int(sum(wheels.values()) * 1.5)
    bench.run(EMBER)
    own = [one.size for one in images[1].wheels if one not in images[0].wheels]
    assert own
    assert assemble.missing_bytes(bench.store, images) == int(sum(own) * 1.5)
    bench.run(JUPYTER)
    assert assemble.missing_bytes(bench.store, images) == 0


def local(bench: Bench, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """An engine on this machine whose disk, which is not the store's, has so many bytes free."""
    bench.engine.told = replace(INFO, is_local=True, root="/proc")
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))


def test_an_engine_without_room_is_told_of_before_anything_is_begun(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    local(bench, monkeypatch, build.SPARE + 5_000_000)
    with pytest.raises(DiskError, match=r"^building 1 image\(s\) takes about 2\.0 GB in /proc, which has 2\.0 GB"):
        bench.begin(bench.images(EMBER))
    assert bench.world.did() == NOTHING
    assert bench.engine.calls == []


def test_where_engine_and_store_share_a_disk_there_is_room_for_both(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = bench.images(EMBER)
    local(bench, monkeypatch, assemble.engine_bytes(sum(layer.bytes for layer in images[0].layers)))
    apart = bench.engine.told
    bench.engine.told = replace(apart, root=str(bench.project.root))
    with pytest.raises(DiskError):
        bench.begin(images)
    bench.engine.told = apart
    bench.begin(images)


def test_what_the_engine_has_needs_no_room(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA of EMBER has 2 MB, what JUPYTER adds a few kilobytes."""
    bench.run(EMBER)
    local(bench, monkeypatch, build.SPARE + 10_000)
    assert bench.run(JUPYTER)
    bench.engine.diff_ids.clear()
    with pytest.raises(DiskError):
        bench.begin(bench.images(JUPYTER))


# ---- what a person sees


def test_what_is_told(bench: Bench) -> None:
    bench.run(EMBER)
    lines = bench.console.text.splitlines()
    assert "wheels: 2.0 MB to be fetched" in lines
    assert [line for line in lines if line.startswith("wheels: done in ")]
    assert [line for line in lines if line.startswith(f"{osstage.row(bench.images(EMBER)[0])}: done: layer ")]
    assert lines.index(f"{EMBER}: assembling") < lines.index(f"{EMBER}: loading")
