"""Loading: the engine pulls from this process, or gets an archive that both kinds of engine read."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest

from builder.common.console import View
from builder.common.errors import BuildError, DamagedError, DiskError, EngineError, NoEngineError
from builder.common.files import digest_of_bytes
from builder.engine import load
from builder.engine.client import RUN_LABEL
from builder.engine.load import Loader, PullProgress
from builder.layers import oci, stored_images
from builder.layers.oci import LAYER_TYPE, Image, Layer
from builder.layers.store import Store
from builder.plan.settings import Settings
from tests.fakes.engine import INFO, FakeEngine, MemoryConsole

KINDS = ("overlay2", "containerd")
CHECKOUT = "/checkout"
LAYERS = (b"one", b"f" * tarfile.BLOCKSIZE, b"two" * 1000, b"three" * 100_000)


def put_image(store: Store, *contents: bytes) -> Image:
    """Stores an image with these layers."""
    layers = []
    for content in contents:
        blob = store.put(gzip.compress(content, mtime=0), LAYER_TYPE)
        layers.append(
            Layer(
                digest=blob.digest,
                diff_id=digest_of_bytes(content),
                size=blob.size,
                unpacked=len(content),
            )
        )
    settings = Settings(env={}, ports=(), command=("x",), labels={"a": "1"})
    history = tuple(f"layer {number}" for number in range(len(layers)))
    config = oci.config(settings, layers, history, created="2026-01-01T00:00:00Z", labels={})
    return stored_images.put_image(store, config, layers, history=history, labels={"a": "1"})


def engine_of(kind: str, *, is_remote: bool = False) -> FakeEngine:
    return FakeEngine(info=replace(INFO, store=kind), is_remote=is_remote)


def load_image(engine: FakeEngine, store: Store, image: Image, progress: Callable[[int], None] = lambda _: None) -> str:
    return Loader(engine, store, CHECKOUT, View(MemoryConsole())).load(image, progress)


def path(of: str) -> str:
    return of.replace("sha256:", "blobs/sha256/")


def archived(store: Store, image: Image, *, has_layers: bool = True) -> dict[str, bytes]:
    """Name -> content of the archive."""
    data = b"".join(load.docker_archive(store, image, has_layers=has_layers))
    assert len(data) % tarfile.BLOCKSIZE == 0
    assert data.endswith(bytes(2 * tarfile.BLOCKSIZE))
    files: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        for member in tar:
            content = tar.extractfile(member)
            assert content is not None
            assert member.name not in files
            files[member.name] = content.read()
    return files


# ---- the archive


def test_an_archive_has_both_formats(store: Store) -> None:
    image = put_image(store, *LAYERS)
    files = archived(store, image)
    assert json.loads(files["oci-layout"]) == {"imageLayoutVersion": "1.0.0"}
    assert json.loads(files["index.json"]) == {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "manifests": [image.manifest.descriptor.as_data()],
    }
    assert json.loads(files["manifest.json"]) == [
        {
            "Config": path(image.config.digest),
            "RepoTags": None,
            "Layers": [path(layer.digest) for layer in image.layers],
        }
    ]
    blobs = {name: content for name, content in files.items() if name.startswith("blobs/")}
    assert [path(digest_of_bytes(content)) for content in blobs.values()] == list(blobs)
    assert [gzip.decompress(blobs[path(layer.digest)]) for layer in image.layers] == list(LAYERS)
    assert len(blobs) == len(LAYERS) + 2


def test_an_archive_without_layers_names_them(store: Store) -> None:
    image = put_image(store, *LAYERS)
    files = archived(store, image, has_layers=False)
    assert {name for name in files if name.startswith("blobs/")} == {
        path(image.manifest.digest), path(image.config.digest),
    }  # fmt: skip
    assert json.loads(files["manifest.json"])[0]["Layers"] == [path(layer.digest) for layer in image.layers]


def test_a_layer_that_an_image_has_twice_is_sent_once(store: Store) -> None:
    image = put_image(store, b"same", b"other", b"same")
    files = archived(store, image)
    assert len([name for name in files if name.startswith("blobs/")]) == 4
    assert len(json.loads(files["manifest.json"])[0]["Layers"]) == 3


# ---- what the engine has afterwards


@pytest.mark.parametrize("is_remote", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_image_is_loaded_without_a_name(store: Store, kind: str, is_remote: bool) -> None:
    """Its id is the digest of the configuration for overlay2, of the manifest for containerd."""
    image = put_image(store, *LAYERS)
    engine = engine_of(kind, is_remote=is_remote)
    image_id = load_image(engine, store, image)
    assert load_image(engine, store, image) == image_id
    assert len(engine.loaded) == 1, "it is not loaded again"
    assert image_id == {"overlay2": image.config.digest, "containerd": image.manifest.digest}[kind]
    assert image_id == image.image_id(kind)
    assert set(engine.known) == {image_id}, "a temporary image, or a name of one, is left"
    assert list(engine.diff_ids) == [image_id]


def test_an_image_of_one_layer_to_run_something_in(store: Store) -> None:
    """It has the label of the checkout that removes it, and no name that would keep its layer."""
    [layer] = put_image(store, b"os").layers
    engine = engine_of("overlay2")
    image_id = Loader(engine, store, CHECKOUT, View(MemoryConsole())).load_bare(layer)
    config = json.loads(store.read(image_id))
    assert config["rootfs"] == {"type": "layers", "diff_ids": [layer.diff_id]}
    assert engine.known[image_id].labels == {RUN_LABEL: CHECKOUT}
    assert store.images() == {}


# ---- by a pull


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_pulled_inflated_where_the_id_allows_it(store: Store, kind: str) -> None:
    image = put_image(store, *LAYERS)
    engine = engine_of(kind)
    counts: list[int] = []
    load_image(engine, store, image, counts.append)
    sizes = [layer.unpacked if kind == "overlay2" else layer.size for layer in image.layers]
    assert sum(counts) == sum(sizes), "the engine's own messages"
    digests = [layer.diff_id if kind == "overlay2" else layer.digest for layer in image.layers]
    assert engine.pulled == [digests]
    assert [path(blob) for blob in digests if path(blob) in engine.loaded[0]] == []


def test_the_temporary_image_is_removed_by_the_next_run(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also after a killed run: it has the label of the checkout."""
    engine = engine_of("overlay2")

    def killed(archive: Iterable[bytes]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine, "load", killed)
    monkeypatch.setattr(engine, "remove_image", killed)
    with pytest.raises(KeyboardInterrupt):
        load_image(engine, store, put_image(store, b"a"))
    assert len(engine.known) == 2, "the image was loaded, or the temporary one has not both its name and its id"
    assert {image.id for image in engine.images(f"{RUN_LABEL}={CHECKOUT}")} == set(engine.diff_ids)


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("damage", [b"", b"x", None])
@pytest.mark.parametrize("is_sized", [True, False], ids=["", "unknown size"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_layer_is_removed(store: Store, kind: str, is_sized: bool, damage: bytes | None) -> None:
    """The next run rebuilds it."""
    image = put_image(store, b"a", b"b" * 500)
    layer = image.layers[1] if is_sized else replace(image.layers[1], unpacked=0)
    if damage is None:
        store.path(layer.digest).write_bytes(gzip.compress(b"c" * 500, mtime=0))
    else:
        store.path(layer.digest).write_bytes(damage + store.path(layer.digest).read_bytes()[:-9])
    with pytest.raises(DamagedError):
        load_image(engine_of(kind), store, replace(image, layers=(image.layers[0], layer)))
    assert not store.path(layer.digest).exists()


@pytest.mark.parametrize("change", [{"diff_id": digest_of_bytes(b"other")}, {"unpacked": 7}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_with_a_wrong_record_is_named(
    store: Store, monkeypatch: pytest.MonkeyPatch, kind: str, change: dict[str, Any]
) -> None:
    """The diff id of a known layer is not computed again, so a wrong one in locks/layers.json reaches the engine."""
    image = put_image(store, b"a", b"b" * 500)
    wrong = replace(image.layers[1], **change)
    engine = engine_of(kind)
    if kind == "containerd":  # as it does after unpacking
        monkeypatch.setattr(engine, "pull_local", failing(EngineError("wrong diff id calculated on extraction")))
        monkeypatch.setattr(engine, "load", failing(EngineError("wrong diff id calculated on extraction")))
    name, value = next(iter(change.items()))
    actual = image.layers[1].diff_id if name == "diff_id" else 500
    with pytest.raises(BuildError) as caught:
        load_image(engine, store, replace(image, layers=(image.layers[0], wrong)))
    title = {"diff_id": "diff id", "unpacked": "unpacked size"}[name]
    assert str(caught.value) == f"layer layer 1 has the {title} {actual}, but {value} is recorded"
    assert caught.value.hint == f"Delete the line with {wrong.digest} from locks/layers.json. Then run this again."
    assert not store.path(wrong.digest).exists(), "it is made again, with a right record"
    assert store.path(image.layers[0].digest).exists()


def test_the_engine_does_not_retry_a_damaged_layer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would wait for a minute."""
    engine, image = engine_of("overlay2"), put_image(store, b"b" * 500)
    store.path(image.layers[0].digest).write_bytes(b"x")
    after: list[str] = []

    def pull(_: str) -> Iterator[Mapping[str, Any]]:
        yield {"status": "Downloading", "id": "1", "progressDetail": {"current": 1}}
        yield {"status": "Retrying in 5 seconds", "id": "1"}
        after.append("the engine goes on")

    monkeypatch.setattr(engine, "pull_local", pull)
    with pytest.raises(DamagedError):
        load_image(engine, store, image)
    assert after == []


def test_a_missing_layer_is_an_error(store: Store) -> None:
    image = put_image(store, b"b" * 500)
    store.path(image.layers[0].digest).unlink()
    with pytest.raises(DamagedError):
        load_image(engine_of("overlay2"), store, image)


@pytest.mark.parametrize("error", [EngineError("failed to register layer"), DiskError("full")], ids=["layer", "disk"])
def test_a_pull_that_fails_is_not_hidden_by_an_archive(
    store: Store, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    engine = engine_of("overlay2")
    engine.blobs.clear()
    pull = engine.pull_local

    def fail(reference: str) -> Iterator[Mapping[str, Any]]:
        yield from pull(reference)
        raise error

    monkeypatch.setattr(engine, "pull_local", fail)
    with pytest.raises(type(error)):
        load_image(engine, store, put_image(store, b"a", b"b"))
    assert engine.loaded == []


def test_an_engine_that_stopped_is_reported_as_such(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("overlay2", is_remote=True)
    monkeypatch.setattr(engine, "check", failing(NoEngineError("it stopped")))
    monkeypatch.setattr(engine, "load", failing(EngineError("broken pipe")))
    with pytest.raises(NoEngineError):
        load_image(engine, store, put_image(store, b"a"))


# ---- by an archive


def test_podman_gets_archives(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would try TLS on the port first, and then refuse plain HTTP."""
    engine = FakeEngine(info=replace(INFO, name="Podman", store="overlay"))
    monkeypatch.setattr(engine, "pull_local", failing(AssertionError("it was asked to pull")))
    image = put_image(store, b"a")
    load_image(engine, store, image)
    assert path(image.layers[0].digest) in engine.loaded[0]


def test_an_engine_that_cannot_reach_this_machine_gets_archives(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not tried again: an engine behind a firewall takes half a minute to fail."""
    engine = engine_of("overlay2", is_remote=True)
    loader = Loader(engine, store, CHECKOUT, View(MemoryConsole()))
    counts: list[int] = []
    images = [put_image(store, b"a", b"b"), put_image(store, b"a", b"c")]
    tries: list[str] = []

    def pull(reference: str) -> None:
        tries.append(reference)
        raise EngineError("connection refused")

    monkeypatch.setattr(engine, "pull_local", pull)
    for image in images:
        loader.load(image, counts.append)
    assert len(tries) == 1
    for image, names in zip(images, engine.loaded, strict=True):
        assert {path(layer.digest) for layer in image.layers} < set(names)
    blobs = [blob for image in images for blob in (image.manifest.descriptor, image.config)]
    blobs += [layer.descriptor for image in images for layer in image.layers]
    assert sum(counts) == sum(blob.size for blob in blobs)


def test_a_damaged_layer_in_an_archive_is_removed(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of("containerd", is_remote=True)
    image = put_image(store, b"a", b"b")
    store.path(image.layers[1].digest).write_bytes(b"B")
    monkeypatch.setattr(engine, "load", failing(EngineError("unexpected EOF")))
    with pytest.raises(DamagedError):
        load_image(engine, store, image)
    assert not store.path(image.layers[1].digest).exists()


def test_an_engine_that_loads_an_image_under_another_id(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store is not of the detected kind: the image would never be found."""
    engine = engine_of("overlay2", is_remote=True)
    image = put_image(store, b"a")
    monkeypatch.setattr(engine, "load", b"".join)
    with pytest.raises(EngineError):
        load_image(engine, store, image)


def pulled(status: str, layer: str, current: int | None) -> dict[str, Any]:
    """A message of a pull."""
    detail = {"progressDetail": {"current": current, "total": 100}} if current is not None else {}
    return {"status": status, "id": layer, **detail}


def test_the_bytes_of_a_pull() -> None:
    """Each message has the bytes of its layer so far; a download that starts over counts once."""
    progress = PullProgress("Extracting")
    messages: list[dict[str, Any]] = [
        pulled("Downloading", "a", 10), pulled("Pull complete", "c", None), pulled("Extracting", "a", 30),
        {"status": "Extracting"}, pulled("Extracting", "a", 50), pulled("Extracting", "b", 5),
    ]  # fmt: skip
    assert [progress.feed(message) for message in messages] == [0, 0, 30, 0, 20, 5]
    assert not progress.is_retrying
    messages = [
        pulled("Retrying in 5 seconds", "a", None), pulled("Extracting", "a", 20), pulled("Extracting", "a", 55),
    ]  # fmt: skip
    assert [progress.feed(message) for message in messages] == [0, 0, 5]
    assert progress.is_retrying
