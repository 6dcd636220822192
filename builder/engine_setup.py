"""Finds a Docker Engine, or installs one from the distribution's packages and starts it. Never touches one that runs.

Debian 12 has Engine 20.10, too old for what is done here; trixie's 26.1.5 needs nothing newer than Debian 12's C
library and is taken from there, through apt files of our own: the machine's sources stay as they are.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from builder import host
from builder.engine import Engine
from builder.errors import EngineError, NoEngineError

MINIMUM = (23, 0)
START_S = 60
DAEMON_LOG = Path("/var/log/dockerd.log")
PID_FILE = Path("/var/run/docker.pid")
SETUP_LOG = Path("/var/log/gpu-images-engine-setup.log")
PACKAGES = ("docker.io", "docker-cli", "docker-buildx", "iptables")
COMPOSE_MINIMUM = (2, 0)  # what went before was another program, `docker-compose`
COMPOSE_PACKAGES = ("docker-compose-v2", "docker-compose")  # Ubuntu's name, and Debian's
TRIXIE = "trixie"
PREFERENCES = """\
Package: *
Pin: release n=trixie
Pin-Priority: 100

Package: docker.io docker-cli docker-buildx docker-compose
Pin: release n=trixie
Pin-Priority: 990
"""


def ensure(say: Callable[[str], None]) -> Engine:
    """An engine that answers; raises EngineError with the command that a person has to run.

    Writes nothing into the checkout: under sudo, its files would be root's.
    """
    try:
        return new_enough(Engine.connect())
    except NoEngineError as absent:
        refuse_unless_possible(os.environ, os.geteuid(), host.os_release(), absent)
    if not shutil.which("dockerd"):
        install(say)
    start(say)
    return new_enough(Engine.connect())


def new_enough(engine: Engine) -> Engine:
    """Raises EngineError for an engine that is too old; it is not ours to replace."""
    version = engine.info().version
    if parse_version(version) < MINIMUM:
        raise EngineError(
            f"Docker Engine {version} answers, but {MINIMUM[0]} or newer is needed",
            hint="Upgrade it with the packages that it was installed from.",
        )
    return engine


def refuse_unless_possible(
    environ: Mapping[str, str], uid: int, release: Mapping[str, str], absent: EngineError
) -> None:
    """Raises EngineError unless this machine is one that we can set up."""
    if environ.get("DOCKER_HOST"):
        raise EngineError(str(absent), hint="DOCKER_HOST names it: start it there, or unset DOCKER_HOST.") from absent
    if not _has_apt(release):
        name = release.get("PRETTY_NAME", "this system")
        raise EngineError(
            f"no Docker Engine answers, and on {name} it has to be installed by hand",
            hint="Install Docker Engine 23 or newer with the system's package manager, start it, and run this again.",
        ) from absent
    if uid != 0:
        raise EngineError(
            "no Docker Engine answers, and installing or starting one needs root",
            hint="Run: sudo .venv/bin/builder engine   "
            "(to use it as this user: sudo usermod -aG docker $USER, then log in again)",
        ) from absent


def install(say: Callable[[str], None]) -> None:
    """Installs the engine's packages; raises EngineError with the end of apt's output."""
    log = SETUP_LOG
    log.write_text("")
    say("engine: installing Docker Engine from the distribution's packages (about a minute)")
    _apt(["update", "-q"], log)
    with TemporaryDirectory(prefix="builder-engine-") as folder:
        options: list[str] = []
        if _candidate() < MINIMUM:
            options = _trixie(Path(folder))
            _apt([*options, "update", "-q"], log)
        known = [name for name in PACKAGES if _exists(name, options)]
        _apt([*options, "install", "-y", "-q", "--no-install-recommends", *known], log)


def ensure_compose(say: Callable[[str], None]) -> tuple[int, int]:
    """The version of `docker compose`, which is installed as the engine is if it is not there.

    No step of making images needs it: it is for those who deploy them, and for the tests of that. Raises EngineError.
    """
    if (found := compose_version()) >= COMPOSE_MINIMUM:
        return found
    if os.geteuid() != 0 or not _has_apt(host.os_release()):
        raise EngineError(
            "`docker compose` is not installed, and installing it needs root on Debian or Ubuntu",
            hint="Install Docker's Compose plugin, version 2 or newer, with the system's package manager.",
        )
    log = SETUP_LOG
    say("engine: installing Docker's Compose plugin from the distribution's packages")
    _apt(["update", "-q"], log)
    with TemporaryDirectory(prefix="builder-engine-") as folder:
        options: list[str] = []
        name = next((one for one in COMPOSE_PACKAGES if _candidate(one) >= COMPOSE_MINIMUM), "")
        if not name:
            name, options = "docker-compose", _trixie(Path(folder), "Compose is older than 2")
            _apt([*options, "update", "-q"], log)
        _apt([*options, "install", "-y", "-q", "--no-install-recommends", name], log)
    if (found := compose_version()) < COMPOSE_MINIMUM:
        raise EngineError("`docker compose` was installed but does not answer", hint=f"Look into {log}.")
    return found


def compose_version() -> tuple[int, int]:
    """(0, 0) where there is none."""
    try:
        done = subprocess.run(["docker", "compose", "version", "--short"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return (0, 0)
    return parse_version(done.stdout.strip().removeprefix("v")) if done.returncode == 0 else (0, 0)


def start(say: Callable[[str], None]) -> None:
    """Starts dockerd and waits until it answers; raises EngineError with the end of its log."""
    if Path("/run/systemd/system").is_dir():
        say("engine: starting docker.service")
        subprocess.run(["systemctl", "start", "docker"], capture_output=True, check=False)
    else:
        forget_dead(PID_FILE)
        say(f"engine: starting dockerd; it is left running, its log is {DAEMON_LOG}")
        with DAEMON_LOG.open("ab") as log:
            # A session of its own: it must outlive this program and its terminal.
            subprocess.Popen(
                ["dockerd"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/"
            )
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        try:
            Engine.connect()
        except EngineError:
            time.sleep(0.3)
        else:
            return
    told = DAEMON_LOG.read_text(errors="replace").splitlines()[-6:] if DAEMON_LOG.exists() else []
    raise EngineError(
        f"dockerd was started but does not answer after {START_S} s\n" + "\n".join(f"  {line}" for line in told),
        hint=f"Look into {DAEMON_LOG} (or `journalctl -u docker`).",
    )


def forget_dead(pid_file: Path) -> None:
    """Removes the file of a dockerd that was killed: its number may be that of another process now, and dockerd
    would then refuse to start."""
    try:
        number = int(pid_file.read_text())
        running = Path(f"/proc/{number}/comm").read_text().strip()
    except FileNotFoundError:  # no file, or no such process, which dockerd sees itself
        return
    except ValueError:
        running = ""
    if running != "dockerd":
        pid_file.unlink()


def parse_version(text: str) -> tuple[int, int]:
    """`26.1.5+dfsg1-9` to (26, 1); (0, 0) for anything else."""
    found = re.match(r"(?:\d+:)?(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _has_apt(release: Mapping[str, str]) -> bool:
    return bool({release.get("ID", ""), *release.get("ID_LIKE", "").split()} & {"debian", "ubuntu"})


def _candidate(name: str = "docker.io") -> tuple[int, int]:
    """Version of a package that the machine's own sources would install."""
    done = subprocess.run(["apt-cache", "policy", name], capture_output=True, text=True, check=False)
    found = re.search(r"Candidate: (\S+)", done.stdout)
    return parse_version(found[1]) if found else (0, 0)


def _exists(name: str, options: Sequence[str]) -> bool:
    """Whether the sources have this package (Ubuntu's docker.io contains the client)."""
    done = subprocess.run(["apt-cache", *options, "policy", name], capture_output=True, text=True, check=False)
    return bool(re.search(r"Candidate: (?!\(none\))\S", done.stdout))


def _trixie(folder: Path, lacks: str = "Docker Engine is older than 23") -> list[str]:
    """apt options that add Debian's trixie, for the engine's packages only, without changing the machine's sources."""
    release = host.os_release()
    sources = host.read().apt_sources
    main = next((source.uri for source in sources if source.kind == "main"), "")
    codename = release.get("VERSION_CODENAME", "")
    if not main or not codename:
        raise EngineError(
            f"the distribution's {lacks}, and no Debian archive is configured here",
            hint="Install Docker Engine 23 or newer by hand, with Compose 2 or newer, start it, and run this again.",
        )
    (folder / "lists" / "partial").mkdir(parents=True, exist_ok=True)
    lines = [f"deb [signed-by={host.KEYRING}] {main} {suite} main\n" for suite in (codename, TRIXIE)]
    (folder / "sources.list").write_text("".join(lines))
    (folder / "preferences").write_text(PREFERENCES)
    settings = {
        "Dir::Etc::SourceList": folder / "sources.list",
        "Dir::Etc::SourceParts": "-",
        "Dir::Etc::Preferences": folder / "preferences",
        "Dir::State::Lists": folder / "lists",
        "Dir::Cache::pkgcache": "",
        "Dir::Cache::srcpkgcache": "",
    }
    return [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]


def _apt(arguments: Sequence[str], log: Path) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1"}
    hide = host.read().hide
    done = subprocess.run(
        ["apt-get", *arguments], env=environment, stdin=subprocess.DEVNULL, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    with log.open("a") as stream:
        stream.write(hide(done.stdout))
    if done.returncode:
        told = "\n".join(f"  {line}" for line in hide(done.stdout).splitlines()[-8:])
        raise EngineError(f"apt-get could not install Docker Engine\n{told}", hint=f"Whole log: {log}")
