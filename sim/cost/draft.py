"""Seconds of a speculating step: the target's verification pass and the passes of the draft."""

from __future__ import annotations

from dataclasses import replace

from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.cost.roofline import RooflineExecutor
from tonnage.sim.domain import FloatArray, GpuSpec, ModelSpec, ParallelLayout, Step
from tonnage.sim.model.draft import DraftSpec, draft_layout


class SpeculatingExecutor:
    """A target and its draft, one after the other on the same GPUs.

    A step with q query tokens has q - 1 draft passes: the first over all tokens that the target has
    computed, prompts included, so that the draft's KV follows; each later one over one token per
    decoding request. Every pass reads the draft's own weights, KV and head.
    """

    def __init__(self, target: RooflineExecutor, passes: tuple[RooflineExecutor, ...]) -> None:
        self._target = target
        self._passes = passes  # the last of them runs all later passes too

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
    model: ModelSpec,
    layout: ParallelLayout,
    gpu: GpuSpec,
    kv_format: str,
    engine: str,
    captured_sizes: tuple[int, ...] = (),
    draft: DraftSpec | None = None,
) -> RooflineExecutor | SpeculatingExecutor:
    """Return what predicts the steps of a pool; a draft that costs nothing is None."""
    target = RooflineExecutor(model, layout, gpu, kv_format, engine, captured_sizes)
    if draft is None:
        return target
    alone = draft_layout(draft.held, layout)
    passes = (
        RooflineExecutor(one, alone, gpu, kv_format, engine, captured_sizes) for one in draft.passes
    )
    return SpeculatingExecutor(target, tuple(passes))


def _one_token(step: Step) -> Step:
    """Return the decoding part of a step with one token per request."""
    ranks = tuple(replace(rank, prefill_chunks=(), query_tokens=1) for rank in step.ranks)
    return replace(step, prefill_chunks=(), query_tokens=1, ranks=ranks)
