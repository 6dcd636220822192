"""CUDA libraries: each exists once, where its wheel is, has the locked version and can be loaded; settings for GPUs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from testinfra.host import Host

# The wheels of torchvision, torchcodec and PyNvVideoCodec have a CUDA runtime or nvJPEG of their own, renamed by
# auditwheel so that nothing else loads them, and Triton's has CUPTI for its profiler. Of CUDA in name only: libraries
# of humming and of NVIDIA's CUTLASS DSL and NCCL extensions, and Debian's libcurl.
VENDORED = re.compile(
    r"/opt/venv/lib/python/site-packages/"
    r"((torchvision\.libs|torchcodec\.libs|pynvvideocodec\.)/lib[a-z]+[.-][0-9a-f]+\.so[0-9.]*"
    r"|triton/backends/nvidia/lib/cupti[a-z-]*/.*|(humming|nccl|nvidia_cutlass_dsl)/.*)"
    r"|/usr/lib/[a-z0-9_]+-linux-gnu/libcurl(-gnutls)?\.so\.[0-9.]+"
)
FAMILIES = ["libcu*", "libnccl*", "libnv*", "libcusparseLt*"]
# Plugins for other software, which is not in the image: UCX, libfabric, MPI, librdmacm. Those of NVSHMEM for InfiniBand
# must load.
PLUGINS = re.compile(
    r"libcufile_rdma|nvshmem_transport_(ucx|libfabric)|nvshmem_bootstrap_(mpi|pmi|shmem)|libpcsampling"
)

# By package (without -cuNN): the library, and its function for the version, which works without a driver.
VERSION_FUNCTIONS = {
    "nvidia-cudnn": ("libcudnn.so.?", "cudnnGetVersion", "return"),
    "nvidia-nccl": ("libnccl.so.2", "ncclGetVersion", "argument"),
    "nvidia-cufft": ("libcufft.so.*", "cufftGetVersion", "argument"),
}


def test_every_cuda_library_exists_once(host: Host, subject: Any) -> None:
    names = " -o ".join(f"-name '{name}.so*'" for name in FAMILIES)
    paths = host.check_output(f"find / -xdev -type f \\( {names} \\) 2>/dev/null || true").split()
    paths = [path for path in paths if not VENDORED.fullmatch(path)]
    assert len(paths) >= len(subject.data["cuda_wheels"]) / 2
    assert [path for path in paths if not path.startswith("/opt/venv/lib/python/site-packages/nvidia/")] == []
    libraries = [path.rsplit("/", 1)[1] for path in paths]
    assert sorted(libraries) == sorted(set(libraries))


def test_the_modules_of_cuda_wheels_are_empty(subject: Any, python: Callable[[str], Any]) -> None:
    """Several wheels have `nvidia/__init__.py`, and their layers have no bytecode: another text would need it.

    Those of CUDA 13.0 have no module at all.
    """
    code = f"""
import importlib.metadata, json
files = [
    file for name in {subject.data["cuda_wheels"]!r} for file in importlib.metadata.distribution(name).files
    if file.parts[0] == "nvidia"
]
modules = [file for file in files if file.suffix == ".py"]
print(json.dumps([len(files), [str(file) for file in modules if file.locate().stat().st_size]]))
"""
    count, others = python(code)
    assert count
    assert others == []


def test_cuda_runtime_is_that_of_the_cell(subject: Any, python: Callable[[str], Any]) -> None:
    """From the library itself: cudaRuntimeGetVersion works without a driver since CUDA 12."""
    code = """
import ctypes, glob, json
top = "/opt/venv/lib/python/site-packages/nvidia/**/"
library = ctypes.CDLL(glob.glob(top + "libcudart.so.*", recursive=True)[0])
version = ctypes.c_int()
status = library.cudaRuntimeGetVersion(ctypes.byref(version))
print(json.dumps([status, "%d.%d" % (version.value // 1000, version.value % 1000 // 10)]))
"""
    status, version = python(code)
    if subject.cell["cuda"].startswith("11."):
        no_driver = 35  # cudaErrorInsufficientDriver; then the version of cuBLAS below shows the release
        assert status == no_driver
    else:
        assert [status, version] == [0, subject.cell["cuda"]]


def test_cublas_is_the_locked_one(subject: Any, python: Callable[[str], Any]) -> None:
    """Each CUDA release has its own version of cuBLAS."""
    code = """
import ctypes, glob, json
top = "/opt/venv/lib/python/site-packages/nvidia/**/"
for name in ("libcublasLt.so.*", "libcublas.so.*"):
    library = ctypes.CDLL(glob.glob(top + name, recursive=True)[0], mode=ctypes.RTLD_GLOBAL)
numbers = []
for part in range(3):
    number = ctypes.c_int()
    assert library.cublasGetProperty(part, ctypes.byref(number)) == 0
    numbers.append(number.value)
print(json.dumps(numbers))
"""
    locked = next(version for name, version in subject.wheels.items() if name.startswith("nvidia-cublas"))
    assert python(code) == [int(part) for part in locked.split(".")[:3]]


@pytest.mark.parametrize("package", VERSION_FUNCTIONS)
def test_libraries_are_the_locked_ones(subject: Any, python: Callable[[str], Any], package: str) -> None:
    locked = {re.sub(r"-cu\d+$", "", name): version for name, version in subject.wheels.items()}
    file, function, how = VERSION_FUNCTIONS[package]
    code = f"""
import ctypes, glob, json, os
top = "/opt/venv/lib/python/site-packages/nvidia/**/"
files = glob.glob(top + {file!r}, recursive=True)
if not files:
    print(json.dumps(None))
else:
    for needed in ("libcublasLt.so.*", "libcublas.so.*"):
        for path in glob.glob(top + needed, recursive=True):
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(files[0])
    number = ctypes.c_int()
    if {how!r} == "argument":
        assert library.{function}(ctypes.byref(number)) == 0
    else:
        library.{function}.restype = ctypes.c_size_t
        number.value = library.{function}()
    print(json.dumps(number.value))
"""
    number = python(code)
    if package not in locked:
        assert number is None
        return
    major, minor, patch = (int(part) for part in locked[package].split(".")[:3])
    scales = [(10000, 100), (1000, 100)]  # newer and older encodings of a version as one number
    assert number in [major * first + minor * second + patch for first, second in scales]


def test_every_library_loads_without_a_gpu(python: Callable[[str], Any]) -> None:
    """In one process, like in a framework: dependencies are found on the search path or are already loaded."""
    code = """
import ctypes, glob, json, os, re
top = "/opt/venv/lib/python/site-packages/nvidia/**/"
paths = [p for p in glob.glob(top + "*.so*", recursive=True) if not os.path.islink(p)]
failed = dict()
for attempt in range(4):  # because of the order of their dependencies
    failed = dict()
    for path in paths:
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            failed[path] = str(error)
print(json.dumps([len(paths), failed]))
"""
    count, failed = python(code)
    assert count >= 10
    errors = {path: error for path, error in failed.items() if not PLUGINS.search(path)}
    # Some libraries are linked to the driver.
    assert {
        path: error for path, error in errors.items() if "libcuda.so.1" not in error and "libnvidia-ml" not in error
    } == {}


def test_gpu_settings(subject: Any, attributes: dict[str, Any]) -> None:
    settings = dict(line.split("=", 1) for line in attributes["Config"]["Env"])
    labels = attributes["Config"]["Labels"]
    assert settings["NVIDIA_VISIBLE_DEVICES"] in ("all", "void")  # matrix.yaml may have `void`, for clusters
    assert {"compute", "utility"} <= set(
        settings["NVIDIA_DRIVER_CAPABILITIES"].split(",")
    )  # matrix.yaml may add others
    assert settings["NVIDIA_REQUIRE_CUDA"] == f"driver>={labels['io.github.gpu-images.driver']}"


def test_a_driver_that_gke_mounts_is_found(shell: Callable[..., Any]) -> None:
    """Also by `kubectl exec`, which does not run the launcher. Any library shows where NVML was looked for."""
    session = shell()
    code = r"""
cd /usr/local && mkdir -p nvidia/bin nvidia/lib64 && cp /lib/*-linux-gnu/libz.so.1 nvidia/lib64/libnvidia-ml.so.1
for program in nvidia-smi nvidia-debugdump; do
    printf '#!/bin/sh\necho mounted\n' >nvidia/bin/$program && chmod a+x nvidia/bin/$program
done
"""
    session.run(code, user="root")
    assert session.run("nvidia-smi; nvidia-debugdump; bash -lc nvidia-debugdump").split() == ["mounted"] * 3
    assert "NVML failed: the driver has no nvmlInit_v2" in session.run(["start", "true"])


# ---- InfiniBand and RoCE: without these libraries NCCL uses TCP, and prints no warning


def test_what_nccl_opens_for_infiniband_is_found(subject: Any, python: Callable[[str], Any]) -> None:
    """By the names in libnccl itself, of which it opens the first that exists: libibverbs.so, libibverbs.so.1."""
    code = """
import ctypes, glob, json, mmap
top = "/opt/venv/lib/python/site-packages/nvidia/**/"
names = set()
for path in glob.glob(top + "libnccl.so.2", recursive=True):
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        for library in (b"libibverbs.so", b"libmlx5.so"):
            at = content.find(bytes(1) + library)
            while at >= 0:
                names.add(content[at + 1 : content.find(bytes(1), at + 1)].decode())
                at = content.find(bytes(1) + library, at + 1)
results = dict()
for name in names or ["libibverbs.so.1"]:  # TensorFlow 2.9 contains NCCL
    try:
        ctypes.CDLL(name)
        results[name] = "loaded"
    except OSError as error:
        results[name] = str(error)
print(json.dumps(results))
"""
    results = python(code)
    families = {"libibverbs"}
    if any(name.startswith("nvidia-nccl") for name in subject.wheels):
        families.add("libmlx5")
    assert {name.split(".")[0] for name in results} == families, results
    assert {name.split(".")[0] for name, result in results.items() if result == "loaded"} == families, results


def test_the_library_of_every_card_loads(python: Callable[[str], Any]) -> None:
    """libibverbs opens the one that /etc/libibverbs.d names for the card."""
    code = """
import ctypes, glob, json, pathlib
failed = dict()
names = [path.read_text().split()[1] for path in pathlib.Path("/etc/libibverbs.d").glob("*.driver")]
for name in names:
    try:
        ctypes.CDLL(glob.glob(f"/usr/lib/*-linux-gnu/libibverbs/lib{name}-rdmav*.so")[0])
    except (OSError, IndexError) as error:
        failed[name] = repr(error)
print(json.dumps([names, failed]))
"""
    names, failed = python(code)
    assert {"mlx5", "bnxt_re", "efa"} <= set(names)
    assert failed == {}


def test_ibv_devices_answers_without_hardware(host: Host) -> None:
    result = host.run("ibv_devices")
    # The second answer is that of a kernel without InfiniBand.
    is_answer = result.rc == 0 and "node GUID" in result.stdout
    assert is_answer or "Function not implemented" in result.stderr, result


def test_dist_check_finds_libibverbs(python: Callable[[str], Any]) -> None:
    code = """
import json, sys
sys.path.append("/usr/local/lib")
from dist_check import machine
print(json.dumps(machine.verbs_cards()))
"""
    assert isinstance(python(code), list)  # empty without a card; None without the library
