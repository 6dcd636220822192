"""An image that packages are put on: what resolving and assembling must know, read from the image alone.

Reads the manifest, the configuration, the table of contents of each layer and a few small files. Downloads no layer.
"""

from __future__ import annotations

import csv
import json
import posixpath
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar, get_args

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from builder.common.errors import VerifyError
from builder.debian import control_files
from builder.debian.control_files import InstalledPackage
from builder.index.wheels import InstalledWheel, LockedWheel
from builder.layers import estargz, wheel
from builder.layers.estargz import TocEntry
from builder.layers.oci import Image, Layer
from builder.matrix.schema import Arch
from builder.matrix.tags import LABEL
from builder.plan.layer_order import LAYER_FORMAT
from builder.plan.settings import CONSTRAINTS
from builder.registry.transfer import map_parallel
from builder.release.image_sources import ImageSource

LONGEST_FILE = 16 << 20  # bytes of a file that is read whole
WHITEOUT = ".wh."  # before a name: hides this path of lower layers. OCI image specification, "Whiteouts"
_SITE = wheel.SITE
_INFO = re.compile(rf"({_SITE}/([^/]+)-[^/-]+\.dist-info)/METADATA")
_BYTECODE = re.compile(r"__pycache__/([^/]+)\.cpython-[0-9]+(\.opt-[12])?\.pyc")
_File = TypeVar("_File")
_OTHER = "Name an image that `builder` made. Packages go on any other image by a Dockerfile."


@dataclass(frozen=True, kw_only=True)
class Parent:
    """An image of builder. `config` is its configuration, `packages` are its wheels by name."""

    source: ImageSource
    config: bytes
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
        """What the image has at each path, folders too: the entry of the highest layer. Raises VerifyError."""
        files: dict[str, tuple[Layer, TocEntry]] = {}
        for layer, toc in map_parallel(self._read_toc, self.image.layers):
            files = without(files, hidden_paths(toc))
            named = ((entry.name.rstrip("/"), entry) for entry in toc if entry.type != "chunk")
            files |= {path: (layer, entry) for path, entry in named if f"/{WHITEOUT}" not in f"/{path}"}
        return files

    def _read_toc(self, layer: Layer) -> tuple[TocEntry, ...]:
        with self.source.open_unchecked(layer.digest, layer.size) as blob:
            return estargz.read_toc(blob, layer.toc)

    def held(self, *, keep: bool) -> set[str]:
        """The packages whose version stays: those in the constraints, and pre-releases; all, to `keep` them."""
        constrained = {canonicalize_name(Requirement(line).name) for line in self.constraints}
        return {
            name
            for name, wheel in self.packages.items()
            if keep or name in constrained or Version(wheel.version).is_prerelease
        }

    def own_paths(self, names: Collection[str]) -> set[str]:
        """The paths to hide if other versions replace these packages: files, their bytecode, and whole folders.

        Never a file that another package has too, or that is not in a layer of wheels: a RECORD can name any path.
        Raises VerifyError.
        """
        records = dict(map_parallel(self._recorded, list(self.packages)))
        others = {path for name, files in records.items() if name not in names for path in files}
        recorded = {path for name in names for path in records[name]} - others
        lines = zip(self.image.layers, self.image.history, strict=True)
        of_wheels = {layer.digest for layer, line in lines if line.startswith("wheels ") or line.endswith(" bytecode")}
        own, kept = set[str](), set[str]()
        for path, (layer, entry) in self.files.items():
            source = _BYTECODE.sub(r"\1.py", path)
            if source in recorded and layer.digest in of_wheels:
                own.add(path)
            elif entry.type != "dir":
                kept.update(_folders(path))
        # Whole folders: importlib takes an empty .dist-info for a package, and an empty folder for a namespace.
        return {next((folder for folder in _folders(path) if folder not in kept), path) for path in own}

    def _recorded(self, name: str) -> set[str]:
        """The paths in the RECORD of a package."""
        text = self._read_info(name, "RECORD").decode("utf-8", "replace")
        return {posixpath.normpath(f"{_SITE}/{row[0]}") for row in csv.reader(text.splitlines()) if row}

    @cached_property
    def debian(self) -> set[InstalledPackage]:
        """The Debian packages of the image. Raises VerifyError."""
        try:
            return control_files.installed_packages(self.read_file(control_files.DPKG))
        except ValueError as error:
            raise VerifyError(f"{control_files.DPKG} of the image is invalid: {error}", hint=_OTHER) from error

    @cached_property
    def glibc(self) -> str:
        """The version of the image's C library, such as 2.36. Raises VerifyError."""
        version = next((package.version for package in self.debian if package.name == "libc6"), "")
        if not (match := re.match(r"2\.[0-9]{1,3}(?![0-9])", version)):
            raise VerifyError(f"{control_files.DPKG} of the image has no valid version of libc6", hint=_OTHER)
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
    def installed(self) -> Mapping[str, InstalledWheel]:
        """The wheels by name, wherever they came from, for uv."""
        return {
            name: InstalledWheel(wheel=wheel, read=partial(self._read_info, name, "METADATA"))
            for name, wheel in self.packages.items()
        }

    @cached_property
    def _infos(self) -> Mapping[str, str]:
        """The .dist-info folder of each package."""
        matches = (_INFO.fullmatch(path) for path in self.files)
        return {canonicalize_name(match[2]): match[1] for match in matches if match}

    def _read_info(self, name: str, file: str) -> bytes:
        """A file about a package. Raises VerifyError."""
        return self.read_file(f"{self._infos.get(name, name)}/{file}")

    def read_file(self, path: str) -> bytes:
        """A small file of the image, checked. Raises VerifyError."""
        layer, entry = self.files.get(path, (None, None))
        if layer is None or entry is None or entry.type != "reg" or entry.size > LONGEST_FILE:
            raise VerifyError(f"the image has no file /{path} that can be read", hint=_OTHER)
        with self.source.open_unchecked(layer.digest, layer.size) as blob:
            return estargz.read_content(blob, entry)


def hidden_paths(toc: Iterable[TocEntry]) -> set[str]:
    """The paths of lower layers that the whiteouts of a layer hide."""
    parts = (entry.name.rpartition("/") for entry in toc)
    return {f"{folder}{slash}{name[4:]}" for folder, slash, name in parts if name.startswith(WHITEOUT)}


def without(files: Mapping[str, _File], hidden: set[str]) -> dict[str, _File]:
    """The files that are at none of the hidden paths, and below none."""
    if not hidden:
        return dict(files)
    return {path: file for path, file in files.items() if hidden.isdisjoint([path, *_folders(path)])}


def _folders(path: str) -> list[str]:
    """The folders above a path, the outermost first."""
    parts = path.split("/")
    return ["/".join(parts[:number]) for number in range(1, len(parts))]


def read_parent(source: ImageSource) -> Parent:
    """Raises VerifyError for an image that `builder` did not make, or that an older one made."""
    image = source.image
    python = image.labels.get(f"{LABEL}.python", "")
    content = source.read_blob(image.config.digest)
    config = json.loads(content)
    of_wheels = [layer_wheels for layer_wheels in source.contents if layer_wheels]
    if not of_wheels or not re.fullmatch(r"3\.[0-9]{1,2}", python) or not all(layer.toc for layer in image.layers):
        raise VerifyError("builder did not make the image: it has no history of wheels, or other layers", hint=_OTHER)
    if older := [layer_wheels.format for layer_wheels in of_wheels if layer_wheels.format != LAYER_FORMAT]:
        raise VerifyError(
            f"its layer format is {older[0]}, this builder's is {LAYER_FORMAT}",
            hint="Use a release of the image that this version of builder made, or the version that made this one.",
        )
    inner = config.get("config")
    variables = (inner.get("Env") or []) if isinstance(inner, dict) else None
    is_valid = isinstance(variables, list) and all(isinstance(variable, str) for variable in variables)
    if config.get("architecture") not in get_args(Arch) or not is_valid:
        raise VerifyError("its configuration is not one that builder writes", hint=_OTHER)

    return Parent(
        source=source,
        config=content,
        packages={package.name: package for package in source.wheels},
        python=python,
        arch=config["architecture"],
    )
