"""Schedules with a prefix cache: worked by hand, and drawn at random with every page counted.

How to read the tables: `schedule_table.py`. A page holds one token; blocks hold four.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.sim.engine.harness import (
    AffineTimes,
    colocated,
    disaggregated,
    with_shared_prefixes,
)
from tests.sim.serving.schedule_table import Ask, rehearse, table
from tonnage.sim.domain import Request
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.results.run import RunResult
from tonnage.sim.serving.build import SchedulerSpec, prefill_scheduler, serve_scheduler
from tonnage.sim.serving.pages import Found, PagePool
from tonnage.sim.serving.policy import PLAIN, SGLANG, VLLM, Policy
from tonnage.sim.serving.prefix_cache import CacheSpec
from tonnage.sim.serving.prompts import OutputRoom
from tonnage.sim.serving.scheduler import Limits
from tonnage.sim.serving.sequence import Sequence
from tonnage.sim.serving.tiers import HierarchySpec, PrefetchSpec, TierSpec
from tonnage.sim.traffic.loads import OpenLoad

COMPUTED = CacheSpec(stores="computed")
SCHEDULED = CacheSpec(stores="scheduled")


def spec(
    policy: Policy, pages: int = 100, *, chunk: int = 32, cache: CacheSpec = COMPUTED
) -> SchedulerSpec:
    return SchedulerSpec(pages, 1, Limits(chunk, 8), policy, cache=cache)


# --- by hand ------------------------------------------------------------------------------------


def test_a_hit_shortens_a_prompt() -> None:
    """A leaves two blocks; of B's 11 tokens three are computed, the attention of all is paid."""
    asks = [Ask("A", 9, 3, blocks="ab"), Ask("B", 11, 2, during=3, blocks="ab")]
    assert rehearse(serve_scheduler(spec(SGLANG)), asks) == table("""
        step | prompts | decode | notes | free
        0    | A:9@0   |        |       | 91
        1    |         | A      |       | 90
        2    |         | A      | end A | 89
        3    |         | (A)    |       | 88
        4    | B:3@8   |        |       | 89
        5    |         | B      | end B | 88
        6    |         | (B)    |       | 87
    """)


def test_sglang_shares_what_it_has_seen_computed() -> None:
    """A and B are in one step, so both compute all of it; when that is seen, B gives 8 pages up.

    C is planned in step 2, when it has been seen. A and B hold 2 and 4 pages alone until then.
    """
    asks = [
        Ask("A", 9, 2, blocks="ab"),
        Ask("B", 11, 2, blocks="ab"),
        Ask("C", 9, 2, during=0, blocks="ab"),
    ]
    assert rehearse(serve_scheduler(spec(SGLANG)), asks) == table("""
        step | prompts       | decode | notes        | free
        0    | A:9@0 B:11@0  |        |              | 80
        1    |               | A B    | end A, end B | 78
        2    | C:1@8         |        |              | 85
        3    |               | C      | end C        | 90
        4    |               | (C)    |              | 89
    """)


def test_sglang_does_not_see_a_prompt_in_the_step_after_it() -> None:
    """Nine tokens a step: step 1 is planned while A is computed. The parts before A's last are
    seen at once."""
    asks = [Ask("A", 9, 1, blocks="ab"), Ask("B", 9, 1, blocks="ab")]
    first, second, *_ = rehearse(serve_scheduler(spec(SGLANG, chunk=9)), asks)
    assert (first.split(" | ")[1], second.split(" | ")[1]) == ("A:9@0", "B:9@0")
    asks = [Ask("A", 13, 2, blocks="abc"), Ask("B", 14, 2, blocks="abc")]
    assert rehearse(serve_scheduler(spec(SGLANG, chunk=8)), asks) == table("""
        step | prompts     | decode | notes        | free
        0    | A:8@0       |        |              | 92
        1    | A:5@8 B:3@8 |        |              | 84
        2    | B:3@11      |        |              | 81
        3    |             | A B    | end A, end B | 79
        4    |             | (A B)  |              | 81
    """)


def test_vllm_shares_what_it_has_scheduled() -> None:
    """B finds in step 0 what A computes in step 0: every layer writes before it reads."""
    asks = [Ask("A", 9, 2, blocks="ab"), Ask("B", 11, 2, blocks="ab")]
    assert rehearse(serve_scheduler(spec(VLLM, cache=SCHEDULED)), asks) == table("""
        step | prompts     | decode | notes        | free
        0    | A:9@0 B:3@8 |        |              | 88
        1    |             | A B    | end A, end B | 86
    """)


def test_an_idle_prefill_instance_has_seen_all() -> None:
    asks = [Ask("A", 9, 1, blocks="ab"), Ask("B", 11, 1, during=0, blocks="ab")]
    assert rehearse(prefill_scheduler(spec(SGLANG)), asks) == table("""
        step | prompts | decode | notes | free
        0    | A:9@0   |        |       | 91
        1    | B:3@8   |        |       | 88
    """)


@pytest.mark.parametrize(("pages", "second"), [(13, "B:3@8"), (12, "")])
def test_a_prompt_needs_no_pages_for_what_others_hold(pages: int, second: str) -> None:
    """A holds 9 + 1 pages before step 2, eight of them B's too, which needs 11."""
    asks = [Ask("A", 9, 9, blocks="ab"), Ask("B", 11, 1, during=1, blocks="ab")]
    rows = rehearse(serve_scheduler(spec(PLAIN, pages)), asks)
    assert rows[2].split(" | ")[1] == second


@pytest.mark.parametrize(("idle_pages", "fits"), [(0, True), (4, True), (5, False)])
def test_cached_pages_that_nobody_holds_are_taken_from_what_is_free(
    idle_pages: int, fits: bool
) -> None:
    """Nineteen free pages. 12 - 5 tokens to compute, six outputs and a page: less than 19 - 4."""
    pool = PagePool(20, 1)
    assert pool.allocate(1)
    room = OutputRoom(pool, 0.0, 100)
    head = Sequence(Request(0, 0.0, 12, 6))
    assert room.take(head, 12, Found(5, 5 - idle_pages, idle_pages)) is fits


def test_a_client_that_leaves_leaves_its_blocks() -> None:
    asks = [Ask("A", 9, 9, leaves=3, blocks="abc"), Ask("B", 13, 1, during=5, blocks="abc")]
    rows = rehearse(serve_scheduler(spec(SGLANG)), asks)
    assert [row.split(" | ")[1] for row in rows if ":" in row] == ["A:9@0", "B:1@12"]


# --- on the clock -------------------------------------------------------------------------------

TIMES = AffineTimes(0.01, 1e-4, 0.0, 1e-5)
EVICTING = [Request(1, 1.0, 350, 1)]  # nothing of what was there before is left


def again(*, at_s: float = 5.0) -> list[Request]:
    """Return two requests that begin with 300 tokens alike; one between them needs all pages."""
    alike = {"block_ids": (1, 2, 3), "block_tokens": 100}
    first = Request(0, 0.0, 301, 1, None, None, **alike)
    return [first, *EVICTING, Request(2, at_s, 301, 1, None, None, **alike)]


def tiered(host: int = 10**6, host_s: float = 0.0, **more: object) -> CacheSpec:
    return CacheSpec(tiers=HierarchySpec(TierSpec(host, host_s), **more))  # type: ignore[arg-type]


def third(cache: CacheSpec, requests: list[Request] | None = None) -> dict[str, float]:
    """Return the record of request 2, on an instance of 350 pages."""
    deployment = colocated(times=TIMES, kv_tokens=350, cache=cache)
    run = simulate(deployment, OpenLoad(requests or again()))
    return dict(run.records.frame().set_index("id").loc[2])


def test_a_hit_takes_the_time_of_what_is_left() -> None:
    """0.01 s and 10 us for each of 301 tokens; the next time for one."""
    requests = [again()[0], replace(again()[2], id=1)]
    run = simulate(colocated(times=TIMES, kv_tokens=350, cache=COMPUTED), OpenLoad(requests))
    frame = run.records.frame()
    assert frame["ttft_s"].tolist() == pytest.approx([0.01301, 0.01001], abs=1e-9)
    assert frame["cached_tokens"].tolist() == [0, 300]
    assert frame["computed_tokens"].tolist() == [301, 1]


@pytest.mark.parametrize(("host_s", "ttft_s"), [(1e-6, 0.01001), (1e-4, 0.03)])
def test_the_host_is_read_while_the_rest_is_computed(host_s: float, ttft_s: float) -> None:
    """300 tokens in 0.3 ms, which the 10.01 ms of the step hide, or in 30 ms."""
    record = third(tiered(host_s=host_s))
    assert record["ttft_s"] == pytest.approx(ttft_s, abs=1e-9)
    assert (record["cached_tokens"], record["host_tokens"]) == (300, 300)


def test_a_request_waits_for_what_is_read_into_the_host() -> None:
    """300 tokens in 50 ms and 150 ms; then they go from the host to the GPU in no time."""
    store = TierSpec(10**6, 5e-4, 0.05)
    record = third(tiered(host=0, store=store))  # the host passes on what it cannot keep
    assert record["cached_tokens"] == 0
    record = third(tiered(host=350, store=store), [*again()[:1], other(0.5), *again()[1:]])
    assert record["ttft_s"] == pytest.approx(0.2 + 0.01001, abs=1e-9)
    assert (record["cached_tokens"], record["store_tokens"]) == (300, 300)


def other(at_s: float) -> Request:
    """Return a request whose blocks push others out of the host."""
    return Request(7, at_s, 301, 1, None, None, (7, 8, 9), 100)


def slow_store(policy: str, timeout_s: float = 1.0) -> CacheSpec:
    """NVMe of 0.1 s per block of 100 tokens; the host holds three of them."""
    prefetch = PrefetchSpec(policy, timeout_s, 0.0, 0)  # type: ignore[arg-type]
    return tiered(host=350, nvme=TierSpec(10**6, 1e-3), prefetch=prefetch)


@pytest.mark.parametrize(
    ("policy", "timeout_s", "ttft_s", "cached"),
    [
        ("wait_complete", 0.0, 0.3 + 0.01001, 300),
        ("timeout", 1.0, 0.3 + 0.01001, 300),
        ("timeout", 0.25, 0.25 + 0.01101, 200),  # two blocks are there, 101 tokens are computed
        ("timeout", 0.05, 0.05 + 0.01301, 0),
        ("best_effort", 0.0, 0.01301, 0),
    ],
)
def test_how_long_a_request_waits_is_the_policys(
    policy: str, timeout_s: float, ttft_s: float, cached: int
) -> None:
    requests = [*again()[:1], other(0.5), *again()[1:]]
    record = third(slow_store(policy, timeout_s), requests)
    assert record["ttft_s"] == pytest.approx(ttft_s, abs=1e-9)
    assert (record["cached_tokens"], record["nvme_tokens"]) == (cached, cached)


def test_two_loads_on_one_wire_take_twice_as_long() -> None:
    """Both ask for 300 tokens at once: 0.3 s and 0.6 s."""
    prefix = again()[0]
    more = [replace(prefix, id=number, arrival_s=5.0, block_ids=(5, 6, 4)) for number in (4, 5)]
    requests = [
        prefix,
        replace(prefix, id=1, arrival_s=0.2, block_ids=(5, 6, 4)),
        replace(other(0.5), id=2),
        replace(EVICTING[0], id=3),
        replace(more[0], block_ids=(1, 2, 3)),
        more[1],
    ]
    cache = slow_store("wait_complete")
    frame = simulate(colocated(times=TIMES, kv_tokens=350, cache=cache), OpenLoad(requests))
    ttft_s = frame.records.frame()["ttft_s"].tolist()[-2:]
    assert ttft_s == pytest.approx([0.31001, 0.61001], abs=1e-9)


def test_a_wire_is_free_when_its_load_is_given_up() -> None:
    """0.25 s are enough for two blocks of three; a load that comes then starts at once.

    It reads what the host does not have, the third block, in 0.1 s.
    """
    requests = [*again()[:1], other(0.5), *again()[1:]]
    later = replace(requests[-1], id=9, arrival_s=5.251)
    cache = slow_store("timeout", 0.25)
    deployment = colocated(times=TIMES, kv_tokens=350, cache=cache)
    run = simulate(deployment, OpenLoad([*requests, later]))
    record = run.records.frame().set_index("id").loc[9]
    assert record["ttft_s"] == pytest.approx(0.1 + 0.01001, abs=1e-9)
    assert run.cache is not None
    assert run.cache.cut_short == 1


@pytest.mark.parametrize(("loads", "ttft_s"), [("always", 5.25), ("faster", 5.118)])
def test_a_published_tier_that_is_slower_than_computing(loads: str, ttft_s: float) -> None:
    """MiniMax-M2.7, 131,072 tokens: 5.118 s to compute, 5.25 s from the file tier.

    SGLang loads them (its issue 26305); a rule that compares computes them.
    """
    tokens, block = 131_072, 4096
    times = AffineTimes(1e-6, 0.0, 0.0, 5.118 / tokens)
    prefix = {"block_ids": tuple(range(tokens // block)), "block_tokens": block}
    file_tier = TierSpec(10**9, 5.25 / tokens)
    cache = CacheSpec(
        tiers=HierarchySpec(
            TierSpec(tokens),
            file_tier,
            prefetch=PrefetchSpec("wait_complete"),
            loads=loads,  # type: ignore[arg-type]
            recompute_s_per_token=5.118 / tokens,
        )
    )
    push = {"block_ids": tuple(range(100, 132)), "block_tokens": block}
    requests = [
        Request(0, 0.0, tokens + 1, 1, None, None, **prefix),
        Request(1, 20.0, tokens + 1, 1, None, None, **push),
        Request(2, 40.0, tokens + 1, 1, None, None, **prefix),
    ]
    deployment = colocated(times=times, kv_tokens=tokens + 64, chunk_tokens=10**6, cache=cache)
    run = simulate(deployment, OpenLoad(requests))
    assert run.records.ttft_s()[-1] == pytest.approx(ttft_s, abs=1e-3)
    assert run.cache is not None
    assert run.cache.slower_loads["nvme"] == (loads == "always")


# --- at random ----------------------------------------------------------------------------------

POLICIES = (PLAIN, replace(PLAIN, mixed=True), SGLANG, replace(SGLANG, lag_steps=0), VLLM)
SIZES = st.sampled_from([(1, 7), (4, 16), (16, 16), (7, 50), (16, 7)])


@st.composite
def requests_alike(draw: st.DrawFn, block_tokens: int) -> list[Request]:
    rng = Random(draw(st.integers(0, 10**6)))
    at_s, requests = 0.0, []
    for number in range(draw(st.integers(3, 25))):
        at_s += rng.choice([0.0, 0.0, 0.01, 0.05]) * rng.random()
        requests.append(Request(number, at_s, rng.randint(1, 200), rng.randint(1, 40)))
    return with_shared_prefixes(requests, block_tokens, rng.randrange(9), rng.random() < 0.5)


@st.composite
def tiers(draw: st.DrawFn) -> HierarchySpec | None:
    def tier() -> TierSpec:
        seconds = draw(st.sampled_from([0.0, 1e-6, 1e-4])), draw(st.sampled_from([0.0, 1e-3]))
        return TierSpec(draw(st.sampled_from([100, 1000, 10**6])), *seconds)

    if draw(st.booleans()):
        return None
    return HierarchySpec(
        tier(),
        tier() if draw(st.booleans()) else None,
        tier() if draw(st.booleans()) else None,
        draw(st.sampled_from(["through", "selective", "back"])),
        PrefetchSpec(
            draw(st.sampled_from(["best_effort", "wait_complete", "timeout"])),
            draw(st.sampled_from([0.001, 1.0])),
            0.01,
            draw(st.sampled_from([0, 64])),
        ),
        draw(st.sampled_from(["always", "faster"])),
        1e-5,
    )


@st.composite
def cached_runs(draw: st.DrawFn) -> tuple[Deployment, OpenLoad]:
    page, block = draw(SIZES)
    requests = draw(requests_alike(block))
    policy = draw(st.sampled_from(POLICIES))
    stores = "scheduled" if policy is VLLM else "computed"
    settings_of = {
        "times": AffineTimes(per_context_token_s=1e-7),
        "kv_tokens": draw(st.integers(300, 900)),
        "page_tokens": page,
        "chunk_tokens": draw(st.sampled_from([32, 100])),
        "running": draw(st.integers(1, 10)),
        "policy": policy,
        "ranks": draw(st.sampled_from([1, 1, 2])),
        "stages": draw(st.sampled_from([1, 1, 1, 2])),
        "cache": CacheSpec(draw(st.sampled_from(["lru", "lfu"])), stores, draw(tiers())),
    }
    make = draw(st.sampled_from([colocated, disaggregated]))
    timeout_s = draw(st.sampled_from([None, None, 0.05]))
    return make(draw(st.integers(1, 2)), **settings_of), OpenLoad(requests, timeout_s)


@settings(max_examples=100, deadline=None)
@given(cached_runs())
def test_pages_and_tokens_are_conserved_and_segments_agree(
    case: tuple[Deployment, OpenLoad],
) -> None:
    """All pages are free in the end, and a prompt is what was cached and what was computed."""
    deployment, load = case
    run, exact = simulate(deployment, load), simulate(deployment, load, exact=True)
    frame = run.records.frame()
    assert frame.equals(exact.records.frame())
    assert run.pages_left == exact.pages_left == 0
    assert run.cache == exact.cache
    done = frame[(frame["status"] == "completed") & (frame["retractions"] == 0)]
    assert (done["computed_tokens"] + done["cached_tokens"] == done["input_tokens"]).all()
    loaded = frame[["host_tokens", "nvme_tokens", "store_tokens"]].sum(axis=1)
    assert (loaded <= frame["cached_tokens"]).all()
    event(f"hits: {frame['cached_tokens'].sum() > 0}, loads: {loaded.sum() > 0}")


@settings(max_examples=60, deadline=None)
@given(cached_runs())
def test_without_ids_a_cache_changes_nothing(case: tuple[Deployment, OpenLoad]) -> None:
    deployment, load = case
    requests = [replace(one, block_ids=(), block_tokens=0) for one in load.requests]
    bare = OpenLoad(requests, load.timeout_s)
    off = {
        role: replace(plan, scheduling=replace(plan.scheduling, cache=None))
        for role, plan in deployment.pools.items()
    }
    assert_equal(simulate(deployment, bare), simulate(replace(deployment, pools=off), bare))


@settings(max_examples=60, deadline=None)
@given(cached_runs())
def test_without_a_cache_ids_change_nothing(case: tuple[Deployment, OpenLoad]) -> None:
    deployment, load = case
    requests = [replace(one, block_ids=(), block_tokens=0) for one in load.requests]
    off = {
        role: replace(plan, scheduling=replace(plan.scheduling, cache=None))
        for role, plan in deployment.pools.items()
    }
    plain = replace(deployment, pools=off)
    assert_equal(simulate(plain, load), simulate(plain, OpenLoad(requests, load.timeout_s)))


def assert_equal(one: RunResult, other_run: RunResult) -> None:
    assert one.records.frame().equals(other_run.records.frame())
    assert one.makespan_s == other_run.makespan_s
    assert np.array_equal(one.busy_s.get("serve", []), other_run.busy_s.get("serve", []))
