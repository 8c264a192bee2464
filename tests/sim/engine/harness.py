"""Small deployments with made-up step times, for tests of the engine apart from any cost model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

import numpy as np

from tonnage.sim.domain import FloatArray, LinkSpec, Request, SpeculationSpec, Step
from tonnage.sim.engine.fleet import Deployment, PoolPlan
from tonnage.sim.engine.handoff import Handoff
from tonnage.sim.engine.instance import Executor
from tonnage.sim.serving.build import SchedulerSpec
from tonnage.sim.serving.policy import PLAIN, Policy
from tonnage.sim.serving.prefix_cache import CacheSpec
from tonnage.sim.serving.router import PolicyName, RoutingSpec
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
        growth = step.decode_context_growth
        seconds = self.base_s + self.per_sequence_s * sequences
        seconds += self.per_prompt_token_s * sum(chunk.new_tokens for chunk in step.prefill_chunks)
        seconds += self.per_sequence_s * sequences * (step.query_tokens - 1)
        growth = sequences if growth is None else growth
        read = step.decode_context_sum + growth * np.arange(float(max_steps))
        return seconds + self.per_context_token_s * read


def colocated(
    instances: int = 1,
    *,
    times: Executor | None = None,
    kv_tokens: int = 1_000_000,
    page_tokens: int = 1,
    chunk_tokens: int = 8192,
    running: int = 512,
    mixed: bool = False,
    router: PolicyName = "round_robin",
    policy: Policy = PLAIN,
    ranks: int = 1,
    stages: int = 1,
    speculation: SpeculationSpec | None = None,
    cache: CacheSpec | None = None,
) -> Deployment:
    scheduling = SchedulerSpec(
        kv_tokens,
        page_tokens,
        Limits(chunk_tokens, running),
        replace(policy, mixed=mixed or policy.mixed),
        ranks=ranks,
        stages=stages,
        speculation=speculation,
        cache=cache,
    )
    plan = PoolPlan("serve", instances, scheduling, kv_tokens // ranks, times or AffineTimes())
    return Deployment({"serve": plan}, RoutingSpec(router))


def disaggregated(
    prefills: int = 1,
    decodes: int = 1,
    *,
    times: Executor | None = None,
    kv_tokens: int = 1_000_000,
    page_tokens: int = 1,
    chunk_tokens: int = 8192,
    running: int = 512,
    bandwidth_bytes_per_s: float = 50e9,
    router: PolicyName = "round_robin",
    policy: Policy = PLAIN,
    ranks: int = 1,
    stages: int = 1,
    speculation: SpeculationSpec | None = None,
    restore_s_per_token: float = 0.0,
    cache: CacheSpec | None = None,
) -> Deployment:
    scheduling = SchedulerSpec(
        kv_tokens,
        page_tokens,
        Limits(chunk_tokens, running),
        policy,
        ranks=ranks,
        stages=stages,
        speculation=speculation,
        cache=cache,
    )
    executor, longest = times or AffineTimes(), kv_tokens // ranks
    plans = {
        "prefill": PoolPlan("prefill", prefills, scheduling, longest, executor),
        "decode": PoolPlan(
            "decode",
            decodes,
            scheduling,
            longest,
            executor,
            restore_s=lambda tokens: tokens * restore_s_per_token,
        ),
    }
    link = LinkSpec("rdma", bandwidth_bytes_per_s, 1e-4)
    handoff = Handoff(link, lambda tokens: 70_272.0 * tokens)
    return Deployment(plans, RoutingSpec(router), handoff)


def with_shared_prefixes(
    requests: list[Request], block_tokens: int, seed: int = 0, answers: bool = True
) -> list[Request]:
    """Give requests block ids of which many begin alike; `answers`: those of the answer too."""
    rng = Random(seed)
    shared = []
    for request in requests:
        tokens = request.total_tokens if answers else request.input_tokens
        path: tuple[int, ...] = ()
        for _ in range(-(-tokens // block_tokens)):
            path = (*path, 2 * (path[-1] if path else 1) + (rng.random() < 0.1))
        shared.append(replace(request, block_ids=path, block_tokens=block_tokens))
    return shared


def poisson_requests(
    count: int, rate_per_s: float, input_tokens: int, output_tokens: int, seed: int = 0
) -> list[Request]:
    gaps = np.random.default_rng(seed).exponential(1 / rate_per_s, count)
    return [
        Request(number, float(time_s), input_tokens, output_tokens)
        for number, time_s in enumerate(np.cumsum(gaps))
    ]
