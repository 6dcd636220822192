"""Generates tiny, valid wheels: the same bytes for the same arguments."""

from __future__ import annotations

import base64
import hashlib
import io
import random
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CUDA = "nvidia-cuda-runtime-cu12"
CUDA_VERSION = "12.8.90"
LINUX = "py3-none-manylinux_2_17_x86_64"


@dataclass(frozen=True, kw_only=True)
class Distribution:
    """A file that an index lists."""

    project: str
    file: str
    content: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()


def wheel(
    project: str,
    version: str,
    files: Mapping[str, bytes],
    *,
    requires: Iterable[str] = (),
    tag: str = "py3-none-any",
    command: str = "",
) -> Distribution:
    """`command` is the `module:function` of a console script with the project's name."""
    name = project.replace("-", "_")
    info = f"{name}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.1", f"Name: {project}", f"Version: {version}"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    members = dict(files)
    members[f"{info}/METADATA"] = ("\n".join(metadata) + "\n").encode()
    members[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: {tag}\n".encode()
    if command:
        members[f"{info}/entry_points.txt"] = f"[console_scripts]\n{project} = {command}\n".encode()
    record = [f"{path},{_record_hash(content)},{len(content)}" for path, content in members.items()]
    members[f"{info}/RECORD"] = ("\n".join([*record, f"{info}/RECORD,,"]) + "\n").encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, content in members.items():
            entry = zipfile.ZipInfo(path)
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    return Distribution(project=project, file=f"{name}-{version}-{tag}.whl", content=buffer.getvalue())


def _record_hash(content: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")


def cuda(version: str = CUDA_VERSION) -> Distribution:
    """A stand-in for NVIDIA's runtime with the files that `builder` reads."""
    files = {
        "nvidia/__init__.py": b"",
        "nvidia/cuda_runtime/__init__.py": b"",
        "nvidia/cuda_runtime/lib/libcudart.so.12": b"not a library " * 1000,
    }
    return wheel(CUDA, version, files, tag=LINUX)


def driver_library(version: str = "13.0") -> Distribution:
    """A stand-in for NVIDIA's Python module for the driver, which reports that there is no driver."""
    text = (
        "class NVMLError(Exception): pass\n"
        "class NVMLError_LibraryNotFound(NVMLError): pass\n"
        "def nvmlInit(): raise NVMLError_LibraryNotFound('NVML Shared Library Not Found')\n"
    )
    return wheel("nvidia-ml-py", version, {"pynvml.py": text.encode()})


def framework(
    release: str, *, requires: Iterable[str] = (f"{CUDA}=={CUDA_VERSION}",), padding: int = 0
) -> Distribution:
    """The framework of the small matrix. `padding` bytes compress to a thirtieth, and fill a disk when unpacked."""
    files = {
        "tinyframe/__init__.py": f'VERSION = "{release}"\n\n\ndef main():\n    print(VERSION)\n'.encode(),
        "tinyframe/data.bin": _padding(padding),
    }
    return wheel("tinyframe", release, files, requires=requires, command="tinyframe:main")


def _padding(size: int) -> bytes:
    """Repeats itself farther apart than deflate looks back: a wheel that shrinks more is refused."""
    source = random.Random(0)
    block = b"".join(source.randbytes(50) + bytes(1950) for _ in range(500))
    return (block * (size // len(block) + 1))[:size]


def extra(version: str) -> Distribution:
    """The one package of the component `extra`."""
    return wheel("tinyextra", version, {"tinyextra/__init__.py": f'VERSION = "{version}"\n'.encode()})
