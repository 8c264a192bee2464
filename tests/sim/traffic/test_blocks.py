"""The endless prefix cache against counts that look at every prefix of every prompt."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.sim.domain import Request
from tonnage.sim.traffic.blocks import InfiniteCache, Reuse, prompt_blocks

BLOCK = 16
KEPT_S = (0.0, 2.0, 5.0)


@st.composite
def prompts(draw: st.DrawFn) -> list[Request]:
    """Draw prompts whose ids name a block with all before it: nodes of a growing tree."""
    paths: list[tuple[int, ...]] = [()]
    fresh = 0
    found: list[Request] = []
    time_s = 0.0
    for number in range(draw(st.integers(1, 12))):
        known = draw(st.sampled_from(paths))
        kept = draw(st.integers(0, len(known)))
        added = draw(st.integers(0, 4))
        ids = known[:kept] + tuple(range(fresh, fresh + added))
        fresh += added
        paths.append(ids)
        time_s += draw(st.integers(0, 3))
        short = draw(st.integers(0, BLOCK - 1))  # the last block may be filled in part
        tokens = max(1, BLOCK * len(ids) - short)
        session = draw(st.one_of(st.none(), st.integers(0, 2)))
        found.append(Request(number, time_s, tokens, 1, None, session, ids, BLOCK if ids else 0))
    return found


def fill(request: Request, depth: int) -> int:
    """Return the prompt tokens in a block."""
    return min(BLOCK, request.input_tokens - BLOCK * depth)


@settings(deadline=None)
@given(prompts())
def test_hits_are_the_prefixes_that_were_there(requests: list[Request]) -> None:
    cache = InfiniteCache()
    seen: set[tuple[int, ...]] = set()
    for request in requests:
        prefixes = [request.block_ids[: n + 1] for n in range(len(request.block_ids))]
        hits = sum(prefix in seen for prefix in prefixes)
        tokens = sum(fill(request, depth) for depth in range(hits))
        assert cache.use(request) == Reuse(len(prefixes), hits, tokens)
        seen.update(prefixes)
    assert len(cache) == len(seen)
    assert cache.odd_blocks == 0


@settings(deadline=None)
@given(prompts())
def test_blocks_that_stay_for_a_while_are_hit_for_that_long(requests: list[Request]) -> None:
    cache = InfiniteCache(KEPT_S)
    last_s: dict[tuple[int, ...], float] = {}
    expected = [0, 0, 0]
    for request in requests:
        cache.use(request)
        prefixes = [request.block_ids[: n + 1] for n in range(len(request.block_ids))]
        for place, kept_s in enumerate(KEPT_S):
            expected[place] += sum(
                fill(request, depth)
                for depth, prefix in enumerate(prefixes)
                if prefix in last_s and request.arrival_s - last_s[prefix] <= kept_s
            )
        last_s |= dict.fromkeys(prefixes, request.arrival_s)
    assert cache.hit_tokens_if_kept.tolist() == expected


@settings(deadline=None)
@given(prompts(), st.lists(st.integers(0, 40), min_size=1, max_size=5))
def test_the_working_set_is_what_was_used_and_what_will_be(
    requests: list[Request], times: list[int]
) -> None:
    cache = InfiniteCache()
    spans: dict[tuple[int, ...], tuple[float, float, int]] = {}
    for request in requests:
        cache.use(request)
        for depth in range(len(request.block_ids)):
            prefix = request.block_ids[: depth + 1]
            last_whole = depth < len(request.block_ids) - 1
            tokens = BLOCK if last_whole else fill(request, depth)
            first_s, _, tokens = spans.get(prefix, (request.arrival_s, 0.0, tokens))
            spans[prefix] = (first_s, request.arrival_s, tokens)
    seen, used_again = cache.working_set_tokens(np.array(times, dtype=float))
    for place, time in enumerate(times):
        assert seen[place] == sum(n for first, _, n in spans.values() if first <= time)
        alive = [n for first, last, n in spans.values() if first <= time <= last]
        assert used_again[place] == sum(alive)


def test_an_id_behind_another_beginning_is_no_hit() -> None:
    cache = InfiniteCache()
    cache.use(Request(0, 0.0, 32, 1, block_ids=(1, 2), block_tokens=16))
    assert cache.use(Request(1, 1.0, 32, 1, block_ids=(3, 2), block_tokens=16)).hit_blocks == 0
    assert cache.odd_blocks == 1
    assert cache.use(Request(2, 2.0, 32, 1, block_ids=(1, 2), block_tokens=16)).hit_blocks == 2


def test_blocks_of_the_output_are_kept_but_are_no_part_of_the_prompt() -> None:
    cache = InfiniteCache()
    first = Request(0, 0.0, 32, 32, block_ids=(1, 2, 3, 4), block_tokens=16)
    assert prompt_blocks(first) == 2
    assert cache.use(first).blocks == 2
    following = Request(1, 1.0, 80, 1, block_ids=(1, 2, 3, 4, 5), block_tokens=16)
    assert cache.use(following) == Reuse(5, 4, 64)


def test_a_request_without_ids_hits_nothing() -> None:
    cache = InfiniteCache()
    assert [cache.use(Request(n, 0.0, 100, 1)) for n in range(2)] == [Reuse(0, 0, 0)] * 2
    assert len(cache) == 0
