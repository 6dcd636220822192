"""The `os` layer of an image: built as a stage, made one layer of, remembered, and nothing left in the engine."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from builder import digest, osstage, plan, render
from builder.base import Base
from builder.errors import BuildError, DiskError
from builder.host import Host
from builder.index import IndexSettings
from builder.osstage import OsLayer
from builder.plan import PlannedImage
from builder.project import Project
from builder.store import LAYER_TYPE, Store
from builder.view import View
from builder.work import Work
from tests.unit.fakes import FakeEngine, MemoryConsole
from tests.unit.test_context import members

CELL = "qz-0.5-cu129-py311"
BASE = Base(reference="local/base:1", name="example (made here)")
HOST = Host(index=IndexSettings(url="http://mirror.example.test/simple"), ca=b"pem")
STATUS = b"".join(
    f"Package: {name}\nStatus: install ok installed\nVersion: {version}\n\n".encode()
    for name, version in (("python3.11-minimal", "3.11.2-6+deb12u6"), ("zlib1g", "1:1.2.13.dfsg-1"))
)
DAY = 1_700_000_000  # 2023-11-14T22:13:20Z


def tar(files: Mapping[str, bytes]) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(content), DAY
            archive.addfile(info, io.BytesIO(content))
    return made.getvalue()


FILES = {
    "usr/bin/python3.11": b"program",
    "var/lib/dpkg/status": STATUS,
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
        self.work = Work(engine=self.engine, project=project, host=HOST, view=View(MemoryConsole()))
        made = plan.make_locked(project, project.select([CELL]))
        render.write(project.root, render.render(project.root, project.matrix, made))
        self.image: PlannedImage = made.images[0]

    def make(self, *, fresh: bool = False) -> OsLayer:
        tar = osstage.context_of(self.work, self.image)
        return osstage.make(self.work, self.store, self.image, tar, BASE, fresh=fresh)


@pytest.fixture
def bench(tiny: Project, tmp_path: Path) -> Bench:
    return Bench(tiny, tmp_path / "store")


def test_made_and_recalled(bench: Bench) -> None:
    made = bench.make()
    blob = bench.store.path(made.digest).read_bytes()
    assert made == OsLayer(
        digest=digest.of_bytes(blob),
        diff_id=made.diff_id,
        size=len(blob),
        created="2023-11-14T22:13:20Z",
        base="example (made here)",
        python="3.11.2-6+deb12u6 1:1.2.13.dfsg-1",
        taken=("opt/venv/bin/python",),
        folders=(),
    )
    with tarfile.open(fileobj=io.BytesIO(blob)) as archive:
        assert sorted(archive.getnames()) == sorted(FILES)
    assert osstage.recall(bench.store, bench.image.os) == made
    assert osstage.recall(bench.store, "sha256:other") is None


def test_a_python_of_uv_is_told_as_such(bench: Bench) -> None:
    """Bytecode is made anew for another one, as for another of Debian's."""
    bench.image = replace(bench.image, uv="3.11.15")
    assert bench.make().python.endswith(" uv:3.11.15")


@pytest.mark.parametrize("fresh", [False, True])
def test_only_the_stage_is_built_and_nothing_stays(bench: Bench, fresh: bool) -> None:
    bench.make(fresh=fresh)
    assert bench.engine.builds == [("os", fresh)]
    kinds = [call.split()[0] for call in bench.engine.calls]
    assert kinds == ["build", "save", "remove"]
    assert bench.engine.calls[1].split()[1] == bench.engine.calls[2].split()[1]
    scratch = bench.work.project.state / "tmp"
    assert list(scratch.iterdir()) == []


def test_the_stage_is_told_of_no_index(bench: Bench) -> None:
    """It installs Debian's packages; an index may need a password that no build step must see."""
    bench.make()
    lent = [name for name in members(bench.engine.contexts[CELL]) if name.startswith("templates/host/")]
    assert sorted(lent) == ["templates/host/apt.conf", "templates/host/ca.crt", "templates/host/env.sh"]


def test_a_stage_that_fails_leaves_nothing_to_recall(bench: Bench) -> None:
    bench.engine.broken[CELL] = {"error": "process apt-get did not complete: exit code: 100"}
    with pytest.raises(BuildError, match=r"^os-newbird-py3\.11"):
        bench.make()
    assert osstage.recall(bench.store, bench.image.os) is None
    assert [path.name for path in bench.work.project.logs.iterdir()] == [f"{osstage.row(bench.image)}.log"]


def test_the_stage_is_removed_from_the_engine_if_it_cannot_be_kept(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: object) -> None:
        raise DiskError("full")

    monkeypatch.setattr(bench.store, "write", full)
    with pytest.raises(DiskError):
        bench.make()
    assert bench.engine.calls[-1].startswith("remove ")
    assert osstage.recall(bench.store, bench.image.os) is None


def test_the_same_stage_gives_the_same_layer(bench: Bench, tiny: Project, tmp_path: Path) -> None:
    assert bench.make() == Bench(tiny, tmp_path / "other").make()


def record(bench: Bench) -> Path:
    [path] = (bench.store.root / "layers").iterdir()
    return path


@pytest.mark.parametrize("change", [{"created": None}, {"taken": "x"}, {"size": "7"}, {"more": 1}], ids=str)
def test_a_record_of_another_form_is_none(bench: Bench, change: dict[str, object]) -> None:
    """As an older builder may have written it."""
    made = bench.make()
    record(bench).write_text(json.dumps({**asdict(made), **change}))
    assert osstage.recall(bench.store, bench.image.os) is None


def test_a_record_that_lacks_something_is_none(bench: Bench) -> None:
    data = asdict(bench.make())
    del data["folders"]
    record(bench).write_text(json.dumps(data))
    assert osstage.recall(bench.store, bench.image.os) is None


def test_a_record_without_its_blob_is_none(bench: Bench) -> None:
    bench.store.path(bench.make().digest).unlink()
    assert osstage.recall(bench.store, bench.image.os) is None


def test_a_layer_of_the_store_as_planned(bench: Bench) -> None:
    blob = bench.store.put(b"x", LAYER_TYPE)
    [planned] = [layer for layer in bench.image.layers if layer.kind == "os"]
    layer = OsLayer(
        digest=blob.digest, diff_id="d", size=1, created="", base="", python="", taken=(), folders=()
    ).built(planned)
    assert (layer.planned, layer.digest, layer.diff_id, layer.size, layer.key) == (planned, blob.digest, "d", 1, "")


def test_its_time_is_the_same_in_every_zone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with monkeypatch.context() as patch:
            patch.setenv("TZ", "Asia/Tokyo")
            time.tzset()
            assert bench.make().created == "2023-11-14T22:13:20Z"
    finally:
        time.tzset()
