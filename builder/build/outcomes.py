"""The results of a command for its images, which it processes several at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from builder.build.image_tests import Tester
from builder.common import errors, machine
from builder.common.errors import BuilderError
from builder.common.text import counted, size
from builder.engine.model import LoadedImage, Origin
from builder.engine.run import Run
from builder.evidence.results import Coverage
from builder.plan.plan import PlannedImage
from builder.registry.transfer import Sent
from builder.release.tagging import TagChange


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result for one image. `coverage` says which tests passed, in this run and in earlier ones.

    `digest` is the digest of the image's manifest in a registry. `sent` counts the bytes that this machine sent to the
    registry, None if it sent nothing.
    """

    image: PlannedImage
    digest: str = ""
    sent: Sent | None = None
    loaded: LoadedImage | None = None
    tested: bool = False
    tagged: bool = False
    coverage: Coverage | None = None
    error: BuilderError | None = None

    @property
    def is_up_to_date(self) -> bool:
        """True if there was nothing to do."""
        return self.error is None and self.origin == "present" and not self.tested and not self.tagged

    @property
    def origin(self) -> Origin:
        return self.loaded.origin if self.loaded else "present"


@dataclass(kw_only=True)
class Report:
    """The result of a command, up to the error that ended it, if there was one.

    `stamp` names the release that the command staged or published. `tags` are the tags that the command set or found,
    `written` the files of the checkout that it changed.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    error: BuilderError | None = None
    stamp: str = ""
    tags: list[TagChange] = field(default_factory=list)
    written: list[str] = field(default_factory=list)

    @property
    def sent(self) -> list[Outcome]:
        """The images that this machine sent, in the order of their ids: several are sent at a time."""
        return sorted((outcome for outcome in self.outcomes if outcome.sent), key=lambda outcome: outcome.image.id)

    @property
    def bytes(self) -> int:
        """The number of bytes that this machine sent."""
        return sum(outcome.sent.sent for outcome in self.outcomes if outcome.sent)

    @property
    def changed(self) -> list[TagChange]:
        """The tags that were set for the first time, or moved."""
        return [change for change in self.tags if change.is_change]


def for_each_image(
    run: Run,
    tester: Tester | None,
    jobs: int,
    images: Sequence[PlannedImage],
    step: Callable[[PlannedImage], Outcome],
    ready: Iterable[PlannedImage] | None = None,
) -> dict[str, Outcome]:
    """Calls `step` for `jobs` images at a time. Returns the outcomes by image id; an outcome has the image's error.

    `ready` yields the images in the order in which they can begin, and may block until the next one can; by default,
    all images can begin. An internal error or an interrupt stops the running tests, and is raised.
    """
    if len(images) > 1:
        here = f"{counted(machine.processors(), 'processor')}, {size(machine.memory())} of memory"
        run.view.say(f"{counted(jobs, 'image')} at a time ({here}; --jobs sets another number)")
    run.view.add_images(image.id for image in images)

    def outcome_of(image: PlannedImage) -> Outcome:
        try:
            return step(image)
        except (BuilderError, OSError) as error:
            run.view.end(image.id, "failed")
            return Outcome(image=image, error=errors.of_file(error) if isinstance(error, OSError) else error)

    pool = ThreadPoolExecutor(max_workers=jobs)
    futures: dict[str, Future[Outcome]] = {}
    try:
        for image in images if ready is None else ready:
            futures[image.id] = pool.submit(outcome_of, image)
            for future in futures.values():
                if future.done():
                    future.result()  # raises an internal error at once
        # Python handles a signal that arrives just before a wait begins only when the wait ends: so it ends soon.
        while (waited := wait(futures.values(), timeout=1, return_when=FIRST_EXCEPTION)).not_done:
            for future in waited.done:
                future.result()
        return {cell: future.result() for cell, future in futures.items()}
    except BaseException:
        # Do not wait for threads that read from the engine: they end with this process, as do their builds.
        pool.shutdown(wait=False, cancel_futures=True)
        if tester:
            tester.stop()
        raise
    finally:
        pool.shutdown(wait=False)


def failure(outcomes: Sequence[Outcome], what: str = "images failed") -> BuilderError | None:
    """One error for all failures, or None. A failure that several images share is listed once, with their ids."""
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
        failures.append(type(error)(named, hint=error.hint))
    return errors.join(failures, what) if failures else None
