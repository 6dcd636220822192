"""Wheels are fetched whole or not at all, whatever the index does, and what came is not fetched again."""

from __future__ import annotations

import hashlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from builder.errors import FetchError
from builder.fetch import PIECE, Fetcher, Patience
from builder.index import IndexSettings
from builder.lock import Wheel
from tests.integration.checkout import until
from tests.integration.index import Answered, Fault, Index
from tests.integration.wheels import Distribution

CONTENT = random.Random(1).randbytes(10_000_000) + b"PK\x01\x02" + bytes(20)  # as much of a zip as the index changes
FILE = "tiny_wheel-1.0-py3-none-any.whl"
QUICK = Patience(attempts=3, connect=5, silence=0.5, pause=0.001)
ONCE = Patience(attempts=1, connect=5, silence=0.5, pause=0.001)
PART = len(CONTENT) // 20  # what an index sends that truncates

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
    """An index with one wheel, whose files can be had in parts."""
    running.heal()
    running.publish(Distribution(project="tiny-wheel", file=FILE, content=CONTENT))
    running.ranges = True
    running.answered.clear()
    yield running
    running.heal()


class Folder:
    """Where wheels are fetched to; `got` is what was told of progress."""

    def __init__(self, path: Path, index: Index) -> None:
        self.path = path
        self.whl, self.part = (path / f"{WHEEL.sha256}.{end}" for end in ("whl", "part"))
        self.got: list[int] = []
        self._index = index

    def fetcher(self, patience: Patience = QUICK) -> Fetcher:
        settings = IndexSettings(url=self._index.url)
        return Fetcher(settings, self.path, got=self.got.append, patience=patience)

    def fetch(self, patience: Patience = QUICK, wheel: Wheel = WHEEL) -> Path:
        return self.fetcher(patience).fetch(wheel)

    def fails(self, patience: Patience = QUICK) -> str:
        """What is said; nothing of it is used, and neither is the index named."""
        before = sum(self.got)
        with pytest.raises(FetchError) as raised:
            self.fetch(patience)
        told = f"{raised.value}\n{raised.value.hint}"
        assert FILE in told
        for word in (self._index.address, "127.0.0.1", "localhost"):
            assert word not in told
        assert sum(self.got) == before, "bytes that do not count any more are still counted"
        assert not self.whl.exists()
        return told

    def is_good(self) -> bool:
        """The wheel is there, alone, and every byte of it was counted once."""
        assert sum(self.got) == len(CONTENT)
        return [path.name for path in self.path.iterdir()] == [self.whl.name] and self.whl.read_bytes() == CONTENT


@pytest.fixture
def folder(tmp_path: Path, index: Index) -> Folder:
    return Folder(tmp_path, index)


def files(index: Index) -> list[tuple[int, int]]:
    """Start and length of what was sent of files."""
    return [(one.start, one.sent) for one in index.answered if one.path.startswith("/files/")]


def pages(index: Index) -> int:
    return len([one for one in index.answered if one.path.startswith("/simple/")])


def test_a_wheel_is_fetched(folder: Folder, index: Index) -> None:
    assert folder.fetch() == folder.whl
    assert folder.is_good()
    assert index.answered == [
        Answered("/simple/tiny-wheel/", 0, index.answered[0].sent),
        Answered(f"/files/tiny-wheel/{FILE}", 0, len(CONTENT)),
    ]


# ---- resumed


def test_only_the_missing_bytes_are_fetched_after_a_cut(folder: Folder, index: Index) -> None:
    index.faults["tiny-wheel"], index.times["tiny-wheel"] = Fault.FILE_TRUNCATED, 1
    folder.fetch()
    assert folder.is_good()
    (_, first), (start, second) = files(index)
    assert (first, second) == (PART, len(CONTENT) - start)
    assert PART - PIECE < start <= PART
    assert pages(index) == 1


def test_several_cuts(folder: Folder, index: Index) -> None:
    index.faults["tiny-wheel"], index.times["tiny-wheel"] = Fault.FILE_TRUNCATED, 2
    folder.fetch()
    assert folder.is_good()
    assert len(files(index)) == 3
    assert len(CONTENT) <= sum(sent for _, sent in files(index)) < len(CONTENT) + 2 * PIECE


def test_what_came_is_kept_after_a_failure(folder: Folder, index: Index) -> None:
    index.faults["tiny-wheel"] = Fault.FILE_TRUNCATED
    assert "cut off" in folder.fails(ONCE) or "broke off" in folder.fails(ONCE)
    kept = folder.part.read_bytes()
    assert 0 < len(kept) < len(CONTENT)
    assert CONTENT.startswith(kept)
    index.heal()
    index.answered.clear()
    folder.fetch()
    assert folder.is_good()
    assert files(index) == [(len(kept), len(CONTENT) - len(kept))]


def test_what_came_before_a_stall_is_kept(folder: Folder, index: Index) -> None:
    index.faults["tiny-wheel"], index.times["tiny-wheel"] = Fault.FILE_STALLS_HALFWAY, 1
    folder.fetch()
    assert folder.is_good()
    first, start = (start for start, _ in files(index))
    assert first == 0
    assert len(CONTENT) // 2 - PIECE < start <= len(CONTENT) // 2


def test_an_index_without_parts_begins_anew(folder: Folder, index: Index) -> None:
    index.ranges = False
    index.faults["tiny-wheel"], index.times["tiny-wheel"] = Fault.FILE_TRUNCATED, 1
    folder.fetch()
    assert folder.is_good()
    assert files(index) == [(0, PART), (0, len(CONTENT))]


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize(
    "stale",
    [b"wrong", b"\0" * (len(CONTENT) - 1), b"\0" * len(CONTENT), b"\0" * (len(CONTENT) + 1), CONTENT + b"more", b""],
    ids=["short", "one byte less", "as long", "longer", "right but longer", "empty"],
)
def test_wrong_bytes_from_before_heal_themselves(folder: Folder, index: Index, stale: bytes, ranges: bool) -> None:
    index.ranges = ranges
    folder.part.write_bytes(stale)
    folder.fetch()
    assert folder.is_good()
    assert files(index)[-1] == (0, len(CONTENT))


def test_what_came_whole_is_not_fetched_again(folder: Folder, index: Index) -> None:
    """As if the builder had been killed just before the end."""
    folder.part.write_bytes(CONTENT)
    folder.fetch()
    assert folder.is_good()
    assert files(index) == []


def test_a_wheel_that_is_there_needs_no_index(folder: Folder, index: Index) -> None:
    folder.whl.write_bytes(CONTENT)
    folder.fetch()
    assert folder.is_good()
    assert index.answered == []


@pytest.mark.parametrize("damaged", [b"", CONTENT[:-1], bytes(len(CONTENT))], ids=["empty", "short", "zeros"])
def test_a_damaged_wheel_is_fetched_again(folder: Folder, index: Index, damaged: bytes) -> None:
    """As a machine may leave it that lost its power."""
    folder.whl.write_bytes(damaged)
    folder.fetch()
    assert folder.is_good()
    assert files(index) == [(0, len(CONTENT))]


@pytest.mark.parametrize("there", [0, 5, len(CONTENT)])
def test_a_wheel_whose_size_nobody_knows(folder: Folder, there: int) -> None:
    folder.part.write_bytes(CONTENT[:there])
    wheel = Wheel(
        component="none", name=WHEEL.name, version=WHEEL.version, file=WHEEL.file, size=0, sha256=WHEEL.sha256
    )
    folder.fetch(wheel=wheel)
    assert folder.is_good()


# ---- what goes wrong


@pytest.mark.parametrize(
    ("fault", "words", "requests"),
    [
        (Fault.PAGE_404, "does not list it", 0),
        (Fault.PAGE_500, "500", 0),
        (Fault.PAGE_STALLS, "silent", 0),
        (Fault.PAGE_HAS_OTHER_HASH, f"another SHA-256 ({WHEEL.sha256[::-1][:12]}", 0),
        (Fault.FILE_404, "404", 1),
        (Fault.FILE_500, "500", 3),
        (Fault.FILE_STALLS, "silent", 0),
        (Fault.FILE_TRUNCATED, "broke", 3),
        (Fault.FILE_HAS_OTHER_BYTES, "other bytes than the lock says", 1),
        (Fault.FILE_IS_LONGER, f"more than the {len(CONTENT)} bytes", 1),
    ],
)
def test_a_fault_that_stays(folder: Folder, index: Index, fault: Fault, words: str, requests: int) -> None:
    index.faults["tiny-wheel"] = fault
    assert words in folder.fails()
    assert len(files(index)) == requests


@pytest.mark.parametrize("fault", [Fault.PAGE_500, Fault.FILE_500, Fault.PAGE_STALLS, Fault.FILE_STALLS])
def test_a_fault_that_passes(folder: Folder, index: Index, fault: Fault) -> None:
    index.faults["tiny-wheel"], index.times["tiny-wheel"] = fault, 2
    folder.fetch()
    assert folder.is_good()


def test_a_page_without_the_file(folder: Folder, index: Index) -> None:
    index.withdraw("tiny-wheel", "1.0")
    index.publish(Distribution(project="tiny-wheel", file="tiny_wheel-1.1-py3-none-any.whl", content=b""))
    assert "does not list it" in folder.fails()
    index.withdraw("tiny-wheel", "1.1")


def test_other_bytes_of_the_same_size_are_not_kept(folder: Folder, index: Index) -> None:
    index.faults["tiny-wheel"] = Fault.FILE_HAS_OTHER_BYTES
    folder.fails()
    assert folder.part.stat().st_size == 0
    index.heal()
    folder.fetch()
    assert folder.is_good()


def test_nobody_answers(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = IndexSettings(url=f"http://localhost:{port}/simple/")
    with pytest.raises(FetchError) as raised:
        Fetcher(settings, tmp_path, patience=QUICK).fetch(WHEEL)
    assert str(raised.value).startswith(f"{FILE}: ")
    assert "localhost" not in str(raised.value)


# ---- several at once


def test_two_fetchers_on_one_folder_fetch_once(folder: Folder, index: Index) -> None:
    index.faults["tiny-wheel"], index.times["tiny-wheel"] = Fault.FILE_STALLS_HALFWAY, 1
    patient = Patience(attempts=3, connect=5, silence=60, pause=0.001)
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


def test_the_second_fetcher_goes_on_where_the_first_one_failed(folder: Folder, index: Index) -> None:
    index.faults["tiny-wheel"], index.times["tiny-wheel"] = Fault.FILE_STALLS_HALFWAY, 1
    other = Folder(folder.path, index)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(folder.fetch, Patience(attempts=1, connect=5, silence=1, pause=0.001))
        assert index.stalled.wait(30)
        second = pool.submit(other.fetch)
        with pytest.raises(FetchError):
            first.result(60)
        second.result(60)
    assert other.is_good()
    assert [start > len(CONTENT) // 3 for start, _ in files(index)] == [False, True]


def test_a_page_is_asked_for_once_for_all_files_of_a_project(tmp_path: Path, index: Index) -> None:
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


def test_a_wheel_that_is_dropped_and_fetched_all_the_time(folder: Folder, index: Index) -> None:
    """By several processes that share a store: whoever fetches has the right bytes at that moment."""
    small = b"small" * 100
    index.publish(Distribution(project="tiny-wheel", file=FILE, content=small))
    sha256 = hashlib.sha256(small).hexdigest()
    wheel = Wheel(component="x", name="tiny-wheel", version="1.0", file=FILE, size=len(small), sha256=sha256)
    stop = threading.Event()

    def work() -> int:
        fetcher, done = folder.fetcher(), 0
        while not stop.is_set():
            path = fetcher.fetch(wheel)
            try:
                assert path.read_bytes() == small
            except FileNotFoundError:
                continue  # dropped by another one
            fetcher.drop(wheel)
            done += 1
        return done

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(work) for _ in range(3)]
        try:
            until(lambda: len(files(index)) > 60 or any(one.done() for one in running), "wheels are fetched")
        finally:
            stop.set()
        assert sum(one.result(30) for one in running) > 10
