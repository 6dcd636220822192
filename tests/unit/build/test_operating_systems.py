"""Operating systems: made with mmdebstrap from the files of the checkout, recorded, and nothing left behind."""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from builder.build import operating_systems
from builder.build.layer_lookup import LayerLookup
from builder.build.operating_systems import SystemLayers
from builder.build.work import RunContext
from builder.common.console import View
from builder.common.errors import BuildError, DiskError
from builder.common.files import digest_of_bytes
from builder.index.host import Host
from builder.layers import estargz, os_layer
from builder.layers.known_layers import KnownLayers
from builder.layers.os_layer import OsLayer
from builder.layers.store import Store
from builder.matrix.project import Project
from builder.plan import plan
from builder.plan.plan import PlannedImage
from tests.fakes.engine import FakeEngine, MemoryConsole
from tests.fakes.locks import TIME
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
        self.work = RunContext(engine=self.engine, project=project, host=Host(), view=View(self.console))
        [self.image] = plan.make_locked_plan(project, project.select([CELL])).images
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
        return os_layer.stored_system(self.store, self.image.os_inputs, None)


@pytest.fixture
def system(tiny: Project, tmp_path: Path) -> OneSystem:
    return OneSystem(tiny, tmp_path / "store")


def test_a_layer_is_made_and_recorded(system: OneSystem) -> None:
    layer = system.make()
    blob = system.store.path(layer.digest).read_bytes()
    assert layer == OsLayer(
        digest=digest_of_bytes(blob),
        diff_id=layer.diff_id,
        size=len(blob),
        unpacked=layer.unpacked,
        toc=layer.toc,
        created="2026-01-01T00:00:00Z",
        taken=("opt/venv/bin/python",),
        folders=(),
    )
    estargz.check_layer(io.BytesIO(blob), layer.toc)
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
    assert files["packages.json"] == (root / system.image.os_request.path).read_bytes()
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


@pytest.mark.parametrize(("field", "title"), [("digest", "digest"), ("diff_id", "diff id"), ("toc", "digest of files")])
def test_a_layer_with_other_bytes_than_the_known_one_is_not_stored(system: OneSystem, field: str, title: str) -> None:
    change: dict[str, Any] = {field: digest_of_bytes(b"other")}
    system.known.add_system(system.image.os_inputs, replace(system.make(), **change))
    for blob in (system.store.root / "blobs/sha256").iterdir():
        blob.unlink()
    with pytest.raises(BuildError, match=f"^layer {operating_systems.row(system.image)} has the {title} sha256"):
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


Edit = Callable[[str, str], Project]
SNAPSHOT = "http://snapshot.example.test/archive"
OF_APT = BuildError("os: mmdebstrap failed\n  | E: Package 'tini' has no installation candidate", hint="Full log: x")
OF_CHECK = BuildError("os: failed at os.sh\n  | The installed packages (>) are not the locked ones (<):\n  | < tini")
OF_CHECK_CUT = BuildError(
    "\n".join(["os: failed at os.sh", *[f"  | > p{number} 1.0 all {'0' * 64}" for number in range(15)]])
)
OF_A_HOOK = BuildError("os: mmdebstrap failed\n  | E: command failed: /x/run-commands\n  | E: mmdebstrap failed to run")
OF_PIP = BuildError("image: failed at wheels.sh\n  | error: Hash mismatch for tini")


def build(project: Project, *results: BuildError | str) -> tuple[str, list[Host], str]:
    """The result of a build whose attempts end like this; the settings of each attempt; what was said."""
    console = MemoryConsole()
    work = RunContext(engine=FakeEngine(), project=project, host=Host(), view=View(console))
    image: PlannedImage = plan.make_locked_plan(project, project.select([CELL])).images[0]
    attempts: list[Host] = []

    def attempt(host: Host) -> str:
        result = results[len(attempts)]
        attempts.append(host)
        if isinstance(result, BuildError):
            raise result
        return result

    return operating_systems.with_snapshot_fallback(work, image, attempt), attempts, console.text


@pytest.fixture
def with_snapshot(edit: Edit) -> Project:
    return edit('    glibc: "2.36"\n', f'    glibc: "2.36"\n    snapshot: {SNAPSHOT}\n')


@pytest.mark.parametrize("error", [OF_APT, OF_CHECK, OF_CHECK_CUT])
def test_an_error_of_packages_says_how_to_lock_the_current_ones(tiny: Project, error: BuildError) -> None:
    with pytest.raises(BuildError) as caught:
        build(tiny, error)
    assert str(caught.value) == str(error)
    assert f"lock the current versions: builder refresh {CELL}" in caught.value.hint
    assert caught.value.hint.endswith(error.hint)


@pytest.mark.parametrize("error", [OF_PIP, OF_A_HOOK])
def test_other_errors_stay_as_they_are(tiny: Project, error: BuildError) -> None:
    with pytest.raises(BuildError) as caught:
        build(tiny, error)
    assert caught.value is error


def test_a_snapshot_archive_is_used_after_a_failure(with_snapshot: Project) -> None:
    result, attempts, said = build(with_snapshot, OF_APT, "done")
    assert result == "done"
    first, second = attempts
    assert first.sources_list("newbird") == ""
    lines = second.sources_list("newbird").splitlines()
    assert [line.split("] ")[1] for line in lines] == [
        f"{SNAPSHOT}/debian/{TIME} newbird main",
        f"{SNAPSHOT}/debian/{TIME} newbird-updates main",
        f"{SNAPSHOT}/debian-security/{TIME} newbird-security main",
    ]
    assert all("check-valid-until=no" in line for line in lines)
    assert said == f"{CELL}: apt failed; trying again with the snapshot archive of newbird\n"


def test_the_second_failure_is_the_last(with_snapshot: Project) -> None:
    with pytest.raises(BuildError, match="no installation candidate"):
        build(with_snapshot, OF_APT, OF_APT)


def test_without_a_failure_of_packages_there_is_one_attempt(with_snapshot: Project) -> None:
    assert len(build(with_snapshot, "done")[1]) == 1
    with pytest.raises(BuildError) as caught:
        build(with_snapshot, OF_PIP)
    assert caught.value is OF_PIP
