"""The set-up script: which Python it takes, and that it changes no package of the machine that was there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

# Answers as a Python of that version without pip; as an environment if `prefix` differs from `base_prefix`.
PYTHON = """\
#!/bin/sh
case "$*" in
*version_info*) exit {is_old} ;;
*base_prefix*) exit {is_not_environment} ;;
*"-m pip"*) exit 1 ;;
esac
exec {real} "$@"
"""
APT = """\
#!/bin/sh
echo "$*" >>{log}
case "$*" in *-s*) cat {simulation} ;; esac
"""


class Machine:
    """A copy of the checkout, and a PATH with programs that tests choose."""

    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.apt_log = folder / "checkout", folder / "bin", folder / "apt.log"
        self.bin.mkdir()
        for name in ("builder", "locks", "tools"):
            shutil.copytree(ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
            shutil.copy(ROOT / name, self.root)
        self.apt_log.touch()

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def python(self, *, is_old: bool = False, is_environment: bool = False) -> None:
        text = PYTHON.format(is_old=int(is_old), is_not_environment=int(not is_environment), real=sys.executable)
        self.program("python3", text)

    def apt(self, simulation: str) -> None:
        """An apt-get that prints this text when it simulates an installation."""
        (self.bin.parent / "simulation").write_text(simulation)
        self.program("apt-get", APT.format(log=self.apt_log, simulation=self.bin.parent / "simulation"))

    def set_up(self, *others: str) -> subprocess.CompletedProcess[str]:
        """Runs the script with the programs of the machine, and with folders on PATH behind them."""
        path = ":".join([str(self.bin), *others])
        return subprocess.run(
            ["/bin/sh", "builder/bootstrap.sh"], cwd=self.root, env={**os.environ, "PATH": path},
            capture_output=True, text=True, timeout=300, check=False,
        )  # fmt: skip


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def tools_without_python(folder: Path) -> str:
    """A folder with links to the machine's programs, except every Python."""
    folder.mkdir()
    for name in ("sh", "sed", "cut", "id", "mkdir", "paste", "rm", "cp", "touch", "cat", "env", "dirname"):
        (folder / name).symlink_to(str(shutil.which(name)))
    return str(folder)


def test_the_python_of_an_activated_environment_is_passed_over(machine: Machine) -> None:
    """It has no pip: the set-up ran apt for nothing, which upgraded the machine's certificates."""
    machine.python(is_environment=True)
    machine.apt("")
    done = machine.set_up(
        "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin", os.environ["PATH"]
    )
    assert done.returncode == 0, done.stderr
    assert machine.apt_log.read_text() == ""
    assert (machine.root / ".venv/bin/builder").exists()


def test_a_python_that_is_too_old_is_named_with_the_oldest_that_works(machine: Machine, tmp_path: Path) -> None:
    machine.python(is_old=True)
    done = machine.set_up(tools_without_python(tmp_path / "tools"))
    assert done.returncode == 1
    assert "no Python 3.11.2 or newer on PATH" in done.stderr


def test_packages_that_are_there_are_not_upgraded_for_pip(machine: Machine, tmp_path: Path) -> None:
    machine.python()
    machine.program("id", "#!/bin/sh\necho 0\n")  # as for root
    machine.apt("Inst ca-certificates [2023] (2025 Debian:12 [all])\nInst python3-pip (23.0 Debian:12 [all])\n")
    done = machine.set_up(tools_without_python(tmp_path / "tools"))
    assert done.returncode == 1
    assert "would upgrade packages of this machine: ca-certificates." in done.stderr
    assert all("-s" in line or line.startswith("update") for line in machine.apt_log.read_text().splitlines())
