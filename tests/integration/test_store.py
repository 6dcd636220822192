"""The store: read by others, shared by builders, freed of what no image uses, full and damaged."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from builder.layers.store import PACKAGES
from tests.integration import programs, stores
from tests.integration import registry as registries
from tests.integration.checkout import PLAIN, Checkout
from tests.integration.engine_proxy import EngineProxy
from tests.integration.index import Fault, Index
from tests.integration.registry import Server
from tests.integration.test_load import OF_A_TAR
from tests.paths import ROOT

MB = 10**6
TROUBLESHOOTING = ROOT / "docs/troubleshooting.md"
ROOMY = 400 * MB


@pytest.fixture
def ready(fresh: Checkout, seed: Path) -> Checkout:
    """A checkout that has built nothing, with a store of its own that has the operating system."""
    fresh.lock_and_render()
    fresh.take_store(like=seed)
    return fresh


def test_skopeo_reads_and_copies_an_image(released: Checkout, tmp_path: Path) -> None:
    programs.install("skopeo")
    for reference, digest in released.stored().items():
        source = f"oci:{released.store}:{reference}"
        output = json.loads(_skopeo("inspect", source))
        assert output["Digest"] == digest
        assert output["Layers"] == [layer for _, layer in stores.layers(released.store, digest)]
        assert output["Labels"]["io.github.gpu-images.framework.version"] == released.release
    _skopeo("copy", source, f"oci:{tmp_path}/copy:it")  # which checks every digest on the way
    assert stores.faults(tmp_path / "copy") == []
    assert set(stores.images(tmp_path / "copy").values()) == {digest}


def _skopeo(*arguments: str) -> str:
    done = subprocess.run(["skopeo", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_gc_frees_what_no_image_uses_and_nothing_else(released: Checkout) -> None:
    kept = {name: stores.blobs_of(released.store, digest) for name, digest in stores.images(released.store).items()}
    used = {blob.removeprefix("sha256:") for blobs in kept.values() for blob in blobs}
    records = [json.loads(path.read_text(encoding="utf-8")) for path in (released.store / "layers").iterdir()]
    packages = {blob.removeprefix("sha256:") for record in records for blob in record.get(PACKAGES, ())}
    assert packages, "the Debian packages of the images' operating system are kept"
    used |= packages
    before = {path.name: path.stat().st_size for path in (released.store / "blobs/sha256").iterdir()}
    assert used < set(before), "what was run to compile is in the store, and no image's"
    (released.store / "downloads" / f"{'0' * 64}.part").write_bytes(bytes(10 * MB))

    output = released.builder("gc", "--dry-run")
    row = next(line.split() for line in output.splitlines() if line.startswith(released.references()[0]))
    plain, extra = (kept[released.references(suffix)[0]] for suffix in ("", "-extra"))
    others = {blob for name, blobs in kept.items() if name != released.references()[0] for blob in blobs}
    assert row[1] in released.stored()[released.references()[0]]
    assert row[2:] == [*_size(sum(plain.values())), *_size(sum(plain[blob] for blob in set(plain) - others))]
    assert set(plain) - others != set(plain), "the images share nothing"
    assert {path.name for path in (released.store / "blobs/sha256").iterdir()} == set(before)

    files = _files(released.store)
    result = released.builder("gc")
    assert {path.name for path in (released.store / "blobs/sha256").iterdir()} == used
    freed = sum(files[path] for path in files.keys() - _files(released.store).keys())
    summary = f"freed: {freed / MB:.1f} MB ({len(before) - len(used)} unused blob"
    assert summary in result
    assert f"would be {summary}" in output
    assert stores.leftovers(released.store) == []
    assert "would be freed: 0 B (0 unused blob" in released.builder("gc", "--dry-run")
    assert "2 images: 2 up to date" in released.builder("images")
    assert extra.keys() <= {f"sha256:{name}" for name in used}


def _files(store: Path) -> dict[Path, int]:
    """The regular files of a store, as path -> bytes."""
    return {path: path.stat().st_size for path in store.rglob("*") if path.is_file() and not path.is_symlink()}


def _size(count: int) -> list[str]:
    """As `builder` writes it."""
    return [f"{count / MB:.1f}", "MB"] if count >= 999_500 else [f"{count / 1000:.0f}", "kB"]


def test_two_checkouts_share_an_empty_store_at_once(checkout: Checkout, index: Index, tmp_path: Path) -> None:
    """They need the same wheels and the same operating system at the same time."""
    checkout.lock_and_render()
    store = checkout.take_store()
    other = tmp_path / "other"
    shutil.copytree(checkout.root, other, symlinks=True, ignore=shutil.ignore_patterns(".builder"))
    index.faults["tinyframe"] = Fault.FILE_STALLS
    with checkout.running("build") as first, checkout.running("--root", str(other), "build") as second:
        first.reaches(index.stalled.is_set)
        second.says("wheels: ")
        index.heal()
        first.ends(0)
        second.ends(0)
    assert set(checkout.stored()) == {checkout.references()[0], checkout.references("-extra")[0]}
    assert stores.faults(store) == []
    assert len(checkout.image_ids()) == 2
    assert list((store / "tmp").iterdir()) == []


@contextmanager
def disk(folder: Path, size: int) -> Iterator[None]:
    """A disk of its own for a folder, of so many bytes."""
    folder.mkdir()
    _as_root("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield
    finally:
        _as_root("umount", str(folder))


def _as_root(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30)


def test_a_disk_that_fills_up_is_said_to_be_full(checkout: Checkout) -> None:
    """The wheels have room, the operating system has not: how large that gets nobody knows before."""
    checkout.lock_and_render()
    store = checkout.take_store()
    with disk(store, 60 * MB):
        output = checkout.builder("build", PLAIN, code=10)
        assert f"the disk of the store is full ({store})" in output
        assert "`builder gc`" in output
        assert stores.faults(store) == []
        assert checkout.stored() == {}
        assert list((store / "tmp").iterdir()) == []
        records = [path.read_text(encoding="utf-8") for path in (store / "layers").iterdir()]
        assert any('"toc"' in record and '"taken"' not in record for record in records), "no layer of wheels is kept"
        assert checkout.image_ids() == set()

        _as_root("mount", "-o", f"remount,size={ROOMY}", str(store))
        output = checkout.builder("build", PLAIN)
        assert "wheels: " not in output, "what was made before the disk was full is lost"
        assert set(checkout.stored()) == {checkout.references()[0]}
        assert stores.faults(store) == []


def test_a_damaged_layer_is_noticed_when_it_is_loaded(ready: Checkout, proxy: EngineProxy) -> None:
    """The engine refuses it at once, without retries for a minute."""
    ready.engine = proxy.host
    ready.builder("build", PLAIN)
    before = ready.stored()
    for line in ("tinyframe-", "files: tiny bytecode", "os"):
        ready.docker("image", "rm", "-f", *ready.image_ids())
        damaged = stores.flip(ready.store, _layer(ready, line))
        output = ready.builder("build", PLAIN, code=12)
        assert f"{damaged} did not match its digest and was removed" in output
        assert "Run the same command again" in output
        assert ready.image_ids() == set()
        assert stores.faults(ready.store) == [f"{name} lacks sha256:{damaged.name}" for name in _with(ready, damaged)]

        ready.builder("build", PLAIN)
        assert ready.stored() == before
    assert max(proxy.loaded) < OF_A_TAR, "the failed pull was replaced by an archive"


def _layer(checkout: Checkout, line: str) -> str:
    """Digest of the one layer with such a line in the history."""
    layers = stores.layers(checkout.store, checkout.stored()[checkout.references()[0]])
    (digest,) = [layer for words, layer in layers if words == line or (line.endswith("-") and f" {line}" in words)]
    return digest


def _with(checkout: Checkout, blob: Path) -> list[str]:
    """Images of the store that have a blob."""
    images = stores.images(checkout.store).items()
    return [name for name, digest in images if f"sha256:{blob.name}" in stores.blobs_of(checkout.store, digest)]


def test_a_damaged_layer_is_noticed_when_it_is_staged(released: Checkout, tmp_path: Path) -> None:
    registries.install()
    damaged = stores.flip(released.store, _layer(released, "tinyframe-"))
    with Server(folder=tmp_path / "registry").serving() as server:
        released.edit("matrix.yaml", 'registry: ""', f'registry: ""\nstaging: {server.address}/staging')
        output = released.builder("stage", code=12)
        assert "damaged: its SHA-256 is not" in output
        assert str(damaged) in output
        command = next(
            line for line in TROUBLESHOOTING.read_text("utf-8").splitlines() if "sha256sum" in line
        ).partition(" && ")[2]
        subprocess.run(["sh", "-euc", command.partition("  #")[0]], cwd=released.store / "blobs/sha256", check=True)
        assert not damaged.exists()
        released.builder("images")
        assert ": 2 images, " in released.publish(server.address)
    assert stores.faults(released.store) == []
