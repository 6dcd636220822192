"""From plan to tagged images: build, test, tag, for each image by itself. What is done already is not done again."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from builder import base, build
from builder.base import Base
from builder.cells import Cell
from builder.engine import Engine
from builder.errors import BuilderError, EngineError
from builder.host import Host
from builder.imagetest import Tester
from builder.plan import Plan, PlannedImage
from builder.project import Project
from builder.reference import ImageRef
from builder.view import View, size


@dataclass(frozen=True, kw_only=True)
class Work:
    """What every step needs."""

    engine: Engine
    project: Project
    host: Host
    view: View


def run(work: Work, plan: Plan, *, jobs: int, test: bool = True, tag: bool = True) -> int:
    """Makes every image of the plan; returns how many there was something to do for.

    Failures do not stop the other images; they are raised together at the end.
    """
    work.engine.sweep(str(work.project.root))
    tester = Tester(work.engine, work.project, work.view)
    todo = [image for image in plan.images if not is_done(work, tester, image, test=test, tag=tag)]
    if not todo:
        return 0
    missing = Plan(images=tuple(image for image in todo if not build.find(work.engine, image)))
    bases = _bases(work, [image.cell for image in missing.images])
    if missing.images:
        _check_disk(work.engine, missing)
    labels = {"org.opencontainers.image.revision": revision(work.project)}

    def one(image: PlannedImage) -> None:
        release = work.project.matrix.python[image.cell.python].debian
        # An image that is only to be tested needs no base.
        from_ = bases.get(release) or Base(reference="", id="", origin="")
        made = build.build(work.engine, work.project, image, from_, work.host, labels, work.view)
        note = made.image_id.removeprefix("sha256:")[:12]
        if test:
            proof = tester.known(image, made.image_id)
            if proof is None or not proof.is_pass:
                proof = tester.test(image, made.image_id)
            note += f", {len(proof.passed)} tests passed, gpu: {proof.gpu}"
            if tag:
                _tag(work.engine, image, made.image_id)
                note += f"\n  {'  '.join(image.references)}"
        work.view.end(image.id, "done", note)

    with work.view.shown():
        _each(todo, one, work.view, jobs, on_interrupt=tester.stop)
    return len(todo)


def is_done(work: Work, tester: Tester, image: PlannedImage, *, test: bool, tag: bool) -> bool:
    """Whether the engine has this plan's image, with passing evidence, under every tag."""
    image_id = build.find(work.engine, image)
    if not image_id:
        return False
    proof = tester.known(image, image_id) if test else None
    if test and not (proof and proof.is_pass):
        return False
    if not tag:
        return True
    return all(found and found.id == image_id for found in map(work.engine.image, image.references))


def retest(work: Work, plan: Plan, *, jobs: int) -> None:
    """Tests images that are built, whatever evidence there is; tags nothing."""
    work.engine.sweep(str(work.project.root))
    tester = Tester(work.engine, work.project, work.view)

    def one(image: PlannedImage) -> None:
        image_id = build.find(work.engine, image)
        if not image_id:
            raise EngineError(f"{image.id}: not built", hint=f"builder build {image.id}")
        proof = tester.test(image, image_id)
        work.view.end(image.id, "done", f"{len(proof.passed)} tests passed, gpu: {proof.gpu}")

    with work.view.shown():
        _each(plan.images, one, work.view, jobs, on_interrupt=tester.stop)


def revision(project: Project) -> str:
    """The commit that is checked out, `-dirty` if files differ from it; `unknown` outside git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=project.root, capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    if not shutil.which("git") or not (commit := git("rev-parse", "HEAD")):
        return "unknown"
    return commit + ("-dirty" if git("status", "--porcelain") else "")


def _bases(work: Work, cells: Sequence[Cell]) -> dict[str, Base]:
    matrix = work.project.matrix
    releases = dict.fromkeys(matrix.python[cell.python].debian for cell in cells)
    return {
        release: base.ensure(work.engine, matrix.debian[release].image, release, work.host, work.view.say)
        for release in releases
    }


def _check_disk(engine: Engine, plan: Plan) -> None:
    info = engine.info()
    if info.is_local:  # of an engine elsewhere we cannot know
        build.check_disk(shutil.disk_usage(info.root).free, plan, info.root)


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
                except BuilderError as error:
                    failures[futures[future].id] = error
                    view.end(futures[future].id, "failed")
    except BaseException:
        # Do not wait for threads that read from the engine: they end with this process, and their builds with them.
        pool.shutdown(wait=False, cancel_futures=True)
        on_interrupt()
        raise
    pool.shutdown()
    if failures:
        raise join([failures[image.id] for image in images if image.id in failures])


def join(errors: Sequence[BuilderError]) -> BuilderError:
    """One error for several: of their common kind if they have one, else of the first one's."""
    first = errors[0]
    if len(errors) == 1:
        return first
    parts = [f"{error}{chr(10) + '  -> ' + error.hint if error.hint else ''}" for error in errors]
    return type(first)(f"{len(errors)} images failed\n" + "\n".join(parts))


def clean(engine: Engine, project: Project, *, cache: bool) -> str:
    """Removes what no tag names; returns a sentence on what was freed."""
    containers = engine.sweep(str(project.root))
    untagged = [image for image in engine.images(build.PLAN_LABEL) if not image.tags]
    removed = [image for image in untagged if engine.remove_image(image.id)]
    for log in project.logs.glob("*.log"):
        log.unlink()
    freed = engine.prune_cache() if cache else 0
    said = f"removed {containers} containers and {len(removed)} images"
    return said + (f", freed {size(freed)} of build cache" if cache else "")
