"""Makes the images of a plan: locks what Debian has deleted, builds, tests and tags, and skips what is done.

Each image is built, tested and tagged separately: a failure stops no other image, and the next run finishes the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Literal

from builder.build.assemble import Assembler
from builder.build.dockerfile import DockerfileBuilder
from builder.build.image_tests import NO_RESULTS, Tester, new_tester, why_not_run
from builder.build.layer_lookup import LayerLookup
from builder.build.operating_systems import SystemLayers
from builder.build.outcomes import Outcome, for_each_image
from builder.common.errors import BuilderError, LockError, StaleError, join
from builder.common.reference import ImageRef
from builder.compat import gpus
from builder.debian import os_resolve
from builder.debian.os_lock import OS_LOCKS
from builder.engine.model import LoadedImage
from builder.engine.run import Run
from builder.evidence.results import Coverage
from builder.layers import garbage, known_layers
from builder.layers.store import BLOBS
from builder.lock import diff
from builder.plan import plan, render
from builder.plan.plan import Plan, PlannedImage

Method = Literal["assemble", "dockerfile"]
ASSEMBLE: Method = "assemble"
DOCKERFILE: Method = "dockerfile"
SHOWN = 20  # changed packages; the others are counted
LOCKS_CHANGED = """\
locks/ changed, because Debian updated packages:
  git diff locks                                shows the changes
  git commit -m 'Update Debian packages' locks  keeps them
  git restore locks                             undoes them"""


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Options for making images. `jobs` are made at a time; without `test`, they are neither tested nor tagged.

    `locked` makes it an error that locked Debian packages are gone. `junit` is a folder for reports of tests.
    """

    jobs: int = 2
    method: Method = ASSEMBLE
    test: bool = True
    locked: bool = False
    gpu_mode: gpus.Mode = gpus.AUTO
    junit: Path | None = None


def make_images(run: Run, planned: Plan, options: ImageOptions) -> list[Outcome]:
    """Makes every image of a plan, which was compared with images/. Returns their outcomes in its order.

    A failure is in the outcome of its image. The caller holds the lock of the checkout.

    Raises StaleError with `locked` (--locked) if locked Debian packages are gone, or the error of locking them.
    """
    run.engine.check()  # without an engine, neither locks nor the store change
    tester = None
    if options.test:
        tester = new_tester(run, planned.images, jobs=options.jobs, gpu_mode=options.gpu_mode, junit=options.junit)
    # Debian's archives delete a package when it has a newer version. For a person, that is no failure: today's packages
    # are locked, and the run goes on with them.
    systems = SystemLayers.of(LayerLookup.of(run))
    has_new_locks = lock_stale_systems(
        systems, planned, uses_store=options.method == ASSEMBLE, is_locked=options.locked
    )
    try:
        if has_new_locks:
            # images/ is still current: Dockerfiles name locks, not packages. Layers of the earlier packages are no
            # longer known.
            planned = render.load_checked_plan(run.project, [image.cell for image in planned.images])
            systems = replace(systems, lookup=LayerLookup.of(run))
        if options.method == DOCKERFILE:
            # These images do not have the layers of the plan, so that a smaller one may have other contents.
            return build_test_tag(run, DockerfileBuilder(systems), tester, with_all_tests(planned), options.jobs)

        # With --store-limit, deletes unused files of the store: no other builder may use it meanwhile.
        garbage.make_room(run.store, planned.images)
        with run.store.used():
            return build_test_tag(run, Assembler(systems, jobs=options.jobs), tester, planned, options.jobs)
    except BuilderError as error:
        return [Outcome(image=image, error=error) for image in planned.images]
    finally:
        if has_new_locks:  # also after a failure or Ctrl-C: the checkout has changed
            run.view.say(LOCKS_CHANGED)


def lock_stale_systems(systems: SystemLayers, planned: Plan, *, uses_store: bool, is_locked: bool) -> bool:
    """Locks current packages for operating systems that must be made, but whose locked packages no archive has.

    Without `uses_store`, all operating systems must be made, from archives alone. Returns True if there were any such
    packages. With `is_locked` (--locked), raises StaleError instead, or the error of locking them.
    """
    run, lookup = systems.run, systems.lookup
    project, view, store = run.project, run.view, run.store
    images = {image.os_inputs: image for image in planned.images}
    if uses_store:
        with store.used():
            images = {
                inputs: image
                for inputs, image in images.items()
                if not (lookup.in_store(inputs) or lookup.in_registry(inputs))
            }
    requests = {image.os_request for image in images.values()}
    blobs = store.root / BLOBS if uses_store else None
    new, failures = os_resolve.current_locks_of_stale(project, requests, systems.archives, blobs)
    if is_locked and failures:
        raise join(failures, "locks failed")
    for failure in failures:  # without --locked, only the images that need this operating system fail, when built
        view.say(f"cannot lock current packages: {failure}")
    if not new:
        return False

    before = {request: OS_LOCKS.read(project.root, request) for request in new}
    lines = diff.lock_changes(
        {request.path: lock.packages for request, lock in before.items() if lock},
        {request.path: lock.packages for request, lock in new.items()},
    )
    more = [f"... and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    ids = [image.id for image in planned.images if image.os_request in new]
    follows = "With --locked, that is an error:" if is_locked else "Locking the current versions:"
    head = f"Locked Debian packages are no longer in any archive. {follows}"
    text = "\n".join([head, *(f"  {line}" for line in [*lines[:SHOWN], *more, f"in {', '.join(ids)}"])])
    if is_locked:
        hint = "Run the same command with --no-locked to lock the current versions, then commit locks/."
        raise StaleError(text, hint=hint)
    view.say(text)
    for request, lock in new.items():
        OS_LOCKS.write(project.root, request, lock)
    # No image has the layers of the earlier packages any more; `builder render --check` would report them.
    with suppress(LockError, StaleError):  # other cells are not locked, or their locks are out of date
        complete = plan.make_locked_plan(project, project.cells)
        known_layers.prune(project.root, {layer.inputs for image in complete.images for layer in image.layers})
        project.record({image.id: image.plan for image in complete.images})
    return True


def build_test_tag(
    run: Run, maker: Assembler | DockerfileBuilder, tester: Tester | None, planned: Plan, jobs: int
) -> list[Outcome]:
    """Builds, tests and tags each image where that is not done; without a tester, only builds.

    Closes `maker`. Raises ImageTestError if required GPU tests cannot run, before anything is built.
    """
    with closing(maker):
        run.engine.sweep(str(run.project.root))  # containers of killed runs
        if tester:
            tester.check(planned.images)

        # An image is done if the engine has it as planned, its tests passed, and it has all its tags.
        done: dict[str, Outcome] = {}
        present: dict[str, _State] = {}
        todo = []
        for image in planned.images:
            if loaded := maker.find(image):
                present[image.id] = _state_of(run, tester, image, loaded)
            if loaded and present[image.id].is_done:
                done[image.id] = _finish(run, maker, tester, image, present[image.id])
            elif error := run.engine.info().foreign_error(image.cell.arch):
                done[image.id] = Outcome(image=image, error=error)
            else:
                todo.append(image)

        def make_image(image: PlannedImage) -> Outcome:
            # Its layers become an image, and the engine loads it.
            state = present.get(image.id) or _state_of(run, tester, image, maker.build(image))
            outcome = _finish(run, maker, tester, image, state)
            note = state.loaded.id.removeprefix("sha256:")[:12]  # for users who want to look inside
            if state.is_done:
                note += f", {state.untested or 'unchanged'}"
            elif outcome.coverage:
                # All names have one repository: of the other names, only the tags are shown.
                tags = [f":{name.rpartition(':')[2]}" for name in image.local_names[1:]]
                note += f", {outcome.coverage.summary}\n  {', '.join([image.local_names[0], *tags])}"
            run.view.end(image.id, "done", note)
            return outcome

        # Missing layers are made at the same time, once for all images. An image begins when its own are made.
        with run.view.live():
            missing = [image for image in todo if image.id not in present]
            try:
                if missing:
                    maker.start(missing)
            except BuilderError as error:  # a compiler or buildx that cannot be used, for example
                done |= {image.id: Outcome(image=image, error=error) for image in missing}
                missing = []
            todo = [image for image in todo if image.id not in done]
            # Those with the longest tests first: at the end, one processor waited a minute for the last image.
            built = sorted((image for image in todo if image.id in present), key=lambda image: -len(image.thorough))
            ready = chain(built, maker.as_ready(missing))
            done |= for_each_image(run, tester, jobs, todo, make_image, ready)
    return [done[image.id] for image in planned.images]


@dataclass(frozen=True, kw_only=True)
class _State:
    """An image in the engine, and what is not done. `untested` is the reason that this run does not test it."""

    loaded: LoadedImage
    untested: str = ""
    coverage: Coverage = NO_RESULTS
    is_tested: bool = True
    missing_names: Sequence[str] = ()

    @property
    def is_done(self) -> bool:
        return self.is_tested and not self.missing_names


def _state_of(run: Run, tester: Tester | None, image: PlannedImage, loaded: LoadedImage) -> _State:
    reason = loaded.origin if tester is None else why_not_run(run.engine.info(), image)
    if tester is None or reason:
        return _State(loaded=loaded, untested=reason)
    coverage = tester.coverage(image, loaded)
    return _State(
        loaded=loaded,
        coverage=coverage,
        is_tested=tester.is_complete(image, coverage),
        missing_names=_missing_names(run, image, loaded),
    )


def _finish(
    run: Run, maker: Assembler | DockerfileBuilder, tester: Tester | None, image: PlannedImage, state: _State
) -> Outcome:
    """Tests and tags an image in the engine, where that is not done."""
    if tester is None or state.untested:
        return Outcome(image=image, loaded=state.loaded)

    # Only the tests that have not passed yet: those on a GPU may be new to this machine.
    coverage = state.coverage if state.is_tested else tester.test(image, state.loaded, state.coverage)

    # The full tag last: it marks a complete image. Then mark the image as tested in the store, every time: an earlier
    # run may have been killed before it did so.
    for name in state.missing_names:
        run.engine.tag(state.loaded.id, ImageRef.parse(name))
    maker.record_tagged(image)
    return Outcome(
        image=image,
        loaded=state.loaded,
        tested=not state.is_tested,
        tagged=bool(state.missing_names),
        coverage=coverage,
    )


def with_all_tests(planned: Plan) -> Plan:
    """The plan, with images that must pass their thorough tests themselves, even if another image could run them."""
    images = (replace(image, thorough=frozenset(image.components)) for image in planned.images)
    return replace(planned, images=tuple(images))


def _missing_names(run: Run, image: PlannedImage, loaded: LoadedImage) -> list[str]:
    """The names of an image that the engine lacks, or has for another image. The full tag, which comes last, is the
    last one to set."""
    info = run.engine.image(loaded.id)
    missing = []
    for name in reversed(image.local_names):
        # The engine lists names in its own form (without `docker.io/`, for example): look up names that are not listed.
        if not info or name not in info.tags:
            tagged = run.engine.image(name)
            if tagged is None or tagged.id != loaded.id:
                missing.append(name)
    return missing
