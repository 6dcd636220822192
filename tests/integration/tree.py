"""The file tree of an image, as a container sees it, for comparing two ways of building one."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

# What Docker itself puts into every container's root.
ENGINE_OWN = {".dockerenv", "dev", "dev/console", "dev/pts", "dev/shm", "etc/hostname", "etc/hosts", "etc/mtab",
              "etc/resolv.conf", "proc", "sys"}  # fmt: skip


HOW_BUILT = {"ArgsEscaped"}  # BuildKit's, of no meaning on Linux
T = TypeVar("T")


@dataclass(frozen=True)
class Node:
    """`kind` is tar's, `content` a SHA-256 or where a link leads."""

    kind: str
    mode: int
    owner: tuple[int, int]
    content: str


def tree(image: str) -> dict[str, Node]:
    """Path without a leading slash -> what is there."""
    container = _docker("create", image, "true").strip()
    try:
        with (
            subprocess.Popen(["docker", "export", container], stdout=subprocess.PIPE) as process,
            tarfile.open(fileobj=process.stdout, mode="r|") as archive,
        ):
            found = dict(_nodes(archive))
        assert process.returncode == 0
    finally:
        _docker("rm", container)
    return _without_empty_folders(found)


def _without_empty_folders(found: dict[str, Node]) -> dict[str, Node]:
    """Some wheels list empty folders, such as `protobuf.libs/`: uv makes them, pip and our own layers do not."""
    full = {path.rsplit("/", 1)[0] for path in found if "/" in path}
    folder = tarfile.DIRTYPE.decode()
    return {
        path: node
        for path, node in found.items()
        if path in full or node.kind != folder or not path.startswith("opt/venv/lib/")
    }


def _nodes(archive: tarfile.TarFile) -> list[tuple[str, Node]]:
    found: dict[str, Node] = {}
    for item in archive:
        path = item.name.removeprefix("./").rstrip("/")
        if path in ENGINE_OWN:
            continue
        if item.islnk():  # another name of a file: as good as a file of its own
            found[path] = found[item.linkname.removeprefix("./")]
            continue
        content = item.linkname
        if item.isreg():
            source = archive.extractfile(item)
            assert source is not None
            content = hashlib.file_digest(source, "sha256").hexdigest()  # type: ignore[arg-type]
        found[path] = Node(item.type.decode(), item.mode & 0o7777, (item.uid, item.gid), content)
    return list(found.items())


def _docker(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], check=True, capture_output=True, text=True).stdout


def inspect(image: str) -> dict[str, Any]:
    """What its configuration says, but for what tells how it was built."""
    found = json.loads(_docker("image", "inspect", image))[0]
    config = {name: value for name, value in found["Config"].items() if name not in HOW_BUILT}
    return {**config, "Architecture": found["Architecture"], "Os": found["Os"]}


def differences(one: Mapping[str, T], other: Mapping[str, T]) -> dict[str, tuple[T | None, T | None]]:
    """What is not the same in both."""
    return {
        name: (one.get(name), other.get(name)) for name in sorted({*one, *other}) if one.get(name) != other.get(name)
    }
