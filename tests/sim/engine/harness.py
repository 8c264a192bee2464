"""Small deployments with made-up step times, for tests of the engine apart from any cost model."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tonnage.sim.domain import FloatArray, LinkSpec, Request, Step
from tonnage.sim.engine.fleet import Deployment, PoolPlan
from tonnage.sim.serving.scheduler import Limits


@dataclass(frozen=True)
class AffineTimes:
    """Steps that cost a constant, so much per sequence, per token read and per prompt token."""

    base_s: float = 0.01
    per_sequence_s: float = 1e-4
    per_context_token_s: float = 1e-8
    per_prompt_token_s: float = 1e-5

    def run(self, step: Step, max_steps: int) -> FloatArray:
        sequences = step.decode_requests
        seconds = self.base_s + self.per_sequence_s * sequences
        seconds += self.per_prompt_token_s * sum(chunk.new_tokens for chunk in step.prefill_chunks)
        read = step.decode_context_sum + sequences * np.arange(float(max_steps))
        return seconds + self.per_context_token_s * read


def colocated(
    instances: int = 1,
    *,
    times: AffineTimes | None = None,
    kv_tokens: int = 1_000_000,
    page_tokens: int = 1,
    chunk_tokens: int = 8192,
    running: int = 512,
    mixed: bool = False,
    router: str = "round_robin",
) -> Deployment:
    plan = PoolPlan(
        "serve",
        instances,
        kv_tokens,
        kv_tokens,
        page_tokens,
        Limits(chunk_tokens, running),
        times or AffineTimes(),
        mixed,
    )
    return Deployment({"serve": plan}, router, None, None)


def disaggregated(
    prefills: int = 1,
    decodes: int = 1,
    *,
    times: AffineTimes | None = None,
    kv_tokens: int = 1_000_000,
    page_tokens: int = 1,
    chunk_tokens: int = 8192,
    running: int = 512,
    bandwidth_bytes_per_s: float = 50e9,
    router: str = "round_robin",
) -> Deployment:
    limits = Limits(chunk_tokens, running)
    executor = times or AffineTimes()
    longest = kv_tokens
    plans = {
        "prefill": PoolPlan("prefill", prefills, kv_tokens, longest, page_tokens, limits, executor),
        "decode": PoolPlan("decode", decodes, kv_tokens, longest, page_tokens, limits, executor),
    }
    link = LinkSpec("rdma", bandwidth_bytes_per_s, 1e-4)
    return Deployment(plans, router, link, lambda tokens: 70_272.0 * tokens)


def poisson_requests(
    count: int, rate_per_s: float, input_tokens: int, output_tokens: int, seed: int = 0
) -> list[Request]:
    gaps = np.random.default_rng(seed).exponential(1 / rate_per_s, count)
    return [
        Request(number, float(time_s), input_tokens, output_tokens)
        for number, time_s in enumerate(np.cumsum(gaps))
    ]
