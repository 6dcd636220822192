"""The base image of a Debian release: pulled where a registry answers, else put together from Debian's packages.

The second way is mmdebstrap with the machine's own archives and, inside, the sources that Debian itself would
write. It takes some 15 s, needs root (or user namespaces) and a Debian or Ubuntu host.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from builder import digest
from builder.engine import Engine
from builder.errors import DiskError, EngineError
from builder.host import Host
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
EPOCH = "946684800"  # 2000-01-01: a constant, so that the same packages give the same tar
TIMEOUT_S = 900


@dataclass(frozen=True, kw_only=True)
class Base:
    """What a build passes as BASE: `reference` names it, `id` is the engine's id, `origin` says where it is from."""

    reference: str
    id: str
    origin: str


def ensure(
    engine: Engine, image: str, release: str, host: Host, say: Callable[[str], None], *, fresh: bool = False
) -> Base:
    """The base image in the engine; `image` is pinned by digest. Raises EngineError saying how to get one.

    `fresh` makes a bootstrapped base again, with the packages that the release has now.
    """
    if found := engine.image(image):
        return Base(reference=image, id=found.id, origin="registry")
    local = ImageRef(repository="gpu-images/base", tag=f"{release}-{digest.short(_recipe(release))}")
    found = engine.image(str(local))
    if found and not fresh:
        return Base(reference=str(local), id=found.id, origin="bootstrap")
    try:
        say(f"base: pulling {image}")
        engine.pull(image)
        if pulled := engine.image(image):
            return Base(reference=image, id=pulled.id, origin="registry")
        raise EngineError(f"{image} was pulled but is not there")
    except EngineError as refusal:
        say("base: no registry answers; putting it together from Debian's packages (some 15 s)")
        return _bootstrap(engine, local, release, host, refusal)


def _recipe(release: str) -> str:
    return digest.of_data([1, release, SLIM, REMOVE])


def _bootstrap(engine: Engine, local: ImageRef, release: str, host: Host, refusal: EngineError) -> Base:
    program = _mmdebstrap(refusal)
    with tempfile.TemporaryDirectory(prefix="builder-base-") as scratch:
        here = Path(scratch)
        tar = here / "base.tar"
        command = [
            program,
            "--variant=minbase",
            "--skip=check/qemu",
            *(f"--dpkgopt={option}" for option in SLIM),
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
        environment = {**os.environ, "SOURCE_DATE_EPOCH": EPOCH}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise EngineError(f"base: Debian's packages did not come within {TIMEOUT_S} s") from error
        if done.returncode:
            told = "\n".join(f"  {line}" for line in host.hide(done.stderr).strip().splitlines()[-8:])
            if "no space left on device" in told.lower():
                raise DiskError(f"base: the disk of {scratch} is full\n{told}", hint="TMPDIR names another place.")
            raise EngineError(f"base: mmdebstrap failed for {release}\n{told}", hint=f"The registry said: {refusal}")
        image_id = engine.import_tar(tar, local)
    return Base(reference=str(local), id=image_id, origin="bootstrap")


def _mmdebstrap(refusal: EngineError) -> str:
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
    ) from refusal
