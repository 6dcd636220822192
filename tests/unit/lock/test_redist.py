"""Locks of NVIDIA's archives, from the list of their release; and downloads of the archives."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from builder.common.errors import FetchError, LockError
from builder.common.tasks import RetryPolicy
from builder.host import Host
from builder.index.settings import IndexSettings
from builder.lock import lockfile, redist
from builder.lock.lockfile import REDIST, Basis, LockedArchive
from builder.lock.redist import RedistFetcher, list_archives
from builder.matrix.project import Project
from tests.fakes import locks
from tests.fakes.redist import RELEASE, list_text, listed, locked, path_of
from tests.fakes.wire import Reply, Wire
from tests.unit.lock.test_resolve import GROUP, Uv

MIRROR = "https://mirror.example.test/cuda"
ARCHIVES = {"cuda_nvcc": b"a compiler", "cuda_cudart": b"a runtime"}
NVCC, CUDART = (locked(name, content) for name, content in ARCHIVES.items())
BASIS = Basis(cuda="12.10", toolkit=RELEASE, python="3.11", platform="x86_64", glibc="2.36", constraints=[])
HOST = Host(index=IndexSettings(redist_mirror=f"{MIRROR}/"))
POLICY = RetryPolicy(retries=1, first_delay_s=0.001)


@pytest.fixture
def uv(tmp_path: Path) -> Uv:
    return Uv(tmp_path)


def test_archives_are_locked_from_the_list_of_their_release(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire.install(monkeypatch, lambda _: Reply(body=list_text(ARCHIVES)))
    assert list_archives(HOST, BASIS, ["cuda_cudart", "cuda_nvcc"], []) == (CUDART, NVCC)
    assert [sent.url for sent in wire.seen] == [f"{MIRROR}/redistrib_{RELEASE}.json"]


def test_without_a_mirror_the_list_is_nvidias(monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire.install(monkeypatch, lambda _: Reply(body=list_text(ARCHIVES)))
    list_archives(Host(), BASIS, ["cuda_nvcc"], [])
    assert [sent.url for sent in wire.seen] == [f"{REDIST}/redistrib_{RELEASE}.json"]


def test_archives_for_arm64_are_those_of_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    Wire.install(monkeypatch, lambda _: Reply(body=list_text(ARCHIVES, "linux-sbsa")))
    [archive] = list_archives(HOST, replace(BASIS, platform="aarch64"), ["cuda_nvcc"], [])
    assert archive.path == path_of("cuda_nvcc", "linux-sbsa")


@pytest.mark.parametrize("names", [[], ["cuda_nvcc"]])
def test_locked_archives_need_no_list(monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    Wire.install(monkeypatch, lambda _: pytest.fail("requested"))
    assert list_archives(HOST, BASIS, names, [NVCC]) == (NVCC,) * len(names)


def test_a_cuda_without_a_release() -> None:
    with pytest.raises(LockError, match=r"^cuda\.12\.10 of matrix\.yaml has no `toolkit`"):
        list_archives(HOST, replace(BASIS, toolkit=""), ["cuda_nvcc"], [])


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (Reply(status=404), "the server of NVIDIA's archives returned 404 Not Found"),
        (Reply(body=b"{", broken=True), "the connection was lost"),
    ],
)
def test_a_list_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch, reply: Reply, message: str) -> None:
    Wire.install(monkeypatch, lambda _: reply)
    with pytest.raises(LockError) as caught:
        list_archives(HOST, BASIS, ["cuda_nvcc"], [])
    assert message in str(caught.value)
    assert f"NVIDIA's list of archives of CUDA {RELEASE}" in str(caught.value)
    assert "NVIDIA_REDIST_MIRROR" in caught.value.hint
    assert "example.test" not in f"{caught.value} {caught.value.hint}"


def entry(**fields: object) -> Callable[[Any], Any]:
    def change(data: Any) -> Any:
        data["cuda_nvcc"]["linux-x86_64"] |= fields
        return data

    return change


INVALID: dict[str, tuple[Callable[[Any], Any], str]] = {
    "no such archive": (lambda data: {**data, "cuda_nvcc": {}}, "no 'linux-x86_64'"),
    "no such name": (lambda _: {}, "no 'cuda_nvcc'"),
    "a list": (lambda data: [data], "list indices must be"),
    "a text for an archive": (lambda data: {**data, "cuda_nvcc": "x"}, "string indices must be"),
    "null": (lambda _: None, "not subscriptable"),
    "no size": (entry(size=None), "int()"),
    "a size of nothing": (entry(size="0"), "size: Input should be greater than 0"),
    "a size in words": (entry(size="big"), "invalid literal for int()"),
    "a list of sizes": (entry(size=["1"]), "int()"),
    "no hash": (entry(sha256=7), "sha256: Input should be a valid string"),
    "another hash": (entry(sha256="0" * 63), "sha256: expected 64 hex digits"),
    "a path out of the mirror": (entry(relative_path=f"../{path_of('cuda_nvcc')}"), "path: expected <name>/"),
    "an address": (entry(relative_path="https://other.example.test/x"), "path: expected <name>/<platform>/"),
    "a path of two names": (
        entry(relative_path=path_of("cuda_nvcc").replace("/cuda_nvcc-", "/cuda_other-")), "path: expected <name>"
    ),
    "another archive": (entry(relative_path=path_of("cuda_cudart")), "its path is cuda_cudart/"),
    "another platform": (entry(relative_path=path_of("cuda_nvcc", "linux-sbsa")), "its path is cuda_nvcc/linux-sbsa/"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), INVALID.values(), ids=INVALID.keys())
def test_an_invalid_list(monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any], message: str) -> None:
    content = json.dumps(change(copy.deepcopy(listed(ARCHIVES)))).encode()
    Wire.install(monkeypatch, lambda _: Reply(body=content))
    with pytest.raises(LockError) as caught:
        list_archives(HOST, BASIS, ["cuda_nvcc"], [])
    begin = f"NVIDIA's list of archives of CUDA {RELEASE} has no valid entry"
    assert str(caught.value).startswith(begin)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"<html>", b"", b'"\xff"', b"[" * 100_000])
def test_what_is_no_json_is_no_list(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    Wire.install(monkeypatch, lambda _: Reply(body=content))
    with pytest.raises(LockError, match="has no valid entry"):
        list_archives(HOST, BASIS, ["cuda_nvcc"], [])


def test_an_endless_list_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redist, "LARGEST_LIST", 100)
    Wire.install(monkeypatch, lambda _: Reply(body=list_text(ARCHIVES)))
    with pytest.raises(LockError, match="has no valid entry"):
        list_archives(HOST, BASIS, ["cuda_nvcc"], [])


# ---- in the lock of a group


def with_archives(edit: Callable[[str, str], Project], names: str = "cuda_nvcc, cuda_cudart") -> Project:
    """The tiny project, whose variant `jupyter` has archives instead of the package of `board`, on CUDA 12."""
    return edit(
        "board: {needs: [python], packages: [board]}", f"board: {{needs: [python], redist: {{'12': [{names}]}}}}"
    )


def test_the_lock_of_a_group_has_the_archives_of_its_components(
    tiny: Project, edit: Callable[[str, str], Project], uv: Uv, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = uv.resolve(tiny, GROUP)
    project = with_archives(edit)
    group = project.groups[GROUP]
    assert "archives of `redist`" in lockfile.stale_reason(project.matrix, before, group, group)
    assert lockfile.stale_reason(project.matrix, before, group[:1]) == "", "an image without them"

    Wire.install(monkeypatch, lambda _: Reply(body=list_text(ARCHIVES)))
    lock = uv.resolve(project, GROUP, before)
    assert lock.archives == (NVCC, CUDART)
    assert "board" not in lock.components
    assert lockfile.stale_reason(project.matrix, lock, group, group) == ""
    text = lockfile.dump(lock)
    assert lockfile.parse_lock(text, "its file", GROUP) == lock
    assert f' "archives": [\n  {{"path": "{NVCC.path}"' in text
    assert "example.test" not in text
    with_board = next(cell for cell in group if cell.variant == "board")
    assert lockfile.of_cell(project.matrix, with_board, lock).archives == (NVCC, CUDART)
    assert lockfile.of_cell(project.matrix, group[0], lock).archives == ()


def test_an_archive_that_no_component_needs_any_more_is_not_kept(
    edit: Callable[[str, str], Project], uv: Uv, monkeypatch: pytest.MonkeyPatch
) -> None:
    Wire.install(monkeypatch, lambda _: Reply(body=list_text(ARCHIVES)))
    lock = uv.resolve(with_archives(edit), GROUP)
    project = edit("[cuda_nvcc, cuda_cudart]", "[cuda_cudart]")
    group = project.groups[GROUP]
    assert "archives of `redist`" in lockfile.stale_reason(project.matrix, lock, group, group)
    assert lockfile.stale_reason(project.matrix, lock, group) == "", "for some images, it may be another one's"
    assert uv.resolve(project, GROUP, lock).archives == (CUDART,)


def test_archives_that_another_lock_has_need_no_list(
    edit: Callable[[str, str], Project], uv: Uv, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new line of a framework must not need NVIDIA's server."""
    Wire.install(monkeypatch, lambda _: Reply(body=list_text(ARCHIVES)))
    project = with_archives(edit)
    other = uv.resolve(project, GROUP)
    Wire.install(monkeypatch, lambda _: Reply(status=404))
    resolver = uv.resolver(project)
    resolver.locks = [other]
    assert resolver.resolve(project.groups["em-1.10-cu1210-py39"], None, {}).archives == other.archives
    resolver.locks = [replace(other, basis=replace(other.basis, platform="aarch64"))]
    with pytest.raises(LockError, match="404"):
        resolver.resolve(project.groups["em-1.10-cu1210-py39"], None, {})


def test_archives_of_an_earlier_release_are_not_kept(
    edit: Callable[[str, str], Project], uv: Uv, monkeypatch: pytest.MonkeyPatch
) -> None:
    Wire.install(monkeypatch, lambda _: Reply(body=list_text(ARCHIVES)))
    project = with_archives(edit)
    lock = uv.resolve(project, GROUP)
    earlier = replace(
        lock, basis=replace(lock.basis, toolkit="12.10.0"), archives=(replace(NVCC, sha256="0" * 64), CUDART)
    )
    assert uv.resolve(project, GROUP, earlier).archives == lock.archives


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("linux-x86_64", "linux-sbsa"),
        ('"path": "cuda_nvcc/', '"path": "../cuda_nvcc/'),
        (f'"size": {NVCC.size}', '"size": -1'),
        (NVCC.sha256, "x"),
    ],
)
def test_an_edited_lock_is_refused(tiny: Project, old: str, new: str) -> None:
    lock = replace(locks.lock_of(tiny, tiny.groups[GROUP]), archives=(NVCC,))
    text = lockfile.dump(lock)
    assert lockfile.parse_lock(text, "x", GROUP) == lock
    with pytest.raises(LockError, match=r"^x (is damaged|was edited by hand)"):
        lockfile.parse_lock(text.replace(old, new), "x", GROUP)


def test_a_component_with_archives_of_a_cuda_that_does_not_exist(edit: Callable[[str, str], Project]) -> None:
    project = edit(
        "board: {needs: [python], packages: [board]}", "board: {needs: [python], redist: {'14': [cuda_nvcc]}}"
    )
    with pytest.raises(Exception, match=r"components\.board\.redist\.14: no CUDA major version '14'"):
        _ = project.matrix


# ---- downloads


def fetch(folder: Path, archive: LockedArchive = NVCC) -> Path:
    for name in ("blobs", "parts"):
        (folder / name).mkdir()
    return RedistFetcher(HOST.index, folder / "blobs", folder / "parts", policy=POLICY).fetch(archive)


def test_an_archive_is_downloaded_to_the_blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wire = Wire.install(monkeypatch, lambda _: Reply(body=ARCHIVES["cuda_nvcc"]))
    path = fetch(tmp_path)
    assert path == tmp_path / "blobs" / NVCC.sha256
    assert path.read_bytes() == ARCHIVES["cuda_nvcc"]
    assert [sent.url for sent in wire.seen] == [f"{MIRROR}/{NVCC.path}"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"a compiles", "SHA-256 mismatch"),
        (b"a compiler!", "serves more than the 10 bytes in the lock"),
        (b"a", "incomplete: 1 of 10 bytes"),
    ],
)
def test_another_archive_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str
) -> None:
    Wire.install(monkeypatch, lambda _: Reply(body=content))
    with pytest.raises(FetchError) as caught:
        fetch(tmp_path)
    assert str(caught.value).startswith(f"{NVCC.file}: ")
    assert message in str(caught.value)
    assert "example.test" not in f"{caught.value} {caught.value.hint}"
    assert list((tmp_path / "blobs").iterdir()) == []


def test_a_mirror_without_the_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Wire.install(monkeypatch, lambda _: Reply(status=404))
    with pytest.raises(FetchError, match="the server of NVIDIA's archives returned 404") as caught:
        fetch(tmp_path)
    assert "NVIDIA_REDIST_MIRROR" in caught.value.hint
