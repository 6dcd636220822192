"""Docker Engine as its API describes it: the engine, an image, and errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import requests
from docker.errors import APIError, DockerException, StreamParseError
from docker.types import DeviceRequest
from urllib3.exceptions import HTTPError

from builder.common import machine
from builder.common.errors import FREE_DISK, DiskError, EngineError, causes
from builder.index.wheels import PLATFORMS, arch_of
from builder.matrix.schema import Arch

CDI_KIND = "nvidia.com/gpu"
# How an image came into the engine: built in this run, loaded from the store, or present before.
Origin = Literal["built", "loaded", "present"]
EMULATION_HINT = (
    "On Debian or Ubuntu, as root: apt-get install qemu-user-static binfmt-support   In a container or a minimal VM, "
    "first: mount -t binfmt_misc none /proc/sys/fs/binfmt_misc"
)


@dataclass(frozen=True, kw_only=True)
class EngineInfo:
    """An engine. `store` is overlay2 (image id = config digest) or containerd (image id = manifest digest).

    `root` is the folder of the store. Podman's store is called overlay; its image ids are the same as in overlay2.

    `id` is unique to an engine of Docker, empty for Podman.

    `gpu_option` is the option of `docker run` that gives a container GPUs of NVIDIA on this engine, empty if none does:
    `--gpus`, `--device` for devices of the Container Device Interface (CDI), or `--runtime` for NVIDIA's older runtime.
    `cdi_gpus` are the names of these devices: `all`, numbers, and UUIDs if the specification has them.
    """

    id: str = ""
    name: Literal["Docker Engine", "Podman"] = "Docker Engine"
    version: str
    store: str
    root: str
    architecture: str
    cpus: int
    memory: int
    is_local: bool
    is_rootless: bool = False
    gpu_option: Literal["--gpus", "--device", "--runtime", ""] = ""
    cdi_gpus: frozenset[str] = frozenset()

    @property
    def arch(self) -> str:
        """Its architecture as in images: `amd64`."""
        return arch_of(self.architecture)

    def foreign_error(self, arch: Arch) -> EngineError | None:
        """The error if this machine can neither run programs for this architecture nor emulate them.

        None for a remote engine: the emulation on its machine is unknown.
        """
        if arch == self.arch or not self.is_local or machine.emulates(PLATFORMS[arch]):
            return None
        return EngineError(f"this machine ({self.arch}) cannot run programs for {arch}", hint=EMULATION_HINT)

    @property
    def all_gpus(self) -> str:
        """The option of `docker run` that gives a container all GPUs; empty if this engine cannot."""
        return {
            "--gpus": "--gpus all",
            "--device": f"--device {CDI_KIND}=all",
            "--runtime": "--runtime nvidia",
            "": "",
        }[self.gpu_option]

    def gpu_options(self, names: Sequence[str] = ("all",)) -> dict[str, Any]:
        """The options of docker-py that give a container these GPUs, as plain data; `gpu_name` has the names."""
        if self.gpu_option == "--device":
            request = DeviceRequest(driver="cdi", device_ids=[f"{CDI_KIND}={name}" for name in names])
            return {"device_requests": [request]}
        if self.gpu_option == "--runtime":
            return {"runtime": "nvidia", "environment": {"NVIDIA_VISIBLE_DEVICES": ",".join(names)}}
        which: dict[str, Any] = {"count": -1} if names == ("all",) else {"device_ids": list(names)}
        return {"device_requests": [DeviceRequest(capabilities=[["gpu"]], **which)]}

    def gpu_name(self, uuid: str, index: int) -> str:
        """The name under which a container gets one GPU: its UUID if the engine has that name, else its number."""
        is_known = self.gpu_option != "--device" or uuid in self.cdi_gpus
        return uuid if uuid and is_known else str(index)


@dataclass(frozen=True, kw_only=True)
class ImageInfo:
    """An image in the engine. `created` is RFC 3339, `layers` are diff ids."""

    id: str
    labels: Mapping[str, str]
    tags: tuple[str, ...]
    created: str
    layers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LoadedImage:
    """An image in the engine. `digest` is the digest of the image's manifest.

    An image built from a Dockerfile has no manifest before a push: `digest` is then the image's id in the engine.
    """

    id: str
    digest: str
    origin: Origin = "present"


# ---- errors of docker-py and of the engine, as errors of builder


@contextmanager
def translated(action: str) -> Iterator[None]:
    """Raises EngineError or DiskError for docker-py's errors; `action` is what was attempted."""
    try:
        yield
    except (DockerException, StreamParseError, requests.RequestException, HTTPError, ConnectionError) as error:
        # urllib3 raises its own error for a stream that ends early, docker-py a StreamParseError for a truncated line.
        text = str(getattr(error, "explanation", None) or error)
        if is_disk_full(text) or (isinstance(error, APIError) and error.status_code is not None):
            raise reported(action, text) from error
        first_line = text.splitlines()[0] if text else repr(error)
        raise EngineError(
            f"{action}: Docker Engine does not answer: {first_line}",
            hint="Find or start an engine with `builder engine`. Then run the same command again: it continues where "
            "it stopped.",
        ) from error


def reported(action: str, message: str) -> EngineError | DiskError:
    """The error for a message of the engine."""
    if is_disk_full(message):
        return DiskError(f"{action}: the disk of Docker Engine is full", hint=FREE_DISK)
    return EngineError(f"{action}: {message}")


def is_disk_full(text: str) -> bool:
    return "no space left on device" in text.lower() or "disk quota exceeded" in text.lower()


def is_forbidden(error: BaseException) -> bool:
    """True if docker-py failed because this user may not open the engine's socket."""
    return any(isinstance(cause, PermissionError) for cause in causes(error))
