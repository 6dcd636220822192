"""apt in a container of the newest Debian release."""

from __future__ import annotations

import io
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from builder.build import apt_container
from builder.build.apt_container import ContainerApt
from builder.engine.client import RunningContainer
from builder.index.host import Apt, AptSource, Host
from builder.matrix.project import Project
from tests.fakes.engine import FakeEngine
from tests.fakes.mmdebstrap import FakeMmdebstrap
from tests.fakes.run import new_run


class MemoryContainer:
    """Keeps the files that it gets and the programs that it runs."""

    def __init__(self) -> None:
        self.files: list[dict[str, bytes]] = []
        self.programs: list[tuple[Sequence[str], Mapping[str, str], float]] = []

    def put(self, files: BinaryIO) -> None:
        with tarfile.open(fileobj=io.BytesIO(files.read())) as tar:
            contents = ((member.name, tar.extractfile(member)) for member in tar)
            self.files.append({name: content.read() for name, content in contents if content})

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        self.programs.append((command, environment, timeout_s))
        return subprocess.CompletedProcess(command, 100, "out", "E: error")


class OneContainer(FakeEngine):
    def __init__(self) -> None:
        super().__init__()
        self.container = MemoryContainer()
        self.started: list[tuple[str, dict[str, Any]]] = []

    @contextmanager
    def running(self, image: str, **options: Any) -> Iterator[RunningContainer]:
        self.started.append((image, options))
        yield cast("RunningContainer", self.container)


def test_apt_reads_the_same_files_in_the_container(
    tiny: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are copied once: apt's lists of packages stay in the container."""
    engine = OneContainer()
    host = Host(archives=Apt(sources=(AptSource(kind="main", uri="http://127.0.0.1:80/debian"),)))
    monkeypatch.setattr(apt_container, "Mmdebstrap", FakeMmdebstrap)
    configuration = tmp_path / "apt/apt.conf"
    configuration.parent.mkdir()
    configuration.write_text("settings")
    environment = {
        "APT_CONFIG": str(configuration),
        "PATH": "/this/machine",
        "HTTP_PROXY": "http://p.example.test",
    }
    with ContainerApt(new_run(tiny, engine=engine, host=host)).container() as run:
        for _ in range(2):
            done = run(["apt-get", "update"], capture_output=True, text=True, env=environment, timeout=5, check=False)
        run(["apt-config", "dump"])
    assert (done.returncode, done.stdout, done.stderr) == (100, "out", "E: error")
    assert engine.started == [("local/newbird", {"checkout": str(tiny.root), "network_mode": "host"})]
    assert engine.container.files == [{str(configuration).lstrip("/"): b"settings"}]
    update = (["apt-get", "update"], {name: environment[name] for name in ("APT_CONFIG", "HTTP_PROXY")}, 5)
    assert engine.container.programs == [update, update, (["apt-config", "dump"], {}, apt_container.TIMEOUT_S)]
