"""One engine instance on the clock: ask for a step, time it, wait, commit."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Protocol

import numpy as np
import simpy

from tonnage.sim.domain import FloatArray, Step
from tonnage.sim.engine.clock import TICK_S, Clock, Process, Segment, Visit, call_at, on_grid
from tonnage.sim.engine.gaps import TokenGaps
from tonnage.sim.results.sketch import QuantileSketch
from tonnage.sim.results.timeline import Timeline
from tonnage.sim.serving.plan import Lane, Outcome, Plan, Scheduler
from tonnage.sim.serving.sequence import Sequence

_STEPS_MIN = 64  # of one segment
_STEPS_MAX = 4096
_LANES_MOST = 64
_NO_TIMES: FloatArray = np.zeros(0)


class Executor(Protocol):
    """Knows how long steps take: predicted by a cost model, or measured on real kernels."""

    def run(self, step: Step, max_steps: int) -> FloatArray:
        """Return the seconds of the step and its next repetitions, `[1..max_steps]`."""


class Listener(Protocol):
    """Whoever must know what instances decide and what their steps have changed."""

    def planned(self, instance: Instance, plan: Plan) -> None:
        """Take in a plan that moved sequences."""

    def committed(self, instance: Instance, outcome: Outcome) -> None:
        """Take in what a step changed."""


class Watched(Protocol):
    """What looks after the pages of one instance."""

    def start(self, instance: Instance) -> None:
        """Look after the pages of its scheduler, which is new."""

    def stepped(self, plan: Plan, steps: int) -> None:
        """Take in that the step of a plan was done `steps` times."""


class Instance:
    """Run a scheduler's steps one after the other in simulated time.

    A segment is a step repeated until the batch must change; whoever changes what the scheduler
    waits for calls `notify`, which ends the segment when the scheduler would look. With pipeline
    stages, the micro-batches enter the first stage one after the other, a single step each.
    """

    def __init__(
        self,
        env: Clock,
        index: int,
        scheduler: Scheduler,
        executor: Executor,
        listener: Listener,
        *,
        exact: bool,
        timeline: Timeline | None = None,
        load_s: Callable[[int], float] | None = None,
        watched: Watched | None = None,
    ) -> None:
        """Start the instance's processes; `index` is unique in the deployment.

        `load_s`: seconds that the KV of so many tokens takes from host memory. `watched`: what
        looks after its pages.
        """
        self.index = index
        self.scheduler = scheduler
        self.busy_s = 0.0
        self.peak_decode_requests = 0
        self._env = env
        self._executor = executor
        self._listener = listener
        self._exact = exact
        self._timeline = timeline
        self._load_s = load_s
        self._watched = watched
        self._idle: list[simpy.Event] = []
        self._tokens_done = 0.0
        self._lane: Lane = scheduler.lanes[0]
        self._segment: Segment | None = None
        self._plan = Plan()  # of the segment
        self._pipeline: Pipeline | None = None
        self._crashes = 0
        self._tokens_per_step = 0.0
        self._visit_after = 0  # steps of the segment; 0: nothing will be decided meanwhile
        self._token_gaps = [[TokenGaps()] for _ in scheduler.lanes]  # by lane, attention-DP rank
        self.start(scheduler)

    def start(self, scheduler: Scheduler) -> None:
        """Run the steps of an idle scheduler from now on, after a crash a new one's."""
        self.scheduler = scheduler
        self._lane = scheduler.lanes[0]
        if self._watched is not None:
            self._watched.start(self)
        if len(scheduler.lanes) == 1:
            self._env.process(self._run())
        else:
            self._pipeline = pipeline = Pipeline(self._env, len(scheduler.lanes))
            for number in range(len(scheduler.lanes)):
                self._env.process(self._run_in_pipeline(number, pipeline))

    def stop(self) -> None:
        """Stop at once, as a crash does: steps that have ended count, one under way is lost."""
        self._crashes += 1
        self._idle, self._pipeline = [], None
        segment, self._segment = self._segment, None
        if segment is None:
            return
        segment.end.callbacks = []  # whoever waited for it does not go on
        self.busy_s += self._env.now - segment.start_s
        segment.steps = segment.steps_done()
        if segment.steps:
            self._commit(0, self._plan, segment)

    def last_token_s(self) -> float:
        """Return when the sequences that decode here got their last token."""
        return max(gaps.last_token_s for gaps in chain.from_iterable(self._token_gaps))

    def lead(self) -> int:
        """Return how many steps of the segment under way have begun; 0 when there is none."""
        return 0 if self._segment is None else self._segment.steps_begun()

    def notify(self) -> None:
        """Tell the instance that its scheduler has something new to consider."""
        if self._idle:
            idle, self._idle = self._idle, []
            for event in idle:
                event.succeed()
        elif self._segment is not None:
            lead = self._segment.steps_begun()
            steps = self._lane.interruption_after(lead)
            if steps is not None:
                self._segment.end_after(steps)
            self._plan_visit(self._segment, lead)

    def _plan_visit(self, segment: Segment, lead: int) -> None:
        """See to it that what can be decided while the segment goes on is decided."""
        steps = self._lane.visit_after(lead)
        if steps is None or steps >= segment.steps or self._visit_after in range(1, steps + 1):
            return
        self._visit_after = steps
        Visit(self._env, segment, steps, self._visit)

    def _visit(self, segment: Segment, steps: int) -> None:
        if self._segment is not segment or steps >= segment.steps or steps != self._visit_after:
            return
        self._visit_after = 0
        self._env.take_turn(segment.turn)
        plan = self._lane.visit(steps)
        segment.end_after(max(plan.max_steps, steps))
        if plan.moved:
            self._listener.planned(self, plan)
        self._plan_visit(segment, steps + 1)

    def token_gaps(self) -> QuantileSketch:
        """Return the gaps between tokens of all batches."""
        joint = QuantileSketch()
        for gaps in chain.from_iterable(self._token_gaps):
            joint.merge(gaps.sketch)
        return joint

    def add_gap(self, gap_s: float) -> None:
        """Add the gap of a sequence whose next token came with its prompt computed again."""
        self._token_gaps[0][0].add_one(gap_s)

    def decode_tokens_at_now(self) -> float:
        """Return the tokens decoded so far, the steps done of a running segment included."""
        if self._segment is None:
            return self._tokens_done
        return self._tokens_done + self._segment.steps_done() * self._tokens_per_step

    # --- one batch ------------------------------------------------------------------------------

    def _run(self) -> Process:
        lane, env, turn = self._lane, self._env, self.index * _LANES_MOST
        segment_steps = 1 if self._exact else _STEPS_MAX
        version, left_s = -1, _NO_TIMES  # of the last decode batch, the steps not run
        life = self._crashes
        while True:
            plan = self._next_plan(0)
            if plan.step is None:
                if plan.failed or plan.dropped:
                    continue  # their users may have sent the next ones, which nobody woke us for
                yield self._wait()
                if self._crashes != life:  # woken at the very instant of the crash
                    return
                continue
            limit = min(plan.max_steps, segment_steps)
            if plan.step.prefill_chunks:
                durations_s = self._with_loads(plan, self._executor.run(plan.step, limit))
                version = -1
            elif plan.batch_version == version and len(left_s) >= limit:
                durations_s = left_s  # the same batch goes on
            else:
                ahead = 0 if self._exact else lane.lag_steps
                durations_s = self._executor.run(plan.step, limit + ahead)
                version = plan.batch_version
            segment = Segment(env, turn, durations_s[:limit])
            self._segment, self._tokens_per_step = segment, plan.tokens_per_step
            self._plan, self._visit_after = plan, 0
            if segment.steps > 1:
                self._plan_visit(segment, 1)
            yield segment.end  # or of the step in which `notify` came
            env.take_turn(turn)
            self._segment = None
            left_s = durations_s[segment.steps :]
            if not self._exact:  # so that a segment seldom computes many steps that are not run
                segment_steps = min(max(4 * segment.steps, _STEPS_MIN), _STEPS_MAX)
            self.busy_s += env.now - segment.start_s
            self._commit(0, plan, segment)

    def _with_loads(self, plan: Plan, durations_s: FloatArray) -> FloatArray:
        """Let a step last as long as the KV that it needs comes from the host, layer by layer."""
        if not plan.load_tokens or self._load_s is None:
            return durations_s
        return np.maximum(durations_s, self._load_s(plan.load_tokens))

    def _next_plan(self, number: int) -> Plan:
        plan = self.scheduler.lanes[number].next_step()
        for sequence in plan.started:
            if sequence.prefill_start_s is None:
                sequence.prefill_start_s = self._env.now
        if plan.retracted:
            self._note_last_tokens(number, plan)
        if plan.moved or plan.started:
            self._listener.planned(self, plan)
        return plan

    def _note_last_tokens(self, number: int, plan: Plan) -> None:
        """Note when those that are retracted got their last token: with their batch, or before."""
        for rank, part in enumerate(plan.ranks or (plan,)):
            for sequence in part.retracted:
                if sequence.last_token_s is None:
                    sequence.last_token_s = self._gaps_of(number, rank).last_token_s

    def _wait(self) -> simpy.Event:
        event = self._env.event()
        self._idle.append(event)
        return event

    def _gaps_of(self, number: int, rank: int) -> TokenGaps:
        of_lane = self._token_gaps[number]
        while len(of_lane) <= rank:
            of_lane.append(TokenGaps())
        return of_lane[rank]

    def _commit(self, number: int, plan: Plan, segment: Segment) -> None:
        if plan.decoding:
            self._tokens_done += plan.tokens_per_step * segment.steps
            self.peak_decode_requests = max(self.peak_decode_requests, plan.decoding)
            for rank, part in enumerate(plan.ranks or (plan,)):
                if part.decoding:
                    newcomers_s = [_take_last_token_s(one) for one in part.newcomers]
                    self._gaps_of(number, rank).record(segment, part.decoding, newcomers_s)
        if self._timeline is not None:
            self._draw(plan, segment)
        if self._watched is not None:
            self._watched.stepped(plan, segment.steps)
        outcome = self.scheduler.lanes[number].commit(segment.steps)
        if outcome.tokens_together:
            self._token_gaps[number][0].add_together(outcome.tokens_together)
        if outcome.prefilled or outcome.finished or outcome.dropped or outcome.parts:
            self._listener.committed(self, outcome)

    def _draw(self, plan: Plan, segment: Segment) -> None:
        assert self._timeline is not None
        assert plan.step is not None
        chunks = plan.step.prefill_chunks
        self._timeline.add(
            self.index,
            segment.start_s,
            self._env.now,
            segment.steps,
            plan.decoding,
            len(chunks),
            sum(chunk.new_tokens for chunk in chunks),
            self.scheduler.waiting_requests(),
            self.scheduler.used_pages(),
        )

    # --- micro-batches in a pipeline ------------------------------------------------------------

    def _run_in_pipeline(self, number: int, pipeline: Pipeline) -> Process:
        env, turn = self._env, self.index * _LANES_MOST + number
        while True:
            place = pipeline.first_stage.request()
            yield place
            if self._pipeline is not pipeline:  # it has crashed
                return
            plan = self._next_plan(number)
            if plan.step is None:
                pipeline.first_stage.release(place)
                if not (plan.failed or plan.dropped):
                    yield self._wait()
                continue
            pass_s = float(self._with_loads(plan, self._executor.run(plan.step, 1))[0])
            leaves_first_s, ends_s = pipeline.enter(pass_s)
            call_at(env, leaves_first_s, pipeline.first_stage.release, place)
            segment = Segment(env, turn, np.array([ends_s - env.now]))
            yield segment.end
            if self._pipeline is not pipeline:
                return
            env.take_turn(turn)
            self.busy_s += on_grid(pass_s / pipeline.stages)
            self._commit(number, plan, segment)
            self.notify()  # what this step freed may be what an idle lane waits for


def _take_last_token_s(sequence: Sequence) -> float:
    """Return when a sequence that joins got its last token; from now on its batch knows."""
    last_s, sequence.last_token_s = sequence.last_token_s, None
    return 0.0 if last_s is None else last_s


class Pipeline:
    """Stages of equal speed that micro-batches pass in order, each stage one at a time."""

    def __init__(self, env: Clock, stages: int) -> None:
        """Make an empty pipeline."""
        self.stages = stages
        self.first_stage = simpy.Resource(env, capacity=1)
        self._env = env
        self._free_at_s = [0.0] * stages

    def enter(self, pass_s: float) -> tuple[float, float]:
        """Let a micro-batch in whose pass takes that long; return when it leaves first and last.

        It waits before a stage until the micro-batch ahead has left it.
        """
        stage_s = max(on_grid(pass_s / self.stages), TICK_S)
        at_s = self._env.now
        for stage in range(self.stages):
            at_s = max(at_s, self._free_at_s[stage]) + stage_s
            self._free_at_s[stage] = at_s
        return self._free_at_s[0], at_s
