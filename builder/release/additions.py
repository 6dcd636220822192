"""What users put on an image: packages, variables and files, on the command line, in a file or in an image."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from builder.common import strict_yaml, validation
from builder.common.errors import UsageError, VerifyError
from builder.common.files import files_below
from builder.common.reference import ImageRef
from builder.common.text import listed, size
from builder.layers import oci
from builder.layers.oci import Layer
from builder.layers.splice import Entry
from builder.lock import request_files, requirements
from builder.lock.requirements import Requested
from builder.matrix.schema import DEBIAN_PACKAGE, StrictModel
from builder.matrix.tags import ADDED_LABEL, CELL_LABEL, OCI, PARENT_CELL_LABEL, PARENT_LABEL, PLAN_LABEL
from builder.plan.settings import FIXED
from builder.release.parent import Parent

PLACES = ("/workspace", "/home/user", "/opt/team", "/srv")  # where --copy may write: nothing there starts as root
LARGEST_COPY = 1_000_000_000  # bytes of all files, which are read into memory
BASE_NAME = f"{OCI}.base.name"
# They describe the image of the parent alone. GPU checks need the other ones.
OF_PARENT = (
    CELL_LABEL,
    PLAN_LABEL,
    *(f"{OCI}.{name}" for name in ("title", "version", "source", "url", "documentation")),
)


@dataclass(frozen=True, kw_only=True)
class Addition:
    """One image to make: what is put on `parent`, an image in a registry or in the store, for the tag `target`.

    `constraints` hold for the packages that the parent does not have, and for its Python, if one is named `python`.
    `apt` are Debian packages, `services` commands by name, `files` are by their path in the image. `earlier` are the
    images of an addition that is repeated, by architecture: their versions are preferred, and their files are kept.
    """

    parent: ImageRef
    target: ImageRef
    requested: Sequence[Requested] = ()
    constraints: Sequence[Requested] = ()
    apt: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    services: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Entry] = field(default_factory=dict)
    earlier: Mapping[str, Parent] = field(default_factory=dict)

    @property
    def request(self) -> dict[str, Any]:
        """The request as the image records it."""
        constraints = [str(each) for each in self.constraints]
        added = {"constraints": constraints, "apt": list(self.apt), "services": dict(self.services)}
        return {
            "requirements": [str(each) for each in self.requested],
            "env": dict(self.env),
            **{name: value for name, value in added.items() if value},
        }


def derive_config(
    parent: Parent, name: str, record: str, layers: Sequence[Layer], history: Sequence[str]
) -> tuple[bytes, dict[str, str]]:
    """The configuration of an image that has these layers on its parent, and its labels.

    `name` is that of the parent, `record` the text of the label ADDED_LABEL, which has variables and services.
    `history` has a line for each layer. Raises VerifyError for another record.
    """
    request = oci.parse_document(_Record, record.encode(), f"label {ADDED_LABEL}", "").request
    if reserved := sorted(FIXED & request.env.keys()):
        raise VerifyError(f"the label {ADDED_LABEL} sets {reserved[0]}, which every image sets")
    digest = parent.image.manifest.digest
    labels = {
        **{label: value for label, value in parent.image.labels.items() if label not in OF_PARENT},
        PARENT_CELL_LABEL: parent.source.lowest_cell,
        PARENT_LABEL: digest,
        ADDED_LABEL: record,
        BASE_NAME: name,
        f"{OCI}.base.digest": digest,
    }
    services = bool(request.services)
    config = oci.derived_config(parent.config, layers, history, env=request.env, labels=labels, services=services)
    return config, labels


def new_addition(
    parent: ImageRef,
    target: ImageRef,
    packages: Iterable[str],
    *,
    files: Iterable[Path] = (),
    apt: Iterable[str] = (),
    env: Iterable[str] = (),
    services: Iterable[str] = (),
    copies: Iterable[str] = (),
    folder: Path = Path(),
    place: str = "command line",
) -> Addition:
    """The addition of a request; paths are relative to `folder`. Raises UsageError for what must not be in an image."""
    if not target.tag or target.digest:
        raise UsageError(f"{target} is no tag", hint="Use REGISTRY/NAME:TAG, e.g. ghcr.io/org/vision:1.")
    requested = [requirements.parse_requirement(text, place) for text in packages]
    constraints: list[Requested] = []
    for file in files:
        more, bounds = request_files.read_request(folder / file)
        requested, constraints = requested + more, constraints + bounds
    variables = {}
    for text in env:
        name, _, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", text) or not text.isprintable():
            raise UsageError(f"{place}: invalid variable {name[:100]!a}", hint="Use NAME=VALUE, on one line.")
        if name in FIXED:
            raise UsageError(f"{place}: every image sets {name}", hint="Use another variable.")
        variables[name] = value
    # apt removes a package whose name it gets with a minus.
    if invalid := [name for name in apt if not re.fullmatch(DEBIAN_PACKAGE, name, re.ASCII) or name[-1] in "-."]:
        raise UsageError(f"{place}: {invalid[0][:100]!a} is not the name of a Debian package")
    commands = {}
    for text in services:
        name, _, command = text.partition("=")
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}=[^\s=]+(\s.*)?", text, re.ASCII) or not text.isprintable():
            raise UsageError(
                f"{place}: invalid service {name[:100]!a}",
                hint="Use NAME=COMMAND, e.g. api='uvicorn app:app' or api='env PORT=80 app'.",
            )
        # The shell replaces itself by the command, which so gets the signals.
        if re.search(r"[;&|<>()`]", re.sub(r"'[^']*'|\"[^\"]*\"", "", command)):
            raise UsageError(f"{place}: service {name} is more than one command", hint="Use bash -c '...'.")
        commands[name] = command
    copied: dict[str, Entry] = {}
    for text in copies:
        copied |= _read_copied(folder, text, place, LARGEST_COPY - sum(each.size for each in copied.values()))
    for path in copied:
        if above := next((str(each) for each in PurePosixPath(path).parents if str(each) in copied), None):
            raise UsageError(f"{place}: /{above} would be a file and a folder, of /{path}")
    return Addition(
        parent=parent, target=target, requested=requested, constraints=constraints,
        apt=tuple(sorted(set(apt))), env=variables, services=commands, files=copied,
    )  # fmt: skip


def _read_copied(folder: Path, text: str, place: str, room: int) -> dict[str, Entry]:
    """The files of SRC:DST, a file or a folder, by path in the image. Its user may edit them, who is in group 0.

    Together, they may have `room` bytes.
    """
    source_name, _, destination = text.rpartition(":")
    target = PurePosixPath(destination)
    if not any(str(target).startswith(f"{each}/") for each in PLACES) or ".." in target.parts:
        raise UsageError(f"{place}: {text!a} is not SRC:DST with DST below {listed(PLACES, 9)}")
    source = folder / source_name
    if not source_name or not source.exists():
        raise UsageError(f"{place}: {source} does not exist")
    files = {}
    for path in files_below(source) if source.is_dir() else [source]:
        if path.is_symlink() or not path.is_file():
            raise UsageError(f"{path} is a link or no plain file", hint="Copy the file itself.")
        name = str(target / path.relative_to(source) if source.is_dir() else target).lstrip("/")
        mode = 0o775 if path.stat().st_mode & 0o100 else 0o664
        if not name.isprintable():
            raise UsageError(f"{path} has an unprintable name")
        if (room := room - path.stat().st_size) < 0:
            sizes = f"{size(LARGEST_COPY - room)}, more than {size(LARGEST_COPY)}"
            raise UsageError(f"{place}: with {path}, the copied files have {sizes}", hint="Mount large data instead.")
        files[name] = Entry(path=name, mode=mode, content=path.read_bytes())
    return files


class _TeamImage(StrictModel):
    """All as on the command line; `requirements` are files. Paths are relative to the team's file."""

    image: str
    parent: str
    packages: list[str] = Field([])
    requirements: list[str] = Field([])
    apt: list[str] = Field([])
    env: dict[str, str] = Field({})
    services: dict[str, str] = Field({})
    files: list[str] = Field([], alias="copy")


class _TeamFile(StrictModel):
    images: list[_TeamImage] = Field(min_length=1)


def read_team_file(path: Path) -> list[Addition]:
    """The images of a team's file. Raises MatrixError or UsageError, with the place."""
    located = strict_yaml.load_yaml(path)
    try:
        team = _TeamFile.model_validate(located.data)
    except ValidationError as error:
        raise UsageError(validation.explain(error, _TeamFile, located)) from None
    additions = []
    for number, each in enumerate(team.images):
        place = located.where(("images", number))
        try:
            parent, target = ImageRef.parse(each.parent), ImageRef.parse(each.image)
        except ValueError as error:
            raise UsageError(f"{place}: {error}") from error
        variables = [f"{name}={value}" for name, value in each.env.items()]
        services = [f"{name}={command}" for name, command in each.services.items()]
        files = [Path(name) for name in each.requirements]
        additions.append(
            new_addition(
                parent, target, each.packages,
                files=files, apt=each.apt, env=variables, services=services, copies=each.files, folder=path.parent,
                place=place,
            )
        )  # fmt: skip
    names = [str(each.target) for each in additions]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{path} has two images {twice[0]}")
    return additions


class _RecordedRequest(BaseModel, frozen=True):
    requirements: tuple[str, ...]
    constraints: tuple[str, ...] = ()
    apt: tuple[str, ...] = ()
    env: dict[str, str] = {}
    services: dict[str, str] = {}


class _Record(BaseModel, frozen=True):
    request: _RecordedRequest


def repeat_addition(target: ImageRef, earlier: Sequence[Parent]) -> Addition:
    """The addition that made the image `target`, to be put on the image that the tag of its parent names now.

    `earlier` are the images that the tag names now. Raises VerifyError for an image that `add` did not make, UsageError
    if its parent has no tag.
    """
    labels, hint = earlier[0].image.labels, "Name an image that `builder add` made."
    text = labels.get(ADDED_LABEL, "").encode()
    request = oci.parse_document(_Record, text, f"label {ADDED_LABEL}", hint).request
    try:
        parent = ImageRef.parse(labels.get(BASE_NAME, ""))
    except ValueError as error:
        raise VerifyError(f"{target} has an invalid label {BASE_NAME}", hint=hint) from error
    if parent.digest:
        raise UsageError(
            f"{target} was put on a digest, which never changes", hint=f"Make it again on a tag of {parent.name}."
        )
    place = f"the label {ADDED_LABEL} of {target}"
    variables = [f"{name}={value}" for name, value in request.env.items()]
    services = [f"{name}={command}" for name, command in request.services.items()]
    again = new_addition(
        parent, target, request.requirements, apt=request.apt, env=variables, services=services, place=place
    )
    constraints = [requirements.parse_requirement(each, place) for each in request.constraints]
    return replace(again, constraints=constraints, earlier={each.arch: each for each in earlier})
