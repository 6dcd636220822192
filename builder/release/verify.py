"""Checks that an image matches the plan: hashes every blob, rebuilds or looks up every layer, compares the rest.

Works on images of the store and of a registry. Wheel layers are rebuilt from the index, the layer of plain files from
the checkout; operating system and bytecode are compared with locks/layers.json and with the store's records of their
builds. Parts that cannot be checked on this machine are `unknown`, which is not a pass, unless a trusted signer signed
the image.
"""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, Literal, cast

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from builder.common.errors import BuilderError, FetchError, RegistryError, VerifyError
from builder.common.files import digest_of_bytes, short_digest
from builder.common.lock_text import KNOWN_LAYERS
from builder.common.text import listed
from builder.index.download import CONNECTIONS, Fetcher
from builder.index.wheels import LONGEST, LockedWheel, Wheel
from builder.layers import estargz, oci, splice, stored_layers
from builder.layers.oci import Layer, LayerWheels
from builder.layers.splice import SpliceError
from builder.layers.store import Store
from builder.layers.wheel_zip import WheelError
from builder.matrix.tags import CELL_LABEL
from builder.plan.layer_order import LAYER_FORMAT
from builder.registry.client import INDEXES, Manifest, Repository
from builder.registry.failures import RejectedError
from builder.release import expected
from builder.release.expected import How, PlannedDigests

SHOWN = 6  # wheels of a layer that are named
ALL = "all"  # architectures
CONFIGURATION = "configuration"  # the name of its finding
OTHER_TOC = "the manifest has the digest of another table of contents for it"
State = Literal["derived", "known", "same", "signed", "unknown", "different", "failed"]


@dataclass(frozen=True, kw_only=True)
class ImageSource:
    """An image in a store or a registry: its manifest, and access to its blobs by digest.

    `index` is the digest of the index that names it, empty without one. `open_layer` returns a blob of this digest and
    size as a file, None if its bytes do not match them. It calls its last argument with numbers of bytes read.
    `open_unchecked` returns a blob without reading it; from a registry, it downloads only the parts that are read.
    """

    manifest: bytes
    read_blob: Callable[[str], bytes]
    has_blob: Callable[[str], bool]
    open_layer: Callable[[str, int, Callable[[int], None]], BinaryIO | None]
    open_unchecked: Callable[[str, int], BinaryIO]
    index: str = ""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result for the configuration or one layer; `detail` is the reason.

    `derived`: rebuilt with the same bytes. `known`: as in locks/layers.json, or as this store built it. `same`: the
    configuration of the plan. `signed`: nothing to compare it with, but a trusted signer signed the image. `unknown`:
    nothing to compare it with on this machine. `failed`: it could not be compared.
    """

    layer: str
    digest: str
    state: State
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Check:
    """How an image is checked.

    `expected` is the image of the plan, None without a plan. `is_signed`: a trusted signer signed the image. `fast`
    hashes no blobs. `indexes` are the names of the indexes of wheels, by SHA-256, from a signed SBOM; empty for the
    default index.
    """

    fetcher: Fetcher
    expected: PlannedDigests | None = None
    is_signed: bool = False
    fast: bool = False
    read: Callable[[int], None] = lambda _: None
    indexes: Mapping[str, str] = field(default_factory=dict)


def verify_image(source: ImageSource, check: Check) -> Iterator[Finding]:
    """Findings for the configuration and for each layer, lowest first.

    Without a plan and a trusted signature, yields only the finding for the configuration, which is a failure: an
    unknown author would choose the downloads. Raises VerifyError for an invalid image.
    """
    image = oci.read_image(source.manifest, source.read_blob)
    history = [_plain(line) for line in image.history]
    try:
        contents = [oci.parse_history(line) for line in history]
    except ValueError as error:
        raise VerifyError(f"its history cannot be read: {error}") from error
    wheels = _wheels(contents, check)
    obstacles = [_obstacle(of, wheels, check.fetcher) if of else "" for of in contents]
    needed = {
        sha256
        for of, obstacle in zip(contents, obstacles, strict=True)
        if of and not obstacle
        for _, sha256 in of.wheels
    }

    config, state, lines = source.read_blob(image.config.digest), "unknown", ["this checkout has no plan for it"]
    if check.expected is not None:
        lines = expected.differences(check.expected, source.manifest, config)
        state = "different" if lines else "same"
    yield _finding(check, CONFIGURATION, digest_of_bytes(config), cast("State", state), _plain("; ".join(lines)))
    if check.expected is None and not check.is_signed:
        return

    known = check.expected.layers if check.expected else {}
    pool = ThreadPoolExecutor(CONNECTIONS)  # wheels are fetched while the layers below are checked
    downloads = {
        sha256: pool.submit(check.fetcher.fetch, wheel) for sha256, wheel in wheels.items() if sha256 in needed
    }
    try:
        for number, (layer, line, of, obstacle) in enumerate(
            zip(image.layers, history, contents, obstacles, strict=True)
        ):
            if not source.has_blob(layer.digest):
                yield _finding(check, line[:40], layer.digest, "different", "its blob is missing")
                continue
            if check.fast:
                blob: BinaryIO | None = source.open_unchecked(layer.digest, layer.size)
            else:
                blob = source.open_layer(layer.digest, layer.size, check.read)
            if blob is None:
                reason = "its blob is damaged: the bytes do not match the digest"
                yield _finding(check, line[:40], layer.digest, "different", reason)
                continue
            with blob:
                name = listed([file.split("-")[0] for file, _ in of.wheels], SHOWN) if of else line
                result: tuple[State, str]
                if obstacle:
                    result = "signed" if check.is_signed else "unknown", obstacle
                else:
                    result = _rebuild(layer, of, downloads, blob) if of else _compare(layer, known.get(number))
                if not check.fast and layer.toc and result[0] not in ("derived", "different"):
                    # A node with a snapshotter mounts the files that the table of contents describes, not those of the
                    # tar. A layer with the bytes of its wheels has their table.
                    blob.seek(0)
                    try:
                        estargz.check_layer(blob, layer.toc)
                    except VerifyError as error:
                        result = "different", _plain(str(error))
                yield _finding(check, name, layer.digest, *result)
    finally:
        check.fetcher.stop()
        pool.shutdown(wait=False, cancel_futures=True)
        for wheel in wheels.values():
            check.fetcher.drop(wheel)


def _finding(check: Check, layer: str, blob: str, state: State, detail: str) -> Finding:
    """A finding; a trusted signature covers what is unknown here."""
    if check.is_signed and state == "unknown":
        state, detail = "signed", ""
    return Finding(layer=layer, digest=blob, state=state, detail=detail)


def cell_of(source: ImageSource) -> str:
    """The id of the cell in an image's labels, empty if they name none. Raises VerifyError."""
    return oci.read_image(source.manifest, source.read_blob).labels.get(CELL_LABEL, "")


def _plain(text: str) -> str:
    """Text without terminal control characters and characters that cannot be printed."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _wheels(contents: Sequence[LayerWheels | None], check: Check) -> dict[str, Wheel]:
    """The wheels of an image, by SHA-256, whose index is in the plan or in a signed SBOM.

    The others are not looked up: anyone can publish a package on the default index with the name of a private one.
    Raises VerifyError for an invalid name.
    """
    planned = {wheel.sha256: wheel for wheel in check.expected.image.wheels} if check.expected else {}
    wheels: dict[str, Wheel] = {}
    for file, sha256 in (wheel for of in contents if of for wheel in of.wheels):
        checked = _wheel(file, sha256, check.indexes.get(sha256, ""))
        if sha256 in planned or sha256 in check.indexes:
            wheels[sha256] = planned.get(sha256, checked)
    return wheels


def _obstacle(of: LayerWheels, wheels: Mapping[str, Wheel], fetcher: Fetcher) -> str:
    """The reason why a layer's wheels cannot be fetched on this machine; empty if they can."""
    if unlisted := [file for file, sha256 in of.wheels if sha256 not in wheels]:
        return f"not rebuilt: neither the plan nor a signed SBOM names the index of {listed(unlisted, SHOWN)}"
    indexes = {wheels[sha256].index for _, sha256 in of.wheels if not wheels[sha256].source}
    if unknown := sorted(index for index in indexes if index and not fetcher.has_index(index)):
        options = " ".join(f"--index {index}=URL" for index in unknown)
        return f"not rebuilt without the address of the index {', '.join(unknown)}: add {options}"
    return ""


def _wheel(file: str, sha256: str, index: str) -> Wheel:
    try:
        if len(file) > LONGEST:
            raise InvalidWheelFilename(f"{len(file)} characters")
        name, version, _, _ = parse_wheel_filename(file)
        checked = LockedWheel(name=name, version=str(version), file=file, size=0, sha256=sha256, index=index)
        return Wheel(component="none", **checked.__dict__)
    except (InvalidWheelFilename, ValueError) as error:
        raise VerifyError(f"invalid wheel name in its history: {file[:100]!r}") from error


def _compare(layer: Layer, expected_layer: tuple[Layer, How] | None) -> tuple[State, str]:
    """State and detail of a layer without wheels."""
    if expected_layer is None:
        return "unknown", f"neither {KNOWN_LAYERS} nor this store has a record of it"
    known, how = expected_layer
    if known.digest != layer.digest:
        if how == "built":  # perhaps from other Debian packages
            return "unknown", f"this store has {short_digest(known.digest)} instead"
        return "different", f"expected {short_digest(known.digest)}"
    if known.diff_id != layer.diff_id:
        return "different", "the configuration has another diff id for it"
    if known.toc != layer.toc:
        return "different", OTHER_TOC
    return "derived" if how == "derived" else "known", ""


def _rebuild(layer: Layer, of: LayerWheels, downloads: Mapping[str, Future[Path]], blob: BinaryIO) -> tuple[State, str]:
    """State and detail of a layer of wheels. Reads the table of contents at the end of `blob`.

    The history does not have the order of the files, which depends on those that are prefetched; the table has it.
    With the order, the wheels determine every byte of the layer.
    """
    if of.format != LAYER_FORMAT:
        return "failed", f"its layer format is {of.format}, this builder's is {LAYER_FORMAT}: use the one that built it"
    try:
        prefetch = estargz.prefetched(blob)
    except VerifyError:  # its bytes are compared anyway
        prefetch = frozenset()
    except RejectedError as error:
        return "failed", f"{error}: run this without --fast"
    try:
        files = [(file, downloads[sha256].result()) for file, sha256 in of.wheels]
        with Path(os.devnull).open("wb") as discarded:
            entries = stored_layers.wheel_entries(files, of.python, prefetch, warn=lambda _: None)
            derived = splice.write_layer(entries, discarded)
    except (WheelError, SpliceError) as error:
        return "different", str(error)
    except FetchError as error:
        return "failed", f"{error}. {error.hint}" if error.hint else str(error)
    except FileNotFoundError as error:  # another builder may have removed it from the store
        return "failed", str(error)
    if (derived.digest, derived.diff_id) != (layer.digest, layer.diff_id):
        return "different", f"its wheels produce {short_digest(derived.digest)}"
    if derived.toc != layer.toc:
        return "different", OTHER_TOC
    return "derived", ""


def source_in_store(store: Store, manifest: str) -> ImageSource:
    """The image of a store with this manifest. Raises DamagedError if the manifest is missing."""
    return ImageSource(
        manifest=store.read(manifest),
        read_blob=store.read,
        has_blob=lambda blob: store.path(blob).exists(),
        open_layer=lambda blob, size, read: (
            store.path(blob).open("rb") if store.has(blob, size) and store.matches(blob, read) else None
        ),
        open_unchecked=lambda blob, _: store.path(blob).open("rb"),
    )


def sources_in_registry(repository: Repository, name: str, folder: Path, arch: str) -> list[ImageSource]:
    """The images with this tag or digest; downloads layers to `folder`. Of an index only the image for `arch`, unless
    that is ALL. Raises RegistryError if there is none, VerifyError.
    """
    named = repository.manifest(name)
    if named is None:
        raise RegistryError(f"{repository.name} has no {name}", hint="Check the tag.")
    if named.media_type not in INDEXES:
        return [_source(repository, named, folder)]
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
        sources.append(_source(repository, manifest, folder, index=named.digest))
    return sources


def _source(repository: Repository, manifest: Manifest, folder: Path, index: str = "") -> ImageSource:

    def open_layer(digest: str, size: int, read: Callable[[int], None]) -> BinaryIO | None:
        file = TemporaryFile(dir=folder)  # noqa: SIM115  the caller closes it
        try:
            repository.download(digest, size, file, read)
        except RejectedError:
            file.close()
            return None
        except BaseException:
            file.close()
            raise
        file.seek(0)
        return cast("BinaryIO", file)

    return ImageSource(
        manifest=manifest.content,
        read_blob=cache(repository.read_blob),
        has_blob=repository.has_blob,
        open_layer=open_layer,
        open_unchecked=lambda digest, size: cast("BinaryIO", _RemoteBlob(repository, digest, size)),
        index=index,
    )


class _RemoteBlob(io.RawIOBase):
    """A blob of a registry as a file. Each read is a request for these bytes, which are not checked."""

    def __init__(self, repository: Repository, digest: str, size: int) -> None:
        self._registry, self._digest, self._size = repository, digest, size
        self._position = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        return self._position

    def read(self, size: int = -1, /) -> bytes:
        end = self._size if size < 0 else min(self._position + size, self._size)
        content = b""
        if self._position < end:
            content = self._registry.read_range(self._digest, self._position, end)
        self._position += len(content)
        return content


def failure(image: str, findings: Sequence[Finding], *, allow_unknown: bool) -> BuilderError | None:
    """The error unless every part was checked and matches; `allow_unknown` accepts layers that could not be."""
    counts = Counter(finding.state for finding in findings)
    if count := counts["different"]:
        return VerifyError(
            f"{image}: {count} of {len(findings)} parts are not as expected",
            hint="Do not use this image until you know who built it and why it differs.",
        )
    # The exit code distinguishes an index that does not respond from an image that was tampered with.
    if count := counts["failed"]:
        return FetchError(
            f"{image}: {count} of {len(findings)} parts could not be compared; the others match",
            hint="See the lines above. If the index did not respond, run this again. If a layer has "
            "another format, use the revision of builder that made the image.",
        )
    # The configuration sets the user and the command, so it is never accepted without a plan or a signature.
    if any(finding.state == "unknown" and finding.layer == CONFIGURATION for finding in findings):
        return VerifyError(
            f"{image}: no plan to compare its configuration with",
            hint="Run this in the checkout that built it, with its cell locked, or check its signature with --key.",
        )
    if (count := counts["unknown"]) and not allow_unknown:
        return VerifyError(
            f"{image}: {count} of {len(findings)} parts cannot be checked on this machine",
            hint="Build the image here with `builder build`, or accept these parts with --allow-unknown.",
        )
    if not counts["derived"] and not counts["signed"]:
        return VerifyError(f"{image}: no layer could be rebuilt", hint="Check that `builder` built this image.")
    return None
