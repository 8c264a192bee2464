"""Faults injected by the thousand on random traffic: what each check finds, and what it misses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from tonnage.sim.domain import FloatArray, IntegritySpec, LinkSpec, Request, Step
from tonnage.sim.engine.fleet import Deployment, PoolPlan
from tonnage.sim.engine.handoff import Handoff
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.serving.data_faults import FaultClass, FaultSpec
from tonnage.sim.serving.integrity import IntegrityBooks
from tonnage.sim.serving.physical import Injection
from tonnage.sim.serving.scheduler import Limits
from tonnage.sim.traffic.loads import OpenLoad

_STEP_S = 0.01
_PAGE_TOKENS_MOST = 4
_PAGES = 96  # of one rank: few enough that a page is soon given again
_RUNNING = 12
_REQUESTS = 60  # of one run
_PER_STEP = 0.25
_MOST_PER_RUN = 24  # of one kind, so that few act on one page
_STREAM = 0x1213


@dataclass(frozen=True, slots=True)
class InjectionRow:
    """What became of the faults of one class.

    `met`: of those `injected`, that were to be read through, or written. Of them `caught_before`
    and `caught_after` the first wrong read; the others were `missed`, unless nothing was read
    wrongly in the end. `wrong_reads`: pages read wrongly, in `victims` requests; `in_decode`: of
    them, by decode steps. `clean_aborted`: of `aborted` requests, those that no fault had touched.
    """

    kind: FaultClass
    pool: str
    injected: int
    met: int
    caught_before: int
    caught_after: int
    missed: int
    wrong_reads: int
    in_decode: int
    victims: int
    aborted: int
    clean_aborted: int
    refused_writes: int
    recomputed: int
    stops: int


@dataclass(frozen=True, slots=True)
class _Constant:
    """Steps that all take the same time: what is studied does not depend on it."""

    def run(self, step: Step, max_steps: int) -> FloatArray:
        """Return the seconds of the step and its repetitions."""
        return np.full(max_steps, _STEP_S)


def light_deployment(deployment: Deployment, integrity: IntegritySpec | None = None) -> Deployment:
    """Return a small copy of a deployment: its pools, rules and checks, little memory, equal steps.

    One instance of each pool. A page holds at most four tokens, a rank has 96 pages, and KV travels
    for some steps, so that pages are given again while somebody still has something to do with
    them. `integrity`: instead of what the pools have.
    """
    pools = {role: _light(plan, integrity) for role, plan in deployment.pools.items()}
    handoff = None
    if deployment.handoff is not None:
        bytes_per_s = 8.0 * _PAGE_TOKENS_MOST / _STEP_S
        link = LinkSpec("rdma", bytes_per_s, _STEP_S)
        handoff = Handoff(link, float, overlap=deployment.handoff.overlap)
    return Deployment(pools, replace(deployment.routing, regions=1), handoff)


def _light(plan: PoolPlan, integrity: IntegritySpec | None) -> PoolPlan:
    spec = plan.scheduling
    page_tokens = min(spec.page_tokens, _PAGE_TOKENS_MOST)
    policy = replace(
        spec.policy,
        output_charge_most=min(spec.policy.output_charge_most, 2 * page_tokens),
        reserved_decode_tokens=min(spec.policy.reserved_decode_tokens, page_tokens),
    )
    scheduling = replace(
        spec,
        kv_tokens=_PAGES * page_tokens * spec.ranks,
        page_tokens=page_tokens,
        limits=Limits(8 * page_tokens, _RUNNING * spec.ranks * spec.stages),
        policy=policy,
        extra_tokens=0,
        integrity=integrity or spec.integrity,
    )
    return replace(
        plan,
        instances=1,
        scheduling=scheduling,
        longest_request_tokens=_PAGES * page_tokens,
        executor=_Constant(),
    )


def fault_place(deployment: Deployment, kind: FaultClass) -> str | None:
    """Return the pool on which a class acts; None where it cannot happen."""
    pools = deployment.pools
    decodes = "decode" if "decode" in pools else "serve"
    if kind is FaultClass.LEASE_EXPIRY:
        return "prefill" if "prefill" in pools else None
    if kind is FaultClass.CORRUPTED_TRANSFER:
        return "decode" if "prefill" in pools else None
    if kind is FaultClass.READ_BEFORE_LOAD and "prefill" not in pools:
        return decodes if pools[decodes].tiers is not None else None
    return decodes


def injection_study(
    deployment: Deployment,
    kind: FaultClass,
    count: int,
    *,
    layers: int = 1,
    seed: int = 0,
    told: Callable[[int], None] | None = None,
) -> InjectionRow | None:
    """Inject so many faults of one class into a deployment, and say what became of them.

    Use a `light_deployment`: it runs random traffic again and again until that many have acted.
    `told`: how many have, after each run. None where the class cannot happen.
    """
    pool = fault_place(deployment, kind)
    if pool is None:
        return None
    books: list[IntegrityBooks] = []
    injections: list[Injection] = []
    run = 0
    while len(injections) < count:
        most = min(_MOST_PER_RUN, count - len(injections))
        fault = FaultSpec(kind, pool, per_step=_PER_STEP, layers=layers, most=most)
        load = OpenLoad(random_requests(deployment, seed, run))
        result = simulate(replace(deployment, faults=(fault,)), load, seed=seed + run)
        assert result.integrity is not None
        books.append(result.integrity)
        injections += result.integrity.injections
        run += 1
        if told is not None:
            told(len(injections))
    return _row(kind, pool, books, injections[:count])


def random_requests(deployment: Deployment, seed: int, run: int) -> list[Request]:
    """Return the traffic of one run; where there is a prefix cache, many prompts begin alike."""
    rng = np.random.default_rng([_STREAM, seed, run])
    first = next(iter(deployment.pools.values())).scheduling
    page, shares = first.page_tokens, first.cache is not None
    arrivals_s = np.cumsum(rng.exponential(1.5 * _STEP_S, _REQUESTS)).tolist()
    inputs = rng.integers(1, 8 * page + 1, _REQUESTS).tolist()
    outputs = rng.integers(2, 6 * page + 1, _REQUESTS).tolist()
    requests = []
    for number in range(_REQUESTS):
        ids: tuple[int, ...] = ()
        if shares:
            ids = _path(rng, -(-inputs[number] // (2 * page)))
        requests.append(
            Request(
                number,
                arrivals_s[number],
                inputs[number],
                outputs[number],
                block_ids=ids,
                block_tokens=2 * page if shares else 0,
            )
        )
    return requests


def _path(rng: np.random.Generator, blocks: int) -> tuple[int, ...]:
    """Return ids of blocks, each with two that may follow it, the first far more often."""
    path = [1]
    for _ in range(blocks):
        path.append(2 * path[-1] + int(rng.random() < 0.2))
    return tuple(path[1:])


def _row(
    kind: FaultClass, pool: str, books: list[IntegrityBooks], injections: list[Injection]
) -> InjectionRow:
    return InjectionRow(
        kind=kind,
        pool=pool,
        injected=len(injections),
        met=sum(one.met for one in injections),
        caught_before=sum(one.caught == "before" for one in injections),
        caught_after=sum(one.caught == "after" for one in injections),
        missed=sum(one.caught is None and one.wrong_reads > 0 for one in injections),
        wrong_reads=sum(one.wrong_reads for one in books),
        in_decode=sum(one.wrong_by_place["decode"] for one in books),
        victims=sum(len(one.victims) for one in books),
        aborted=sum(one.aborted for one in books),
        clean_aborted=sum(one.clean_aborted for one in books),
        refused_writes=sum(one.refused_writes for one in books),
        recomputed=sum(one.recomputed for one in books),
        stops=sum(one.stops for one in books),
    )
