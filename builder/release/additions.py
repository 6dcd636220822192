"""The requests of `builder add`, read from the command line, a team's file or the label of an image.

Requirements are read as pip does, but only packages of an index are allowed. Source: pip documentation, "Requirements
File Format"; PEP 508.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, PlainSerializer

from builder.common import strict_yaml, validation
from builder.common.errors import LockError, UsageError, VerifyError, of_file
from builder.common.files import SHA256_HEX
from builder.common.reference import ImageRef
from builder.index.wheels import LockedWheel
from builder.layers import oci
from builder.matrix.schema import Arch, StrictModel
from builder.matrix.tags import ADDED_LABEL, CELL_LABEL, OCI, PARENT_CELL_LABEL, PARENT_LABEL, PLAN_LABEL
from builder.plan.settings import FIXED
from builder.release.parent import Parent

BASE_NAME = f"{OCI}.base.name"
# They describe the image of the parent alone. GPU checks need the other ones.
OF_PARENT = (
    CELL_LABEL,
    PLAN_LABEL,
    *(f"{OCI}.{name}" for name in ("title", "version", "source", "url", "documentation")),
)
LONGEST = 4000  # characters of a requirement; packaging fails for longer numbers
_COMMENT = re.compile(r"(^|\s)#.*$")
_HASH = re.compile(rf"--hash[=\s]\s*sha256:({SHA256_HEX})", re.ASCII)
_FILE = re.compile(r"@|://|^[./]|\.(whl|tar\.gz|zip)$")
_ADVICE = {
    "-e": "Editable packages cannot be in a layer: publish a wheel on the index.",
    "-r": "Pass each file to builder: -r FILE -r OTHER.",
    "-c": "List the versions as requirements: only the constraints of the parent are used.",
}


@dataclass(frozen=True, kw_only=True)
class Requested:
    """A requirement (PEP 508), and the SHA-256 that its wheel may have, any if there are none."""

    text: str
    hashes: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        return canonicalize_name(self.requirement.name)

    @property
    def requirement(self) -> Requirement:
        return Requirement(self.text)

    def __str__(self) -> str:
        return " ".join([self.text, *(f"--hash=sha256:{sha256}" for sha256 in sorted(self.hashes))])


def _parsed(requirement: object) -> object:
    return parse_requirement(requirement, f"label {ADDED_LABEL}") if isinstance(requirement, str) else requirement


def _check_variables(variables: dict[str, str]) -> dict[str, str]:
    for name, value in variables.items():
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or not value.isprintable():
            raise UsageError(f"invalid variable {name[:100]!a}", hint="Use NAME=VALUE, on one line.")
        if name in FIXED:
            raise UsageError(f"every image sets {name}", hint="Use another variable.")
    return variables


class AdditionRequest(BaseModel, frozen=True, extra="forbid"):
    """Packages and variables. An image has its request in a label. Raises UsageError for what must not be in an image.

    Requirements are read from text and written as text. `index` is a name in matrix.yaml, an address or a
    folder: requested packages come from there if it has them. With `keep`, no package of the parent moves.
    """

    requirements: tuple[Annotated[Requested, BeforeValidator(_parsed), PlainSerializer(str)], ...] = ()
    env: Annotated[dict[str, str], AfterValidator(_check_variables)] = {}
    index: str = ""
    keep: bool = False


@dataclass(frozen=True, kw_only=True)
class Addition:
    """One image to make: what is put on `parent`, an image in a registry or in the store, for the tag `target`.

    `earlier` are the images of an addition that is repeated, by architecture: their versions are preferred.
    """

    parent: ImageRef
    target: ImageRef
    request: AdditionRequest
    earlier: Mapping[Arch, Parent] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises UsageError for a target that is no tag, or the parent, and for an empty request."""
        if not self.target.tag or self.target.digest:
            raise UsageError(f"{self.target} is no tag", hint="Use REGISTRY/NAME:TAG, e.g. ghcr.io/org/vision:1.")
        if (self.target.name, self.target.target) == (self.parent.name, self.parent.target):
            raise UsageError(f"{self.target} is the parent itself", hint="Choose another tag or repository.")
        if not (self.request.requirements or self.request.env or self.earlier):
            raise UsageError(f"{self.target}: nothing to add", hint="Name packages, or a file of them with -r.")

    @classmethod
    def of_image(cls, target: ImageRef, earlier: Sequence[Parent]) -> Addition:
        """The addition that made the image `target`, to be put on the image that the tag of its parent names now.

        `earlier` are the images that the tag names now. Raises VerifyError for an image that `add` did not make,
        UsageError if its parent has no tag.
        """
        labels, hint = earlier[0].image.labels, "Name an image that `builder add` made."
        if not (text := labels.get(ADDED_LABEL, "")):
            raise VerifyError(f"{target} was not made by `builder add`", hint=hint)
        request = oci.parse_document(AdditionRequest, text.encode(), f"label {ADDED_LABEL}", hint)
        try:
            parent = ImageRef.parse(labels.get(BASE_NAME, ""))
        except ValueError as error:
            raise VerifyError(f"{target} has an invalid label {BASE_NAME}", hint=hint) from error
        if parent.digest:
            raise UsageError(
                f"{target} was put on a digest, which never changes", hint=f"Make it again on a tag of {parent.name}."
            )
        return cls(parent=parent, target=target, request=request, earlier={image.arch: image for image in earlier})

    def labels(self, parent: Parent) -> dict[str, str]:
        """All labels of the new image, of which one has the request, for `of_image`. The wheels are in the history."""
        labels, digest = parent.image.labels, parent.image.manifest.digest
        request = self.request.model_dump(exclude_defaults=True)
        if self.request.index.startswith("/"):  # a folder of this machine; its name alone is looked up again
            request["index"] = f"./{Path(self.request.index).name}"
        return {
            **{label: value for label, value in labels.items() if label not in OF_PARENT},
            PARENT_CELL_LABEL: parent.source.cell or labels.get(PARENT_CELL_LABEL, ""),
            PARENT_LABEL: digest,
            ADDED_LABEL: json.dumps(request, sort_keys=True, separators=(",", ":")),
            BASE_NAME: str(self.parent),
            f"{OCI}.base.digest": digest,
        }


def read_requirements(path: Path) -> list[Requested]:
    """The requirements in a file. Raises UsageError, with the line, for anything else."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UsageError(f"{path} is not a text file") from error
    except OSError as error:
        raise of_file(error) from error
    return [parse_requirement(text, f"{path}:{number}") for number, text in _joined_lines(lines)]


def _joined_lines(lines: Sequence[str]) -> Iterator[tuple[int, str]]:
    """The requirements in lines, without comments, with the numbers of their first lines."""
    joined, first = "", 1
    for number, line in enumerate(lines, 1):
        # A comment ends its line, even if the line before it continues.
        text = _COMMENT.sub("", line)
        joined, first = (joined + text, first) if joined else (text, number)
        if joined.endswith("\\") and number < len(lines):
            joined = f"{joined[:-1]} "
            continue
        if joined.strip():
            yield first, joined.strip().removesuffix("\\")
        joined = ""


def parse_requirement(text: str, place: str) -> Requested:
    """One requirement, with its hashes. Raises UsageError."""
    bare = _HASH.sub("", text).strip()
    shown = re.sub(r"://\S*@", "://", bare)[:100]  # an address may have a login
    if option := re.search(r"(?:^|\s)(-[A-Za-z]|--[a-z][a-z-]*)", bare):
        advice = _ADVICE.get(option[1], "The index is that of this machine's pip and uv; only --hash=sha256: is read.")
        raise UsageError(f"{place}: the option {option[1]} is not supported", hint=advice)
    if _FILE.search(bare):
        raise UsageError(
            f"{place}: {shown!a} is an address or a path",
            hint="Download the wheel into a folder, and give the folder with --index.",
        )
    try:
        Requirement(bare if len(bare) <= LONGEST else "")
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{place}: {shown!a} is not a requirement",
            hint="Name a package of the index, such as einops>=0.8.",
        ) from error
    return Requested(text=bare, hashes=frozenset(_HASH.findall(text)))


def check_hashes(requested: Iterable[Requested], wheels: Mapping[str, LockedWheel]) -> None:
    """As pip: if a requirement has a hash, every wheel must have one that its package lists. Raises LockError."""
    allowed: dict[str, set[str]] = {}
    for requirement in requested:
        allowed.setdefault(requirement.name, set()).update(requirement.hashes)
    if not any(allowed.values()):
        return
    for name, wheel in wheels.items():
        if wheel.sha256 not in allowed.get(name, ()):
            known = "does not have one of its hashes" if allowed.get(name) else "has no hash in the requirements"
            raise LockError(
                f"{wheel.file} {known}",
                hint="Make the file again for this index and Python: uv pip compile --generate-hashes, or uv lock.",
            )


def read_requested(packages: Iterable[str], files: Iterable[Path], place: str) -> tuple[Requested, ...]:
    """The requirements of `packages`, and those in files. Raises UsageError, with the place."""
    requested = [parse_requirement(text, place) for text in packages]
    return (*requested, *(requirement for file in files for requirement in read_requirements(file)))


def read_variables(texts: Iterable[str]) -> dict[str, str]:
    """The variables of NAME=VALUE. Raises UsageError."""
    if invalid := [text for text in texts if "=" not in text]:
        raise UsageError(f"invalid variable {invalid[0][:100]!a}", hint="Use NAME=VALUE.")
    return dict(text.partition("=")[::2] for text in texts)


class _TeamImage(StrictModel):
    """All as on the command line; `requirements` are files. Paths are relative to the team's file."""

    image: str
    parent: str
    packages: list[str] = Field([])
    requirements: list[str] = Field([])
    env: dict[str, str] = Field({})
    index: str = ""
    keep: bool = False


class _TeamFile(StrictModel):
    images: list[_TeamImage] = Field(min_length=1)


def read_team_file(path: Path) -> list[Addition]:
    """The images of a team's file. Raises MatrixError or UsageError, with the place."""
    located = strict_yaml.load_yaml(path)
    team = validation.validate(located, _TeamFile, UsageError)
    additions = []
    for number, entry in enumerate(team.images):
        place = located.where(("images", number))
        try:
            parent, target = ImageRef.parse(entry.parent), ImageRef.parse(entry.image)
        except ValueError as error:
            raise UsageError(f"{place}: {error}") from error
        requested = read_requested(entry.packages, [path.parent / name for name in entry.requirements], place)
        folder = path.parent / entry.index
        index = str(folder.absolute()) if entry.index and folder.is_dir() else entry.index
        request = AdditionRequest(requirements=requested, env=entry.env, index=index, keep=entry.keep)
        additions.append(Addition(parent=parent, target=target, request=request))
    names = [str(addition.target) for addition in additions]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{path} has two images {twice[0]}")
    return additions
