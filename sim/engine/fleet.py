"""A deployment's instances wired together: what happens to a request, milestone by milestone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import simpy

from tonnage.sim.domain import LinkSpec
from tonnage.sim.engine.instance import Executor, Instance
from tonnage.sim.engine.network import Link
from tonnage.sim.serving.pages import PagePool
from tonnage.sim.serving.router import Router
from tonnage.sim.serving.scheduler import (
    DecodeScheduler,
    Limits,
    Outcome,
    PrefillScheduler,
    ServeScheduler,
)
from tonnage.sim.serving.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """What the engine needs to know of one pool of identical instances."""

    role: str
    instances: int
    kv_tokens: int  # of one instance
    longest_request_tokens: int  # what the rank that serves a request, or the model, can hold
    page_tokens: int
    limits: Limits
    executor: Executor
    mixed: bool = False  # serve pools: prompt chunks and tokens in one step
    extra_tokens: int = 0  # of every request, whatever its length (windows, states)

    def page_pool(self) -> PagePool:
        """Return the empty KV memory of one instance."""
        return PagePool(self.kv_tokens, self.page_tokens, self.extra_tokens)


@dataclass(frozen=True, slots=True)
class Deployment:
    """Pools by role (`serve`; `prefill` and `decode`; or `decode` alone), router and link."""

    pools: dict[str, PoolPlan]
    router_policy: str
    link: LinkSpec | None
    wire_bytes_per_gpu: Callable[[int], float] | None  # of the KV of so many tokens


class Fleet(Protocol):
    """Takes requests; reports each one that ends, served or rejected."""

    instances: dict[str, list[Instance]]

    def arrive(self, sequence: Sequence) -> None:
        """Take a request at the present instant."""


OnEnd = Callable[[Sequence], None]


def reject_if_too_long(sequence: Sequence, plan: PoolPlan, pool: PagePool, tokens: int) -> bool:
    """Mark a sequence that not even an empty instance could hold."""
    if tokens <= plan.longest_request_tokens and pool.could_ever_hold(tokens):
        return False
    held = min(plan.longest_request_tokens, pool.capacity_pages * pool.page_tokens)
    sequence.rejected = f"{tokens} tokens of KV; a {plan.role} instance holds {held} of one request"
    return True


class ColocatedFleet:
    """Instances that do both phases."""

    def __init__(
        self,
        env: simpy.Environment,
        deployment: Deployment,
        seed: int,
        on_end: OnEnd,
        *,
        exact: bool,
    ) -> None:
        self._plan = plan = deployment.pools["serve"]
        self._env = env
        self._on_end = on_end
        self._schedulers = [
            ServeScheduler(plan.page_pool(), plan.limits, mixed=plan.mixed)
            for _ in range(plan.instances)
        ]
        self._router = Router(
            deployment.router_policy, plan.instances, np.random.default_rng([seed, 0])
        )
        self.instances = {
            "serve": [
                Instance(env, index, scheduler, plan.executor, self._outcome, exact=exact)
                for index, scheduler in enumerate(self._schedulers)
            ]
        }

    def arrive(self, sequence: Sequence) -> None:
        """Route a request and queue it."""
        request = sequence.request
        if reject_if_too_long(sequence, self._plan, self._schedulers[0].pool, request.total_tokens):
            self._on_end(sequence)
            return
        index = self._router.assign(request.input_tokens)
        sequence.prefill_instance = sequence.decode_instance = index
        self._schedulers[index].add(sequence)
        self.instances["serve"][index].notify()

    def _outcome(self, instance: Instance, outcome: Outcome) -> None:
        for sequence in outcome.prefilled:
            sequence.prefill_end_s = sequence.first_token_s = self._env.now
        for sequence in outcome.finished:
            sequence.finish_s = self._env.now
            self._router.done(instance.index, sequence.request.input_tokens)
            self._on_end(sequence)


class DisaggregatedFleet:
    """Prefill instances, links, decode instances.

    A request gets both instances at arrival; after its prompt it waits for pages at the decode
    instance, then its KV travels while the prefill pages stay held, then it decodes. Its first
    token reaches the client from the decode instance, when the KV has arrived.
    """

    def __init__(
        self,
        env: simpy.Environment,
        deployment: Deployment,
        seed: int,
        on_end: OnEnd,
        *,
        exact: bool,
    ) -> None:
        assert deployment.link is not None
        assert deployment.wire_bytes_per_gpu is not None
        self._prefill_plan = prefill = deployment.pools["prefill"]
        self._decode_plan = decode = deployment.pools["decode"]
        self._env = env
        self._on_end = on_end
        self._wire_bytes_per_gpu = deployment.wire_bytes_per_gpu
        self._prefills = [
            PrefillScheduler(prefill.page_pool(), prefill.limits) for _ in range(prefill.instances)
        ]
        self._decodes = [
            DecodeScheduler(decode.page_pool(), decode.limits) for _ in range(decode.instances)
        ]
        self._links = [Link(env, deployment.link) for _ in self._prefills]
        policy = deployment.router_policy
        self._prefill_router = Router(policy, prefill.instances, np.random.default_rng([seed, 0]))
        self._decode_router = Router(policy, decode.instances, np.random.default_rng([seed, 1]))
        self.instances = {
            "prefill": [
                Instance(env, index, scheduler, prefill.executor, self._prefilled, exact=exact)
                for index, scheduler in enumerate(self._prefills)
            ],
            "decode": [
                Instance(
                    env,
                    prefill.instances + index,
                    scheduler,
                    decode.executor,
                    self._decoded,
                    exact=exact,
                )
                for index, scheduler in enumerate(self._decodes)
            ],
        }

    def arrive(self, sequence: Sequence) -> None:
        """Choose both instances and queue the prompt."""
        request = sequence.request
        if reject_if_too_long(
            sequence, self._prefill_plan, self._prefills[0].pool, request.input_tokens
        ) or reject_if_too_long(
            sequence, self._decode_plan, self._decodes[0].pool, request.total_tokens
        ):
            self._on_end(sequence)
            return
        sequence.prefill_instance = self._prefill_router.assign(request.input_tokens)
        sequence.decode_instance = self._decode_router.assign(request.input_tokens)
        self._prefills[sequence.prefill_instance].add(sequence)
        self.instances["prefill"][sequence.prefill_instance].notify()

    def _prefilled(self, instance: Instance, outcome: Outcome) -> None:
        for sequence in outcome.prefilled:
            sequence.prefill_end_s = self._env.now
            self._prefill_router.done(instance.index, sequence.request.input_tokens)
            assert sequence.decode_instance is not None
            self._decodes[sequence.decode_instance].request_pages(sequence)
            self._send_admitted(sequence.decode_instance)

    def _send_admitted(self, decode_index: int) -> None:
        for sequence in self._decodes[decode_index].admit():
            assert sequence.prefill_instance is not None
            bytes_per_gpu = self._wire_bytes_per_gpu(sequence.request.input_tokens)
            link = self._links[sequence.prefill_instance]
            sequence.transfer_start_s = link.send(bytes_per_gpu, self._arrived, sequence)

    def _arrived(self, sequence: Sequence) -> None:
        assert sequence.prefill_instance is not None
        assert sequence.decode_instance is not None
        sequence.transfer_end_s = sequence.first_token_s = self._env.now
        prefill = self._prefills[sequence.prefill_instance]
        prefill.hand_over(sequence)
        if prefill.has_waiting:
            self.instances["prefill"][sequence.prefill_instance].notify()
        decode = self._decodes[sequence.decode_instance]
        if sequence.remaining_output_tokens:
            decode.join(sequence)
            self.instances["decode"][sequence.decode_instance].notify()
        else:
            decode.release(sequence)
            self._end(sequence, sequence.decode_instance)

    def _decoded(self, instance: Instance, outcome: Outcome) -> None:
        index = instance.index - len(self._prefills)
        for sequence in outcome.finished:
            self._end(sequence, index)

    def _end(self, sequence: Sequence, decode_index: int) -> None:
        sequence.finish_s = self._env.now
        self._decode_router.done(decode_index, sequence.request.input_tokens)
        self._send_admitted(decode_index)
        self._on_end(sequence)


class ResidentFleet:
    """One decode instance whose requests appear with their KV in place."""

    def __init__(
        self, env: simpy.Environment, deployment: Deployment, on_end: OnEnd, *, exact: bool
    ) -> None:
        self._plan = plan = deployment.pools["decode"]
        self._env = env
        self._on_end = on_end
        self._scheduler = DecodeScheduler(plan.page_pool(), plan.limits)
        self._instance = Instance(
            env, 0, self._scheduler, plan.executor, self._decoded, exact=exact
        )
        self.instances = {"decode": [self._instance]}

    def arrive(self, sequence: Sequence) -> None:
        """Queue a sequence for pages; it decodes as soon as it has them."""
        sequence.decode_instance = 0
        if reject_if_too_long(
            sequence, self._plan, self._scheduler.pool, sequence.request.total_tokens
        ):
            self._on_end(sequence)
            return
        self._scheduler.request_pages(sequence)
        self._join_admitted()

    def _join_admitted(self) -> None:
        for sequence in self._scheduler.admit():
            if sequence.generated_tokens == 1:
                sequence.first_token_s = self._env.now
            self._scheduler.join(sequence)
            self._instance.notify()

    def _decoded(self, instance: Instance, outcome: Outcome) -> None:
        for sequence in outcome.finished:
            sequence.finish_s = self._env.now
            self._on_end(sequence)
        self._join_admitted()
