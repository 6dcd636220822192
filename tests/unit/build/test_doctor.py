"""The findings of `builder doctor`, on fake machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import requests

from builder.build import doctor, operating_systems
from builder.build.doctor import State
from builder.common.errors import EngineError
from builder.compat.gpus import Gpu
from builder.engine.client import Engine
from builder.index.host import Host, host_for_project
from builder.index.session import IndexSession
from builder.index.settings import IndexSettings
from builder.matrix.project import Project
from builder.matrix.tags import CELL_LABEL
from tests.fakes.engine import INFO, FakeEngine
from tests.fakes.run import new_run
from tests.fakes.wire import Reply, Sent, Wire, untrusted

HTTPS = "https://registry.example.test:5000"
Edit = Callable[[str, str], Project]
MIRROR = "https://me:pw@mirror.example.test/simple"


def engine(*cells: str, broken: str = "", **changes: Any) -> FakeEngine:
    """An engine with images of these cells, or of one cell for amd64."""
    fake = FakeEngine(info=replace(INFO, **changes))
    fake.broken = broken
    for cell in cells or ("em-1.9-cpu-py311",):
        fake.add_image(cell, labels={CELL_LABEL: cell})
    return fake


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The properties of a machine; tests change them before they call `examine`."""
    has: dict[str, Any] = {
        "engine": engine(is_local=True), "gpus": ("", ()), "reason": "", "which": {"docker", "mmdebstrap", "cosign"},
        "index": ["pip.whl"],
        "settings": IndexSettings(url=MIRROR, ca_bundle="/ca.pem"), "registry": {},
    }  # fmt: skip

    def connect() -> FakeEngine:
        if has["engine"] is None:
            raise EngineError("no Docker Engine answers at x", hint="`builder engine` starts one.")
        connected: FakeEngine = has["engine"]
        return connected

    def answers(sent: Sent) -> Reply | Exception:
        status = has["registry"].get(sent.url.partition("/v2/")[0])
        return Reply(status=status) if status else requests.ConnectionError()

    def files(*_: object) -> list[str]:
        if isinstance(has["index"], Exception):
            raise has["index"]
        return list(has["index"])

    monkeypatch.setattr(Engine, "connect", connect)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if name in has["which"] else None)
    monkeypatch.setattr(operating_systems, "obstacle_here", lambda: has["reason"])
    monkeypatch.setattr("builder.compat.gpus.read_gpus", lambda: has["gpus"])
    monkeypatch.setattr("builder.index.host.read_host", lambda: Host(index=has["settings"]))
    monkeypatch.setattr(IndexSession, "files", files)
    monkeypatch.setenv("DOCKER_CONFIG", "/nonexistent")
    Wire.install(monkeypatch, answers)
    return has


def examine(project: Project) -> dict[str, tuple[State, str]]:
    """State and detail of each finding, by name."""
    run = replace(new_run(project), connect=Engine.connect, host=host_for_project(project))
    findings = list(doctor.examine(run))
    by_name = {name: (state, detail) for name, state, detail in findings}
    assert len(by_name) == len(findings)
    assert all(detail for _, _, detail in findings)
    assert "mirror.example.test" not in str(findings)
    return by_name


def test_a_good_machine(tiny: Project, machine: dict[str, Any]) -> None:
    machine["registry"] = {HTTPS: 404}
    findings = examine(tiny)
    states = {name: state for name, (state, _) in findings.items()}
    assert states.pop("gpu") == "note"
    assert set(states.values()) == {"ok"}
    assert findings["index"][1] == "the configured mirror answers, with a CA bundle of this machine"
    assert findings["registry"][1] == "registry.example.test:5000 answers"


CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "no engine": ({"engine": None}, "engine", "missing", "no Docker Engine answers at x. `builder engine` starts one."),
    "old engine": ({"engine": engine(version="20.10.24")}, "engine", "missing", "23 or newer"),
    "old podman": ({"engine": engine(name="Podman", version="4.2.0")}, "engine", "missing", "4.3 or newer"),
    "rootless Podman": (
        {"engine": engine(name="Podman", version="4.3.1", is_rootless=True, store="containerd")},
        "engine", "ok", "Podman 4.3.1, rootless, containerd, ",
    ),
    "containers": ({}, "containers", "ok", "started a container of em-1.9-cpu-py311"),
    "no containers": (
        {"engine": engine(broken="OCI runtime create failed")},
        "containers", "missing", "starting sha256:",
    ),
    "only an image for arm64": (
        {"engine": engine("em-1.9-cpu-py311-arm64")}, "containers", "note", "not tried: the engine has no image",
    ),
    "another": ({"engine": engine(architecture="riscv64")}, "machine", "missing", "riscv64"),
    "no client": ({"which": set()}, "docker", "missing", "apt-get install docker.io"),
    "no mmdebstrap": ({"reason": "it is not installed"}, "mmdebstrap", "note", "in a container"),
    "no index": (
        {"index": requests.ReadTimeout()},
        "index", "missing", "the configured mirror does not answer: the index timed out",
    ),
    "an unknown authority": (
        {"index": untrusted()},
        "index", "missing", "the configured mirror does not answer: the certificate of the index is not trusted "
        "(unable to get local issuer certificate). Set SSL_CERT_FILE, or pip's `cert`, to a PEM file with the "
        "certificate of its authority. The current file, /ca.pem, does not contain it.",
    ),
    "not an index": ({"index": []}, "index", "missing", "the configured mirror does not have pip: check its address"),
    "no registry": ({}, "registry", "note", "the connection was lost: tried once"),
    "login required": ({"registry": {HTTPS: 401}}, "registry", "note", "Run `docker login registry.example.test:5000`"),
    "no cosign": ({"which": {"docker"}}, "cosign", "note", "not installed: signatures cannot be made or checked"),
    "GPU": ({"gpus": ("570.1", (Gpu(name="H200", memory=140 * 10**9),))}, "gpu", "ok", "H200 (140.0 GB), driver 570.1"),
    "GPU, not for containers": (
        {"gpus": ("570.1", (Gpu(name="H200", memory=1),))}, "gpu in containers", "note", "nvidia-container-toolkit",
    ),
    "GPU for containers": (
        {"gpus": ("1", (Gpu(name="H", memory=1),)), "engine": engine(gpu_option="--gpus")},
        "gpu in containers", "ok", "docker run --gpus all",
    ),
    "GPU of an engine on another machine": (
        {"engine": engine(gpu_option="--device")},
        "gpu in containers", "ok", "docker run --device nvidia.com/gpu=all",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "name", "state", "detail"), CASES.values(), ids=CASES.keys())
def test_a_finding(
    tiny: Project, machine: dict[str, Any], changes: dict[str, Any], name: str, state: str, detail: str
) -> None:
    machine.update(changes)
    found_state, found_detail = examine(tiny)[name]
    assert found_state == state
    assert detail in found_detail


def test_an_engine_that_stops(tiny: Project, machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def info() -> None:
        raise EngineError("asking Docker Engine about itself: went away")

    monkeypatch.setattr(machine["engine"], "info", info)
    state, detail = examine(tiny)["engine"]
    assert state == "missing"
    assert detail.endswith("went away")


def test_without_a_registry_in_the_matrix(machine: dict[str, Any], edit: Edit) -> None:
    assert "registry" not in examine(edit("registry: registry.example.test:5000", 'registry: ""'))


def test_named_indexes_are_checked_with_their_logins(
    tiny: Project, machine: dict[str, Any], edit: Callable[[str, str], Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    edit("debian:\n", "indexes: {company: https://python.example.test/simple}\ndebian:\n")
    project = edit("    packages: [notebook]\n", "    packages: [notebook]\n    index: company\n")
    (tiny.root / "netrc").write_text("machine python.example.test login me passwort s3cret\n")
    monkeypatch.setenv("NETRC", str(tiny.root / "netrc"))
    state, detail = examine(project)["index company"]
    assert state == "missing"
    assert detail.startswith(f"{tiny.root}/netrc: line 1 is invalid. ")
    monkeypatch.setenv("UV_INDEX_COMPANY_PASSWORD", "s3cret")
    assert examine(project)["index company"] == ("ok", "has notebook")
    machine["index"] = []
    absent = "has no notebook: publish it there, or correct its index in matrix.yaml"
    assert examine(project)["index company"][1] == absent
    machine["index"] = requests.ReadTimeout()
    assert "notebook: the index company timed out" in examine(project)["index company"][1]


@pytest.mark.usefixtures("machine")
def test_a_machine_without_a_checkout(tiny: Project) -> None:
    run = replace(new_run(tiny), connect=Engine.connect, checkout=None)
    findings = {name: state for name, state, _ in doctor.examine(run)}
    assert findings["containers"] == "ok"
    assert "registry" not in findings
