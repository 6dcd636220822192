"""Makes many images within a limit of disk: one group of cells after another, each freed before the next needs room.

What is freed is the engine's: images that are done, which the store keeps and loads again in a minute, then the build
cache. The store keeps everything, each layer once: it is the small part, and what is published.
"""

from __future__ import annotations

from collections.abc import Sequence

from builder import assemble, build, evidence, load, made, publish, tags
from builder.engine import ImageInfo
from builder.errors import DiskError
from builder.layers import PlannedLayer
from builder.plan import Plan, PlannedImage
from builder.settings import CELL_LABEL, CUDA_LABEL, PLAN_LABEL
from builder.store import Store
from builder.view import size
from builder.work import Work


def parts(plan: Plan) -> list[Plan]:
    """The plan's images by group of cells, groups of one CUDA one after another: they share most."""
    groups: dict[tuple[str, str], list[PlannedImage]] = {}
    for image in plan.images:
        groups.setdefault((image.cell.cuda, image.cell.group), []).append(image)
    order = list(dict.fromkeys(cuda for cuda, _ in groups))
    return [Plan(images=tuple(groups[key])) for key in sorted(groups, key=lambda key: order.index(key[0]))]


def rest(work: Work, store: Store, plan: Plan, *, test: bool) -> Plan:
    """The images that are not in the store as planned, and tested if that is asked for.

    The others were made, and maybe freed from the engine since.
    """
    suite = evidence.suite_digest(work.project.root)

    def is_kept(image: PlannedImage) -> bool:
        found = assemble.find(store, image)
        return found is not None and not (test and publish.fault(work.project, image, found, suite))

    return Plan(images=tuple(image for image in plan.images if not is_kept(image)))


def make_room(work: Work, store: Store, part: Plan, limit: int) -> None:
    """Frees until what `part` adds fits under `limit`, bytes of store and engine together. Raises DiskError if it
    cannot.

    Images of the CUDA that is wanted next go last: their layers would only be loaded again.
    """
    engine = work.engine

    def lacks() -> int:
        return limit - store.size() - engine.disk_bytes() - _need(work, store, part.images)

    if lacks() >= 0:
        return
    work.view.say(f"disk: freeing, for store and engine are to stay below {size(limit)}")
    wanted = {image.cell.cuda for image in part.images}
    for image in sorted(_spare(work, store), key=lambda one: one.labels.get(CUDA_LABEL) in wanted):
        if lacks() >= 0:
            return
        for tag in image.tags:
            engine.remove_image(tag)
        if engine.remove_image(image.id):
            work.view.say(f"disk: out of the engine: {image.labels.get(CELL_LABEL, image.id)} (the store keeps it)")
    if lacks() >= 0:
        return
    engine.prune_cache()
    if (short := -lacks()) > 0:
        raise DiskError(
            f"{', '.join(image.id for image in part.images)}: {size(short)} more than --max-disk {size(limit)} "
            f"would be needed: the store holds {size(store.size())}, the engine {size(engine.disk_bytes())}",
            hint="Allow more; or publish what is done and free it: builder push, builder gc --forget '<pattern>'.",
        )


def _spare(work: Work, store: Store) -> list[ImageInfo]:
    """Images of the engine that this checkout made and the store can load again, oldest first.

    Not those that a container uses, or that somebody gave a name of their own.
    """
    project, engine = work.project, work.engine
    mine, used, kept = build.built_ids(project.state), engine.used_images(), load.image_ids(store)
    ours = {str(one) for references in tags.compute(project.matrix, project.cells).values() for one in references}
    return [
        image
        for image in reversed(engine.images(PLAN_LABEL))
        if image.id in mine and image.id in kept and image.id not in used and set(image.tags) <= ours
    ]


def _need(work: Work, store: Store, images: Sequence[PlannedImage]) -> int:
    """Bytes that the store and the engine still take for these images, at their peak."""
    there = {diff_id for chain in work.engine.chains() for diff_id in chain}
    layers: dict[str, PlannedLayer] = {layer.inputs: layer for image in images for layer in image.layers}
    lacked = 0
    for layer in layers.values():
        known = made.recall(store, layer) if layer.wheels else None
        if layer.wheels and (known is None or known.diff_id not in there):
            lacked += layer.bytes
    return (assemble.engine_bytes(lacked) if lacked else 0) + assemble.missing_bytes(store, images)
