"""Seconds of a speculating step: the target's verification pass and the passes of the draft."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.domain import FloatArray, ModelSpec, ParallelLayout, Step
from tonnage.sim.model.draft import DraftSpec, draft_layout


class SpeculatingExecutor:
    """A target and its draft, one after the other on the same GPUs.

    A step with q query tokens has q - 1 draft passes: the first over all tokens that the target has
    computed, prompts included, so that the draft's KV follows; each later one over one token per
    decoding request. Every pass reads the draft's own weights, KV and head.
    """

    def __init__(self, target: StepPredictor, passes: tuple[StepPredictor, ...]) -> None:
        self._target = target
        self._passes = passes  # the last of them runs all later passes too

    @property
    def launches(self) -> int:
        """Return the kernels of a pass of the target that is not captured."""
        return int(getattr(self._target, "launches", 0))

    def run(self, step: Step, max_steps: int) -> FloatArray:
        """Return the seconds of the step and its next repetitions `[max_steps]`."""
        seconds = self._target.run(step, max_steps)
        drafted = step.query_tokens - 1
        if not drafted and not step.prefill_chunks:
            return seconds
        seconds += self._passes[0].run(step, max_steps)
        if drafted < 2 or not step.decode_requests:
            return seconds
        single = _one_token(step)
        for executor in self._passes[1:drafted]:
            seconds += executor.run(single, max_steps)
        repeated = drafted - len(self._passes)
        if repeated > 0:
            seconds += repeated * self._passes[-1].run(single, max_steps)
        return seconds

    def times(self, step: Step) -> list[OperatorTime]:
        """Return every operator of one step, those of the draft by that name."""
        found = self._target.times(step)
        drafted = step.query_tokens - 1
        if drafted or step.prefill_chunks:
            found += _drafts(self._passes[0].times(step), 1)
        if drafted < 2 or not step.decode_requests:
            return found
        single = _one_token(step)
        for executor in self._passes[1:drafted]:
            found += _drafts(executor.times(single), 1)
        repeated = drafted - len(self._passes)
        if repeated > 0:
            found += _drafts(self._passes[-1].times(single), repeated)
        return found


def _drafts(times: list[OperatorTime], passes: int) -> list[OperatorTime]:
    return [replace(one.scaled(passes), name=f"draft.{one.name}") for one in times]


def step_executor(
    make: Callable[[ModelSpec, ParallelLayout], StepPredictor],
    model: ModelSpec,
    layout: ParallelLayout,
    draft: DraftSpec | None = None,
) -> StepPredictor:
    """Return what predicts the steps of a pool; a draft that costs nothing is None.

    `make` returns what predicts the steps of one model alone.
    """
    target = make(model, layout)
    if draft is None:
        return target
    alone = draft_layout(draft.held, layout)
    return SpeculatingExecutor(target, tuple(make(one, alone) for one in draft.passes))


def _one_token(step: Step) -> Step:
    """Return the decoding part of a step with one token per request."""
    ranks = tuple(replace(rank, prefill_chunks=(), query_tokens=1) for rank in step.ranks)
    return replace(step, prefill_chunks=(), query_tokens=1, ranks=ranks)
