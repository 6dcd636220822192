"""Threads that do not keep an interrupted command from ending."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager


@contextmanager
def pool(workers: int, name: str) -> Iterator[ThreadPoolExecutor]:
    """Threads for a `with` block, at whose end they have ended.

    After an error, what has not begun is cancelled. After an interrupt (Ctrl-C, SIGTERM), threads are not waited for
    either, since a server may not respond for a minute: the process ends with them.
    """
    threads = ThreadPoolExecutor(workers, name)
    try:
        yield threads
    except BaseException as error:
        threads.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
        raise
    threads.shutdown()
