"""What loading an image really takes on the engine's disk, against the estimates, in both kinds of store."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import random
import shutil
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from rich.console import Console

from builder import host
from builder.build import disk
from builder.common.console import View
from builder.engine.client import Engine
from builder.engine.load import Loader
from builder.layers import oci, stored_images
from builder.layers.blobs import LAYER_TYPE
from builder.layers.oci import CONTAINERD, Image, Layer
from builder.layers.store import Store
from tests.integration import newer_docker
from tests.integration.checkout import ROOT, docker
from tests.integration.daemon import Daemon, free_port
from tests.integration.engine_proxy import EngineProxy

MB = 1_000_000
LAYERS, SIZE = 4, 30 * MB  # of each layer, compressed
DISK = 2 << 30  # a limit, not memory taken
SPARE = 8 * MB  # databases of the engine, directories and rest of blocks: does not grow with images
POLL_S = 0.01


@pytest.fixture(scope="module")
def loadable(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Image]:
    """An image whose layers unpack to as many bytes as the estimates expect of wheels."""
    store = Store(tmp_path_factory.mktemp("store") / "store")
    store.prepare()
    layers = [_layer(store, number) for number in range(LAYERS)]
    return store, stored_images.put_image(store, oci.bare_config(layers, {"number": "1"}), layers)


def _layer(store: Store, number: int) -> Layer:
    out = io.BytesIO()
    content = random.Random(number).randbytes(SIZE // 10) + bytes(int(SIZE // 10 * (disk.UNPACKED - 1)))
    with tarfile.open(fileobj=out, mode="w") as tar:
        for part in range(10):
            member = tarfile.TarInfo(f"opt/{number}/{part}")
            # Another start: equal blocks could be stored once.
            data = part.to_bytes(8, "big") + content[8:]
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    plain = out.getvalue()
    blob = store.put(gzip.compress(plain, 1, mtime=0), LAYER_TYPE)
    diff_id = f"sha256:{hashlib.sha256(plain).hexdigest()}"
    return Layer(digest=blob.digest, diff_id=diff_id, size=blob.size, unpacked=len(plain))


@contextmanager
def fresh_engine(kind: str) -> Iterator[Daemon]:
    assert os.geteuid() == 0, "these tests start an engine of their own, which needs root"
    with TemporaryDirectory(prefix="dockerd-") as folder:
        daemon = Daemon(folder=Path(folder), port=free_port())
        if kind == CONTAINERD:
            daemon.programs = newer_docker.unpack(ROOT / ".builder/test-cache/newer-docker")
            daemon.features = ("containerd-snapshotter",)
        with daemon.disk(DISK):
            daemon.start()
            yield daemon


@pytest.mark.parametrize("way", ["pull", "archive"])
@pytest.mark.parametrize(
    "kind",
    [
        "overlay2",
        pytest.param(CONTAINERD, marks=pytest.mark.skipif(not host.is_debian(), reason="Debian has the newer engine")),
    ],
)
def test_loading_takes_no_more_than_the_estimate(
    loadable: tuple[Store, Image], monkeypatch: pytest.MonkeyPatch, kind: str, way: str
) -> None:
    store, image = loadable
    compressed = sum(layer.size for layer in image.layers)
    unpacked = sum(layer.unpacked for layer in image.layers)
    assert unpacked == pytest.approx(compressed * disk.UNPACKED, rel=0.01)
    with fresh_engine(kind) as daemon, EngineProxy(daemon.folder / "proxy.sock", daemon.host).serving() as proxy:
        proxy.refuses_pulls = way == "archive"
        monkeypatch.setenv("DOCKER_HOST", proxy.host)
        engine = Engine.connect()
        info = engine.info()
        assert info.store == kind
        assert info.root == str(daemon.root)
        before = shutil.disk_usage(daemon.root).used
        peak, is_done = before, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not is_done.wait(POLL_S):
                peak = max(peak, shutil.disk_usage(daemon.root).used)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            image_id = Loader(engine, store, "x", View(Console(quiet=True))).load(image)
            # With containerd, what the pull unpacked is removed with the temporary image: a container unpacks it again.
            docker("create", image_id, "program", host=daemon.host)
        finally:
            is_done.set()
            watcher.join()
        assert bool(proxy.pulled) == (way == "pull")
        added = shutil.disk_usage(daemon.root).used - before
        print(f"{kind}, {way}: {compressed / MB:.0f} MB, peak {(peak - before) / MB:.0f}, left {added / MB:.0f}")
        estimate = disk.engine_bytes(compressed) - disk.SPARE
        assert peak - before < estimate + SPARE
        if way == "archive" or kind == CONTAINERD:  # a pull into overlay2 takes less
            assert peak - before > estimate * 0.95
        left = disk.download_bytes(compressed, kind, is_shared=False) - disk.SPARE
        assert added == pytest.approx(left, abs=SPARE)
