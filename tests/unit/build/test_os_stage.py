"""The `os` layer of an image: built as a stage, flattened, recorded, and nothing left in the engine."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from builder.build import bootstrap, os_stage
from builder.build.work import Work
from builder.common import digest
from builder.common.console import View
from builder.common.errors import BuildError, DiskError, LockError, UsageError
from builder.index.host import Host
from builder.index.settings import IndexSettings
from builder.layers import oci, os_layer
from builder.layers.known_layers import KnownLayers
from builder.layers.os_layer import OsLayer
from builder.layers.store import Store
from builder.lock import apt
from builder.matrix.project import Project
from builder.plan import plan, render
from builder.plan.plan import PlannedImage
from tests.fakes.engine import FakeEngine, MemoryConsole
from tests.fakes.programs import FakePrograms
from tests.unit.build.test_context import members

CELL = "qz-0.5-cu129-py311"
IMAGE = f"example/base:new@sha256:{'2' * 64}"
HOST = Host(index=IndexSettings(url="http://mirror.example.test/simple"), ca=b"pem")
DAY = 1_700_000_000  # 2023-11-14T22:13:20Z


def tar(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), DAY
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


FILES = {
    "usr/bin/python3.11": b"program",
    "var/lib/dpkg/info/python3.11-minimal.list": b"/usr/bin/python3.11\n",
    "opt/venv/bin/python": b"link",
}
SAVED = tar({"manifest.json": json.dumps([{"Layers": ["layer.tar"]}]).encode(), "layer.tar": tar(FILES)})


class Bench:
    def __init__(self, project: Project, root: Path) -> None:
        self.engine = FakeEngine()
        self.engine.saved = SAVED
        self.store = Store(root)
        self.store.prepare()
        self.console = MemoryConsole()
        self.work = Work(engine=self.engine, project=project, host=HOST, view=View(self.console))
        planned = plan.make_locked(project, project.select([CELL]))
        render.write(project.root, render.render(project.root, project.matrix, planned))
        self.image: PlannedImage = planned.images[0]

        self.known = KnownLayers(project.root)
        self.programs = FakePrograms(result=tar(FILES))
        self.engine.add_image(project.matrix.debian[self.image.debian].image)

    def make(self, *, way: os_stage.Way = "buildkit") -> OsLayer:
        [stage] = os_stage.read(self.work, [self.image], way)
        return os_stage.make(self.work, self.store, stage, self.programs, self.known)

    @property
    def recorded(self) -> OsLayer | None:
        return os_layer.get(self.store, self.image.os)


@pytest.fixture
def bench(tiny: Project, tmp_path: Path) -> Bench:
    return Bench(tiny, tmp_path / "store")


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> None:
    """mmdebstrap can run; the archives cannot be asked for packages."""

    def archive(*_: object) -> None:
        raise LockError("apt-get is not installed")

    monkeypatch.setattr(apt, "archive", archive)
    monkeypatch.setattr(bootstrap, "reason_not", lambda: "")
    monkeypatch.setattr(bootstrap, "install", lambda _: "")


def test_a_layer_is_made_and_recorded(bench: Bench) -> None:
    layer = bench.make()
    blob = bench.store.path(layer.digest).read_bytes()
    assert layer == OsLayer(
        digest=digest.of_bytes(blob),
        diff_id=layer.diff_id,
        size=len(blob),
        unpacked=layer.unpacked,
        created="2023-11-14T22:13:20Z",
        base=IMAGE,
        taken=("opt/venv/bin/python",),
        folders=(),
    )
    with tarfile.open(fileobj=io.BytesIO(blob)) as archive:
        assert sorted(archive.getnames()) == sorted(FILES)
    assert bench.recorded == layer
    assert os_layer.get(bench.store, "sha256:other") is None


def test_only_the_stage_is_built_and_nothing_is_left(bench: Bench) -> None:
    bench.make()
    assert bench.engine.builds == ["os"]
    kinds = [call.split()[0] for call in bench.engine.calls]
    assert kinds == ["build", "save", "remove"]
    assert bench.engine.calls[1].split()[1] == bench.engine.calls[2].split()[1]
    assert list((bench.work.project.state / "tmp").iterdir()) == []


def test_the_stage_gets_no_index(bench: Bench) -> None:
    """It installs Debian's packages; an index may need a password that no build step must see."""
    bench.make()
    names = [name for name in members(bench.engine.contexts[CELL]) if name.startswith("templates/host/")]
    assert sorted(names) == ["templates/host/apt.conf", "templates/host/ca.crt", "templates/host/env.sh"]


def test_mmdebstrap_makes_the_same_layer_without_the_engine(bench: Bench, available: None) -> None:
    layer = bench.make(way="auto")
    assert bench.engine.calls == []
    assert layer == replace(bench.make(), base="debian:newbird (made by mmdebstrap)")
    [program] = bench.programs.calls
    assert program.command[-2] == "newbird"
    assert list((bench.work.project.state / "tmp").iterdir()) == []


def test_mmdebstrap_runs_the_commands_of_the_stage(bench: Bench, available: None) -> None:
    """With what they mount, in an environment that has nothing of this machine."""
    bench.make(way="mmdebstrap")
    [hook] = [text for path, text in bench.programs.scripts[0].items() if path.endswith("/run-commands")]
    lines = hook.splitlines()
    [command] = [line for line in lines if line.startswith("chroot ")]
    assert command.startswith('chroot "$1" env -i PATH=')
    assert "sh /mnt/steps/os.sh python3.11" in command
    copies = [line.split()[-1] for line in lines if line.startswith("cp ")]
    assert copies == ['"$1"/mnt/host', '"$1"/mnt/steps', '"$1"/mnt/packages.json']
    assert lines[-1] == f"rm -rf {' '.join(copies)}"


def test_links_of_a_component_into_the_image_are_no_obstacle(bench: Bench, available: None) -> None:
    component = next(name for name in bench.image.components if name in bench.image.file_components)
    folder = bench.work.project.root / f"templates/{component}/files/usr/lib"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "libcublas.so").symlink_to("/opt/nvidia/libcublas.so")
    assert bench.make(way="mmdebstrap").base == "debian:newbird (made by mmdebstrap)"


def test_what_mmdebstrap_cannot_make_is_refused_or_left_to_buildkit(
    bench: Bench, available: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = bench.work.project.root / bench.image.dockerfile
    path.write_text(path.read_text().replace("FROM ${BASE} AS os\n", "FROM ${BASE} AS os\nCOPY a /a\n"))
    with pytest.raises(UsageError, match="the stage has instructions other than RUN"):
        bench.make(way="mmdebstrap")
    bench.make(way="auto")
    assert bench.engine.builds == ["os"]
    monkeypatch.setattr(bootstrap, "reason_not", lambda: "only root can run it")
    with pytest.raises(UsageError, match="only root can run it"):
        bench.make(way="mmdebstrap")


def test_a_package_that_mmdebstrap_does_not_find_is_named(bench: Bench, available: None) -> None:
    bench.programs.status = 25
    bench.programs.output = ["E: Unable to locate package no-such-package"]
    with pytest.raises(BuildError, match=r"^os-newbird-py3\.11[\s\S]*\| E: Unable to locate package no-such") as caught:
        bench.make(way="auto")
    log = f".builder/logs/{os_stage.row(bench.image)}.log"
    assert caught.value.hint == f"Full log: {log}   Without mmdebstrap: --os-layer buildkit"
    assert bench.recorded is None


def test_a_stage_that_fails_leaves_no_record(bench: Bench) -> None:
    bench.engine.broken[CELL] = {"error": "process apt-get did not complete: exit code: 100"}
    with pytest.raises(BuildError, match=r"^os-newbird-py3\.11"):
        bench.make()
    assert bench.recorded is None
    assert [path.name for path in bench.work.project.logs.iterdir()] == [f"{os_stage.row(bench.image)}.log"]


def test_the_stage_is_removed_from_the_engine_if_the_store_is_full(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise DiskError("full")

    monkeypatch.setattr(bench.store, "write", full)
    with pytest.raises(DiskError):
        bench.make()
    assert bench.engine.calls[-1].startswith("remove ")
    assert bench.recorded is None


def test_a_layer_with_other_bytes_than_the_known_one_is_not_stored(bench: Bench) -> None:
    bench.known.add_system(bench.image.os, replace(bench.make(), diff_id=digest.of_bytes(b"other")))
    for blob in (bench.store.root / "blobs/sha256").iterdir():
        blob.unlink()
    with pytest.raises(BuildError, match=r"^layer os has the diff id"):
        bench.make()
    assert list((bench.store.root / "blobs/sha256").iterdir()) == []
    assert bench.recorded is None


def test_the_same_stage_gives_the_same_layer(bench: Bench, tiny: Project, tmp_path: Path) -> None:
    assert bench.make() == Bench(tiny, tmp_path / "other").make()


INVALID: dict[str, dict[str, object]] = {
    "null": {"created": None}, "text for a list": {"taken": "x"}, "text for a number": {"size": "7"},
    "unknown field": {"more": 1}, "missing field": {"folders": ...},
}  # fmt: skip


@pytest.mark.parametrize("change", INVALID.values(), ids=INVALID.keys())
def test_an_invalid_record_is_ignored(bench: Bench, change: dict[str, object]) -> None:
    """An older builder may have written it."""
    data = {**asdict(bench.make()), **change}
    [path] = (bench.store.root / "layers").iterdir()
    path.write_text(json.dumps({field: value for field, value in data.items() if value is not ...}))
    assert bench.recorded is None


def test_a_record_without_its_blob_is_ignored(bench: Bench) -> None:
    bench.store.path(bench.make().digest).unlink()
    assert bench.recorded is None


def test_the_layer_of_an_image(bench: Bench) -> None:
    [planned] = [layer for layer in bench.image.layers if layer.kind == "os"]
    system = bench.make()
    assert system.built(planned) == oci.Layer(
        created_by=oci.describe(planned),
        digest=system.digest,
        diff_id=system.diff_id,
        size=system.size,
        unpacked=system.unpacked,
    )


def test_its_time_does_not_depend_on_the_time_zone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TZ", "Asia/Tokyo")
            time.tzset()
            assert bench.make().created == "2023-11-14T22:13:20Z"
    finally:
        time.tzset()


def test_what_mmdebstrap_does_is_shown_in_words_for_people(bench: Bench, available: None) -> None:
    bench.programs.output = [
        "I: automatically chosen mode: root",
        "I: running apt-get update...",
        "I: running --extract-hook directly: /x/steps/slim.sh /x/root",
        "I: running --customize-hook directly: /x/run-commands /x/root",
        "Get:1 http://mirror.example.test/debian newbird InRelease",
        "I: creating tarball...",
    ]
    bench.make(way="auto")
    row = os_stage.row(bench.image)
    notes = [line.removeprefix(f"{row}: ") for line in bench.console.text.splitlines()]
    assert notes == [
        "building",
        "downloading the lists of packages",
        "installing the image's packages",
        "packing",
        "compressing",
    ]
