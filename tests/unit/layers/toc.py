"""Reads layers as the specification of eStargz says, with tarfile and zlib alone, and compares what was read.

Source: docs/estargz.md of containerd/stargz-snapshotter.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import tarfile
import time
import zlib
from typing import Any

from builder.layers import estargz
from builder.layers.oci import Layer

TYPES = {
    tarfile.DIRTYPE: "dir", tarfile.REGTYPE: "reg", tarfile.SYMTYPE: "symlink", tarfile.LNKTYPE: "hardlink",
    tarfile.CHRTYPE: "char", tarfile.BLKTYPE: "block", tarfile.FIFOTYPE: "fifo",
}  # fmt: skip


def toc_position(blob: bytes) -> int:
    return int(blob[-51:][16:32], 16)


def toc_content(blob: bytes) -> bytes:
    """The table of contents, found as the specification says."""
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(blob[toc_position(blob) :]))) as tar:
        assert tar.getnames() == [estargz.TOC]
        file = tar.extractfile(estargz.TOC)
        assert file
        return file.read()


def digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def check_by_specification(blob: bytes, layer: Layer) -> dict[str, bytes]:
    """Compares the table of contents of a layer with what tarfile and zlib read; returns the contents by path."""
    with tarfile.open(fileobj=io.BytesIO(blob), mode="r:gz") as tar:
        files = [(info, _read(tar, info)) for info in tar]
    *files, (last, content) = files
    assert (last.name, content) == (estargz.TOC, toc_content(blob))
    assert digest(content) == layer.toc
    toc = json.loads(content)
    assert toc["version"] == 1
    entries = [entry for entry in toc["entries"] if entry["type"] != "chunk"]
    for (info, plain), entry in zip(files, entries, strict=True):
        is_folder, is_device = info.isdir(), info.type in (tarfile.CHRTYPE, tarfile.BLKTYPE)
        xattrs = {
            key.removeprefix("SCHILY.xattr."): base64.b64encode(value.encode("utf-8", "surrogateescape")).decode()
            for key, value in info.pax_headers.items()
            if key.startswith("SCHILY.xattr.")
        }
        described: dict[str, Any] = {
            "name": info.name + "/" * is_folder,
            "type": TYPES[info.type],
            "mode": info.mode,
            "uid": info.uid,
            "gid": info.gid,
            "modtime": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(int(info.mtime))),
            **({"linkName": info.linkname} if info.issym() or info.islnk() else {}),
            **({"devMajor": info.devmajor, "devMinor": info.devminor} if is_device else {}),
            **({"size": info.size, "digest": digest(plain)} if plain else {}),
            **({"xattrs": xattrs} if xattrs else {}),
        }
        assert {key: value for key, value in entry.items() if key not in CHUNK_KEYS} == described
    contents = {info.name: plain for info, plain in files if plain}
    _check_chunks(blob, toc["entries"], contents)
    return contents


CHUNK_KEYS = ("offset", "chunkOffset", "chunkSize", "chunkDigest")


def _read(tar: tarfile.TarFile, info: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(info) if info.isreg() else None
    return file.read() if file else b""


def _check_chunks(blob: bytes, entries: list[dict[str, Any]], contents: dict[str, bytes]) -> None:
    """Each chunk is one gzip member at its offset; all chunks of a file are its content."""
    read: dict[str, bytes] = {}
    for number, entry in enumerate(entries):
        name = entry["name"]
        if "offset" not in entry:
            assert not set(entry) & set(CHUNK_KEYS)
            assert name not in contents
            continue
        stream = zlib.decompressobj(16 + zlib.MAX_WBITS)
        plain = stream.decompress(blob[entry["offset"] :])
        assert stream.eof
        assert plain
        assert digest(plain) == entry["chunkDigest"]
        assert entry.get("chunkOffset", 0) == len(read.get(name, b""))
        assert (name in read) == (entry["type"] == "chunk")
        is_last = number + 1 == len(entries) or entries[number + 1]["type"] != "chunk"
        assert entry.get("chunkSize", 0) == (0 if is_last else len(plain))
        read[name] = read.get(name, b"") + plain
    assert read == contents


def prefetched(blob: bytes) -> frozenset[str]:
    """The files of a layer that a node prefetches, for `prefetch_order`."""
    toc = estargz.read_toc(io.BytesIO(blob))
    end = next((number for number, entry in enumerate(toc) if entry.name == estargz.PREFETCH_LANDMARK), 0)
    return frozenset(estargz.without_versions(entry.name) for entry in toc[:end] if entry.type == "reg")
