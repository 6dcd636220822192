"""An archive for `docker load`: readable by both kinds of engine, without the layers that the engine has."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from builder import digest, load, oci
from builder.engine import RUN_LABEL, EngineInfo
from builder.errors import DiskError, EngineError, FileError, NoEngineError
from builder.layers import PlannedLayer
from builder.load import Assembled
from builder.oci import BuiltLayer
from builder.settings import Settings
from builder.store import CONFIG_TYPE, LAYER_TYPE, MANIFEST_TYPE, Store
from tests.unit.fakes import INFO, FakeEngine

SETTINGS = Settings(env={}, ports=(), command=("x",), labels={})
KINDS = ("overlay2", "containerd")


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = Store(tmp_path / "store")
    made.prepare()
    return made


def engine_of(kind: str) -> FakeEngine:
    return FakeEngine(info=replace(INFO, store=kind))


def planned(number: int) -> PlannedLayer:
    return PlannedLayer(kind="files", name=f"layer{number}", component="base", inputs="")


def image(store: Store, *layers: bytes, name: str = "") -> Assembled:
    """An image whose layers are these bytes; a layer's diff id follows from them."""
    built = []
    for number, content in enumerate(layers):
        blob = store.put(content, LAYER_TYPE)
        diff_id = digest.of_bytes(b"tar of " + content)
        built.append(BuiltLayer(planned=planned(number), digest=blob.digest, diff_id=diff_id, size=blob.size))
    config = store.put(oci.config(SETTINGS, built, created="2026-01-01T00:00:00Z", labels={}), CONFIG_TYPE)
    manifest = store.put(oci.manifest(config, built), MANIFEST_TYPE)
    store.name(name or repr(layers), manifest)
    return Assembled(config=config, manifest=manifest, layers=tuple(built))


def path(of: str) -> str:
    return of.replace("sha256:", "blobs/sha256/")


def archived(store: Store, made: Assembled, known: Iterable[str] = ()) -> dict[str, bytes]:
    """Name -> content of the archive."""
    data = b"".join(load.archive(store, made, set(known), lambda _: None))
    assert len(data) % tarfile.BLOCKSIZE == 0
    assert data.endswith(bytes(2 * tarfile.BLOCKSIZE))
    found: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            assert member.name not in found
            found[member.name] = content.read()
    return found


LAYERS = (b"one", b"f" * tarfile.BLOCKSIZE, b"two" * 1000, b"three" * 100_000)


def test_an_archive_has_both_forms(store: Store) -> None:
    made = image(store, *LAYERS)
    found = archived(store, made)
    assert json.loads(found["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    assert json.loads(found["index.json"]) == {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [made.manifest.as_data()],
    }
    assert json.loads(found["manifest.json"]) == [
        {
            "Config": path(made.config.digest),
            "RepoTags": None,
            "Layers": [path(layer.digest) for layer in made.layers],
        }
    ]
    blobs = {name: content for name, content in found.items() if name.startswith("blobs/")}
    assert [path(digest.of_bytes(content)) for content in blobs.values()] == list(blobs)
    assert [blobs[path(layer.digest)] for layer in made.layers] == list(LAYERS)
    assert len(blobs) == len(LAYERS) + 2


def test_what_the_engine_has_is_left_out_but_listed(store: Store) -> None:
    made = image(store, *LAYERS)
    known = [layer.digest for layer in made.layers[:2]]
    found = archived(store, made, known)
    assert not {path(one) for one in known} & set(found)
    assert json.loads(found["manifest.json"])[0]["Layers"] == [path(layer.digest) for layer in made.layers]
    assert {path(layer.digest) for layer in made.layers[2:]} < set(found)
    assert path(made.config.digest) in found


def test_a_layer_that_an_image_has_twice_is_sent_once(store: Store) -> None:
    made = image(store, b"same", b"other", b"same")
    found = archived(store, made)
    assert len([name for name in found if name.startswith("blobs/")]) == 4
    assert len(json.loads(found["manifest.json"])[0]["Layers"]) == 3


def test_bytes_are_told_as_they_go(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "CHUNK", 400)
    made = image(store, b"a" * 1000)
    told: list[int] = []
    b"".join(load.archive(store, made, set(), told.append))
    blobs = [made.manifest.size, made.config.size, 1000]
    assert sum(told) == sum(blobs)
    assert max(told) <= 400


@pytest.mark.parametrize("kind", KINDS)
def test_the_id_is_the_engines_own(store: Store, kind: str) -> None:
    """Of the configuration on overlay2, of the manifest on containerd."""
    made = image(store, *LAYERS)
    engine = engine_of(kind)
    image_id = load.load(engine, store, made)
    assert image_id == {"overlay2": made.config.digest, "containerd": made.manifest.digest}[kind]
    assert image_id == made.image_id(kind)
    assert engine.image(image_id)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_that_the_engine_has_is_not_loaded_again(store: Store, kind: str) -> None:
    made = image(store, *LAYERS)
    engine = engine_of(kind)
    assert load.load(engine, store, made) == load.load(engine, store, made)
    assert len(engine.loaded) == 1


def blobs_of(names: list[str]) -> set[str]:
    return {name for name in names if name.startswith("blobs/")}


def test_a_second_image_brings_only_what_lies_above_the_shared_layers(store: Store) -> None:
    """Overlay2 knows a layer by the chain below it: `top` on another layer is another one."""
    first, second = image(store, b"a", b"b", b"top"), image(store, b"a", b"b", b"c", b"top")
    engine = engine_of("overlay2")
    load.load(engine, store, first)
    load.load(engine, store, second)
    own = [*second.layers[2:]]
    assert blobs_of(engine.loaded[1]) == {
        path(one) for one in (second.manifest.digest, second.config.digest, *(layer.digest for layer in own))
    }


def test_a_containerd_engine_has_blobs_whatever_lies_below_them(store: Store) -> None:
    first, second = image(store, b"a", b"b", b"top"), image(store, b"new", b"top")
    engine = engine_of("containerd")
    load.load(engine, store, first)
    load.load(engine, store, second)
    assert blobs_of(engine.loaded[1]) == {
        path(one) for one in (second.manifest.digest, second.config.digest, second.layers[0].digest)
    }


def test_a_containerd_engine_that_lost_an_image_gets_its_layers_again(store: Store) -> None:
    first, second = image(store, b"a", b"b"), image(store, b"a", b"c")
    engine = engine_of("containerd")
    del engine.known[load.load(engine, store, first)]
    load.load(engine, store, second)
    assert path(second.layers[0].digest) in engine.loaded[1]


def test_an_engine_that_lost_layers_meanwhile_gets_all_of_them(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = image(store, b"a", b"b"), image(store, b"a", b"c")
    engine = engine_of("overlay2")
    load.load(engine, store, first)
    chains = engine.chains()
    engine.diff_ids.clear()
    calls = iter([chains])
    monkeypatch.setattr(engine, "chains", lambda: next(calls, set()))
    assert load.load(engine, store, second) == second.config.digest
    assert [path(second.layers[0].digest) in names for names in engine.loaded[1:]] == [False, True]


def failing(error: Exception) -> Callable[[Iterable[bytes]], Any]:
    def fail(archive: Iterable[bytes]) -> None:
        b"".join(archive)
        raise error

    return fail


def test_an_engine_that_refuses_all_layers_is_not_asked_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, told = engine_of("overlay2"), list[int]()
    made = image(store, b"a")
    monkeypatch.setattr(engine, "load", failing(EngineError("no")))
    with pytest.raises(EngineError, match="no"):
        load.load(engine, store, made, told.append)
    assert sum(told) == made.manifest.size + made.config.size + 1


def test_a_damaged_layer_is_found_when_the_engine_refuses_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run makes it anew."""
    engine = engine_of("overlay2")
    made = image(store, b"a", b"b")
    store.path(made.layers[1].digest).write_bytes(b"B")
    monkeypatch.setattr(engine, "load", failing(EngineError("unexpected EOF")))
    with pytest.raises(FileError, match="was damaged, and is removed"):
        load.load(engine, store, made)
    assert not store.path(made.layers[1].digest).exists()


def test_an_engine_that_went_away_is_said_as_such(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("overlay2")
    answers = iter([engine.told])

    def info() -> EngineInfo:
        for told in answers:
            return told
        raise NoEngineError("it went away")

    monkeypatch.setattr(engine, "info", info)
    monkeypatch.setattr(engine, "load", failing(EngineError("broken pipe")))
    with pytest.raises(NoEngineError, match="it went away"):
        load.load(engine, store, image(store, b"a"))


def test_a_full_disk_is_not_tried_again_with_more(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, told = engine_of("overlay2"), list[int]()
    load.load(engine, store, image(store, b"a"))
    made = image(store, b"a", b"b")
    monkeypatch.setattr(engine, "load", failing(DiskError("full")))
    with pytest.raises(DiskError):
        load.load(engine, store, made, told.append)
    assert sum(told) == made.manifest.size + made.config.size + 1


def test_an_engine_that_knows_an_image_by_another_id(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store was taken for another kind: everything that goes by the id would miss it."""
    engine = engine_of("overlay2")
    made = image(store, b"a")
    monkeypatch.setattr(engine, "load", b"".join)
    with pytest.raises(EngineError, match=f"does not know it as {made.config.digest}"):
        load.load(engine, store, made)


@pytest.mark.parametrize(
    ("diff_ids", "chains", "count"),
    [
        ("abc", [], 0),
        ("abc", ["xbc"], 0),
        ("abc", ["abx"], 2),
        ("abc", ["abc"], 3),
        ("abc", ["ab"], 2),
        ("abc", ["abcd"], 3),
        ("abc", ["axc", "abx", "x", ""], 2),
        ("", ["abc"], 0),
    ],
)
def test_common(diff_ids: str, chains: list[str], count: int) -> None:
    assert load.common(diff_ids, {tuple(chain) for chain in chains}) == count


@given(st.text("ab", max_size=5), st.sets(st.text("ab", max_size=5).map(tuple), max_size=5))
def test_common_is_the_longest_beginning(diff_ids: str, chains: set[tuple[str, ...]]) -> None:
    count = load.common(diff_ids, chains)
    begins = {chain[:number] for chain in chains for number in range(len(chain) + 1)} | {()}
    assert tuple(diff_ids[:count]) in begins
    assert count == len(diff_ids) or tuple(diff_ids[: count + 1]) not in begins


# ---- an image of the store, read back


def test_read_gives_the_image_back(store: Store) -> None:
    made = image(store, *LAYERS)
    assert load.read(store, made.manifest.digest, [layer.planned for layer in made.layers]) == made


@pytest.mark.parametrize("lost", ["config", "layer", "cut layer"])
def test_an_image_that_lost_a_blob_is_none(store: Store, lost: str) -> None:
    made = image(store, *LAYERS)
    blob = store.path((made.config if lost == "config" else made.layers[1]).digest)
    blob.write_bytes(b"cut") if lost == "cut layer" else blob.unlink()
    assert load.read(store, made.manifest.digest, [layer.planned for layer in made.layers]) is None


def test_an_image_whose_manifest_is_not_there(store: Store) -> None:
    with pytest.raises(FileError):
        load.read(store, "sha256:" + "0" * 64, [])


def test_an_image_of_one_layer_to_run_something_in(store: Store) -> None:
    """It belongs to the checkout that will remove it, and has no name that would keep its layer."""
    [layer] = image(store, b"os", name="x").layers
    engine = engine_of("overlay2")
    image_id = load.load_bare(engine, store, layer, "/checkout")
    config = json.loads(store.read(image_id))
    assert config["rootfs"] == {"type": "layers", "diff_ids": [layer.diff_id]}
    assert engine.known[image_id].labels == {RUN_LABEL: "/checkout"}
    assert list(store.images()) == ["x"]
