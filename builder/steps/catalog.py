"""Collects the facts about images that users ask for, and writes them as a page, a text or a list of profiles."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from datetime import date
from functools import partial
from typing import Any

import jinja2
import yaml

from builder.common.errors import VerifyError
from builder.common.text import listed, size
from builder.host import Host
from builder.layers.known_layers import KnownLayers
from builder.layers.store import Store
from builder.lock import diff
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.plan import plan
from builder.registry.failures import RejectedError
from builder.registry.parallel import look_up
from builder.release import catalog, publish
from builder.release.catalog import Catalog, CatalogImage, Changes
from builder.release.image_sources import RegistrySource
from builder.release.staging import StagingArea
from builder.release.status import ImageState, StatusReader
from builder.steps.diff import contents_of_image

FOLDER = "templates/catalog"
TEMPLATES = {"markdown": "catalog.md.j2", "html": "catalog.html.j2"}
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>|#])")


def make_catalog(
    project: Project,
    host: Host,
    store: Store,
    chosen: Sequence[Cell],
    area: StagingArea | None,
    *,
    registry: str,
    here: bool,
    today: date,
) -> Catalog:
    """The catalog of the chosen cells. With `here`, looks at nothing but this machine.

    Raises RegistryError, SigningError, LockError, StaleError.
    """
    # Whole groups: images of a cell may have been tested together with their smaller siblings.
    by_cuda = catalog.default_cells(project)
    defaults = {cell.id: by_cuda[cell.cuda, cell.arch] for cell in chosen}
    groups = {cell.group for cell in (*chosen, *defaults.values())}
    planned = plan.make_plan(project, [cell for cell in project.cells if cell.group in groups])
    by_cell = {image.id: image for image in planned.images}

    # What is built and tested here, staged, and released.
    reader = StatusReader(project=project, store=store, host=host, area=area, registry=registry, here=here)
    states = reader.states([by_cell[cell.id] for cell in chosen if cell.id in by_cell])

    # What changed since the release before: the manifests of both images have the names of their packages.
    sizes = diff.sizes(diff.locked_contents(project).values())
    changes = look_up(partial(_changes, reader, sizes), states)
    known = KnownLayers(project.root)
    images = [
        catalog.catalog_image(
            project,
            state,
            by_cell.get(defaults[state.planned.id].id),
            known,
            publish.references(state.planned, registry),
            catalog.release_of(reader.releases.get(state.planned.id, ()), state.tagged.digest)[0],
            change,
            today,
        )
        for state, change in changes
    ]
    has_registry = not here and bool(registry or project.matrix.registry)
    places = [*(["in the registry"] if has_registry else []), *(["in staging"] if area else []), "on this machine"]
    unlocked = {cell.id for cell in chosen} & {*planned.unlocked}
    return Catalog(
        made=today.isoformat(),
        places=", ".join(places),
        images=tuple(images),
        unlocked=tuple(sorted(unlocked)),
    )


def _changes(reader: StatusReader, wheel_sizes: dict[str, int], state: ImageState) -> Changes:
    """The changes of a released image since the release before it."""
    repository, digest = state.tagged.repository, state.tagged.digest
    if not state.tagged.is_expected or repository is None:
        return Changes(text="unknown: no released image is described here")
    if reader.area is None:
        return Changes(text="unknown: there is no staging place, which has the records of releases")
    stamp, (before, old) = catalog.release_of(reader.releases.get(state.planned.id, ()), digest)
    if not stamp:
        return Changes(text="unknown: no record of a release has this image")
    if not before:
        return Changes(text="no earlier release is recorded")
    contents = []
    try:
        for each in (old, digest):
            manifest = repository.manifest(each)
            if manifest is None:
                return Changes(text=f"unknown: the registry no longer has the image of release {before}")
            source = RegistrySource(manifest=manifest.content, repository=repository, folder=reader.store.root)
            contents.append(contents_of_image(each, source, wheel_sizes))
    except (VerifyError, RejectedError):
        return Changes(text=f"unknown: the image of release {before} cannot be read")
    difference = diff.compare(*contents)
    packages = tuple(f"{change.name} {change}" for change in difference.changes)
    pulled = f"{size(difference.fetched.bytes)} to pull for who has the image of release {before}"
    return Changes(text=f"{pulled}{'' if packages else ', with the same Python packages'}", packages=packages)


def render_catalog(project: Project, content: Catalog, form: str) -> str:
    """The catalog as `markdown`, `html`, `json` or `kubespawner`."""
    if form == "json":
        return json.dumps(asdict(content), indent=1) + "\n"
    if form == "kubespawner":
        return _profiles(project, content)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(project.path(FOLDER)),
        undefined=jinja2.StrictUndefined,
        autoescape=jinja2.select_autoescape(("html.j2",)),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # GPU names and versions come from other machines: none may be markup.
    environment.filters |= {"size": size, "listed": listed, "md": lambda text: _MARKDOWN.sub(r"\\\1", str(text))}
    return environment.get_template(TEMPLATES[form]).render(vars(content))


def _profiles(project: Project, content: Catalog) -> str:
    """The values of the chart of Zero to JupyterHub with a profile for each Jupyter image that can be pulled.

    Source: KubeSpawner, `profile_list`.
    """
    images = [image for image in content.images if "jupyter" in image.components]
    defaults = {cell.id for cell in project.select(())}
    pulled = [image for image in images if image.pull]
    default = next((image for image in pulled if image.cell in defaults), pulled[0] if pulled else None)
    profiles = [_profile(image) | ({"default": True} if image is default else {}) for image in pulled]
    left_out = "".join(f"# {image.cell} is left out: {image.released}\n" for image in images if not image.pull)
    values = yaml.safe_dump({"singleuser": {"profileList": profiles}}, sort_keys=False, width=10_000)
    return f"{left_out}{values}"


def _profile(image: CatalogImage) -> dict[str, Any]:
    cuda = "without CUDA" if image.cuda == "cpu" else f"CUDA {image.cuda}"
    title = f"{image.framework} {image.version}, {cuda}, Python {image.python} ({image.variant}, {image.arch})"
    override: dict[str, Any] = {
        # A digest: nodes keep the image that they have under a tag, also if the tag has moved.
        "image": f"{image.name}@{image.digest}" if image.digest else image.pull.removeprefix("docker pull "),
        "node_selector": {"kubernetes.io/arch": image.arch},
    }
    if image.cuda == "cpu":
        override["environment"] = {"GPU_REQUIRED": "0", "NVIDIA_VISIBLE_DEVICES": "void"}
    else:
        override["extra_resource_limits"] = {"nvidia.com/gpu": "1"}
    facts = f"{image.released}; tests: {image.tests.state}; GPU tests: {image.tests.gpu}; {image.support}"
    # The page of KubeSpawner does not escape these texts.
    return {
        "display_name": html.escape(title),
        "slug": image.cell.replace(".", "-"),
        "description": html.escape(facts),
        "kubespawner_override": override,
    }
