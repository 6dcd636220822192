"""Makes the images of a plan: locks what Debian has deleted, builds, tests and tags, and skips what is done.

Each image is built, tested and tagged separately: a failure stops no other image, and the next run finishes the rest.
"""

from __future__ import annotations

from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

from builder.build import disk
from builder.build.assemble import Assembler
from builder.build.context import ImageMaker, LoadedImage, RunContext
from builder.build.dockerfile import DockerfileBuilder
from builder.build.image_tests import Tester, check_docker_client, new_tester
from builder.build.layer_lookup import LayerLookup
from builder.build.outcomes import Outcome, for_each_image
from builder.common.errors import BuilderError, LockError, StaleError, join
from builder.common.files import write_atomically
from builder.common.reference import ImageRef
from builder.compat import gpus
from builder.debian import os_lock, os_resolve
from builder.debian.archives import Archives
from builder.layers import garbage, known_layers
from builder.layers.known_layers import KnownLayers
from builder.layers.store import Store
from builder.plan import plan, render
from builder.plan.plan import Plan, PlannedImage

Method = Literal["assemble", "dockerfile"]
ASSEMBLE: Method = "assemble"
DOCKERFILE: Method = "dockerfile"
SHOWN = 20  # changed Debian packages; the others are counted


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to make images: `jobs` at a time; without `test`, they are neither tested nor tagged.

    `locked` makes it an error that locked Debian packages are gone; `again` is the command without it, for the hint.
    `wait` for other builders that use the store, before garbage is collected. `junit` is a folder for reports of tests.
    """

    jobs: int = 2
    method: Method = ASSEMBLE
    test: bool = True
    locked: bool = False
    wait: bool = False
    gpu_mode: gpus.Mode = gpus.AUTO
    junit: Path | None = None
    again: str = "builder images --no-locked"


def make_images(run: RunContext, store: Store, planned: Plan, options: Options) -> list[Outcome]:
    """Makes every image of a plan, and returns what was done, in its order. An image's failure is in its outcome.

    Raises StaleError with `locked` (--locked) if locked Debian packages are gone, or the error of locking them.
    """
    project, view = run.project, run.view
    lookup = LayerLookup(project, run.host, view, store, KnownLayers(project.root))
    archives = Archives(project.matrix, run.host, view.say_once)

    # Debian's archives delete a package when it has a newer version. For a person, that is no failure: today's packages
    # are locked, and the run goes on with them.
    has_new_locks = options.method == ASSEMBLE and lock_stale_systems(run, store, planned, lookup, archives, options)
    if has_new_locks:
        planned = render.load_checked_plan(project, [image.cell for image in planned.images])
        lookup = LayerLookup(project, run.host, view, store, KnownLayers(project.root))

    try:
        if options.method == DOCKERFILE:
            # These images do not have the layers of the plan, so that a smaller one may have other contents.
            planned = with_all_tests(planned)
            return build_test_tag(
                run, DockerfileBuilder(run, lookup=lookup), _tester(run, planned, options), planned, options.jobs
            )

        # What no image needs makes room for the layers that the store lacks. No other builder may use it meanwhile.
        garbage.make_room(store, partial(disk.store_bytes, store, planned.images), wait=options.wait)
        store.prepare()
        with store.used():
            assembler = Assembler(run, store, jobs=options.jobs, lookup=lookup, archives=archives)
            return build_test_tag(run, assembler, _tester(run, planned, options), planned, options.jobs)
    except BuilderError as error:
        return [Outcome(image=image, error=error) for image in planned.images]
    finally:
        if has_new_locks:  # also after a failure or Ctrl-C: the checkout has changed
            view.say(
                "locks/ changed, because Debian updated packages:\n"
                "  git diff locks                                shows the changes\n"
                "  git commit -m 'Update Debian packages' locks  keeps them\n"
                "  git restore locks                             undoes them"
            )


def build_test_tag(
    run: RunContext, maker: ImageMaker, tester: Tester | None, planned: Plan, jobs: int
) -> list[Outcome]:
    """Builds, tests and tags each image, each only if that is not done; without a tester, only builds.

    Closes `maker`. Raises ImageTestError if required GPU tests cannot run, before anything is built.
    """
    engine, view = run.engine, run.view
    engine.sweep(str(run.project.root))  # containers of killed runs
    if tester:
        tester.check(planned.images)

    # An image is done if the engine has it as planned, its tests passed, and it has all its tags.
    done: dict[str, Outcome] = {}
    present = {image.id: maker.find(image) for image in planned.images}
    for image in planned.images:
        loaded = present[image.id]
        if loaded and tester is None:
            done[image.id] = Outcome(image=image, loaded=loaded)
        elif loaded and tester and (outcome := _finished(run, tester, image, loaded)):
            done[image.id] = outcome
            maker.record_tagged(image)  # a run that was killed may not have
        elif error := engine.info().foreign_error(image.cell.arch):
            done[image.id] = Outcome(image=image, error=error)
    todo = [image for image in planned.images if image.id not in done]
    if todo and tester:
        check_docker_client()

    def make_image(image: PlannedImage) -> Outcome:
        # Its layers become an image, and the engine loads it; the id is in the view, for whoever wants to look inside.
        loaded = present[image.id] or maker.build(image)
        note = loaded.id.removeprefix("sha256:")[:12]
        if tester is None:
            view.end(image.id, "done", f"{note}, {loaded.origin}")
            return Outcome(image=image, loaded=loaded)

        # A build may find that the image is complete: the store had it, or the engine's cache all its steps.
        if outcome := _finished(run, tester, image, loaded):
            maker.record_tagged(image)
            view.end(image.id, "done", f"{note}, unchanged")
            return outcome

        # Only the tests that have not passed yet: those on a GPU may be new to this machine.
        known = tester.coverage(image, loaded)
        is_tested = tester.is_complete(image, known)
        coverage = known if is_tested else tester.test(image, loaded, known)

        # The full tag last: it marks a complete image.
        for reference in reversed(image.local_names):
            engine.tag(loaded.id, ImageRef.parse(reference))
        maker.record_tagged(image)
        view.end(image.id, "done", f"{note}, {coverage.summary}\n  {'  '.join(image.local_names)}")
        return Outcome(image=image, loaded=loaded, tested=not is_tested, tagged=True, coverage=coverage)

    with view.live(), closing(maker):
        # Layers that are missing are made side by side, each once for all images. An image begins when it has its own.
        missing = [image for image in todo if not present[image.id]]
        try:
            if missing:
                maker.start(missing)
        except BuilderError as error:  # too little disk space, for example
            done |= {image.id: Outcome(image=image, error=error) for image in missing}
            missing = []
        todo = [image for image in todo if image.id not in done]
        ready = chain((image for image in todo if present[image.id]), maker.as_ready(missing))
        done |= for_each_image(run, tester, jobs, todo, make_image, ready)
    return [done[image.id] for image in planned.images]


def lock_stale_systems(
    run: RunContext, store: Store, planned: Plan, lookup: LayerLookup, archives: Archives, options: Options
) -> bool:
    """Locks current packages for operating systems that must be made, and whose locked packages no archive has.

    Returns whether there were any. With `locked`, raises StaleError instead, or the error of locking them.
    """
    project, view = run.project, run.view
    store.prepare()
    with store.used():
        requests = {
            image.os_request
            for image in {image.os_inputs: image for image in planned.images}.values()
            if not (lookup.in_store(image.os_inputs) or lookup.in_registry(image.os_inputs))
        }
    new, failures = os_resolve.current_locks_of_stale(
        project,
        requests,
        archives,
        run.host,
        lambda package: store.has(f"sha256:{package.sha256}", package.size),
        view.say,
    )
    if options.locked and failures:
        raise join(failures, "locks failed")
    for failure in failures:  # without --locked, only the images that need this operating system fail, when built
        view.say(f"cannot lock current packages: {failure}")
    if not new:
        return False

    before = {request: os_lock.read_os_lock(project.root, request) for request in new}
    lines = os_lock.changes(before, new)
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    ids = [image.id for image in planned.images if image.os_request in new]
    reason = "Locked Debian packages are no longer in any archive."
    if any(lock.has_sources and (old := before[request]) and not old.has_sources for request, lock in new.items()):
        reason = "Locks of an earlier builder have no source packages, which the addresses of packages are made of."
    follows = "With --locked, that is an error:" if options.locked else "Locking the current versions:"
    text = "\n".join(
        [f"{reason} {follows}", *(f"  {line}" for line in [*lines[:SHOWN], *more, f"in {', '.join(ids)}"])]
    )
    if options.locked:
        hint = f"Lock the current versions, build and test with them, then commit locks/: {options.again}"
        raise StaleError(text, hint=hint)
    view.say(text)
    for request, lock in new.items():
        write_atomically(project.root / request.path, os_lock.dump(lock))
    # No image has the layers of the earlier packages any more; `builder render --check` would report them.
    with suppress(LockError, StaleError):  # other cells are not locked, or their locks are out of date
        complete = plan.make_locked_plan(project, project.cells)
        known_layers.prune(project.root, {layer.inputs for image in complete.images for layer in image.layers})
    return True


def with_all_tests(planned: Plan) -> Plan:
    """The plan, with images that must pass their thorough tests themselves, even if a smaller sibling is in it."""
    images = (replace(image, thorough=frozenset(image.components)) for image in planned.images)
    return replace(planned, images=tuple(images))


def _tester(run: RunContext, planned: Plan, options: Options) -> Tester | None:
    if not options.test:
        return None
    return new_tester(run, planned.images, jobs=options.jobs, gpu_mode=options.gpu_mode, junit=options.junit)


def _finished(run: RunContext, tester: Tester, image: PlannedImage, loaded: LoadedImage) -> Outcome | None:
    """An outcome if the image passed its tests, and the engine has it under every tag."""
    coverage = tester.coverage(image, loaded)
    if not tester.is_complete(image, coverage):
        return None
    info = run.engine.image(loaded.id)
    # The engine lists names in its own form (without `docker.io/`, for example): look up each name that is not listed.
    for reference in set(image.local_names).difference(info.tags if info else ()):
        tagged = run.engine.image(reference)
        if tagged is None or tagged.id != loaded.id:
            return None
    return Outcome(image=image, loaded=loaded, coverage=coverage)
