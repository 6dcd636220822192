"""NVIDIA's archives as a layer: their files in one folder, links to CUDA wheels, and what is refused."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from builder.common.errors import FetchError
from builder.layers import redist
from builder.layers.redist import redist_entries
from builder.layers.splice import Entry
from tests.fakes.redist import locked, pack

HOME = "opt/venv/lib/python/site-packages/nvidia/toolkit"
SITE = "opt/venv/lib/python/site-packages/nvidia"


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """The entries of archives by path, without folders; the arguments are archives and the files of wheels."""

    def run(archives: dict[str, bytes], wheel_files: Iterable[str] = ()) -> dict[str, Entry]:
        paths = []
        for name, content in archives.items():
            path = tmp_path / name
            path.write_bytes(content)
            paths.append((locked(name, content), path))
        entries = list(redist_entries(paths, wheel_files))
        for number, entry in enumerate(entries):
            above = entry.path.rpartition("/")[0]
            assert not above or above in {each.path for each in entries[:number]}, "a folder is before its contents"
        assert len({entry.path for entry in entries}) == len(entries)
        return {entry.path: entry for entry in entries if entry.content is not None or entry.link}

    return run


def test_the_files_of_all_archives_are_in_one_folder(read: Any) -> None:
    nvcc = {"bin/nvcc": b"#!", "include/crt/host.h": b"1", "LICENSE": b"terms", "nvvm/lib64": "../lib", "empty": b""}
    cudart = {
        "include/cuda.h": b"2",
        "lib/libcudart.so": "libcudart.so.12",
        "lib/libcudart.so.12": b"3",
        "LICENSE": b"t",
    }
    entries = read({"cuda_nvcc": pack("cuda_nvcc", nvcc), "cuda_cudart": pack("cuda_cudart", cudart)})
    assert {path.removeprefix(f"{HOME}/"): (each.mode, each.content, each.link) for path, each in entries.items()} == {
        "bin/nvcc": (0o755, b"#!", ""),
        "include/crt/host.h": (0o644, b"1", ""),
        "licenses/cuda_nvcc/LICENSE": (0o644, b"terms", ""),
        "nvvm/lib64": (0o777, None, "../lib"),
        "empty": (0o644, b"", ""),
        "include/cuda.h": (0o644, b"2", ""),
        "lib/libcudart.so": (0o777, None, "libcudart.so.12"),
        "lib/libcudart.so.12": (0o644, b"3", ""),
        "licenses/cuda_cudart/LICENSE": (0o644, b"t", ""),
        "lib64": (0o777, None, "lib"),
    }
    assert all(entry.header is None for entry in entries.values()), "no owner and no time of the archive"


def test_a_hard_link_is_a_file(read: Any) -> None:
    folder = "cuda_nvcc-linux-x86_64-12.10.7-archive"
    files = {"bin/a": b"program", "bin/b": {"type": tarfile.LNKTYPE, "linkname": f"{folder}/bin/a"}}
    assert read({"cuda_nvcc": pack("cuda_nvcc", files)})[f"{HOME}/bin/b"].content == b"program"


def test_headers_and_libraries_of_wheels_are_linked(read: Any) -> None:
    wheels = [
        f"{SITE}/__init__.py",
        f"{SITE}/cublas/include/__init__.py",
        f"{SITE}/cublas/include/cublas.h",
        f"{SITE}/cublas/lib/libcublas.so.12",
        f"{SITE}/cublas/lib/__init__.py",
        f"{SITE}/nvtx/include/nvtx3/nvToolsExt.h",
        f"{SITE}/nvtx/include/nvtx3/detail/impl.h",
        f"{SITE}/nvshmem/lib/libnvshmem_device.a",
        f"{SITE}/nvshmem/lib/cmake/nvshmem/libx.so",
        f"{SITE}/nvrtc/lib/libnvrtc.alt.so.12",
        f"{SITE}/cuda_runtime/include/cuda.h",
        f"{SITE}/cuda_runtime/include/crt/host.h",
        f"{SITE}/cuda_runtime/lib/libcudart.so.12",
        "opt/venv/lib/python/site-packages/other/include/x.h",
    ]
    files = {
        "include/cuda.h": b"1",
        "include/crt/host.h": b"2",
        "lib/libcudart.so": "libcudart.so.12.10",
        "lib/libcudart.so.12.10": b"another copy",
        "lib/libcudart_static.a": b"3",
        "lib/stubs/libcublas.so": b"4",
    }
    entries = read({"cuda_cudart": pack("cuda_cudart", files)}, wheels)
    links = {path.removeprefix(f"{HOME}/"): each.link for path, each in entries.items() if each.link.startswith("/")}
    assert links == {
        "include/cublas.h": f"/{SITE}/cublas/include/cublas.h",
        "lib/libcublas.so.12": f"/{SITE}/cublas/lib/libcublas.so.12",
        "lib/libcublas.so": f"/{SITE}/cublas/lib/libcublas.so.12",
        "include/nvtx3": f"/{SITE}/nvtx/include/nvtx3",
        "lib/libnvshmem_device.a": f"/{SITE}/nvshmem/lib/libnvshmem_device.a",
        "lib/libcudart.so.12": f"/{SITE}/cuda_runtime/lib/libcudart.so.12",
        "lib/libcudart.so": f"/{SITE}/cuda_runtime/lib/libcudart.so.12",
    }
    assert f"{HOME}/lib/libcudart.so.12.10" not in entries, "a library is in the image once"
    assert {f"{HOME}/lib/libcudart_static.a", f"{HOME}/lib/stubs/libcublas.so"} <= entries.keys()
    assert entries[f"{HOME}/include/cuda.h"].content == b"1", "the archive's own file"


def test_the_order_of_the_wheels_does_not_matter(read: Any) -> None:
    wheels = [f"{SITE}/{name}/include/same.h" for name in "ab"]
    archive = {"cuda_nvcc": pack("cuda_nvcc", {})}
    assert list(read(archive, wheels).items()) == list(read(archive, wheels[::-1]).items())


def test_equal_files_of_two_archives(read: Any) -> None:
    archives = {name: pack(name, {"include/same.h": b"1"}) for name in ("cuda_nvcc", "cuda_cudart")}
    assert read(archives)[f"{HOME}/include/same.h"].content == b"1"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"a": b"1"}, {"a": b"2"}),
        ({"bin/a": b"1"}, {"bin": b"2"}),
        ({"bin": b"1"}, {"bin/a": b"2"}),
        ({"bin": "lib"}, {"bin/a": b"2"}),
        ({"a": "b"}, {"a": "c"}),
    ],
)
def test_two_archives_with_different_files_for_one_path(read: Any, first: Any, second: Any) -> None:
    archives = {"cuda_nvcc": pack("cuda_nvcc", first), "cuda_cudart": pack("cuda_cudart", second)}
    with pytest.raises(FetchError, match=r"^cuda_cudart-.*\.tar\.xz is invalid: /opt/venv/\S+.* is another file"):
        read(archives)


HOSTILE: dict[str, tuple[Any, str]] = {
    "a path out of the folder": ({"../../etc/passwd": b""}, "it has an entry"),
    "a path through a folder": ({"bin/../../x": b""}, "it has an entry"),
    "the folder itself": ({".": b""}, "it has an entry"),
    "a line break": ({"bin/a\nb": b""}, "it has an entry"),
    "an absolute path": ({"/etc/passwd": b""}, "it has an entry"),
    "a link to an absolute path": ({"lib": "/etc"}, "lib is a link to '/etc', out of its folder"),
    "a link out of the folder": ({"bin/x": "../../x"}, "bin/x is a link to '../../x', out of its folder"),
    "a link to the folder above": ({"x": ".."}, "x is a link to '..', out of its folder"),
    "a link through another": ({"a/b": "../lib", "a/x": "b/../../etc"}, "a/x is a link to 'b/../../etc', out of"),
    "a file below a link": ({"bin": "lib", "bin/a": b""}, "is another file than"),
    "a device": ({"null": {"type": tarfile.CHRTYPE}}, "null is no file"),
    "a pipe": ({"pipe": {"type": tarfile.FIFOTYPE}}, "pipe is no file"),
    "a hard link to nothing": ({"x": {"type": tarfile.LNKTYPE, "linkname": "/etc/passwd"}}, "linkname '/etc/passwd'"),
}


@pytest.mark.parametrize(("files", "message"), HOSTILE.values(), ids=HOSTILE.keys())
def test_a_hostile_archive_is_refused(read: Any, files: Any, message: str) -> None:
    with pytest.raises(FetchError) as caught:
        read({"cuda_nvcc": pack("cuda_nvcc", files)})
    assert str(caught.value).startswith("cuda_nvcc-linux-x86_64-12.10.7-archive.tar.xz is invalid: ")
    assert message in str(caught.value)


def test_an_archive_with_another_folder_is_refused(read: Any) -> None:
    with pytest.raises(FetchError, match=r"it has an entry 'other/bin/nvcc', not below cuda_nvcc-linux"):
        read({"cuda_nvcc": pack("cuda_nvcc", {"bin/nvcc": b""}, "other")})


@pytest.mark.parametrize("content", [b"no archive", pack("cuda_nvcc", {"a": bytes(100_000)})[:-200]])
def test_a_damaged_archive_is_refused(read: Any, content: bytes) -> None:
    with pytest.raises(FetchError, match="is invalid"):
        read({"cuda_nvcc": content})


def test_an_archive_that_unpacks_to_too_much_is_refused(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redist, "MOST_BYTES", 1000)
    archive = pack("cuda_nvcc", {"a": bytes(600), "b": bytes(600)})
    with pytest.raises(FetchError, match="b is no file, or too large"):
        read({"cuda_nvcc": archive})
