"""Instances that die and come back, and links that are slow for a while, on the clock."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from tonnage.sim.domain import BadInputError
from tonnage.sim.engine.clients import Clients
from tonnage.sim.engine.clock import TICK_S, Clock, call_at, on_grid
from tonnage.sim.engine.fleet import MortalFleet
from tonnage.sim.engine.network import Network
from tonnage.sim.results.attempts import Crash
from tonnage.sim.serving.draws import Draws
from tonnage.sim.serving.outages import InstanceCrash, LinkFault, Outages

Place = tuple[str, int]
_STREAM = 7_103  # of a seed's random numbers: nobody else's
_HOUR_S = 3600.0


class OutageDriver:
    """Let the outages of a run happen, until its last request has ended."""

    def __init__(
        self, env: Clock, outages: Outages, fleet: MortalFleet, clients: Clients, seed: int
    ) -> None:
        """Set what happens at given times, and draw the first of what happens at a rate."""
        self._env = env
        self._fleet = fleet
        self._clients = clients
        self._draws = Draws(np.random.default_rng([_STREAM, seed]))
        self._slow: list[LinkFault] = []
        self._over = False
        for crash in outages.crashes:
            if crash.at_s is not None:
                call_at(env, on_grid(crash.at_s), self._strike, crash)
            if crash.rate_per_hour:
                for place in self._places(crash.role, crash.instance):
                    self._draw_next((crash, place))
        for link in outages.links:
            self._log_link(link)
            call_at(env, on_grid(link.at_s), self._begin_slow, link)
            call_at(env, max(on_grid(link.until_s), TICK_S), self._end_slow, link)

    def stop(self) -> None:
        """Let nothing more happen: every request has ended."""
        self._over = True

    def _places(self, role: str | None, instance: int | None) -> Iterator[Place]:
        for name, instances in self._fleet.instances.items():
            if role in (None, name):
                yield from ((name, at) for at in range(len(instances)) if instance in (None, at))

    # --- crashes --------------------------------------------------------------------------------

    def _draw_next(self, asked: tuple[InstanceCrash, Place]) -> None:
        crash = asked[0]
        assert crash.rate_per_hour is not None
        gap_s = -np.log1p(-self._draws.uniform()) * _HOUR_S / crash.rate_per_hour
        time_s = self._env.now + max(on_grid(float(gap_s)), TICK_S)
        call_at(self._env, time_s, self._strike_by_chance, asked)

    def _strike_by_chance(self, asked: tuple[InstanceCrash, Place]) -> None:
        if self._over:
            return
        crash, place = asked
        self._crash(crash, place)
        if crash.restart_s is not None:
            wait_s = self._env.now + on_grid(crash.restart_s)
            call_at(self._env, wait_s, self._draw_next, asked)

    def _strike(self, crash: InstanceCrash) -> None:
        """Let an instance die that is up: the one asked for, or any of those."""
        up = [
            place
            for place in self._places(crash.role, crash.instance)
            if not self._fleet.door.is_dead(*place)
        ]
        if up and not self._over:
            self._crash(crash, up[self._draws.below(len(up))])

    def _crash(self, crash: InstanceCrash, place: Place) -> None:
        if self._fleet.door.is_dead(*place):
            return
        now_s, back_s = self._env.now, None
        self._fleet.door.has_died(*place)
        noticed_s = now_s + on_grid(crash.noticed_s)
        if noticed_s > now_s:
            call_at(self._env, noticed_s, self._notice, (place, now_s))
        else:
            self._notice((place, now_s))
        if crash.restart_s is not None:
            back_s = now_s + max(on_grid(crash.restart_s), TICK_S)
            call_at(self._env, back_s, self._restart, place)
        on_lost = partial(self._clients.lose, lost=crash.lost)
        lost = self._fleet.crash(*place, self._clients.in_flight(), on_lost)
        self._clients.outages.crashes.append(Crash(now_s, *place, back_s, len(lost)))
        self._clients.go_on()

    def _notice(self, seen: tuple[Place, float]) -> None:
        """Let the router know of a crash, unless the instance has been back since."""
        place, died_s = seen
        crashes = self._clients.outages.crashes
        later = any(
            (crash.role, crash.instance) == place and crash.time_s > died_s for crash in crashes
        )
        if self._fleet.door.is_dead(*place) and not later:
            self._fleet.door.mark(*place, up=False)

    def _restart(self, place: Place) -> None:
        self._fleet.restart(*place)
        for sequence in self._fleet.door.is_back(*place):
            self._fleet.arrive(sequence)

    # --- links ----------------------------------------------------------------------------------

    def _log_link(self, link: LinkFault) -> None:
        self._clients.outages.slow_links_s.append((link.at_s, link.until_s))

    def _begin_slow(self, link: LinkFault) -> None:
        self._slow.append(link)
        self._set_speeds()

    def _end_slow(self, link: LinkFault) -> None:
        self._slow.remove(link)
        self._set_speeds()

    def _set_speeds(self) -> None:
        network: Any = getattr(self._fleet, "network", None)
        if not isinstance(network, Network):
            raise BadInputError("outages: a colocated pool has no link that could be slow")
        ports = list(self._places(None, None))  # senders first, as the network numbers them
        factors: dict[int, float] = {}
        for link in self._slow:
            slowed = set(self._places(link.role, link.instance))
            for port, place in enumerate(ports):
                if place in slowed:
                    factors[port] = factors.get(port, 1.0) * link.factor
        network.slow_down(factors)
