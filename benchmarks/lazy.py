"""Benchmarks lazy pulls: seconds and bytes from an empty node until an image does something, lazily and by a full pull.

Needs a containerd with the stargz snapshotter, its client `ctr-remote`, skopeo, and images in the store:

    python -m benchmarks.lazy --address /run/containerd/containerd.sock --empty 'COMMAND' \\
        org/pt-cuda:2.9.1-cu128-py313-jupyter org/jax-cuda:0.10.2-cu128-py311

COMMAND makes the node empty before each measurement: it restarts containerd and the snapshotter on a new file system.
On one where files were just deleted, ext4 can take 15 times longer to create files. The registry is Debian's
docker-registry on the loopback. With --latency or --rate, a proxy delays and limits what it sends.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import requests

from benchmarks.common import PORT, registry
from builder.cli.context import Context

JUPYTER = "http://127.0.0.1:8888/api"
TIMEOUT_S = 900
# Name -> command in the image. `jupyter` is the image's own service.
_JAX_STEP = """\
import jax, jax.numpy as np
step = jax.jit(jax.grad(lambda w: ((np.ones((64, 128)) @ w) ** 2).mean()))
print(step(np.ones((128, 8))).sum())
"""
_PYTORCH_STEP = """\
import torch
model = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
model(torch.ones(64, 128)).square().mean().backward()
optimizer.step()
"""
GOALS = {
    "pt": {
        "python -c pass": ["python", "-c", "pass"],
        "Jupyter answers": [],
        "import torch": ["python", "-c", "import torch"],
        "a training step": ["python", "-c", _PYTORCH_STEP],
    },
    "jax": {
        "python -c pass": ["python", "-c", "pass"],
        "import jax": ["python", "-c", "import jax"],
        "a training step": ["python", "-c", _JAX_STEP],
    },
}


def main() -> int:
    """Runs the benchmarks and prints a line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", required=True, help="containerd's socket")
    parser.add_argument("--empty", required=True, help="the command that makes the node empty")
    parser.add_argument("--store", type=Path, default=Context().store.root, help="the store with the images")
    parser.add_argument("--only", default="", help="only goals with this text")
    parser.add_argument("--lazy-only", action="store_true", help="no full pull to compare with")
    parser.add_argument("--latency", type=int, default=0, help="round-trip time to the registry in ms")
    parser.add_argument("--rate", type=int, default=0, help="Mbit/s from the registry")
    parser.add_argument("images", nargs="+", help="names of images in the store")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="builder-lazy-") as folder, registry(Path(folder) / "registry") as log:
        for image in options.images:
            source = f"oci:{options.store}:{image}"
            copy = ["skopeo", "copy", "-q", "--preserve-digests", "--dest-tls-verify=false", source]
            subprocess.run([*copy, f"docker://127.0.0.1:{PORT}/{image}"], check=True)
            os.sync()  # otherwise the disk still writes this copy while the first image starts
            framework = "jax" if "jax" in image else "pt"
            with (
                nullcontext(PORT)
                if not (options.latency or options.rate)
                else slow_link(options.latency, options.rate) as port
            ):
                reference = f"127.0.0.1:{port}/{image}"
                is_jupyter = re.search("-(jupyter|full)", image)
                goals = {
                    goal: command
                    for goal, command in GOALS[framework].items()
                    if options.only in goal and (is_jupyter or "Jupyter" not in goal)
                }
                for kind in ("lazily",) if options.lazy_only else ("lazily", "full pull"):
                    pulled = 0.0
                    for goal, command in goals.items():
                        before = log.stat().st_size
                        if kind == "lazily" or not pulled:  # a full pull is the same for all goals
                            subprocess.run(shlex.split(options.empty), check=True, capture_output=True, timeout=300)
                            pulled = pull(options.address, reference, is_lazy=kind == "lazily")
                        seconds = pulled + run(options.address, reference, command, is_lazy=kind == "lazily")
                        with log.open(encoding="utf-8") as lines:
                            lines.seek(before)
                            blobs = re.findall(r'"GET /v2/\S+/blobs/\S+ HTTP/1.1" 20[06] (\d+)', lines.read())
                        print(
                            f"{image:40} {goal:18} {kind:10} {seconds:6.1f} s, {pulled:6.1f} s of it for the pull, "
                            f"{sum(map(int, blobs)) / 1e6:7.1f} MB in {len(blobs)} requests",
                            flush=True,
                        )
    return 0


def pull(address: str, reference: str, *, is_lazy: bool) -> float:
    """Seconds until the image is pulled, or mounted."""
    began = time.perf_counter()
    command = ["ctr-remote", "-a", address, "images", "rpull" if is_lazy else "pull", "--plain-http", reference]
    subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S)
    return time.perf_counter() - began


def run(address: str, reference: str, command: list[str], *, is_lazy: bool) -> float:
    """Seconds until a command in a new container ends, or without one until Jupyter answers."""
    began = time.perf_counter()
    snapshotter = ["--snapshotter=stargz"] if is_lazy else []
    options = ["run", "--rm", "--net-host", *snapshotter, reference, f"lazy-{time.monotonic_ns()}"]
    start = ["ctr-remote", "-a", address, *options, *command]
    if command:
        done = subprocess.run(start, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise SystemExit(f"{shlex.join(start)} failed:\n{done.stdout}{done.stderr}")
        return time.perf_counter() - began
    with subprocess.Popen(start, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            while process.poll() is None:
                try:
                    if requests.get(JUPYTER, timeout=2).ok:
                        return time.perf_counter() - began
                except requests.RequestException:
                    time.sleep(0.02)
            raise SystemExit("the container ended before Jupyter answered")
        finally:
            process.terminate()


@contextmanager
def slow_link(latency: int, rate: int) -> Iterator[int]:
    """A port that leads to the registry, with a round-trip time (ms) and a rate (Mbit/s, 0: any) of all connections."""
    loop, free_at = asyncio.new_event_loop(), 0.0

    async def delayed(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        nonlocal free_at
        pieces: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(1000)

        async def deliver() -> None:
            while (piece := await pieces.get())[1]:
                await asyncio.sleep(max(0.0, piece[0] - loop.time()))
                target.write(piece[1])
                await target.drain()
            target.close()

        delivery = loop.create_task(deliver())
        while data := await source.read(1 << 16):
            free_at = max(loop.time(), free_at) + (len(data) * 8 / (rate * 1e6) if rate else 0)
            await pieces.put((free_at + latency / 1000, data))
        await pieces.put((0.0, b""))
        await delivery

    async def connect(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", PORT)

        async def forward() -> None:
            while data := await source.read(1 << 16):
                writer.write(data)
                await writer.drain()
            writer.close()

        with suppress(asyncio.CancelledError):  # at the end
            await asyncio.gather(forward(), delayed(reader, target), return_exceptions=True)

    server = loop.run_until_complete(asyncio.start_server(connect, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        asyncio.run_coroutine_threadsafe(_cancel_tasks(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _cancel_tasks() -> None:
    """Ends the connections that are still open, so that closing the loop finds no pending task."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


if __name__ == "__main__":
    sys.exit(main())
