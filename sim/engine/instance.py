"""One engine instance on the clock: ask for a step, time it, wait, commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import simpy

from tonnage.sim.domain import FloatArray, Step
from tonnage.sim.engine.clock import Process, Segment
from tonnage.sim.engine.gaps import TokenGaps
from tonnage.sim.serving.scheduler import Outcome, Scheduler

_STEPS_MIN = 64  # of one segment
_STEPS_MAX = 4096


class Executor(Protocol):
    """Knows how long steps take: predicted by a cost model, or measured on real kernels."""

    def run(self, step: Step, max_steps: int) -> FloatArray:
        """Return the seconds of the step and its next repetitions, `[1..max_steps]`."""


class Instance:
    """Run a scheduler's steps one after the other in simulated time.

    A segment is a step repeated until the batch must change; whoever changes what the scheduler
    waits for calls `notify`, which ends the segment at the next step boundary.
    """

    def __init__(
        self,
        env: simpy.Environment,
        index: int,
        scheduler: Scheduler,
        executor: Executor,
        on_outcome: Callable[[Instance, Outcome], None],
        *,
        exact: bool,
    ) -> None:
        self.index = index
        self.scheduler = scheduler
        self.gaps = TokenGaps()
        self.busy_s = 0.0
        self.peak_decode_requests = 0
        self._env = env
        self._executor = executor
        self._on_outcome = on_outcome
        self._segment_steps = 1 if exact else _STEPS_MAX
        self._exact = exact
        self._idle: simpy.Event | None = None
        self._segment: Segment | None = None
        self._tokens_done = 0
        env.process(self._run())

    def notify(self) -> None:
        """Tell the instance that its scheduler has something new to consider."""
        if self._idle is not None:
            self._idle.succeed()
            self._idle = None
        elif self._segment is not None and self.scheduler.wants_interruption():
            self._segment.end_with_this_step()

    def decode_tokens_at_now(self) -> int:
        """Return the tokens decoded so far, the steps done of a running segment included."""
        if self._segment is None:
            return self._tokens_done
        return self._tokens_done + self._segment.steps_done() * self._segment.decode_requests

    def _run(self) -> Process:
        while True:
            planned = self.scheduler.next_step()
            if planned is None:
                self._idle = self._env.event()
                yield self._idle
                continue
            step, max_steps = planned
            for sequence in self.scheduler.take_started():
                sequence.prefill_start_s = self._env.now
            newcomers = self.scheduler.take_newcomers()
            limit = min(max_steps, self._segment_steps)
            durations_s = self._executor.run(step, limit)
            self._segment = segment = Segment(
                self._env, self.index, durations_s, step.decode_requests
            )
            yield segment.end  # or of the step in which `notify` came
            self._segment = None
            if not self._exact:  # so that a segment seldom computes many steps that are not run
                self._segment_steps = min(max(4 * segment.steps, _STEPS_MIN), _STEPS_MAX)
            self._count(segment, [sequence.first_token_s or 0.0 for sequence in newcomers])
            self._on_outcome(self, self.scheduler.commit(segment.steps))

    def _count(self, segment: Segment, newcomers_s: list[float]) -> None:
        self.busy_s += self._env.now - segment.start_s
        if segment.decode_requests:
            self._tokens_done += segment.decode_requests * segment.steps
            self.peak_decode_requests = max(self.peak_decode_requests, segment.decode_requests)
            self.gaps.record(segment, newcomers_s)
