"""Resolves the Debian packages of an operating system with apt, in a folder of its own.

apt resolves for an empty system what mmdebstrap and the image's own apt install: the release's essential and required
packages, and the requested ones without recommendations. Needs no root. Source: apt-get(8), apt.conf(5).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import cast

from builder.common.console import View
from builder.common.errors import EngineError, FetchError, LockError
from builder.debian import control_files
from builder.debian.os_lock import Architecture, DebianPackage, OsLock, OsRequest
from builder.index.host import KEYRING, SYSTEM_BUNDLE, Host, RunProgram, apt_of_debian
from builder.matrix.schema import AMD64, Arch

TIMEOUT_S = 300
# What mmdebstrap's variant `minbase` installs.
_RELEASE = ("?essential", "?priority(required)", "apt")
_INSTALL = re.compile(r"^Inst (\S+) \((\S+) ", re.MULTILINE)
_FIELDS = ("Package", "Version", "Architecture", "Size", "SHA256")  # of every package
_CONFIGURATION = """\
Dir "/";
Dir::Etc "{folder}";
Dir::Etc::SourceList "{folder}/sources.list";
Dir::Etc::SourceParts "-";
Dir::State "{folder}";
Dir::State::Status "{folder}/status";
Dir::Cache "{folder}/cache";
APT::Architecture "{arch}";
APT::Architectures "{arch}";
APT::Install-Recommends "false";
APT::Sandbox::User "";
Acquire::Languages "none";
Acquire::Retries "3";
"""


class Archive:
    """The packages that the archives of a Debian release have now."""

    def __init__(
        self, release: str, host: Host, folder: Path, run: RunProgram = subprocess.run, arch: Arch = AMD64
    ) -> None:
        """Downloads the lists of packages; `run` runs apt, here or in a container. Raises FetchError."""
        self._run = run
        self._release = release
        self._host = host
        self._environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "LC_ALL": "C.UTF-8",
            "APT_CONFIG": str(folder / "apt.conf"),
            **host.proxies,
        }
        configuration = _CONFIGURATION.format(folder=folder, arch=arch)
        configuration += "".join(f"{option}\n" for option in host.apt_options(release))
        if host.ca:
            (folder / "ca.crt").write_bytes(host.ca)
            configuration += f'Acquire::https::CAInfo "{folder}/ca.crt";\n'
        (folder / "apt.conf").write_text(configuration, encoding="utf-8")
        (folder / "sources.list").write_text(host.sources_list(release), encoding="utf-8")
        (folder / "status").touch()  # an empty system
        for name in ("lists/partial", "cache/archives/partial"):
            (folder / name).mkdir(parents=True)
        # By default, apt-get exits with 0 although it could not reach an archive.
        self._apt("apt-get", "update", "-q", "-o", "APT::Update::Error-Mode=any")

    def resolve(self, request: OsRequest, time: str) -> OsLock:
        """The newest packages for a request, at this time. Raises LockError, e.g. if there is no such package."""
        output = self._apt("apt-get", "install", "-s", "-q", *_RELEASE, *request.packages)
        versions = dict(_INSTALL.findall(output))
        packages = self._packages(versions)
        if unknown := versions.keys() - packages.keys():
            raise LockError(f"Debian {self._release}: apt-cache does not show {min(unknown)} {versions[min(unknown)]}")
        if missing := [name for name in request.packages if name not in packages]:
            raise LockError(
                f"Debian {self._release}: {missing[0]} is a virtual package",
                hint="Name the package that provides it.",
            )
        return OsLock(
            debian=request.debian,
            time=time,
            requested=request.packages,
            packages=tuple(packages[name] for name in sorted(packages)),
        )

    def _packages(self, versions: Mapping[str, str]) -> dict[str, DebianPackage]:
        """Packages of these versions by name, without those that the archives do not have."""
        output = self._apt(
            "apt-cache", "show", *(f"{name}={version}" for name, version in versions.items()), check=False
        )
        packages = {}
        for fields in control_files.stanzas(output):
            name, version, architecture, length, sha256 = (fields[name] for name in _FIELDS)
            packages[name] = DebianPackage(
                name=name,
                version=version,
                architecture=cast("Architecture", architecture),  # checked by the class
                source=fields.get("Source", ""),
                size=int(length),
                sha256=sha256,
            )
        return packages

    def _apt(self, *command: str, check: bool = True) -> str:
        try:
            done = self._run(
                command, capture_output=True, text=True, env=self._environment, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            raise FetchError(f"Debian {self._release}: {command[0]} took more than {TIMEOUT_S} s") from None
        if done.returncode and check:
            lines = [line for line in done.stderr.splitlines() if line.startswith("E: ")] or done.stderr.splitlines()
            reason = self._host.hide("\n".join(f"  | {line}" for line in lines[-5:]))
            accept = "To accept expired Release files, set `ignore_valid_until` of this release: docs/matrix.md."
            kind = FetchError if "update" in command else LockError
            raise kind(
                f"Debian {self._release}: {' '.join(command[:2])} failed\n{reason}",
                hint=accept if "is expired" in reason else "",
            )
        return done.stdout


class AptRunner(ABC):
    """Runs apt where this machine cannot, and shows what takes long."""

    def __init__(self, view: View) -> None:
        self.view = view

    @abstractmethod
    def container(self) -> AbstractContextManager[RunProgram]:
        """Starts a container of the newest Debian release; gives a function that runs programs in it.

        Raises EngineError.
        """


@contextmanager
def open_archive(release: str, host: Host, runner: AptRunner, arch: Arch = AMD64) -> Iterator[Archive]:
    """Opens the archives of a Debian release; apt keeps its lists of packages in a temporary folder.

    Any machine can look up the packages of any architecture. A machine that has no apt, or lacks Debian's keys or
    archives, runs apt in a container of Debian.

    Raises LockError without apt and engine, FetchError if an archive does not respond.
    """
    kinds, reason = {source.kind for source in host.apt.sources}, ""
    missing = [kind for kind in ("main", "security") if kind not in kinds]
    if not shutil.which("apt-get"):
        reason = "apt-get is not installed"
    elif not Path(KEYRING).exists():
        reason = f"{KEYRING} is missing"
    elif missing:
        reason = f"its apt does not use Debian's archive `{missing[0]}`"
    with ExitStack() as stack:
        run: RunProgram = subprocess.run
        if reason:
            error = f"Debian packages cannot be locked on this machine: {reason}"
            hint = "Start a Docker Engine, to run apt in a container. Or on Debian: add the archive to apt's sources."
            runner.view.say(f"apt cannot look up Debian packages here ({reason}): running it in a container of Debian")
            try:
                run = stack.enter_context(runner.container())
            except EngineError as failure:
                raise LockError(f"{error}; in a container: {failure}", hint=hint) from failure
            if missing:
                host = replace(host, archives=replace(host.apt, sources=apt_of_debian(run).sources))
            if not host.ca and SYSTEM_BUNDLE.exists():  # Debian's slim images have no certificates
                host = replace(host, ca=SYSTEM_BUNDLE.read_bytes())
        folder = stack.enter_context(TemporaryDirectory(prefix="builder-apt-"))
        yield Archive(release, host, Path(folder), run, arch)
