"""The base image of a Debian release: pulled where a registry answers, else put together from Debian's packages.

The second way is mmdebstrap with the machine's own archives and, inside, the sources that Debian itself would
write. It takes some 15 s, needs root (or user namespaces) and a Debian or Ubuntu host.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from builder import digest
from builder.engine import Engine
from builder.errors import FREE_DISK, DiskError, EngineError
from builder.host import Host
from builder.project import Project
from builder.reference import ImageRef

# As in Debian's own slim images: no manuals, no translations, but licences.
SLIM = (
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/groff/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
)
# Files that Docker mounts over, and logs: they would only differ between two runs.
REMOVE = "etc/hostname etc/resolv.conf var/log/apt var/log/bootstrap.log var/log/dpkg.log var/log/alternatives.log"
# Whether apt can fetch as its own user depends on the folder's permissions here, and shows in the owner of its folders.
AS_ROOT = 'APT::Sandbox::User "root";'
EPOCH = "946684800"  # 2000-01-01: a constant, so that the same packages give the same tar
TIMEOUT_S = 900


@dataclass(frozen=True, kw_only=True)
class Base:
    """What a build passes as BASE: `reference` for the engine, `name` for the image's label."""

    reference: str
    name: str


def ensure(
    engine: Engine, project: Project, release: str, host: Host, say: Callable[[str], None], *, fresh: bool = False
) -> Base:
    """The base image of a Debian release of the matrix, in the engine. Raises EngineError saying how to get one.

    `fresh` makes a bootstrapped base again, with the packages that the release has now.
    """
    image = project.matrix.debian[release].image
    if engine.image(image):
        return Base(reference=image, name=image)
    local = ImageRef(repository="gpu-images/base", tag=f"{release}-{digest.short(_recipe(release))}")
    if engine.image(str(local)) and not fresh:
        return _bootstrapped(local, release)
    try:
        say(f"base: pulling {image}")
        engine.pull(image)
        if engine.image(image):
            return Base(reference=image, name=image)
        raise EngineError(f"{image} was pulled but is not there")
    except EngineError as refusal:
        say("base: no registry answers; putting it together from Debian's packages (some 15 s)")
        return _bootstrap(engine, project, local, release, host, host.hide(str(refusal)))


def _recipe(release: str) -> str:
    return digest.of_data([2, release, SLIM, REMOVE, AS_ROOT])


def _bootstrap(engine: Engine, project: Project, local: ImageRef, release: str, host: Host, refusal: str) -> Base:
    program = _mmdebstrap(refusal)
    with project.scratch() as scratch:
        here = Path(scratch)
        tar = here / "base.tar"
        command = [
            program,
            "--variant=minbase",
            "--skip=check/qemu",
            *(f"--dpkgopt={option}" for option in SLIM),
            f"--aptopt={AS_ROOT}",
        ]
        if sources := host.sources_list(release):
            # Our archives while packages are fetched, Debian's own addresses in the result.
            (here / "sources.list").write_text(sources)
            inside = '"$1/etc/apt/sources.list"'
            command.append(f"--setup-hook=cp {inside} {here}/canonical; cp {here}/sources.list {inside}")
            command.append(f"--customize-hook=cp {here}/canonical {inside}")
        if host.apt_proxy:
            command.append(f'--aptopt=Acquire::http::Proxy "{host.apt_proxy}";')
        command.append(f'--customize-hook=cd "$1" && rm -rf {REMOVE} etc/apt/apt.conf.d/99mmdebstrap')
        command += [release, str(tar)]
        environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH, "TMPDIR": scratch}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise EngineError(f"base: Debian's packages did not come within {TIMEOUT_S} s") from error
        if done.returncode:
            told = "\n".join(f"  {line}" for line in host.hide(done.stderr).strip().splitlines()[-8:])
            if "no space left on device" in told.lower():
                raise DiskError(f"base: the disk of {scratch} is full\n{told}", hint=FREE_DISK)
            raise EngineError(f"base: mmdebstrap failed for {release}\n{told}", hint=f"The registry said: {refusal}")
        engine.import_tar(tar, local)
    return _bootstrapped(local, release)


def _bootstrapped(local: ImageRef, release: str) -> Base:
    return Base(reference=str(local), name=f"debian:{release} (made by mmdebstrap)")


def _mmdebstrap(refusal: str) -> str:
    """Its path, after installing it where that is possible."""
    if program := shutil.which("mmdebstrap"):
        return program
    if os.geteuid() == 0 and shutil.which("apt-get"):
        for command in (
            ["apt-get", "update", "-q"],
            ["apt-get", "install", "-y", "-q", "--no-install-recommends", "mmdebstrap"],
        ):
            subprocess.run(
                command,
                capture_output=True,
                env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
                check=False,
            )
        if program := shutil.which("mmdebstrap"):
            return program
    raise EngineError(
        f"base: cannot be pulled ({refusal}) and mmdebstrap, which would make it, is not installed",
        hint="As root on Debian or Ubuntu: apt-get install mmdebstrap",
    )
