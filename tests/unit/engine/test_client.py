"""The engine's interface with a fake docker-py: errors, and errors in streams."""

from __future__ import annotations

import io
import json
import struct
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO, cast

import docker
import pytest
import requests
from docker.errors import APIError, DockerException, ImageNotFound
from docker.models.containers import Container
from urllib3.exceptions import ProtocolError

from builder.common.errors import DiskError, EngineError, NoEngineError
from builder.common.reference import ImageRef
from builder.engine.client import Engine, EngineAddress, RunningContainer
from builder.engine.model import EngineInfo, translated
from tests.fakes.engine import INFO

RESULT = bytes(range(256)) * 8
REFERENCE = f"host.example.test/a:t@sha256:{'0' * 64}"


def api_error(status: int, message: str) -> APIError:
    response = requests.Response()
    response.status_code = status
    return APIError("x", response=response, explanation=message)


def raising(error: BaseException) -> Any:
    def call(*_: object, **__: object) -> None:
        raise error

    return call


def engine(**api: Any) -> Engine:
    """An engine whose API has only these calls."""
    client: Any = SimpleNamespace(
        api=SimpleNamespace(**api),
        images=SimpleNamespace(**api),
        containers=SimpleNamespace(**api),
        volumes=SimpleNamespace(**api),
    )
    return Engine(client)


@pytest.mark.parametrize(
    ("error", "kind", "message", "hint"),
    [
        (
            api_error(500, "write: no space left on device"),
            DiskError,
            "the disk of Docker Engine is full",
            "docker image prune",
        ),
        (api_error(409, "conflict"), EngineError, "doing: conflict", ""),
        (
            requests.ConnectionError("refused\nmore"),
            EngineError,
            "does not answer: refused",
            "run the same",
        ),
        (DockerException("bad"), EngineError, "does not answer: bad", "run the same"),
        (ConnectionResetError(), EngineError, "ConnectionResetError", "run the same"),
    ],
)
def test_errors_of_docker_py_are_errors_of_the_engine_or_its_disk(
    error: Exception, kind: type[Exception], message: str, hint: str
) -> None:
    with pytest.raises((EngineError, DiskError)) as caught, translated("doing"):
        raise error
    assert type(caught.value) is kind
    assert caught.value.__cause__ is error
    assert message in str(caught.value)
    assert hint in caught.value.hint
    assert "\n" not in str(caught.value)


def test_no_engine_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "from_env", raising(DockerException("no socket")))
    monkeypatch.setenv("DOCKER_HOST", "tcp://build.example.test:1")
    with pytest.raises(NoEngineError):
        Engine.connect()


def test_a_socket_that_this_user_may_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """This was reported as a missing engine, with an offer to install one."""

    def refuse() -> None:
        try:
            raise requests.ConnectionError(ProtocolError("Connection aborted.", PermissionError(13, "denied")))
        except requests.ConnectionError as error:
            raise DockerException("Error while fetching server API version") from error

    monkeypatch.setattr(docker, "from_env", lambda **_: refuse())
    monkeypatch.delenv("DOCKER_HOST", raising=False)
    with pytest.raises(EngineError) as caught:
        Engine.connect()
    assert not isinstance(caught.value, NoEngineError), "it would be installed"


def test_pull_names_the_digest() -> None:
    arguments: list[object] = []

    def pull(name: str, tag: str, **_: object) -> list[dict[str, str]]:
        arguments.extend((name, tag))
        return [{"status": "ok"}]

    engine(pull=pull).pull(REFERENCE)
    assert arguments == ["host.example.test/a", "sha256:" + "0" * 64]


class Answer:
    """Fakes the calls for which docker-py has no method, and their answer: a stream of messages."""

    def __init__(self, *messages: dict[str, str]) -> None:
        self.messages = messages
        self.asked: list[tuple[str, object]] = []
        self.sent = b""
        self.is_closed = False
        self.timeouts: list[object] = []

    def engine(self) -> Engine:
        return engine(
            _url=str,
            _post=self._post,
            _raise_for_status=lambda _: None,
            _stream_helper=lambda *_, **__: iter(self.messages),
            _get_raw_response_socket=lambda response: response,
        )

    def _post(
        self, url: str, *, params: object, data: Iterable[bytes] | None = None, timeout: object = None, **_: object
    ) -> Answer:
        self.asked.append((url, params))
        self.sent = b"".join(data or ())
        self.timeouts.append(timeout)
        return self

    def settimeout(self, seconds: float) -> None:
        self.timeouts.append(seconds)

    def close(self) -> None:
        self.is_closed = True


LOCAL = f"127.0.0.1:80/a/image@sha256:{'0' * 64}"


def pull_local(engine: Engine, _: Path) -> None:
    list(engine.pull_local(LOCAL))


def import_tar(engine: Engine, file: Path) -> None:
    engine.import_tar(file, ImageRef.parse("a:t"))


def load(engine: Engine, _: Path) -> None:
    engine.load([b""])


@pytest.mark.parametrize(
    ("message", "kind"), [("connection refused", EngineError), ("write: no space left on device", DiskError)]
)
@pytest.mark.parametrize("call", [pull_local, import_tar, load])
def test_an_error_in_the_stream_of_an_answer(
    tmp_path: Path, call: Callable[[Engine, Path], None], message: str, kind: type[Exception]
) -> None:
    """After status 200."""
    file = tmp_path / "t"
    file.touch()
    with pytest.raises((EngineError, DiskError)) as caught:
        call(Answer({"status": "x"}, {"error": message}).engine(), file)
    assert type(caught.value) is kind


def test_a_local_pull_names_the_digest_and_has_a_short_time_limit_until_it_starts() -> None:
    """The engine may take long over a large layer, but not to reach this machine."""
    pull = Answer({"status": "a"}, {"status": "b"})
    assert list(pull.engine().pull_local(LOCAL)) == [{"status": "a"}, {"status": "b"}]
    assert pull.asked == [("/images/create", {"fromImage": "127.0.0.1:80/a/image", "tag": "sha256:" + "0" * 64})]
    assert pull.timeouts == [30, 3600]


def test_a_local_pull_is_cancelled() -> None:
    """The engine stops when the connection is closed."""
    pull = Answer({"status": "x"})
    messages = pull.engine().pull_local(LOCAL)
    next(messages)
    assert not pull.is_closed
    messages.close()
    assert pull.is_closed


def test_import_returns_the_id(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"")
    answer = Answer({"status": "..."}, {"status": "sha256:1"})
    assert answer.engine().import_tar(tmp_path / "t", ImageRef.parse("a:t")) == "sha256:1"
    [(_, parameters)] = answer.asked
    assert parameters == {"fromSrc": "-", "repo": "a", "tag": "t"}


def test_load_sends_the_archive() -> None:
    answer = Answer({"stream": "Loaded image ID: sha256:1"})
    answer.engine().load(iter([b"ar", b"chive"]))
    assert (answer.asked, answer.sent) == ([("/images/load", {"quiet": True})], b"archive")


def test_an_absent_image_is_none() -> None:
    assert engine(inspect_image=raising(ImageNotFound("x"))).image("a") is None
    with pytest.raises(EngineError):
        engine(inspect_image=raising(requests.ConnectionError("x"))).image("a")


def attributes(name: str, created: str) -> dict[str, Any]:
    return {"Id": name, "Config": {"Labels": None}, "RepoTags": None, "Size": 1, "Created": created}


def test_tags_are_without_the_host_that_podman_adds() -> None:
    """With it, no tag was one of the matrix."""
    tags = ["docker.io/org/a:1", "localhost/org/a:1", "org/a:1", "registry.example.test/org/a:1"]
    image = engine(inspect_image=lambda name: {**attributes(name, "2026"), "RepoTags": tags}).image("a")
    assert image
    assert image.tags == ("org/a:1", "org/a:1", "org/a:1", "registry.example.test/org/a:1")


def inspect(known: Mapping[str, Any]) -> Any:
    def inspect_image(name: str) -> Any:
        if name not in known:
            raise ImageNotFound("x")
        return known[name]

    return inspect_image


def test_images_newest_first_without_removed_ones() -> None:
    known = {"a": attributes("a", "2026-01-01"), "b": attributes("b", "2026-02-01")}
    ids = [{"Id": name} for name in ("a", "a", "removed", "b")]
    images = engine(images=lambda **_: ids, inspect_image=inspect(known)).images("label")
    assert [image.id for image in images] == ["b", "a"]
    assert (images[0].labels, images[0].tags) == ({}, ())


def test_an_image_that_cannot_be_removed() -> None:
    with pytest.raises(EngineError):
        engine(remove_image=raising(api_error(500, "broken"))).remove_image("a")


def test_sweep_skips_what_is_removed_or_in_use() -> None:
    removed: list[str] = []
    filters: list[object] = []

    def remove(name: str) -> None:
        if name != "free":
            raise api_error({"used": 409, "gone": 404}[name], "x")
        removed.append(name)

    def images(**options: object) -> list[dict[str, str]]:
        filters.append(options["filters"])
        return [{"Id": name} for name in ("gone", "used", "free")]

    def entry(checkout: str, age: float = 0) -> dict[str, object]:
        return {"Labels": {"io.github.gpu-images.run": checkout}, "Created": int(time.time() - age)}

    def leave(**_: object) -> None:
        removed.append("there")

    gone = SimpleNamespace(remove=raising(api_error(404, "x")), attrs=entry("/checkout"))
    going = SimpleNamespace(remove=raising(api_error(409, "removal in progress")), attrs=entry("/deleted", 7300))
    there = SimpleNamespace(remove=leave, attrs=entry("/checkout"))
    old = SimpleNamespace(remove=lambda **_: removed.append("old"), attrs=entry("/deleted", 7300))
    other = SimpleNamespace(attrs=entry("/other", 7000))
    fake = engine(
        list=lambda **options: [gone, going, there, old, other] if "all" in options else [there],
        images=images,
        inspect_image=lambda name: attributes(name, "2026"),
        remove_image=remove,
    )
    fake.sweep("/checkout")
    assert removed == ["there", "old", "there", "free"], "containers, a volume and an image"
    assert filters == [{"label": "io.github.gpu-images.run=/checkout"}]


class ProgramApi:
    """The API of an engine with a container `c1`, in which each program writes `output`."""

    def __init__(self, *output: bytes) -> None:
        self.output = b"".join(struct.pack(">BxxxL", 1, len(chunk)) + chunk for chunk in output)
        self.archive = b""
        self.words: list[str] = []
        self._url = str.format

    def container(self) -> RunningContainer:
        return RunningContainer(Container(attrs={"Id": "c1"}, client=cast("Any", SimpleNamespace(api=self))))

    def exec_create(self, _: str, words: list[str], **__: object) -> dict[str, str]:
        self.words = words
        return {"Id": "e1"}

    def _post_json(self, _: str, **options: object) -> SimpleNamespace:
        assert options["stream"]
        return SimpleNamespace(raw=io.BytesIO(self.output))

    def exec_inspect(self, _: str) -> dict[str, int]:
        return {"ExitCode": 3}

    def _get(self, url: str, **_: object) -> SimpleNamespace:
        assert url == "/containers/c1/archive"
        return SimpleNamespace(raw=io.BytesIO(self.archive))

    def _raise_for_status(self, _: object) -> None:
        """It is 200."""

    def put_archive(self, _: str, path: str, files: BinaryIO) -> bool:
        assert path == "/"
        self.archive = files.read()
        return True


@pytest.mark.parametrize(
    ("output", "lines"),
    [
        ([b"first li", b"ne\nsec", b"ond \xc3", b"\xa9 \xff\nrest"], ["first line\n", "second é \ufffd\n", "rest\n"]),
        # The output controls no terminal.
        (
            [b"\x1b[3", b"1mred\x1b[0m 10%\r", b"\n20%\r30%\n", b"\x1b]0;title\x07end\x9b"],
            ["red 10%\n", "20%\n", "30%\n", "end\ufffd\n"],
        ),
        # A line without an end is not kept in memory.
        ([b"x" * 40_000] * 4, ["x" * 80_000 + "\n"] * 2),
    ],
    ids=["text", "terminal", "long"],
)
def test_the_output_of_a_program_by_line(output: list[bytes], lines: list[str]) -> None:
    api, seen = ProgramApi(*output), list[str]()
    assert api.container().run_by_line(["py", "x"], {}, 60, seen.append) == 3
    assert seen == lines
    assert api.words == ["timeout", "--signal=KILL", "60", "py", "x"]


def test_a_folder_is_copied_with_the_files_that_its_links_lead_to(tmp_path: Path) -> None:
    """They belong to root: an id of this machine may not exist for a rootless engine."""
    (tmp_path / "blob").write_bytes(RESULT)
    folder = tmp_path / "folder"
    folder.mkdir(mode=0o700)
    (folder / "a.deb").symlink_to(tmp_path / "blob")
    api = ProgramApi()
    api.container().copy(folder, "/build")
    with tarfile.open(fileobj=io.BytesIO(api.archive)) as tar:
        assert tar.getnames() == ["build", "build/a.deb"]
        assert {(member.uid, member.gid) for member in tar} == {(0, 0)}
        assert [member.mode & 0o005 for member in tar] == [0o005, 0o004], "apt reads certificates as its own user"
        content = tar.extractfile("build/a.deb")
        assert content
        assert content.read() == RESULT


def archive_of(content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        info = tarfile.TarInfo("r")
        info.size = len(content)
        tar.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def test_a_file_of_a_container() -> None:
    api, out = ProgramApi(), io.BytesIO()
    api.archive = archive_of(RESULT)
    api.container().read("/tmp/r", out)
    assert out.getvalue() == RESULT
    api.archive = api.archive[:700]
    with pytest.raises(EngineError):
        api.container().read("/tmp/r", out)


class FakeRunning:
    """A container that is started and removed."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def run(self, image: str, command: list[str], **options: Any) -> FakeRunning:
        self.calls.append(f"run {image} {' '.join(command)} {options['labels']} {options['network_mode']}")
        return self

    def remove(self, **options: object) -> None:
        self.calls.append(f"remove {options}")


def test_a_container_is_removed_at_the_end() -> None:
    fake = FakeRunning()
    with engine(run=fake.run).running("debian", checkout="/checkout", network_mode="host"):
        assert len(fake.calls) == 1
    assert fake.calls == [
        "run debian sleep 7200 {'io.github.gpu-images.run': '/checkout'} host",
        "remove {'force': True, 'v': True}",
    ]


DOCKER = {"Version": "28.1.0", "ApiVersion": "1.49"}
PODMAN = {**DOCKER, "Components": [{"Name": "Podman Engine", "Version": "5.4.0"}]}
YAML = "cdiVersion: 0.5.0\nkind: nvidia.com/gpu\ndevices:\n- name: 0\n- name: all\n"
JSON = '{"cdiVersion":"0.5.0","kind":"nvidia.com/gpu","devices":[\n\t{"name":"GPU-1"}]}'
DAMAGED = ("", "\xff", "[]", "kind: nvidia.com/gpu\ndevices: 1\n", "kind: nvidia.com/gpu\ndevices: [1]\n", "kind: [")


def info_of(
    folder: Path, info: Mapping[str, Any], version: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch, host: str = ""
) -> EngineInfo:
    """What an engine with these settings offers, which are read once.

    Only programs in `folder` are on the path, `{cdi}` is `folder`.
    """
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr("builder.engine.client.CDI_FOLDERS", (str(folder),))
    answer = {
        "Driver": "overlay2", "DockerRootDir": str(folder), "Runtimes": {"runc": {}}, "Architecture": "x86_64",
        "NCPU": 4, "MemTotal": 1, **info,
    }  # fmt: skip
    if "CDISpecDirs" in info:
        answer["CDISpecDirs"] = [path.format(cdi=folder) for path in info["CDISpecDirs"]]
    answers = iter([answer])
    client: Any = SimpleNamespace(info=lambda: next(answers), version=lambda: version)
    engine = Engine(client, EngineAddress(host=host) if host else EngineAddress())
    assert engine.info() is engine.info()
    return engine.info()


CONTAINERD = {"DriverStatus": [["driver-type", "io.containerd.snapshotter.v1"]]}
ELSEWHERE = {"DockerRootDir": "/absent/root"}
SYSTEM_SOCKET, OWN_SOCKET = "/run/containerd/containerd.sock", "/var/run/docker/containerd/containerd.sock"
OPTIONS = ["name=seccomp,profile=builtin", "name=rootless", "name=cgroupns"]
# By case: the engine's settings and version, its address, and what they say.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str, dict[str, object]]] = {
    "overlay2": ({}, DOCKER, "", {"name": "Docker Engine", "store": "overlay2", "is_local": True}),
    "containerd": (CONTAINERD, DOCKER, "", {"store": "containerd", "is_local": True}),
    "a folder of another machine": (ELSEWHERE, DOCKER, "", {"is_local": False}),
    "another machine": ({}, DOCKER, "tcp://build.example.test:1", {"is_local": False}),
    "another socket": ({}, DOCKER, "unix:///run/other.sock", {"is_local": True}),
    # A containerd of the system has images in a folder of its own, which may be on another disk.
    "containerd of the system": (
        {**CONTAINERD, **ELSEWHERE, "Containerd": {"Address": SYSTEM_SOCKET}}, DOCKER, "",
        {"root": "/var/lib/containerd"},
    ),
    "containerd of Docker": (
        {**CONTAINERD, **ELSEWHERE, "Containerd": {"Address": OWN_SOCKET}}, DOCKER, "", {"root": "/absent/root"}
    ),
    "containerd without images": (
        {**ELSEWHERE, "Containerd": {"Address": SYSTEM_SOCKET}}, DOCKER, "", {"root": "/absent/root"}
    ),
    "Podman": ({}, PODMAN, "", {"name": "Podman", "version": "28.1.0"}),
    "rootless": ({"SecurityOptions": OPTIONS}, DOCKER, "", {"is_rootless": True}),
    "rootful": ({"SecurityOptions": OPTIONS[:1]}, DOCKER, "", {"is_rootless": False}),
    "no security options": ({"SecurityOptions": None}, DOCKER, "", {"is_rootless": False}),
}  # fmt: skip


@pytest.mark.parametrize(("info", "version", "host", "expected"), SETTINGS.values(), ids=SETTINGS.keys())
def test_the_settings_of_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    info: dict[str, Any], version: dict[str, Any], host: str, expected: dict[str, object],
) -> None:  # fmt: skip
    parsed = info_of(tmp_path, info, version, monkeypatch, host)
    assert {name: getattr(parsed, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("info", "version", "spec", "names"),
    [
        ({"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}]}, DOCKER, "", {"all"}),
        ({"DiscoveredDevices": [{"Source": "cdi", "ID": "amd.com/gpu=0"}]}, DOCKER, YAML, set()),
        ({"DiscoveredDevices": []}, DOCKER, YAML, set()),
        ({"CDISpecDirs": ["{cdi}", "/absent"]}, DOCKER, YAML, {"0", "all"}),
        ({"CDISpecDirs": ["{cdi}"]}, DOCKER, YAML.replace("gpu", "gpu-memory"), set()),
        *[({"CDISpecDirs": ["{cdi}"]}, DOCKER, text, set()) for text in DAMAGED],
        ({"CDISpecDirs": []}, DOCKER, YAML, set()),  # the feature is off
        ({"CDISpecDirs": ["{cdi}"], "DockerRootDir": "/absent/root"}, DOCKER, YAML, set()),  # of another machine
        ({}, DOCKER, YAML, set()),
        ({}, PODMAN, YAML, {"0", "all"}),
        ({"CDISpecDirs": ["{cdi}"]}, DOCKER, JSON, {"GPU-1"}),
    ],
)
def test_gpus_by_the_container_device_interface(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    info: dict[str, Any],
    version: dict[str, Any],
    spec: str,
    names: set[str],
) -> None:
    """Since Docker 28.2, an engine lists its devices; earlier ones and Podman only read specifications in folders."""
    (tmp_path / f"nvidia.{'json' if spec == JSON else 'yaml'}").write_bytes(spec.encode("latin-1"))
    (tmp_path / "damaged.json").write_bytes(b"\xff")
    parsed = info_of(tmp_path, info, version, monkeypatch)
    assert parsed.cdi_gpus == names
    assert parsed.gpu_option == ("--device" if names else "")


NVIDIA: dict[str, Any] = {"Runtimes": {"runc": {}, "nvidia": {}}}
CDI = {"DiscoveredDevices": [{"Source": "cdi", "ID": "nvidia.com/gpu=all"}]}


@pytest.mark.parametrize(
    ("has_hook", "info", "version", "expected"),
    [
        (True, {}, DOCKER, "--gpus all"),
        (True, {**NVIDIA, **CDI}, DOCKER, "--gpus all"),
        (True, CDI, PODMAN, "--device nvidia.com/gpu=all"),
        (False, {**NVIDIA, **CDI}, DOCKER, "--device nvidia.com/gpu=all"),
        (False, NVIDIA, DOCKER, "--runtime nvidia"),
        (False, {**NVIDIA, **ELSEWHERE}, DOCKER, "--gpus all"),
        (True, {**CDI, **ELSEWHERE}, DOCKER, "--device nvidia.com/gpu=all"),
        (True, ELSEWHERE, DOCKER, ""),
        (False, {}, DOCKER, ""),
    ],
)
def test_the_option_that_gives_containers_gpus_on_an_engine(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    has_hook: bool,
    info: dict[str, Any],
    version: dict[str, Any],
    expected: str,
) -> None:
    """An engine whose only support is CDI was asked for GPUs as `--gpus` asks, which it refuses."""
    if has_hook:
        (tmp_path / "nvidia-container-runtime-hook").touch(mode=0o755)
    assert info_of(tmp_path, info, version, monkeypatch).all_gpus == expected


def test_the_name_of_a_gpu_is_one_that_the_engine_has() -> None:
    assert replace(INFO, gpu_option="--gpus").gpu_name("GPU-1", 2) == "GPU-1"
    assert replace(INFO, gpu_option="--runtime").gpu_name("", 2) == "2"
    cdi = replace(INFO, gpu_option="--device", cdi_gpus=frozenset({"0", "2", "all", "GPU-3"}))
    assert [cdi.gpu_name("GPU-1", 2), cdi.gpu_name("GPU-3", 0)] == ["2", "GPU-3"]


@pytest.mark.parametrize(
    ("option", "names", "expected"),
    [
        ("--gpus", ("all",), {"Driver": "", "Count": -1, "DeviceIDs": [], "Capabilities": [["gpu"]]}),
        ("--gpus", ("GPU-1", "GPU-3"), {"Count": 0, "DeviceIDs": ["GPU-1", "GPU-3"], "Capabilities": [["gpu"]]}),
        ("--device", ("all",), {"Driver": "cdi", "Count": 0, "DeviceIDs": ["nvidia.com/gpu=all"]}),
        ("--device", ("0", "2"), {"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=0", "nvidia.com/gpu=2"]}),
    ],
)
def test_a_container_gets_only_its_gpus(option: Any, names: Any, expected: dict[str, Any]) -> None:
    options = replace(INFO, gpu_option=option).gpu_options(names)
    [request] = json.loads(json.dumps(options))["device_requests"]
    assert {key: request[key] for key in expected} == expected
    older = replace(INFO, gpu_option="--runtime").gpu_options(("GPU-1", "GPU-3"))
    assert older == {"runtime": "nvidia", "environment": {"NVIDIA_VISIBLE_DEVICES": "GPU-1,GPU-3"}}


def test_an_engine_that_stopped_is_noticed() -> None:
    """Its settings, which were read before, say nothing about that."""

    def ping() -> None:
        raise requests.ConnectionError("connection refused")

    client: Any = SimpleNamespace(ping=ping)
    with pytest.raises(EngineError):
        Engine(client).check()
