"""Operating systems: made with mmdebstrap from the files of the checkout, recorded, and nothing left behind."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from builder.build import operating_systems
from builder.build.layer_lookup import LayerLookup
from builder.build.operating_systems import SystemLayers
from builder.build.work import Work
from builder.common import digest
from builder.common.console import View
from builder.common.errors import BuildError, DiskError
from builder.index.host import Host
from builder.layers import os_layer
from builder.layers.known_layers import KnownLayers
from builder.layers.os_layer import OsLayer
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan import plan
from tests.fakes.engine import FakeEngine, MemoryConsole
from tests.fakes.mmdebstrap import FakeMmdebstrap, file_system

CELL = "qz-0.5-cu129-py311"


class WithoutRegistry(LayerLookup):
    """No registry has any layer."""

    def find(self, digest: str) -> None:
        return None


class OneSystem:
    """The operating system of one image, made in a store of its own."""

    def __init__(self, project: Project, root: Path) -> None:
        self.store = Store(root)
        self.store.prepare()
        self.console = MemoryConsole()
        self.engine = FakeEngine()
        self.work = Work(engine=self.engine, project=project, host=Host(), view=View(self.console))
        [self.image] = plan.make_locked(project, project.select([CELL])).images
        self.known = KnownLayers(project.root)
        self.error: BuildError | None = None
        self.runs: list[tuple[Sequence[str], Mapping[str, bytes]]] = []

    def mmdebstrap(self, name: str, arguments: Sequence[str], files: Mapping[str, bytes]) -> bytes:
        assert name == operating_systems.row(self.image)
        self.runs.append((arguments, files))
        if self.error:
            raise self.error
        return file_system()

    def make(self) -> OsLayer:
        lookup = WithoutRegistry(self.work.project, self.work.host, self.work.view, self.store, self.known)
        fake = FakeMmdebstrap(self.work, self.mmdebstrap)
        files = operating_systems.read_inputs(self.work.project.root, self.image)
        return SystemLayers(self.work, self.store, lookup, fake).provide(self.image, files, None)

    @property
    def recorded(self) -> OsLayer | None:
        return os_layer.stored_system(self.store, self.image.os, None)


@pytest.fixture
def system(tiny: Project, tmp_path: Path) -> OneSystem:
    return OneSystem(tiny, tmp_path / "store")


def test_a_layer_is_made_and_recorded(system: OneSystem) -> None:
    layer = system.make()
    blob = system.store.path(layer.digest).read_bytes()
    assert layer == OsLayer(
        digest=digest.of_bytes(blob),
        diff_id=layer.diff_id,
        size=len(blob),
        unpacked=layer.unpacked,
        created="2026-01-01T00:00:00Z",
        taken=("opt/venv/bin/python",),
        folders=(),
    )
    with tarfile.open(fileobj=io.BytesIO(blob)) as archive:
        assert "usr/bin/python3" in archive.getnames()
    assert system.recorded == layer
    assert os_layer.stored_system(system.store, "sha256:other", None) is None
    assert list((system.work.project.state / "tmp").iterdir()) == []
    assert system.engine.calls == []


def test_mmdebstrap_gets_the_lock_and_the_steps(system: OneSystem) -> None:
    system.make()
    [(arguments, files)] = system.runs
    assert arguments == ["newbird", "946684800", "python3.11"]
    root = system.work.project.root
    assert files["packages.json"] == (root / system.image.system.path).read_bytes()
    assert files["steps/os.sh"] == (root / "templates/steps/os.sh").read_bytes()
    assert "uv" not in files


def test_an_image_with_uvs_python_gets_uv(system: OneSystem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "uv").write_bytes(b"program")
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    system.image = replace(system.image, uv="3.11.9")
    system.make()
    [(arguments, files)] = system.runs
    interpreter = "/opt/python/cpython-3.11.9-linux-x86_64-gnu/bin/python3.11"
    assert arguments == ["newbird", "946684800", interpreter, "3.11.9"]
    assert files["uv"] == b"program"


def test_a_failure_says_how_to_lock_current_packages_and_leaves_no_record(system: OneSystem) -> None:
    system.error = BuildError("os-x: mmdebstrap failed\n  | E: Unable to locate package tini", hint="Full log: x")
    with pytest.raises(BuildError, match="E: Unable to locate package") as caught:
        system.make()
    assert caught.value.hint.endswith(f"builder refresh {CELL}   Full log: x")
    assert system.recorded is None


def test_a_full_store_leaves_no_record(system: OneSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise DiskError("full")

    monkeypatch.setattr(system.store, "new_blob", full)
    with pytest.raises(DiskError):
        system.make()
    assert system.recorded is None


def test_a_layer_with_other_bytes_than_the_known_one_is_not_stored(system: OneSystem) -> None:
    system.known.add_system(system.image.os, replace(system.make(), diff_id=digest.of_bytes(b"other")))
    for blob in (system.store.root / "blobs/sha256").iterdir():
        blob.unlink()
    with pytest.raises(BuildError, match=r"^layer os has the diff id"):
        system.make()
    assert list((system.store.root / "blobs/sha256").iterdir()) == []
    assert system.recorded is None


def test_the_same_inputs_give_the_same_layer(system: OneSystem, tiny: Project, tmp_path: Path) -> None:
    assert system.make() == OneSystem(tiny, tmp_path / "other").make()


INVALID: dict[str, dict[str, object]] = {
    "null": {"created": None}, "text for a list": {"taken": "x"}, "text for a number": {"size": "7"},
    "unknown field": {"more": 1}, "missing field": {"folders": ...},
}  # fmt: skip


@pytest.mark.parametrize("change", INVALID.values(), ids=INVALID.keys())
def test_an_invalid_record_is_ignored(system: OneSystem, change: dict[str, object]) -> None:
    """An older builder may have written it."""
    data = {**asdict(system.make()), **change}
    [path] = (system.store.root / "layers").iterdir()
    path.write_text(json.dumps({field: value for field, value in data.items() if value is not ...}))
    assert system.recorded is None


def test_a_record_without_its_blob_is_ignored(system: OneSystem) -> None:
    system.store.path(system.make().digest).unlink()
    assert system.recorded is None


def test_its_time_does_not_depend_on_the_time_zone(system: OneSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TZ", "Asia/Tokyo")
            time.tzset()
            assert system.make().created == "2026-01-01T00:00:00Z"
    finally:
        time.tzset()
