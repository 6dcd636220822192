"""What is read of each wheel, and how it is compared with facts.yaml."""

from __future__ import annotations

import io
import json
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from packaging.version import Version

from builder.cli.context import Context
from builder.common.errors import FetchError, StaleError, UsageError
from builder.index.host import Host
from builder.index.session import IndexSession
from builder.index.settings import IndexSettings
from builder.matrix import facts
from builder.matrix.facts import Build
from tests.fakes.wire import Reply, Sent, Wire, part
from tests.unit.compat.test_explain import MATRIX
from tools.facts import check_facts, compare, exact_release, fat_binaries, read_build

HOST = "index.example.test"
SETTINGS = IndexSettings(url=f"https://{HOST}/simple/")
TAG = "cp311-cp311-manylinux_2_28_x86_64"
FLAGS = b"Creating ipc_hsm_70 sm_90a compute_90\0"
TORCH = {
    "torch/version.py": b"from typing import Optional\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n",
    "torch/lib/libtorch_python.so": b"\0sm_50\0%s\0" % FLAGS * 3,
    "torch/lib/libtorch_cuda.so": bytes(range(256)) * 4000,
}
INFO = """
import collections
build_info = collections.OrderedDict([('cuda_compute_capabilities', ['sm_80', 'compute_90']),
  ('cuda_version', '12.5.1'), ('cudnn_version', '9'), ('is_cuda_build', True)])
"""


def fat(*entries: tuple[int, int, int, int]) -> bytes:
    """A fat binary of (kind, major, minor, architecture)."""
    body = b"".join(
        struct.pack("<HHIQ8xHHI32x", kind, 0x101, 64, 5, minor, major, number) + b"\x50\xed\x55\xba!"
        for kind, major, minor, number in entries
    )
    return struct.pack("<8sQ", bytes.fromhex("50ed55ba01001000"), len(body)) + body


LIBRARY = b"ELF" + fat((2, 8, 1, 120), (1, 8, 8, 120), (2, 7, 1, 80)) + b"between" + fat((2, 7, 1, 100)) + b"end"


def zipped(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


class Index:
    """Serves wheels from memory by name, in parts unless `ranges` is False. `sent` counts the bytes of files."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wheels: Mapping[str, Mapping[str, bytes]]) -> None:
        self.wheels = {name: zipped(files) for name, files in wheels.items()}
        self.wire = Wire.install(monkeypatch, self.answer)
        self.sent = 0
        self.ranges = True

    def answer(self, sent: Sent) -> Reply | Exception:
        if "/simple/" in sent.url:
            files = [{"filename": name, "url": f"../../files/{name}", "hashes": {}} for name in self.wheels]
            body = json.dumps({"meta": {"api-version": "1.0"}, "name": "x", "files": files}).encode()
            return Reply(body=body, headers={"Content-Type": "application/vnd.pypi.simple.v1+json"})
        content = self.wheels[sent.url.rpartition("/")[2]]
        reply = part(content, sent) if self.ranges else Reply(body=content)
        self.sent += len(reply.body)
        return reply


def read(package: str = "torch", release: str = "2.9.1") -> Build:
    return read_build(IndexSession(SETTINGS), package, Version(release))


def test_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(monkeypatch, {f"torch-2.9.1-{TAG}.whl": TORCH})
    build = read()
    assert (build.cuda, build.cudnn, build.architectures) == ("12.8", "", ["sm_70", "sm_90a", "compute_90"])
    assert index.sent < len(TORCH["torch/lib/libtorch_cuda.so"]) / 2, "the other library was downloaded"


def test_the_wheel_for_arm64_has_architectures_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """None if it is for the CPU alone, as that of torch 2.9.1."""
    arm64, cpu = f"torch-2.9.1-{TAG}.whl".replace("x86_64", "aarch64"), {"torch/version.py": b"cuda = None"}
    flags = {"torch/lib/libtorch_python.so": b"\0sm_80 sm_90 sm_100\0"}
    Index(monkeypatch, {f"torch-2.9.1-{TAG}.whl": TORCH, arm64: TORCH | flags})
    assert (read().architectures, read().arm64) == (["sm_70", "sm_90a", "compute_90"], ["sm_80", "sm_90", "sm_100"])
    Index(monkeypatch, {f"torch-2.9.1-{TAG}.whl": TORCH, arm64: TORCH | cpu})
    assert (read().architectures, read().arm64) == (["sm_70", "sm_90a", "compute_90"], [])


def test_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tensorflow/python/platform/build_info.py"
    Index(monkeypatch, {f"tensorflow-2.20.0-{TAG}.whl": {name: INFO.encode()}})
    assert read("tensorflow", "2.20.0") == Build(
        cuda="12.5.1", cudnn="9", architectures=["sm_80", "compute_90"], source=name
    )


def test_jax_by_its_fat_binaries(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"jax_cuda12_plugin/_solver.so": LIBRARY, "jax_cuda12_plugin/_rnn.so": b"ELF", "a.txt": fat((1, 9, 2, 75))}
    Index(monkeypatch, {f"jax_cuda12_plugin-0.10.2-{TAG}.whl": files})
    build = read("jax-cuda12-plugin", "0.10.2")
    assert build.cuda == "12.9", "the first with PTX 8.8"
    assert build.architectures == ["sm_80", "sm_100", "sm_120", "compute_120"]


def test_an_endless_fat_binary() -> None:
    endless = struct.pack("<8sQ", bytes.fromhex("50ed55ba01001000"), 64) + bytes(64)
    with pytest.raises(ValueError, match="without a header"):
        list(fat_binaries(endless))


def test_the_wheel_for_linux_of_that_release_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    other = TORCH | {"torch/version.py": b"cuda = '0.0'"}
    names = ["torch-2.9.1-cp311-cp311-win_amd64.whl", "torch-2.9.10-" + TAG + ".whl", "torch-2.9.1.tar.gz",
             "torch-2.9.1-cp311-cp311-manylinux_2_28_aarch64.whl"]  # fmt: skip
    Index(monkeypatch, dict.fromkeys(names, other) | {f"torch-2.9.1-{TAG}.whl": TORCH})
    assert read().cuda == "12.8"
    with pytest.raises(FetchError, match=r"torch 2\.9: no wheel for Linux on x86-64 on the index"):
        read("torch", "2.9")


@pytest.mark.parametrize(
    "files",
    [
        TORCH | {"torch/version.py": b"cuda: Optional[str] = None\n"},
        TORCH | {"torch/version.py": b"not Python"},
        TORCH | {"torch/version.py": b"cuda = 'twelve'"},
        TORCH | {"torch/lib/libtorch_python.so": b"sm_80 sm_90 and no end"},
        {"torch/other.py": b""},
    ],
    ids=["CPU build", "not Python", "not a version", "no flags", "no file"],
)
def test_a_wheel_without_the_information(monkeypatch: pytest.MonkeyPatch, files: Mapping[str, bytes]) -> None:
    Index(monkeypatch, {f"torch-2.9.1-{TAG}.whl": files})
    with pytest.raises(FetchError, match=r"cannot find in torch-2\.9\.1-.*whl what it was compiled for"):
        read()


def test_an_index_without_range_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    Index(monkeypatch, {f"torch-2.9.1-{TAG}.whl": TORCH}).ranges = False
    with pytest.raises(FetchError, match=r"torch 2\.9\.1: the request to the index failed \(RangeNotSupported\)"):
        read()


# ---- the comparison


BUILD = Build(cuda="12.8", cudnn="9", architectures=["sm_80", "compute_90"], source="a file")
RELEASE = Version("2.9.1")


ENTRY = "architectures: [sm_80, compute_90]"


@pytest.mark.parametrize(
    ("known", "arm64", "text"),
    [
        ({}, [], ""),
        ({"cuda": "12.6"}, [], "correct builder/matrix/facts.yaml: the wheel has CUDA 12.8, not 12.6"),
        (
            {"cudnn": "", "architectures": ["sm_80"]},
            [],
            "correct builder/matrix/facts.yaml: the wheel has cuDNN 9, not none; "
            "architectures sm_80 compute_90, not sm_80",
        ),
        ({}, ["sm_90"], "correct builder/matrix/facts.yaml: the wheel has arm64 sm_90, not none"),
        (
            None,
            [],
            "missing in builder/matrix/facts.yaml; add to builds.torch:\n"
            f'    2.9.1: {{cuda: "12.8", cudnn: "9", {ENTRY}, source: a file}}',
        ),
        (
            None,
            ["sm_90"],
            "missing in builder/matrix/facts.yaml; add to builds.torch:\n"
            f'    2.9.1: {{cuda: "12.8", cudnn: "9", {ENTRY}, arm64: [sm_90], source: a file}}',
        ),
    ],
)
def test_an_entry_is_compared_with_the_wheel(known: Mapping[str, Any] | None, arm64: list[str], text: str) -> None:
    entry = None if known is None else BUILD.model_copy(update=known)
    assert compare(entry, BUILD.model_copy(update={"arm64": arm64}), "torch", RELEASE) == text


# ---- the program


def checked(*releases: str, root: Path) -> Result:
    context = Context(root=root)
    context.host = Host(index=SETTINGS)
    return CliRunner().invoke(check_facts, releases, obj=context)


def test_all_releases_are_checked_and_those_that_fail_are_one_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """facts.yaml has 2.9.1, but not with these architectures."""
    known = facts.load_facts().builds["torch"]["2.15.0"]
    flags, of_arm64 = (" ".join(names).encode() for names in (known.architectures, known.arm64))
    same = {"torch/version.py": b"cuda = '13.2'", "torch/lib/libtorch_python.so": b"\0%s\0" % flags}
    arm64 = {**same, "torch/lib/libtorch_python.so": b"\0%s\0" % of_arm64}
    wheels = {f"torch-{version}-{TAG}.whl": TORCH for version in ("2.9.1", "99.0")}
    name = f"torch-2.15.0-{TAG}.whl"
    Index(monkeypatch, wheels | {name: same, name.replace("x86_64", "aarch64"): arm64})
    result = checked("torch==2.9.1", "torch==99.0", "torch==98.0", "torch==2.15.0", root=tmp_path)
    assert isinstance(result.exception, StaleError)
    first, *rest = str(result.exception).splitlines()
    assert first == "3 releases failed"
    assert "torch 2.9.1: correct builder/matrix/facts.yaml: the wheel has architectures sm_70 sm_90a" in rest[0]
    assert rest[1:3] == [
        "torch 99.0: missing in builder/matrix/facts.yaml; add to builds.torch:",
        '    99.0: {cuda: "12.8", architectures: [sm_70, sm_90a, compute_90], source: torch/version.py; '
        "torch._C._cuda_getArchFlags() in torch/lib/libtorch_python.so}",
    ]
    assert rest[3].startswith("torch 98.0: no wheel for Linux on x86-64 on the index")
    assert result.stdout == f"torch 2.15.0: same: CUDA 13.2, {flags.decode()}\n"


def test_without_arguments_the_gpu_releases_of_the_matrix_are_checked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "matrix.yaml").write_text(MATRIX)
    Wire.install(monkeypatch, lambda _: Reply(status=404))
    result = checked(root=tmp_path)
    names = ["torch 2.15.0", "torch 2.9.1", "tensorflow 2.20.0", "tensorflow 2.9.3"]
    plugins = [("12", "0.12.0.1"), ("13", "0.12.0.1"), ("12", "0.10.2"), ("13", "0.10.2")]
    names += [f"jax-cuda{cuda}-plugin {release}" for cuda, release in plugins]
    assert result.stderr == "".join(f"{name}: reading the wheel\n" for name in names)
    assert isinstance(result.exception, FetchError)


@pytest.mark.parametrize("text", ["torch", "torch>=2", "torch==2,<3", "torch==2.*x", "torch==2.9.*", "==2"])
def test_arguments_without_an_exact_release(text: str) -> None:
    with pytest.raises(UsageError, match="exact release"):
        exact_release(text)


@pytest.mark.parametrize(
    ("text", "package", "version"),
    [
        ("torch==2.9.1", "torch", "2.9.1"),
        ("Torch==2.9.1", "torch", "2.9.1"),
        ("JAX_cuda12.plugin==0.10.2", "jax-cuda12-plugin", "0.10.2"),
    ],
)
def test_an_exact_release(text: str, package: str, version: str) -> None:
    assert exact_release(text) == (package, Version(version))
