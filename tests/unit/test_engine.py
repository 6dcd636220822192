"""The engine's interface over a docker-py that is not there: errors, and errors inside of streams."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import docker
import pytest
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound

from builder.engine import Engine, explain
from builder.errors import BuildError, DiskError, EngineError
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


def test_sweep_goes_on_where_something_went_away_or_is_in_use() -> None:
    removed: list[str] = []
    asked: list[object] = []

    def remove(name: str) -> None:
        if name != "free":
            raise api_error({"used": 409, "gone": 404}[name], "x")
        removed.append(name)

    def images(**options: object) -> list[dict[str, str]]:
        asked.append(options["filters"])
        return [{"Id": name} for name in ("gone", "used", "free")]

    gone = SimpleNamespace(remove=raising(NotFound("x")))
    there = SimpleNamespace(remove=lambda **_: removed.append("there"))
    made = engine(
        list=lambda **_: [gone, there],
        images=images,
        get=lambda name: attributes(name, "2026"),
        remove_image=remove,
    )
    assert made.sweep("/checkout") == 2
    assert removed == ["there", "free"]
    assert asked == [{"label": "gpu-images.run=/checkout"}]


class Answer:
    """Stands in for the calls that docker-py has no method for."""

    def __init__(self, *messages: dict[str, str]) -> None:
        self.messages = messages
        self.posted: list[tuple[str, bytes, dict[str, object]]] = []

    def engine(self) -> Engine:
        return engine(
            _url=str, _post=self._post, _raise_for_status=lambda _: None, _stream_helper=lambda *_, **__: self.messages
        )

    def _post(self, url: str, *, data: Iterable[bytes], params: dict[str, object], **_: object) -> None:
        self.posted.append((url, b"".join(data), params))


def test_load_sends_the_archive() -> None:
    answer = Answer({"stream": "Loaded image ID: sha256:1"})
    answer.engine().load(iter([b"ar", b"chive"]))
    assert answer.posted == [("/images/load", b"archive", {"quiet": True})]


@pytest.mark.parametrize(
    ("told", "kind"), [("layer does not exist", EngineError), ("write: no space left on device", DiskError)]
)
def test_an_error_inside_the_answer_to_a_load(told: str, kind: type[Exception]) -> None:
    """The engine has said 200 by then."""
    with pytest.raises(kind, match=r"^loading: "):
        Answer({"status": "x"}, {"error": told}).engine().load([b""])


def test_an_engine_that_goes_away_while_it_loads() -> None:
    made = engine(_url=str, _post=raising(requests.ConnectionError("broken pipe")))
    with pytest.raises(EngineError, match="loading: Docker Engine does not answer, or went away: broken pipe"):
        made.load([b""])


def test_chains_of_every_image_once() -> None:
    known = {
        "a": SimpleNamespace(attrs={"RootFS": {"Layers": ["1", "2"]}}),
        "b": SimpleNamespace(attrs={"RootFS": None}),
    }

    def get(name: str) -> SimpleNamespace:
        if name not in known:
            raise ImageNotFound("x")
        return known[name]

    client: Any = SimpleNamespace(
        api=SimpleNamespace(images=lambda **_: [{"Id": name} for name in ("a", "a", "gone", "b")]),
        images=SimpleNamespace(get=get),
    )
    assert Engine(client).chains() == {("1", "2"), ()}


def test_save_writes_what_comes() -> None:
    out = io.BytesIO()
    engine(get_image=lambda *_, **__: iter([b"ar", b"chive"])).save("sha256:1", out)
    assert out.getvalue() == b"archive"
    with pytest.raises(EngineError, match="saving sha256:1"):
        engine(get_image=raising(requests.ConnectionError("x"))).save("sha256:1", out)


class FakeContainer:
    """Runs nothing; `status` is what its command ended with."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.calls: list[str] = []

    def create(self, image: str, command: list[str], **options: Any) -> FakeContainer:
        self.calls.append(f"create {image} {' '.join(command)}")
        self.options = options
        return self

    def put_archive(self, path: str, files: BinaryIO) -> None:
        self.calls.append(f"put {path} {files.read().decode()}")

    def start(self) -> None:
        self.calls.append("start")

    def wait(self, **_: object) -> dict[str, int]:
        return {"StatusCode": self.status}

    def logs(self, **_: object) -> bytes:
        return b"SyntaxError: \xff"

    def get_archive(self, path: str, **_: object) -> tuple[Iterable[bytes], dict[str, object]]:
        return iter([b"re", b"sult"]), {}

    def remove(self, **options: object) -> None:
        self.calls.append(f"remove {options}")

    def transform(self, out: BinaryIO) -> None:
        engine(create=self.create).transform(
            "sha256:1", checkout="/checkout", command=["py", "x"], files=io.BytesIO(b"tar"), result="/tmp/r", out=out
        )


def test_transform_gives_files_and_takes_a_result() -> None:
    container, out = FakeContainer(), io.BytesIO()
    container.transform(out)
    assert out.getvalue() == b"result"
    assert container.calls == ["create sha256:1 py x", "put / tar", "start", "remove {'force': True, 'v': True}"]
    assert container.options["network_mode"] == "none"
    assert container.options["labels"] == {"gpu-images.run": "/checkout"}


def test_a_transform_that_fails_says_what_was_printed_and_leaves_no_container() -> None:
    container, out = FakeContainer(status=3), io.BytesIO()
    with pytest.raises(BuildError, match=r"^py x ended with status 3\nSyntaxError: \ufffd$"):
        container.transform(out)
    assert out.getvalue() == b""
    assert container.calls[-1].startswith("remove")


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
