"""Serving runs as samples of a fit: what was measured, and what kernels alone come to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

import numpy as np

from tonnage.scenarios.catalogue import load_gpu, load_model
from tonnage.scenarios.engine_terms import generation_of
from tonnage.scenarios.serving_rows import ServingRow
from tonnage.scenarios.serving_runs import Run
from tonnage.sim.cost.engine_terms import attention_kind
from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.domain import PromptChunk, Step
from tonnage.validate_latency import Predicted, deployment_for, simulated

_NO_CONTEXTS = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Kernels:
    """What a run comes to with kernels alone.

    `simulated`: its mean latencies. `decode_s`: of one decode step by operator family; `prompt_s`:
    of computing one prompt. `prompts_per_step`: that are computed between two steps of a pool that
    does both, 0 where another does. `batch`: requests of a rank that decode. `launches`: kernels of
    a pass that is not captured.
    """

    simulated: Predicted
    decode_s: dict[str, float]
    prompt_s: dict[str, float]
    prompts_per_step: float
    batch: float
    launches: int = 0

    @property
    def step_s(self) -> float:
        """A decode step and its share of prompts, as the families add up."""
        prompts_s = self.prompts_per_step * sum(self.prompt_s.values())
        return sum(self.decode_s.values()) + prompts_s


@dataclass(frozen=True, slots=True)
class Sample:
    """One row: its run, generation of GPU and kind of attention, and what kernels come to."""

    row: ServingRow
    run: Run
    generation: str
    kernels: Kernels
    attention: str = "gqa"

    @property
    def configuration(self) -> str:
        """What a fold holds out as a whole: everything but the load."""
        return repr(self.run.setup)

    @property
    def drafts(self) -> int:
        """Draft tokens of the pool that generates."""
        return self.run.setup.pools[-1].draft_tokens


def kernels_of(run: Run) -> Kernels | str:
    """Simulate a run with kernels alone; or return why it cannot be."""
    alone, deployment = simulated(run, "none"), deployment_for(run.setup, "none")
    if isinstance(alone, str) or isinstance(deployment, str):
        return alone if isinstance(alone, str) else str(deployment)
    pools = deployment.pools
    together = "serve" in pools
    generating, computing = (
        pools["serve" if together else "decode"],
        pools["serve" if together else "prefill"],
    )
    inputs, outputs = run.input_tokens.mean(), run.output_tokens.mean()
    share = 1.0
    if not together:
        decoding_s = outputs * alone.tpot_s
        share = decoding_s / (alone.ttft_s + decoding_s)
    requests = max(1, round(run.concurrency / generating.instances * share))
    contexts = np.full(requests, int(inputs + outputs / 2), dtype=np.int64)
    speculation = generating.scheduling.speculation
    queries = 1 if speculation is None else speculation.query_tokens
    step = Step(contexts, float(contexts.sum()), (), None, queries)
    prompt = Step(_NO_CONTEXTS, 0.0, (PromptChunk(int(inputs), 0),))
    per_step = max(requests - 1, 0) / outputs if together else 0.0
    return Kernels(
        alone,
        _by_family(generating.executor, step),
        _by_family(computing.executor, prompt),
        per_step,
        requests / generating.scheduling.ranks,
        getattr(computing.executor, "launches", 0),
    )


def samples_of(rows: Iterable[tuple[ServingRow, Run, Kernels]]) -> list[Sample]:
    """Return the samples of rows whose kernels are known."""
    return [
        Sample(
            row,
            run,
            generation_of(load_gpu(run.setup.gpu)),
            kernels,
            attention_kind(load_model(run.setup.model)),
        )
        for row, run, kernels in rows
    ]


def _by_family(executor: object, step: Step) -> dict[str, float]:
    predictor = cast(StepPredictor, executor)  # a run's executors predict, none measures
    found: dict[str, float] = {}
    for one in predictor.times(step):
        name = one.family or one.name
        found[name] = found.get(name, 0.0) + one.seconds
    return found
