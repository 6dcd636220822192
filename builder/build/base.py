"""The base image of a Debian release: pulled from a registry, or built from Debian packages where none answers.

Only images that are built from a Dockerfile need it, and operating systems on machines where mmdebstrap cannot run.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from builder.build import bootstrap
from builder.build.bootstrap import Bootstrap, BootstrapError
from builder.build.programs import Programs
from builder.build.work import Work
from builder.common import digest
from builder.common.errors import EngineError
from builder.common.reference import ImageRef
from builder.index import mmdebstrap
from builder.plan.plan import BOOTSTRAP_INPUTS, STEPS


@dataclass(frozen=True, kw_only=True)
class Base:
    """What a build passes as BASE: `reference` for the engine, `name` for the image's label."""

    reference: str
    name: str


def bootstrapped(release: str, reference: str = "") -> Base:
    """A base that was built here; without a reference, it is not in the engine."""
    return Base(reference=reference, name=f"debian:{release} (made by mmdebstrap)")


def ensure(work: Work, release: str, *, fresh: bool = False) -> Base:
    """The base image of a Debian release of the matrix, in the engine. Raises EngineError saying how to get one.

    `fresh` builds a bootstrapped base again, with the release's current packages.
    """
    engine, say = work.engine, work.view.say
    image = work.project.matrix.debian[release].image
    root = work.project.root
    if engine.image(image):
        return Base(reference=image, name=image)
    recipe = digest.of_data([4, release, *(digest.of_tree(root, root / script) for script in BOOTSTRAP_INPUTS)])
    local = ImageRef(repository="gpu-images/base", tag=f"{release}-{digest.short(recipe)}")
    local_base = bootstrapped(release, str(local))
    if engine.image(str(local)) and not fresh:
        return local_base
    try:
        say(f"base: pulling {image}")
        engine.pull(image)
        if engine.image(image):
            return Base(reference=image, name=image)
        raise EngineError(f"Docker Engine pulled {image} but does not have it")
    except EngineError as error:
        say("base: cannot be pulled; building it from Debian packages (about 15 s)")
        _bootstrap(work, local, release, work.host.hide(str(error)))
        return local_base


def _bootstrap(work: Work, local: ImageRef, release: str, pull_error: str) -> None:
    engine = work.engine
    if reason := mmdebstrap.install(work.view.say):
        raise EngineError(
            f"base: cannot be pulled ({pull_error}), and mmdebstrap cannot build it: {work.host.hide(reason)}",
            hint="As root on Debian or Ubuntu: apt-get install mmdebstrap debian-archive-keyring",
        )
    log = work.project.logs / f"base-{release}.log"
    request = Bootstrap(release=release, steps=work.project.root / STEPS, log=log)
    with work.project.scratch() as scratch:
        try:
            tar = bootstrap.run(request, work.host, Path(scratch), Programs(), lambda _: None)
        except BootstrapError as error:
            raise EngineError(f"base: {error}", hint=f"Error of the registry: {pull_error}") from error
        before = engine.image(str(local))
        image_id = engine.import_tar(tar, local)
        if before and before.id != image_id:
            engine.remove_image(before.id)  # it has lost its name; stays if an image is based on it
