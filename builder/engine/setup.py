"""Finds a Docker Engine, or installs one from packages of Debian or Ubuntu and starts it. Never changes a running one.

Debian 12 has Engine 20.10, which is too old. Trixie's 26.1.5 runs with Debian 12's C library and is installed from
there, with separate apt files: the machine's sources are not changed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from builder.common.console import View
from builder.common.errors import EngineError, NoEngineError
from builder.debian import mmdebstrap
from builder.engine.client import SOCKET, Engine, engine_address
from builder.engine.model import EngineInfo
from builder.index import host

MINIMUM = (23, 0)
PODMAN_MINIMUM = (4, 3)  # Debian 12's
START_S = 60
DAEMON_LOG = Path("/var/log/dockerd.log")
PID_FILE = Path("/var/run/docker.pid")
SETUP_LOG = Path("/var/log/gpu-images-engine-setup.log")
PACKAGES = ("docker.io", "docker-cli", "docker-buildx", "iptables")
TRIXIE = "trixie"
UPDATE, INSTALL = ("update", "-q"), ("install", "-y", "-q", "--no-install-recommends")
# apt prefers trixie's engine to that of the distribution (priority 500), and takes other packages from trixie only if
# the distribution does not have them. Source: apt_preferences(5).
PREFERENCES = """\
Package: *
Pin: release n=trixie
Pin-Priority: 100

Package: docker.io docker-cli docker-buildx docker-compose
Pin: release n=trixie
Pin-Priority: 990
"""


def ensure(view: View) -> Engine:
    """A running engine, installed and started if necessary. Raises EngineError with the command to run.

    Writes nothing to the checkout: under sudo, the files would belong to root.
    """
    engine = None
    try:
        engine = Engine.connect()
    except NoEngineError as absent:
        require_installable(os.environ, os.geteuid(), host.os_release(), absent)
    if engine is None:
        if not shutil.which("dockerd"):
            SETUP_LOG.write_text("")
            install_packages(PACKAGES, MINIMUM, view)
        start(view)
        engine = Engine.connect()
    info = engine.info()
    if obstacle := too_old(info):  # never replaced: other users of this machine may need it
        raise EngineError(obstacle, hint="Upgrade its packages.")
    return engine


def too_old(info: EngineInfo) -> str:
    """The reason that an engine cannot be used, or an empty string."""
    minimum = PODMAN_MINIMUM if info.name == "Podman" else MINIMUM
    if parse_version(info.version) >= minimum:
        return ""
    needed = ".".join(map(str, minimum)).removesuffix(".0")
    return f"{info.name} {info.version} is too old: {needed} or newer is required"


def require_installable(environ: Mapping[str, str], uid: int, release: Mapping[str, str], absent: EngineError) -> None:
    """Raises EngineError unless an engine can be installed on this machine."""
    if engine_address(environ).host != SOCKET:
        variable = next((name for name in ("DOCKER_HOST", "DOCKER_CONTEXT") if environ.get(name)), "")
        instead = f"unset {variable}" if variable else "select the local one: docker context use default"
        raise EngineError(str(absent), hint=f"Start that engine, or {instead}") from absent
    if not {release.get("ID", ""), *release.get("ID_LIKE", "").split()} & {"debian", "ubuntu"}:  # they have apt
        name = release.get("PRETTY_NAME", "this system")
        raise EngineError(
            f"no Docker Engine answers, and builder cannot install one on {name}",
            hint="Install Docker Engine 23 or newer with the system's package manager, start it, and run this again.",
        ) from absent
    if uid != 0:
        raise EngineError(
            "no Docker Engine answers, and installing or starting one needs root",
            hint="Run: sudo .venv/bin/builder engine   "
            "(to use it as this user: sudo usermod -aG docker $USER, then log in again)",
        ) from absent


def install_packages(packages: Sequence[str], minimum: tuple[int, int], view: View) -> None:
    """Installs packages of this machine's release, or of Debian trixie if the first one is older than `minimum`.

    On Debian, reads only the distribution's own package sources, so that a broken third-party source does not fail the
    installation. Before it installs, shows the version and its release. Raises EngineError with the end of
    apt's output.
    """
    settings, codename = host.read_host(), host.os_release().get("VERSION_CODENAME", "")
    release = f"Debian {codename}"
    with TemporaryDirectory(prefix="builder-engine-") as name:
        folder, options = Path(name), list[str]()
        if host.is_debian() and codename and settings.apt.sources:
            (folder / "lists" / "partial").mkdir(parents=True)
            (folder / "sources.list").write_text(settings.sources_list(codename))
            (folder / "preferences").write_text(PREFERENCES)
            apt_options = {
                "Dir::Etc::SourceList": folder / "sources.list",
                "Dir::Etc::SourceParts": "-",
                "Dir::Etc::Preferences": folder / "preferences",
                "Dir::State::Lists": folder / "lists",
                "Dir::Cache::pkgcache": "",
                "Dir::Cache::srcpkgcache": "",
            }
            options = [word for setting, value in apt_options.items() for word in ("-o", f"{setting}={value}")]
        else:  # Ubuntu, for example
            release = "this machine's package sources"
        _apt([*options, *UPDATE])
        version, reason = _candidate(packages[0], options), ""
        if parse_version(version) < minimum:
            main = [source for source in settings.apt.sources if source.kind == "main"]
            if not options or not main:
                raise EngineError(
                    f"{release}: {packages[0]} is {version or 'missing'}, but "
                    f"{'.'.join(map(str, minimum)).removesuffix('.0')} or newer is required",
                    hint="Install Docker Engine 23 or newer, start it, and run this again.",
                )
            with (folder / "sources.list").open("a") as sources:
                sources.write(f"deb [signed-by={host.KEYRING}] {main[0].uri} {TRIXIE} main\n")
            _apt([*options, *UPDATE])
            reason = f", because {release} has {version or 'none'}"
            release, version = f"Debian {TRIXIE}", _candidate(packages[0], options)
        view.say(f"engine: installing {packages[0]} {version} from {release}{reason} (about a minute)")
        _apt([*options, *INSTALL, *(package for package in packages if _candidate(package, options))])


def start(view: View) -> None:
    """Starts dockerd and waits until it answers; raises EngineError with the end of its log."""
    if Path("/run/systemd/system").is_dir():
        view.say("engine: starting docker.service")
        subprocess.run(["systemctl", "start", "docker"], capture_output=True, check=False)
    else:
        remove_stale(PID_FILE)
        view.say(f"engine: starting dockerd; it keeps running, its log is {DAEMON_LOG}")
        with DAEMON_LOG.open("ab") as log:
            # In a new session: it must outlive this program and its terminal.
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
    lines = DAEMON_LOG.read_text(errors="replace").splitlines()[-6:] if DAEMON_LOG.exists() else []
    raise EngineError(
        f"dockerd was started but does not answer after {START_S} s\n" + "\n".join(f"  {line}" for line in lines),
        hint=f"See {DAEMON_LOG} (or `journalctl -u docker`).",
    )


def remove_stale(pid_file: Path) -> None:
    """Removes the pid file of a killed dockerd. Another process may have that pid now, and dockerd would not start."""
    try:
        number = int(pid_file.read_text())
        running = Path(f"/proc/{number}/comm").read_text().strip()
    except FileNotFoundError:  # no file, or no such process: dockerd handles both
        return
    except ValueError:
        running = ""
    if running != "dockerd":
        pid_file.unlink()


def parse_version(text: str) -> tuple[int, int]:
    """`26.1.5+dfsg1-9` to (26, 1); (0, 0) for anything else."""
    match = re.match(r"(?:\d+:)?(\d+)\.(\d+)", text)
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _candidate(package: str, options: Sequence[str] = ()) -> str:
    """The version of a package that apt would install; empty if there is none (on Ubuntu, docker.io has the client)."""
    done = subprocess.run(["apt-cache", *options, "policy", package], capture_output=True, text=True, check=False)
    match = re.search(r"Candidate: (?!\(none\))(\S+)", done.stdout)
    return match[1] if match else ""


def _apt(arguments: Sequence[str]) -> None:
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "NEEDRESTART_SUSPEND": "1"}
    hide = host.read_host().hide
    done = subprocess.run(
        ["apt-get", *mmdebstrap.APT_WAITS, *arguments],
        env=environment, text=True, check=False,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    output = hide(done.stdout)
    with SETUP_LOG.open("a") as log:
        log.write(output)
    if done.returncode:
        lines = "\n".join(f"  {line}" for line in output.splitlines()[-8:])
        raise EngineError(f"apt-get could not install Docker Engine\n{lines}", hint=f"Log: {SETUP_LOG}")
