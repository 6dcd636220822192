"""Makes the images of a plan: locks what Debian has deleted, builds, tests and tags, and skips what is done.

Each image is built, tested and tagged separately: a failure stops no other image, and the next run finishes the rest.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

from builder.build import disk
from builder.build.assemble import Assembler
from builder.build.context import LoadedImage, RunContext, with_test_files
from builder.build.dockerfile import DockerfileBuilder
from builder.build.image_tests import Tester, check_docker_client, new_tester
from builder.build.layer_lookup import LayerLookup
from builder.build.outcomes import Outcome, for_each_image
from builder.common.errors import BuilderError
from builder.common.reference import ImageRef
from builder.compat import gpus
from builder.debian.archives import Archives
from builder.engine.client import Engine
from builder.layers import garbage
from builder.layers.known_layers import KnownLayers
from builder.layers.store import Store
from builder.plan import render
from builder.plan.plan import Plan, PlannedImage
from builder.steps.stale_locks import lock_stale_systems

Method = Literal["assemble", "dockerfile"]
ASSEMBLE: Method = "assemble"
DOCKERFILE: Method = "dockerfile"


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Options for making images. `jobs` are made at a time; without `test`, they are neither tested nor tagged.

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


def make_images(run: RunContext, store: Store, planned: Plan, options: ImageOptions) -> list[Outcome]:
    """Makes every image of a plan. Returns their outcomes in its order; a failure is in the outcome of its image.

    Raises StaleError with `locked` (--locked) if locked Debian packages are gone, or the error of locking them.
    """
    project, view = run.project, run.view
    tester = None
    if options.test:
        tester = new_tester(
            with_test_files(run), planned.images, jobs=options.jobs, gpu_mode=options.gpu_mode, junit=options.junit
        )
    lookup = LayerLookup.of(project, run.host, view, store)
    if options.method == DOCKERFILE:
        # These images do not have the layers of the plan, so that a smaller one may have other contents.
        planned = with_all_tests(planned)
        return build_test_tag(run, DockerfileBuilder(run, lookup=lookup), tester, planned, options.jobs)

    # Debian's archives delete a package when it has a newer version. For a person, that is no failure: today's packages
    # are locked, and the run goes on with them.
    archives = Archives(project.matrix, run.host, view.say_once)
    has_new_locks = lock_stale_systems(
        run, store, planned, lookup, archives, is_locked=options.locked, again=options.again
    )
    try:
        if has_new_locks:
            planned = render.load_checked_plan(project, [image.cell for image in planned.images])
            lookup.known = KnownLayers(project.root)

        # Deletes unused files, to make room for the layers that the store lacks. No other builder may use it meanwhile.
        garbage.make_room(store, partial(disk.store_bytes, store, planned.images), wait=options.wait)
        with store.used():
            assembler = Assembler(run, store, jobs=options.jobs, lookup=lookup, archives=archives)
            return build_test_tag(run, assembler, tester, planned, options.jobs)
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
    run: RunContext, maker: Assembler | DockerfileBuilder, tester: Tester | None, planned: Plan, jobs: int
) -> list[Outcome]:
    """Builds, tests and tags each image, each only if that is not done; without a tester, only builds.

    Closes `maker`. Raises ImageTestError if required GPU tests cannot run, before anything is built.
    """
    engine, view = run.engine, run.view
    done: dict[str, Outcome] = {}
    present: dict[str, LoadedImage | None] = {}

    def make_image(image: PlannedImage) -> Outcome:
        # Its layers become an image, and the engine loads it; the id is in the view, for users who want to look inside.
        loaded = present[image.id] or maker.build(image)
        note = loaded.id.removeprefix("sha256:")[:12]
        # A build may find that the image is complete: the store had it, or the engine's cache all its steps.
        if outcome := _finished(engine, tester, image, loaded):
            if tester:
                maker.record_tagged(image)
            view.end(image.id, "done", f"{note}, {'unchanged' if tester else loaded.origin}")
            return outcome

        # Only the tests that have not passed yet: those on a GPU may be new to this machine.
        assert tester  # without one, the image is finished
        known = tester.coverage(image, loaded)
        is_tested = tester.is_complete(image, known)
        coverage = known if is_tested else tester.test(image, loaded, known)

        # The full tag last: it marks a complete image.
        for reference in reversed(image.local_names):
            engine.tag(loaded.id, ImageRef.parse(reference))
        maker.record_tagged(image)
        view.end(image.id, "done", f"{note}, {coverage.summary}\n  {'  '.join(image.local_names)}")
        return Outcome(image=image, loaded=loaded, tested=not is_tested, tagged=True, coverage=coverage)

    with closing(maker):
        engine.sweep(str(run.project.root))  # containers of killed runs
        if tester:
            tester.check(planned.images)

        # An image is done if the engine has it as planned, its tests passed, and it has all its tags.
        for image in planned.images:
            loaded = present[image.id] = maker.find(image)
            if loaded and (outcome := _finished(engine, tester, image, loaded)):
                done[image.id] = outcome
                if tester:
                    maker.record_tagged(image)  # a run that was killed may not have
            elif error := engine.info().foreign_error(image.cell.arch):
                done[image.id] = Outcome(image=image, error=error)
        todo = [image for image in planned.images if image.id not in done]
        if todo and tester:
            check_docker_client()

        # Missing layers are made at the same time, each once for all images. An image begins when its own are made.
        with view.live():
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


def with_all_tests(planned: Plan) -> Plan:
    """The plan, with images that must pass their thorough tests themselves, even if a smaller sibling is in it."""
    images = (replace(image, thorough=frozenset(image.components)) for image in planned.images)
    return replace(planned, images=tuple(images))


def _finished(engine: Engine, tester: Tester | None, image: PlannedImage, loaded: LoadedImage) -> Outcome | None:
    """An outcome if the image passed its tests, and the engine has it under every tag; without a tester, always."""
    if tester is None:
        return Outcome(image=image, loaded=loaded)
    coverage = tester.coverage(image, loaded)
    if not tester.is_complete(image, coverage):
        return None
    info = engine.image(loaded.id)
    # The engine lists names in its own form (without `docker.io/`, for example): look up each name that is not listed.
    for name in set(image.local_names).difference(info.tags if info else ()):
        tagged = engine.image(name)
        if tagged is None or tagged.id != loaded.id:
            return None
    return Outcome(image=image, loaded=loaded, coverage=coverage)
