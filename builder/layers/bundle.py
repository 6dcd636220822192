"""Bundles: images in one file, for a network without internet.

A bundle is a tar of an OCI image layout, which skopeo and oras read. `load_bundle` trusts nothing in it: it takes only
layers that locks/layers.json lists, by their SHA-256. Source: OCI image specification, "Image Layout".
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import BinaryIO

from builder.common.console import Meter, View
from builder.common.errors import DamagedError, DiskError, FileError, for_cells, of_file
from builder.common.files import SHA256_HEX, replacing
from builder.common.text import counted, size
from builder.layers import garbage, oci, os_layer, stored_layers
from builder.layers.blobs import CHUNK, REPAIR, Descriptor
from builder.layers.known_layers import KnownLayers
from builder.layers.oci import Layer
from builder.layers.store import BLOBS, Store
from builder.lock.lockfile import KNOWN_LAYERS
from builder.plan.plan import PlannedImage

_BLOB = re.compile(rf"(?:\./)?{BLOBS}/({SHA256_HEX})", re.ASCII)


def write_bundle(
    path: Path, store: Store, names: Mapping[str, Descriptor], blobs: Mapping[str, int], progress: Callable[[int], None]
) -> int:
    """Writes images of the store to a file, the same bytes for the same images; returns its size in bytes.

    `names` are manifests by name, `blobs` the sizes of all blobs of these. Raises DamagedError for a blob that does not
    match its digest, DiskError, FileError: then an earlier file is unchanged.
    """

    def checked(blob: str) -> Iterator[bytes]:
        file_hash = hashlib.sha256()
        for chunk in store.chunks(blob):
            file_hash.update(chunk)
            progress(len(chunk))
            yield chunk
        if f"sha256:{file_hash.hexdigest()}" != blob:
            raise DamagedError(f"{store.path(blob)} does not match its digest", hint=REPAIR, blob=blob)

    layout, index = oci.LAYOUT.encode(), oci.index(names).encode()
    files: list[tuple[str, int, Iterable[bytes]]] = [
        ("oci-layout", len(layout), [layout]),
        ("index.json", len(index), [index]),
        *((f"{BLOBS}/{blob.removeprefix('sha256:')}", blobs[blob], checked(blob)) for blob in sorted(blobs)),
    ]
    try:
        needed, free = sum(count for _, count, _ in files), shutil.disk_usage(path.parent).free
        if needed > free:
            raise DiskError(f"{path} takes {size(needed)}, but its disk has {size(free)} free", hint="Free disk space.")
        with replacing(path) as out:
            for name, count, chunks in files:
                info = tarfile.TarInfo(name)
                info.size = count
                out.write(info.tobuf(tarfile.GNU_FORMAT))
                out.writelines(chunks)
                out.write(bytes(-count % tarfile.BLOCKSIZE))
            out.write(bytes(2 * tarfile.BLOCKSIZE))  # the end of a tar
            return out.tell()
    except OSError as error:
        error.filename = error.filename or str(path)
        raise of_file(error) from error


def load_bundle(
    path: Path, store: Store, images: Sequence[PlannedImage], known: KnownLayers, view: View, *, wait: bool = False
) -> None:
    """Copies the layers that the images need and the store lacks from a bundle to the store, and records them.

    Frees garbage of the store if necessary, and with `wait`, waits for others who use it. Raises FileError for a bundle
    that lacks a layer, or is damaged; DiskError.
    """

    def lacking() -> dict[str, Layer]:
        """The layers that the store lacks, by their inputs."""
        layers = {}
        for image in images:
            for planned in image.layers:
                known_layer: Layer | None
                stored: Layer | None
                if planned.kind == "os":
                    known_layer = system = known.system(planned.inputs)
                    stored = os_layer.stored_system(store, planned.inputs, system)
                elif planned.wheels or planned.compiled:
                    known_layer = known.get(planned)
                    stored = stored_layers.stored_layer(store, planned, known_layer)
                else:
                    continue  # the build makes it, of files of the checkout
                if stored is None and known_layer is None:
                    raise FileError(
                        f"layer {planned.name} of {image.id} is not in the store, and not listed in {KNOWN_LAYERS}",
                        hint=f"Copy {KNOWN_LAYERS} from the checkout in which the bundle was made.",
                    )
                if stored is None and known_layer:
                    layers[planned.inputs] = known_layer
        return layers

    def missing_sizes() -> dict[str, int]:
        return {each.digest: each.size for each in lacking().values() if not store.has(each.digest, each.size)}

    def check_complete() -> dict[str, Layer]:
        """The layers to copy. Raises FileError if the file does not have all of them."""
        layers = lacking()
        absent = {each.digest for each in layers.values() if not store.has(each.digest, each.size)} - places.keys()
        if not absent:
            return layers
        cells = [
            image.id
            for image in images
            if any(planned.inputs in layers and layers[planned.inputs].digest in absent for planned in image.layers)
        ]
        again = for_cells("builder bundle", [image.id for image in images])
        raise FileError(
            f"{path} lacks {counted(len(absent), 'layer')} of {', '.join(cells)}",
            hint=f"Make it again from a checkout of this commit: {again} -o {shlex.quote(path.name)}",
        )

    store.prepare()
    if not lacking():
        return
    try:
        file = path.open("rb")
    except OSError as error:
        raise of_file(error) from error
    with file:
        # Before anything is deleted for it: in a closed network, it could not be downloaded again.
        planned_layers = [planned for image in images for planned in image.layers]
        recorded = [known.system(each.inputs) if each.kind == "os" else known.get(each) for each in planned_layers]
        needed = {layer.digest: layer.size for layer in recorded if layer}
        places = {blob: place for blob, place, count in _blobs(file, path) if needed.get(blob) == count}
        check_complete()
        garbage.make_room(store, lambda: sum(missing_sizes().values()), wait=wait)
        with store.used(), view.live():
            layers = check_complete()
            meter = Meter(view, "bundle", "loaded", sum(missing_sizes().values()))
            for inputs, layer in layers.items():
                if not store.has(layer.digest, layer.size):
                    file.seek(places[layer.digest])
                    with store.new_blob() as blob:
                        file_hash, left = hashlib.sha256(), layer.size
                        while left and (chunk := _read(file, path, min(CHUNK, left))):
                            file_hash.update(chunk)
                            blob.file.write(chunk)
                            meter.add(len(chunk))
                            left -= len(chunk)
                        if f"sha256:{file_hash.hexdigest()}" != layer.digest:
                            raise _damaged(path, f"blob {layer.digest} does not match its digest")
                        blob.digest = layer.digest
                store.put_record(inputs, asdict(layer))


def _read(file: BinaryIO, path: Path, count: int) -> bytes:
    """Bytes of the bundle. Raises FileError, not the DiskError of a store that is being written."""
    try:
        return file.read(count)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise of_file(error) from error


def _blobs(file: BinaryIO, path: Path) -> Iterator[tuple[str, int, int]]:
    """Digest, position and size of each blob in a tar; skips everything else. Raises FileError.

    Reads one header after another. The class TarFile would keep all headers in memory, and extended headers of any
    size.
    """
    end, position = file.seek(0, os.SEEK_END), 0
    while True:
        file.seek(position)
        try:
            info = tarfile.TarInfo.frombuf(_read(file, path, tarfile.BLOCKSIZE), "utf-8", "surrogateescape")
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            return
        except tarfile.HeaderError as error:
            reason = f"invalid header at byte {position}" if position else "it is not a tar, or is compressed"
            raise _damaged(path, reason if position < end else "its end is missing") from error
        position += tarfile.BLOCKSIZE
        if not 0 <= info.size <= end - position:
            raise _damaged(path, "its end is missing")
        if info.type in (tarfile.REGTYPE, tarfile.AREGTYPE) and (match := _BLOB.fullmatch(info.name)):
            yield f"sha256:{match[1]}", position, info.size
        position += info.size + -info.size % tarfile.BLOCKSIZE


def _damaged(path: Path, reason: str) -> FileError:
    return FileError(
        f"{path} is damaged: {reason}", hint="Copy it again, and compare its SHA-256 with that of the original."
    )
