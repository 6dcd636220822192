"""Builds the wheel of a package from its source, in a container of an image: see builder/build/wheel_builds.py.

The source and the wheels that the build needs are in INPUTS. The wheel is written so that the same files give the same
bytes: its entries are sorted and have no times. It is the only member of the tar RESULT.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

INPUTS, WORK = Path("/mnt/build"), Path("/tmp/build")
CUDA = Path("/opt/venv/lib/python/site-packages/nvidia")
RESULT = WORK / "result.tar"
TIME = (1980, 1, 1, 0, 0, 0)  # the earliest that zip can store
CHECK_S = 5
IDLE_S = 600
IDLE_TICKS = os.sysconf("SC_CLK_TCK") * CHECK_S // 100  # 1 % of a processor: programs that wait may poll


class Process(NamedTuple):
    """A running process. `ticks` are the processor time that it has used."""

    pid: int
    parent: int
    ticks: int
    name: str


def other_processes(proc: Path = Path("/proc")) -> list[Process]:
    """All other processes of the container that have not ended. Source: proc(5)."""
    result = []
    for path in proc.glob("[0-9]*/stat"):
        try:
            head, _, rest = path.read_text().rpartition(") ")
        except OSError:  # it has ended
            continue
        pid, _, name = head.partition(" (")
        state, parent, *_, user, system = rest.split()[:13]
        if state != "Z" and int(pid) != os.getpid():
            result.append(Process(int(pid), int(parent), int(user) + int(system), name))
    return result


def wait(
    pip: subprocess.Popen[bytes],
    processes: Callable[[], list[Process]] = other_processes,
    kill: Callable[[int, int], None] = os.kill,
) -> None:
    """Waits for pip, and ends a build that does nothing. Raises CalledProcessError if the build fails."""
    used = idle_s = 0
    while True:
        try:
            status = pip.wait(CHECK_S)
            break
        except subprocess.TimeoutExpired:
            running = processes()
        # pip reads the output of the build backend until its end. A program that the backend has left behind keeps the
        # output open: with a `sleep 45` in setup.py, pip waited twice for 45 s. Its parent is now this program.
        if not any(each.parent == pip.pid for each in running):
            for each in running:
                if each.parent == os.getpid() and each.pid != pip.pid:
                    print(f"ending {each.name}, which the build left running", flush=True)
                    kill(each.pid, signal.SIGKILL)
        now = sum(each.ticks for each in running)  # less than before if a process has ended
        idle_s = idle_s + CHECK_S if used <= now <= used + IDLE_TICKS else 0
        used = now
        if idle_s >= IDLE_S:
            names = ", ".join(each.name for each in running)
            print(
                f"the build used less than 1 % of a processor for {IDLE_S // 60} minutes; running: {names}", flush=True
            )
            pip.kill()
            status = 1
            break
    if status:
        raise subprocess.CalledProcessError(status, "pip")


def canonical(built: Path, path: Path) -> None:
    """Writes the wheel `built` to `path`."""
    with zipfile.ZipFile(built) as old, zipfile.ZipFile(path, "w") as new:
        items = [item for item in old.infolist() if not item.is_dir()]
        # The metadata last, as the specification of wheels recommends.
        items.sort(key=lambda item: (item.filename.split("/")[0].endswith(".dist-info"), item.filename))
        for item in items:
            content = old.read(item)
            if item.filename.endswith(".dist-info/RECORD") and item.filename.count("/") == 1:
                lines = io.StringIO()
                csv.writer(lines, lineterminator="\n").writerows(sorted(csv.reader(io.StringIO(content.decode()))))
                content = lines.getvalue().encode()
            entry = zipfile.ZipInfo(item.filename, TIME)
            entry.create_system = 3  # Unix
            entry.external_attr = (0o100755 if item.external_attr >> 16 & 0o100 else 0o100644) << 16
            new.writestr(entry, content, zipfile.ZIP_DEFLATED, 9)


def main() -> None:
    """Raises CalledProcessError if the build fails; its output has been printed."""
    source, tools, out = f"{WORK}/source", f"{WORK}/tools", f"{WORK}/out"
    shutil.copytree(INPUTS / "source", source, symlinks=True)
    (WORK / "tmp").mkdir()
    # NVIDIA's wheels have libcudart.so.13, but the linker looks for libcudart.so.
    links = WORK / "lib"
    links.mkdir()
    for library in sorted(CUDA.glob("*/lib/lib*.so.*")):
        link = links / f"{library.name.partition('.so.')[0]}.so"
        if not link.exists():
            link.symlink_to(library)
    environment = {
        **os.environ,
        "HOME": str(WORK),
        "TMPDIR": str(WORK / "tmp"),
        "PATH": f"{tools}/bin:{os.environ['PATH']}",
        "PYTHONPATH": tools,
        "LIBRARY_PATH": str(links),
    }
    pip = [sys.executable, "-m", "pip", "--isolated", "--disable-pip-version-check", "--no-cache-dir"]
    if wheels := sorted(map(str, (INPUTS / "wheels").glob("*.whl"))):
        subprocess.run([*pip, "install", "--quiet", "--no-index", "--no-deps", "--target", tools, *wheels], check=True)
    command = [
        *pip,
        "wheel",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "--verbose",
        "--wheel-dir",
        out,
        source,
    ]
    wait(subprocess.Popen(command, env=environment))
    (built,) = Path(out).iterdir()
    canonical(built, WORK / built.name)
    with tarfile.open(RESULT, "w") as tar:
        tar.add(WORK / built.name, built.name)


if __name__ == "__main__":
    try:
        main()
    except subprocess.CalledProcessError as error:
        sys.exit(error.returncode)
