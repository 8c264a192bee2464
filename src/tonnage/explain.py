"""Where the time of a step goes: one decode and one prefill step of each pool, by operator."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from tonnage.pools import BuiltPool
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.cost.operator_times import OperatorTime, interval_factors, total_s
from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.domain import BadInputError, PromptChunk, Step
from tonnage.sim.traffic.spec import TrafficSpec
from tonnage.step_times import StepTimes

_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class StepShape:
    """The step to explain: requests that decode, their context, the tokens of a prompt chunk."""

    requests: int
    context_tokens: int
    prompt_tokens: int

    def __post_init__(self) -> None:
        for name in ("requests", "context_tokens", "prompt_tokens"):
            if getattr(self, name) < 1:
                raise BadInputError(f"explain: {name} must be at least 1")


def explain_steps(
    pools: dict[Role, BuiltPool], times: dict[Role, StepTimes], shape: StepShape
) -> dict[str, dict[str, Any]]:
    """Return the steps of every pool by name, such as `decode` or `serve prefill`."""
    return {
        name: _explained(times[role].executor, pools[role], step)
        for name, (role, step) in steps_of(pools, shape).items()
    }


def steps_of(pools: dict[Role, BuiltPool], shape: StepShape) -> dict[str, tuple[Role, Step]]:
    """Return the steps to explain by name, each with the pool that runs it."""
    steps: dict[str, tuple[Role, Step]] = {}
    for role, pool in pools.items():
        if role != "prefill":
            name = "decode" if role == "decode" else f"{role} decode"
            steps[name] = role, _decode_step(pool, shape)
        if role != "decode":
            name = "prefill" if role == "prefill" else f"{role} prefill"
            steps[name] = role, _prefill_step(pool, shape)
    return steps


def add_rate_interval(
    figures: dict[str, Any], predictor: StepPredictor, traffic: TrafficSpec
) -> None:
    """Add to a resident point how far its rate may be off by the step times, in place.

    The step is that of the requests that were resident, at their mean context.
    """
    rate = figures["throughput"].get("decode_output_tokens_per_s")
    requests = figures.get("resident_requests")
    if not rate or not requests:
        return
    context = round(traffic.input_tokens.mean() + traffic.output_tokens.mean() / 2)
    contexts = np.full(requests, context, dtype=np.int64)
    low, high = interval_factors(predictor.times(Step(contexts, int(contexts.sum()), ())))
    if low < high:
        intervals = figures.setdefault("intervals", {})
        intervals["throughput.decode_output_tokens_per_s"] = [rate / high, rate / low]


def _decode_step(pool: BuiltPool, shape: StepShape) -> Step:
    contexts = np.full(shape.requests, shape.context_tokens, dtype=np.int64)
    speculation = pool.spec.speculation
    query_tokens = 1 if speculation is None else speculation.query_tokens
    return Step(contexts, int(contexts.sum()), (), query_tokens=query_tokens)


def _prefill_step(pool: BuiltPool, shape: StepShape) -> Step:
    tokens = min(shape.prompt_tokens, pool.spec.chunk_tokens)
    return Step(_NONE, 0, (PromptChunk(tokens, 0),))


def _explained(predictor: StepPredictor, pool: BuiltPool, step: Step) -> dict[str, Any]:
    times = predictor.times(step)
    seconds = total_s(times)
    low, high = interval_factors(times)
    return {
        "gpu": pool.gpu.name,
        "requests": step.decode_requests,
        "context_tokens": int(step.decode_context_tokens[0]) if step.decode_requests else None,
        "prompt_tokens": sum(chunk.new_tokens for chunk in step.prefill_chunks) or None,
        "seconds": seconds,
        "interval_s": [seconds * low, seconds * high],
        "roofline_s": sum(one.roofline_s for one in times),
        "operators": [operator_row(one, seconds) for one in _by_name(times)],
    }


def _by_name(times: list[OperatorTime]) -> list[OperatorTime]:
    """Join operators of one name and source; the longest first."""
    groups: defaultdict[tuple[str, str, bool], list[OperatorTime]] = defaultdict(list)
    for one in times:
        groups[one.name, one.source, one.inside].append(one)
    joined = [
        OperatorTime(
            name,
            total_s(group),
            sum(one.low_s for one in group),
            sum(one.high_s for one in group),
            sum(one.roofline_s for one in group),
            group[0].source,
            inside,
            sum(one.hidden_s for one in group),
        )
        for (name, _, inside), group in groups.items()
    ]
    return sorted(joined, key=lambda one: -one.seconds)


def operator_row(time: OperatorTime, step_s: float) -> dict[str, Any]:
    """Return the JSON object of one operator of a step that takes so long."""
    return {
        "operator": time.name,
        "seconds": time.seconds,
        "share": time.seconds / step_s if step_s else 0.0,
        "interval_s": [time.low_s, time.high_s],
        "roofline_s": time.roofline_s,
        "hidden_s": time.hidden_s,
        "source": time.source,
        "inside_measured_range": time.inside,
    }
