"""The first member's side of the meeting: who came, what they shall do, and what became of it."""

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

PROTOCOL = 1
# After one rank failed, the others get this long to say how they fared.
GRACE = 3.0


@dataclass(frozen=True)
class Order:
    """What is checked; the first member's options count for all."""

    asked: str  # the library, see plan.LIBRARY_OF
    timeout: float
    largest: int | None  # bytes
    libraries: Mapping[str, str]  # kind -> what the framework calls it
    at: str  # host:port of the meeting, for messages
    nodes_are_ranks: bool  # each member is one rank that a launcher started
    processes: int


@dataclass
class Meeting(threading.Thread):
    """Runs until every member has the report or is gone."""

    listener: socket.socket
    members: int
    order: Order
    _wires: dict[int, Wire] = field(default_factory=dict)
    _hellos: dict[int, Message] = field(default_factory=dict)
    _came: list[Wire] = field(default_factory=list)
    _problems: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(name="meeting", daemon=True)

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        try:
            report = self._report()
        except Exception as error:  # whatever it is, the members must not wait for ever
            text = f"dist-check itself failed: {type(error).__name__}: {error}"
            report = judge.unstarted(
                [], [Problem(text, ("that is an error of this program: report it",))], self.order.at
            )
        for wire in [*self._wires.values(), *self._came]:
            try:
                wire.send({"report": report})
            except Lost:
                continue
        self.listener.close()

    def _report(self) -> Message:
        self._welcome()
        hellos = [self._hellos[index] for index in sorted(self._hellos)]
        if self._problems or len(hellos) < self.members:
            return judge.unstarted(hellos, self._problems + self._absent(), self.order.at)
        made = plan.make(hellos, self.order.asked)
        if made.problems:
            return judge.unstarted(hellos, list(made.problems), self.order.at)
        library = self.order.libraries[made.library]
        self._tell({"plan": {"probe": self._probes(), "seconds": min(self.order.timeout, 5.0)}})
        probed = self._gather("probed", self.order.timeout + 10)
        blocked = [self._blocked(index, one) for index, told in sorted(probed.items()) for one in told]
        if blocked or self._problems:
            return judge.unstarted(hellos, self._problems + blocked, self.order.at)
        sizes = plan.sizes(made.library, self.order.largest)
        ranks = [vars(rank) for rank in made.ranks]
        start = {"ranks": ranks, "library": made.library, "timeout": self.order.timeout, "sizes": sizes}
        self._tell({"start": start})
        # Every step of every rank is told, and each member ends ranks that take no further step.
        finished = self._gather("finished", max(self.order.timeout, 120) + 30)
        results = [result for told in finished.values() for result in told]
        return judge.report(hellos, made, library, results, self._problems, timeout=self.order.timeout)

    # ---- who comes

    def _welcome(self) -> None:
        deadline = time.monotonic() + self.order.timeout
        self.listener.setblocking(False)
        while len(self._hellos) < self.members and time.monotonic() < deadline and not self._problems:
            waiting: list[Wire | socket.socket] = [self.listener, *self._came]
            ready, _, _ = select.select(waiting, [], [], max(deadline - time.monotonic(), 0))
            for one in ready:
                if isinstance(one, Wire):
                    self._greet(one)
                else:
                    self._accept()

    def _accept(self) -> None:
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._came.append(Wire(connection))

    def _greet(self, wire: Wire) -> None:
        try:
            message = wire.receive(0)
            hello = message.get("hello") if message else None
            if message is None:
                return
            if not isinstance(hello, dict) or not {"index", "members", "host", "ports"} <= set(hello):
                raise Lost("said something else than hello")
        except Lost:
            # A port scanner, a load balancer's probe, or a member that was ended: it may come again.
            self._came.remove(wire)
            wire.close()
            return
        index = hello["index"]
        if hello.get("protocol") != PROTOCOL:
            self._problems.append(advice.different("node 0", "this dist-check", f"node {index}", "another one"))
        elif hello["members"] != self.members:
            text = f"node {index} was told of {hello['members']} members, node 0 of {self.members}"
            self._problems.append(Problem(text, ("give all of them the same --nodes (or WORLD_SIZE)",)))
        elif index in self._hellos or not 0 <= index < self.members:
            text = f"two members say that they are number {index}: {self._host(index)} and {hello['host']}"
            self._problems.append(Problem(text, ("give each machine a --rank of its own, from 0",)))
        else:
            self._hellos[index] = hello
            self._wires[index] = wire
            self._came.remove(wire)

    def _absent(self) -> list[Problem]:
        found = []
        for index in range(self.members):
            if index in self._hellos or self._problems:
                continue
            each = self.order.processes
            ranks = advice.numbered(range(index * each, (index + 1) * each))
            if self.order.nodes_are_ranks:
                found.append(
                    advice.absent(ranks, self.order.at, self.order.timeout, "the same command, by the same launcher")
                )
            else:
                same = f" -n {each}" if each > 1 else ""
                command = f"dist-check{same} --nodes {self.members} --rank {index} --master {self.order.at}"
                found.append(advice.absent(f"node {index} ({ranks})", self.order.at, self.order.timeout, command))
        return found

    def _host(self, index: int) -> str:
        return str(self._hellos[index]["host"]) if index in self._hellos else "?"

    # ---- what they do

    def _probes(self) -> dict[str, list[int]]:
        """Whom each member shall reach at its first port: the next one, and the first."""
        if self.members == 1:
            return {"0": []}
        return {str(index): sorted({(index + 1) % self.members, 0} - {index}) for index in range(self.members)}

    def _blocked(self, index: int, told: Mapping[str, Any]) -> Problem:
        other = self._hellos[told["member"]]
        return advice.blocked(plan.node(self._hellos[index]), plan.node(other), told["at"], told["reason"])

    def _tell(self, message: Message) -> None:
        everyone = {str(index): [hello["address"], hello["ports"][0]] for index, hello in self._hellos.items()}
        for index, wire in list(self._wires.items()):
            try:
                wire.send({**message, "members": everyone})
            except Lost as error:
                self._drop(index, str(error))

    def _drop(self, index: int, reason: str) -> None:
        self._wires.pop(index).close()
        self._problems.append(advice.lost(plan.node(self._hellos[index]), reason))

    def _gather(self, kind: str, silence: float) -> dict[int, Any]:
        """What each member sends of this kind; ends early when one is lost, or when none says anything for so long."""
        found: dict[int, Any] = {}
        stop_at: float | None = None
        deadline = time.monotonic() + silence
        stopped = False
        while set(self._wires) - set(found) and time.monotonic() < deadline:
            if stop_at is not None and not stopped and time.monotonic() >= stop_at:
                stopped = True
                self._tell({"stop": True})
            waiting = [wire for index, wire in self._wires.items() if index not in found]
            ready, _, _ = select.select(waiting, [], [], 0.2)
            for index in [index for index, wire in self._wires.items() if wire in ready]:
                failed = self._take(index, kind, found)
                deadline = time.monotonic() + silence
                if failed and stop_at is None:
                    stop_at = time.monotonic() + GRACE
        for index in set(self._wires) - set(found):
            self._drop(index, f"it said nothing for {silence:g} s")
        return found

    def _take(self, index: int, kind: str, found: dict[int, Any]) -> bool:
        """Everything that this member has sent. True if it or one of its ranks failed."""
        failed = False
        try:
            message = self._wires[index].receive(0)
            while message is not None:
                failed = failed or bool(message.get("failed"))
                if kind in message:
                    found[index] = message[kind]
                message = self._wires[index].receive(0)
        except Lost as error:
            if index not in found:
                self._drop(index, str(error))
                return True
        return failed
