"""Received bytes are not fetched again. Faults of an index: tests/unit/index/test_download.py."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from builder.common.http import PIECE
from builder.common.tasks import RetryPolicy
from builder.index import releases
from builder.index.download import Fetcher, wheels_of_index
from builder.index.settings import IndexSettings
from builder.index.wheels import LockedWheel, Wheel
from tests.integration.index import Fault, Index
from tests.integration.wheels import Distribution

CONTENT = random.Random(1).randbytes(10_000_000) + b"PK\x01\x02" + bytes(20)  # as much of a zip as the index changes
FILE = "tiny_wheel-1.0-py3-none-any.whl"
QUICK = RetryPolicy(connect_s=5, read_s=20, retries=2, first_delay_s=0.002)
IMPATIENT = RetryPolicy(connect_s=5, read_s=0.5, retries=2, first_delay_s=0.002)

WHEEL = Wheel(
    component="tiny",
    name="tiny-wheel",
    version="1.0",
    file=FILE,
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)


@pytest.fixture(scope="module")
def running() -> Iterator[Index]:
    with Index().serving() as index:
        yield index


@pytest.fixture
def index(running: Index) -> Iterator[Index]:
    """An index with one wheel, which serves ranges of files."""
    running.heal()
    running.publish(Distribution(project="tiny-wheel", file=FILE, content=CONTENT))
    running.ranges = True
    running.answered.clear()
    yield running
    running.heal()


class Folder:
    """A folder for wheels; `progress` has the reported bytes."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self.whl, self.part = (path / f"{WHEEL.sha256}.{end}" for end in ("whl", "part"))
        self.progress: list[int] = []
        self._index = index

    def fetcher(self, policy: RetryPolicy = QUICK) -> Fetcher[LockedWheel]:
        source = wheels_of_index(releases.Index(IndexSettings(url=self._index.url)))
        fetcher = Fetcher(source, self.path, progress=self.progress.append)
        fetcher.policy = policy
        return fetcher

    def fetch(self, policy: RetryPolicy = QUICK, wheel: Wheel = WHEEL) -> Path:
        return self.fetcher(policy).fetch(wheel)

    def is_good(self) -> bool:
        """The folder has only the wheel, and every byte was reported once."""
        assert sum(self.progress) == len(CONTENT)
        return [path.name for path in self.path.iterdir()] == [self.whl.name] and self.whl.read_bytes() == CONTENT


@pytest.fixture
def folder(tmp_path: Path, index: Index) -> Folder:
    return Folder(tmp_path, index)


def files(index: Index) -> list[tuple[int, int]]:
    """Start and length of each answer with a part of a file."""
    return [(request.start, request.sent) for request in index.answered if request.path.startswith("/files/")]


def pages(index: Index) -> int:
    return len([request for request in index.answered if request.path.startswith("/simple/")])


def test_bytes_received_before_a_stall_are_kept(folder: Folder, index: Index) -> None:
    index.faults["tiny-wheel"], index.times["tiny-wheel"] = Fault.FILE_STALLS_HALFWAY, 1
    folder.fetch(IMPATIENT)
    assert folder.is_good()
    first, start = (start for start, _ in files(index))
    assert first == 0
    assert len(CONTENT) // 2 - PIECE < start <= len(CONTENT) // 2


def test_two_fetchers_on_one_folder_fetch_once(folder: Folder, index: Index) -> None:
    index.faults["tiny-wheel"], index.times["tiny-wheel"] = Fault.FILE_STALLS_HALFWAY, 1
    patient = RetryPolicy(connect_s=5, read_s=60, retries=2, first_delay_s=0.002)
    other = Folder(folder.path, index)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(folder.fetch, patient)
        assert index.stalled.wait(30)
        second = pool.submit(other.fetch, patient)
        time.sleep(0.3)
        assert not first.done()
        assert not second.done(), "the second one did not wait"
        index.heal()
        assert first.result(60) == second.result(60) == folder.whl
    assert folder.is_good()
    assert other.is_good()
    assert sum(sent for _, sent in files(index)) < len(CONTENT) + PIECE


def test_a_page_is_requested_once_for_all_files_of_a_project(tmp_path: Path, index: Index) -> None:
    wheels = []
    for number in range(8):
        content = b"%d" % number * 999
        file = f"tiny_wheel-2.{number}-py3-none-any.whl"
        index.publish(Distribution(project="tiny-wheel", file=file, content=content))
        sha256 = hashlib.sha256(content).hexdigest()
        wheels.append(Wheel(component="x", name="Tiny.Wheel", version="2", file=file, size=len(content), sha256=sha256))
    fetcher = Folder(tmp_path, index).fetcher()
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(fetcher.fetch, wheels))
    assert [path.read_bytes() for path in paths] == [b"%d" % number * 999 for number in range(8)]
    assert pages(index) == 1
    assert len(files(index)) == 8
    index.withdraw("tiny-wheel", "2.")
