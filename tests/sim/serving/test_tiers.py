"""Tiers against lists that are searched from end to end, the choice to load, and each rule."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from tests.sim.serving.slow_cache import Ids, SlowTiers
from tests.sim.serving.test_prefix_cache import (
    DOINGS,
    SGLANG,
    SGLANG_LFU,
    VLLM,
    Both,
    Requests,
    contents,
)
from tonnage.sim.domain import Request
from tonnage.sim.serving.build import SchedulerSpec
from tonnage.sim.serving.policy import PLAIN
from tonnage.sim.serving.prefix_cache import CacheSpec, PrefixCache
from tonnage.sim.serving.scheduler import Limits
from tonnage.sim.serving.sequence import Sequence
from tonnage.sim.serving.tiers import (
    Hierarchy,
    HierarchySpec,
    LoadPlan,
    PrefetchSpec,
    SharedTiers,
    TierSpec,
    WritePolicy,
    crossover_tokens,
    load_or_recompute,
)

ALL = PrefetchSpec(threshold_tokens=0)


def hierarchy(spec: HierarchySpec, shared: SharedTiers | None = None) -> Hierarchy:
    scheduling = SchedulerSpec(64, 1, Limits(8, 8), PLAIN, cache=CacheSpec(tiers=spec))
    (one,) = scheduling.hierarchies(shared)
    assert one is not None
    return one


# --- loading or computing -----------------------------------------------------------------------


@pytest.mark.parametrize("squared_s", [0.0, 2e-10])
@pytest.mark.parametrize("latency_s", [0.0, 0.01, 1.0])
@pytest.mark.parametrize("bandwidth", [2e9, 50e9])
def test_at_the_crossover_both_take_the_same_time(
    bandwidth: float, latency_s: float, squared_s: float
) -> None:
    """70,272 bytes per token; computing takes 40 us per token, and more for long prompts."""
    crossover = crossover_tokens(70_272, bandwidth, latency_s, 40e-6, squared_s)
    assert crossover is not None
    recompute_s = 40e-6 * crossover + squared_s * crossover**2
    assert latency_s + 70_272 * crossover / bandwidth == pytest.approx(recompute_s)
    for factor, loads in ((0.9, False), (1.1, True)):
        tokens = round(factor * crossover)
        recompute_s = 40e-6 * tokens + squared_s * tokens**2
        choice = load_or_recompute(tokens, 70_272 * tokens, bandwidth, latency_s, recompute_s)
        assert choice.loads is (loads and tokens > 0)


def test_a_slow_tier_is_never_worth_it() -> None:
    """1 GB/s takes 70 us per token, computing 40 us."""
    assert crossover_tokens(70_272, 1e9, 0.01, 40e-6) is None
    assert not load_or_recompute(10**6, 70_272e6, 1e9, 0.01, 40.0).loads


def test_computing_that_grows_with_the_square_is_overtaken_by_any_tier() -> None:
    """1 GB/s: 70.272 us per token against 40 us and 1 ns per token and token."""
    crossover = crossover_tokens(70_272, 1e9, 0.0, 40e-6, 1e-9)
    assert crossover == pytest.approx((70.272 - 40) * 1e3)


def test_nothing_to_load_takes_no_time() -> None:
    assert load_or_recompute(0, 0.0, 1e9, 0.5, 0.0).load_s == 0.0
    assert TierSpec(10, 1.0, 0.5).load_s(0) == 0.0


# --- against lists ------------------------------------------------------------------------------


class BothWithTiers(Both):
    """The fast and the slow cache, each with tiers; `capacities` in blocks."""

    def __init__(
        self,
        spec: CacheSpec,
        pages: int,
        sizes: tuple[int, int],
        capacities: dict[str, int],
        write: WritePolicy,
    ) -> None:
        super().__init__(spec, pages, *sizes)
        tiers = {name: TierSpec(n * self.block) for name, n in capacities.items()}
        self.tiers = hierarchy(HierarchySpec(**tiers, write=write, prefetch=ALL))
        self.cache.tiers = self.tiers
        self.cache._counts_hits = True
        self.slow.tiers = SlowTiers(capacities, write)

    def _come(self, ids: Ids, tokens: int) -> None:
        """Have some of what lies below the host brought there first."""
        one = Sequence(Request(-1, 0.0, tokens, 9, None, None, ids, self.block if ids else 0))
        plan = self.cache.prefetch(one)
        wanted = self._slow_plan(ids, tokens)
        assert wanted == (
            [] if plan is None else list(zip(plan.block_ids, plan.tiers, strict=True))
        )
        if plan is not None:
            blocks = len(plan.block_ids) - tokens % 2
            self.cache.landed(one, plan, blocks)
            assert self.slow.tiers is not None
            for block_id in reversed(plan.block_ids[:blocks]):
                self.slow.tiers.put("host", ids[: ids.index(block_id) + 1])
        super()._come(ids, tokens)

    def _slow_plan(self, ids: Ids, tokens: int) -> list[tuple[int, str]]:
        tiers = self.slow.tiers
        assert tiers is not None
        wanted = []
        on_gpu = len(self.slow.matched(ids, tokens))
        for n in range(on_gpu, min(len(ids), (tokens - 1) // self.block)):
            holder = tiers.holder(ids[: n + 1])
            if holder is None:
                break
            if holder != "host":
                wanted.append((ids[n], holder))
        return wanted

    def check(self) -> None:
        super().check()
        assert self.slow.tiers is not None
        for tier in (self.tiers._host, *self.tiers._below):
            expected = self.slow.tiers.blocks[tier.name]
            assert list(tier._blocks) == [path[-1] for path in expected]


@pytest.mark.parametrize("write", ["through", "selective", "back"])
@pytest.mark.parametrize("spec", [SGLANG, SGLANG_LFU, VLLM], ids=["sglang", "lfu", "vllm"])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    doings=st.integers(30, 120),
    pages=st.integers(6, 14),
    sizes=st.sampled_from([(1, 2), (2, 4), (3, 3), (2, 5), (1, 1)]),
    capacities=st.tuples(st.integers(0, 5), st.integers(0, 8), st.integers(0, 20)),
)
def test_tiers_are_lists_of_blocks(
    spec: CacheSpec,
    write: WritePolicy,
    seed: int,
    doings: int,
    pages: int,
    sizes: tuple[int, int],
    capacities: tuple[int, int, int],
) -> None:
    names = ("host", "nvme", "store")[: 1 + seed % 3]
    sized = dict(zip(names, capacities, strict=False))
    both, rng = BothWithTiers(spec, pages, sizes, sized, write), Random(seed)
    for _ in range(doings):
        share = rng.choice([1.0, 0.8, 0.6, 0.4, 0.0])
        both.do(rng.choice(DOINGS), contents(rng), rng.randrange(10), share)
    loaded = [pair.sequence.prefix.loaded_tokens for pair in both.pairs if pair.sequence.prefix]
    event(f"loads: {min(sum(map(bool, loaded)), 5)}")


# --- rules --------------------------------------------------------------------------------------


def tiered(
    pages: int,
    host: int,
    *,
    nvme: int | None = None,
    store: int | None = None,
    shared: SharedTiers | None = None,
    **rules: object,
) -> Requests:
    """Return a cache of single-token pages and blocks of four tokens; tiers in tokens."""
    below = {
        name: TierSpec(tokens)
        for name, tokens in (("nvme", nvme), ("store", store))
        if tokens is not None
    }
    spec = HierarchySpec(TierSpec(host), **below, **{"prefetch": ALL, **rules})  # type: ignore[arg-type]
    cache = PrefixCache(pages, 1, free_first=True, spec=SGLANG, tiers=hierarchy(spec, shared))
    return Requests(cache)


@pytest.mark.parametrize(
    ("write", "written"),
    [("through", [2, 2, 2]), ("selective", [0, 2, 2]), ("back", [0, 0, 2])],
)
def test_a_block_is_written_when_the_policy_says(write: WritePolicy, written: list[int]) -> None:
    """After its first request, after its second, and when it is evicted."""
    requests = tiered(12, 100, write=write)
    assert requests.cache.tiers is not None
    host = requests.cache.tiers._host
    seen = []
    for _ in range(2):
        requests.run(9, (1, 2))
        seen.append(len(host))
    assert requests.cache.allocate(12)
    assert [*seen, len(host)] == written


def test_the_host_gives_back_what_the_gpu_lost() -> None:
    requests = tiered(20, 100)
    requests.run(9, (1, 2))
    assert requests.cache.allocate(20)
    requests.cache.release(20)
    again = requests.start(9, (1, 2))
    assert again.cached_tokens == 8
    assert again.prefix is not None
    assert again.prefix.loaded_tokens == {"host": 8}
    assert requests.cache.loading_tokens == 8
    assert requests.cache.hit_blocks((1, 2)) == 2


def test_the_gpu_comes_first_and_the_host_after_it() -> None:
    requests = tiered(16, 100)
    requests.run(9, (1, 2))
    assert requests.cache.allocate(12)  # of which its second block
    requests.cache.release(12)
    again = requests.start(9, (1, 2))
    assert again.prefix is not None
    assert (again.cached_tokens, again.prefix.loaded_tokens) == (8, {"host": 4})


def test_what_is_below_the_host_is_read_into_it_first() -> None:
    """The host holds one block of three, NVMe two, the store all."""
    requests = tiered(40, 4, nvme=8, store=100)
    requests.run(13, (1, 2, 3))
    assert requests.cache.allocate(40)
    requests.cache.release(40)
    sequence = Sequence(Request(9, 0.0, 13, 1, None, None, (1, 2, 3), 4))
    plan = requests.cache.prefetch(sequence)
    assert plan == LoadPlan((2, 3), ("nvme", "store"), 4, ALL.most_wait_s(8))


def test_instances_share_the_store_alone() -> None:
    spec = HierarchySpec(TierSpec(100), TierSpec(100), TierSpec(100))
    shared = SharedTiers(spec)
    one = tiered(40, 100, nvme=100, store=100, shared=shared)
    other = tiered(40, 100, nvme=100, store=100, shared=shared)
    one.run(9, (1, 2))
    plan = other.cache.prefetch(Sequence(Request(9, 0.0, 9, 1, None, None, (1, 2), 4)))
    assert plan is not None
    assert plan.tiers == ("store", "store")
    other.cache.landed(Sequence(Request(9, 0.0, 9, 1, None, None, (1, 2), 4)), plan, 2)
    assert other.run(9, (1, 2)) == 8


def test_ranks_have_hosts_of_their_own_and_nvme_together() -> None:
    spec = HierarchySpec(TierSpec(80), TierSpec(80))
    scheduling = SchedulerSpec(64, 1, Limits(8, 8), PLAIN, ranks=2, cache=CacheSpec(tiers=spec))
    one, other = scheduling.hierarchies(SharedTiers(spec))
    assert one is not None
    assert other is not None
    assert one._host is not other._host
    assert one._host._capacity_tokens == 40
    assert one._below[0] is other._below[0]


@pytest.mark.parametrize(
    ("policy", "tokens", "wait_s"),
    [
        ("timeout", 2048, 1.5),  # a second, and a quarter per 1,024 tokens
        ("timeout", 256, 1.0625),
        ("best_effort", 10**6, 0.0),
        ("wait_complete", 1, float("inf")),
    ],
)
def test_how_long_a_request_waits(policy: str, tokens: int, wait_s: float) -> None:
    assert PrefetchSpec(policy).most_wait_s(tokens) == wait_s  # type: ignore[arg-type]


@pytest.mark.parametrize(("threshold", "loads"), [(8, True), (9, False)])
def test_few_tokens_are_not_worth_a_load(threshold: int, loads: bool) -> None:
    requests = tiered(20, 0, nvme=100, prefetch=PrefetchSpec(threshold_tokens=threshold))
    requests.run(9, (1, 2))
    assert requests.cache.allocate(20)
    requests.cache.release(20)
    plan = requests.cache.prefetch(Sequence(Request(9, 0.0, 9, 1, None, None, (1, 2), 4)))
    assert (plan is not None) is loads


@pytest.mark.parametrize(("loads", "cached"), [("always", 8), ("faster", 0)])
def test_a_host_slower_than_computing_is_asked_or_not(loads: str, cached: int) -> None:
    """8 tokens: 8 x 2 s from the host, 8 x 1 s to compute. The engines ask it anyway."""
    spec = HierarchySpec(TierSpec(100, 2.0), loads=loads, recompute_s_per_token=1.0)  # type: ignore[arg-type]
    shared = SharedTiers(spec)
    cache = PrefixCache(20, 1, free_first=True, spec=SGLANG, tiers=hierarchy(spec, shared))
    requests = Requests(cache)
    requests.run(9, (1, 2))
    assert cache.allocate(20)
    cache.release(20)
    assert requests.run(9, (1, 2)) == cached
    assert shared.books.slower_loads["host"] == (loads == "always")


def test_writing_is_counted_once_per_block_and_tier() -> None:
    spec = HierarchySpec(TierSpec(100), TierSpec(4), TierSpec(100))
    shared = SharedTiers(spec)
    cache = PrefixCache(40, 1, free_first=True, spec=SGLANG, tiers=hierarchy(spec, shared))
    requests = Requests(cache)
    for _ in range(3):
        requests.run(9, (1, 2))
    assert shared.books.written_tokens == {"host": 8, "nvme": 8, "store": 8}


def host_hit_rate(host_tokens: int, seed: int) -> float:
    """Return the share of tokens found on GPU or host, for prompts one after the other."""
    rng = Random(seed)
    requests = tiered(40, host_tokens)
    tokens = cached = 0
    for _ in range(150):
        ids = contents(rng)
        tokens += len(ids) * 4 + 1
        cached += requests.run(len(ids) * 4 + 1, ids)
    return cached / tokens


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_the_hit_rate_grows_with_the_host(seed: int) -> None:
    rates = [host_hit_rate(tokens, seed) for tokens in (0, 8, 16, 32, 64, 10**6)]
    assert rates == sorted(rates)
