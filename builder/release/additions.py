"""What users put on an image: packages and variables, on the command line, in a file or in an image."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from builder.common import strict_yaml, validation
from builder.common.errors import UsageError, VerifyError
from builder.common.reference import ImageRef
from builder.layers import oci
from builder.layers.oci import Layer
from builder.lock import requirements
from builder.lock.requirements import Requested
from builder.matrix.schema import StrictModel
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


@dataclass(frozen=True, kw_only=True)
class Addition:
    """One image to make: what is put on `parent`, an image in a registry or in the store, for the tag `target`.

    `earlier` are the images of an addition that is repeated, by architecture: their versions are preferred.
    """

    parent: ImageRef
    target: ImageRef
    requested: Sequence[Requested] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    earlier: Mapping[str, Parent] = field(default_factory=dict)

    @property
    def request(self) -> dict[str, Any]:
        """The request as the image records it."""
        return {"requirements": [str(each) for each in self.requested], "env": dict(self.env)}


def derive_config(
    parent: Parent, name: str, record: str, layers: Sequence[Layer], history: Sequence[str]
) -> tuple[bytes, dict[str, str]]:
    """The configuration of an image that has these layers on its parent, and its labels.

    `name` is that of the parent, `record` the text of the label ADDED_LABEL, which has the variables.
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
    config = oci.derived_config(parent.config, layers, history, env=request.env, labels=labels)
    return config, labels


def new_addition(
    parent: ImageRef,
    target: ImageRef,
    packages: Iterable[str],
    *,
    files: Iterable[Path] = (),
    env: Iterable[str] = (),
    folder: Path = Path(),
    place: str = "command line",
) -> Addition:
    """The addition of a request; paths are relative to `folder`. Raises UsageError for what must not be in an image."""
    if not target.tag or target.digest:
        raise UsageError(f"{target} is no tag", hint="Use REGISTRY/NAME:TAG, e.g. ghcr.io/org/vision:1.")
    requested = [requirements.parse_requirement(text, place) for text in packages]
    for file in files:
        requested += requirements.read_requirements(folder / file)
    variables = {}
    for text in env:
        name, _, value = text.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=.*", text) or not text.isprintable():
            raise UsageError(f"{place}: invalid variable {name[:100]!a}", hint="Use NAME=VALUE, on one line.")
        if name in FIXED:
            raise UsageError(f"{place}: every image sets {name}", hint="Use another variable.")
        variables[name] = value
    return Addition(parent=parent, target=target, requested=requested, env=variables)


class _TeamImage(StrictModel):
    """All as on the command line; `requirements` are files. Paths are relative to the team's file."""

    image: str
    parent: str
    packages: list[str] = Field([])
    requirements: list[str] = Field([])
    env: dict[str, str] = Field({})


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
        files = [Path(name) for name in each.requirements]
        additions.append(
            new_addition(parent, target, each.packages, files=files, env=variables, folder=path.parent, place=place)
        )
    names = [str(each.target) for each in additions]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{path} has two images {twice[0]}")
    return additions


class _RecordedRequest(BaseModel, frozen=True, extra="forbid"):
    requirements: tuple[str, ...]
    env: dict[str, str] = {}


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
    again = new_addition(parent, target, request.requirements, env=variables, place=place)
    return replace(again, earlier={each.arch: each for each in earlier})
