"""Collects the facts about images that users ask for, and writes them as a page, a text or a list of profiles."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from datetime import date
from functools import partial
from typing import Any

import jinja2
import yaml

from builder.common.errors import RegistryError, VerifyError
from builder.common.text import listed, size
from builder.host import Host
from builder.index.wheels import LockedWheel
from builder.layers import oci
from builder.layers.known_layers import KnownLayers
from builder.layers.store import Store
from builder.lock import diff
from builder.matrix import tags
from builder.matrix.cells import Cell
from builder.matrix.project import Project
from builder.plan import plan
from builder.registry.failures import RejectedError
from builder.registry.parallel import look_up
from builder.release import catalog, publish
from builder.release.catalog import Catalog, CatalogImage, Changes
from builder.release.image_sources import sources_in_registry
from builder.release.staging import StagingArea
from builder.release.status import ImageState, StatusReader
from builder.release.verify import locked_wheel

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

    # The releases of each image: their tags are listed once for all images of a repository.
    repositories = {
        each.name: each for state in states if state.tagged.is_expected and (each := state.tagged.repository)
    }
    listed_tags = {each.name: names for each, names in look_up(lambda each: each.list_tags(), repositories.values())}
    known = KnownLayers(project.root)
    images = [
        catalog.catalog_image(
            project,
            state,
            by_cell.get(defaults[state.planned.id].id),
            known,
            publish.references(state.planned, registry),
            stamped,
            changes,
            today,
        )
        for state, (stamped, changes) in look_up(partial(_release, store, listed_tags), states)
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


def _release(store: Store, listed_tags: Mapping[str, Sequence[str]], state: ImageState) -> tuple[str, Changes]:
    """The newest tag of one release that names an image, empty without one, and the changes since the release before.

    The tags are read, and not the records in staging: another push may have the stamp of a release, which then gets a
    later one, and an interrupted release has a record too. Raises RegistryError.
    """
    tagged, cell, repository = state.tagged, state.planned.cell, state.tagged.repository
    if not tagged.is_expected or repository is None:
        return "", Changes(text="unknown: no image was found to compare")

    def read(name: str) -> list[LockedWheel] | None:
        """The wheels that the history of an image names; None if it cannot be read."""
        with suppress(VerifyError, RegistryError, ValueError):
            [source] = sources_in_registry(repository, name, store.root, cell.arch)
            if oci.read_labels(source.manifest, source.read_blob)[0] == cell.arch:
                layers = [oci.parse_history(line) for line in source.image.history]
                return [locked_wheel(file, sha256) for layer in layers if layer for file, sha256 in layer.wheels]
        return None

    # Also of earlier releases of the framework: 2.9.0-cu128-py311-20261101 is before 2.9.1-cu128-py311-20261122.
    line = f"{cell.line}-{cell.cuda_tag}-{cell.python_tag}{cell.suffix}"
    parts = [tag.rpartition("-") for tag in listed_tags[repository.name]]
    dated = [(stamp, full) for full, _, stamp in parts if tags.is_stamp(stamp) and tags.is_tag_of(line, full)]
    stamped = ""
    for stamp, full in sorted(dated, key=lambda each: tags.stamp_order(each[0]), reverse=True):
        tag, manifest = f"{full}-{stamp}", None
        with suppress(VerifyError, RejectedError):
            manifest = repository.image_manifest(tag, cell.arch)
        if manifest and manifest.digest == tagged.digest:
            stamped = stamped or tag
        elif stamped:
            break
    else:
        return stamped, Changes(
            text="no earlier release has a tag" if stamped else "unknown: no tag with a stamp names this image"
        )
    contents = []
    for name in (tag, stamped):
        if (image := read(name)) is None:
            return stamped, Changes(text=f"unknown: {name} has no image for {cell.arch} that can be read")
        contents.append(image)
    packages = tuple(diff.package_changes(*contents))
    return stamped, Changes(text=f"since {tag}{'' if packages else ': the same Python packages'}", packages=packages)


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
    left_out = "".join(f"# {image.cell} is left out: {image.no_pull}\n" for image in images if not image.pull)
    values = yaml.safe_dump({"singleuser": {"profileList": profiles}}, sort_keys=False, width=10_000)
    return f"{left_out}{values}"


def _profile(image: CatalogImage) -> dict[str, Any]:
    cuda = "without CUDA" if image.cuda == "cpu" else f"CUDA {image.cuda}"
    title = f"{image.framework} {image.version}, {cuda}, Python {image.python} ({image.variant}, {image.arch})"
    override: dict[str, Any] = {
        # A digest: nodes keep the image that they have under a tag, also if the tag has moved.
        "image": f"{image.name}@{image.digest}",
        "node_selector": {"kubernetes.io/arch": image.arch},
    }
    if image.cuda == "cpu":
        override["environment"] = {"GPU_REQUIRED": "0", "NVIDIA_VISIBLE_DEVICES": "void"}
    else:
        override["extra_resource_limits"] = {"nvidia.com/gpu": "1"}
    tests = f"tests: {image.tests.state}; GPU tests: {image.tests.gpu}"
    facts = f"{image.released}; signature: {image.signature}; {tests}; {image.support}"
    # The page of KubeSpawner does not escape these texts.
    return {
        "display_name": html.escape(title),
        "slug": image.cell.replace(".", "-"),
        "description": html.escape(facts),
        "kubespawner_override": override,
    }
