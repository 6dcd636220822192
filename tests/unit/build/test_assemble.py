"""Assembling: every layer is made once, the same inputs give the same image, and images are found again."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from builder.common.errors import BuildError
from builder.common.lock_text import KNOWN_LAYERS
from builder.layers import garbage, oci, stored_images, stored_layers
from builder.lock.lockfile import GROUP_LOCKS
from builder.matrix.project import Project
from builder.matrix.tags import PLAN_LABEL
from builder.plan import plan
from builder.plan.layer_order import PlannedLayer
from tests.fakes import locks
from tests.fakes.engine import INFO, FakeEngine
from tests.unit.build.assembling import BOARD, CUDA, EMBER, JUPYTER, NOTEBOOK, NOTHING, QUARTZ, AssemblyBench

# ---- once


def test_each_layer_is_made_once_for_two_images(bench: AssemblyBench) -> None:
    ids = bench.run(EMBER, JUPYTER)
    assert len(set(ids.values())) == 2
    assert bench.world.did() == (
        ["board", "ember", "ember-extra", "emberkit", NOTEBOOK, *CUDA, "pip"],
        ["cuda", "ember", "jupyter"],
        ["os-newbird-py3.11"],
        2,
    )
    assert list((bench.store.root / "downloads").iterdir()) == []
    removed = [call.split()[1] for call in bench.engine.calls if call.startswith("remove ")]
    loaded = {call.split()[1] for call in bench.engine.calls if call.startswith("load ")}
    assert set(removed) == loaded - set(ids.values()), "the images that compiled"


def test_another_image_adds_only_its_own_layers(bench: AssemblyBench) -> None:
    """Only these are loaded."""
    bench.run(EMBER)
    bench.world.did()
    bench.run(JUPYTER)
    assert bench.world.did() == (["board", NOTEBOOK], ["jupyter"], [], 1)
    [first, second] = bench.images(EMBER, JUPYTER)
    shared = 0
    while first.layers[shared] == second.layers[shared]:
        shared += 1
    sent = [layer.diff_id in bench.engine.pulled[-1] for layer in bench.stored(JUPYTER).layers]
    assert sent == [False] * shared + [True] * (len(sent) - shared)
    assert shared == len(first.layers) - 1, "all but the files, which are the highest layer"


class OtherBuilder:
    """Shares the store, and removes a wheel once before it is spliced here."""

    def __init__(self, bench: AssemblyBench, *, makes_the_layer: bool) -> None:
        self._bench, self._makes, self._left = bench, makes_the_layer, 1
        self._splice = stored_layers.store_wheels
        bench.world.before_splice = self

    def __call__(self, layer: PlannedLayer, paths: Sequence[Path]) -> None:
        if layer.name not in ("ember", "jupyter") or not self._left:
            return
        self._left -= 1
        if self._makes:
            self._splice(self._bench.store, layer, paths)
        for path in paths:
            path.unlink()


def test_a_wheel_that_another_builder_removed_is_fetched_again(bench: AssemblyBench) -> None:
    expected = bench.run(JUPYTER)
    bench.store.path(bench.layer("jupyter", JUPYTER).digest).unlink()
    bench.engine.known.clear()
    bench.world.did()
    OtherBuilder(bench, makes_the_layer=False)
    assert bench.run(JUPYTER) == expected
    assert bench.world.did() == (["board", "board", NOTEBOOK, NOTEBOOK], ["jupyter", "jupyter"], [], 0)


def test_a_layer_that_another_builder_made_is_used(bench: AssemblyBench) -> None:
    OtherBuilder(bench, makes_the_layer=True)
    assert bench.run(EMBER)
    fetched, *_ = bench.world.did()
    assert fetched.count("pip") == 1


# ---- the image


def test_an_image_for_arm64_gets_its_bytecode_from_the_engines_own_architecture(bench: AssemblyBench) -> None:
    """The amd64 system of the same Debian packages compiles, without an emulation. In the store both have a name."""
    root, group = bench.project.root, "qz-0.5-cu129-py311"
    matrix = root / "matrix.yaml"
    matrix.write_text(matrix.read_text().replace('python: ["3.11"]}', 'python: ["3.11"], arch: [amd64, arm64]}'))
    bench.project = project = locks.write_os_locks(Project(root))
    twin = project.groups[f"{group}-arm64"]
    (root / GROUP_LOCKS.path(twin[0].group)).write_text(GROUP_LOCKS.dump(locks.lock_of(project, twin)))
    native = bench.run(group)
    compiled_in: list[tuple[str, ...]] = []
    bench.world.before_compile = lambda image: compiled_in.append(bench.engine.diff_ids[image])
    ids = bench.run(f"{group}-board-arm64")
    [image] = bench.images(group)
    system = stored_layers.stored_layer(bench.store, image.os_inputs)
    assert system
    assert compiled_in == [(system.diff_id,)]
    assert bench.config(native[group])["architecture"] == "amd64"
    assert bench.config(ids[f"{group}-board-arm64"])["architecture"] == "arm64"
    assert [name.rpartition(":")[2] for name in bench.store.images()] == [
        "0.5.3-cu129-py311-board-arm64.untested", "0.5.3-cu129-py311.untested",
    ]  # fmt: skip


def test_the_layers_and_the_configuration_are_those_of_the_plan(bench: AssemblyBench) -> None:
    """Its time is that of its newest package, not the time of the build."""
    [image_id] = bench.run(JUPYTER).values()
    [image] = bench.images(JUPYTER)
    config, stored = bench.config(image_id), bench.stored(JUPYTER)
    assert list(stored.history) == [oci.history_line(layer) for layer in image.layers]
    assert [entry["created_by"] for entry in config["history"]] == list(stored.history)
    assert config["rootfs"]["diff_ids"] == [layer.diff_id for layer in stored.layers]
    assert all(bench.store.matches(layer.digest) for layer in stored.layers)
    assert config["created"] == "2026-01-01T00:00:00Z"
    assert config["config"]["Labels"]["io.github.gpu-images.cell"] == JUPYTER
    assert config["config"]["Cmd"] == ["start-jupyter"]
    site = "opt/venv/lib/python/site-packages"
    assert sorted(map(sorted, bench.world.compiled)) == [
        [f"{site}/{name}/__init__.py" for name in names]
        for names in (("board", "notebook"), ("ember", "ember_extra", "emberkit", "pip"))
    ]


def test_an_image_has_its_full_tag_in_the_store_when_it_is_tagged(bench: AssemblyBench) -> None:
    """Before that, its name says that it is untested, and the full tag stays with the image that had it."""
    [image] = bench.images(EMBER)
    full, untested = image.references[0], f"{image.references[0]}.untested"
    bench.record_tagged(EMBER)
    assert bench.store.images() == {}
    bench.run(EMBER)
    assert not [call for call in bench.engine.calls if call.startswith("tag")]
    first = bench.store.images()[untested]
    assert bench.store.images() == {untested: first}
    bench.record_tagged(EMBER)
    bench.record_tagged(EMBER)
    assert bench.store.images() == {full: first}
    bench.refresh()
    bench.run(EMBER)
    second = bench.store.images()[untested]
    assert bench.store.images() == {full: first, untested: second}
    bench.record_tagged(EMBER)
    assert bench.store.images() == {full: second}
    assert first != second


def test_a_file_that_is_edited_during_the_build_belongs_to_the_next_plan(benches: Callable[[], AssemblyBench]) -> None:
    reference = benches()
    expected = reference.run(EMBER)
    bench, is_edited = benches(), threading.Event()

    def before(_: str) -> None:
        assert is_edited.wait(10)

    bench.world.before_fetch = before
    [image] = bench.images(EMBER)
    assembler = bench.begin([image])
    root = bench.project.root
    edited = [
        root / plan.COMPILER,
        root / f"{plan.STEPS}/os.sh",
        root / "templates/base/files/etc/profile.d/10-venv.sh",
    ]
    program = edited[0].read_bytes()
    for path in edited:
        path.write_text("edited")
    is_edited.set()
    assert {EMBER: assembler.build(image).id} == expected
    assert bench.world.programs == {program}
    assert bench.world.system_inputs == reference.world.system_inputs
    assert bench.find(EMBER) == "", "the files give another plan"


def test_two_machines_make_the_same_images(benches: Callable[[], AssemblyBench]) -> None:
    """Whatever is built first, or with which other images."""
    pairs = []
    for order in ([EMBER, JUPYTER], [QUARTZ, JUPYTER, BOARD, EMBER]):
        ids = benches().run(*order)
        pairs.append((ids[EMBER], ids[JUPYTER]))
    assert pairs[0] == pairs[1]


# ---- found again


@pytest.mark.parametrize("kind", ["overlay2", "containerd"])
def test_an_image_is_found_by_its_id_in_the_engine(bench: AssemblyBench, kind: str) -> None:
    bench.engine.settings = replace(INFO, store=kind)
    [image_id] = bench.run(EMBER).values()
    assert bench.find(EMBER) == image_id
    image = bench.stored(EMBER)
    assert image_id == (image.manifest if kind == "containerd" else image.config).digest


def test_an_image_is_found_after_gc_and_is_only_loaded_when_the_engine_lost_it(bench: AssemblyBench) -> None:
    ids = bench.run(EMBER)
    garbage.remove_garbage(bench.store)
    assert (bench.find(EMBER), bench.find(JUPYTER)) == (ids[EMBER], "")
    bench.world.did()
    bench.engine = FakeEngine(registry=False)  # the base image is not needed either
    assert bench.find(EMBER) == ""
    assert bench.run(EMBER) == ids
    assert bench.world.did() == NOTHING


# ---- on other Debian packages


def test_a_refresh_changes_only_the_system(bench: AssemblyBench) -> None:
    before_id = bench.run(EMBER)[EMBER]
    [image] = bench.images(EMBER)
    before = bench.stored(EMBER)
    bench.world.did()
    bench.refresh()
    assert bench.find(EMBER) == ""
    after_id = bench.run(EMBER)[EMBER]
    after = bench.stored(EMBER)
    assert before_id != after_id
    assert bench.find(EMBER) == after_id
    changed = [old != new for old, new in zip(before.layers, after.layers, strict=True)]
    moved = [line for line, is_new in zip(after.history, changed, strict=True) if is_new]
    assert moved == ["os"]
    assert bench.world.did() == ([], [], ["os-newbird-py3.11"], 0)
    old, new = bench.config(before.config.digest), bench.config(after.config.digest)
    assert new["created"] == "2026-01-02T00:00:00Z"
    for name in ("org.opencontainers.image.created", PLAN_LABEL):
        assert new["config"]["Labels"].pop(name) != old["config"]["Labels"].pop(name)
    assert {**old, "created": 0, "rootfs": 0, "history": 0} == {**new, "created": 0, "rootfs": 0, "history": 0}
    assert bench.store.images() == {f"{image.references[0]}.untested": after.manifest.descriptor}
    # `git revert` is the way back: nothing is made again.
    locks.write_os_locks(bench.project)
    assert bench.run(EMBER)[EMBER] == before_id
    assert bench.world.did() == NOTHING


def test_another_python_of_debian_compiles_again(bench: AssemblyBench) -> None:
    bench.run(EMBER)
    bench.world.did()
    bench.refresh(python="3.11.2-7")
    bench.run(EMBER)
    assert bench.world.did() == ([], [], ["os-newbird-py3.11"], 1)


# ---- known layers


def test_the_first_build_records_its_layers(bench: AssemblyBench) -> None:
    bench.run(EMBER)
    recorded = json.loads((bench.project.root / KNOWN_LAYERS).read_text(encoding="utf-8"))
    [image] = bench.images(EMBER)
    stack = dict(zip((layer.inputs for layer in image.layers), bench.stored(EMBER).layers, strict=True))
    del stack[image.layers[-1].inputs]  # plain files
    system = stack.pop(image.os_inputs)
    assert {key: entry["digest"] for key, entry in recorded["systems"].items()} == {image.os_inputs: system.digest}
    assert {key: entry["digest"] for key, entry in recorded["layers"].items()} == {
        inputs: layer.digest for inputs, layer in stack.items()
    }


def make_other_bytes(bench: AssemblyBench, layer: str) -> None:
    if layer == "os":
        bench.world.packages = "2"
    else:
        bench.world.more["ember"] = {"ember/more.py": b"more"}


@pytest.mark.parametrize("layer", ["os", "ember"])
def test_a_known_layer_with_other_bytes_is_an_error(benches: Callable[[], AssemblyBench], layer: str) -> None:
    benches().run(EMBER)
    other = benches()
    make_other_bytes(other, layer)
    with pytest.raises(BuildError):
        other.run(EMBER)
    assert stored_images.find_stored_image(other.store, other.images(EMBER)[0]) is None


@pytest.mark.parametrize("layer", ["os", "ember"])
def test_a_stored_layer_that_is_not_the_known_one_is_made_again(
    benches: Callable[[], AssemblyBench], layer: str
) -> None:
    first = benches()
    first.run(EMBER)
    path = first.project.root / KNOWN_LAYERS
    known = path.read_text(encoding="utf-8")
    path.unlink()
    other = benches()  # its store has other bytes, of a time before the file was committed
    make_other_bytes(other, layer)
    other.run(EMBER)
    path.write_text(known, encoding="utf-8")
    other.world.packages, other.world.more = "1", {}
    assert other.find(EMBER) == ""
    other.run(EMBER)
    assert other.stored(EMBER) == first.stored(EMBER)
