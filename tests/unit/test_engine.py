"""The engine's interface over a docker-py that is not there: errors, and errors inside of streams."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import docker
import pytest
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

from builder.engine import Engine, explain
from builder.errors import DiskError, EngineError
from builder.reference import ImageRef

REFERENCE = f"host.example.test/a:t@sha256:{'0' * 64}"


def api_error(status: int, told: str) -> APIError:
    response = requests.Response()
    response.status_code = status
    return APIError("x", response=response, explanation=told)


def raising(error: Exception) -> Any:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


def engine(**api: Any) -> Engine:
    """An engine whose low-level API has just these calls."""
    client: Any = SimpleNamespace(
        api=SimpleNamespace(**api), images=SimpleNamespace(**api), containers=SimpleNamespace(**api)
    )
    return Engine(client)


@pytest.mark.parametrize(
    ("error", "kind", "says", "hint"),
    [
        (
            api_error(500, "write: no space left on device"),
            DiskError,
            "the disk of Docker Engine is full",
            "builder clean",
        ),
        (api_error(409, "conflict"), EngineError, "doing: conflict", ""),
        (
            requests.ConnectionError("refused\nmore"),
            EngineError,
            "does not answer, or went away: refused",
            "run the same",
        ),
        (DockerException("bad"), EngineError, "does not answer, or went away: bad", "run the same"),
        (ConnectionResetError(), EngineError, "ConnectionResetError", "run the same"),
    ],
)
def test_explain(error: Exception, kind: type[Exception], says: str, hint: str) -> None:
    made = explain("doing", error)
    assert type(made) is kind
    assert says in str(made)
    assert hint in made.hint
    assert "\n" not in str(made)


def test_none_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "from_env", raising(DockerException("no socket")))
    monkeypatch.setenv("DOCKER_HOST", "tcp://build.example.test:1")
    with pytest.raises(EngineError, match=r"no Docker Engine answers at tcp://build.example.test:1") as caught:
        Engine.connect()
    assert "builder engine" in caught.value.hint


def test_pull_names_the_digest() -> None:
    asked: list[object] = []

    def pull(name: str, tag: str, **_: object) -> list[dict[str, str]]:
        asked.extend((name, tag))
        return [{"status": "ok"}]

    engine(pull=pull).pull(REFERENCE)
    assert asked == ["host.example.test/a", "sha256:" + "0" * 64]


@pytest.mark.parametrize(
    ("message", "kind"), [("manifest unknown", EngineError), ("write: no space left on device", DiskError)]
)
def test_an_error_inside_the_stream_of_a_pull(message: str, kind: type[Exception]) -> None:
    with pytest.raises(kind, match=f"pulling {REFERENCE}"):
        engine(pull=lambda *_, **__: [{"status": "x"}, {"error": message}]).pull(REFERENCE)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [('{"error": "bad tar"}', EngineError), ('{"status": "x"}\n{"error": "no space left on device"}', DiskError)],
)
def test_an_error_inside_the_answer_to_an_import(tmp_path: Path, answer: str, kind: type[Exception]) -> None:
    (tmp_path / "t").write_bytes(b"")
    with pytest.raises(kind, match="importing a:t"):
        engine(import_image_from_data=lambda *_, **__: answer).import_tar(tmp_path / "t", ImageRef.parse("a:t"))


def test_import_gives_the_id(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"")
    answer = '{"status": "..."}\n\n{"status": "sha256:1"}\n'
    made = engine(import_image_from_data=lambda *_, **__: answer)
    assert made.import_tar(tmp_path / "t", ImageRef.parse("a:t")) == "sha256:1"


def test_an_absent_image_is_none() -> None:
    assert engine(get=raising(ImageNotFound("x"))).image("a") is None
    with pytest.raises(EngineError, match="looking for image a"):
        engine(get=raising(requests.ConnectionError("x"))).image("a")


def attributes(name: str, created: str) -> SimpleNamespace:
    return SimpleNamespace(
        attrs={"Id": name, "Config": {"Labels": None}, "RepoTags": None, "Size": 1, "Created": created}
    )


def test_images_newest_first_without_those_that_went_away() -> None:
    known = {"a": attributes("a", "2026-01-01"), "b": attributes("b", "2026-02-01")}

    def get(name: str) -> SimpleNamespace:
        if name not in known:
            raise ImageNotFound("x")
        return known[name]

    made: Any = SimpleNamespace(
        api=SimpleNamespace(images=lambda **_: [{"Id": name} for name in ("a", "gone", "b")]),
        images=SimpleNamespace(get=get),
    )
    found = Engine(made).images("label")
    assert [info.id for info in found] == ["b", "a"]
    assert (found[0].labels, found[0].tags) == ({}, ())


@pytest.mark.parametrize(("status", "removed"), [(409, False), (404, True)])
def test_removing_what_is_in_use_or_gone(status: int, removed: bool) -> None:
    assert engine(remove_image=raising(api_error(status, "x"))).remove_image("a") is removed


def test_removing_fails_otherwise() -> None:
    with pytest.raises(EngineError, match="removing a: broken"):
        engine(remove_image=raising(api_error(500, "broken"))).remove_image("a")


def test_sweep_goes_on_where_a_container_went_away() -> None:
    removed: list[str] = []
    gone = SimpleNamespace(remove=raising(NotFound("x")))
    there = SimpleNamespace(remove=lambda **_: removed.append("there"))
    assert engine(list=lambda **_: [gone, there]).sweep("/checkout") == 2
    assert removed == ["there"]


@pytest.mark.parametrize(
    ("info", "host", "store", "is_local"),
    [
        ({}, "", "overlay2", True),
        ({"DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]}, "", "containerd", True),
        ({"DockerRootDir": "/absent/root"}, "", "overlay2", False),
        ({}, "tcp://build.example.test:1", "overlay2", False),
        ({}, "unix:///run/other.sock", "overlay2", True),
    ],
)
def test_info(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, info: dict[str, Any], host: str, store: str, is_local: bool
) -> None:
    if host:
        monkeypatch.setenv("DOCKER_HOST", host)
    told = {
        "Driver": "overlay2", "DockerRootDir": str(tmp_path), "Runtimes": {"runc": {}, "nvidia": {}},
        "Architecture": "x86_64", "NCPU": 4, "MemTotal": 1, **info,
    }  # fmt: skip
    client: Any = SimpleNamespace(info=lambda: told, version=lambda: {"Version": "26.1.5", "ApiVersion": "1.45"})
    found = Engine(client).info()
    assert (found.store, found.is_local, found.buildkit, found.has_nvidia) == (store, is_local, True, True)
