"""The engine is the one that the `docker` command would use, for builder and for every program that it runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from builder.common.errors import EngineError
from builder.engine import setup
from builder.engine.client import SOCKET, Engine, engine_address

REMOTE = "tcp://build.example.test:2376"


def write_context(folder: Path, name: str, host: str, **endpoint: object) -> Path:
    """Writes a context as `docker context create` does; returns the folder for its certificates."""
    key = hashlib.sha256(name.encode()).hexdigest()
    meta = folder / "contexts" / "meta" / key / "meta.json"
    meta.parent.mkdir(parents=True)
    document = {"Name": name, "Metadata": {}, "Endpoints": {"docker": {"Host": host, **endpoint}}}
    meta.write_text(json.dumps(document), encoding="utf-8")
    return folder / "contexts" / "tls" / key / "docker"


@pytest.mark.parametrize(
    ("environ", "current", "host", "selected_by"),
    [
        ({}, None, SOCKET, ""),
        ({}, "", SOCKET, ""),
        ({}, "default", SOCKET, ""),
        ({}, "podman", "unix:///run/podman.sock", "the Docker context podman"),
        ({"DOCKER_CONTEXT": "remote"}, "podman", REMOTE, "the Docker context remote"),
        ({"DOCKER_CONTEXT": "remote"}, None, REMOTE, "the Docker context remote"),
        ({"DOCKER_CONTEXT": "default"}, "podman", SOCKET, ""),
        ({"DOCKER_CONTEXT": ""}, "podman", "unix:///run/podman.sock", "the Docker context podman"),
        ({"DOCKER_HOST": "unix:///own.sock", "DOCKER_CONTEXT": "remote"}, "podman", "unix:///own.sock", "DOCKER_HOST"),
        ({"DOCKER_HOST": ""}, "podman", "unix:///run/podman.sock", "the Docker context podman"),
    ],
)
def test_the_variables_and_the_current_context_select_the_engine(
    tmp_path: Path, environ: dict[str, str], current: str | None, host: str, selected_by: str
) -> None:
    write_context(tmp_path, "podman", "unix:///run/podman.sock")
    write_context(tmp_path, "remote", REMOTE)
    if current is not None:
        (tmp_path / "config.json").write_text(json.dumps({"currentContext": current} if current else {}))
    environ = {"DOCKER_CONFIG": str(tmp_path), **environ}
    address = engine_address(environ)
    assert (address.host, address.selected_by) == (host, selected_by)
    assert engine_address({**environ, **address.variables}).host == host, "a program that is started here agrees"


@pytest.mark.parametrize("config", [b"{", b"[]", b"\xff"])
def test_a_broken_configuration_selects_the_local_engine(tmp_path: Path, config: bytes) -> None:
    """As with the `docker` command."""
    (tmp_path / "config.json").write_bytes(config)
    assert engine_address({"DOCKER_CONFIG": str(tmp_path)}).host == SOCKET


def test_contexts_are_in_the_home_folder_by_default(tmp_path: Path) -> None:
    write_context(tmp_path / ".docker", "remote", REMOTE)
    assert engine_address({"HOME": str(tmp_path), "DOCKER_CONTEXT": "remote"}).host == REMOTE


@pytest.mark.parametrize(
    ("endpoint", "tls", "tls_verify"), [({}, "", "1"), ({"SkipTLSVerify": True}, "1", "")], ids=["verified", "not"]
)
def test_the_certificates_of_a_context_are_used(
    tmp_path: Path, endpoint: dict[str, object], tls: str, tls_verify: str
) -> None:
    certificates = write_context(tmp_path, "remote", REMOTE, **endpoint)
    certificates.mkdir(parents=True)
    others = {"DOCKER_CERT_PATH": "/other", "DOCKER_TLS_VERIFY": "1"}
    variables = engine_address({"DOCKER_CONFIG": str(tmp_path), "DOCKER_CONTEXT": "remote", **others}).variables
    assert (variables["DOCKER_CERT_PATH"], variables["DOCKER_TLS"], variables["DOCKER_TLS_VERIFY"]) == (
        str(certificates), tls, tls_verify,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "hint"),
    [({"DOCKER_CONTEXT": "gone"}, "Set DOCKER_CONTEXT to one of them"), ({}, "docker context use")],
)
def test_a_context_that_does_not_exist_is_an_error(tmp_path: Path, environ: dict[str, str], hint: str) -> None:
    """docker-py used the local engine."""
    (tmp_path / "config.json").write_text('{"currentContext": "gone"}')
    with pytest.raises(EngineError, match="the Docker context 'gone' does not exist") as caught:
        engine_address({"DOCKER_CONFIG": str(tmp_path), **environ})
    assert hint in caught.value.hint


@pytest.mark.parametrize("content", ["", "[]", '{"Endpoints": {}}', '{"Endpoints": {"docker": null}}'])
def test_a_damaged_context_is_an_error(tmp_path: Path, content: str) -> None:
    write_context(tmp_path, "remote", REMOTE)
    [meta] = tmp_path.glob("contexts/meta/*/meta.json")
    meta.write_text(content)
    with pytest.raises(EngineError):
        engine_address({"DOCKER_CONFIG": str(tmp_path), "DOCKER_CONTEXT": "remote"})


@pytest.mark.parametrize(
    ("environ", "hint"),
    [
        ({}, "Start that engine, or select the local one: docker context use default"),
        ({"DOCKER_CONTEXT": "remote"}, "Start that engine, or unset DOCKER_CONTEXT"),
    ],
)
def test_no_engine_is_installed_in_place_of_a_contexts(tmp_path: Path, environ: dict[str, str], hint: str) -> None:
    write_context(tmp_path, "remote", REMOTE)
    (tmp_path / "config.json").write_text('{"currentContext": "remote"}')
    absent = EngineError("no engine answers")
    with pytest.raises(EngineError) as caught:
        setup.require_installable({"DOCKER_CONFIG": str(tmp_path), **environ}, 0, {"ID": "debian"}, absent)
    assert caught.value.hint == hint


def test_certificates_that_are_missing_are_the_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They seemed to be an engine that does not answer, with advice to install one."""
    for name, value in {"DOCKER_HOST": REMOTE, "DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(EngineError, match=r"the certificates for tcp:.* cannot be used: "):
        Engine.connect()
