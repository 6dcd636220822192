"""The findings of `builder doctor`, on fake machines."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import requests

from builder.build import doctor, operating_systems
from builder.build.doctor import MachineFinding
from builder.common.errors import EngineError
from builder.compat.gpus import Gpu
from builder.engine.client import Engine
from builder.index.host import Host
from builder.index.session import IndexSession
from builder.index.settings import IndexSettings
from builder.matrix.project import Project
from tests.fakes.engine import INFO, FakeEngine, Programs
from tests.fakes.run import new_run
from tests.fakes.wire import Reply, Sent, Wire, untrusted

HTTP, HTTPS = (f"{scheme}://registry.example.test:5000" for scheme in ("http", "https"))
Edit = Callable[[str, str], Project]
MIRROR = "https://me:pw@mirror.example.test/simple"


def engine(**changes: Any) -> FakeEngine:
    return FakeEngine(info=replace(INFO, **changes))


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The properties of a machine; tests change them before they call `examine`."""
    has: dict[str, Any] = {
        "engine": engine(is_local=True), "gpus": ("", ()), "reason": "", "which": {"docker", "mmdebstrap", "cosign"},
        "index": ["pip.whl"],
        "settings": IndexSettings(url=MIRROR, ca_bundle="/ca.pem"), "registry": {}, "free": 10**12,
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

    usage = shutil.disk_usage(".")

    def run(command: list[str]) -> tuple[int, str, str]:
        return (0, "uv 0.13.8 (x)\n", "") if command[0] != "dpkg-query" else (1, "", "")

    programs = Programs(run)
    monkeypatch.setattr(Engine, "connect", connect)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if name in has["which"] else None)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=has["free"]))
    monkeypatch.setattr(operating_systems, "obstacle_here", lambda: has["reason"])
    monkeypatch.setattr("builder.compat.gpus.read_gpus", lambda: has["gpus"])
    monkeypatch.setattr("builder.index.host.read_host", lambda: Host(index=has["settings"]))
    monkeypatch.setattr("subprocess.run", programs)
    monkeypatch.setattr(IndexSession, "files", files)
    monkeypatch.setenv("DOCKER_CONFIG", "/nonexistent")
    Wire.install(monkeypatch, answers)
    return has


def examine(project: Project) -> dict[str, MachineFinding]:
    findings = doctor.examine(replace(new_run(project), connected=None))
    assert len({finding.name for finding in findings}) == len(findings)
    assert all(finding.detail for finding in findings)
    assert "mirror.example.test" not in str(findings)
    return {finding.name: finding for finding in findings}


def test_a_good_machine(tiny: Project, machine: dict[str, Any]) -> None:
    machine["registry"] = {HTTPS: 404}
    findings = examine(tiny)
    states = {name: finding.state for name, finding in findings.items()}
    assert states.pop("gpu") == "note"
    assert set(states.values()) == {"ok"}
    assert findings["index"].detail == "the configured mirror answers, with a CA bundle of this machine"
    assert findings["registry"].detail == "registry.example.test:5000 answers"


CASES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "no engine": ({"engine": None}, "engine", "missing", "no Docker Engine answers at x. `builder engine` starts one."),
    "old engine": ({"engine": engine(version="20.10.24")}, "engine", "missing", "23 or newer"),
    "podman": ({"engine": engine(name="Podman", version="4.3.1")}, "engine", "ok", "Podman 4.3.1"),
    "old podman": ({"engine": engine(name="Podman", version="4.2.0")}, "engine", "missing", "4.3 or newer"),
    "podman pulls": ({"engine": engine(name="Podman", version="5.4.2")}, "loading", "note", "Podman gets whole"),
    "podman builds": ({"engine": engine(name="Podman", version="26.0.0")}, "dockerfiles", "note", "Podman cannot"),
    "rootless": ({"engine": engine(is_rootless=True)}, "engine", "ok", "Docker Engine 26.1.5, rootless"),
    "rootless pulls": (
        {"engine": engine(is_rootless=True, is_local=True)}, "loading", "note", "a rootless engine gets whole archives",
    ),
    "rootless mounts": ({"engine": engine(is_rootless=True)}, "mounts", "note", "-e NB_UID=0"),
    "another machine pulls": ({"engine": engine()}, "loading", "note", "an engine on another machine gets"),
    "old builds": ({"engine": engine(version="24.0.7")}, "dockerfiles", "note", "needs Docker Engine 25 or newer"),
    "containerd": ({"engine": engine(store="containerd")}, "store", "ok", "keeps layers compressed too"),
    "arm64": ({"engine": engine(architecture="aarch64")}, "machine", "ok", "aarch64"),
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
    "plain registry": ({"registry": {HTTP: 200}}, "registry", "note", "connection was lost"),
    "login required": ({"registry": {HTTPS: 401}}, "registry", "note", "Run `docker login registry.example.test:5000`"),
    "no cosign": ({"which": {"docker"}}, "cosign", "note", "not installed: signatures cannot be made or checked"),
    "cosign": ({}, "cosign", "ok", "/bin/cosign"),
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
    finding = examine(tiny)[name]
    assert finding.state == state
    assert detail in finding.detail


BINFMT = "{state}\ninterpreter /usr/libexec/qemu-binfmt/aarch64-binfmt-P\nflags: {flags}\noffset 0\n"


@pytest.mark.parametrize(
    ("entry", "state", "detail"),
    [
        (BINFMT.format(state="enabled", flags="POCF"), "ok", "emulated by QEMU: images can be built, and are not run"),
        (BINFMT.format(state="disabled", flags="POCF"), "note", "apt-get install qemu-user-static binfmt-support"),
        (BINFMT.format(state="enabled", flags="OC"), "note", "not emulated"),
        ("", "note", "mount -t binfmt_misc"),
    ],
    ids=["registered", "disabled", "not in containers", "missing"],
)
def test_the_emulation_of_another_architecture(
    edit: Edit, machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, entry: str, state: str,
    detail: str,
) -> None:  # fmt: skip
    """Without cells for it there is no finding, and what a remote engine can do is not known."""
    machine["engine"] = FakeEngine(info=replace(INFO, is_local=True, root=str(tmp_path)))
    monkeypatch.setattr("builder.common.machine.BINFMT", tmp_path)
    if entry:
        (tmp_path / "qemu-aarch64").write_text(entry)
    assert "arm64" not in examine(edit("namespace: team", "namespace: team"))
    project = edit('python: ["3.11"]}', 'python: ["3.11"], arch: [amd64, arm64]}')
    finding = examine(project)["arm64"]
    assert (finding.state, detail in finding.detail) == (state, True)
    machine["engine"] = FakeEngine()
    assert examine(project)["arm64"].detail == "the engine must emulate aarch64"


def test_the_disk_of_a_local_engine(tiny: Project, machine: dict[str, Any], tmp_path: Path) -> None:
    machine["engine"] = engine(is_local=True, root=str(tmp_path))
    findings = examine(tiny)
    assert findings["disk: engine"].detail == findings["disk: checkout"].detail == "1000.0 GB free"


def test_an_engine_that_stops(tiny: Project, machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def info() -> None:
        raise EngineError("asking Docker Engine about itself: went away")

    monkeypatch.setattr(machine["engine"], "info", info)
    finding = examine(tiny)["engine"]
    assert finding.state == "missing"
    assert finding.detail.endswith("went away")


@pytest.mark.parametrize(
    ("setting", "state", "detail"),
    [
        ("staging: other.example.test/staging", "ok", "other.example.test answers"),
        ("staging: away.example.test", "note", "connection was lost"),
        ("staging: registry.example.test:5000/staging", None, ""),
    ],
)
def test_a_registry_for_staging(
    machine: dict[str, Any], edit: Edit, setting: str, state: str | None, detail: str
) -> None:
    machine["registry"] = {HTTP: 200, "https://other.example.test": 200}
    findings = examine(edit("namespace: team", f"namespace: team\ninsecure: [registry.example.test:5000]\n{setting}"))
    assert findings["registry"].state == "ok", "over plain http"
    staging = findings.get("staging")
    assert (staging and staging.state) == state
    assert detail in str(staging)


def test_staging_without_a_registry(machine: dict[str, Any], edit: Edit) -> None:
    edit("registry: registry.example.test:5000", 'registry: ""')
    finding = examine(edit("namespace: team", "namespace: team\nstaging: team"))["staging"]
    assert (finding.state, finding.detail) == ("note", "staging: no registry in 'team'")
    assert machine["registry"] == {}


@pytest.mark.parametrize(("reached", "state"), [(True, "ok"), (False, "note")])
def test_without_a_registry_in_the_matrix(tiny: Project, machine: dict[str, Any], reached: bool, state: str) -> None:
    path = tiny.root / "matrix.yaml"
    path.write_text(path.read_text().replace("registry: registry.example.test:5000", 'registry: ""'))
    machine["engine"] = FakeEngine(registry=reached)
    assert examine(Project(tiny.root))["registry"].state == state


def test_named_indexes_are_checked_with_their_logins(
    tiny: Project, machine: dict[str, Any], edit: Callable[[str, str], Project], monkeypatch: pytest.MonkeyPatch
) -> None:
    edit("debian:\n", "indexes: {company: https://python.example.test/simple}\ndebian:\n")
    project = edit("    packages: [notebook]\n", "    packages: [notebook]\n    index: company\n")
    (tiny.root / "netrc").write_text("machine python.example.test login me passwort s3cret\n")
    monkeypatch.setenv("NETRC", str(tiny.root / "netrc"))
    finding = examine(project)["index company"]
    assert finding.state == "missing"
    assert finding.detail.startswith(f"{tiny.root}/netrc: line 1 is invalid. ")
    monkeypatch.setenv("UV_INDEX_COMPANY_PASSWORD", "s3cret")
    assert examine(project)["index company"] == MachineFinding("index company", "ok", "has notebook")
    machine["index"] = []
    absent = "has no notebook: publish it there, or correct its index in matrix.yaml"
    assert examine(project)["index company"].detail == absent
    machine["index"] = requests.ReadTimeout()
    assert "notebook: the index company timed out" in examine(project)["index company"].detail
