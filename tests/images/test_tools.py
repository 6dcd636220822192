"""Command-line tools: they run, and pip installs from a git repository."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from testinfra.host import Host

PROJECT = r"""
mkdir -p /tmp/own/src && cd /tmp/own
printf 'def main():\n    print("from git")\n' >src/own.py
printf '[build-system]\nrequires = []\nbackend-path = ["."]\nbuild-backend = "backend"\n' >pyproject.toml
cat >backend.py <<'EOF'
import zipfile

def build_wheel(folder, settings=None, metadata=None):
    name = "own-1.0-py3-none-any.whl"
    with zipfile.ZipFile(f"{folder}/{name}", "w") as wheel:
        wheel.write("src/own.py", "own.py")
        wheel.writestr("own-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: own\nVersion: 1.0\n")
        wheel.writestr("own-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("own-1.0.dist-info/entry_points.txt", "[console_scripts]\nown-version = own:main\n")
        wheel.writestr("own-1.0.dist-info/RECORD", "")
    return name
EOF
git init -q . && git add . && git -c user.name=me -c user.email=me@example.test commit -qm first
"""


@pytest.mark.parametrize(
    "tool",
    [
        "curl", "git", "htop", "jq", "less", "nano", "ps", "rsync", "scp", "ssh", "tmux", "top", "unzip",
        "vi", "wget", "zip",
    ],
)  # fmt: skip
def test_tool_runs(host: Host, tool: str) -> None:
    option = {"ssh": "-V", "scp": "", "tmux": "-V", "unzip": "-v", "top": "-bn1"}.get(tool, "--version")
    assert host.run(f"{tool} {option}").rc == (1 if tool == "scp" else 0)  # scp only prints its usage


@pytest.mark.parametrize("install", ["pip install --no-index", "uv pip install --offline --no-index"])
def test_a_package_is_installed_from_a_repository(shell: Callable[..., Any], install: str) -> None:
    container = shell()
    container.run(PROJECT)
    container.run(f"{install} git+file:///tmp/own")
    assert container.run("own-version") == "from git"
    assert container.run("git clone -q /tmp/own /tmp/clone && ls /tmp/clone/src") == "own.py"


def test_tmux_starts_a_session(host: Host) -> None:
    assert host.run("tmux new-session -d -s work 'sleep 60' && tmux has-session -t work && tmux kill-server").rc == 0
