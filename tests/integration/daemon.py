"""A separate Docker Engine for tests, which can be killed, with a disk that can be filled."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.integration.checkout import until

START_S = 60
ENOUGH = 8 << 30  # of its disk: a limit, not memory taken
SIOCBRADDBR, SIOCBRDELBR = 0x89A0, 0x89A1  # linux/sockios.h
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
SIOCSIFHWADDR, ARPHRD_ETHER = 0x8924, 1


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def bridge(name: str) -> Iterator[None]:
    """Creates a network bridge and removes it at the end; with ioctl, because a bare machine has no `ip`.

    The bridge gets a MAC address of its own, as dockerd gives docker0. Otherwise, its address changes with each
    container that starts or stops, and connections to other containers stall for up to 30 s.
    """
    encoded = name.encode() + b"\0"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, SIOCBRADDBR, encoded)
        try:
            mac = b"\x02\x42" + os.urandom(4)  # 02: locally administered
            fcntl.ioctl(control, SIOCSIFHWADDR, struct.pack("16sH14s", name.encode(), ARPHRD_ETHER, mac))
            yield
        finally:
            request = struct.pack("16sh", name.encode(), 0)
            _, flags = struct.unpack("16sh", fcntl.ioctl(control, SIOCGIFFLAGS, request))
            fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sh", name.encode(), flags & ~IFF_UP))
            fcntl.ioctl(control, SIOCBRDELBR, encoded)


@dataclass(kw_only=True)
class Daemon:
    """`folder` is short: the path of a Unix socket has at most 107 bytes. Its data is on a separate disk (tmpfs).

    `programs` is where another dockerd and containerd are than this machine's, `features` what is turned on in it,
    `cdi` the folder of its CDI specifications, which need the feature `cdi`.
    """

    folder: Path
    port: int
    programs: Path | None = None
    features: tuple[str, ...] = ()
    cdi: Path | None = None
    _process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def host(self) -> str:
        return f"unix://{self.folder}/docker.sock"

    @property
    def tcp(self) -> str:
        """The same engine, with an address of the network."""
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def bridge(self) -> str:
        """A bridge of its own: with `--bridge none`, dockerd deletes docker0, which is the machine's engine's."""
        return f"builder-{self.port}"

    def start(self) -> None:
        """Starts the engine, unless it runs, in its own namespaces for processes and mounts, which end with it."""
        if self._process is not None and self._process.poll() is None:
            return
        # Of one that was killed; process ids in it are those of a namespace that is gone.
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        config = self.folder / "daemon.json"
        config.write_text(json.dumps({"features": dict.fromkeys(self.features, True)}), encoding="utf-8")
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
                    "dockerd", "--data-root", str(self.root), "--exec-root", str(self.folder / "run"),
                    "--pidfile", str(self.folder / "run/docker.pid"), "--host", self.host, "--host", self.tcp,
                    "--bridge", self.bridge, "--iptables=false", "--ip6tables=false", "--ip-forward=false",
                    "--tls=false", "--config-file", str(config),
                    "--containerd-namespace", "builder-test", "--containerd-plugins-namespace", "builder-test-plugins",
                    *(("--cdi-spec-dir", str(self.cdi)) if self.cdi else ()),
                ],
                env=self._environ(), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        until(self._answers_or_ended, "dockerd to answer", seconds=START_S)
        assert self._process.poll() is None, (self.folder / "log").read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        """SIGKILL for dockerd, which is process 1 of its namespace: containerd, builds and containers die with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(30)
            self._process = None

    @contextmanager
    def disk(self, size: int) -> Iterator[None]:
        """Creates the disk for its data and the bridge for its containers."""
        self.root.mkdir(parents=True)
        _as_root("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(self.root))
        try:
            with bridge(self.bridge):
                try:
                    yield
                finally:
                    self.kill()
        finally:
            _as_root("umount", str(self.root))

    def resize(self, size: int) -> None:
        _as_root("mount", "-o", f"remount,size={size}", str(self.root))

    def take_image(self, reference: str) -> None:
        """Copies an image from the machine's engine."""
        with subprocess.Popen(["docker", "save", reference], stdout=subprocess.PIPE) as save:
            subprocess.run(
                ["docker", "--host", self.host, "load"], stdin=save.stdout, capture_output=True, check=True, timeout=120
            )

    def _environ(self) -> dict[str, str]:
        """The environment: its own programs are first on the path; it uses this machine's runc."""
        own = [str(self.programs / folder) for folder in ("usr/sbin", "usr/bin")] if self.programs else []
        return {**os.environ, "PATH": os.pathsep.join([*own, os.environ["PATH"]])}

    def _answers_or_ended(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            return True
        result = subprocess.run(
            ["docker", "--host", self.host, "version"], capture_output=True, timeout=START_S, check=False
        )
        return result.returncode == 0


@contextmanager
def engine(
    *bases: str, programs: Path | None = None, features: tuple[str, ...] = (), cdi: Path | None = None
) -> Iterator[Daemon]:
    """An engine that runs, with base images of the machine's own."""
    assert os.geteuid() == 0, "an engine of our own needs root"
    with TemporaryDirectory(prefix="dockerd-") as folder:
        daemon = Daemon(folder=Path(folder), port=free_port(), programs=programs, features=features, cdi=cdi)
        with daemon.disk(ENOUGH):
            daemon.start()
            for base in bases:
                if "@" not in base:  # one that was pulled is pulled again: saved, it would lose its digest
                    daemon.take_image(base)
            yield daemon


def _as_root(*command: str) -> None:
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert result.returncode == 0, f"{' '.join(command)}: {result.stderr}"
