"""What the compiled modules of inference engines need, and whether they load without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

# A machine without a GPU has no libcuda.so.1. A stand-in exports each of its functions that a module calls.
CODE = """
import ctypes, json, os, pathlib, re, shutil, subprocess, sys, tempfile
site = pathlib.Path("/opt/venv/lib/python/site-packages")
modules = sorted(path for folder in {folders!r} for path in (site / folder).rglob("*.so"))
libraries = ":".join(map(str, [site / "torch/lib", *sorted(site.glob("nvidia/*/lib")), site / "tvm_ffi/lib"]))
missing, functions = dict(), set()
for path in modules:
    listed = subprocess.run(["ldd", path], env=dict(os.environ, LD_LIBRARY_PATH=libraries), text=True, stdout=-1).stdout
    missing[str(path.relative_to(site))] = re.findall(r"(\\S+) => not found", listed)
    symbols = subprocess.run(["nm", "-D", "--undefined-only", path], text=True, stdout=-1, check=True).stdout
    functions.update(re.findall(r" (cu[A-Z]\\w+)$", symbols, re.MULTILINE))
folder = pathlib.Path(tempfile.mkdtemp())
source = folder / "cuda.c"
source.write_text("".join(f"int {{name}}(void) {{{{ return 100; }}}}\\n" for name in sorted(functions)))
command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", folder / "libcuda.so.1", source]
subprocess.run(command, check=True)
load = '''
import ctypes, os, sys, torch
os.environ.pop("LD_LIBRARY_PATH", None)
for path in sys.argv[1:]:
    if not os.fork():  # sgl_kernel has one library for each of two GPUs, which register the same operators
        try:
            ctypes.CDLL(path)
        except OSError as error:
            print(path, error, flush=True)
        os._exit(0)
    status = os.wait()[1]
    if status:
        print(path, "status", status, flush=True)
'''
command = [sys.executable, "-W", "ignore", "-c", load, *map(str, modules)]
environ = dict(os.environ, LD_LIBRARY_PATH=f"{{folder}}:{{libraries}}")
loaded = subprocess.run(command, env=environ, text=True, stdout=-1, check=True)
shutil.rmtree(folder)  # another test looks for CUDA's libraries in this container
print(json.dumps(dict(missing=missing, failed=loaded.stdout.splitlines())))
"""


def check_modules(python: Callable[[str], Any], folders: Sequence[str], least: int) -> None:
    """Every compiled module in folders of site-packages lacks at most the driver, and loads with its stand-in."""
    found = python(CODE.format(folders=list(folders)))
    assert len(found["missing"]) >= least
    assert {name: lacks for name, lacks in found["missing"].items() if lacks not in ([], ["libcuda.so.1"])} == {}
    assert found["failed"] == []
