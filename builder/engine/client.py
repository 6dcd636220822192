"""Docker Engine, behind one thin interface. Only this room uses docker-py and the Engine's API.

Every failure of the engine itself (missing, stopped, out of disk) raises EngineError or DiskError, so that it is never
reported as an error of an image.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import tarfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, BinaryIO, Literal

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, TLSParameterError
from docker.models.containers import Container

from builder.common import strict_yaml
from builder.common.errors import EngineError, MatrixError, NoEngineError
from builder.common.reference import ImageRef
from builder.common.text import one_line, printable
from builder.engine.model import CDI_KIND, EngineInfo, ImageInfo, is_forbidden, reported, translated
from builder.matrix.tags import LABEL

RUN_LABEL = f"{LABEL}.run"  # on temporary containers and images; its value is the checkout
SILENCE_S = 3600  # a step may download gigabytes without output
CALL_S = 120
LONGEST_S = 2 * 3600  # a container that programs run in, each for at most half of this time
LONGEST_LINE = 1 << 16  # characters of a container's output that are kept in memory
SOCKET = "unix:///var/run/docker.sock"
FIRST_S = 30  # an engine requests the manifest at once, or cannot reach the endpoint
KILLED = 128 + signal.SIGKILL  # the status of a program
_TIMED_OUT = 124  # the status of timeout(1)
SYSTEM_CONTAINERD, CONTAINERD_ROOT = "/run/containerd/containerd.sock", "/var/lib/containerd"  # its defaults
CDI_FOLDERS = ("/etc/cdi", "/var/run/cdi")  # Podman's default; older versions do not report their folders
# Docker has `--gpus` if it finds this program of NVIDIA's toolkit. Since 29.2 also without, by CDI (moby/moby#50228):
# such an engine lists CDI devices, and `--device` works too.
GPU_HOOK = "nvidia-container-runtime-hook"


@dataclass(frozen=True, kw_only=True)
class EngineAddress:
    """The address of an engine.

    `variables` select it for docker-py, `docker` and its plugins, and override variables that are set. `selected_by` is
    for messages: `DOCKER_HOST`, `the Docker context podman`; empty for the local socket.
    """

    host: str = SOCKET
    variables: Mapping[str, str] = field(default_factory=dict)
    selected_by: str = ""


class Engine:
    """The Docker Engine at an address; `connect` chooses the one that the `docker` command would use."""

    address = EngineAddress()

    def __init__(self, client: docker.DockerClient, address: EngineAddress = address) -> None:
        self._client = client
        self.address = address
        self._info: EngineInfo | None = None

    @property
    def _api(self) -> Any:
        return self._client.api

    @classmethod
    def connect(cls) -> Engine:
        """Connects to the engine that the `docker` command would use.

        Raises NoEngineError if no engine answers, EngineError for a wrong context or if this user has no access.
        """
        address = engine_address(os.environ)
        try:
            # With use_ssh_client, docker-py runs ssh as the docker command does; without, it needs a library.
            client = docker.from_env(
                environment={**os.environ, **address.variables}, timeout=CALL_S, use_ssh_client=True, use_context=False
            )
            client.ping()
        except TLSParameterError as error:
            raise EngineError(
                f"the certificates for {address.host} cannot be used: {one_line(str(error))}",
                hint="Create the Docker context again with ca, cert and key, or set DOCKER_CERT_PATH to their folder.",
            ) from error
        except (DockerException, requests.RequestException) as error:
            if is_forbidden(error):
                raise EngineError(
                    f"no permission to use Docker's socket {address.host.removeprefix('unix://')}",
                    hint="Join its group and log in again: sudo usermod -aG docker $USER   Members of this group have "
                    "the rights of root. Rootless Docker needs no group: set DOCKER_HOST to its socket.",
                ) from error
            raise NoEngineError(
                f"no Docker Engine answers at {address.host}"
                + (f" (selected by {address.selected_by})" if address.selected_by else ""),
                hint="Find or install a Docker Engine: builder engine",
            ) from error
        return cls(client, address)

    def check(self) -> None:
        """Raises EngineError if the engine does not answer any more."""
        with translated("reaching Docker Engine"):
            self._client.ping()

    def info(self) -> EngineInfo:
        """The engine's settings, read once: the engine starts several programs for each answer."""
        if self._info:
            return self._info
        with translated("reading Docker Engine's settings"):
            info = self._client.info()
            version = self._client.version()
        containerd = any("containerd.snapshotter" in str(value) for _, value in info.get("DriverStatus") or [])
        root = info["DockerRootDir"]
        # A containerd that runs on its own has images in its own folder, whatever Docker's is.
        if containerd and (info.get("Containerd") or {}).get("Address") == SYSTEM_CONTAINERD:
            root = CONTAINERD_ROOT
        is_local = self.address.host.startswith("unix://") and Path(root).is_dir()
        is_podman = any(component.get("Name") == "Podman Engine" for component in version.get("Components") or ())
        cdi_gpus = _cdi_gpus(info, is_local=is_local, is_podman=is_podman)
        # The API does not show whether `--gpus` works: the runtime can be installed without the hook.
        gpu_option: Literal["--gpus", "--device", "--runtime", ""] = ""
        if is_local and not is_podman and shutil.which(GPU_HOOK):
            gpu_option = "--gpus"
        elif cdi_gpus:
            gpu_option = "--device"
        elif "nvidia" in (info.get("Runtimes") or {}):
            gpu_option = "--runtime" if is_local else "--gpus"  # another machine's hook cannot be looked for
        self._info = EngineInfo(
            id="" if is_podman else info.get("ID", ""),  # Podman makes a new one for each answer
            name="Podman" if is_podman else "Docker Engine",
            version=version["Version"],
            store="containerd" if containerd else info["Driver"],
            root=root,
            architecture=info["Architecture"],
            cpus=info["NCPU"],
            memory=info["MemTotal"],
            is_local=is_local,
            is_rootless=any("name=rootless" in str(option) for option in info.get("SecurityOptions") or ()),
            gpu_option=gpu_option,
            cdi_gpus=cdi_gpus,
        )
        return self._info

    def _post(
        self, path: str, data: Any, parameters: Mapping[str, Any], *, timeout: float = SILENCE_S
    ) -> requests.Response:
        """Sends a tar, or nothing. Only docker-py's private functions can make this call."""
        response: requests.Response = self._api._post(
            self._api._url(path),
            data=data,
            params=parameters,
            headers={"Content-Type": "application/x-tar"},
            stream=True,
            timeout=timeout,
        )
        self._api._raise_for_status(response)
        return response

    def pull(self, reference: str) -> None:
        """Pulls an image. Raises EngineError or DiskError, also for an error in the stream of a 200 response."""
        action = f"pulling {reference}"
        with translated(action):
            name = ImageRef.parse(reference)
            _check(action, self._api.pull(name.name, tag=name.digest or name.tag, stream=True, decode=True))

    def pull_local(self, reference: str) -> Generator[Mapping[str, Any]]:
        """Pulls an image that this process serves, and yields the engine's messages.

        Closing the generator cancels the pull. Raises EngineError or DiskError. docker-py's own `pull` would
        wait for ever for the first message.
        """
        action = "pulling an image from the store"
        name = ImageRef.parse(reference)
        with translated(action):
            parameters = {"fromImage": name.name, "tag": name.digest}
            response = self._post("/images/create", None, parameters, timeout=FIRST_S)
            try:
                raw = self._api._get_raw_response_socket(response)
                getattr(raw, "_sock", raw).settimeout(SILENCE_S)
                for message in self._api._stream_helper(response, decode=True):
                    _check(action, [message])
                    yield message
            finally:
                response.close()

    def import_tar(self, path: Path, reference: ImageRef) -> str:
        """Imports a root file system as an image for the engine's architecture; returns its id."""
        action = f"importing {reference}"
        parameters = {"fromSrc": "-", "repo": reference.name, "tag": reference.tag}
        with translated(action), path.open("rb") as stream:
            response = self._post("/images/create", stream, parameters)
            messages = list(self._api._stream_helper(response, decode=True))
        _check(action, messages)
        return str(messages[-1]["status"])

    def load(self, archive: Iterable[bytes]) -> None:
        """Loads an archive as `docker load` does. Raises EngineError, also for an error in a 200 response."""
        with translated("loading"):
            response = self._post("/images/load", archive, {"quiet": True})
            _check("loading", self._api._stream_helper(response, decode=True))

    def image(self, reference: str) -> ImageInfo | None:
        with translated(f"looking for image {reference}"):
            try:
                attributes = self._api.inspect_image(reference)
            except ImageNotFound:
                return None
        return ImageInfo(
            id=attributes["Id"],
            labels=(attributes.get("Config") or {}).get("Labels") or {},
            tags=tuple(_DEFAULT_HOST.sub("", tag) for tag in attributes.get("RepoTags") or ()),
            created=attributes.get("Created", ""),
            layers=tuple((attributes.get("RootFS") or {}).get("Layers") or ()),
        )

    def images(self, label: str) -> list[ImageInfo]:
        """All images with this label (`key` or `key=value`), untagged ones too, newest first."""
        with translated("listing images"):
            ids = {entry["Id"] for entry in self._api.images(filters={"label": label}, all=False)}
            infos = [self.image(image_id) for image_id in ids]
        return sorted((info for info in infos if info), key=lambda info: info.created, reverse=True)

    def tag(self, image_id: str, reference: ImageRef) -> None:
        with translated(f"tagging {reference}"):
            self._api.tag(image_id, reference.name, reference.tag, force=True)

    def remove_image(self, reference: str) -> None:
        """Removes an image or a tag, unless a container or another tag needs the image."""
        with translated(f"removing {reference}"), _ignored_if_gone():
            self._api.remove_image(reference)

    def start(
        self,
        image: str,
        *,
        checkout: str,
        command: Sequence[str] | None = None,
        ports: Sequence[int] = (),
        **options: Any,
    ) -> Container:
        """Starts a container of `image`, labelled so that `sweep` finds it; ports are published on loopback only."""
        with translated(f"starting {image}"):
            containers: Any = self._client.containers
            container: Container = containers.run(
                image,
                list(command) if command else None,
                detach=True,
                labels={RUN_LABEL: checkout},
                ports={f"{port}/tcp": ("127.0.0.1", None) for port in ports},
                **options,
            )
            return container

    @contextmanager
    def running(self, image: str, *, checkout: str, **options: Any) -> Iterator[RunningContainer]:
        """A new container to run programs in; it is removed at the end, and ends by itself if this process is killed.

        `options` are passed to `start`.
        """
        sleep = ["sleep", str(LONGEST_S)]
        container = self.start(image, checkout=checkout, command=sleep, auto_remove=True, **options)
        try:
            yield RunningContainer(container)
        finally:
            with translated(f"removing a container of {image}"), _ignored_if_gone():
                container.remove(force=True, v=True)

    def sweep(self, checkout: str) -> None:
        """Removes the containers, volumes and images that a killed run of this checkout left.

        Also removes old containers of other checkouts, which may be gone.
        """
        own: dict[str, Any] = {"label": f"{RUN_LABEL}={checkout}"}
        oldest = time.time() - LONGEST_S
        with translated("removing containers of an earlier run"):
            # `sparse`: without it, docker-py inspects each container, which another process may have removed by then.
            for container in self._client.containers.list(all=True, sparse=True, filters={"label": RUN_LABEL}):
                if container.attrs["Labels"][RUN_LABEL] == checkout or container.attrs["Created"] < oldest:
                    with _ignored_if_gone():
                        container.remove(force=True, v=True)
            for volume in self._client.volumes.list(filters=own):
                with _ignored_if_gone():
                    volume.remove(force=True)
        for image in self.images(f"{RUN_LABEL}={checkout}"):
            self.remove_image(image.id)


def engine_address(environ: Mapping[str, str]) -> EngineAddress:
    """The engine of DOCKER_HOST, or of the context DOCKER_CONTEXT, or of the current context, or of the local socket.

    docker-py follows contexts too, but uses the local socket in place of a missing context, and finds no context
    without a config.json. See https://docs.docker.com/engine/manage-resources/contexts/.

    Raises EngineError for a context that does not exist or cannot be read.
    """
    if host := environ.get("DOCKER_HOST"):
        return EngineAddress(
            host=host, variables={"DOCKER_HOST": host, "DOCKER_CONTEXT": ""}, selected_by="DOCKER_HOST"
        )
    folder = Path(environ.get("DOCKER_CONFIG") or Path(environ.get("HOME") or Path.home()) / ".docker")
    name = environ.get("DOCKER_CONTEXT", "")
    if not name:
        with suppress(OSError, ValueError, AttributeError):  # the docker command uses the local socket then
            name = json.loads((folder / "config.json").read_bytes()).get("currentContext") or ""
    if name in ("", "default"):
        return EngineAddress(variables={"DOCKER_HOST": SOCKET, "DOCKER_CONTEXT": ""})

    # Contexts are in folders that are named after the SHA-256 of their names.
    key = hashlib.sha256(name.encode()).hexdigest()
    path = folder / "contexts" / "meta" / key / "meta.json"
    try:
        endpoint: dict[str, Any] = json.loads(path.read_bytes())["Endpoints"]["docker"]
        host = str(endpoint["Host"]) or SOCKET
    except (OSError, ValueError, LookupError, TypeError) as error:
        fault = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be read: {path}"
        is_set = environ.get("DOCKER_CONTEXT")
        select = "Set DOCKER_CONTEXT to one of them." if is_set else "Select one: docker context use"
        hint = f"`docker context ls` lists the contexts. {select}"
        raise EngineError(f"the Docker context {name!r} {fault}", hint=hint) from error
    certificates = folder / "contexts" / "tls" / key / "docker"
    has_tls = certificates.is_dir()
    is_verified = has_tls and not endpoint.get("SkipTLSVerify")
    variables = {
        "DOCKER_HOST": host,
        "DOCKER_CONTEXT": "",
        "DOCKER_CERT_PATH": str(certificates) if has_tls else "",
        "DOCKER_TLS": "1" if has_tls and not is_verified else "",
        "DOCKER_TLS_VERIFY": "1" if is_verified else "",
    }
    return EngineAddress(host=host, variables=variables, selected_by=f"the Docker context {name}")


@contextmanager
def _ignored_if_gone() -> Iterator[None]:
    """Ignores the error if what the `with` block removes is gone, in use, or being removed by another process."""
    try:
        yield
    except APIError as error:
        if error.status_code not in (404, 409):
            raise


# Podman adds it to names without a host.
_DEFAULT_HOST = re.compile(r"^(docker\.io|localhost)/")


class RunningContainer:
    """A container that runs until it is removed."""

    def __init__(self, container: Container) -> None:
        self._container: Any = container

    @property
    def _api(self) -> Any:
        return self._container.client.api

    def put(self, files: BinaryIO) -> None:
        """Copies the files of a tar to the root of the container."""
        with translated("copying files to a container"):
            self._container.put_archive("/", files)

    def copy(self, folder: Path, target: str) -> None:
        """Copies a folder to `target`, and follows links. The copies belong to root."""
        with TemporaryFile(dir=folder) as archive:
            with tarfile.open(fileobj=archive, mode="w", dereference=True) as tar:
                tar.add(folder, target, filter=_of_root)
            archive.seek(0)
            self.put(archive)

    def read(self, path: str, out: BinaryIO) -> None:
        """Writes the content of a file to `out`."""
        with translated(f"reading {path} of a container"):
            # get_archive of docker-py returns chunks, but tarfile reads from a file.
            answer = self._api._get(
                self._api._url("/containers/{0}/archive", self._container.id),
                params={"path": path}, headers={"Accept-Encoding": "identity"}, stream=True,
            )  # fmt: skip
            self._api._raise_for_status(answer)
            try:
                with tarfile.open(fileobj=answer.raw, mode="r|", bufsize=1 << 20) as tar:
                    member = tar.next()
                    content = tar.extractfile(member) if member else None
                    if content is None:
                        raise EngineError(f"{path} of the container is not a file")
                    shutil.copyfileobj(content, out, 1 << 20)
            except tarfile.TarError as error:
                raise EngineError(f"Docker Engine did not return all of {path}: {error}") from error
            answer.raw.read()  # the engine does not remove a container while a client reads from it

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float, *, user: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program, by default as the container's user.

        Raises subprocess.TimeoutExpired after `timeout_s` seconds, EngineError.
        """
        streams = {1: bytearray(), 2: bytearray()}
        with translated(f"running {command[0]}"):
            program, frames = self._start(["timeout", f"{timeout_s:.0f}", *command], environment, user)
            for stream, data in frames:
                streams[stream] += data
            status = self._status(program)
        if status == _TIMED_OUT:
            raise subprocess.TimeoutExpired(list(command), timeout_s)
        output, errors = (streams[number].decode(errors="replace") for number in (1, 2))
        return subprocess.CompletedProcess(list(command), status, output, errors)

    def run_by_line(
        self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float,
        on_line: Callable[[str], object],
    ) -> int:  # fmt: skip
        """Runs a program, and calls `on_line` with each line of its output, as `printable` text.

        Returns its exit status: KILLED after `timeout_s` seconds, or if memory ran out. Raises EngineError.
        """
        with translated(f"running {command[0]}"):
            words = ["timeout", "--signal=KILL", f"{timeout_s:.0f}", *command]
            program, frames = self._start(words, environment)
            # A carriage return ends a line, as for a program of this machine: progress is written with it.
            decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
            line = ""
            for _, data in frames:
                *complete, line = (line + decoder.decode(data)).split("\n")
                for text in complete:
                    on_line(printable(f"{text}\n"))
                if len(line) > LONGEST_LINE:
                    on_line(printable(f"{line}\n"))
                    line = ""
            if line:
                on_line(printable(f"{line}\n"))
            return self._status(program)

    def _start(
        self, words: Sequence[str], environment: Mapping[str, str], user: str = ""
    ) -> tuple[str, Iterator[tuple[int, bytes]]]:
        """Starts a program; returns its id and its output: 1 or 2 for the stream, and bytes."""
        program = self._api.exec_create(self._container.id, list(words), environment=dict(environment), user=user)["Id"]
        # exec_start of docker-py reads the socket, not the buffer of its HTTP reader: output that arrives together
        # with the headers is lost (docker-py issue 3332). A busy machine showed no output, with status 0.
        request = {"Detach": False, "Tty": False}
        url = self._api._url("/exec/{0}/start", program)
        answer = self._api._post_json(url, data=request, stream=True, timeout=None)
        self._api._raise_for_status(answer)
        return program, _frames(answer.raw)

    def _status(self, program: str) -> int:
        """The exit status of a program whose output has ended, which can be before the engine has the status."""
        deadline = time.monotonic() + CALL_S
        while (status := self._api.exec_inspect(program)["ExitCode"]) is None:
            if time.monotonic() > deadline:
                raise EngineError("the engine has no exit status of a program", hint="Restart the engine.")
            time.sleep(0.05)
        return int(status)


def _of_root(file: tarfile.TarInfo) -> tarfile.TarInfo:
    file.uid = file.gid = 0
    # A temporary folder is closed to others, and apt reads certificates as its own user.
    file.mode |= 0o755 if file.isdir() else 0o444
    return file


def _frames(output: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The parts of a program's output: the number of the stream, and bytes. Source: Docker Engine API, attach."""
    while len(header := output.read(8)) == 8:
        stream, length = struct.unpack(">BxxxL", header)
        yield stream, output.read(length)


def _cdi_gpus(info: Mapping[str, Any], *, is_local: bool, is_podman: bool) -> frozenset[str]:
    """The names of NVIDIA's GPUs as CDI devices: from the engine's list (Docker 28.2), else from its specifications.

    An engine whose feature `cdi` is off names no folders. Source: Docker Engine API, SystemInfo; CDI specification.
    """
    if (devices := info.get("DiscoveredDevices")) is not None:
        ids = [str(device.get("ID", "")).partition("=") for device in devices]
        return frozenset(name for kind, _, name in ids if kind == CDI_KIND)
    folders = info.get("CDISpecDirs", CDI_FOLDERS if is_podman else ()) if is_local else ()
    names = set()
    for path in (path for folder in folders or () for path in sorted(Path(folder).glob("*.*"))):
        with suppress(OSError, ValueError, MatrixError):  # the engine also ignores what it cannot read
            if path.suffix not in (".json", ".yaml"):
                continue
            spec = json.loads(path.read_bytes()) if path.suffix == ".json" else strict_yaml.load_yaml(path).data
            if isinstance(spec, dict) and spec.get("kind") == CDI_KIND and isinstance(spec.get("devices"), list):
                names |= {str(device.get("name")) for device in spec["devices"] if isinstance(device, dict)}
    return frozenset(names)


def _check(action: str, messages: Iterable[Mapping[str, Any]]) -> None:
    """Reads all messages; raises EngineError or DiskError for an error among them."""
    for message in messages:
        if "error" in message:
            raise reported(action, str(message["error"]))
