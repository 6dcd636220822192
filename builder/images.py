"""From plan to tagged images: build, test, tag, for each image by itself. What is done already is not done again."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Protocol

from builder import build, errors, gpu
from builder.engine import Engine
from builder.errors import BuilderError, EngineError
from builder.imagetest import Tester
from builder.plan import Plan, PlannedImage
from builder.project import Project
from builder.reference import ImageRef
from builder.settings import PLAN_LABEL
from builder.view import View, size
from builder.work import Work


class Method(Protocol):
    """A way to build: `builder.assemble` or `builder.build`."""

    def find(self, image: PlannedImage) -> str:
        """Id of the image in the engine if it is there as planned; empty if not."""

    def prepare(self, images: Sequence[PlannedImage]) -> None:
        """Begins what the images, which are all to be built, have in common."""

    def build(self, image: PlannedImage) -> str:
        """Has the image in the engine, untagged; returns its id."""

    def tagged(self, image: PlannedImage) -> None:
        """The image passed its tests and has its tags."""

    def close(self) -> None:
        """Ends what `prepare` began."""


def run(
    work: Work,
    method: Method,
    plan: Plan,
    *,
    jobs: int,
    test: bool = True,
    tag: bool = True,
    gpu_mode: gpu.Mode = gpu.AUTO,
) -> int:
    """Makes every image of the plan; returns how many it changed anything for.

    Failures do not stop the other images; they are raised together at the end.
    """
    work.engine.sweep(str(work.project.root))
    tester = _tester(work, plan, jobs, gpu_mode)
    if test:
        tester.check(plan.images)
    found = {image.id: method.find(image) for image in plan.images}
    todo = [image for image in plan.images if not is_done(work, tester, image, found[image.id], test=test, tag=tag)]
    if not todo:
        return 0
    if test:
        _need_client()

    unchanged: list[str] = []

    def one(image: PlannedImage) -> None:
        image_id = found[image.id] or method.build(image)
        note = image_id.removeprefix("sha256:")[:12]
        if test and not found[image.id] and is_done(work, tester, image, image_id, test=test, tag=tag):
            unchanged.append(image.id)
            work.view.end(image.id, "done", f"{note}, as it was")
            return
        if test:
            proof = tester.known(image, image_id)
            if proof is None or not proof.is_pass:
                proof = tester.test(image, image_id)
            note += f", {len(proof.passed)} tests passed, gpu: {proof.gpu_told}"
            if tag:
                _tag(work.engine, image, image_id)
                method.tagged(image)
                note += f"\n  {'  '.join(image.references)}"
        work.view.end(image.id, "done", note)

    with work.view.shown():
        try:
            if missing := [image for image in todo if not found[image.id]]:
                method.prepare(missing)
            _each(todo, one, work.view, jobs, on_interrupt=tester.stop)
        finally:
            method.close()
    return len(todo) - len(unchanged)


def is_done(work: Work, tester: Tester, image: PlannedImage, image_id: str, *, test: bool, tag: bool) -> bool:
    """Whether the engine has this plan's image, with passing evidence, under every tag."""
    if not image_id:
        return False
    proof = tester.known(image, image_id) if test else None
    if test and not (proof and proof.is_pass):
        return False
    if not tag:
        return True
    return all(found and found.id == image_id for found in map(work.engine.image, image.references))


def retest(work: Work, method: Method, plan: Plan, *, jobs: int, gpu_mode: gpu.Mode = gpu.AUTO) -> None:
    """Tests images that are built, whatever evidence there is; tags nothing."""
    _need_client()
    work.engine.sweep(str(work.project.root))
    tester = _tester(work, plan, jobs, gpu_mode)
    tester.check(plan.images)

    def one(image: PlannedImage) -> None:
        image_id = method.find(image)
        if not image_id:
            raise EngineError(f"{image.id}: not built", hint=f"builder build {image.id}")
        proof = tester.test(image, image_id)
        work.view.end(image.id, "done", f"{len(proof.passed)} tests passed, gpu: {proof.gpu_told}")

    with work.view.shown():
        _each(plan.images, one, work.view, jobs, on_interrupt=tester.stop)


def _tester(work: Work, plan: Plan, jobs: int, gpu_mode: gpu.Mode) -> Tester:
    pool = gpu.Pool(min(jobs, sum(not image.cell.is_cpu for image in plan.images)))
    return Tester(work.engine, work.project, work.view, work.host.hide, gpu_mode=gpu_mode, pool=pool)


def _need_client() -> None:
    """Before minutes of building, not after."""
    if not shutil.which("docker"):
        raise EngineError(
            "the image tests need the `docker` command",
            hint="On Debian or Ubuntu: apt-get install docker.io   (docker-cli since Debian 13)",
        )


def _tag(engine: Engine, image: PlannedImage, image_id: str) -> None:
    """Aliases first, the full tag last: a full tag says that all of it is done."""
    for reference in reversed(image.references):
        engine.tag(image_id, ImageRef.parse(reference))


def _each(
    images: Sequence[PlannedImage],
    one: Callable[[PlannedImage], None],
    view: View,
    jobs: int,
    on_interrupt: Callable[[], None],
) -> None:
    """Calls `one` for each image, `jobs` at a time; collects errors and raises them as one."""
    failures: dict[str, BuilderError] = {}
    pool = ThreadPoolExecutor(max_workers=jobs)
    view.wait_for(image.id for image in images)
    futures: dict[Future[None], PlannedImage] = {pool.submit(one, image): image for image in images}
    try:
        waiting = set(futures)
        while waiting:
            finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in finished:
                try:
                    future.result()
                except (BuilderError, OSError) as error:
                    failures[futures[future].id] = errors.of_file(error) if isinstance(error, OSError) else error
                    view.end(futures[future].id, "failed")
    except BaseException:
        # Do not wait for threads that read from the engine: they end with this process, and their builds with them.
        pool.shutdown(wait=False, cancel_futures=True)
        on_interrupt()
        raise
    pool.shutdown()
    if failures:
        raise errors.join(_merged({image.id: failures[image.id] for image in images if image.id in failures}))


def _merged(failures: Mapping[str, BuilderError]) -> list[BuilderError]:
    """Each failure once, with the images that it is about: they may share what failed."""
    same: dict[str, list[str]] = {}
    for image_id, error in failures.items():
        same.setdefault(str(error), []).append(image_id)
    result = []
    for told, ids in same.items():
        error = failures[ids[0]]
        named = told if any(one in told for one in ids) else f"{', '.join(ids)}: {told}"
        result.append(type(error)(named, hint=error.hint))
    return result


def clean(engine: Engine, project: Project, *, cache: bool) -> str:
    """Removes what no tag names; returns a sentence on what was freed."""
    containers = engine.sweep(str(project.root))
    ours = build.built_ids(project.state)
    untagged = [image for image in engine.images(PLAN_LABEL) if image.id in ours and not image.tags]
    removed = [image for image in untagged if engine.remove_image(image.id)]
    for log in project.logs.glob("*.log"):
        log.unlink()
    freed = engine.prune_cache() if cache else 0
    said = f"removed {containers} containers and {len(removed)} images"
    return said + (f", freed {size(freed)} of build cache" if cache else "")
