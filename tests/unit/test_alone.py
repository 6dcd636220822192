"""The unit tests' own fence: nothing here reaches a network or another program, and nothing can swallow the refusal."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable

import docker
import pytest
import requests

REACHING: dict[str, Callable[[], object]] = {
    "socket": lambda: socket.socket().connect(("127.0.0.1", 9)),
    "local socket": lambda: socket.socket(socket.AF_UNIX).connect("/nowhere.sock"),
    "connection": lambda: socket.create_connection(("127.0.0.1", 9)),
    "name": lambda: socket.getaddrinfo("example.test", 80),
    "HTTP": lambda: requests.get("http://example.test/", timeout=1),
    "program": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    "shell": lambda: os.system("true"),
    "engine": lambda: docker.from_env().ping(),
}


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("reach", REACHING.values(), ids=REACHING.keys())
def test_reaching_out_fails_the_test(reach: Callable[[], object]) -> None:
    with pytest.raises(pytest.fail.Exception, match="a unit test called"):
        reach()
