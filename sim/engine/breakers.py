"""Circuit breakers on the clock: one for all clients, or one for every instance."""

from __future__ import annotations

from collections.abc import Iterable

from tonnage.sim.engine.clock import Clock, call_at, on_grid
from tonnage.sim.engine.door import Door
from tonnage.sim.engine.fleet import Fleet
from tonnage.sim.serving.breaker import Breaker, BreakerSpec
from tonnage.sim.serving.sequence import Sequence

Place = tuple[str, int]
# Of an attempt: the breakers that watch it, and the period of each in which it began.
Periods = list[tuple[Breaker, int]]


class Breakers:
    """Hear how attempts end; keep clients, or the router, from asking who has failed too often.

    An instance that serves a part of an attempt is held responsible for all of it.
    """

    def __init__(self, env: Clock, spec: BreakerSpec | None) -> None:
        """Start closed; without a spec there are none."""
        self._env = env
        self._spec = spec
        self._of_all = Breaker(spec) if spec is not None and spec.scope == "pool" else None
        self._by_place: dict[Place, Breaker] = {}
        self._places: dict[Breaker, Place] = {}
        self._fleet: Fleet | None = None
        self._door: Door | None = None

    @property
    def times_opened(self) -> int:
        """How often one of them opened."""
        breakers = [*self._by_place.values(), *([self._of_all] if self._of_all else [])]
        return sum(breaker.times_opened for breaker in breakers)

    def watch(self, fleet: Fleet, door: Door) -> None:
        """Give every instance of a fleet a breaker, where they have one each."""
        if self._spec is None or self._spec.scope != "instance":
            return
        self._fleet, self._door = fleet, door
        for role, instances in fleet.instances.items():
            for index in range(len(instances)):
                breaker = Breaker(self._spec)
                self._by_place[role, index] = breaker
                self._places[breaker] = role, index

    def admit(self) -> bool:
        """Tell whether a client may send now."""
        return self._of_all is None or self._of_all.admits(self._env.now)

    def begin(self) -> Periods:
        """Note an attempt that is sent."""
        return [] if self._of_all is None else [(self._of_all, self._of_all.begin())]

    def begin_at(self, sequence: Sequence) -> Periods:
        """Note the instances that an attempt was given."""
        if not self._by_place or sequence.decode_instance is None:
            return []
        watching = [
            self._by_place[role, index]
            for role, index in (
                ("serve", sequence.decode_instance),
                ("prefill", sequence.prefill_instance),
                ("decode", sequence.decode_instance),
            )
            if index is not None and (role, index) in self._by_place
        ]
        return [(breaker, breaker.begin()) for breaker in watching]

    def succeeded(self, periods: Periods) -> None:
        """Take in that an attempt was served."""
        for breaker, period in periods:
            breaker.succeeded(period)

    def failed(self, periods: Periods) -> None:
        """Take in that an attempt failed."""
        for breaker, period in periods:
            if breaker.failed(period, self._env.now) and breaker in self._places:
                self._shun(breaker)

    def withdrawn(self, periods: Periods) -> None:
        """Take in that an attempt ended in a way that says nothing of the servers."""
        for breaker, period in periods:
            breaker.withdrawn(period)

    def moved(self, periods: Periods) -> Periods:
        """Take in that an attempt goes on elsewhere: its client knows nothing, its router does."""
        self.failed([one for one in periods if one[0] in self._places])
        return [one for one in periods if one[0] not in self._places]

    def _shun(self, breaker: Breaker) -> None:
        assert self._door is not None
        assert self._spec is not None
        role, index = self._places[breaker]
        self._door.mark(role, index, up=False, shunned=True)
        again_s = self._env.now + on_grid(self._spec.open_s)
        call_at(self._env, again_s, self._ask_again, breaker)

    def _ask_again(self, breaker: Breaker) -> None:
        assert self._door is not None
        breaker.admits(self._env.now)  # half open from now on
        role, index = self._places[breaker]
        self.let_in(self._door.mark(role, index, up=True, shunned=True))

    def let_in(self, waiting: Iterable[Sequence]) -> None:
        """Send requests that waited for an instance."""
        for sequence in waiting:
            assert self._fleet is not None
            self._fleet.arrive(sequence)
