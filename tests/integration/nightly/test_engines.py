"""The engines of docs/which-image.md are the newest whose wheels fit each version of PyTorch."""

from __future__ import annotations

import re
import subprocess

import pytest

from tests.paths import ROOT

TABLE = re.findall(
    r"^\| `([\d.]+)`[^|]* \| (\S+?),?(?: in [^|]*)? \| (\S+?),?(?: in [^|]*)? \|$",
    (ROOT / "docs/which-image.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
# The first that needs one release of PyTorch exactly: before, uv finds old ones that fit every PyTorch.
OLDEST = {"vllm": "0.16", "sglang": "0.5.10"}


def newest(engine: str, torch: str) -> str:
    """The newest release of an engine that resolves to wheels beside a release of PyTorch; `none` without one."""
    command = [f"{ROOT}/.venv/bin/uv", "pip", "compile", "-", "--only-binary=:all:", "--quiet"]
    command += ["--prerelease=if-necessary"]
    command += ["--python-version=3.11", "--python-platform=x86_64-manylinux_2_36", "--no-header", "--no-annotate"]
    requirements = f"torch=={torch}\n{engine}>={OLDEST[engine]}\n"
    run = subprocess.run(command, input=requirements, capture_output=True, text=True, check=False, timeout=300)
    found = re.search(rf"^{engine}==(\S+)$", run.stdout, re.MULTILINE)
    assert found or "No solution found" in run.stderr, run.stderr
    return found[1] if found else "none"


@pytest.mark.parametrize(("line", "vllm", "sglang"), TABLE, ids=[row[0] for row in TABLE])
def test_the_newest_engines(line: str, vllm: str, sglang: str) -> None:
    matrix = (ROOT / "matrix.yaml").read_text(encoding="utf-8")
    release = re.search(rf'"{re.escape(line)}":\s+\{{?release: ([\d.]+)', matrix)
    assert release
    assert [newest("vllm", release[1]), newest("sglang", release[1])] == [vllm, sglang]
