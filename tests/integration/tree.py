"""The file tree of an image, as a container sees it, for comparing two ways of building one."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

# Files that Docker adds to the root of every container.
ENGINE_OWN = {".dockerenv", "dev", "dev/console", "dev/pts", "dev/shm", "etc/hostname", "etc/hosts", "etc/mtab",
              "etc/resolv.conf", "proc", "sys"}  # fmt: skip


CREATED_LABEL = "org.opencontainers.image.created"
# Details of how, when or where an image was built.
OF_THE_MAKING = {"Id", "RepoTags", "RepoDigests", "Created", "Metadata", "RootFS", "Size", "GraphDriver", "Parent",
                 "Comment", "Container", "ContainerConfig", "DockerVersion", "Author", "VirtualSize"}  # fmt: skip
HOW_BUILT = {"ArgsEscaped"}  # BuildKit's, of no meaning on Linux
T = TypeVar("T")


@dataclass(frozen=True)
class Node:
    """A file. `kind` is that of tar; `content` is a SHA-256, or the target of a link."""

    kind: str
    mode: int
    owner: tuple[int, int]
    content: str


def tree(image: str) -> dict[str, Node]:
    """All files, by path without a leading slash."""
    container = _docker("create", image, "true").strip()
    try:
        with (
            subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as process,
            tarfile.open(fileobj=process.stdout, mode="r|") as archive,
        ):
            nodes = dict(_nodes(archive))
        assert process.returncode == 0
    finally:
        _docker("rm", container)
    return _without_empty_folders(nodes)


def _without_empty_folders(nodes: dict[str, Node]) -> dict[str, Node]:
    """Some wheels list empty folders, such as `protobuf.libs/`: uv creates them, pip and `builder` do not."""
    full = {path.rsplit("/", 1)[0] for path in nodes if "/" in path}
    folder = tarfile.DIRTYPE.decode()
    return {
        path: node
        for path, node in nodes.items()
        if path in full or node.kind != folder or not path.startswith("opt/venv/lib/")
    }


def _nodes(archive: tarfile.TarFile) -> list[tuple[str, Node]]:
    nodes: dict[str, Node] = {}
    for item in archive:
        path = item.name.removeprefix("./").rstrip("/")
        if path in ENGINE_OWN:
            continue
        if item.islnk():  # another name of a file: as good as a file of its own
            nodes[path] = nodes[item.linkname.removeprefix("./")]
            continue
        content = item.linkname
        if item.isreg():
            source = archive.extractfile(item)
            assert source is not None
            content = hashlib.file_digest(source, "sha256").hexdigest()  # type: ignore[arg-type]
        nodes[path] = Node(item.type.decode(), item.mode & 0o7777, (item.uid, item.gid), content)
    return list(nodes.items())


def _docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True).stdout


def inspect(image: str) -> dict[str, Any]:
    """The configuration of an image, without the details of its build."""
    nodes = json.loads(_docker("image", "inspect", image))[0]
    # One engine shows fields of containers of images too, empty as they are.
    config = {name: value for name, value in nodes["Config"].items() if value and name not in HOW_BUILT}
    # A Dockerfile cannot say the time of its newest package.
    config["Labels"] = {name: value for name, value in config["Labels"].items() if name != CREATED_LABEL}
    rest = {name: value for name, value in nodes.items() if name not in {*OF_THE_MAKING, "Config"}}
    return {**config, **rest}


def differences(left: Mapping[str, T], right: Mapping[str, T]) -> dict[str, tuple[T | None, T | None]]:
    """The differences between two mappings, by key."""
    return {
        name: (left.get(name), right.get(name)) for name in sorted({*left, *right}) if left.get(name) != right.get(name)
    }
