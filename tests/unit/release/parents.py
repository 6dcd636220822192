"""A small image as builder makes it, in a registry in memory."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from builder.common.files import digest_of_bytes
from builder.index.wheels import Wheel as LayerWheel
from builder.layers import estargz, oci, splice
from builder.layers import wheel as installer
from builder.layers.oci import CONFIG_TYPE, MANIFEST_TYPE, Descriptor, Layer
from builder.layers.splice import Entry
from builder.plan.layer_order import PlannedLayer
from tests.fakes.registry import MemoryRegistry
from tests.unit.layers.test_wheel import Wheel, pack

SYSTEM = {
    "var/lib/dpkg/status": (b"Package: libc6\nStatus: install ok installed\nSource: glibc\nVersion: 2.36-9+deb12u14\n"),
    "opt/venv/pyvenv.cfg": b"home = /usr/bin\n",
    "opt/venv/bin/python": b"",
    "workspace/readme": b"of the system\n",
}
FILES = {"etc/pip/constraints.txt": b"# of the framework\nember==1.9\n", "usr/local/bin/start": b"#!/bin/sh\n"}
LABELS = {
    "org.opencontainers.image.title": "em-1-cpu-py311",
    "org.opencontainers.image.created": "2026-11-02T12:55:59Z",
    "io.github.gpu-images.cell": "em-1-cpu-py311",
    "io.github.gpu-images.plan": "sha256:" + "7" * 64,
    "io.github.gpu-images.framework": "ember",
    "io.github.gpu-images.cuda": "cpu",
    "io.github.gpu-images.python": "3.11",
}


def project(name: str, files: Mapping[str, bytes] | None = None, version: str = "1.9") -> Wheel:
    """The wheel of a project, with a package of its name."""
    contents = {f"{name}/__init__.py": f"{name} = 1\n".encode()} if files is None else files
    return pack(contents, name=f"{name}-{version}-py3-none-any.whl", info=f"{name}-{version}.dist-info")


def of_wheels(*packed: Wheel) -> tuple[str, bytes]:
    """The layer of these wheels: its line in the history, and its content."""
    out = io.BytesIO()
    splice.write_layer(installer.layer_entries([each.open() for each in packed], "3.11", may_overlap=True), out)
    wheels = tuple(
        LayerWheel(
            component="x",
            name="x",
            version="1",
            file=each.name,
            size=1,
            sha256=hashlib.sha256(each.content).hexdigest(),
        )
        for each in packed
    )
    planned = PlannedLayer(kind="wheels", name="x", component="x", inputs="", wheels=wheels, python="3.11")
    return oci.history_line(planned), out.getvalue()


def plain(files: Mapping[str, bytes]) -> bytes:
    """A layer of plain files, with a /workspace that is not root's."""
    folders: set[str] = set()
    entries: list[Entry] = []
    workspace = tarfile.TarInfo("workspace")
    workspace.type, workspace.mode, workspace.uid, workspace.gid = tarfile.DIRTYPE, 0o1777, 1000, 7
    for path, content in sorted(files.items()):
        for folder in installer.new_folders(path, folders):
            entries.append(replace(folder, header=workspace) if folder.path == "workspace" else folder)
        entries.append(Entry(path=path, mode=0o644, content=content))
    out = io.BytesIO()
    splice.write_layer(entries, out)
    return out.getvalue()


class ParentImage:
    """An image of ember 1.9 and tinylib 1.9 in `registry`. Tests change its layers and labels."""

    def __init__(self, registry: MemoryRegistry) -> None:
        self.registry = registry
        self.layers = [self.wheels(project("ember"), project("tinylib"))]
        for name, files in (("os", SYSTEM), ("files", FILES)):
            self.layers.append((name, self.layer(plain(files))))
        self.labels = dict(LABELS)
        self.arch = "amd64"

    def wheels(self, *wheels: Wheel) -> tuple[str, Layer]:
        """A layer of wheels, with its line in the history."""
        line, content = of_wheels(*wheels)
        return line, self.layer(content)

    def layer(self, content: bytes) -> Layer:
        """Stores a layer in the registry."""
        plain_bytes = gzip.decompress(content)
        with tarfile.open(fileobj=io.BytesIO(plain_bytes)) as tar:
            toc = tar.extractfile(estargz.TOC)
            assert toc
            toc_digest = digest_of_bytes(toc.read())
        digest = digest_of_bytes(content)
        self.registry.contents[digest] = content
        diff_id, unpacked = digest_of_bytes(plain_bytes), len(plain_bytes)
        return Layer(digest=digest, diff_id=diff_id, size=len(content), unpacked=unpacked, toc=toc_digest)

    def push(self, tag: str = "", **config: Any) -> str:
        """Stores the image, and sets a tag; returns its digest. `config` replaces fields of the configuration."""
        data = {
            "architecture": self.arch,
            "os": "linux",
            "created": "2026-11-02T12:55:59Z",
            "config": {"User": "1000:0", "Env": ["PATH=/usr/bin", "LANG=C.UTF-8"], "Labels": self.labels},
            "rootfs": {"type": "layers", "diff_ids": [layer.diff_id for _, layer in self.layers]},
            "history": [{"created_by": line} for line, _ in self.layers],
        } | config
        content = json.dumps(data).encode()
        blob = Descriptor.of(content, CONFIG_TYPE)
        manifest = oci.manifest(blob, [layer for _, layer in self.layers])
        self.registry.contents[blob.digest] = content
        return self.registry.put_manifest(tag or digest_of_bytes(manifest), manifest, MANIFEST_TYPE)
