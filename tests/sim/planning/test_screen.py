"""The closed forms against queueing theory, Little's law, and what must be monotone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tonnage.sim.domain import FloatArray, Objective
from tonnage.sim.planning.candidates import (
    PairTransfer,
    PoolOption,
    RouterOption,
    colocated,
    disaggregated,
)
from tonnage.sim.planning.pool_model import BATCHES, DecodeTimes, PromptTimes
from tonnage.sim.planning.prompt_rows import prompt_row
from tonnage.sim.planning.screen import SATURATED, Offer, Screened, screen
from tonnage.sim.planning.search import counts, looked_at, lowest_rate, price_order
from tonnage.sim.planning.workload import Workload

ROUTERS = (RouterOption("round_robin", returns=False), RouterOption("cache_aware", returns=True))
TTFT, TPOT = Objective("ttft", 0.95, 1.0), Objective("tpot", 0.95, 0.05)
# A token of a prompt takes 0.1 ms whatever the chunk, a step of decoding 10 ms and 0.1 per request.
SIZES = np.array([16.0, 1000.0])


def prompts(ranks: int = 1) -> PromptTimes:
    return PromptTimes(1000, ranks, 1, SIZES, SIZES * 1e-4, SIZES * 1e-4, np.zeros(2))


def decoding(step_s: float = 0.01, slope_s: float = 1e-4) -> DecodeTimes:
    return DecodeTimes(step_s + slope_s * BATCHES, 1.0)


def option(role: str, kv_tokens: int = 10_000_000, concurrency: int = 500) -> PoolOption:
    return PoolOption(
        config=role,
        role=role,
        gpus=1,
        usd_per_hour=2.0,
        kv_tokens=kv_tokens,
        concurrency=concurrency,
        prompt=prompts() if role != "decode" else None,
        decode=decoding() if role != "prefill" else None,
    )


def load(
    rate: float | None = 2.0, users: int | None = None, inputs: float = 2000, outputs: float = 101
) -> Workload:
    size = 8
    full = np.full(size, inputs)
    never = np.full(size, np.inf)
    return Workload(full, np.zeros(size), np.full(size, outputs), never, rate, users)


def offer(workload: Workload) -> Offer:
    transfer = PairTransfer(0.0, 1.0, 0.0, 0.0, None)
    return Offer(workload, (option("prefill"),), (option("decode"),), ROUTERS, ((transfer,),))


def apart(workload: Workload, prefill: int = 1, decode: int = 1) -> Screened:
    one = offer(workload)
    fleets = disaggregated(one.firsts, [(prefill,)], one.seconds, [(decode,)], 1, 64)
    return screen(one, fleets, (TTFT, TPOT))


def together(workload: Workload, instances: int = 1) -> Screened:
    one = Offer(workload, (option("serve"),), (), ROUTERS, ())
    return screen(one, colocated(one.firsts, [(instances,)], 1, 64), (TTFT, TPOT))


def test_prompts_wait_as_in_m_d_1() -> None:
    """Prompts of one length at one instance: the wait is half of that of M/M/1."""
    service_s, rate = 0.2, 3.0
    found = apart(load(rate))
    busy = rate * service_s
    wait_s = busy * service_s / (2 * (1 - busy))
    assert found.prefill_busy[0] == pytest.approx(busy)
    step_s = 0.01 + 1e-4 * found.batch[0]
    assert found.ttft_s[0] == pytest.approx(wait_s + service_s + step_s / 2, rel=1e-6)


def test_a_batch_is_what_its_own_step_makes_it() -> None:
    """Little's law: requests that decode are rate times answers times step, the step theirs."""
    found = apart(load(2.0))
    demand = 2.0 * 100
    batch = demand * 0.01 / (1 - demand * 1e-4)
    assert found.batch[0] == pytest.approx(batch, rel=1e-3)
    assert found.tpot_s[0] == pytest.approx(0.01 + 1e-4 * batch, rel=1e-3)


@pytest.mark.parametrize("users", [1, 4, 32])
def test_users_times_trip_is_the_rate(users: int) -> None:
    found = apart(load(None, users))
    trip_s = found.ttft_s[0] - (0.01 + 1e-4 * found.batch[0]) / 2 + 100 * found.tpot_s[0]
    assert found.rate_per_s[0] * trip_s == pytest.approx(users, rel=0.03)


def test_a_queue_of_users_waits_for_all_before_it() -> None:
    """Far more users than an instance can serve: it works all the time, and they wait for it."""
    found = apart(load(None, 200))
    assert found.rate_per_s[0] == pytest.approx(1 / 0.2, rel=0.05)
    assert found.ttft_s[0] == pytest.approx(200 * 0.2, rel=0.1)


@pytest.mark.parametrize(("rate", "why"), [(5.5, "prefill"), (2.0, "")])
def test_what_is_too_much_is_said(rate: float, why: str) -> None:
    found = apart(load(rate))
    assert SATURATED[int(found.saturated[0])] == why
    assert np.isinf(found.worst[0]) == bool(why)


def test_memory_that_is_too_small_is_said() -> None:
    one = offer(load(2.0))
    small = replace(one, seconds=(option("decode", concurrency=2),))
    fleets = disaggregated(small.firsts, [(1,)], small.seconds, [(1,)], 1, 64)
    found = screen(small, fleets, (TTFT, TPOT))
    assert SATURATED[int(found.saturated[0])] == "memory"


def test_prompts_beside_it_slow_a_step_down() -> None:
    """Half of the time goes to prompts, so a token takes twice as long."""
    both = together(load(2.5))
    demand = 2.5 * 100 * 2
    batch = demand * 0.01 / (1 - demand * 1e-4)
    assert both.prefill_busy[0] == pytest.approx(0.5)
    assert both.tpot_s[0] == pytest.approx(2 * (0.01 + 1e-4 * batch), rel=1e-3)
    assert both.tpot_s[0] > apart(load(2.5)).tpot_s[0]


def worst_of(found: Screened) -> FloatArray:
    return np.nan_to_num(found.ratios[0], posinf=1e9)


@pytest.mark.parametrize("rate", [1.0, 4.0, 9.0])
def test_more_instances_are_never_worse(rate: float) -> None:
    ratios = [worst_of(apart(load(rate), count, count)) for count in (1, 2, 3, 4)]
    assert all((later <= earlier + 1e-9).all() for earlier, later in pairwise(ratios))


def test_more_load_is_never_better() -> None:
    ratios = [worst_of(apart(load(rate))) for rate in (0.5, 1.0, 2.0, 4.0, 6.0)]
    assert all((later >= earlier - 1e-9).all() for earlier, later in pairwise(ratios))


# --- caches -------------------------------------------------------------------------------------


def returning(rate: float = 2.0) -> Workload:
    """Requests whose whole prompt but one token comes back after 10 s."""
    size = 64
    inputs = np.full(size, 2000.0)
    reuse_s = np.linspace(1.0, 19.0, size)
    return Workload(inputs, inputs - 1, np.full(size, 11.0), reuse_s, rate)


def hits(kv_tokens: int, instances: int = 1, router: int = 1) -> float:
    one = option("prefill", kv_tokens)
    return prompt_row(one, instances, ROUTERS[router], returning()).hit_share


def test_a_cache_that_holds_all_finds_all_and_an_empty_one_nothing() -> None:
    assert hits(10**9) == pytest.approx(1.0, abs=1e-3)
    assert hits(0) == 0.0


def test_a_larger_cache_finds_more() -> None:
    found = [hits(size) for size in (5_000, 20_000, 40_000, 80_000, 10**6)]
    assert found == sorted(found)
    assert found[0] < found[-1]


def test_a_cache_keeps_what_littles_law_says() -> None:
    """At 2 requests/s of 2,011 tokens a cache of 20,110 keeps each for 5 s or less."""
    reach_s = 5.0 + 0.0
    reuse_s = returning().reuse_s + 5.0  # the nominal time of an answer
    assert hits(20_110) == pytest.approx(float(np.mean(reuse_s <= reach_s)), abs=0.02)


def test_a_router_that_forgets_finds_less() -> None:
    assert hits(60_000, 4, router=0) < hits(60_000, 4, router=1)


# --- what is tried ------------------------------------------------------------------------------


def test_the_fewest_instances_are_tried_first() -> None:
    one = option("prefill")
    tried = counts(one, load(8.0), 8.0, 64)
    assert tried[0] == 2  # 8/s of 0.2 s keep 1.6 busy
    assert max(tried) <= 64
    assert counts(one, load(8.0), 8.0, 1) == ()


def test_a_closed_load_asks_less_of_a_slow_fleet() -> None:
    assert lowest_rate(load(3.0), (TTFT, TPOT)) == 3.0
    assert lowest_rate(load(None, 12), (TTFT, TPOT)) == pytest.approx(12 / (1.0 + 100 * 0.05))


def test_the_cheapest_are_looked_at_and_some_of_the_rest() -> None:
    usd = np.arange(1000.0)[::-1]
    rows = looked_at(usd, 90)
    assert len(rows) <= 90
    assert usd[rows[:60]].tolist() == list(range(60))
    assert usd[rows].max() == 999


def test_the_order_is_price_then_tokens_then_margin() -> None:
    one = offer(load(3.0))
    fleets = disaggregated(one.firsts, [(1, 2)], one.seconds, [(1, 2)], 1, 64)
    found = screen(one, fleets, (TTFT, TPOT))
    order = [row for _, row in price_order([found])]
    usd = found.fleets.usd_per_hour[order]
    assert usd.tolist() == sorted(usd.tolist())
    same = [row for row in order if found.fleets.usd_per_hour[row] == 6.0]
    assert found.worst[same].tolist() == sorted(found.worst[same].tolist())


def test_who_goes_where_its_prefix_lies_waits_there() -> None:
    """Two instances behind a router that returns are two M/D/1; behind another they help out."""
    one = Offer(load(4.0), (option("serve"),), (), ROUTERS, ())
    fleets = colocated(one.firsts, [(2,)], 2, 64)
    helped, returned = screen(one, fleets, (TTFT, TPOT)).ttft_s
    alone = together(load(2.0)).ttft_s[0]
    assert returned == pytest.approx(alone)
    assert helped < returned


def test_a_prompt_waits_for_memory_too() -> None:
    """The same prefill, less and less KV where it decodes: the first token comes later."""
    one = offer(load(2.0))
    reached = []
    for concurrency in (500.0, 8.0, 5.0):
        pools = replace(one, seconds=(replace(option("decode"), concurrency=concurrency),))
        fleets = disaggregated(pools.firsts, [(1,)], pools.seconds, [(1,)], 1, 64)
        found = screen(pools, fleets, (TTFT, TPOT))
        assert found.saturated[0] == 0
        reached.append(float(found.ratios[0, 0]))
    assert reached[0] < reached[1] < reached[2]
