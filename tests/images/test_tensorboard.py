"""TensorBoard: reads the logs of a training, and serves them only on the loopback."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from testinfra.host import Host

WRITE = """
import json
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.event_file_writer import EventFileWriter
writer = EventFileWriter("/tmp/runs/one")
for step in range(5):
    value = Summary.Value(tag="loss", simple_value=1.0 / (step + 1))
    writer.add_event(Event(step=step, wall_time=1000.0 + step, summary=Summary(value=[value])))
writer.close()
print(json.dumps("done"))
"""


def test_serves_the_logs(host: Host, python: Callable[[str], Any], until: Callable[..., None]) -> None:
    assert python(WRITE) == "done"
    assert host.run("tensorboard --logdir /tmp/runs --port 6006 >/tmp/tensorboard.log 2>&1 &").rc == 0
    fetch = (
        "python -c \"import urllib.request as r; print(r.urlopen('http://127.0.0.1:6006/"
        "data/plugin/scalars/scalars?run=one&tag=loss').read().decode())\""
    )
    until(lambda: host.run(fetch).rc == 0, seconds=60, what="TensorBoard to serve the curve")
    points = json.loads(host.check_output(fetch))
    assert [step for _, step, _ in points] == [0, 1, 2, 3, 4]
    assert points[4][2] == pytest.approx(0.2)  # stored as a 32-bit float
    # Only 127.0.0.1 and [::1] (its data server), in hex as in /proc/net/tcp; 1776 is port 6006.
    listening = host.check_output("cat /proc/net/tcp /proc/net/tcp6 | awk '$4 == \"0A\" {print $2}'").split()
    assert "0100007F:1776" in listening
    loopback = {"0100007F", "00000000000000000000000001000000"}
    assert {address.split(":")[0] for address in listening} <= loopback
    host.run("pkill -f tensorboard || kill $(grep -la tensorboard /proc/[0-9]*/cmdline | cut -d/ -f3)")
