"""Between `builder` and a Docker Engine: stops the conversation where a test wants it, and counts what is loaded."""

from __future__ import annotations

import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

REQUEST = re.compile(rb"(?:GET|HEAD|POST|PUT|DELETE) \S+ HTTP/1\.1\r\n")
LOAD = r"POST \S*/images/load"
PULL = r"POST \S*/images/create\?fromImage=127\.0\.0\.1"  # from this machine, which is how images are loaded
START = r"POST \S*/containers/[0-9a-f]+/start"
BUILD = r"POST \S*/build\?"
STALL_S = 300
MACHINES_OWN = "/var/run/docker.sock"
_LAYER = rb'[^}]*\}[^}]*"id":"([0-9a-f]{12})"'
# An engine may leave out a message that another one follows at once: the last of a layer is "Pull complete".
COMPLETE = re.compile(rb'"status":"(?:Download|Pull) complete"' + _LAYER)
PRESENT = re.compile(rb'"status":"Already exists"' + _LAYER)


class EngineProxy:
    """Listens on a Unix socket. `loaded` are the bytes of each archive that was loaded, in order."""

    def __init__(self, path: Path, engine: str = MACHINES_OWN) -> None:
        self._path = path
        self._engine = engine.removeprefix("unix://")
        self._lock = threading.Lock()
        self._wanted: list[str] = []
        self.held, self._released = threading.Event(), threading.Event()
        self.loaded: list[int] = []
        self._pulls: list[bytearray] = []

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
            answers = _Answers()
            back = threading.Thread(target=_pump, args=(engine, client, answers), daemon=True)
            back.start()
            is_load = False
            with suppress(OSError):
                while chunk := client.recv(1 << 18):
                    if request := REQUEST.match(chunk):
                        line = request[0].decode("ascii")
                        is_load = bool(re.match(LOAD, line))
                        if is_load:
                            self.loaded.append(0)
                        self._wait(line)
                        answers.kept = None
                        if re.match(PULL, line):
                            answers.kept = bytearray()
                            self._pulls.append(answers.kept)
                    if is_load:
                        self.loaded[-1] += len(chunk)
                    engine.sendall(chunk)
            with suppress(OSError):
                engine.shutdown(socket.SHUT_WR)
            back.join()

    @property
    def pulled(self) -> list[set[str]]:
        """The layers that the engine downloaded in each pull from this machine, by the start of their digest."""
        return [
            {layer.decode() for layer in set(COMPLETE.findall(answers)) - set(PRESENT.findall(answers))}
            for answers in self._pulls
        ]

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


@dataclass
class _Answers:
    """The bytes of the answer to a pull; None for another request."""

    kept: bytearray | None = None


def _pump(source: socket.socket, target: socket.socket, answers: _Answers) -> None:
    """Hands on what the engine sends until it ends, also by a reset.

    An engine that is killed before it read all that was sent to it resets the connection. If the client did not learn
    of that, it would wait for ever: buildx did.
    """
    with suppress(OSError):
        while chunk := source.recv(1 << 18):
            if answers.kept is not None:
                answers.kept += chunk
            target.sendall(chunk)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
