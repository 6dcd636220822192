"""Turns a plan into tagged images: builds, tests and tags each one separately, and skips what is done already."""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from builder.build import operating_systems
from builder.build.context import ImageProvider, LoadedImage, Origin, RunContext
from builder.build.image_tests import Tester
from builder.common import errors, machine
from builder.common.errors import BuilderError, EngineError, FetchError
from builder.common.reference import ImageRef
from builder.common.text import counted, duration, size
from builder.compat import gpus
from builder.evidence.results import Coverage
from builder.plan.plan import Plan, PlannedImage

SLOW_S = 5  # tests and steps that take longer are named at the end
_ORIGINS: dict[Origin, str] = {"built": "built", "loaded": "loaded from the store", "present": "already built"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to do for each image. Without `test`, images are neither tested nor tagged.

    `jobs` images at a time; `junit` is a folder for reports of the tests.
    """

    jobs: int = 2
    test: bool = True
    gpu_mode: gpus.Mode = gpus.AUTO
    junit: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was done for one image. `coverage` is that of its test results, including those of earlier runs."""

    image: PlannedImage
    loaded: LoadedImage | None = None
    tested: bool = False
    tagged: bool = False
    coverage: Coverage | None = None
    seconds: float = 0
    error: BuilderError | None = None

    @property
    def is_up_to_date(self) -> bool:
        """Whether there was nothing to do."""
        return self.error is None and self.origin == "present" and not self.tested and not self.tagged

    @property
    def origin(self) -> Origin:
        return self.loaded.origin if self.loaded else "present"

    def as_data(self) -> dict[str, Any]:
        """For `--format json`."""
        tests = self.coverage and {
            "passed": len(self.coverage.passed),
            "failed": self.coverage.failed,
            "gpu": self.coverage.gpu_status,
        }
        return {
            "cell": self.image.id,
            "image": self.loaded.id if self.loaded else "",
            "made": self.origin,
            "tested": self.tested,
            "tagged": self.tagged,
            "references": list(self.image.local_names),
            "tests": tests,
            "seconds": round(self.seconds, 1),
            "error": str(self.error) if self.error else None,
        }


def summary(outcomes: Sequence[Outcome]) -> str:
    """What was done for the images of these outcomes."""
    failed = sum(outcome.error is not None for outcome in outcomes)
    done = [outcome for outcome in outcomes if not outcome.error and not outcome.is_up_to_date]
    current = len(outcomes) - failed - len(done)
    parts = [_steps(done)] if done else []
    parts += [f"{counted(current, 'image')} up to date"] if current else []
    parts += [f"{counted(failed, 'image')} failed"] if failed else []
    return ". ".join(parts) or "no images"


def times(spent: Mapping[tuple[str, str], float], planned: Collection[str]) -> str:
    """Where the time went, over all images, from what each row of the view spent in each state; empty for short runs.

    `planned` are ids of images; other rows are operating systems and downloads.
    """
    sums: dict[str, float] = {}
    for (row, state), seconds in spent.items():
        name = state if row in planned else "operating systems" if row.startswith(operating_systems.ROW) else row
        sums[name] = sums.get(name, 0.0) + seconds
    longest = sorted(
        ((name, seconds) for name, seconds in sums.items() if seconds >= SLOW_S), key=lambda item: -item[1]
    )
    return ", ".join(f"{name} {duration(seconds)}" for name, seconds in longest)


def _steps(done: Sequence[Outcome]) -> str:
    """`2 images built, tested and tagged`, or `5 images tagged: 2 built, 3 already built; 5 tested`."""
    origins = {word: sum(outcome.origin == kind for outcome in done) for kind, word in _ORIGINS.items()}
    if origins[_ORIGINS["present"]] == len(done):
        origins = {}
    tests = {"tested": sum(outcome.tested for outcome in done)}
    tags = {"tagged": sum(outcome.tagged for outcome in done)}
    counts = {step: count for step, count in {**origins, **tests, **tags}.items() if count}
    common = [step for step, count in counts.items() if count == len(done)]
    images = counted(len(done), "image")
    if len(common) == len(counts):
        return f"{images} {' and '.join([', '.join(common[:-1]), common[-1]] if common[1:] else common)}"
    others = [
        [f"{counts[step]} {step}" for step in group if step in counts and step not in common[-1:]]
        for group in (origins, tests, tags)
    ]
    details = "; ".join(", ".join(group) for group in others if group)
    return f"{images} {common[-1]}: {details}" if common else f"{images}: {details}"


def make_images(run: RunContext, provider: ImageProvider, plan: Plan, options: Options) -> list[Outcome]:
    """Makes every image of the plan: builds, tests and tags it, each only if that is not done already.

    Returns what was done, in the order of the plan. A failure is in the outcome of its image and does not stop the
    others. Raises ImageTestError if required GPU tests cannot run, before anything is built.
    """
    if not provider.assembles:
        # Their layers are not those of the plan, so the plan cannot show that a smaller image has the same contents.
        plan = _with_all_tests(plan)
    tester = new_tester(run, plan, options)

    # What the engine has as planned, with passing evidence and under every tag, is done.
    present = {image.id: provider.find(image) for image in plan.images}
    done: dict[str, Outcome] = {}
    for image in plan.images:
        loaded = present[image.id]
        if loaded and (outcome := _finished(run, tester, options, image, loaded)):
            done[image.id] = outcome
            if options.test:
                provider.record_tagged(image)  # a run that was killed may not have
    for image in plan.images:
        if image.id not in done and (error := run.engine.info().foreign_error(image.cell.arch)):
            done[image.id] = Outcome(image=image, error=error)
    todo = [image for image in plan.images if image.id not in done]
    if not todo:
        return [done[image.id] for image in plan.images]
    if options.test:
        check_docker_client()

    def make_image(image: PlannedImage) -> Outcome:
        loaded = present[image.id] or provider.build(image)
        note = loaded.id.removeprefix("sha256:")[:12]
        # A build may find that the image is complete: the store had it, or the engine's cache all its steps.
        if outcome := _finished(run, tester, options, image, loaded):
            if options.test:
                provider.record_tagged(image)
            run.view.end(image.id, "done", f"{note}, {'unchanged' if options.test else loaded.origin}")
            return outcome
        known = tester.coverage(image, loaded)
        is_tested = tester.is_complete(image, known)
        coverage = known if is_tested else tester.test(image, loaded, known)
        for reference in reversed(image.local_names):  # the full tag last: it marks a complete image
            run.engine.tag(loaded.id, ImageRef.parse(reference))
        provider.record_tagged(image)
        run.view.end(image.id, "done", f"{note}, {tests_text(coverage)}\n  {'  '.join(image.local_names)}")
        return Outcome(image=image, loaded=loaded, tested=not is_tested, tagged=True, coverage=coverage)

    with run.view.live():
        try:
            if missing := [image for image in todo if not present[image.id]]:
                try:
                    provider.prepare(missing)
                except BuilderError as error:  # too little disk space, for example
                    done |= {image.id: Outcome(image=image, error=error) for image in missing}
                    todo = [image for image in todo if present[image.id]]
                    missing = []
            waiting_for_layers = {image.id for image in missing}
            done |= run_steps(run, tester, provider, options.jobs, todo, make_image, waiting_for_layers)
        finally:
            provider.close()
    return [done[image.id] for image in plan.images]


def retest(run: RunContext, provider: ImageProvider, plan: Plan, options: Options) -> list[Outcome]:
    """Runs all tests of images that are built, whatever passed before; tags nothing."""
    check_docker_client()
    plan = _with_all_tests(plan)
    tester = new_tester(run, plan, options)

    def test_image(image: PlannedImage) -> Outcome:
        loaded = provider.find(image)
        if not loaded:
            raise EngineError(f"{image.id}: not built", hint=f"builder build {image.id}")
        if error := run.engine.info().foreign_error(image.cell.arch):
            raise error
        coverage = tester.test(image, loaded)
        run.view.end(image.id, "done", tests_text(coverage))
        return Outcome(image=image, loaded=loaded, coverage=coverage, tested=True)

    with run.view.live():
        done = run_steps(run, tester, provider, options.jobs, plan.images, test_image)
    return [done[image.id] for image in plan.images]


def _with_all_tests(plan: Plan) -> Plan:
    """The plan, with images that must pass their thorough tests themselves, even if a smaller sibling is in it."""
    return replace(plan, images=tuple(replace(each, thorough=frozenset(each.components)) for each in plan.images))


def new_tester(run: RunContext, plan: Plan, options: Options) -> Tester:
    """Removes containers of killed runs. Raises ImageTestError if tests cannot run that must run."""
    run.engine.sweep(str(run.project.root))
    pool = gpus.Pool(min(options.jobs, sum(not image.cell.is_cpu for image in plan.images)))
    # Tests of one image, one after the other, use half of two processors: most wait for the start of a container.
    processes = math.ceil(1.5 * machine.processors() / min(options.jobs, max(1, len(plan.images))))
    tester = Tester(run, gpu_mode=options.gpu_mode, pool=pool, junit=options.junit, processes=processes)
    if options.test:
        tester.check(plan.images)
    return tester


def _finished(
    run: RunContext, tester: Tester, options: Options, image: PlannedImage, loaded: LoadedImage
) -> Outcome | None:
    """An outcome if the engine has the image with passing evidence, under every tag; without tests, if it has it."""
    if not options.test:
        return Outcome(image=image, loaded=loaded)
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


def run_steps(
    run: RunContext,
    tester: Tester,
    provider: ImageProvider,
    jobs: int,
    images: Sequence[PlannedImage],
    step: Callable[[PlannedImage], Outcome],
    waiting_for_layers: Collection[str] = (),
) -> dict[str, Outcome]:
    """Calls `step` for `jobs` images at a time; outcomes by image id, an error in that of its image.

    Images whose layers are complete go first, in their order, so that none waits for the operating system of another.
    `waiting_for_layers` are the ids of those that may have to wait.
    """
    outcomes: dict[str, Outcome] = {}
    if len(images) > 1:
        here = f"{counted(machine.processors(), 'processor')}, {size(machine.memory())} of memory"
        run.view.say(f"{counted(jobs, 'image')} at a time ({here}; --jobs sets another number)")
    pool = ThreadPoolExecutor(max_workers=jobs)
    run.view.add_waiting(image.id for image in images)
    waiting = list(images)
    running: dict[Future[Outcome], PlannedImage] = {}
    try:
        while waiting or running:
            layers = {image.id: provider.pending(image) if image.id in waiting_for_layers else [] for image in waiting}
            for image in [image for image in waiting if not layers[image.id]][: jobs - len(running)]:
                waiting.remove(image)
                running[pool.submit(_timed, step, image)] = image
            making = [] if len(running) == jobs else [layer for image in waiting for layer in layers[image.id]]
            # Not for ever: Python notices a signal that arrives just before a wait begins only when the wait ends.
            finished, _ = wait([*running, *making], timeout=1, return_when=FIRST_COMPLETED)
            for future in [future for future in running if future in finished]:
                outcome = outcomes[running.pop(future).id] = future.result()
                if outcome.error:
                    run.view.end(outcome.image.id, "failed")
    except BaseException:
        # Do not wait for threads that read from the engine: they end with this process, as do their builds.
        pool.shutdown(wait=False, cancel_futures=True)
        tester.stop()
        raise
    pool.shutdown()
    return outcomes


def tests_text(coverage: Coverage) -> str:
    slowest = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in coverage.slowest if seconds >= SLOW_S)
    passed = f"{counted(len(coverage.passed), 'test')} passed, gpu: {coverage.gpu_status}"
    return (coverage.tests_status if coverage.is_emulated else passed) + (
        f"\n  slowest tests: {slowest}" if slowest else ""
    )


def check_docker_client() -> None:
    """Raises EngineError without the `docker` command, which the image tests need; before the build, which is slow."""
    if not shutil.which("docker"):
        raise EngineError(
            "the image tests need the `docker` command",
            hint="On Debian or Ubuntu: apt-get install docker.io   (docker-cli since Debian 13)",
        )


def _timed(step: Callable[[PlannedImage], Outcome], image: PlannedImage) -> Outcome:
    began = time.monotonic()
    try:
        outcome = step(image)
    except (BuilderError, OSError) as error:
        outcome = Outcome(image=image, error=errors.of_file(error) if isinstance(error, OSError) else error)
    return replace(outcome, seconds=time.monotonic() - began)


def failure(outcomes: Sequence[Outcome], what: str = "images failed") -> BuilderError | None:
    """One error for all failures, or None. A failure that images share is named once, with those images.

    The hint for a wheel that the index no longer has names one cell of each group: the others share its lock.
    """
    images: dict[str, list[PlannedImage]] = {}
    first: dict[str, BuilderError] = {}
    for outcome in outcomes:
        if outcome.error:
            images.setdefault(str(outcome.error), []).append(outcome.image)
            first.setdefault(str(outcome.error), outcome.error)
    failures = []
    for message, error in first.items():
        ids = [image.id for image in images[message]]
        named = message if any(image_id in message for image_id in ids) else f"{', '.join(ids)}: {message}"
        hint = error.hint
        if isinstance(error, FetchError) and error.package:
            groups = {image.cell.group: image.id for image in reversed(images[message])}
            cells = list(reversed(groups.values()))
            hint = hint.replace(errors.choose_again(error.package), errors.choose_again(error.package, cells))
        failures.append(type(error)(named, hint=hint))
    return errors.join(failures, what) if failures else None
