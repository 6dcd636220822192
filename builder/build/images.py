"""From plan to tagged images: builds, tests and tags each image by itself, and only if that is not done already."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from builder.build import operating_systems
from builder.build.image_tests import Tester
from builder.build.reused_tests import ReusedTests
from builder.build.work import Method, Origin, Work
from builder.common import errors, machine
from builder.common.errors import BuilderError, EngineError, ImageTestError
from builder.common.reference import ImageRef
from builder.common.units import counted, duration, size
from builder.compat import gpus
from builder.plan.plan import Plan, PlannedImage
from builder.registry.evidence import Evidence

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
    """What was done for one image. `proof` is its evidence, also from an earlier run of its tests."""

    image: PlannedImage
    image_id: str = ""
    origin: Origin = "present"
    tested: bool = False
    tagged: bool = False
    proof: Evidence | None = None
    seconds: float = 0
    error: BuilderError | None = None

    @property
    def is_up_to_date(self) -> bool:
        """Whether there was nothing to do."""
        return self.error is None and self.origin == "present" and not self.tested and not self.tagged

    def as_data(self) -> dict[str, Any]:
        """For `--format json`."""
        proof = self.proof
        tests = proof and {
            "passed": len(proof.passed),
            "reused": proof.reused_count,
            "failed": list(proof.failed),
            "gpu": proof.gpu_status,
        }
        return {
            "cell": self.image.id,
            "image": self.image_id,
            "made": self.origin,
            "tested": self.tested,
            "tagged": self.tagged,
            "references": list(self.image.references),
            "tests": tests,
            "seconds": round(self.seconds, 1),
            "error": str(self.error) if self.error else None,
        }


def summary(outcomes: Sequence[Outcome], count: int, where: str = "") -> str:
    """What was done for `count` images. Those without an outcome were up to date; `where` says where those are."""
    failed = sum(outcome.error is not None for outcome in outcomes)
    done = [outcome for outcome in outcomes if not outcome.error and not outcome.is_up_to_date]
    current = count - failed - len(done)
    parts = [_steps(done)] if done else []
    parts += [f"{counted(current, 'image')} up to date{where}"] if current else []
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


def run(work: Work, method: Method, plan: Plan, options: Options) -> list[Outcome]:
    """Makes every image of the plan; returns what was done, in the order of the plan.

    A failure is in the outcome of its image and does not stop the others.
    """
    run = _Run(work, method, plan, options)
    ids = {image.id: method.find(image) for image in plan.images}
    done = {image.id: outcome for image in plan.images if (outcome := run.finished(image, ids[image.id]))}
    todo = [image for image in plan.images if image.id not in done]
    if options.test:
        for outcome in done.values():
            method.record_tagged(outcome.image)
            run.passed(outcome.image, outcome.proof)
    if todo:
        if options.test:
            _check_client()
        with work.view.live():
            try:
                # Images with fewer components first: larger ones reuse their results.
                todo.sort(key=lambda image: len(image.components))
                if missing := [image for image in todo if not ids[image.id]]:
                    try:
                        method.prepare(missing)
                    except BuilderError as error:  # too little disk space, for example
                        done |= {image.id: Outcome(image=image, error=error) for image in missing}
                        todo = [image for image in todo if ids[image.id]]
                done |= run.each(
                    todo,
                    lambda image: run.make(image, ids[image.id]),
                    [image.id for image in todo if not ids[image.id]],
                )
            finally:
                method.close()
    return [done[image.id] for image in plan.images]


def retest(work: Work, method: Method, plan: Plan, options: Options) -> list[Outcome]:
    """Tests images that are built, whatever evidence there is; tags nothing. Returns what was done for each."""
    _check_client()
    run = _Run(work, method, plan, options)
    with work.view.live():
        done = run.each(plan.images, run.retest)
    return [done[image.id] for image in plan.images]


def complete(work: Work, method: Method, plan: Plan, options: Options) -> list[Outcome]:
    """Runs the tests that evidence lacks; tags nothing. Returns what was done for each image."""
    _check_client()
    run = _Run(work, method, plan, options)

    def test(image: PlannedImage) -> Outcome:
        image_id, origin = method.build(image)
        known = run.tester.known(image, image_id)
        try:
            proof = known or run.tester.test(image, image_id, only_missing=True)
        except ImageTestError as failed:
            try:
                method.record_tested(image, image_id)
            except BuilderError as error:
                raise errors.join(
                    [failed, error], "errors: the tests failed, and their results were not attached"
                ) from error
            raise
        method.record_tested(image, image_id)
        work.view.end(image.id, "done", _tests(proof))
        return Outcome(image=image, image_id=image_id, origin=origin, proof=proof, tested=known is None)

    with work.view.live():
        done = run.each(plan.images, test)
    return [done[image.id] for image in plan.images]


class _Run:
    def __init__(self, work: Work, method: Method, plan: Plan, options: Options) -> None:
        """Removes containers of killed runs. Raises ImageTestError if required GPU tests cannot run."""
        self.work, self.method, self.options = work, method, options
        work.engine.sweep(str(work.project.root))
        pool = gpus.Pool(min(options.jobs, sum(not image.cell.is_cpu for image in plan.images)))
        self.tester = Tester(work, gpu_mode=options.gpu_mode, pool=pool, junit=options.junit)
        if options.test:
            self.tester.check(plan.images)
        self.reused = ReusedTests(work.engine, work.project)

    def passed(self, image: PlannedImage, proof: Evidence | None) -> None:
        """Offers the results of an image to larger ones. Only layers of the plan can be compared."""
        if proof and self.method.assembles:
            self.reused.add(image, proof)

    def finished(self, image: PlannedImage, image_id: str) -> Outcome | None:
        """An outcome if the engine has this plan's image, with passing evidence, under every tag."""
        if not image_id:
            return None
        if not self.options.test:
            return Outcome(image=image, image_id=image_id)
        proof = self.tester.known(image, image_id)
        if proof is None or not self._is_tagged(image, image_id):
            return None
        return Outcome(image=image, image_id=image_id, proof=proof)

    def _is_tagged(self, image: PlannedImage, image_id: str) -> bool:
        """Whether the engine has the image under every tag."""
        engine = self.work.engine
        info = engine.image(image_id)
        # The engine lists names in its own form: one that is not listed may exist all the same.
        unlisted = set(image.references).difference(info.tags if info else ())
        return all((tagged := engine.image(reference)) and tagged.id == image_id for reference in unlisted)

    def make(self, image: PlannedImage, image_id: str) -> Outcome:
        """Builds, tests and tags an image, each unless it is done already; `image_id` if the engine has the image."""
        origin: Origin = "present"
        if not image_id:
            image_id, origin = self.method.build(image)
        note = image_id.removeprefix("sha256:")[:12]
        if outcome := self.finished(image, image_id):
            if self.options.test:
                self.method.record_tagged(image)
            self.work.view.end(image.id, "done", f"{note}, {'unchanged' if self.options.test else origin}")
            return replace(outcome, origin=origin)
        proof = self.tester.known(image, image_id)
        tested = proof is None
        proof = proof or self.tester.test(image, image_id, self.reused.reusable(image, image_id), only_missing=True)
        self.passed(image, proof)
        for reference in reversed(image.references):  # the full tag last: it says that everything is done
            self.work.engine.tag(image_id, ImageRef.parse(reference))
        self.method.record_tagged(image)
        note += f", {_tests(proof)}\n  {'  '.join(image.references)}"
        self.work.view.end(image.id, "done", note)
        return Outcome(image=image, image_id=image_id, origin=origin, tested=tested, tagged=True, proof=proof)

    def retest(self, image: PlannedImage) -> Outcome:
        """Tests an image that is built."""
        image_id = self.method.find(image)
        if not image_id:
            raise EngineError(f"{image.id}: not built", hint=f"builder build {image.id}")
        proof = self.tester.test(image, image_id)
        self.work.view.end(image.id, "done", _tests(proof))
        return Outcome(image=image, image_id=image_id, proof=proof, tested=True)

    def each(
        self, images: Sequence[PlannedImage], step: Callable[[PlannedImage], Outcome], to_build: Collection[str] = ()
    ) -> dict[str, Outcome]:
        """Calls `step` for several images at a time; outcomes by image id, an error in that of its image.

        Images whose layers are complete go first, in their order: none waits for the operating system of another.
        `to_build` are the ids of those that need layers.
        """
        outcomes: dict[str, Outcome] = {}
        jobs = self.options.jobs
        if len(images) > 1:
            here = f"{counted(machine.processors(), 'processor')}, {size(machine.memory())} of memory"
            self.work.view.say(f"{counted(jobs, 'image')} at a time ({here}; --jobs sets another number)")
        pool = ThreadPoolExecutor(max_workers=jobs)
        self.work.view.add_waiting(image.id for image in images)
        waiting = list(images)
        running: dict[Future[Outcome], PlannedImage] = {}
        try:
            while waiting or running:
                layers = {image.id: self.method.pending(image) if image.id in to_build else [] for image in waiting}
                for image in [image for image in waiting if not layers[image.id]][: jobs - len(running)]:
                    waiting.remove(image)
                    running[pool.submit(_timed, step, image)] = image
                making = [] if len(running) == jobs else [layer for image in waiting for layer in layers[image.id]]
                finished, _ = wait([*running, *making], return_when=FIRST_COMPLETED)
                for future in [future for future in running if future in finished]:
                    outcome = outcomes[running.pop(future).id] = future.result()
                    if outcome.error:
                        self.work.view.end(outcome.image.id, "failed")
        except BaseException:
            # Do not wait for threads that read from the engine: they end with this process, as do their builds.
            pool.shutdown(wait=False, cancel_futures=True)
            self.tester.stop()
            raise
        pool.shutdown()
        return outcomes


def _tests(proof: Evidence) -> str:
    also = f" and {proof.reused_count} by an image with the same contents" if proof.reused else ""
    slowest = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in proof.slowest if seconds >= SLOW_S)
    return f"{counted(len(proof.passed), 'test')} passed{also}, gpu: {proof.gpu_status}" + (
        f"\n  slowest tests: {slowest}" if slowest else ""
    )


def _check_client() -> None:
    """Raises EngineError before minutes of building, not after."""
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
    """One error for all failures, or None. A failure that images share is named once, with those images."""
    images: dict[str, list[str]] = {}
    first: dict[str, BuilderError] = {}
    for outcome in outcomes:
        if outcome.error:
            images.setdefault(str(outcome.error), []).append(outcome.image.id)
            first.setdefault(str(outcome.error), outcome.error)
    failures = []
    for message, error in first.items():
        ids = images[message]
        named = message if any(image_id in message for image_id in ids) else f"{', '.join(ids)}: {message}"
        failures.append(type(error)(named, hint=error.hint))
    return errors.join(failures, what) if failures else None
