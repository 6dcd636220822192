"""Docker Engine, behind one thin interface. All of docker-py and of the Engine's API is in this file.

Every failure of the engine itself (not there, went away, out of disk) becomes an EngineError or a DiskError, so
that it is never taken for a fault of an image.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import docker
import requests
from docker.errors import APIError, DockerException, ImageNotFound, NotFound, StreamParseError
from docker.models.containers import Container
from docker.types import DeviceRequest
from urllib3.exceptions import HTTPError

from builder.errors import FREE_DISK, BuildError, DiskError, EngineError, NoEngineError
from builder.reference import ImageRef

LABEL = "gpu-images"
RUN_LABEL = f"{LABEL}.run"  # on containers and images that only a run of a checkout needs; its value is the checkout
SILENCE_S = 3600  # a build step may download gigabytes without a word
CALL_S = 120
SOCKET = "unix:///var/run/docker.sock"


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """`store` is overlay2 (image id = config digest) or containerd (image id = manifest digest)."""

    version: str
    store: str
    root: str
    buildkit: bool
    runtimes: tuple[str, ...]
    architecture: str
    cpus: int
    memory: int
    is_local: bool

    @property
    def has_nvidia(self) -> bool:
        return "nvidia" in self.runtimes


@dataclass(frozen=True, kw_only=True)
class ImageInfo:
    """An image that the engine has. `created` is RFC 3339; `size` in bytes, unpacked."""

    id: str
    labels: Mapping[str, str]
    tags: tuple[str, ...]
    size: int
    created: str


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turns docker-py's errors into ours; `doing` says what was attempted."""
    try:
        yield
    except (DockerException, StreamParseError, requests.RequestException, HTTPError, ConnectionError) as error:
        # A stream that breaks off is urllib3's own error, a line of it that is cut short docker-py's StreamParseError.
        raise explain(doing, error) from error


def explain(doing: str, error: Exception) -> EngineError | DiskError:
    """Our error for one of docker-py's, or for a message in a stream."""
    told = str(getattr(error, "explanation", None) or error)
    if is_disk_full(told):
        return DiskError(f"{doing}: the disk of Docker Engine is full", hint=FREE_DISK)
    if isinstance(error, APIError) and error.status_code is not None:
        return EngineError(f"{doing}: {told}")
    first = told.splitlines()[0] if told else repr(error)
    return EngineError(
        f"{doing}: Docker Engine does not answer, or went away: {first}",
        hint="`builder engine` finds or starts one; then run the same command again: it goes on where it stopped.",
    )


def is_disk_full(text: str) -> bool:
    return "no space left on device" in text.lower() or "disk quota exceeded" in text.lower()


class Engine:
    """One Docker Engine: the one that DOCKER_HOST names, else the local socket."""

    def __init__(self, client: docker.DockerClient) -> None:
        self._client = client

    @classmethod
    def connect(cls) -> Engine:
        """Raises EngineError if none answers."""
        try:
            client = docker.from_env(timeout=CALL_S)
            client.ping()
        except (DockerException, requests.RequestException) as error:
            raise NoEngineError(
                f"no Docker Engine answers at {os.environ.get('DOCKER_HOST', SOCKET)}",
                hint="`builder engine` finds one, or installs and starts one.",
            ) from error
        return cls(client)

    def info(self) -> EngineInfo:
        with translated("asking Docker Engine about itself"):
            info = self._client.info()
            version = self._client.version()
        containerd = any("containerd.snapshotter" in str(value) for _, value in info.get("DriverStatus") or [])
        numbers = tuple(int(part) for part in version["ApiVersion"].split("."))
        host = os.environ.get("DOCKER_HOST", SOCKET)
        return EngineInfo(
            version=version["Version"],
            store="containerd" if containerd else info["Driver"],
            root=info["DockerRootDir"],
            buildkit=numbers >= (1, 39),  # POST /build?version=2 came with 18.09
            runtimes=tuple(sorted(info.get("Runtimes") or {})),
            architecture=info["Architecture"],
            cpus=info["NCPU"],
            memory=info["MemTotal"],
            is_local=host.startswith("unix://") and Path(info["DockerRootDir"]).is_dir(),
        )

    def build(
        self,
        context: bytes,
        *,
        dockerfile: str,
        arguments: Mapping[str, str],
        labels: Mapping[str, str],
        network: str = "",
        target: str = "",
        fresh: bool = False,
    ) -> Iterator[dict[str, Any]]:
        """BuildKit's messages, as they come. No session is opened, so no secret can be asked for.

        `target` is the stage to build, by default the last; `fresh` takes nothing from the cache.

        Source: Docker Engine API, POST /build with version=2; docker-py's own `build` has no such parameter.
        Closing the iterator, or the end of this process, cancels the build.
        """
        params = {
            "version": "2",
            "dockerfile": dockerfile,
            "buildargs": json.dumps(dict(arguments)),
            "labels": json.dumps(dict(labels)),
            "rm": "1",
        }
        if network:
            params["networkmode"] = network
        if target:
            params["target"] = target
        if fresh:
            params["nocache"] = "1"
        api: Any = self._client.api  # its private helpers are the only way to this call
        with translated("building"):
            response = api._post(
                api._url("/build"),
                data=context,
                params=params,
                headers={"Content-Type": "application/x-tar"},
                stream=True,
                timeout=SILENCE_S,
            )
            api._raise_for_status(response)
            try:
                yield from api._stream_helper(response, decode=True)
            finally:
                response.close()

    def pull(self, reference: str) -> None:
        """Raises EngineError, also for an error inside the stream of a 200 answer."""
        with translated(f"pulling {reference}"):
            name = ImageRef.parse(reference)
            for message in self._client.api.pull(name.name, tag=name.digest or name.tag, stream=True, decode=True):
                if "error" in message:
                    if is_disk_full(message["error"]):
                        raise DiskError(f"pulling {reference}: the disk of Docker Engine is full", hint=FREE_DISK)
                    raise EngineError(f"pulling {reference}: {message['error']}")

    def has_remote(self, reference: str) -> bool:
        """Whether the registry of an image answers the engine, and has it."""
        try:
            api: Any = self._client.api
            api.inspect_distribution(reference)
        except (DockerException, requests.RequestException):
            return False
        return True

    def import_tar(self, path: Path, reference: ImageRef) -> str:
        """A root file system as an image; returns its id."""
        with translated(f"importing {reference}"), path.open("rb") as stream:
            answer = self._client.api.import_image_from_data(stream, repository=reference.name, tag=reference.tag)
        lines = [json.loads(line) for line in answer.splitlines() if line.strip()]
        for line in lines:
            if "error" in line:
                raise explain(f"importing {reference}", DockerException(line["error"]))
        return str(lines[-1]["status"])

    def save(self, image_id: str, out: BinaryIO) -> None:
        """Writes `docker save` of one image."""
        with translated(f"saving {image_id}"):
            api: Any = self._client.api
            for chunk in api.get_image(image_id, chunk_size=1 << 20):
                out.write(chunk)

    def load(self, archive: Iterable[bytes]) -> None:
        """Loads an archive as `docker load` does. Raises EngineError, also for an error inside a 200 answer."""
        with translated("loading"):
            api: Any = self._client.api
            response = api._post(
                api._url("/images/load"),
                data=archive,
                params={"quiet": True},
                headers={"Content-Type": "application/x-tar"},
                stream=True,
                timeout=SILENCE_S,
            )
            api._raise_for_status(response)
            for message in api._stream_helper(response, decode=True):
                if "error" in message:
                    raise explain("loading", DockerException(message["error"]))

    def chains(self) -> set[tuple[str, ...]]:
        """Diff ids, lowest first, of every image that the engine has."""
        with translated("listing images"):
            ids = {entry["Id"] for entry in self._client.api.images(all=False)}
            found = set()
            for image_id in ids:
                try:
                    attributes = self._client.images.get(image_id).attrs
                except ImageNotFound:
                    continue
                found.add(tuple((attributes.get("RootFS") or {}).get("Layers") or ()))
        return found

    def transform(
        self, image: str, *, checkout: str, command: Sequence[str], files: BinaryIO, result: str, out: BinaryIO
    ) -> None:
        """Runs a command in a new container without network, given a tar of `files`; writes a tar of `result` to `out`.

        Raises BuildError with what the command printed if it fails.
        """
        with translated(f"running {command[0]}"):
            containers: Any = self._client.containers
            container = containers.create(
                image,
                list(command),
                labels={RUN_LABEL: checkout},
                network_mode="none",
                environment={"PYTHONHASHSEED": "0"},
            )
            try:
                container.put_archive("/", files)
                container.start()
                status = container.wait(timeout=SILENCE_S)["StatusCode"]
                if status:
                    told = container.logs(tail=15).decode("utf-8", "replace")
                    raise BuildError(f"{' '.join(command)} ended with status {status}\n{told}")
                for chunk in container.get_archive(result, chunk_size=1 << 20)[0]:
                    out.write(chunk)
            finally:
                container.remove(force=True, v=True)

    def image(self, reference: str) -> ImageInfo | None:
        with translated(f"looking for image {reference}"):
            try:
                found = self._client.images.get(reference)
            except ImageNotFound:
                return None
        return _image_info(found.attrs)

    def images(self, label: str) -> list[ImageInfo]:
        """All images with this label (`key` or `key=value`), untagged ones too, newest first."""
        with translated("listing images"):
            found = self._client.api.images(filters={"label": label}, all=False)
            infos = [self.image(entry["Id"]) for entry in found]
        return sorted((info for info in infos if info), key=lambda info: info.created, reverse=True)

    def tag(self, image_id: str, reference: ImageRef) -> None:
        with translated(f"tagging {reference}"):
            self._client.api.tag(image_id, reference.name, reference.tag, force=True)

    def remove_image(self, reference: str) -> bool:
        """False if a container or a tag still needs it."""
        with translated(f"removing {reference}"):
            try:
                self._client.api.remove_image(reference)
            except APIError as error:
                if error.status_code == 409:
                    return False
                if error.status_code != 404:
                    raise
        return True

    def prune_cache(self) -> int:
        """Empties BuildKit's cache; returns the bytes freed."""
        with translated("emptying the build cache"):
            api: Any = self._client.api
            answer = api._result(api._post(api._url("/build/prune"), params={"all": "1"}, timeout=SILENCE_S), True)
        return int(answer.get("SpaceReclaimed") or 0)

    def cache_bytes(self) -> int:
        """Size of BuildKit's cache."""
        return self._disk()[1]

    def used_images(self) -> set[str]:
        """Ids of the images that containers are made from, running or not."""
        with translated("listing containers"):
            return {str(entry["ImageID"]) for entry in self._client.api.containers(all=True)}

    def disk_bytes(self) -> int:
        """What all images and BuildKit's cache take on the engine's disk, layers that images share counted once."""
        return sum(self._disk())

    def _disk(self) -> tuple[int, int]:
        """Bytes of all layers, and of BuildKit's cache."""
        with translated("asking how much disk is used"):
            told: Any = self._client.api.df()
        cache = sum(int(entry.get("Size") or 0) for entry in told.get("BuildCache") or ())
        return int(told.get("LayersSize") or 0), cache

    def start(
        self,
        image: str,
        *,
        checkout: str,
        command: Sequence[str] | None = None,
        ports: Sequence[int] = (),
        gpus: bool | Sequence[str] = False,
        **options: Any,
    ) -> Container:
        """A container of `image`, labelled so that `sweep` finds it; ports are published on loopback only.

        `gpus` are the UUIDs or numbers of the GPUs that it gets, or True for all.
        """
        chosen = {"count": -1} if gpus is True else {"device_ids": list(gpus or ())}
        requests_ = [DeviceRequest(capabilities=[["gpu"]], **chosen)] if gpus else None
        with translated(f"starting {image}"):
            containers: Any = self._client.containers
            started: Container = containers.run(
                image,
                list(command) if command else None,
                detach=True,
                labels={RUN_LABEL: checkout},
                ports={f"{port}/tcp": ("127.0.0.1", None) for port in ports},
                device_requests=requests_,
                **options,
            )
            return started

    def sweep(self, checkout: str) -> int:
        """Removes containers and images that a killed run of this checkout left; returns how many containers."""
        with translated("removing containers of an earlier run"):
            found = self._client.containers.list(all=True, filters={"label": f"{RUN_LABEL}={checkout}"})
            for container in found:
                try:
                    container.remove(force=True, v=True)
                except NotFound:
                    continue
        for image in self.images(f"{RUN_LABEL}={checkout}"):
            self.remove_image(image.id)
        return len(found)


def _image_info(attributes: Mapping[str, Any]) -> ImageInfo:
    return ImageInfo(
        id=attributes["Id"],
        labels=attributes.get("Config", {}).get("Labels") or {},
        tags=tuple(attributes.get("RepoTags") or ()),
        size=attributes["Size"],
        created=attributes.get("Created", ""),
    )
