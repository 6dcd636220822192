"""CUDA libraries: in one place, once, at the locked versions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from packaging.utils import canonicalize_name
from testinfra.host import Host

# torchvision's wheel carries a CUDA runtime of its own, renamed by auditwheel so that nothing else loads it.
VENDORED = re.compile(r"/opt/venv/lib/python[0-9.]+/site-packages/torchvision\.libs/libcudart\.[0-9a-f]+\.so\.\d+")
LIBRARIES = ("libcudart", "libcublas", "libcudnn", "libcufft", "libcurand", "libcusolver", "libcusparse", "libnccl")


def test_cuda_wheels_are_installed_in_opt_nvidia(subject: Any, python: Callable[[str], Any]) -> None:
    code = """
import importlib.metadata as metadata, json
print(json.dumps([d.metadata["Name"] for d in metadata.distributions(path=["/opt/nvidia"])]))
"""
    found = {canonicalize_name(name) for name in python(code)}
    assert found
    assert found == set(subject.data["cuda_wheels"])


def test_site_packages_links_to_opt_nvidia(host: Host, python: Callable[[str], Any]) -> None:
    site = python("import sysconfig, json; print(json.dumps(sysconfig.get_path('purelib')))")
    link = host.file(f"{site}/nvidia")
    assert link.is_symlink
    assert link.linked_to == "/opt/nvidia/nvidia"


def test_no_cuda_library_is_there_twice(host: Host) -> None:
    names = " -o ".join(f"-name '{name}*.so*'" for name in LIBRARIES)
    found = host.check_output(f"find / -xdev -type f \\( {names} \\) 2>/dev/null || true").split()
    found = [path for path in found if not VENDORED.fullmatch(path)]
    assert len(found) >= len(LIBRARIES)
    assert [path for path in found if not path.startswith("/opt/nvidia/nvidia/")] == []
    names_found = [path.rsplit("/", 1)[1] for path in found]
    assert sorted(names_found) == sorted(set(names_found))


def test_cuda_runtime_is_that_of_the_cell(subject: Any, python: Callable[[str], Any]) -> None:
    """Asks the library itself: cudaRuntimeGetVersion works without a driver."""
    code = """
import ctypes, glob, json
library = ctypes.CDLL(glob.glob("/opt/nvidia/nvidia/**/libcudart.so.*", recursive=True)[0])
version = ctypes.c_int()
status = library.cudaRuntimeGetVersion(ctypes.byref(version))
print(json.dumps([status, "%d.%d" % (version.value // 1000, version.value % 1000 // 10)]))
"""
    assert python(code) == [0, subject.cell["cuda"]]
