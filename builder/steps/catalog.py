"""Lists the images of a release for their users: a template for each format shows the status of each image."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import partial

import jinja2

from builder.common.errors import VerifyError
from builder.common.text import size
from builder.index.host import Host
from builder.index.wheels import LockedWheel
from builder.layers import oci
from builder.layers.store import Store
from builder.lock import diff
from builder.matrix import facts, tags
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.matrix.schema import required_name
from builder.plan import plan
from builder.plan.plan import PlannedImage
from builder.registry.client import Repository
from builder.registry.failures import RejectedError
from builder.registry.parallel import look_up
from builder.release import publish, status
from builder.release.image_sources import RegistrySource
from builder.release.staging import StagingArea
from builder.release.status import ImageState, Status, StatusReader

TEMPLATES = {"markdown": "catalog.md.j2", "html": "catalog.html.j2", "kubespawner": "profiles.yaml.j2"}
NONE_THAT_COUNT = "no results that count"
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#])")


@dataclass(frozen=True, kw_only=True)
class CatalogImage:
    """One image; `name` has no tag, `driver` is the oldest one for its CUDA.

    `reason` is the reason that no command pulls it: empty if the registry has exactly this image and, with signers in
    matrix.yaml, one of them signed it. Only then the fields below are set. `release` is the tag of one release, `since`
    that of the release before, and `changes` are the packages that differ from it.
    """

    planned: PlannedImage
    status: Status
    name: str
    driver: str
    reason: str = ""
    tests: str = NONE_THAT_COUNT
    gpu: str = NONE_THAT_COUNT
    release: str = ""
    since: str = ""
    changes: Sequence[str] = ()

    @property
    def cell(self) -> Cell:
        return self.planned.cell

    @property
    def packages(self) -> list[str]:
        """The packages that matrix.yaml names, with their versions."""
        versions = {wheel.name: wheel.version for wheel in self.planned.wheels}
        names = [required_name(text) for texts in self.planned.requirements.values() for text in texts]
        return [f"{name} {versions[name]}" for name in dict.fromkeys(names) if name in versions]


def make_catalog(
    project: Project, host: Host, store: Store, chosen: Sequence[Cell], registry: str, area: StagingArea | None
) -> list[CatalogImage]:
    """The images of the chosen cells that are locked. Their test results are read from `area`, if it has them.

    Raises UsageError, RegistryError, SigningError, LockError.
    """
    publish.require_registry(project, registry)
    # All cells: images may have been tested together with their smaller siblings.
    ids = {cell.id for cell in chosen}
    planned = [image for image in plan.make_plan(project, project.cells).images if image.id in ids]
    states = StatusReader(project=project, store=store, host=host, area=area, registry=registry).states(planned)

    # The tags of a repository are listed once for all of its images.
    repositories = {found.name: found for state in states if (found := state.tagged.repository)}
    listed = {found.name: names for found, names in look_up(lambda found: found.list_tags(), repositories.values())}
    read = partial(_catalog_image, project, registry, listed)
    return [image for _, image in look_up(read, states)]


def _catalog_image(
    project: Project, registry: str, listed: Mapping[str, Sequence[str]], state: ImageState
) -> CatalogImage:
    planned, cell, tagged = state.planned, state.planned.cell, state.tagged
    image = CatalogImage(
        planned=planned,
        status=state.status,
        name=publish.references(planned, registry)[0].name,
        driver="" if cell.is_cpu else facts.load_facts().driver(cell.cuda),
    )
    if not tagged.is_expected or tagged.repository is None:
        not_built = project.matrix.python[cell.python].not_built
        reason = f"not built yet: {not_built}" if not_built else "not released yet"
        return replace(image, reason="its tag names another image" if tagged.digest else reason)
    if project.matrix.evidence and tagged.signature != status.YES:
        return replace(image, reason="no signer that matrix.yaml names has signed it")
    release, since, wheels = _releases(tagged.repository, listed[tagged.repository.name], cell, tagged.digest)
    image = replace(image, release=release, since=since)
    if since:
        image = replace(image, changes=diff.package_changes(wheels, planned.wheels))
    # The texts of errors may name servers and paths: a public page must not have them.
    if (coverage := state.coverage) and coverage.reports and state.status.tested not in coverage.refused:
        image = replace(image, tests=state.status.tested, gpu=coverage.gpu_status)
    return replace(image, gpu="needs none") if cell.is_cpu else image


def _releases(
    repository: Repository, listed: Sequence[str], cell: Cell, digest: str
) -> tuple[str, str, list[LockedWheel]]:
    """The newest tag of one release that names an image, the tag of the release before, and the wheels of that one.

    The tags are empty if there are none. Raises RegistryError.
    """
    # Also of earlier releases of the framework: 2.9.0-cu128-py311-20261101 is before 2.9.1-cu128-py311-20261122.
    line = f"{cell.line}-{cell.cuda_tag}-{cell.python_tag}{cell.suffix}"
    parts = [tag.rpartition("-") for tag in listed]
    dated = [(stamp, full) for full, _, stamp in parts if tags.is_stamp(stamp) and tags.is_tag_of(line, full)]
    release = ""
    for stamp, full in sorted(dated, key=lambda item: tags.stamp_order(item[0]), reverse=True):
        tag = f"{full}-{stamp}"
        with suppress(VerifyError, RejectedError):  # an invalid image is passed over
            manifest = repository.image_manifest(tag, cell.arch)
            if manifest and manifest.digest == digest:
                release = release or tag
            elif manifest and release and oci.read_labels(manifest.content, repository.read_blob)[0] == cell.arch:
                return release, tag, RegistrySource(manifest=manifest.content, repository=repository).wheels
    return release, "", []


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
