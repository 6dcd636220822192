"""A folder of wheels as an index, with the real uv: it needs no network."""

from __future__ import annotations

from pathlib import Path

import pytest

from builder.common.errors import FetchError, LockError
from builder.index.download import Fetcher, wheels_of_index
from builder.index.host import Host
from builder.index.releases import Index
from builder.index.settings import IndexSettings
from builder.lock.uv import Target, Uv
from tests.integration import wheels
from tests.integration.wheels import Distribution

TARGET = Target(
    name="cell", python="3.11", arch="amd64", glibc="2.36", indexes={"acme": "own", "acme-core": "own", "old": "own"}
)
SETTINGS = "http://127.0.0.1:1/simple/"  # the default index does not answer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "wheels"
    path.mkdir()
    put(path, wheels.wheel("acme", "1.0", {}, requires=["acme-core>=1"]))
    put(path, wheels.wheel("acme", "2.0.dev1", {}))
    put(path, wheels.wheel("acme-core", "1.5", {"acme_core.py": b"VERSION = 1\n"}))
    put(path, wheels.wheel("old", "1.0", {}, tag="cp27-cp27mu-linux_x86_64"))
    return path


def put(folder: Path, wheel: Distribution) -> None:
    (folder / wheel.file).write_bytes(wheel.content)


def settings_of(folder: Path) -> IndexSettings:
    return IndexSettings(url=SETTINGS).with_index("own", "", folder=folder)


def uv_of(folder: Path) -> Uv:
    return Uv(Host(index=settings_of(folder)))


def test_wheels_of_a_folder_are_locked_and_fetched_by_their_hash(folder: Path, tmp_path: Path) -> None:
    uv = uv_of(folder)
    listing = uv.wheels(TARGET, ["acme"], [])
    locked = {name: wheel for name, (wheel, _) in listing.items()}
    assert {name: (wheel.version, wheel.index) for name, wheel in locked.items()} == {
        "acme": ("1.0", "own"), "acme-core": ("1.5", "own")
    }  # fmt: skip
    core = wheels.wheel("acme-core", "1.5", {"acme_core.py": b"VERSION = 1\n"})
    assert (locked["acme-core"].sha256, locked["acme-core"].size) == (core.sha256, len(core.content))

    (tmp_path / "store").mkdir()
    source = wheels_of_index(Index(settings_of(folder)))
    fetched = Fetcher(source, tmp_path / "store").fetch(locked["acme-core"])
    assert fetched.read_bytes() == core.content

    put(folder, wheels.wheel("acme-core", "1.5", {"acme_core.py": b"VERSION = 2\n"}))
    fetched.unlink()
    source = wheels_of_index(Index(settings_of(folder)))
    with pytest.raises(FetchError, match=r"acme_core-1\.5-py3-none-any\.whl: SHA-256 mismatch"):
        Fetcher(source, tmp_path / "store").fetch(locked["acme-core"])


def test_a_package_without_a_wheel_for_the_image(folder: Path) -> None:
    with pytest.raises(LockError, match="cell: cannot be resolved to wheels") as caught:
        uv_of(folder).wheels(TARGET, ["old"], [])
    assert "build a wheel once, with `uv build` or `pip wheel`" in caught.value.hint
