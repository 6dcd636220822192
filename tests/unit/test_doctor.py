"""What `builder doctor` finds, on machines that are not there."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from builder import doctor
from builder.doctor import Finding
from builder.engine import Engine
from builder.errors import EngineError
from builder.gpu import Gpu
from builder.host import Host
from builder.index import IndexSettings
from builder.project import Project
from builder.store import Store
from tests.unit.fakes import INFO, FakeEngine, Programs

MIRROR = "https://me:pw@mirror.example.test/simple"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a machine has; tests change it before they call `examine`."""
    has: dict[str, Any] = {
        "engine": FakeEngine(), "gpus": ("", ()), "which": {"docker", "mmdebstrap"}, "index": 0,
        "settings": IndexSettings(url=MIRROR, ca_bundle="/ca.pem"), "registry": {}, "free": 10**12,
    }  # fmt: skip

    def connect() -> FakeEngine:
        if has["engine"] is None:
            raise EngineError("no Docker Engine answers at x", hint="`builder engine` starts one.")
        engine: FakeEngine = has["engine"]
        return engine

    def get(url: str, **_: object) -> requests.Response:
        answer = requests.Response()
        if url not in has["registry"]:
            raise requests.ConnectionError
        answer.status_code = has["registry"][url]
        return answer

    usage = shutil.disk_usage(".")
    programs = Programs(
        lambda command: (0, "uv 0.13.8 (x)\n", "") if "--version" in command else (has["index"], "", "")
    )
    monkeypatch.setattr(Engine, "connect", connect)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if name in has["which"] else None)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=has["free"]))
    monkeypatch.setattr("builder.gpu.read", lambda: has["gpus"])
    monkeypatch.setattr("builder.host.read", lambda: Host(index=has["settings"]))
    monkeypatch.setattr("subprocess.run", programs)
    monkeypatch.setattr("requests.get", get)
    return has


def examine(project: Project) -> dict[str, Finding]:
    found = doctor.examine(project, Store(project.root / "store"), lambda _: None)
    assert len({finding.name for finding in found}) == len(found)
    assert all(finding.detail for finding in found)
    assert "mirror.example.test" not in str(found)
    return {finding.name: finding for finding in found}


def test_a_good_machine(tiny: Project, machine: dict[str, Any]) -> None:
    machine["registry"] = {"https://registry.example.test:5000/v2/": 401}
    found = examine(tiny)
    states = {name: finding.state for name, finding in found.items()}
    assert states.pop("gpu") == "note"
    assert set(states.values()) == {"ok"}
    assert found["index"].detail == "the configured mirror answers, with a CA bundle of this machine"
    assert found["registry"].detail == "registry.example.test:5000 answers (https)"


CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "no engine": ({"engine": None}, "engine", "missing", "no Docker Engine answers at x. `builder engine` starts one."),
    "old engine": ({"engine": FakeEngine(info=replace(INFO, version="20.10.24"))}, "engine", "missing", "23 or newer"),
    "no BuildKit": ({"engine": FakeEngine(info=replace(INFO, buildkit=False))}, "buildkit", "missing", "has none"),
    "arm64": ({"engine": FakeEngine(info=replace(INFO, architecture="aarch64"))}, "machine", "missing", "aarch64"),
    "no client": ({"which": set()}, "docker", "missing", "apt-get install docker.io"),
    "no mmdebstrap": ({"which": {"docker"}}, "mmdebstrap", "note", "absent"),
    "no index": ({"index": 2}, "index", "missing", "the configured mirror does not answer"),
    "no registry": ({}, "registry", "note", "registry.example.test:5000 does not answer"),
    "plain registry": (
        {"registry": {"http://registry.example.test:5000/v2/": 200}}, "registry", "ok", "answers (http)",
    ),
    "GPU": ({"gpus": ("570.1", (Gpu(name="H200", memory=140 * 10**9),))}, "gpu", "ok", "H200 (140.0 GB), driver 570.1"),
    "GPU, no runtime": (
        {"gpus": ("570.1", (Gpu(name="H200", memory=1),))}, "nvidia runtime", "note", "nvidia-container-toolkit",
    ),
    "GPU and runtime": (
        {"gpus": ("1", (Gpu(name="H", memory=1),)), "engine": FakeEngine(info=replace(INFO, runtimes=("nvidia",)))},
        "nvidia runtime", "ok", "in the engine",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "name", "state", "says"), CASES.values(), ids=CASES.keys())
def test_a_finding(
    tiny: Project, machine: dict[str, Any], changes: dict[str, Any], name: str, state: str, says: str
) -> None:
    machine.update(changes)
    found = examine(tiny)[name]
    assert found.state == state
    assert says in found.detail


@pytest.mark.parametrize(("free", "state"), [(10**12, "ok"), (10**9, "missing")])
def test_the_disk_of_a_local_engine(
    tiny: Project, machine: dict[str, Any], tmp_path: Path, free: int, state: str
) -> None:
    machine["engine"] = FakeEngine(info=replace(INFO, is_local=True, root=str(tmp_path)))
    machine["free"] = free
    found = examine(tiny)
    assert found["disk: engine"].state == state
    assert "the default images take about" in found["disk: engine"].detail
    assert found["disk: checkout"].state == "ok"


def test_an_engine_that_goes_away_meanwhile(
    tiny: Project, machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def info() -> None:
        raise EngineError("asking Docker Engine about itself: went away")

    monkeypatch.setattr(machine["engine"], "info", info)
    found = examine(tiny)
    assert found["engine"].state == "missing"
    assert "went away" in found["engine"].detail


@pytest.mark.parametrize(("reached", "state"), [(True, "ok"), (False, "note")])
def test_without_a_registry_of_our_own(tiny: Project, machine: dict[str, Any], reached: bool, state: str) -> None:
    path = tiny.root / "matrix.yaml"
    path.write_text(path.read_text().replace("registry: registry.example.test:5000", 'registry: ""'))
    machine["engine"] = FakeEngine(registry=reached)
    assert examine(Project(tiny.root))["registry"].state == state
