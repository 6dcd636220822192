"""Runs the examples of the images and parses their output."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from testinfra.host import Host

# Starts the examples in forks of one process: an import of a framework takes 1 s to 4 s of the processor, and the tests
# of an image start up to 11 ranks. Ranks end without the cleanup of Python, which takes 0.8 s with torch.
STARTS = """
import json, os, signal, socket, sys, time, traceback
{setup}
results = dict()

def start(name, code, arguments="", ranks=1, stop_at=""):
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(ranks)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    addresses = [f"127.0.0.1:{{port}}" for port in ports]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            if ranks > 1:
                os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks),
                                  MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]))
                os.environ["TF_CONFIG"] = json.dumps(
                    dict(cluster=dict(worker=addresses), task=dict(type="worker", index=rank)))
            os.dup2(os.open(name + ".log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
            os.dup2(1, 2)
            sys.argv[1:] = arguments.format(rank=rank, address=addresses[0]).split()
            sys.path.insert(0, "/opt/examples/{framework}")
            os._exit(run(code, name))
        children.append(child)
    deadline = time.monotonic() + 60
    while stop_at and stop_at not in read(name) and time.monotonic() < deadline:
        time.sleep(0.1)
    for child in children if stop_at else ():
        os.kill(child, signal.SIGTERM)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    results[name] = [max(map(abs, statuses)), read(name)]

def run(code, name):
    status = 0
    try:
        exec(code, dict(__name__=name))
    except SystemExit as end:
        status = end.code or 0
        if isinstance(status, str):
            status = print(status) or 1
    except BaseException:
        status = traceback.print_exc() or 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status

def read(name):
    return open(name + ".log").read() if os.path.exists(name + ".log") else ""

os.chdir({folder!r})
for options in {starts!r}:
    start(**options)
print(json.dumps(results))
"""


def started(name: str, code: str, arguments: str = "", ranks: int = 1, stop_at: str = "") -> dict[str, Any]:
    """A start for `start_all`. `stop_at` is what its output has before it gets SIGTERM.

    `arguments` may have {rank}, and {address} for an address of the first rank.
    """
    return {"name": name, "code": code, "arguments": arguments, "ranks": ranks, "stop_at": stop_at}


def program(path: str) -> str:
    """The code that runs a program of the image as its file would run."""
    return f"import runpy; runpy.run_path({path!r}, run_name='__main__')"


def start_all(
    python: Callable[[str], Any], framework: str, setup: str, folder: str, starts: Sequence[dict[str, Any]]
) -> dict[str, tuple[int, str]]:
    """Starts each of `starts` in a folder, one after the other; returns the status and the output of each.

    `setup` is code that runs once, before all of them. It imports what they import.
    """
    results = python(STARTS.format(framework=framework, setup=setup, folder=folder, starts=starts))
    return {name: (status, text) for name, (status, text) in results.items()}


def run(host: Host, command: str) -> str:
    """The output of a command that must succeed."""
    result = host.run(command)
    assert result.rc == 0, result.stdout + result.stderr[-3000:]
    return str(result.stdout)


def epochs(text: str) -> dict[int, tuple[float, float]]:
    """Loss and accuracy by epoch, from the output of an example."""
    lines = re.findall(r"^epoch (\d+): loss ([\d.]+) accuracy ([\d.]+)$", text, re.MULTILINE)
    return {int(epoch): (float(loss), float(accuracy)) for epoch, loss, accuracy in lines}


def weights(text: str) -> list[str]:
    """The digests of the final weights, from the output of an example."""
    return re.findall(r"^weights (\w+)$", text, re.MULTILINE)
