"""CUDA 11 for TensorFlow, which opens the libraries by name: with every shell and without one, and not for root."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from testinfra.host import Host

SHELLS = [
    "sh -c",
    "bash -c",
    "sh -lc",
    "bash -lc",
    "bash -ic",
    "env -i sh -c",
    "env -i sh -lc",
    "env -i HOME=/ bash -lc",
]
SITE = "/opt/venv/lib/python/site-packages"
# With TensorFlow's own functions, which need no GPU. Each returns StatusOr<void*>, which begins with a null pointer if
# the library was opened.
OPEN = f"""
import ctypes
library = ctypes.CDLL("{SITE}/tensorflow/python/_pywrap_tensorflow_internal.so")
missing = []
for name in ("CudaRuntime", "Cublas", "CublasLt", "Cufft", "Curand", "Cusolver", "Cusparse", "Cupti", "Cudnn"):
    function = "Get" + name + "DsoHandle"
    result = (ctypes.c_void_p * 8)()
    library["_ZN15stream_executor8internal9DsoLoader%d%sEv" % (len(function), function)](result)
    if result[0]:
        missing.append(name)
assert not missing, missing
"""
# These functions of cuDNN open the part that they are named for, or end the process.
PARTS = f"""
import ctypes
library = ctypes.CDLL("{SITE}/tensorflow/libcudnn.so.8")
parts = ["OpsInfer", "OpsTrain", "CnnInfer", "CnnTrain", "AdvInfer", "AdvTrain"]
print([library["cudnn" + part + "VersionCheck"]() for part in parts])
"""


@pytest.mark.parametrize("shell", SHELLS)
def test_tensorflow_finds_its_libraries_in_every_shell(host: Host, shell: str) -> None:
    result = host.run(f"{shell} %s", f"/opt/venv/bin/python -c '{OPEN}'")
    assert result.rc == 0, result.stderr


def test_the_libraries_that_cudnn_opens_are_found(python: Callable[[str], Any]) -> None:
    assert python(PARTS) == [0] * 6


def test_no_link_is_broken(host: Host) -> None:
    assert host.check_output(f"find {SITE}/tensorflow -xtype l") == ""


def test_root_finds_no_library_that_users_can_replace(shell: Callable[..., Any]) -> None:
    """`ldconfig`, which apt-get runs, reads the name of a library in the file that a link leads to: any other."""
    container = shell()
    container.run(["ldconfig"], user="root")
    before = container.run(["ldconfig", "-p"])
    container.run(
        f"for file in $(find {SITE}/nvidia/*/lib -name 'lib*.so.*'); do "
        "rm $file && cp /lib/x86_64-linux-gnu/libz.so.1 $file; done"
    )
    container.run(["ldconfig"], user="root")
    assert container.run(["ldconfig", "-p"]) == before
    for name in ("libcudart", "libcublas", "libcudnn", "libcufft"):
        assert name not in before
