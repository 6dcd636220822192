"""The meeting, which runs on the first member: accepts all members, sends them the plan, and collects their results."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from . import advice, judge, plan
from .advice import Problem
from .wire import Lost, Message, Wire

PROTOCOL = 2
# Seconds for the other ranks to report after one rank failed.
GRACE = 3.0


@dataclass(frozen=True)
class Order:
    """What to check. The first member's options apply to all."""

    backend: str  # see plan.LIBRARY_OF
    timeout: float
    largest: int | None  # bytes
    libraries: Mapping[str, str]  # the framework's name of each kind
    address: str  # host:port of the meeting, for messages
    nodes_are_ranks: bool  # a launcher started each member as one rank
    processes: int


@dataclass
class Meeting(threading.Thread):
    """Runs until every member has the report or is disconnected."""

    listener: socket.socket
    members: int
    order: Order
    _wires: dict[int, Wire] = field(default_factory=dict)
    _hellos: dict[int, Message] = field(default_factory=dict)
    _unknown: list[Wire] = field(default_factory=list)
    _problems: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(name="meeting", daemon=True)

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        try:
            report = self._report()
        except Exception as error:  # after any error, the members must not wait forever
            text = f"internal error of dist-check: {type(error).__name__}: {error}"
            report = judge.unstarted([], [Problem(text, ("report this bug",))], self.order.address)
        for wire in [*self._wires.values(), *self._unknown]:
            try:
                wire.send({"report": report})
            except Lost:
                continue
        self.listener.close()

    def _report(self) -> Message:
        self._accept_members()
        hellos = [self._hellos[index] for index in sorted(self._hellos)]
        if self._problems or len(hellos) < self.members:
            return judge.unstarted(hellos, self._problems + self._absent(), self.order.address)
        job = plan.make(hellos, self.order.backend)
        if job.problems:
            return judge.unstarted(hellos, list(job.problems), self.order.address)
        library = self.order.libraries[job.library]
        self._broadcast({"plan": {"probe": self._probes(), "seconds": min(self.order.timeout, 5.0)}})
        probed = self._gather("probed", self.order.timeout + 10)
        blocked = [self._blocked(index, failure) for index, failures in sorted(probed.items()) for failure in failures]
        if blocked or self._problems:
            return judge.unstarted(hellos, self._problems + blocked, self.order.address)
        sizes = plan.sizes(job.library, self.order.largest)
        ranks = [vars(rank) for rank in job.ranks]
        start = {"ranks": ranks, "library": job.library, "timeout": self.order.timeout, "sizes": sizes}
        self._broadcast({"start": start})
        # Members report every step of their ranks, and end ranks without progress.
        finished = self._gather("finished", max(self.order.timeout, 120) + 30)
        results = [result for results in finished.values() for result in results]
        return judge.report(hellos, job, library, results, self._problems, timeout=self.order.timeout)

    # ---- connections

    def _accept_members(self) -> None:
        deadline = time.monotonic() + self.order.timeout
        self.listener.setblocking(False)
        while len(self._hellos) < self.members and time.monotonic() < deadline and not self._problems:
            sources: list[Wire | socket.socket] = [self.listener, *self._unknown]
            ready, _, _ = select.select(sources, [], [], max(deadline - time.monotonic(), 0))
            for source in ready:
                if isinstance(source, Wire):
                    self._read_hello(source)
                else:
                    self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._unknown.append(Wire(connection))

    def _read_hello(self, wire: Wire) -> None:
        try:
            message = wire.receive(0)
            hello = message.get("hello") if message else None
            if message is None:
                return
            if not isinstance(hello, dict) or not {"index", "members", "host", "ports"} <= set(hello):
                raise Lost("not a hello")
        except Lost:
            # A port scanner, a load balancer's probe, or a member that ended: it may connect again.
            self._unknown.remove(wire)
            wire.close()
            return
        index = hello["index"]
        if hello.get("protocol") != PROTOCOL:
            self._problems.append(advice.different("node 0", "this dist-check", f"node {index}", "another version"))
        elif hello["members"] != self.members:
            text = f"node {index} expects {hello['members']} members, node 0 expects {self.members}"
            self._problems.append(Problem(text, ("use the same --nodes (or WORLD_SIZE) on all nodes",)))
        elif index in self._hellos or not 0 <= index < self.members:
            text = f"two members have the number {index}: {self._host(index)} and {hello['host']}"
            self._problems.append(Problem(text, ("use a different --rank on each machine, from 0",)))
        else:
            self._hellos[index] = hello
            self._wires[index] = wire
            self._unknown.remove(wire)

    def _absent(self) -> list[Problem]:
        problems = []
        address, timeout, each = self.order.address, self.order.timeout, self.order.processes
        for index in range(self.members):
            if index in self._hellos or self._problems:
                continue
            ranks = advice.numbered(range(index * each, (index + 1) * each))
            if self.order.nodes_are_ranks:
                problems.append(advice.absent(ranks, address, timeout, "the same command, with the same launcher"))
            else:
                count = f" -n {each}" if each > 1 else ""
                command = f"dist-check{count} --nodes {self.members} --rank {index} --master {address}"
                problems.append(advice.absent(f"node {index} ({ranks})", address, timeout, command))
        return problems

    def _host(self, index: int) -> str:
        return str(self._hellos[index]["host"]) if index in self._hellos else "?"

    # ---- messages

    def _probes(self) -> dict[str, list[int]]:
        """The members whose first port each member must reach: the next one and the first one."""
        if self.members == 1:
            return {"0": []}
        return {str(index): sorted({(index + 1) % self.members, 0} - {index}) for index in range(self.members)}

    def _blocked(self, index: int, failure: Mapping[str, Any]) -> Problem:
        other = self._hellos[failure["member"]]
        return advice.blocked(plan.node(self._hellos[index]), plan.node(other), failure["at"], failure["reason"])

    def _broadcast(self, message: Message) -> None:
        addresses = {str(index): [hello["address"], hello["ports"][0]] for index, hello in self._hellos.items()}
        for index, wire in list(self._wires.items()):
            try:
                wire.send({**message, "members": addresses})
            except Lost as error:
                self._drop(index, str(error))

    def _drop(self, index: int, reason: str) -> None:
        self._wires.pop(index).close()
        self._problems.append(advice.lost(plan.node(self._hellos[index]), reason))

    def _gather(self, kind: str, timeout: float) -> dict[int, Any]:
        """The message of this kind from each member; gives up after `timeout` seconds without any message."""
        received: dict[int, Any] = {}
        stop_at: float | None = None
        deadline = time.monotonic() + timeout
        is_stopped = False
        while set(self._wires) - set(received) and time.monotonic() < deadline:
            if stop_at is not None and not is_stopped and time.monotonic() >= stop_at:
                is_stopped = True
                self._broadcast({"stop": True})
            wires = [wire for index, wire in self._wires.items() if index not in received]
            ready, _, _ = select.select(wires, [], [], 0.2)
            for index in [index for index, wire in self._wires.items() if wire in ready]:
                failed = self._receive(index, kind, received)
                deadline = time.monotonic() + timeout
                if failed and stop_at is None:
                    stop_at = time.monotonic() + GRACE
        for index in set(self._wires) - set(received):
            self._drop(index, f"no message for {timeout:g} s")
        return received

    def _receive(self, index: int, kind: str, received: dict[int, Any]) -> bool:
        """Reads all messages of a member. True if it or one of its ranks failed."""
        failed = False
        try:
            message = self._wires[index].receive(0)
            while message is not None:
                failed = failed or bool(message.get("failed"))
                if kind in message:
                    received[index] = message[kind]
                message = self._wires[index].receive(0)
        except Lost as error:
            if index not in received:
                self._drop(index, str(error))
                return True
        return failed
