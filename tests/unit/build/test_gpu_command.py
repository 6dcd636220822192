"""The command for GPU tests: its words, valid results, and the errors of invalid results."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import shlex
import subprocess
import sys
import threading
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

from builder.build.gpu_command import MARKER, PYTHON, GpuCommand, GpuResults, StagedTarget, inventory_of
from builder.build.programs import Programs
from builder.common.errors import ImageTestError
from builder.evidence.suite import Suite
from builder.layers.estargz import TocEntry
from builder.matrix.project import Project

START = subprocess.Popen.__init__
CELL = "qz-0.5-cu129-py311-board"
REFERENCE = "registry.example.test/staging/quartz-cuda@sha256:" + "d" * 64
INVENTORY = {"var/lib/dpkg/status": "a" * 64}
CHECK = {"framework": "quartz", "check": "matmul", "state": "passed", "detail": ""}
FILES = {"run.py": "print('quartz      matmul       A product.')", "inside.py": "# inside"}
REPORT = {
    "driver": "570.86.10",
    "devices": [{"name": "H100", "capability": "9.0", "uuid": "GPU-1"}],
    "results": [CHECK],
}
FOUND: dict[str, Any] = {
    "run": "this run",
    "tests": {name: hashlib.sha256(text.encode()).hexdigest() for name, text in FILES.items()},
    "kernel": "6.1.0",
    "inventory": INVENTORY,
    "report": REPORT,
}
SECRET = "s3cret-of-the-team"


@pytest.fixture(autouse=True)
def _allowed(_alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other unit tests may start no program."""
    monkeypatch.setattr(subprocess.Popen, "__init__", START)


def line(gpu_results: object) -> str:
    return f"{MARKER} {base64.b64encode(zlib.compress(json.dumps(gpu_results).encode())).decode()}"


def saying(text: str, code: str = "") -> list[str]:
    """A command that prints a text, then runs `code` with its arguments: the image and the words of the command."""
    return [sys.executable, "-c", f"import sys, time, os\nprint({text!r}, flush=True)\n{code}", "{image}", "{command}"]


class Bench:
    """Runs commands for a project whose framework has one GPU check."""

    def __init__(self, project: Project) -> None:
        self.project, self.log = project, project.logs / f"{CELL}.gpu-command.log"
        self.files = [project.root / "tests/gpu/test_quartz.py"]
        self.files[0].parent.mkdir(parents=True)
        for name, text in FILES.items():
            (self.files[0].parent / name).write_text(text, encoding="utf-8")

    def run(self, words: Sequence[str], timeout_s: float = 60, programs: Programs | None = None) -> GpuResults:
        command = GpuCommand(words, ("mirror.example.test",), self.project.state)
        command.timeout_s, command.grace_s, command.run_id = timeout_s, 5, FOUND["run"]
        target = StagedTarget(reference=REFERENCE, inventory=INVENTORY)
        suite = Suite.of(self.project.root)
        return command.run(CELL, target, self.files, self.project, programs or Programs(), suite)


@pytest.fixture
def bench(tiny: Project) -> Bench:
    return Bench(tiny)


def test_results_are_the_last_line_of_the_output(bench: Bench) -> None:
    """Slurm may put the number of the task before it, and kubectl print more after it."""
    words = saying(f"starting\n0: {line(FOUND)}\npod deleted")
    gpu_results = bench.run(words)
    assert gpu_results.model_dump() == FOUND, "with fields that only the tests need"
    assert bench.log.read_text().splitlines() == ["starting", f"0: {MARKER} ...", "pod deleted"]
    named = GpuCommand(["srun", "{image}", "{command}"], (), bench.project.root).machine(gpu_results)
    assert named.pop("inventory").startswith("sha256:")
    assert named == {
        "command": "srun '{image}' '{command}'", "kernel": "6.1.0", "gpu": "H100", "gpus": "1", "driver": "570.86.10",
    }  # fmt: skip


def test_a_command_inside_a_word_is_quoted_for_a_shell(bench: Bench) -> None:
    counted = f"set -- {{image}} {{command}}; test $# = 8 && test $2 = {PYTHON} && test $8 = quartz"
    assert bench.run(["sh", "-ec", f"printf '%s\\n' {shlex.quote(line(FOUND))}; {counted}"])


def damaged(**changes: Any) -> str:
    return line({**FOUND, "report": {**REPORT, **changes}})


# By case: the words of the command, and the reason.
FAULTS: dict[str, tuple[list[str], str]] = {
    "exit status": (saying(line(FOUND), "sys.exit(3)"), "exit status 3"),
    "lost node": (saying("", "os.kill(os.getpid(), 9)"), "ended by signal 9"),
    "timeout": (saying("", "time.sleep(60)"), "not finished within 1.0 s"),
    "no marker": (saying("ok"), f"its output has no line `{MARKER} ...`"),
    "cut off": (saying(line(FOUND)[:-9]), "the results are incomplete or damaged"),
    "not of run.py": (saying(line({"report": {}})), "the results are incomplete or damaged"),
    "another task": (saying(f"{line(FOUND)}\n{line(FOUND)}"), "several tasks gave results: let the command run one"),
    "another run": (saying(line({**FOUND, "run": "the last one"})), "the results are of another run"),
    "other tests": (
        saying(line({**FOUND, "tests": {**FOUND["tests"], "run.py": "b"}})),
        "it ran other tests than those of the checkout: run.py",
    ),
    "a check twice": (saying(damaged(results=[CHECK, CHECK])), "it has 2 results of 1 checks"),
    "without a state": (saying(damaged(results=[{**CHECK, "state": ""}])), "the results are incomplete or damaged"),
    "a GPU of no kind": (
        saying(damaged(devices=[{"name": "H100", "capability": "x"}])),
        "the results are incomplete or damaged",
    ),
    "partial": (saying(damaged(results=[])), "it lacks results of checks: quartz matmul"),
    "no GPU": (saying(damaged(devices=[])), "the tests found no GPU"),
    "another image": (
        saying(line({**FOUND, "inventory": {**INVENTORY, "usr/local/bin/x": "b"}})),
        f"it ran another image than {REFERENCE}, with other files: usr/local/bin/x",
    ),
    "no program": (["/no/srun", "{image}", "{command}"], "no such file or directory"),
}


@pytest.mark.parametrize(("words", "reason"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_an_error_with_the_command_and_its_last_lines(bench: Bench, words: list[str], reason: str) -> None:
    if "-c" in words:
        words[2] = words[2].replace("\nprint", f"\nprint('last words, {SECRET}')\nprint", 1)
    with pytest.raises(ImageTestError) as caught:
        bench.run([*words, "--token", SECRET], timeout_s=1 if reason.startswith("not finished") else 60)
    first, *rest = str(caught.value).split(" gave no results of GPU tests: ")
    assert first.startswith(f"{CELL}: `{shlex.join(words[:2])}")
    assert rest[0].splitlines()[0] == reason
    assert "-c" not in words or "  | last words, ***" in rest[0].splitlines()
    assert caught.value.hint.endswith(str(bench.log))
    assert SECRET not in str(caught.value) + (bench.log.read_text() if bench.log.exists() else "")


def test_checks_that_run_py_does_not_know(bench: Bench) -> None:
    """Without a list of checks, none would be missing."""
    (bench.project.root / "tests/gpu/run.py").write_text("import sys\nsys.exit('no quartz')", encoding="utf-8")
    with pytest.raises(ImageTestError, match=r"tests/gpu/run\.py --list: no quartz"):
        bench.run(saying(line(FOUND)))


def test_an_interrupt_ends_the_command(bench: Bench) -> None:
    programs = Programs()
    timer = threading.Timer(1, programs.stop)
    timer.start()
    with pytest.raises(ImageTestError, match=f"^{CELL}: the tests were interrupted$"):
        bench.run(saying("", "time.sleep(60)"), programs=programs)
    timer.join()


def test_tests_that_are_too_large_for_a_word(bench: Bench) -> None:
    (bench.project.root / "tests/gpu/data.py").write_bytes(random.Random(0).randbytes(100_000))
    with pytest.raises(ImageTestError, match="tests/gpu does not fit into one argument of the command"):
        bench.run(saying(line(FOUND)))


def test_no_secret_is_in_results(bench: Bench) -> None:
    """Redaction of the JSON text would miss a secret that JSON escapes."""
    secret = 'ab"cdéfgh'
    gpu_results = bench.run([*saying(damaged(driver=f"570 {secret}")), "--token", secret])
    assert gpu_results.report.driver == "570 ***"
    assert gpu_results.tests == FOUND["tests"]


def test_the_image_may_read_the_tests_of_a_closed_checkout(bench: Bench) -> None:
    """The words of the command have them, without the tests of this machine."""
    for path in (bench.files[0].parent, *bench.files[0].parent.iterdir()):
        path.chmod(path.stat().st_mode & 0o700)
    (bench.files[0].parent / "conftest.py").touch()
    code = """
import re, io, base64, tarfile
data = base64.b64decode(re.search("b64decode[(]'([^']+)'", sys.argv[-4])[1])
print(sorted((member.name, oct(member.mode & 5)) for member in tarfile.open(fileobj=io.BytesIO(data))))
"""
    bench.run(saying(line(FOUND), code))
    names = "[('.', '0o5'), ('./inside.py', '0o4'), ('./run.py', '0o4')]"
    assert bench.log.read_text().splitlines()[-1] == names


def test_the_inventory_of_an_image() -> None:
    names = [
        "var/lib/dpkg/status", "var/lib/dpkg/status-old", "usr/local/bin/start", "usr/local/lib/x/y.py",
        "usr/local/lib/x/y.pyc", "opt/venv/lib/python/site-packages/torch-2.dist-info/RECORD", "etc/variables.d/a.json",
    ]  # fmt: skip
    files = {name: TocEntry(name=name, type="reg", size=1, digest=f"sha256:{name}") for name in names}
    files["usr/local/bin/link"] = TocEntry(name="usr/local/bin/link", type="symlink", linkName="start")
    files["usr/local/bin/empty"] = TocEntry(name="usr/local/bin/empty", type="reg")
    del names[4], names[1]
    assert inventory_of(files) == {name: name for name in names}
