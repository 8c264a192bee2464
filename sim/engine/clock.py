"""Simulated time: a grid on which sums are exact, and events that end a step.

Times are multiples of 2**-34 s (58 ps). Sums and differences of such numbers are exact in double
precision up to 2**19 s (six days), so that adding steps one by one and adding a whole segment give
the same bits: `exact` and segment mode visit the same instants, ties included.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Literal

import numpy as np
import simpy
from simpy.events import EventPriority

from tonnage.sim.domain import FloatArray

TICK_S = 2.0**-34
_TICKS_PER_S = 2.0**34

Process = Generator[simpy.Event, Any, None]


def on_grid(time_s: float) -> float:
    """Return the multiple of 2**-34 s nearest to a time."""
    return round(time_s * _TICKS_PER_S) / _TICKS_PER_S


class Clock(simpy.Environment):
    """Simulated time, and whose step ended last at the present instant."""

    def __init__(self) -> None:
        super().__init__()
        self._turn_s = -1.0
        self._turn = -1

    def take_turn(self, turn: int) -> None:
        """Note that the steps of the instances up to `turn` which end now have ended."""
        self._turn_s, self._turn = self.now, turn

    def had_turn(self, turn: int) -> bool:
        """Tell whether a step of that instance which ends at this very instant has ended."""
        return self._turn_s == self.now and turn <= self._turn


class StepEnd(simpy.Event):
    """Fire at the end of a step, after all else that happens at that instant.

    Arrivals at the very instant of a step's end are then seen by the decision that follows it.
    Instances that end a step at the same instant go in the order of their turns.
    """

    def __init__(self, env: simpy.Environment, delay_s: float, turn: int) -> None:
        super().__init__(env)
        self._ok = True
        self._value = None
        env.schedule(self, priority=EventPriority(2 + turn), delay=delay_s)

    def replace_by(self, earlier: StepEnd) -> None:
        """Let whoever waits for this event be woken by an earlier one instead."""
        earlier.callbacks, self.callbacks = self.callbacks, []


class Segment:
    """Consecutive steps of one instance, from `start_s` on, each a whole number of ticks.

    Where a step ends does not depend on how many steps the segment holds.
    """

    __slots__ = (
        "_cumulative",
        "_env",
        "end",
        "start_s",
        "steps",
        "ticks",
        "turn",
    )

    def __init__(self, env: Clock, turn: int, durations_s: FloatArray) -> None:
        self._env = env
        self.turn = turn
        self.start_s = env.now
        self.steps = len(durations_s)  # how many of them will be done
        if self.steps == 1:
            last = round(float(durations_s[0]) * _TICKS_PER_S)
            self.ticks = self._cumulative = np.array([float(last)])
        else:
            self.ticks = np.rint(durations_s * _TICKS_PER_S)
            self._cumulative = np.add.accumulate(self.ticks)
            last = self._cumulative.item(-1)
        if not self.ticks.item(0) > 0:
            raise ValueError(f"a step must take time, not {durations_s[0]} s")
        self.end = StepEnd(env, last * TICK_S, turn)

    def end_of(self, step: int) -> float:
        """Return the instant at which the given step, counted from 1, ends."""
        return self.start_s + float(self._cumulative.item(step - 1)) * TICK_S

    def steps_done(self) -> int:
        """Return how many steps have ended by now."""
        elapsed_ticks = (self._env.now - self.start_s) * _TICKS_PER_S
        return int(self._cumulative.searchsorted(elapsed_ticks, side="right"))

    def steps_begun(self) -> int:
        """Return how many steps have begun.

        A step that ends at this very instant is the last one until its instance has its turn.
        """
        if self.steps == 1:
            return 1
        elapsed_ticks = (self._env.now - self.start_s) * _TICKS_PER_S
        side: Literal["left", "right"] = "right" if self._env.had_turn(self.turn) else "left"
        return min(int(self._cumulative.searchsorted(elapsed_ticks, side=side)) + 1, self.steps)

    def end_after(self, steps: int) -> None:
        """Drop the steps beyond the first `steps`, which have not begun."""
        if steps < self.steps:
            earlier = StepEnd(self._env, self.end_of(steps) - self._env.now, self.turn)
            self.end.replace_by(earlier)
            self.end, self.steps = earlier, steps


class Visit(StepEnd):
    """Fire at the end of a step of a segment that goes on, when the segment's own end would."""

    def __init__(self, env: Clock, segment: Segment, steps: int, call: Any) -> None:
        super().__init__(env, segment.end_of(steps) - env.now, segment.turn)
        assert self.callbacks is not None
        self.callbacks.append(lambda _event: call(segment, steps))


def call_at(env: simpy.Environment, time_s: float, call: Any, argument: Any) -> None:
    """Run ``call(argument)`` at an instant of simulated time."""
    timeout = env.timeout(time_s - env.now)
    assert timeout.callbacks is not None
    timeout.callbacks.append(lambda _event: call(argument))
