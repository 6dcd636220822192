"""Between `builder` and a Docker Engine: stops the conversation where a test wants it, and counts what is loaded."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

REQUEST = re.compile(rb"(?:GET|HEAD|POST|PUT|DELETE) \S+ HTTP/1\.1\r\n")
LOAD = r"POST \S*/images/load"
START = r"POST \S*/containers/[0-9a-f]+/start"
SAVE = r"GET \S*/images/\S+/get"
BUILD = r"POST \S*/build\?"
STALL_S = 300
MACHINES_OWN = "/var/run/docker.sock"


class EngineProxy:
    """Listens on a Unix socket. `loaded` are the bytes of each archive that was loaded, in order."""

    def __init__(self, path: Path, engine: str = MACHINES_OWN) -> None:
        self._path = path
        self._engine = engine.removeprefix("unix://")
        self._lock = threading.Lock()
        self._wanted: list[str] = []
        self.held, self._released = threading.Event(), threading.Event()
        self.loaded: list[int] = []

    @property
    def host(self) -> str:
        return f"unix://{self._path}"

    @contextmanager
    def serving(self) -> Iterator[EngineProxy]:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self._path))
            listener.listen(32)
            thread = threading.Thread(target=self._accept, args=(listener,), daemon=True)
            thread.start()
            try:
                yield self
            finally:
                self.let_go()
                listener.shutdown(socket.SHUT_RDWR)
                thread.join(10)

    def hold(self, *requests: str) -> None:
        """Once requests like these came, in this order, the last of them is not handed on; `held` says so."""
        with self._lock:
            self._wanted = list(requests)
            self.held, self._released = threading.Event(), threading.Event()

    def let_go(self) -> None:
        """Whoever is held goes on, if he is still there."""
        with self._lock:
            self._wanted.clear()
            self._released.set()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, socket.socket(socket.AF_UNIX) as engine, suppress(OSError):
            engine.connect(self._engine)
            back = threading.Thread(target=_pump, args=(engine, client), daemon=True)
            back.start()
            is_load = False
            while chunk := client.recv(1 << 18):
                if found := REQUEST.match(chunk):
                    line = found[0].decode("ascii")
                    is_load = bool(re.match(LOAD, line))
                    if is_load:
                        self.loaded.append(0)
                    self._wait(line)
                if is_load:
                    self.loaded[-1] += len(chunk)
                engine.sendall(chunk)
            with suppress(OSError):
                engine.shutdown(socket.SHUT_WR)
            back.join()

    def _wait(self, line: str) -> None:
        with self._lock:
            if not self._wanted or not re.match(self._wanted[0], line):
                return
            self._wanted.pop(0)
            if self._wanted:
                return
            released = self._released
            self.held.set()
        released.wait(STALL_S)


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(1 << 18):
            target.sendall(chunk)
        target.shutdown(socket.SHUT_WR)
