"""The store: read by others, full, shared by builders, and damaged. What `gc` frees: tests/unit/layers."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from builder.layers.estargz import PREFETCH_LANDMARK, TOC
from tests.integration import programs, stores
from tests.integration.checkout import EXTRA, PLAIN, Checkout
from tests.integration.engine_proxy import EngineProxy
from tests.integration.index import Fault, Index
from tests.integration.registry import Server
from tests.integration.test_load import OF_A_TAR
from tests.paths import ROOT

MB = 10**6
TROUBLESHOOTING = ROOT / "docs/troubleshooting.md"
ROOMY = 400 * MB


@pytest.fixture
def ready(fresh_extra: Checkout, seed: Path) -> Checkout:
    """A checkout that has built nothing, with a store of its own that has the layers of the smaller image."""
    fresh_extra.lock_and_render()
    fresh_extra.take_store(like=seed)
    return fresh_extra


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


def copies_system(checkout: Checkout, store: Path) -> None:
    """Replaces mmdebstrap by a copy of the operating system of a store, which takes a quarter of the time."""
    [record] = stores.os_records(store)
    blob = stores.path(store, record["digest"])
    script = f"gzip -dc {blob} | tar --delete -f - {PREFETCH_LANDMARK} {TOC} >root.tar\n"
    (checkout.root / "templates/steps/mmdebstrap.sh").write_text(script, encoding="utf-8")


def test_a_full_disk_and_two_checkouts_that_share_a_store(
    checkout: Checkout, index: Index, seed: Path, tmp_path: Path
) -> None:
    """The wheels fit, but not the operating system, whose size is not known before it is made.

    With room, both checkouts need the same operating system and the same wheels at the same time.
    """
    checkout.lock_and_render()
    copies_system(checkout, seed)
    other = tmp_path / "other"
    shutil.copytree(checkout.root, other, symlinks=True, ignore=shutil.ignore_patterns(".builder"))
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
        index.faults["tinyextra"], answered = Fault.FILE_STALLS, len(index.answered)
        with checkout.running("build") as first, checkout.running("--root", str(other), "build") as second:
            first.reaches(index.stalled.is_set)
            second.says("wheels: ")
            index.heal()
            first.ends(0)
            second.ends(0)
        assert not [path for path in index.answered[answered:] if "/tinyframe-" in path], (
            "what was made before the disk was full is lost"
        )
        assert set(checkout.stored()) == {checkout.references()[0], checkout.references("-extra")[0]}
        assert stores.faults(store) == []
        assert len(checkout.image_ids()) == 2
        assert list((store / "tmp").iterdir()) == []


def test_a_damaged_layer_is_noticed(ready: Checkout, proxy: EngineProxy, server: Server) -> None:
    """When it is staged; and when it is loaded, which the engine refuses at once, without retries for a minute."""
    ready.engine = proxy.host
    ready.builder("images", EXTRA)
    before = ready.stored()
    [(_, layer)] = [item for item in stores.layers(ready.store, *before.values()) if " tinyextra-" in item[0]]
    damaged = stores.flip(ready.store, layer)
    ready.edit("matrix.yaml", 'registry: ""', f'registry: ""\nstaging: {server.address}/staging')
    output = ready.builder("stage", EXTRA, code=12)
    assert "damaged: its SHA-256 is not" in output
    assert str(damaged) in output

    ready.docker("image", "rm", "-f", *ready.image_ids())
    output = ready.builder("build", EXTRA, code=12)
    assert f"{damaged} did not match its digest and was removed" in output
    assert "Run the same command again" in output
    assert ready.image_ids() == set()
    own = [name for name in stores.images(ready.store) if name.startswith(ready.namespace)]
    assert stores.faults(ready.store) == [f"{name} lacks {layer}" for name in own]
    ready.builder("build", EXTRA)
    assert ready.stored() == before
    assert max(proxy.loaded) < OF_A_TAR, "the failed pull was replaced by an archive"

    # The command of the guide removes it too.
    stores.flip(ready.store, layer)
    lines = TROUBLESHOOTING.read_text("utf-8").splitlines()
    command = next(line for line in lines if "sha256sum" in line).partition(" && ")[2]
    subprocess.run(["sh", "-euc", command.partition("  #")[0]], cwd=ready.store / "blobs/sha256", check=True)
    assert not damaged.exists()
