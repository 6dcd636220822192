"""Packages that people add, in a real container: installed from an index, checked, and recorded."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.integration import wheels
from tests.integration.checkout import PLAIN, Checkout
from tests.integration.index import Index
from tools.packages import LIST, PAGE, RESULTS

PACKAGES = """\
frameworks:
  tiny: import tinyframe
packages:
  tinyuser:
    cells: ["{cells}"]
    debian: [hello]
    note: It uses the image's CUDA.
    check: |
      import os, subprocess, tinyuser
      assert os.getuid() == 1000
      subprocess.run(["hello"], check=True)
  tinyhidden:
    cells: ["{cells}"]
    fails: "libhidden.so: cannot open shared object file"
    note: Nothing has its library.
    check: import tinyhidden
  tinyother:
    cells: ["{cells}"]
    note: It would replace the image's CUDA.
  missing:
    cells: ["{cells}-extra"]
"""
CUDA = "nvidia-cuda-runtime-cu12"
FIND = """\
import pathlib, nvidia.cuda_runtime
assert pathlib.Path(nvidia.cuda_runtime.__path__[0], "lib/libcudart.so.12").is_file()
"""


def run(checkout: Checkout, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tools.packages", *options]
    return subprocess.run(
        command, cwd=checkout.root, env=checkout.environ, capture_output=True, text=True, timeout=300, check=False
    )


def test_packages_are_installed_checked_and_recorded(checkout: Checkout, index: Index) -> None:
    index.publish(
        wheels.wheel("tinyuser", "2.0", {"tinyuser.py": FIND.encode()}, requires=[CUDA]),
        wheels.wheel("tinyhidden", "1.0", {"tinyhidden.py": b"import ctypes\nctypes.CDLL('libhidden.so')\n"}),
        wheels.wheel("tinyother", "1.0", {}, requires=[f"{CUDA}<12"]),
    )
    checkout.lock_and_render()
    checkout.builder("images", PLAIN)
    (checkout.root / LIST).parent.mkdir(parents=True)
    (checkout.root / LIST).write_text(PACKAGES.format(cells=PLAIN), encoding="utf-8")
    done = run(checkout)
    written = (checkout.root / PAGE).read_text(encoding="utf-8")
    results = {each["package"]: each for each in json.loads((checkout.root / RESULTS).read_bytes())}

    assert done.returncode == 8, done.stderr
    assert f"{PLAIN} tinyuser: done" in done.stderr
    assert "tests: 1 package not as listed\n" in done.stderr, "only what the index has no fitting version of"
    assert f"{PLAIN} tinyother: ERROR: Cannot install tinyother==1.0" in done.stderr
    assert "-extra is not on this machine: its packages were not tested" in done.stderr
    assert list(results) == ["tinyuser", "tinyhidden", "tinyother"]
    assert results["tinyuser"]["installed"] == {"tinyuser": "2.0"}
    assert (results["tinyuser"]["fault"], results["tinyuser"]["replaced"]) == ("", {})
    assert results["tinyhidden"]["fault"].startswith("OSError: libhidden.so: cannot open shared object file")
    assert "- `tinyuser` 2.0: works. First, as root: `apt-get install hello`. It uses the image's CUDA.\n" in written
    assert "- `tinyhidden` 1.0: **does not work**. Nothing has its library.\n" in written
    assert index.address not in f"{written}{done.stderr}{results}"
    assert checkout.containers() == []
