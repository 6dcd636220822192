"""An image to be verified, and access to its blobs: in the store, or in a repository of a registry."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, cast

from builder.common.errors import RegistryError
from builder.layers import oci
from builder.layers.oci import Image
from builder.layers.store import Store
from builder.matrix.tags import CELL_LABEL, PARENT_CELL_LABEL
from builder.registry.client import INDEXES, Repository
from builder.registry.failures import RejectedError

ALL = "all"  # architectures


@dataclass(frozen=True, kw_only=True)
class ImageSource(ABC):
    """An image by its manifest. Subclasses read its blobs."""

    manifest: bytes

    @cached_property
    def image(self) -> Image:
        """The image with its layers, history and labels. Raises VerifyError if it is invalid."""
        return oci.read_image(self.manifest, self.read_blob)

    @property
    def cell(self) -> str:
        """The id of the cell in the labels of the image, empty if they name none. Raises VerifyError."""
        return self.image.labels.get(CELL_LABEL, "")

    @property
    def lowest_cell(self) -> str:
        """The id of the cell that the image, or the lowest of its parents, was made for. Raises VerifyError."""
        return self.cell or self.image.labels.get(PARENT_CELL_LABEL, "")

    @abstractmethod
    def read_blob(self, digest: str) -> bytes:
        """A small blob, such as the configuration."""

    @abstractmethod
    def has_blob(self, digest: str) -> bool:
        """True if the place of the image has the blob."""

    @abstractmethod
    def open_layer(self, digest: str, size: int, read: Callable[[int], None]) -> BinaryIO | None:
        """A blob as a file; None if its bytes do not match the digest. Calls `read` with numbers of bytes."""

    @abstractmethod
    def open_unchecked(self, digest: str, size: int) -> BinaryIO:
        """A blob as a file, of which nothing is read and checked yet."""


@dataclass(frozen=True, kw_only=True)
class StoredSource(ImageSource):
    """An image of a store."""

    store: Store

    def read_blob(self, digest: str) -> bytes:
        return self.store.read(digest)

    def has_blob(self, digest: str) -> bool:
        return self.store.path(digest).exists()

    def open_layer(self, digest: str, size: int, read: Callable[[int], None]) -> BinaryIO | None:
        if self.store.has(digest, size) and self.store.matches(digest, read):
            return self.store.path(digest).open("rb")
        return None

    def open_unchecked(self, digest: str, size: int) -> BinaryIO:
        return self.store.path(digest).open("rb")


@dataclass(frozen=True, kw_only=True)
class RegistrySource(ImageSource):
    """An image in a registry. `folder` is for downloaded layers.

    `index` is the digest of the image index that names the image, empty without one.
    """

    repository: Repository
    folder: Path
    index: str = ""
    _blobs: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False)

    def read_blob(self, digest: str) -> bytes:
        if digest not in self._blobs:
            self._blobs[digest] = self.repository.read_blob(digest)
        return self._blobs[digest]

    def has_blob(self, digest: str) -> bool:
        return self.repository.has_blob(digest)

    def open_layer(self, digest: str, size: int, read: Callable[[int], None]) -> BinaryIO | None:
        file = TemporaryFile(dir=self.folder)  # noqa: SIM115  the caller closes it
        try:
            self.repository.download(digest, size, file, read)
        except RejectedError:
            file.close()
            return None
        except BaseException:
            file.close()
            raise
        file.seek(0)
        return cast("BinaryIO", file)

    def open_unchecked(self, digest: str, size: int) -> BinaryIO:
        return cast("BinaryIO", _RemoteBlob(self.repository, digest, size))


class _RemoteBlob(io.RawIOBase):
    """A blob of a registry as a file. Each read is a request for these bytes, which are not checked."""

    def __init__(self, repository: Repository, digest: str, size: int) -> None:
        self._repository, self._digest, self._size = repository, digest, size
        self._position = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        end = self._size if size < 0 else min(self._position + size, self._size)
        content = b""
        if self._position < end:
            content = self._repository.read_range(self._digest, self._position, end)
        self._position += len(content)
        return content


def sources_in_registry(repository: Repository, name: str, folder: Path, arch: str) -> list[RegistrySource]:
    """The images with this tag or digest. Of an index only the image for `arch`, unless that is ALL.

    Raises RegistryError if there is none, VerifyError.
    """
    named = repository.manifest(name)
    if named is None:
        raise RegistryError(f"{repository.name} has no {name}", hint="Check the tag.")
    if named.media_type not in INDEXES:
        return [RegistrySource(manifest=named.content, repository=repository, folder=folder)]
    entries = oci.read_platforms(named.content)
    if arch != ALL and arch not in entries:
        raise RegistryError(
            f"{repository.name} has no {name} for {arch}",
            hint=f"Choose an architecture that it has with --arch: {', '.join(sorted(entries))}.",
        )
    sources = []
    for entry in [entries[arch]] if arch != ALL else entries.values():
        manifest = repository.manifest(entry)
        if manifest is None:
            raise RegistryError(f"{repository.name} has no {entry}, which {name} names", hint="Publish it again.")
        sources.append(
            RegistrySource(manifest=manifest.content, repository=repository, folder=folder, index=named.digest)
        )
    return sources
