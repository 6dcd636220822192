"""Puts packages on images without building them: reads the parent, resolves, makes the new layers, and pushes.

From registry to registry, only the new layers are sent. Needs no engine and no checkout.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from builder.common.console import Meter, View
from builder.common.errors import BuildError, LockError, RefusedError, UnreachableError, UsageError
from builder.common.files import short_digest
from builder.common.reference import ImageRef
from builder.common.tasks import thread_pool
from builder.common.text import listed, size
from builder.host import Apt, Host
from builder.index.download import CONNECTIONS, Fetcher
from builder.index.local_index import serve_index
from builder.index.releases import Index
from builder.index.wheels import LockedWheel, Wheel
from builder.layers import oci, stored_images, stored_layers
from builder.layers.blobs import Descriptor
from builder.layers.oci import Image, Layer, Manifest
from builder.layers.store import Store
from builder.lock import requirements
from builder.lock.requirements import Requested
from builder.lock.uv import Target, Uv
from builder.matrix.project import Project
from builder.matrix.tags import ADDED_LABEL, CELL_LABEL, OCI, PARENT_CELL_LABEL, PARENT_LABEL, PLAN_LABEL
from builder.plan import layer_order
from builder.plan.layer_order import PlannedLayer
from builder.registry import transfer
from builder.registry.client import Repository
from builder.registry.transfer import Sent
from builder.release.image_sources import ALL, RegistrySource
from builder.release.parent import Parent, read_parent
from builder.steps import verify

ADDED = "added"  # the component and the name of the layer of small wheels
# They describe the image of the parent alone. GPU checks need the other ones.
OF_PARENT = (CELL_LABEL, PLAN_LABEL, f"{OCI}.title", f"{OCI}.version", f"{OCI}.source")
CONFLICT = (
    "The packages of the parent stay as they are. Choose versions that fit them, or another parent. A Dockerfile with "
    "FROM can replace packages."
)


@dataclass(frozen=True, kw_only=True)
class Addition:
    """One image to make: what is put on `parent`, an image in a registry or in the store, for the tag `target`."""

    parent: ImageRef
    target: ImageRef
    requested: Sequence[Requested]


@dataclass(frozen=True, kw_only=True)
class AddedImage:
    """An image with additions for one architecture; `wheels` are the new ones, `layers` the layers that have them."""

    parent: Parent
    wheels: Sequence[LockedWheel]
    layers: Sequence[Layer]
    image: Image


@dataclass(frozen=True, kw_only=True)
class Added:
    """The images of an addition, one for each architecture, and the digest that its tag names, if it was set."""

    addition: Addition
    images: Sequence[AddedImage]
    digest: str = ""
    sent: Sent | None = None


def add(
    additions: Sequence[Addition],
    project: Project | None,
    host: Host,
    store: Store,
    view: View,
    show: Callable[[str, str], None],
    *,
    arch: str = ALL,
    dry_run: bool = False,
    program: Uv | None = None,
    new_fetcher: Callable[..., Fetcher] = Fetcher,
    new_repository: Callable[..., Repository] = Repository,
) -> list[Added]:
    """Makes the images and sets their tags: those of all additions, or none.

    `arch` is the architecture of a parent for several, or ALL. `show` gets the name of each step and its result. With
    `dry_run`, only resolves. `program` chooses versions.
    """
    host = replace(host, read_apt=Apt)  # apt takes 0.5 s, and no archive of Debian is used here
    program = program or Uv(host, subprocess.run, Index(host.index), serve_index)
    meter = Meter(view, "wheels", "fetched", 0)
    fetcher = new_fetcher(host.index, store.downloads, progress=meter.add, warn=view.say_once)
    assembled: list[Added] = []
    for addition in additions:
        if addition.target.name == addition.parent.name and addition.target.target == addition.parent.target:
            raise UsageError(f"{addition.target} is the parent itself", hint="Choose another tag or repository.")
        made: list[AddedImage] = []
        for source in verify.find_images(addition.parent, arch, project, host, store, new_repository):
            parent = read_parent(source)
            show("parent", f"{addition.parent}  {parent.arch}  {short_digest(parent.image.manifest.digest)}")

            # What the parent has stays, byte for byte. The rest of the solution is new.
            solution = resolve(program, parent, addition)
            wheels = [wheel for name, wheel in sorted(solution.items()) if name not in parent.packages]
            kept = f", {parent.framework} unchanged" if parent.framework else ""
            show("resolve", f"{len(wheels)} new, {len(parent.packages)} kept{kept}: {listed(_pins(wheels), 8) or '-'}")
            if dry_run:
                made.append(AddedImage(parent=parent, wheels=wheels, layers=(), image=parent.image))
                continue

            # Layers by the rule of all images. The store may have them from an earlier run.
            planned = layer_order.wheel_layers(
                [Wheel(**vars(wheel), component=ADDED) for wheel in wheels], parent.python, cuda_name=ADDED, name=ADDED
            )
            if (count := len(parent.image.layers) + len(planned)) > layer_order.MOST:
                raise BuildError(f"{addition.target} would have {count} layers; the limit is {layer_order.MOST}")
            layers = make_layers(store, fetcher, planned, view.say_once)

            # A wheel must not replace a file of the parent, such as one of the framework or the launcher.
            contents = [
                (each, stored_layers.read_toc(store, layer)) for each, layer in zip(planned, layers, strict=True)
            ]
            try:
                stored_layers.check_paths(str(addition.target), [*parent.planned_layers(), *contents], ())
            except BuildError as error:
                raise RefusedError(str(error), hint=CONFLICT) from error

            made.append(
                AddedImage(
                    parent=parent,
                    wheels=wheels,
                    layers=layers,
                    image=write_image(store, parent, addition, wheels, planned, layers),
                )
            )
            sizes = sum(layer.size for layer in layers)
            show("layers", f"{len(layers)} new ({size(sizes)}), {len(parent.image.layers)} of the parent (0 B)")
        assembled.append(Added(addition=addition, images=made))
    if dry_run:
        return assembled

    # All images are complete in their registries before the first tag is set.
    pushed: list[tuple[Added, Repository, Manifest]] = []
    for added in assembled:
        repository = new_repository(added.addition.target, host=host, write=True)
        sents = [push_image(repository, store, view, added.addition, each) for each in added.images]
        manifest = added.images[0].image.manifest
        if any(isinstance(each.parent.source, RegistrySource) and each.parent.source.index for each in added.images):
            platforms: dict[str, Descriptor] = {
                each.parent.arch: each.image.manifest.descriptor for each in added.images
            }
            manifest = Manifest.of(oci.platform_index(platforms), oci.INDEX_TYPE)
            repository.put_manifest(manifest.digest, manifest.content, manifest.media_type)
        sent = Sent(**{name: sum(getattr(each, name) for each in sents) for name in ("sent", "mounted", "present")})
        pushed.append((replace(added, digest=manifest.digest, sent=sent), repository, manifest))
    for added, repository, manifest in pushed:
        repository.put_manifest(added.addition.target.target, manifest.content, manifest.media_type)
        show("pushed", f"{added.addition.target}@{manifest.digest}  {added.sent}")
    return [added for added, _, _ in pushed]


def resolve(program: Uv, parent: Parent, addition: Addition) -> dict[str, LockedWheel]:
    """The wheels that the requested packages need, those of the parent too, by name. Raises LockError."""
    target = Target(
        name=str(addition.target),
        python=parent.python,
        arch=parent.arch,
        glibc=parent.glibc,
        sources=dict.fromkeys(parent.packages, False),
        conflict=CONFLICT,
    )
    packages = [each.text for each in addition.requested]
    try:
        pylock, _ = program.compile(target, packages, parent.constraints, None, parent.built)
        found = program.wheels(target, pylock, parent.built)
    except UnreachableError:
        raise
    except LockError as error:
        words = set(str(error).replace("==", " ").split())
        named = [f"{name} {wheel.version}" for name, wheel in parent.packages.items() if name in words]
        about = f"The parent has {listed(named, 5)}. " if named else ""
        raise LockError(str(error), hint=f"{about}{error.hint}") from error
    unknown = {name: listing for name, listing in found.items() if not listing[0].size and name not in parent.packages}
    sizes = program.sizes(target, unknown) if unknown else {}
    wheels = {name: replace(wheel, size=sizes.get(name, wheel.size)) for name, (wheel, _) in found.items()}
    requirements.check_hashes(addition.requested, wheels)
    return wheels


def make_layers(
    store: Store, fetcher: Fetcher, planned: Sequence[PlannedLayer], warn: Callable[[str], object]
) -> list[Layer]:
    """The layers, from the store, or made of wheels, which are downloaded several at a time. Raises FetchError."""
    stored = {each.inputs: stored_layers.stored_layer(store, each.inputs) for each in planned}
    missing = [each for each in planned if not stored[each.inputs]]
    wheels = sorted({wheel for each in missing for wheel in each.wheels}, key=lambda wheel: -wheel.size)
    with thread_pool(CONNECTIONS, "fetch") as pool:
        downloads = {wheel.sha256: pool.submit(fetcher.fetch, wheel) for wheel in wheels}
        try:
            for each in missing:
                paths = [downloads[wheel.sha256].result() for wheel in each.wheels]
                stored[each.inputs] = stored_layers.store_wheels(store, each, paths, warn=warn)
        except BaseException:
            fetcher.stop()
            raise
    for wheel in wheels:
        fetcher.drop(wheel)
    return [layer for each in planned if (layer := stored[each.inputs])]


def write_image(
    store: Store,
    parent: Parent,
    addition: Addition,
    wheels: Sequence[LockedWheel],
    planned: Sequence[PlannedLayer],
    layers: Sequence[Layer],
) -> Image:
    """Writes the configuration and the manifest. The same request, lock and parent give the same bytes."""
    image, history = parent.image, [oci.history_line(each) for each in planned]
    request = {"requirements": [str(each) for each in addition.requested]}
    lock = {"wheels": [[wheel.file, wheel.sha256, wheel.size] for wheel in wheels]}
    labels = {
        **{name: value for name, value in image.labels.items() if name not in OF_PARENT},
        PARENT_CELL_LABEL: parent.cell,
        PARENT_LABEL: image.manifest.digest,
        ADDED_LABEL: json.dumps({"request": request, "lock": lock}, sort_keys=True, separators=(",", ":")),
        f"{OCI}.base.name": str(addition.parent),
        f"{OCI}.base.digest": image.manifest.digest,
    }
    config = oci.derived_config(parent.source.read_blob(image.config.digest), layers, history, env={}, labels=labels)
    return stored_images.put_image(
        store, config, [*image.layers, *layers], history=[*image.history, *history], labels=labels
    )


def push_image(repository: Repository, store: Store, view: View, addition: Addition, added: AddedImage) -> Sent:
    """Pushes an image by digest. The registry mounts the layers of a parent that it has; others pass this machine."""
    source, image = added.parent.source, added.image
    files: dict[Descriptor, Path | None] = {image.config: store.path(image.config.digest)}
    for layer in image.layers:
        files[layer.descriptor] = store.path(layer.digest) if store.has(layer.digest, layer.size) else None
    fetch = partial(transfer.fetch_blob, source.repository, store) if isinstance(source, RegistrySource) else None
    mounts = [addition.parent.repository] if addition.parent.registry == addition.target.registry else []
    progress = Meter(view, "push", "sent", 0).add
    return transfer.push_image(repository, image.manifest, files, fetch=fetch, mount_from=mounts, progress=progress)


def _pins(wheels: Iterable[LockedWheel]) -> list[str]:
    return [f"{wheel.name} {wheel.version}" for wheel in wheels]
