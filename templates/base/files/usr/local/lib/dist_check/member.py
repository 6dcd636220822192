"""One machine's side: comes to the meeting, tells what it has, and computes what the plan says."""

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
class Asked:
    """The options that are not about where."""

    backend: str
    timeout: float
    largest: int | None
    framework: str
    program: str


def check(place: Place, asked: Asked, backend: ModuleType, say: Callable[[str], None]) -> Message:
    """The report."""
    at = where.joined(place.host, place.port)
    try:
        facts = machine.facts(framework=asked.framework, distribution=backend.DISTRIBUTION, toward=place.host)
    except OSError as error:
        return judge.unstarted([], [advice.no_meeting(at, str(error), 0)], at)
    processes = place.processes or facts["gpus"] or (2 if place.alone else 1)
    with contextlib.ExitStack() as stack:
        port = place.port
        if place.index == 0:
            try:
                listener = _listen("127.0.0.1" if place.alone else "", port)
            except OSError as error:
                text = f"cannot listen at port {port}: {error.strerror}"
                return judge.unstarted([], [Problem(text, ("give another: --master host:PORT, or MASTER_PORT",))], at)
            stack.callback(listener.close)
            port = listener.getsockname()[1]
            at = at if place.port else f"{place.host}:{port}"
            order = Order(
                asked=asked.backend,
                timeout=asked.timeout,
                largest=asked.largest,
                libraries=backend.LIBRARIES,
                at=at,
                nodes_are_ranks=place.processes == 1 and not place.how.startswith(("--", "Indexed")),
                processes=processes,
            )
            Meeting(listener, place.members, order).start()
        elif not place.alone:
            say(f"dist-check: node {place.index} of {place.members} ({place.how}), going to {at}")
        if place.index == 0 and not place.alone:
            say(f"dist-check: node 0 of {place.members} ({place.how}), waiting at {at} for {asked.timeout:g} s at most")
        # The first member meets itself, whatever the address it is known by outside.
        target = "127.0.0.1" if place.index == 0 else place.host
        try:
            wire = _reach(target, port, asked.timeout)
        except OSError as error:
            return judge.unstarted([], [advice.no_meeting(at, _reason(error), asked.timeout)], at)
        stack.callback(wire.close)
        held = _ports(place, processes)
        for one in held:
            stack.callback(one.close)
        hello = {
            **facts,
            "protocol": PROTOCOL,
            "index": place.index,
            "members": place.members,
            "processes": processes,
            "first_device": place.first_device,
            "ports": [one.getsockname()[1] for one in held],
        }
        try:
            wire.send({"hello": hello})
            return _take_part(wire, place, asked, backend.VARIABLES, held)
        except Lost as error:
            text = f"the first node at {at} went away: {error}"
            return judge.unstarted([], [Problem(text, ("its own output says more",))], at)


def _listen(host: str, port: int) -> socket.socket:
    """Everywhere if `host` is empty, by IPv4 and IPv6 where the kernel has both."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server((host, port), backlog=1024)


def _ports(place: Place, processes: int) -> list[socket.socket]:
    """One for each rank, held until the ranks start: next to the meeting's where free, so a firewall can be told."""
    found = []
    for local in range(processes):
        wanted = 0 if place.alone else place.port + 1 + place.first_device + local
        try:
            found.append(_listen("127.0.0.1" if place.alone else "", wanted))
        except (OSError, OverflowError):
            found.append(_listen("", 0))
    return found


def _reach(host: str, port: int, seconds: float) -> Wire:
    """The first node may start later than we: tries again until the time is over. Raises OSError."""
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
    wire: Wire, place: Place, asked: Asked, variables: Mapping[str, str], held: list[socket.socket]
) -> Message:
    while True:
        message = wire.receive(3600)
        if message is None:
            raise Lost("it says nothing")
        if "report" in message:
            return dict(message["report"])
        if "plan" in message:
            wire.send({"probed": _probe(message["plan"]["probe"][str(place.index)], message)})
        if "start" in message:
            for one in held:
                one.close()
            return _compute(wire, place, asked, variables, message["start"])


def _probe(wanted: list[int], message: Message) -> list[Message]:
    """Which of the others we cannot reach where their libraries will listen. Their kernel answers; nobody accepts."""
    found = []
    for member in wanted:
        host, port = message["members"][str(member)]
        try:
            socket.create_connection((host, port), timeout=message["plan"]["seconds"]).close()
        except OSError as error:
            found.append({"member": member, "at": f"{host}:{port}", "reason": _reason(error)})
    return found


def _compute(wire: Wire, place: Place, asked: Asked, variables: Mapping[str, str], start: Mapping[str, Any]) -> Message:
    ranks = start["ranks"]
    own = [one for one in ranks if one["member"] == place.index]
    orders = [
        {
            "framework": asked.framework,
            "rank": one["rank"],
            "world": len(ranks),
            "device": one["device"],
            "library": start["library"],
            "addresses": [where.joined(other["address"], other["port"]) for other in ranks],
            "timeout": start["timeout"],
            "sizes": start["sizes"],
        }
        for one in own
    ]
    reports: list[Message] = []

    def stop(seconds: float) -> bool:
        message = wire.receive(seconds)
        if message and "report" in message:
            reports.append(message["report"])
        return bool(message and ("stop" in message or "report" in message))

    with Ranks(start["timeout"]) as running:
        running.start(orders, asked.program, variables)
        results = running.watch(stop, lambda failed: wire.send({"step": True, "failed": failed}))
        wire.send({"finished": results})
        # The ranks stay until all are done: one that leaves early looks like a failure to the others.
        while not reports:
            message = wire.receive(3600)
            if message is None:
                raise Lost("it says nothing")
            if "report" in message:
                reports.append(message["report"])
    return reports[0]
