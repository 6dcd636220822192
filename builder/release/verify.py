"""Compares an image with the plan: hashes every blob, rebuilds or looks up every layer, compares the configuration.

Wheel layers are rebuilt from the index, the layer of plain files from the checkout; operating system and bytecode are
compared with locks/layers.json and with the store's records of their builds. Parts that cannot be checked on this
machine are `unknown`, which is not a pass, unless a trusted signer signed the image.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from packaging.utils import InvalidWheelFilename, parse_wheel_filename

from builder.common.errors import BuilderError, FetchError, VerifyError
from builder.common.files import digest_of_bytes, short_digest
from builder.common.lock_text import KNOWN_LAYERS
from builder.common.text import listed
from builder.index.download import CONNECTIONS, Fetcher
from builder.index.wheels import LONGEST, LockedWheel
from builder.layers import estargz, oci, splice, stored_layers
from builder.layers.installed import Installed
from builder.layers.oci import Image, Layer, LayerWheels
from builder.layers.splice import SpliceError
from builder.layers.wheel_zip import WheelError
from builder.plan.layer_order import LAYER_FORMAT
from builder.registry.failures import RejectedError
from builder.release import expected
from builder.release.expected import How, PlannedDigests
from builder.release.image_sources import ImageSource

SHOWN = 6  # wheels of a layer that are named
CONFIGURATION = "configuration"  # the name of its finding
OTHER_TOC = "the manifest has the digest of another table of contents for it"
State = Literal["derived", "known", "same", "signed", "unknown", "different", "failed"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The result for the configuration or one layer; `detail` is the reason.

    `derived`: rebuilt with the same bytes. `known`: as in locks/layers.json, or as this store built it. `same`: the
    configuration of the plan, or derived from the parent. `signed`: nothing to compare it with, but a trusted signer
    signed the image. `unknown`: nothing to compare it with on this machine. `failed`: it could not be compared.
    """

    layer: str
    digest: str
    state: State
    detail: str = ""


def wheels_with_index(
    image: Image, planned: PlannedDigests | None, indexes: Mapping[str, str]
) -> dict[str, LockedWheel]:
    """The wheels of an image, by SHA-256, whose index is in the plan or in a signed SBOM (`indexes`, by SHA-256).

    The others are not looked up: anyone can publish a package on the default index with the name of a private one.
    Raises VerifyError for an invalid history.
    """
    try:
        contents = [oci.parse_history(_plain(line)) for line in image.history]
    except ValueError as error:
        raise VerifyError(f"its history cannot be read: {error}") from error
    of_plan = {wheel.sha256: wheel for wheel in planned.image.wheels} if planned else {}
    wheels: dict[str, LockedWheel] = {}
    for file, sha256 in (wheel for layer_wheels in contents if layer_wheels for wheel in layer_wheels.wheels):
        checked = locked_wheel(file, sha256, indexes.get(sha256, ""))
        if sha256 in of_plan or sha256 in indexes:
            wheels[sha256] = of_plan.get(sha256, checked)
    return wheels


def check_configuration(source: ImageSource, planned: PlannedDigests | None, *, is_signed: bool) -> Finding:
    """Compares the configuration with that of the plan; `planned` is None if this checkout has no plan for it."""
    config = source.read_blob(source.image.config.digest)
    if planned is None:
        state: State = "signed" if is_signed else "unknown"
        detail = "" if is_signed else "this checkout has no plan for it"
    else:
        lines = expected.differences(planned, source.image, config)
        state, detail = "different" if lines else "same", _plain("; ".join(lines))
    return Finding(layer=CONFIGURATION, digest=digest_of_bytes(config), state=state, detail=detail)


def check_layers(
    source: ImageSource,
    planned: PlannedDigests | None,
    wheels: Mapping[str, LockedWheel],
    fetcher: Fetcher,
    installed: Installed | None,
    *,
    is_signed: bool,
    fast: bool,
    read: Callable[[int], None],
) -> Iterator[Finding]:
    """A finding for each layer, lowest first.

    `wheels` are those of `wheels_with_index`. `installed` records the packages of the layers. `is_signed`: a trusted
    signer signed the image. `fast` hashes no blobs; `read` gets numbers of bytes that were hashed.
    """
    image = source.image
    history = [_plain(line) for line in image.history]
    contents = [oci.parse_history(line) for line in history]
    obstacles = [_obstacle(layer_wheels, wheels, fetcher) if layer_wheels else "" for layer_wheels in contents]

    # Wheels are fetched while the layers below are checked.
    pool = ThreadPoolExecutor(CONNECTIONS)
    downloads: dict[str, Future[Path]] = {}
    for layer_wheels, obstacle in zip(contents, obstacles, strict=True):
        for _, sha256 in layer_wheels.wheels if layer_wheels and not obstacle else ():
            if sha256 not in downloads:
                downloads[sha256] = pool.submit(fetcher.fetch, wheels[sha256])
    known = planned.layers if planned else {}
    try:
        for number, (layer, line, layer_wheels, obstacle) in enumerate(
            zip(image.layers, history, contents, obstacles, strict=True)
        ):
            name, reason, blob = line[:40], "its blob is missing", None
            state: State
            if source.has_blob(layer.digest):
                reason = "its blob is damaged: the bytes do not match the digest"
                if fast:
                    blob = source.open_unchecked(layer.digest, layer.size)
                else:
                    blob = source.open_layer(layer.digest, layer.size, read)
            if blob is None:
                yield Finding(layer=name, digest=layer.digest, state="different", detail=reason)
                continue
            with blob:
                if installed:
                    installed.add(blob)
                    blob.seek(0)
                name = line
                if layer_wheels:
                    name = listed([file.split("-")[0] for file, _ in layer_wheels.wheels], SHOWN)
                if obstacle:
                    state, detail = ("signed" if is_signed else "unknown"), obstacle
                elif layer_wheels:
                    state, detail = _rebuild(layer, layer_wheels, downloads, blob)
                else:
                    state, detail = _compare(layer, known.get(number))
                    if is_signed and state == "unknown":  # the signature covers what cannot be compared here
                        state, detail = "signed", ""
                if not fast and layer.toc and state not in ("derived", "different"):
                    # A node with a snapshotter mounts the files that the table of contents describes, not those of the
                    # tar. A layer with the bytes of its wheels has their table.
                    blob.seek(0)
                    try:
                        estargz.check_layer(blob, layer.toc)
                    except VerifyError as error:
                        state, detail = "different", _plain(str(error))
                yield Finding(layer=name, digest=layer.digest, state=state, detail=detail)
    finally:
        fetcher.stop()
        pool.shutdown(wait=False, cancel_futures=True)
        for wheel in wheels.values():
            fetcher.drop(wheel)


def _plain(text: str) -> str:
    """Text without terminal control characters and characters that cannot be printed."""
    return "".join(letter if letter.isprintable() else "\ufffd" for letter in text)


def _obstacle(layer_wheels: LayerWheels, wheels: Mapping[str, LockedWheel], fetcher: Fetcher) -> str:
    """The reason that a layer's wheels cannot be fetched on this machine, or an empty string."""
    if unlisted := [file for file, sha256 in layer_wheels.wheels if sha256 not in wheels]:
        return f"not rebuilt: neither the plan nor a signed SBOM names the index of {listed(unlisted, SHOWN)}"
    indexes = {wheels[sha256].index for _, sha256 in layer_wheels.wheels if not wheels[sha256].source}
    if unknown := sorted(index for index in indexes if index and not fetcher.has_index(index)):
        options = " ".join(f"--index {index}=URL" for index in unknown)
        return f"not rebuilt without the address of the index {', '.join(unknown)}: add {options}"
    return ""


def locked_wheel(file: str, sha256: str, index: str = "") -> LockedWheel:
    """A wheel in the history of an image. Raises VerifyError."""
    try:
        if len(file) > LONGEST:
            raise InvalidWheelFilename(f"{len(file)} characters")
        name, version, _, _ = parse_wheel_filename(file)
        return LockedWheel(name=name, version=str(version), file=file, size=0, sha256=sha256, index=index)
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


def _rebuild(
    layer: Layer, layer_wheels: LayerWheels, downloads: Mapping[str, Future[Path]], blob: BinaryIO
) -> tuple[State, str]:
    """State and detail of a layer of wheels. Reads the table of contents at the end of `blob`.

    The history does not have the order of the files, which depends on those that are prefetched; the table has it.
    With the order, the wheels determine every byte of the layer.
    """
    if (form := layer_wheels.format) != LAYER_FORMAT:
        return "failed", f"its layer format is {form}, this builder's is {LAYER_FORMAT}: use the one that built it"
    try:
        prefetch = estargz.prefetched(blob)
    except VerifyError:  # its bytes are compared anyway
        prefetch = frozenset()
    except RejectedError as error:
        return "failed", f"{error}: run this without --fast"
    try:
        files = [(file, downloads[sha256].result()) for file, sha256 in layer_wheels.wheels]
        with Path(os.devnull).open("wb") as discarded:
            entries = stored_layers.wheel_entries(files, layer_wheels.python, prefetch, warn=lambda _: None)
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


def verdict(image: str, findings: Sequence[Finding], *, allow_unknown: bool) -> BuilderError | None:
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
