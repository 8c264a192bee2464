"""A large fleet seen through a part of it: equal instances, or equal ranks, do the same on average.

Thousands of users on one instance of many attention-DP ranks cost minutes to simulate. With `k`
times fewer ranks (or instances) and users, each rank meets the same load; its steps are timed as
those of the whole instance, every rank of the part standing for `k`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tonnage.sim.domain import FloatArray, Step
from tonnage.sim.engine.fleet import Deployment, PoolPlan
from tonnage.sim.engine.instance import Executor

USERS_LEAST = 128  # of a cell: queues of fewer are not those of the whole


@dataclass(frozen=True, slots=True)
class CellExecutor:
    """Times the steps of an instance of which a part of the ranks is simulated."""

    whole: Executor
    copies: int

    def run(self, step: Step, max_steps: int) -> FloatArray:
        """Return the seconds of the step and its next repetitions, on all ranks."""
        return self.whole.run(repeated(step, self.copies), max_steps)


def repeated(step: Step, copies: int) -> Step:
    """Return a step with every rank, or the only one, so many times."""
    ranks = step.ranks or (step,)
    growth = step.decode_context_growth
    return Step(
        np.tile(step.decode_context_tokens, copies),
        step.decode_context_sum * copies,
        step.prefill_chunks * copies,
        None if growth is None else growth * copies,
        step.query_tokens,
        ranks * copies,
    )


def cell_of(deployment: Deployment, users: int) -> tuple[Deployment, int]:
    """Return a part of a deployment, and the users that it has: all of it where it is small."""
    copies = _copies(deployment, users)
    if copies == 1:
        return deployment, users
    pools = {role: _part(plan, copies) for role, plan in deployment.pools.items()}
    handoff = deployment.handoff
    if handoff is not None:
        handoff = replace(
            handoff,
            sender_ranks=pools["prefill"].scheduling.ranks,
            receiver_ranks=pools["decode"].scheduling.ranks,
        )
    return replace(deployment, pools=pools, handoff=handoff), round(users / copies)


def _copies(deployment: Deployment, users: int) -> int:
    most = users // USERS_LEAST
    return max(
        (
            copies
            for copies in range(1, most + 1)
            if all(_divides(plan, copies) for plan in deployment.pools.values())
        ),
        default=1,
    )


def _divides(plan: PoolPlan, copies: int) -> bool:
    return plan.instances % copies == 0 or _ranks_divide(plan, copies)


def _ranks_divide(plan: PoolPlan, copies: int) -> bool:
    return plan.scheduling.ranks % copies == 0 and plan.scheduling.stages == 1


def _part(plan: PoolPlan, copies: int) -> PoolPlan:
    if plan.instances % copies == 0:
        return replace(plan, instances=plan.instances // copies)
    spec = plan.scheduling
    running = spec.limits.max_running_requests // copies
    part = replace(
        spec,
        ranks=spec.ranks // copies,
        kv_tokens=spec.kv_tokens // copies,
        limits=replace(spec.limits, max_running_requests=running),
    )
    return replace(plan, scheduling=part, executor=CellExecutor(plan.executor, copies))
