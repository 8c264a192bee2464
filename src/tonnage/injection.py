"""Faults injected by the thousand on random traffic: what each check finds, and what it misses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from tonnage.sim.traffic.loads import Lengths, OpenLoad, ResidentLoad

_STEP_S = 0.01
_PAGE_TOKENS_MOST = 4
_PAGES = 96  # of one rank: few enough that a page is soon given again
_RUNNING = 12
_REQUESTS = 60  # of one run
_PER_STEP = 0.25
_MOST_PER_RUN = 24  # of one kind, so that few act on one page
_IDLE_RUNS_MOST = 40  # in a row, without one fault that found an occasion
_MEAN_PAGES, _LONGEST_PAGES = 8, 24  # of a request, prompt and answer
_ANSWER_PAGES = 4, 7  # of those eight, at least and at most
_IN_FLIGHT = 9  # requests that decode at once, about
_STREAM = 0x1213

LengthPairs = Sequence[tuple[int, int]]  # tokens of prompts and answers


@dataclass(frozen=True, slots=True)
class InjectionRow:
    """What became of the faults of one class.

    `met`: of those `injected`, that were to be read through, or written. Of them `caught_before`
    and `caught_after` the first wrong read; the others were `missed`, unless nothing was read
    wrongly in the end. `wrong_reads`: pages read wrongly, in `victims` requests; `in_decode`: of
    them, by decode steps. `clean_aborted`: of `aborted` requests, those that no fault had touched.
    `stops`: of a whole process, by a canary, with `lost` requests.
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
    lost: int


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
    lengths: LengthPairs = (),
    seed: int = 0,
    told: Callable[[int], None] | None = None,
) -> InjectionRow | None:
    """Inject so many faults of one class into a deployment, and say what became of them.

    Use a `light_deployment`: it runs random traffic again and again until that many have acted.
    `lengths`: prompts and answers to draw from, as `random_requests` does. `told`: how many have
    acted, after each run. Fewer are injected where traffic gives no occasion any more; None where
    the class cannot happen at all.
    """
    pool = fault_place(deployment, kind)
    if pool is None:
        return None
    books: list[IntegrityBooks] = []
    injections: list[Injection] = []
    run = idle = 0
    while len(injections) < count and idle < _IDLE_RUNS_MOST:
        most = min(_MOST_PER_RUN, count - len(injections))
        fault = FaultSpec(kind, pool, per_step=_PER_STEP, layers=layers, most=most)
        load = _load(deployment, random_requests(deployment, seed, run, lengths))
        result = simulate(replace(deployment, faults=(fault,)), load, seed=seed + run)
        assert result.integrity is not None
        books.append(result.integrity)
        injections += result.integrity.injections
        idle = 0 if result.integrity.injections else idle + 1
        run += 1
        if told is not None:
            told(len(injections))
    return _row(kind, pool, books, injections[:count])


def _load(deployment: Deployment, requests: list[Request]) -> OpenLoad | ResidentLoad:
    """Offer requests; where nothing computes prompts, they are held from their first token on."""
    if deployment.pools.keys() != {"decode"}:
        return OpenLoad(requests)
    pairs = [Lengths(one.input_tokens, one.output_tokens) for one in requests]
    return ResidentLoad(_IN_FLIGHT, pairs)


def random_requests(
    deployment: Deployment, seed: int, run: int, lengths: LengthPairs = ()
) -> list[Request]:
    """Return the traffic of one run; where there is a prefix cache, many prompts begin alike.

    `lengths`: draw from these, all scaled so that a request fills eight pages on average.
    """
    rng = np.random.default_rng([_STREAM, seed, run])
    first = next(iter(deployment.pools.values())).scheduling
    page, shares = first.page_tokens, first.cache is not None
    if lengths:
        arrivals_s, inputs, outputs = _scaled(rng, lengths, page)
    else:
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


def _scaled(
    rng: np.random.Generator, lengths: LengthPairs, page: int
) -> tuple[list[float], list[int], list[int]]:
    """Return instants of arrival, and lengths in the given ones' spread.

    Their proportion too, as far as answers last long enough for something to happen meanwhile.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    means = tokens.mean(axis=0)
    answer_pages = min(
        max(_MEAN_PAGES * means[1] / means.sum(), _ANSWER_PAGES[0]), _ANSWER_PAGES[1]
    )
    tokens *= page * np.array([_MEAN_PAGES - answer_pages, answer_pages]) / means
    drawn = tokens[rng.integers(len(tokens), size=_REQUESTS)]
    drawn *= np.minimum(1.0, _LONGEST_PAGES * page / drawn.sum(axis=1))[:, None]
    whole = np.maximum(np.rint(drawn).astype(np.int64), (1, 2))  # one decode step at least
    gaps_s = rng.exponential(_STEP_S * whole[:, 1].mean() / _IN_FLIGHT, _REQUESTS)
    return np.cumsum(gaps_s).tolist(), whole[:, 0].tolist(), whole[:, 1].tolist()


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
        lost=sum(one.lost for one in books),
    )
