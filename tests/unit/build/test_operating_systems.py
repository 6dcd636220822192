"""Operating systems: made with mmdebstrap from the files of the checkout, recorded, and nothing left behind."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from builder.build import operating_systems
from builder.build.layer_lookup import LayerLookup
from builder.build.operating_systems import SystemLayers
from builder.common.errors import BuildError, FetchError
from builder.common.files import digest_of_bytes
from builder.debian.archives import Archives
from builder.index.download import Fetcher
from builder.index.host import Apt, AptSource, Host
from builder.layers import stored_layers
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import Layer
from builder.layers.store import PACKAGES, Store
from builder.matrix.project import Project
from builder.plan import plan
from tests.fakes import locks
from tests.fakes.engine import FakeEngine, MemoryConsole
from tests.fakes.mmdebstrap import FakeDebian, FakeFetcher, file_system
from tests.fakes.run import FakeApt, new_run
from tests.fakes.wire import Reply, Wire
from tests.unit.layers.toc import check_by_specification

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
        self.run = new_run(project, engine=self.engine, store=self.store, console=self.console)
        [self.image] = plan.make_locked_plan(project, project.select([CELL])).images
        self.known = KnownLayers(project.root)
        self.runs: list[tuple[Sequence[str], Mapping[str, bytes]]] = []

    def mmdebstrap(self, name: str, arguments: Sequence[str], files: Mapping[str, bytes]) -> bytes:
        assert name == operating_systems.row(self.image)
        self.runs.append((arguments, files))
        return file_system()

    def make(self) -> Layer:
        lookup = WithoutRegistry(self.run, self.known)
        self.fake = FakeDebian(self.run, self.mmdebstrap)
        files = operating_systems.read_inputs(self.run.project, self.image)
        archives = Archives(self.run.project.matrix, self.run.host, FakeApt())
        systems = SystemLayers(self.run, lookup, self.fake, archives)
        return systems.provide(self.image, files)

    @property
    def recorded(self) -> Layer | None:
        return stored_layers.stored_layer(self.store, self.image.os_inputs)


@pytest.fixture
def system(tiny: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OneSystem:
    monkeypatch.setattr(operating_systems, "Fetcher", FakeFetcher)
    return OneSystem(tiny, tmp_path / "store")


def test_a_layer_is_made_and_recorded(system: OneSystem) -> None:
    layer = system.make()
    blob = system.store.path(layer.digest).read_bytes()
    assert layer == Layer(
        digest=digest_of_bytes(blob),
        diff_id=layer.diff_id,
        size=len(blob),
        unpacked=layer.unpacked,
        toc=layer.toc,
        created="2026-01-01T00:00:00Z",
        taken=("opt/venv/bin/python",),
        folders=(),
    )
    check_by_specification(blob, layer)
    with tarfile.open(fileobj=io.BytesIO(blob)) as archive:
        assert "usr/bin/python3" in archive.getnames()
    assert system.recorded == layer
    assert stored_layers.stored_layer(system.store, "sha256:other") is None
    assert list((system.run.project.state / "tmp").iterdir()) == []
    assert system.engine.calls == []


def test_mmdebstrap_gets_the_lock_and_the_steps(system: OneSystem) -> None:
    system.make()
    [(arguments, files)] = system.runs
    assert arguments == ["newbird", "946684800", "python3.11"]
    root = system.run.project.root
    assert files["packages.json"] == (root / system.image.os_request.path).read_bytes()
    assert files["steps/os.sh"] == (root / "templates/steps/os.sh").read_bytes()
    assert "uv" not in files


def test_an_image_with_uvs_python_gets_uv_and_the_locked_archive(
    system: OneSystem, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "uv").write_bytes(b"program")
    monkeypatch.setattr("sys.executable", str(tmp_path / "python"))
    archive = locks.python_lock_of("3.11.9")
    system.image = replace(system.image, uv="3.11.9", locked_python=archive)
    system.make()
    [(arguments, files)] = system.runs
    interpreter = "/opt/python/cpython-3.11.9-linux-x86_64-gnu/bin/python3.11"
    assert arguments == ["newbird", "946684800", interpreter, "3.11.9"]
    assert files["steps/uv"] == b"program"
    assert files[f"steps/{archive.file}"] == archive.file.encode()
    script = files["uv"].decode()
    install = '/mnt/steps/uv "$@" --offline --python-downloads-json-url /mnt/steps/python.json'
    assert f"sh /mnt/steps/uv-python.sh {interpreter} {install}\n" in script
    [(key, entry)] = json.loads(files["steps/python.json"]).items()
    assert key == "cpython-3.11.9-linux-x86_64-gnu"
    assert (entry["url"], entry["sha256"]) == (f"file:///mnt/steps/{quote(archive.file)}", archive.sha256)
    record = system.store.get_record(f"{system.image.os_inputs}.{PACKAGES}")
    assert record
    assert f"sha256:{archive.sha256}" in record[PACKAGES], "the store keeps it"


def test_the_packages_are_recorded_so_that_the_store_keeps_them(system: OneSystem) -> None:
    system.make()
    record = system.store.get_record(f"{system.image.os_inputs}.{PACKAGES}")
    assert record
    packages = system.image.os_lock.packages
    assert record[PACKAGES] == [f"sha256:{package.sha256}" for package in packages]
    assert all(system.store.path(blob).exists() for blob in record[PACKAGES])
    [debs] = system.fake.debs
    assert debs == (system.image.os_lock, {each.sha256: system.store.path(each.sha256) for each in packages})


def test_without_a_package_that_no_archive_has_nothing_is_made(
    system: OneSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    Wire.install(monkeypatch, lambda _: Reply(status=404))
    sources = (
        AptSource(kind="main", uri="http://a.example.test"),
        AptSource(kind="security", uri="http://s.example.test"),
    )
    system.run = replace(system.run, host=Host(archives=Apt(sources=sources)))
    monkeypatch.setattr(operating_systems, "Fetcher", Fetcher)
    with pytest.raises(FetchError):
        system.make()
    assert system.runs == []
    assert system.recorded is None


@pytest.mark.parametrize("field", ["digest", "diff_id", "toc"])
def test_a_layer_with_other_bytes_than_the_known_one_is_not_stored(system: OneSystem, field: str) -> None:
    change: dict[str, Any] = {field: digest_of_bytes(b"other")}
    system.known.add(system.image.os_layer, replace(system.make(), **change))
    for blob in (system.store.root / "blobs/sha256").iterdir():
        blob.unlink()
    with pytest.raises(BuildError):
        system.make()
    names = {path.name for path in (system.store.root / "blobs/sha256").iterdir()}
    assert names == {package.sha256 for package in system.image.os_lock.packages}
    assert system.recorded is None


def test_its_time_does_not_depend_on_the_time_zone(system: OneSystem, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TZ", "Asia/Tokyo")
            time.tzset()
            assert system.make().created == "2026-01-01T00:00:00Z"
    finally:
        time.tzset()
