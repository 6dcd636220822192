"""The engines of docs/which-image.md are the newest whose wheels fit each version of PyTorch."""

from __future__ import annotations

import re
import subprocess

import pytest

from builder.lock.uv import Target
from builder.matrix.project import Project
from tests.paths import ROOT

MATRIX = Project(ROOT).matrix
# The version of PyTorch, then the cells of vLLM and SGLang: a release, sometimes with the tag of the image to use.
TABLE = re.findall(
    r"^\| `([\d.]+)`[^|]* \| ((?:[\d.]+|none)[^|]*) \| ((?:[\d.]+|none)[^|]*) \|$",
    (ROOT / "docs/which-image.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
# The first that needs one release of PyTorch exactly: before, uv finds old ones that fit every PyTorch.
OLDEST = {"vllm": "0.16", "sglang": "0.5.10"}


def newest(engine: str, line: str, listed: str) -> str:
    """The newest release of an engine whose wheels fit PyTorch `line`, or `none`.

    The Python version is that of the image whose tag `listed` contains, or the default of `line`.
    """
    versions = MATRIX.frameworks["pytorch"].versions
    named = re.search(r"in `([\d.]+)(?:-py(\d)(\d+))?", listed)
    python = f"{named[2]}.{named[3]}" if named and named[2] else versions[named[1] if named else line].python[0]
    glibc = MATRIX.debian[MATRIX.python[python].debian].glibc
    platform = Target(name=line, python=python, arch="amd64", glibc=glibc).uv_glibc.replace(".", "_")
    command = [f"{ROOT}/.venv/bin/uv", "pip", "compile", "-", "--only-binary=:all:", "--quiet"]
    command += ["--prerelease=if-necessary", "--no-header", "--no-annotate"]
    command += [f"--python-version={python}", f"--python-platform=x86_64-manylinux_{platform}"]
    requirements = f"torch=={versions[line].release}\n{engine}>={OLDEST[engine]}\n"
    run = subprocess.run(command, input=requirements, capture_output=True, text=True, check=False, timeout=300)
    pin = re.search(rf"^{engine}==(\S+)$", run.stdout, re.MULTILINE)
    assert pin or "No solution found" in run.stderr, run.stderr
    return pin[1] if pin else "none"


@pytest.mark.parametrize(("line", "vllm", "sglang"), TABLE, ids=[row[0] for row in TABLE])
def test_the_newest_engines(line: str, vllm: str, sglang: str) -> None:
    assert newest("vllm", line, vllm) == vllm.partition(",")[0]
    assert newest("sglang", line, sglang) == sglang.partition(",")[0]


def test_every_line_of_pytorch_is_in_the_table() -> None:
    rest = MATRIX.frameworks["pytorch"].versions.keys() - {line for line, _, _ in TABLE}
    assert rest == {"2.14.1"}, "which is in the row of 2.14"
