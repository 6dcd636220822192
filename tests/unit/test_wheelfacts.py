"""What is read of which wheel, and what is said when it is not there."""

from __future__ import annotations

import base64
import io
import json
import struct
import zipfile
from collections.abc import Mapping
from typing import Any

import pytest
import requests

from builder.cli import facts as command
from builder.errors import FetchError, UsageError
from builder.facts import Build
from builder.index import IndexSettings
from builder.wheelfacts import Compiled, Wheels, fat_binaries
from tests.unit.wire import Reply, Sent, Wire, broken

HOST = "index.example.test"
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


class Index:
    """Serves wheels in memory by name, in parts only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wheels: Mapping[str, Mapping[str, bytes]]) -> None:
        self.wheels = {name: _zip(files) for name, files in wheels.items()}
        self.wire = Wire.lay(monkeypatch, self.answer)
        self.sent = 0
        self.ranges = True

    def answer(self, sent: Sent) -> Reply | Exception:
        name = sent.url.rpartition("/")[2]
        if "/simple/" in sent.url:
            if "nothing" in sent.url:
                return Reply(status=404)
            files = [{"filename": one, "url": f"../../files/{one}", "hashes": {}} for one in self.wheels]
            body = json.dumps({"meta": {"api-version": "1.0"}, "name": "x", "files": files}).encode()
            return Reply(body=body, headers={"Content-Type": "application/vnd.pypi.simple.v1+json"})
        content = self.wheels[name]
        if not self.ranges:
            return Reply(body=content)
        first, _, last = sent.headers["Range"].removeprefix("bytes=").partition("-")
        start = int(first) if first else max(0, len(content) - int(last))
        end = min(int(last) if first and last else len(content) - 1, len(content) - 1)
        self.sent += end + 1 - start
        return Reply(
            status=206,
            body=content[start : end + 1],
            headers={"Content-Range": f"bytes {start}-{end}/{len(content)}"},
        )


def _zip(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as made:
        for name, content in files.items():
            made.writestr(name, content)
    return buffer.getvalue()


def wheels(url: str = f"https://{HOST}/simple/") -> Wheels:
    return Wheels(IndexSettings(url=url))


def test_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(monkeypatch, {f"torch-2.9.1-{TAG}.whl": TORCH})
    found = wheels().compiled("torch", "2.9.1")
    assert (found.cuda, found.cudnn, found.architectures) == ("12.8", "", ("sm_70", "sm_90a", "compute_90"))
    assert index.sent < len(TORCH["torch/lib/libtorch_cuda.so"]) / 2  # which lies between, and nobody asked for


def test_tensorflow(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "tensorflow/python/platform/build_info.py"
    Index(monkeypatch, {f"tensorflow-2.20.0-{TAG}.whl": {name: INFO.encode()}})
    assert wheels().compiled("tensorflow", "2.20.0") == Compiled(
        cuda="12.5.1", cudnn="9", architectures=("sm_80", "compute_90"), source=name
    )


def test_jax_by_its_fat_binaries(monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"jax_cuda12_plugin/_solver.so": LIBRARY, "jax_cuda12_plugin/_rnn.so": b"ELF", "a.txt": fat((1, 9, 2, 75))}
    Index(monkeypatch, {f"jax_cuda12_plugin-0.10.2-{TAG}.whl": files})
    found = wheels().compiled("jax-cuda12-plugin", "0.10.2")
    assert found.cuda == "12.9"  # the first that makes PTX 8.8
    assert found.architectures == ("sm_80", "sm_100", "sm_120", "compute_120")


def test_fat_binaries() -> None:
    assert list(fat_binaries(LIBRARY)) == [
        ("8.1", "sm", 120), ("8.8", "compute", 120), ("7.1", "sm", 80), ("7.1", "sm", 100),
    ]  # fmt: skip
    assert list(fat_binaries(b"nothing")) == []


@pytest.mark.parametrize("cut", [20, 60, 100])
def test_a_fat_binary_that_is_cut_off(cut: int) -> None:
    with pytest.raises(struct.error):
        list(fat_binaries(LIBRARY[:cut]))


def test_a_fat_binary_that_leads_nowhere() -> None:
    endless = struct.pack("<8sQ", bytes.fromhex("50ed55ba01001000"), 64) + bytes(64)
    with pytest.raises(ValueError, match="without a header"):
        list(fat_binaries(endless))


def test_the_wheel_for_linux_of_that_release_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    other = TORCH | {"torch/version.py": b"cuda = '0.0'"}
    names = ["torch-2.9.1-cp311-cp311-win_amd64.whl", "torch-2.9.10-" + TAG + ".whl", "torch-2.9.1.tar.gz",
             "torch-2.9.1-cp311-cp311-manylinux_2_28_aarch64.whl"]  # fmt: skip
    Index(monkeypatch, dict.fromkeys(names, other) | {f"torch-2.9.1-{TAG}.whl": TORCH})
    assert wheels().compiled("torch", "2.9.1").cuda == "12.8"
    with pytest.raises(FetchError, match=r"torch 2\.9: the index lists no wheel of it for Linux on x86-64"):
        wheels().compiled("torch", "2.9")


@pytest.mark.parametrize(
    "changed",
    [
        {"torch/version.py": b"cuda: Optional[str] = None\n"},
        {"torch/version.py": b"no Python"},
        {"torch/lib/libtorch_python.so": b"sm_80 sm_90 and no end"},
    ],
    ids=["for CPUs", "not Python", "no flags"],
)
def test_a_wheel_that_does_not_say_it(monkeypatch: pytest.MonkeyPatch, changed: Mapping[str, bytes]) -> None:
    Index(monkeypatch, {f"torch-2.9.1-{TAG}.whl": {**TORCH, **changed}})
    with pytest.raises(FetchError, match=r"torch-2\.9\.1-.*whl does not say what it was compiled for"):
        wheels().compiled("torch", "2.9.1")


def test_a_wheel_without_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    Index(monkeypatch, {f"torch-2.9.1-{TAG}.whl": {"torch/other.py": b""}})
    with pytest.raises(FetchError, match="does not say what it was compiled for"):
        wheels().compiled("torch", "2.9.1")


def test_what_is_not_on_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    Index(monkeypatch, {})
    with pytest.raises(FetchError, match="torch: the index does not have it"):
        wheels(f"https://{HOST}/simple/nothing/").compiled("torch", "2.9.1")
    with pytest.raises(UsageError, match="nothing is known of how numpy says"):
        wheels().compiled("numpy", "2.0")


def test_an_index_that_serves_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    Index(monkeypatch, {f"torch-2.9.1-{TAG}.whl": TORCH}).ranges = False
    with pytest.raises(FetchError, match=r"single files of its wheel cannot be read \(RangeNotSupported\)"):
        wheels().compiled("torch", "2.9.1")


@pytest.mark.parametrize("error", [broken(), requests.exceptions.SSLError(HOST)], ids=["broken", "certificate"])
def test_nothing_secret_in_an_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    Wire.lay(monkeypatch, lambda _: error)
    with pytest.raises(FetchError) as caught:
        wheels().compiled("torch", "2.9.1")
    assert "index" in str(caught.value)
    assert HOST not in str(caught.value)


def test_the_login_of_the_index_is_for_the_index_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(monkeypatch, {f"torch-2.9.1-{TAG}.whl": TORCH})
    wheels(f"https://me:p%40ss@{HOST}/simple/").compiled("torch", "2.9.1")
    login = "Basic " + base64.b64encode(b"me:p@ss").decode()
    assert {one.headers.get("Authorization") for one in index.wire.seen if "/files/" in one.url} == {login}
    made = wheels(f"https://me:p%40ss@{HOST}/simple/")
    assert made._login(f"https://{HOST}/a.whl") == ("me", "p@ss")
    assert made._login("https://elsewhere.example.test/a.whl") is None


FOUND = Compiled(cuda="12.8", cudnn="9", architectures=("sm_80", "compute_90"), source="a file")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, ""),
        ({"cuda": "12.6"}, "differs: the wheel says CUDA 12.8, not 12.6"),
        ({"cudnn": "", "architectures": ["sm_80"]},
         "differs: the wheel says cuDNN 9, not none; architectures sm_80 compute_90, not sm_80"),
    ],
)  # fmt: skip
def test_compare(changes: Mapping[str, Any], told: str) -> None:
    entry = {"cuda": "12.8", "cudnn": "9", "architectures": ["sm_80", "compute_90"], "source": "x"}
    assert command.compare(Build(**{**entry, **changes}), FOUND, "torch", "2.9.1") == told


def test_what_the_file_lacks_is_shown_as_it_must_stand_there() -> None:
    told = command.compare(None, FOUND, "torch", "2.9.1")
    assert told == (
        "facts.yaml lacks it; add to builds.torch:\n"
        '    2.9.1: {cuda: "12.8", cudnn: "9", architectures: [sm_80, compute_90], source: a file}'
    )


@pytest.mark.parametrize("text", ["torch", "torch>=2", "torch==2,<3", "torch==2.*x", "torch==2.9.*", "==2"])
def test_what_is_no_exact_release(text: str) -> None:
    with pytest.raises(UsageError, match="is no exact release"):
        command._parse(text)


def test_an_exact_release() -> None:
    assert command._parse("torch==2.9.1") == ("torch", "2.9.1")
    assert command._parse("Torch==2.9.1") == ("torch", "2.9.1")
    assert command._parse("JAX_cuda12.plugin==0.10.2") == ("jax-cuda12-plugin", "0.10.2")


def test_a_release_that_is_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    Index(monkeypatch, {f"torch-2.9.1-{TAG}.whl": TORCH})
    with pytest.raises(UsageError, match=r"torch: '2\.9\.\*' is no exact release"):
        wheels().compiled("torch", "2.9.*")


def test_a_page_of_an_unknown_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    Wire.lay(monkeypatch, lambda _: Reply(body=b"hello", headers={"Content-Type": "text/plain"}))
    with pytest.raises(FetchError, match=r"torch 2\.9\.1: the index does not say"):
        wheels().compiled("torch", "2.9.1")
