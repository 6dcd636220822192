"""An image that packages are put on: what resolving and assembling must know, read from the image alone.

Reads the manifest, the configuration, the table of contents of each layer and a few small files. Downloads no layer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import get_args

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from builder.common.errors import VerifyError
from builder.index.wheels import KeptWheel, LockedWheel
from builder.layers import estargz, installed, wheel
from builder.layers.estargz import TocEntry
from builder.layers.installed import InstalledPackage
from builder.layers.oci import Image, Layer
from builder.matrix.schema import Arch
from builder.matrix.tags import LABEL
from builder.plan.layer_order import LAYER_FORMAT
from builder.plan.settings import CONSTRAINTS
from builder.registry.parallel import look_up
from builder.release.image_sources import ImageSource

LONGEST_FILE = 16 << 20  # bytes of a file that is read whole
_INFO = re.compile(rf"{wheel.environment('').site}/([^/]+)-[^/-]+\.dist-info/METADATA")
_OTHER = "Name an image that `builder` made. Packages go on any other image by a Dockerfile."


@dataclass(frozen=True, kw_only=True)
class Parent:
    """An image of builder. `tocs` are the files of its layers, lowest first, `packages` its wheels by name.

    `config` is its configuration, `constraints` are those that pip and uv have in the image.
    """

    source: ImageSource
    config: bytes
    tocs: Sequence[tuple[TocEntry, ...]]
    packages: Mapping[str, LockedWheel]
    python: str
    arch: Arch

    @property
    def image(self) -> Image:
        return self.source.image

    @property
    def framework(self) -> str:
        """The framework with its version: torch 2.9.1; empty if the image has none."""
        names = (self.image.labels.get(f"{LABEL}.framework", ""), "torch", "tensorflow", "jax")
        found = next((self.packages[name] for name in names if name in self.packages), None)
        return f"{found.name} {found.version}" if found else ""

    @cached_property
    def files(self) -> Mapping[str, tuple[Layer, TocEntry]]:
        """What the image has at each path, folders too: the entry of the highest layer."""
        layers = zip(self.image.layers, self.tocs, strict=True)
        return {
            entry.name.rstrip("/"): (layer, entry) for layer, toc in layers for entry in toc if entry.type != "chunk"
        }

    @cached_property
    def debian(self) -> set[InstalledPackage]:
        """The Debian packages of the image. Raises VerifyError."""
        try:
            return installed.debian_packages(self.read_file(installed.DPKG))
        except ValueError as error:
            raise VerifyError(f"{installed.DPKG} of the image is invalid: {error}", hint=_OTHER) from error

    @cached_property
    def glibc(self) -> str:
        """The version of the image's C library, such as 2.36. Raises VerifyError."""
        version = next((package.version for package in self.debian if package.name == "libc6"), "")
        if not (match := re.match(r"2\.[0-9]{1,3}(?![0-9])", version)):
            raise VerifyError(f"{installed.DPKG} of the image has no valid version of libc6", hint=_OTHER)
        return match[0]

    @cached_property
    def constraints(self) -> list[str]:
        """The constraints of pip and uv in the image. Raises VerifyError for anything but requirements."""
        if CONSTRAINTS.lstrip("/") not in self.files:
            return []
        text = self.read_file(CONSTRAINTS.lstrip("/")).decode("utf-8", "replace")
        lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        try:
            if any(Requirement(line).url for line in lines):
                raise InvalidRequirement("an address")
        except InvalidRequirement as error:
            raise VerifyError(f"{CONSTRAINTS} of the image is invalid: {error}", hint=_OTHER) from error
        return lines

    @cached_property
    def kept(self) -> KeptWheels:
        return KeptWheels(self)

    def read_file(self, path: str) -> bytes:
        """A small file of the image, checked. Raises VerifyError."""
        layer, entry = self.files.get(path, (None, None))
        if layer is None or entry is None or entry.type != "reg" or entry.size > LONGEST_FILE:
            raise VerifyError(f"the image has no file /{path} that can be read", hint=_OTHER)
        with self.source.open_unchecked(layer.digest, layer.size) as blob:
            return estargz.read_content(blob, entry)


@dataclass(frozen=True)
class KeptWheels(Mapping[str, KeptWheel]):
    """The wheels of a parent by name. uv gets their metadata from the image, when it asks for it.

    So uv can choose no other version of a package that the parent has, wherever its wheel came from.
    """

    parent: Parent
    _read: dict[str, KeptWheel] = field(default_factory=dict)

    def __contains__(self, name: object) -> bool:
        return name in self.parent.packages

    def __getitem__(self, name: str) -> KeptWheel:
        if name not in self._read:
            wheel = self.parent.packages[name]
            if name not in self._metadata:
                raise VerifyError(f"the image has no METADATA of {name}", hint=_OTHER)
            metadata = self.parent.read_file(self._metadata[name])
            self._read[name] = KeptWheel(wheel=wheel, metadata=metadata)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.parent.packages)

    def __len__(self) -> int:
        return len(self.parent.packages)

    @cached_property
    def _metadata(self) -> Mapping[str, str]:
        """The path of the METADATA of each package."""
        found = ((_INFO.fullmatch(path), path) for path in self.parent.files)
        return {canonicalize_name(match[1]): path for match, path in found if match}


def read_parent(source: ImageSource) -> Parent:
    """Raises VerifyError for an image that `builder` did not make, or that an older one made."""
    image = source.image
    python = image.labels.get(f"{LABEL}.python", "")
    content = source.read_blob(image.config.digest)
    config = json.loads(content)
    of_wheels = [layer_wheels for layer_wheels in source.contents if layer_wheels]
    if not of_wheels or not re.fullmatch(r"3\.[0-9]{1,2}", python) or not all(layer.toc for layer in image.layers):
        raise VerifyError("builder did not make the image: it has no history of wheels, or other layers", hint=_OTHER)
    if older := [each.format for each in of_wheels if each.format != LAYER_FORMAT]:
        raise VerifyError(
            f"its layer format is {older[0]}, this builder's is {LAYER_FORMAT}",
            hint="Use a release of the image that this version of builder made, or the version that made this one.",
        )
    inner = config.get("config")
    variables = (inner.get("Env") or []) if isinstance(inner, dict) else None
    is_valid = isinstance(variables, list) and all(isinstance(each, str) for each in variables)
    if config.get("architecture") not in get_args(Arch) or not is_valid:
        raise VerifyError("its configuration is not one that builder writes", hint=_OTHER)

    def read_toc(layer: Layer) -> tuple[TocEntry, ...]:
        with source.open_unchecked(layer.digest, layer.size) as blob:
            return estargz.read_toc(blob, layer.toc)

    return Parent(
        source=source,
        config=content,
        tocs=[toc for _, toc in look_up(read_toc, image.layers)],
        packages={each.name: each for each in source.wheels},
        python=python,
        arch=config["architecture"],
    )
