"""From plan to tagged images: build, test, tag, for each image by itself. What is done already is not done again."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from builder import base, build, context, errors
from builder.base import Base
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
    tester = Tester(work.engine, work.project, work.view, work.host.hide)
    todo = [image for image in plan.images if not is_done(work, tester, image, test=test, tag=tag)]
    if not todo:
        return 0
    if test:
        _need_client()
    missing = [image for image in todo if not build.find(work.engine, work.project.state, image)]
    # All contexts now: a file that is edited while images are built belongs to the next plan.
    contexts = {image.id: context.make(work.project.root, image, _lent(work, image)) for image in missing}
    bases = _bases(work, missing)
    if missing:
        _check_disk(work.engine, Plan(images=tuple(missing)))
    commit = revision(work.project)

    def one(image: PlannedImage) -> None:
        image_id = build.find(work.engine, work.project.state, image)
        if not image_id:
            from_ = bases[_release(work, image)]
            image_id = build.build(
                work.engine, work.project, image, contexts[image.id], from_, work.host, commit, work.view
            )
        note = image_id.removeprefix("sha256:")[:12]
        if test:
            proof = tester.known(image, image_id)
            if proof is None or not proof.is_pass:
                proof = tester.test(image, image_id)
            note += f", {len(proof.passed)} tests passed, gpu: {proof.gpu}"
            if tag:
                _tag(work.engine, image, image_id)
                note += f"\n  {'  '.join(image.references)}"
        work.view.end(image.id, "done", note)

    with work.view.shown():
        _each(todo, one, work.view, jobs, on_interrupt=tester.stop)
    return len(todo)


def is_done(work: Work, tester: Tester, image: PlannedImage, *, test: bool, tag: bool) -> bool:
    """Whether the engine has this plan's image, with passing evidence, under every tag."""
    image_id = build.find(work.engine, work.project.state, image)
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
    _need_client()
    work.engine.sweep(str(work.project.root))
    tester = Tester(work.engine, work.project, work.view, work.host.hide)

    def one(image: PlannedImage) -> None:
        image_id = build.find(work.engine, work.project.state, image)
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


def _need_client() -> None:
    """Before minutes of building, not after."""
    if not shutil.which("docker"):
        raise EngineError(
            "the image tests need the `docker` command",
            hint="On Debian or Ubuntu: apt-get install docker.io   (docker-cli since Debian 13)",
        )


def _release(work: Work, image: PlannedImage) -> str:
    return work.project.matrix.python[image.cell.python].debian


def _lent(work: Work, image: PlannedImage) -> dict[str, bytes]:
    return work.host.files(_release(work, image))


def _bases(work: Work, images: Sequence[PlannedImage]) -> dict[str, Base]:
    releases = dict.fromkeys(_release(work, image) for image in images)
    return {release: base.ensure(work.engine, work.project, release, work.host, work.view.say) for release in releases}


def _check_disk(engine: Engine, plan: Plan) -> None:
    info = engine.info()
    if info.is_local:  # of an engine elsewhere we cannot know
        build.check_disk(shutil.disk_usage(info.root).free, plan, info.root, engine.cache_bytes())


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
        raise errors.join([failures[image.id] for image in images if image.id in failures])


def clean(engine: Engine, project: Project, *, cache: bool) -> str:
    """Removes what no tag names; returns a sentence on what was freed."""
    containers = engine.sweep(str(project.root))
    ours = build.built_ids(project.state)
    untagged = [image for image in engine.images(build.PLAN_LABEL) if image.id in ours and not image.tags]
    removed = [image for image in untagged if engine.remove_image(image.id)]
    for log in project.logs.glob("*.log"):
        log.unlink()
    freed = engine.prune_cache() if cache else 0
    said = f"removed {containers} containers and {len(removed)} images"
    return said + (f", freed {size(freed)} of build cache" if cache else "")
