"""Lists the images of a release for their users: a template for each format shows the status of each image."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date

import jinja2

from builder.common.text import size
from builder.engine.run import Run
from builder.matrix import facts, tags
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.matrix.schema import required_name
from builder.plan import plan
from builder.plan.plan import PlannedImage
from builder.registry.client import Repository
from builder.registry.transfer import map_parallel
from builder.release import staging, status
from builder.release.staging import StagingArea
from builder.release.status import ImageState, Status, StatusReader, public_repository

TEMPLATES = {"markdown": "catalog.md.j2", "html": "catalog.html.j2", "kubespawner": "profiles.yaml.j2"}
NONE_THAT_COUNT = "no results that count"
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#])")


@dataclass(frozen=True, kw_only=True)
class CatalogImage:
    """One image; `name` has no tag, `driver` is the oldest one for its CUDA.

    `reason` is the reason that no command pulls it: empty if the registry has exactly this image and, with signers in
    matrix.yaml, one of them signed it. Only then the fields below are set. `release` is the tag of the newest release.
    """

    planned: PlannedImage
    status: Status
    name: str
    driver: str
    reason: str = ""
    tests: str = NONE_THAT_COUNT
    gpu: str = NONE_THAT_COUNT
    release: str = ""

    @property
    def cell(self) -> Cell:
        return self.planned.cell

    @property
    def packages(self) -> list[str]:
        """The packages that matrix.yaml names, with their versions."""
        versions = {wheel.name: wheel.version for wheel in self.planned.wheels}
        names = [required_name(text) for texts in self.planned.requirements.values() for text in texts]
        return [f"{name} {versions[name]}" for name in dict.fromkeys(names) if name in versions]


def make_catalog(run: Run, chosen: Sequence[Cell], area: StagingArea) -> list[CatalogImage]:
    """The images of the chosen cells that are locked. Their test results are read from `area`, if it has them.

    Raises UsageError, RegistryError, SigningError, LockError.
    """
    project = run.project
    staging.require_registry(project)
    # All cells: other images may have run thorough tests for these.
    ids = {cell.id for cell in chosen}
    planned = [image for image in plan.make_plan(project, project.cells).images if image.id in ids]
    states = StatusReader(run, area).states(planned)

    # The tags of a repository are listed once for all of its images.
    repositories = {staging.references(image)[0].name: public_repository(run.host, image) for image in planned}
    listed = {name: repository.list_tags() for name, repository in repositories.items()}

    def read(state: ImageState) -> CatalogImage:
        name = staging.references(state.planned)[0].name
        return _catalog_image(project, repositories[name], listed[name], state)

    return [image for _, image in map_parallel(read, states)]


def _catalog_image(project: Project, repository: Repository, listed: Sequence[str], state: ImageState) -> CatalogImage:
    planned, cell, full = state.planned, state.planned.cell, staging.references(state.planned)[0]
    image = CatalogImage(
        planned=planned,
        status=state.status,
        name=full.name,
        driver="" if cell.is_cpu else facts.load_facts().driver(cell.cuda),
    )
    if not state.status.is_released:
        not_built = project.matrix.python[cell.python].not_built
        reason = not_built or "not released yet"
        return replace(image, reason="its tag names another image" if state.status.digest else reason)
    if project.matrix.evidence and state.status.signature != status.YES:
        return replace(image, reason="no signer that matrix.yaml names has signed it")
    named = repository.digest_of(full.tag)
    stamped = [f"{full.tag}-{stamp}" for stamp in tags.stamps_of(full.tag, listed)]
    release = next((tag for tag in stamped if repository.digest_of(tag) == named), "")
    image = replace(image, release=release)
    # The texts of errors may name servers and paths: a public page must not have them.
    if (coverage := state.coverage) and coverage.reports and state.status.tested not in coverage.refused:
        image = replace(image, tests=state.status.tested, gpu=coverage.gpu_status)
    return replace(image, gpu="needs none") if cell.is_cpu else image


def render_catalog(project: Project, images: Sequence[CatalogImage], form: str, today: date) -> str:
    """The text in a format of TEMPLATES."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(project.path("templates/catalog")),
        undefined=jinja2.StrictUndefined,
        autoescape=jinja2.select_autoescape(("html.j2",)),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # GPU names and versions come from other machines: none may be markup.
    environment.filters |= {"size": size, "md": lambda text: _MARKDOWN.sub(r"\\\1", str(text))}
    return environment.get_template(TEMPLATES[form]).render(images=images, today=today)
