"""A member of the check: connects to the meeting, sends its facts, and runs its ranks of the plan."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from . import advice, judge, machine, where
from .advice import Problem
from .meeting import PROTOCOL, Meeting, Order
from .ranks import Ranks
from .where import Place
from .wire import Lost, Message, Wire


@dataclass(frozen=True)
class Options:
    """The options of the check, without those of `where`."""

    backend: str
    timeout: float
    largest: int | None
    framework: str
    program: str


def check(place: Place, options: Options, backend: ModuleType, say: Callable[[str], None]) -> Message:
    """Runs the check and returns its report. `say` prints a line about the progress."""
    address = where.joined(place.host, place.port)
    try:
        facts = machine.facts(framework=options.framework, distribution=backend.DISTRIBUTION, toward=place.host)
    except OSError as error:
        return judge.unstarted([], [advice.no_meeting(address, str(error), 0)], address)
    processes = place.processes or facts["gpus"] or (2 if place.alone else 1)
    with contextlib.ExitStack() as stack:
        port = place.port
        if place.index == 0:
            try:
                listener = _listen("127.0.0.1" if place.alone else "", port)
            except OSError as error:
                text = f"cannot listen on port {port}: {error.strerror}"
                fix = ("use another port: --master HOST:PORT, or MASTER_PORT",)
                return judge.unstarted([], [Problem(text, fix)], address)
            stack.callback(listener.close)
            port = listener.getsockname()[1]
            address = address if place.port else f"{place.host}:{port}"
            order = Order(
                backend=options.backend,
                timeout=options.timeout,
                largest=options.largest,
                libraries=backend.LIBRARIES,
                address=address,
                nodes_are_ranks=place.processes == 1 and not place.how.startswith(("--", "Indexed")),
                processes=processes,
            )
            Meeting(listener, place.members, order).start()
        elif not place.alone:
            say(f"dist-check: node {place.index} of {place.members} ({place.how}), connecting to {address}")
        if place.index == 0 and not place.alone:
            limit = f"{options.timeout:g} s"
            say(f"dist-check: node 0 of {place.members} ({place.how}), waiting at {address} for at most {limit}")
        # The first member uses the loopback for itself, because it may not reach its own public address.
        target = "127.0.0.1" if place.index == 0 else place.host
        try:
            wire = _connect(target, port, options.timeout)
        except OSError as error:
            return judge.unstarted([], [advice.no_meeting(address, _reason(error), options.timeout)], address)
        stack.callback(wire.close)
        reserved = _reserved_ports(place, processes)
        for listener in reserved:
            stack.callback(listener.close)
        hello = {
            **facts,
            "protocol": PROTOCOL,
            "index": place.index,
            "members": place.members,
            "processes": processes,
            "first_device": place.first_device,
            "ports": [listener.getsockname()[1] for listener in reserved],
        }
        try:
            wire.send({"hello": hello})
            return _take_part(wire, place, options, backend.VARIABLES, reserved)
        except Lost as error:
            text = f"lost the first node at {address}: {error}"
            return judge.unstarted([], [Problem(text, ("read its own output",))], address)


def _listen(host: str, port: int) -> socket.socket:
    """Listens on `host`, or on all interfaces if it is empty, with IPv4 and IPv6 if the kernel has both."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server((host, port), backlog=1024)


def _reserved_ports(place: Place, processes: int) -> list[socket.socket]:
    """A listening socket for each rank, which reserves its port until the ranks start.

    The ports follow that of the meeting, if they are free, so that a firewall can open a range.
    """
    listeners = []
    for local in range(processes):
        port = 0 if place.alone else place.port + 1 + place.first_device + local
        try:
            listeners.append(_listen("127.0.0.1" if place.alone else "", port))
        except (OSError, OverflowError):
            listeners.append(_listen("", 0))
    return listeners


def _connect(host: str, port: int, seconds: float) -> Wire:
    """Connects to the first node; retries until the timeout, because it may start later. Raises OSError."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=max(min(5.0, deadline - time.monotonic()), 0.1))
        except OSError:
            if time.monotonic() + 0.5 > deadline:
                raise
            time.sleep(0.5)
        else:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return Wire(connection)


def _reason(error: OSError) -> str:
    return "timed out" if isinstance(error, socket.timeout) else (error.strerror or str(error))


def _take_part(
    wire: Wire, place: Place, options: Options, variables: Mapping[str, str], reserved: list[socket.socket]
) -> Message:
    while True:
        message = wire.receive(3600)
        if message is None:
            raise Lost("no message for an hour")
        if "report" in message:
            return dict(message["report"])
        if "plan" in message:
            wire.send({"probed": _probe(message["plan"]["probe"][str(place.index)], message)})
        if "start" in message:
            for listener in reserved:
                listener.close()
            return _compute(wire, place, options, variables, message["start"])


def _probe(members: list[int], message: Message) -> list[Message]:
    """The members whose reserved ports cannot be reached. Their kernel completes the connection without an accept."""
    failures = []
    for member in members:
        host, port = message["members"][str(member)]
        try:
            socket.create_connection((host, port), timeout=message["plan"]["seconds"]).close()
        except OSError as error:
            failures.append({"member": member, "at": f"{host}:{port}", "reason": _reason(error)})
    return failures


def _compute(
    wire: Wire, place: Place, options: Options, variables: Mapping[str, str], start: Mapping[str, Any]
) -> Message:
    ranks = start["ranks"]
    orders = [
        {
            "framework": options.framework,
            "rank": rank["rank"],
            "world": len(ranks),
            "device": rank["device"],
            "library": start["library"],
            "addresses": [where.joined(other["address"], other["port"]) for other in ranks],
            "timeout": start["timeout"],
            "sizes": start["sizes"],
        }
        for rank in ranks
        if rank["member"] == place.index
    ]
    reports: list[Message] = []

    def stop(seconds: float) -> bool:
        message = wire.receive(seconds)
        if message and "report" in message:
            reports.append(message["report"])
        return bool(message and ("stop" in message or "report" in message))

    with Ranks(start["timeout"]) as running:
        running.start(orders, options.program, variables)
        results = running.watch(stop, lambda failed: wire.send({"step": True, "failed": failed}))
        wire.send({"finished": results})
        # The ranks run until all are done: a rank that ends early is an error for the others.
        while not reports:
            message = wire.receive(3600)
            if message is None:
                raise Lost("no message for an hour")
            if "report" in message:
                reports.append(message["report"])
    return reports[0]
