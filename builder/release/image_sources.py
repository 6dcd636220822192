"""An image to be read, and access to its blobs: in the store, or in a repository of a registry."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO, cast

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from builder.common.errors import RegistryError, UsageError, VerifyError
from builder.common.reference import ImageRef
from builder.common.text import listed
from builder.engine.run import Run
from builder.index.wheels import LONGEST, LockedWheel
from builder.layers import oci, stored_images
from builder.layers.oci import Image, LayerWheels
from builder.layers.store import Store
from builder.matrix import tags
from builder.matrix.tags import CELL_LABEL
from builder.registry.client import INDEXES, Repository

ALL = "all"  # architectures


@dataclass(frozen=True, kw_only=True)
class ImageSource(ABC):
    """An image by its manifest. Subclasses read its blobs."""

    manifest: bytes

    @cached_property
    def image(self) -> Image:
        """The image with its layers, history and labels. Raises VerifyError if it is invalid."""
        return oci.read_image(self.manifest, self.read_blob)

    @cached_property
    def contents(self) -> list[LayerWheels | None]:
        """The wheels of each layer by the history of the image. Raises VerifyError."""
        try:
            return [oci.parse_history(line) for line in self.image.history]
        except ValueError as error:
            raise VerifyError(f"its history cannot be read: {error}") from error

    @property
    def wheels(self) -> list[LockedWheel]:
        """The wheels of all layers, without sizes. Raises VerifyError."""
        return [_locked_wheel(*wheel) for content in self.contents if content for wheel in content.wheels]

    @property
    def cell(self) -> str:
        """The id of the cell in the labels of the image, empty if they name none. Raises VerifyError."""
        return self.image.labels.get(CELL_LABEL, "")

    @abstractmethod
    def read_blob(self, digest: str) -> bytes:
        """A small blob, such as the configuration."""

    @abstractmethod
    def open_unchecked(self, digest: str, size: int) -> BinaryIO:
        """A blob as a file, of which nothing is read and checked yet."""


@dataclass(frozen=True, kw_only=True)
class StoredSource(ImageSource):
    """An image of a store."""

    store: Store

    def read_blob(self, digest: str) -> bytes:
        return self.store.read(digest)

    def open_unchecked(self, digest: str, size: int) -> BinaryIO:
        return self.store.path(digest).open("rb")


@dataclass(frozen=True, kw_only=True)
class RegistrySource(ImageSource):
    """An image in a registry. `index` is the digest of the image index that names the image, empty without one."""

    repository: Repository
    index: str = ""

    def read_blob(self, digest: str) -> bytes:
        return self.repository.read_blob(digest)

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


def find_images(run: Run, reference: ImageRef, arch: str) -> Sequence[ImageSource]:
    """The images that a reference names: in its registry (`sources_in_registry`), or one image of the store.

    In the store, the reference is a name, a cell id or a tag. Raises UsageError if the store has no such image.
    """
    if reference.registry:
        repository = Repository(reference, host=run.host, write=False)
        return sources_in_registry(repository, reference.target, arch)
    stored, project = run.store.images(), run.checkout
    local_names = tags.local_names(project.matrix, project.cells) if project else {}
    if matches := stored_images.match_names(stored, str(reference), local_names):
        return [StoredSource(manifest=run.store.read(stored[matches[0]].digest), store=run.store)]
    raise UsageError(
        f"the store {run.store.root} has no image {str(reference)!r}",
        hint=f"Images in the store: {listed(sorted(stored), 5) or 'none'}; `builder gc --dry-run` lists all. For an "
        "image in a registry, use REGISTRY/NAME:TAG.",
    )


def sources_in_registry(repository: Repository, name: str, arch: str) -> list[RegistrySource]:
    """The images with this tag or digest. Of an index only the image for `arch`, unless that is ALL.

    Raises RegistryError if there is none, VerifyError.
    """
    named = repository.manifest(name)
    if named is None:
        raise RegistryError(f"{repository.name} has no {name}", hint="Check the tag.")
    if named.media_type not in INDEXES:
        return [RegistrySource(manifest=named.content, repository=repository)]
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
        sources.append(RegistrySource(manifest=manifest.content, repository=repository, index=named.digest))
    return sources


def _locked_wheel(file: str, sha256: str) -> LockedWheel:
    """A wheel that a history names. Raises VerifyError."""
    try:
        if len(file) > LONGEST:
            raise InvalidWheelFilename(f"{len(file)} characters")
        name, version, _, _ = parse_wheel_filename(file)
        return LockedWheel(name=name, version=str(version), file=file, size=0, sha256=sha256)
    except (InvalidWheelFilename, ValueError) as error:
        raise VerifyError(f"invalid wheel name in its history: {file[:100]!r}") from error
