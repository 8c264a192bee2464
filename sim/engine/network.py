"""Bytes on their way between the instances of a deployment, on the clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Any

import simpy

from tonnage.sim.engine.clock import TICK_S, Clock, StepEnd, call_at, on_grid
from tonnage.sim.serving.fair_share import Demand, max_min_rates

_Ports = tuple[tuple[int, float], ...]  # (port, bytes that pass it per byte sent)

_AFTER_ALL_STEPS = 2**40  # a turn that comes after those of all instances


@dataclass(frozen=True, slots=True)
class PortSpec:
    """One end of the network: what every instance of a pool has.

    `bandwidth_bytes_per_s`: of one flow that is alone; `flows`: how many go at full speed together
    (attention-DP ranks, each with GPUs of its own). `share`: bytes that pass here per byte sent.
    """

    bandwidth_bytes_per_s: float
    flows: int = 1
    share: float = 1.0

    @property
    def most_bytes_per_s(self) -> float:
        """The rate of a flow, in bytes sent, that nothing but this port limits."""
        return self.bandwidth_bytes_per_s / self.share


class Flow:
    """Bytes from one instance to another, sent in parts; it ends when, closed, all is there."""

    __slots__ = (
        "cancelled",
        "moving",
        "on_end",
        "order",
        "parts_to_come",
        "path",
        "target_bytes",
    )

    def __init__(self, path: _Path, order: int) -> None:
        self.path = path  # between the instances that it joins
        self.order = order  # among all flows: breaks ties
        self.parts_to_come = 0  # sent, but not on the wire yet
        self.moving = False
        self.cancelled = False
        self.target_bytes = 0.0  # of what its path has served each flow, when it is through
        self.on_end: Callable[[], None] | None = None

    @property
    def idle(self) -> bool:
        """Whether all that was sent has arrived."""
        return not self.moving and not self.parts_to_come


class _Path:
    """The flows between one pair of instances: they go at the same rate, so one sum serves all."""

    __slots__ = ("flows", "ports", "rate_bytes_per_s", "served_bytes", "since_s")

    def __init__(self, ports: _Ports) -> None:
        self.ports = ports
        self.flows: list[tuple[float, int, Flow]] = []  # heap by target
        self.served_bytes = 0.0  # to each flow, until `since_s`
        self.rate_bytes_per_s = 0.0  # of each flow, from then on
        self.since_s = 0.0

    def catch_up(self, now_s: float) -> None:
        """Count what was served until now."""
        self.served_bytes += self.rate_bytes_per_s * (now_s - self.since_s)
        self.since_s = now_s

    def add(self, flow: Flow, part_bytes: float) -> None:
        """Let a flow in, or let one that is here go on for longer."""
        if flow.moving:
            flow.target_bytes += part_bytes  # its place in the heap is mended when it is first
            return
        if not self.flows:
            self.served_bytes = 0.0
        flow.moving = True
        flow.target_bytes = self.served_bytes + part_bytes
        heappush(self.flows, (flow.target_bytes, flow.order, flow))

    def remove(self, flow: Flow) -> None:
        """Take a flow out that is not through."""
        self.flows = [entry for entry in self.flows if entry[2] is not flow]
        heapify(self.flows)
        flow.moving = False

    def due_s(self) -> float:
        """Return the instant at which the first flow is through; infinite where nothing moves."""
        if not self.rate_bytes_per_s:
            return inf
        target_bytes, order, flow = self.flows[0]
        while target_bytes != flow.target_bytes:
            heapreplace(self.flows, (flow.target_bytes, order, flow))
            target_bytes, order, flow = self.flows[0]
        left_s = (target_bytes - self.served_bytes) / self.rate_bytes_per_s
        return self.since_s + max(on_grid(left_s), TICK_S)

    def take_due(self, now_s: float) -> list[Flow]:
        """Return the flows that are through, in order."""
        through = []
        while self.flows and self.due_s() <= now_s:
            flow = heappop(self.flows)[2]
            flow.moving = False
            through.append(flow)
        return through


class Network:
    """Ports of senders and receivers whose bandwidth the flows share max-min fairly.

    A flow crosses the port of its sender and that of its receiver. Rates change only at the end of
    an instant, when all that happens at it has happened: so they do not depend on the order of
    events within it. Sizes and rates are those of one GPU of the sender.
    """

    def __init__(
        self, env: Clock, senders: int, receivers: int, sending: PortSpec, receiving: PortSpec
    ) -> None:
        """Lay idle paths between all senders and receivers."""
        self.sent_bytes = 0.0
        self._env = env
        ends = [sending] * senders + [receiving] * receivers
        self._capacity_bytes_per_s = {
            port: end.bandwidth_bytes_per_s * end.flows for port, end in enumerate(ends)
        }
        self._most_bytes_per_s = min(sending.most_bytes_per_s, receiving.most_bytes_per_s)
        self._slow: dict[int, float] = {}  # ports that are slower than they should be, by factor
        self._paths = [
            [
                _Path(((sender, sending.share), (senders + receiver, receiving.share)))
                for receiver in range(receivers)
            ]
            for sender in range(senders)
        ]
        self._busy: dict[_Ports, _Path] = {}
        self._rates = lru_cache(maxsize=4096)(self._shared_rates)  # few flows, few ways to mix
        self._entering: list[tuple[Flow, float]] = []
        self._flows = 0
        self._settles = False  # at the end of this instant
        self._due_s: float | None = None  # when the next flow is through

    def open(self, sender: int, receiver: int) -> Flow:
        """Return a flow between two instances that nothing is sent over yet."""
        self._flows += 1
        return Flow(self._paths[sender][receiver], self._flows)

    def send(self, flow: Flow, part_bytes: float, delay_s: float) -> None:
        """Send bytes that are ready for the wire after a delay."""
        self.sent_bytes += part_bytes
        flow.parts_to_come += 1
        delay_s = on_grid(delay_s)
        if delay_s:
            call_at(self._env, self._env.now + delay_s, self._enter, (flow, part_bytes))
        else:
            self._enter((flow, part_bytes))

    def close(self, flow: Flow, on_end: Callable[[], None]) -> None:
        """Have `on_end` called when all has arrived; some of it must still be on its way."""
        assert not flow.idle
        flow.on_end = on_end

    def cancel(self, flow: Flow) -> None:
        """Send nothing more of a flow, and let nobody be told of its end."""
        flow.cancelled, flow.on_end = True, None
        if flow.moving:
            path = flow.path
            path.catch_up(self._env.now)
            path.remove(flow)
            if not path.flows:
                path.rate_bytes_per_s = 0.0
                del self._busy[path.ports]
            self._settle_after_this_instant()

    def slow_down(self, factors: dict[int, float]) -> None:
        """Let ports be slower by these factors from now on, 0 to let nothing pass; others not.

        Ports are numbered, senders first.
        """
        self._slow = dict(factors)
        self._rates.cache_clear()
        self._settle_after_this_instant()

    def _enter(self, part: tuple[Flow, float]) -> None:
        self._entering.append(part)
        self._settle_after_this_instant()

    def _settle_after_this_instant(self) -> None:
        if not self._settles:
            self._settles = True
            end = StepEnd(self._env, 0.0, _AFTER_ALL_STEPS)
            assert end.callbacks is not None
            end.callbacks.append(self._settle)

    def _settle(self, _event: simpy.Event) -> None:
        """Take in what entered and left at this instant, and share the ports anew."""
        self._settles = False
        now_s = self._env.now
        for flow, part_bytes in self._entering:
            flow.parts_to_come -= 1
            if flow.cancelled:
                continue
            path = flow.path
            path.catch_up(now_s)
            path.add(flow, part_bytes)
            self._busy[path.ports] = path
        self._entering.clear()
        busy = [self._busy[ports] for ports in sorted(self._busy)]
        rates = self._rates(tuple([(len(path.flows), path.ports) for path in busy]))
        for path, rate in zip(busy, rates, strict=True):
            if rate != path.rate_bytes_per_s:
                path.catch_up(now_s)
                path.rate_bytes_per_s = rate
        due_s = min((path.due_s() for path in busy), default=None)
        if due_s == inf:
            due_s = None
        if due_s is not None and due_s != self._due_s:
            call_at(self._env, due_s, self._arrive, due_s)
        self._due_s = due_s

    def _shared_rates(self, flows: tuple[tuple[int, _Ports], ...]) -> list[float]:
        """Return the rate of each flow of so many between these ports."""
        if self._slow:
            return self._slowed_rates(flows)
        demands = [Demand(number, ports, self._most_bytes_per_s) for number, ports in flows]
        return max_min_rates(demands, self._capacity_bytes_per_s)

    def _slowed_rates(self, flows: tuple[tuple[int, _Ports], ...]) -> list[float]:
        """Return the rates where some ports are slower; flows through a dead one have none."""
        factors = [min(self._slow.get(port, 1.0) for port, _ in ports) for _, ports in flows]
        demands = [
            Demand(number, ports, self._most_bytes_per_s * factor)
            for (number, ports), factor in zip(flows, factors, strict=True)
            if factor
        ]
        capacities = {
            port: most * self._slow.get(port, 1.0)
            for port, most in self._capacity_bytes_per_s.items()
        }
        rates = iter(max_min_rates(demands, capacities) if demands else ())
        return [next(rates) if factor else 0.0 for factor in factors]

    def _arrive(self, due_s: Any) -> None:
        """End the flows that are through now, unless it has turned out to be another instant."""
        if due_s != self._due_s:
            return
        self._due_s = None
        through = []
        for ports in sorted(self._busy):
            path = self._busy[ports]
            through += path.take_due(due_s)
            if not path.flows:
                path.rate_bytes_per_s = 0.0
                del self._busy[ports]
        if self._busy:
            self._settle_after_this_instant()
        for flow in through:
            if flow.on_end is not None and flow.idle:
                flow.on_end()
