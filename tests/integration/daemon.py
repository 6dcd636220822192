"""A Docker Engine of the tests' own, that may be killed and whose disk may fill up."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.integration.checkout import until

START_S = 60


@dataclass(kw_only=True)
class Daemon:
    """`folder` is short: the path of a Unix socket has at most 107 bytes. Its data is on a disk of its own (tmpfs)."""

    folder: Path
    port: int
    _process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def root(self) -> Path:
        return self.folder / "root"

    @property
    def host(self) -> str:
        return f"unix://{self.folder}/docker.sock"

    @property
    def tcp(self) -> str:
        """The same engine by an address that does not say on which machine it is."""
        return f"tcp://127.0.0.1:{self.port}"

    def start(self) -> None:
        """In its own process namespace, so that nothing of it survives it, and its own mount namespace likewise."""
        # Left by one that was killed; a number in it may be that of another process now.
        (self.folder / "docker.pid").unlink(missing_ok=True)
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    "unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc",
                    "dockerd", "--data-root", str(self.root), "--exec-root", str(self.folder / "exec"),
                    "--pidfile", str(self.folder / "docker.pid"), "--host", self.host, "--host", self.tcp,
                    "--bridge", "none", "--iptables=false", "--ip6tables=false", "--tls=false",
                    "--containerd-namespace", "builder-test", "--containerd-plugins-namespace", "builder-test-plugins",
                ],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
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
    def disk(self, size: str) -> Iterator[None]:
        self.root.mkdir(parents=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(self.root)], check=True, timeout=30)
        try:
            yield
        finally:
            self.kill()
            subprocess.run(["umount", str(self.root)], check=True, timeout=30)

    def resize(self, size: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={size}", str(self.root)], check=True, timeout=30)

    def take_image(self, reference: str) -> None:
        """Copies an image from the machine's engine."""
        with subprocess.Popen(["docker", "save", reference], stdout=subprocess.PIPE) as save:
            subprocess.run(["docker", "--host", self.host, "load"], stdin=save.stdout, check=True, timeout=120)

    def _answers_or_ended(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            return True
        done = subprocess.run(
            ["docker", "--host", self.host, "version"], capture_output=True, timeout=START_S, check=False
        )
        return done.returncode == 0
