"""mmdebstrap: whether it can run, in memory or on the disk, with what settings, and why it failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from builder.build import bootstrap
from builder.build.bootstrap import Bootstrap, BootstrapError
from builder.build.programs import Program
from builder.common.errors import DiskError
from builder.index.host import Apt, AptSource, Host
from tests.fakes.engine import Programs
from tests.fakes.programs import FakePrograms

ENOUGH = bootstrap.FREE_MEMORY
HOST = Host(
    read_apt=lambda: Apt(sources=(AptSource(kind="main", uri="http://mirror.example.test/debian"),)),
    proxies={"HTTP_PROXY": "http://proxy.example.test"},
)


class Machine:
    """A machine on which root can run mmdebstrap; tests change what it has."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.programs = {"mmdebstrap", "apt-get", "setpriv", "unshare"}
        self.commands = Programs(lambda _: (0, "", ""))
        self.children = FakePrograms()
        self.keyring = folder / "keyring"
        self.keyring.touch()
        self.set_memory(ENOUGH)
        monkeypatch.setattr("os.geteuid", lambda: 0)
        monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}" if name in self.programs else None)
        monkeypatch.setattr("subprocess.run", self.commands)
        monkeypatch.setattr(bootstrap, "KEYRING", str(self.keyring))
        monkeypatch.setattr("builder.index.mmdebstrap.KEYRING", str(self.keyring))
        monkeypatch.setattr(bootstrap, "MEMINFO", folder / "meminfo")
        monkeypatch.setattr(bootstrap, "CGROUP", folder)

    def set_memory(self, free: int) -> None:
        (self.folder / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable:   {free >> 10} kB\n")

    def limit_memory(self, limit: str, used: int) -> None:
        (self.folder / "memory.max").write_text(f"{limit}\n")
        (self.folder / "memory.current").write_text(f"{used}\n")

    def run(self, name: str = "scratch") -> Program:
        scratch = self.folder / name
        scratch.mkdir(exist_ok=True)
        request = Bootstrap(release="newbird", steps=Path("/steps"), log=self.folder / "log", hook=Path("/hook"))
        assert bootstrap.run(request, HOST, scratch, self.children, lambda _: None) == scratch / "root.tar"
        return self.children.calls[-1]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(tmp_path, monkeypatch)


def is_in_memory(program: Program) -> bool:
    return any("mount -t tmpfs" in word for word in program.command)


def test_a_machine_that_can_run_it(machine: Machine) -> None:
    assert bootstrap.prepare(pytest.fail) == ""
    [probe] = machine.commands.calls
    assert probe[-1] == "true"
    assert {"unshare", "--mount", "--pid", "--kill-child"} <= set(probe)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda machine, patch: patch.setattr("os.geteuid", lambda: 1000), "only root can run it"),
        (lambda machine, _: machine.programs.difference_update({"mmdebstrap", "apt-get"}), "it is not installed"),
        (lambda machine, _: machine.programs.discard("unshare"), "setpriv and unshare are not installed"),
        (
            lambda machine, _: setattr(machine.commands, "answer", lambda _: (1, "", "")),
            "this machine does not allow it to create namespaces",
        ),
    ],
)
def test_a_machine_that_cannot(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Machine, pytest.MonkeyPatch], None],
    reason: str,
) -> None:
    change(machine, monkeypatch)
    assert bootstrap.reason_not() == bootstrap.prepare(pytest.fail) == reason


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
    said: list[str] = []
    assert bootstrap.prepare(said.append) == ""
    assert said == ["installing mmdebstrap and debian-archive-keyring with apt-get"]
    assert machine.commands.calls[-1][-2:] == ["mmdebstrap", "debian-archive-keyring"]


def test_the_reason_of_an_installation_that_failed_is_given(machine: Machine) -> None:
    machine.programs.discard("mmdebstrap")
    machine.commands.answer = lambda command: (int("install" in command) * 100, "", "W: x\nE: dpkg is locked\n")
    assert bootstrap.prepare(lambda _: None) == "apt-get cannot install it: E: dpkg is locked"


def test_packages_get_nothing_of_this_machine_but_its_proxies(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "x")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1")
    assert set(machine.run().environment) == {"PATH", "HOME", "LC_ALL", "TMPDIR", "HTTP_PROXY"}


def test_the_mirror_is_used_and_then_replaced(machine: Machine) -> None:
    """Also in a folder whose name a shell would split."""
    command = list(machine.run("a folder").command)
    before, after = (word for word in command if "/canonical" in word)
    assert before.startswith('--setup-hook=cp "$1/etc/apt/sources.list" \'')
    assert before.endswith('/a folder/sources.list\' "$1/etc/apt/sources.list"')
    assert after.endswith('/a folder/canonical\' "$1/etc/apt/sources.list"')
    hooks = [word for word in command if word.startswith("--customize-hook=")]
    assert hooks == [after, "--customize-hook=/hook", "--customize-hook=/steps/clean.sh"]
    assert f"--keyring={machine.keyring}" in command
    assert not any("mirror.example.test" in word for word in command)


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
    machine: Machine, free: int, limit: str, used: int, expected: bool
) -> None:
    machine.set_memory(free)
    if limit:
        machine.limit_memory(limit, used)
    assert is_in_memory(machine.run()) is expected


def test_two_at_once_need_memory_for_two(machine: Machine) -> None:
    inner: list[bool] = []
    run = machine.children.run

    def nested(program: Program, on_line: Callable[[str], str]) -> int:
        machine.children.run = run  # type: ignore[method-assign]
        inner.append(is_in_memory(machine.run("other")))
        return run(program, on_line)

    for free, expected in ((ENOUGH, False), (ENOUGH + bootstrap.TMPFS, True)):
        machine.set_memory(free)
        machine.children.run = nested  # type: ignore[method-assign]
        assert is_in_memory(machine.run())
        assert inner.pop() is expected


FULL = "tar: write error: No space left on device"


def test_memory_that_is_too_small_is_left_for_the_disk(machine: Machine) -> None:
    run = machine.children.run

    def full_in_memory(program: Program, on_line: Callable[[str], str]) -> int:
        machine.children.status = 25 if is_in_memory(program) else 0
        machine.children.output = [FULL] if is_in_memory(program) else []
        return run(program, on_line)

    machine.children.run = full_in_memory  # type: ignore[method-assign]
    assert not is_in_memory(machine.run())
    assert [is_in_memory(program) for program in machine.children.calls] == [True, False]


@pytest.mark.parametrize(
    ("status", "output", "error", "message"),
    [
        (25, FULL, DiskError, "the disk of .* is full"),
        (
            25,
            "E: no such package",
            BootstrapError,
            r"mmdebstrap failed \(newbird, status 25\)\n  \| E: no such",
        ),
        (-9, "I: running", BootstrapError, "mmdebstrap was killed: after 3600 s, or because memory ran out"),
    ],
)
def test_why_it_failed(machine: Machine, status: int, output: str, error: type[Exception], message: str) -> None:
    machine.children.status, machine.children.output = status, [output]
    with pytest.raises(error, match=message):
        machine.run()
