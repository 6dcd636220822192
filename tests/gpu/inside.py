#!/usr/bin/env python3
"""Runs the GPU checks in a container that a command of matrix.yaml started, and hands over what they found.

    python inside.py --run ID pytorch

The results are the last line of standard output, with ID, the hashes of the tests, and an inventory of the image:
`builder` refuses results of another run, of other tests and of another image. The exit code is 0 whatever the checks
found. Needs the standard library of Python 3.9 or newer.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import platform
import subprocess
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path

MARKER = "gpu-images-results:"  # as in builder/build/gpu_command.py, as is INVENTORY
# What the image consists of: its Debian packages, its wheels (a RECORD has the hash of each file), its own programs.
INVENTORY = (
    "var/lib/dpkg/status",
    "etc/pip/constraints.txt",
    "etc/variables.d/*",
    "opt/venv/lib/python/site-packages/*.dist-info/RECORD",
    "usr/local/bin/*",
    "usr/local/lib/**/*.py",
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, metavar="ID")
    parser.add_argument("frameworks", nargs="+")
    options = parser.parse_args()
    words = [word for name in options.frameworks for word in ("--framework", name)]
    checks = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run.py")), *words, "--json", "-"],
        env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False,
    )  # fmt: skip
    try:
        report = json.loads(checks.stdout)
    except ValueError:
        print(f"run.py ended with status {checks.returncode}, without results", file=sys.stderr)
        return 1
    found = {
        "run": options.run, "tests": hashes(Path(__file__).parent, ["**/*.py"]), "kernel": platform.release(),
        "inventory": hashes(Path("/"), INVENTORY), "report": report,
    }  # fmt: skip
    # zlib notices a line that was cut off or mixed with another one. Schedulers may put text before a line.
    packed = base64.b64encode(zlib.compress(json.dumps(found).encode(), 9)).decode()
    print(f"\n{MARKER} {packed}", flush=True)
    return 0


def environment() -> dict[str, str]:
    """The environment of the checks. A scheduler may pass on that of another machine, and mount the user's home."""
    left_out = ("PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "PYTHONNOUSERSITE": "1"}


def hashes(root: Path, patterns: Iterable[str]) -> dict[str, str]:
    """The SHA-256 of files by path. Links and empty files are left out."""
    return {
        path.relative_to(root).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for pattern in patterns
        for path in sorted(root.glob(pattern))
        if path.is_file() and not path.is_symlink() and path.stat().st_size
    }


if __name__ == "__main__":
    sys.exit(main())
