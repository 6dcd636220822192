"""mmdebstrap and apt: whether it can run here, in memory or on the disk, with what settings, and why it failed."""

from __future__ import annotations

import hashlib
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from builder.build import operating_systems
from builder.build.operating_systems import DebianRunner
from builder.build.programs import Program
from builder.common.errors import BuildError, DiskError, EngineError, UsageError
from builder.debian.os_lock import DebianPackage, OsLock
from builder.engine.client import KILLED, RunningContainer
from builder.index.host import Apt, AptSource, Host
from builder.matrix.project import Project
from tests.fakes.engine import INFO, FakeEngine, MemoryConsole, Programs
from tests.fakes.locks import TIME
from tests.fakes.programs import FakePrograms
from tests.fakes.run import new_run
from tests.unit.debian.test_mmdebstrap import deb

ENOUGH = operating_systems.FREE_MEMORY
HOST = Host(
    archives=Apt(sources=(AptSource(kind="main", uri="http://mirror.example.test/debian"),)),
    proxies={"HTTP_PROXY": "http://proxy.example.test"},
    ca=b"pem",
)
ARGUMENTS = ["newbird", "946684800", "python3.11"]
BASE = f"example/base:new@sha256:{'2' * 64}"
FULL = "tar: write error: No space left on device"


class MemoryContainer(RunningContainer):
    """Runs nothing: `status` and `output` are those of mmdebstrap. Keeps its files and programs."""

    def __init__(self) -> None:
        self.status = 0
        self.output: list[str] = []
        self.files: list[dict[str, bytes]] = []
        self.programs: list[tuple[Sequence[str], Mapping[str, str], float]] = []

    def copy(self, folder: Path, target: str) -> None:
        files = {path.relative_to(folder): path for path in folder.rglob("*") if path.is_file()}
        self.files.append({f"{target}/{name}": path.read_bytes() for name, path in files.items()})

    def read(self, path: str, out: BinaryIO) -> None:
        out.write(path.encode())

    def run_by_line(
        self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float,
        on_line: Callable[[str], object],
    ) -> int:  # fmt: skip
        self.programs.append((command, environment, timeout_s))
        for line in self.output:
            on_line(f"{line}\n")
        return self.status

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], timeout_s: float, *, user: str = ""
    ) -> subprocess.CompletedProcess[str]:
        self.programs.append((command, environment, timeout_s))
        return subprocess.CompletedProcess(command, 100, "out", "E: error")


class ContainerEngine(FakeEngine):
    """Has one container; keeps the images and options with which it was started."""

    def __init__(self) -> None:
        super().__init__()
        self.container = MemoryContainer()
        self.started: list[tuple[str, dict[str, Any]]] = []

    @contextmanager
    def running(self, image: str, *, checkout: str, **options: Any) -> Iterator[RunningContainer]:
        self.started.append((image, options))
        yield self.container


def locked_tini(folder: Path) -> tuple[OsLock, dict[str, Path]]:
    """A lock of one package, and its file in a store."""
    content = deb("tini")
    sha256 = hashlib.sha256(content).hexdigest()
    package = DebianPackage(name="tini", version="1:2.0", architecture="amd64", size=len(content), sha256=sha256)
    (folder / "blob").write_bytes(content)
    lock = OsLock(debian="newbird", time=TIME, requested=("tini",), packages=(package,))
    return lock, {sha256: folder / "blob"}


class Machine:
    """A machine on which root can run mmdebstrap; tests change what it has."""

    def __init__(self, project: Project, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.project = project
        self.folder = folder
        self.programs = {"mmdebstrap", "apt-get", "setpriv", "unshare"}
        self.commands = Programs(lambda _: (0, "", ""))
        self.children = FakePrograms()
        self.engine = ContainerEngine()
        self.container = self.engine.container
        self.lock, self.debs = locked_tini(folder)
        self.console = MemoryConsole()
        self.keyring = folder / "keyring"
        self.keyring.touch()
        self.set_memory(ENOUGH)
        monkeypatch.setattr("platform.machine", lambda: "x86_64")
        monkeypatch.setattr("os.geteuid", lambda: 0)
        monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if name in self.programs else None)
        monkeypatch.setattr("subprocess.run", self.commands)
        monkeypatch.setattr("builder.debian.mmdebstrap.KEYRING", str(self.keyring))
        monkeypatch.setattr("builder.common.machine.MEMINFO", folder / "meminfo")
        monkeypatch.setattr("builder.common.machine.CGROUP", folder)
        self.use(HOST)

    def use(self, host: Host) -> None:
        """Begins a run with these settings, whose programs are `children`."""
        self.runner = DebianRunner(new_run(self.project, engine=self.engine, host=host, console=self.console))
        self.runner.programs = self.children

    def set_memory(self, free: int) -> None:
        (self.folder / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {free >> 10} kB\n")

    def limit_memory(self, limit: str, used: int) -> None:
        (self.folder / "memory.max").write_text(f"{limit}\n")
        (self.folder / "memory.current").write_text(f"{used}\n")

    def run(self, name: str = "scratch") -> Path:
        """Makes an operating system in a folder of its own; returns the folder."""
        scratch = self.folder / name
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        files = {"steps/mmdebstrap.sh": b"script", "packages.json": b"lock"}
        tar = self.runner.make_system("os-x", ARGUMENTS, files, scratch, self.lock, self.debs)
        assert tar == scratch / "root.tar"
        return scratch

    def run_here(self) -> Program:
        self.run()
        return self.children.calls[-1]


@pytest.fixture
def machine(tiny: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tiny, tmp_path, monkeypatch)


REASONS: dict[str, Callable[[Machine, pytest.MonkeyPatch], object]] = {
    "only root can run it": lambda _, patch: patch.setattr("os.geteuid", lambda: 1000),
    "it is not installed": lambda machine, _: machine.programs.difference_update({"mmdebstrap", "apt-get"}),
    "setpriv and unshare are not installed": lambda machine, _: machine.programs.discard("unshare"),
    "this machine does not allow it to create namespaces": lambda machine, _: setattr(
        machine.commands, "answer", lambda _: (1, "", "")
    ),
}


# ---- on this machine


def test_locked_packages_are_installed_without_the_network(machine: Machine) -> None:
    """apt needs neither this machine's archives nor their proxy or password."""
    password = AptSource(kind="main", uri="http://u:p@mirror.example.test/debian")
    machine.use(replace(HOST, archives=Apt(sources=(password,), proxy="http://proxy.example.test")))
    folder = machine.run("a folder")
    [program] = machine.children.calls
    assert list(program.command)[-5:] == ["sh", "steps/mmdebstrap.sh", *ARGUMENTS]
    assert {"unshare", "--mount", "--pid", "--kill-child"} <= set(program.command)
    assert program.folder == folder
    assert machine.engine.started == []
    files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert b"Filename: ./tini_2.0_amd64.deb" in files.pop("debs/Packages")
    assert files.pop("debs/Release")
    assert files == {
        "steps/mmdebstrap.sh": b"script",
        "packages.json": b"lock",
        "debs/tini_2.0_amd64.deb": deb("tini"),
        "sources.list": f"deb [trusted=yes] copy:{machine.folder}/a%20folder/debs/ ./\n".encode(),
        "root.tar": b"tar",
    }


@pytest.mark.parametrize("in_container", [False, True])
def test_another_architecture_is_an_option_of_mmdebstrap(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, in_container: bool
) -> None:
    """mmdebstrap.sh is an input of every operating system: it finds another program of that name on its PATH."""
    if in_container:
        monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert not (machine.run() / "bin").exists()
    package = replace(machine.lock.packages[0], architecture="arm64")
    machine.lock = replace(machine.lock, packages=(package,))
    program = machine.run("arm64") / "bin/mmdebstrap"
    assert program.read_text() == '#!/bin/sh\nexec /usr/bin/mmdebstrap --architectures=arm64 "$@"\n'
    assert program.stat().st_mode & 0o777 == 0o755
    if in_container:
        assert "PATH=/build/bin:$PATH" in machine.container.programs[-1][0][2]
    else:
        assert machine.children.calls[-1].environment["PATH"].startswith(f"{program.parent}:")


def test_packages_get_nothing_of_this_machine_but_its_proxies(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    assert set(machine.run_here().environment) == {"PATH", "HOME", "LC_ALL", "HTTP_PROXY", "http_proxy", "TMPFS"}


@pytest.mark.parametrize("lacks", ["program", "keyring"])
def test_it_is_installed_with_the_keyring(machine: Machine, lacks: str) -> None:
    """Ubuntu's mmdebstrap does not bring Debian's keys."""
    machine.programs.discard("mmdebstrap") if lacks == "program" else machine.keyring.unlink()

    def answer(command: list[str]) -> tuple[int, str, str]:
        if "install" in command:
            machine.programs.add("mmdebstrap")
            machine.keyring.touch()
        return 0, "", ""

    machine.commands.answer = answer
    machine.run_here()
    assert "installing mmdebstrap and debian-archive-keyring with apt-get\n" in machine.console.text
    assert machine.commands.calls[-1][-2:] == ["mmdebstrap", "debian-archive-keyring"]


# ---- in a container


@pytest.mark.parametrize("reason", REASONS)
def test_a_container_of_the_newest_release_runs_it_where_this_machine_cannot(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    REASONS[reason](machine, monkeypatch)
    assert operating_systems.obstacle_here() == reason
    assert (machine.run() / "root.tar").read_bytes() == b"/build/root.tar"
    machine.run("again")
    assert machine.children.calls == []
    assert machine.engine.calls == [f"pull {BASE}"]
    assert [image for image, _ in machine.engine.started] == [BASE, BASE]
    command, environment, _ = machine.container.programs[0]
    assert command[-5:] == ["sh", "steps/mmdebstrap.sh", *ARGUMENTS]
    assert set(environment) == {"LC_ALL", "HTTP_PROXY", "http_proxy"}
    line = f"mmdebstrap cannot run here ({reason}): running it in a container of Debian newbird\n"
    assert machine.console.text.count(line) == 1


def test_a_container_gets_the_same_files_and_the_settings_to_install_mmdebstrap(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    machine.run()
    [files] = machine.container.files
    assert files["/build/steps/mmdebstrap.sh"] == b"script"
    assert files["/build/sources.list"] == b"deb [trusted=yes] copy:/build/debs/ ./\n"
    assert files["/build/debs/tini_2.0_amd64.deb"] == deb("tini")
    names = {Path(name).name for name in files if name.startswith("/build/host/")}
    assert names == {"env.sh", "ca.crt", "apt.conf", "sources.list"}, "not the package index, which may need a password"
    assert files["/build/host/sources.list"] == HOST.sources_list("newbird").encode()


def test_nothing_starts_after_it_was_stopped(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container would outlive the builder."""
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    machine.run()
    machine.runner.stop()
    assert machine.engine.calls[-1] == "sweep"
    with pytest.raises(BuildError):
        machine.run("again")
    assert len(machine.engine.started) == 1


def test_apt_reads_the_same_files_in_a_container(machine: Machine) -> None:
    """They are copied once: apt's lists of packages stay in the container."""
    machine.use(Host(archives=Apt(sources=(AptSource(kind="main", uri="http://127.0.0.1:80/debian"),))))
    configuration = machine.folder / "apt/apt.conf"
    configuration.parent.mkdir()
    configuration.write_text("settings")
    environment = {"APT_CONFIG": str(configuration), "PATH": "/this/machine", "HTTP_PROXY": "http://p.example.test"}
    with machine.runner.container() as run:
        for _ in range(2):
            done = run(["apt-get", "update"], capture_output=True, text=True, env=environment, timeout=5, check=False)
        run(["apt-config", "dump"])
    assert (done.returncode, done.stdout, done.stderr) == (100, "out", "E: error")
    assert machine.engine.started == [(BASE, {"network_mode": "host"})]
    assert machine.container.files == [{str(configuration): b"settings"}]
    update = (["apt-get", "update"], {name: environment[name] for name in ("APT_CONFIG", "HTTP_PROXY")}, 5)
    assert machine.container.programs == [update, update, (["apt-config", "dump"], {}, operating_systems.APT_S)]


# ---- base images


def test_a_base_image_is_pulled_once(machine: Machine) -> None:
    assert machine.runner.base_image("newbird") == machine.runner.base_image("newbird") == BASE
    assert machine.engine.calls == [f"pull {BASE}"]


def test_a_base_image_that_cannot_be_pulled_is_made_from_this_machines_archives(machine: Machine) -> None:
    machine.engine.registry = False
    written: list[dict[str, bytes]] = []
    run = machine.children.run

    def keep(program: Program, on_line: Callable[[str], str]) -> int:
        written.append({path.name: path.read_bytes() for path in program.folder.glob("*") if path.is_file()})
        return run(program, on_line)

    machine.children.run = keep  # type: ignore[method-assign]
    names = [machine.runner.base_image(release) for release in ("newbird", "newbird", "oldbird")]
    assert names[0] == names[1] != names[2]
    assert names[0].startswith("gpu-images/base:newbird-")
    assert [list(program.command)[-1] for program in machine.children.calls] == ["newbird", "oldbird"]
    assert [call for call in machine.engine.calls if call.startswith("import")] == [
        f"import {name}" for name in names[1:]
    ]
    folder = machine.children.calls[0].folder
    assert written[0] == {
        "ca.crt": b"pem",
        "apt.conf": f'Acquire::https::CAInfo "{folder}/ca.crt";\n'.encode(),
        "sources.list": HOST.sources_list("newbird").encode(),
    }


def test_an_archive_with_a_password_is_refused(machine: Machine) -> None:
    """The scripts of packages could read it."""
    machine.engine.registry = False
    machine.use(Host(archives=Apt(sources=(AptSource(kind="main", uri="http://u:p@mirror.example.test/debian"),))))
    with pytest.raises(UsageError):
        machine.runner.base_image("newbird")
    assert machine.children.calls == []


def test_without_a_registry_and_without_root_there_is_no_base_image(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.engine.registry = False
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    for _ in range(2):  # as for two operating systems
        with pytest.raises(EngineError):
            machine.run()
    assert len(machine.engine.calls) == 1
    assert machine.children.calls == []


def test_a_base_image_that_cannot_be_made_is_an_error_of_the_engine(machine: Machine) -> None:
    """Without it, no image can be built, whatever the image is."""
    machine.engine.registry = False
    machine.children.status, machine.children.output = 25, ["E: http://mirror.example.test/debian 404"]
    with pytest.raises(EngineError, match=r"E: http://<mirror>/debian 404") as caught:
        machine.runner.base_image("newbird")
    assert caught.value.hint.startswith("Error of the registry: pulling example/base")


# ---- memory


@pytest.mark.parametrize(
    ("free", "limit", "used", "expected"),
    [
        (ENOUGH, "", 0, True),
        (ENOUGH - 1024, "", 0, False),
        (ENOUGH, "max", 1 << 40, True),
        (ENOUGH, str(ENOUGH + 5), 5, True),
        (ENOUGH, str(ENOUGH + 5), 6, False),
    ],
)
def test_files_are_written_to_memory_if_there_is_enough(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, free: int, limit: str, used: int, expected: bool
) -> None:
    machine.set_memory(free)
    if limit:
        machine.limit_memory(limit, used)
    assert ("TMPFS" in machine.run_here().environment) is expected
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    machine.use(HOST)
    machine.engine.settings = replace(INFO, is_local=True)
    machine.run("in a container")
    assert bool(machine.engine.started[0][1]["tmpfs"]) is expected


def test_packages_that_may_fill_the_memory_are_unpacked_on_the_disk(machine: Machine) -> None:
    large = replace(machine.lock.packages[0], size=operating_systems.TMPFS // 8)
    machine.lock = replace(machine.lock, packages=(large,))
    assert "TMPFS" not in machine.run_here().environment


def test_two_at_once_need_memory_for_two(machine: Machine) -> None:
    inner: list[bool] = []
    run = machine.children.run

    def nested(program: Program, on_line: Callable[[str], str]) -> int:
        machine.children.run = run  # type: ignore[method-assign]
        machine.run("other")
        inner.append("TMPFS" in machine.children.calls[-1].environment)
        return run(program, on_line)

    for free, expected in ((ENOUGH, False), (ENOUGH + operating_systems.TMPFS, True)):
        machine.set_memory(free)
        machine.children.run = nested  # type: ignore[method-assign]
        assert "TMPFS" in machine.run_here().environment
        assert inner.pop() is expected


# ---- output


@pytest.mark.parametrize("in_container", [False, True])
@pytest.mark.parametrize(
    ("status", "output", "error", "message"),
    [
        (25, FULL, DiskError, "os-x: the disk of .* is full"),
        (
            25,
            "E: Unable to locate package x",
            BuildError,
            r"^os-x: mmdebstrap failed \(status 25\)\n[\s\S]*\| E: Unable to",
        ),
        (KILLED, "I: running", BuildError, "mmdebstrap was killed: after 3600 s, or because memory ran out"),
    ],
)
def test_why_it_failed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, status: int, output: str, error: type[Exception], message: str,
    in_container: bool,
) -> None:  # fmt: skip
    if in_container:
        monkeypatch.setattr("os.geteuid", lambda: 1000)
    machine.children.status = -signal.SIGKILL if status == KILLED else status
    machine.container.status = status
    machine.children.output = machine.container.output = ["I: begins"] * 20 + [output]
    with pytest.raises(error, match=message) as caught:
        machine.run()
    assert len(str(caught.value).splitlines()) == 9
    assert isinstance(caught.value, DiskError | BuildError)
    assert error is DiskError or caught.value.hint == "Full log: .builder/logs/os-x.log"


def test_what_it_does_is_shown_in_words_for_people(machine: Machine) -> None:
    machine.children.output = [
        "I: automatically chosen mode: root",
        "I: running apt-get update...",
        "I: running --customize-hook in shell: sh -c 'chroot \"$1\" env -i sh /mnt/steps/os.sh python3.11'",
        "Get:1 http://mirror.example.test/debian newbird InRelease",
        "I: creating tarball...",
    ]
    machine.run()
    assert machine.console.text.splitlines() == [
        "os-x: reading the lists of packages",
        "os-x: setting up the user and Python",
        "os-x: packing",
    ]
    assert "mirror.example.test" not in (machine.project.logs / "os-x.log").read_text()
