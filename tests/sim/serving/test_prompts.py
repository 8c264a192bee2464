"""The queue of prompts: chunks, who comes first, the ratio of new tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.sim.domain import Request
from tonnage.sim.serving.pages import PagePool
from tonnage.sim.serving.policy import PLAIN, SGLANG, VLLM, Policy
from tonnage.sim.serving.prompts import Chunk, NewTokenRatio, PromptQueue, commit_chunks
from tonnage.sim.serving.sequence import Sequence


def queue_of(*inputs: int, pages: int = 1000, page: int = 1, policy: Policy = PLAIN) -> PromptQueue:
    queue = PromptQueue(PagePool(pages * page, page), policy)
    for number, tokens in enumerate(inputs):
        queue.add(Sequence(Request(number, 0.0, tokens, 5)), 0)
    return queue


def written(chunks: list[Chunk]) -> list[tuple[int, int, int]]:
    return [(one.sequence.request.id, one.tokens, one.past_tokens) for one in chunks]


# --- chunks -------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    inputs=st.lists(st.integers(1, 70), min_size=1, max_size=8),
    budget_pages=st.integers(1, 8),
    page=st.sampled_from([1, 4, 16]),
    slots=st.integers(1, 4),
    policy=st.sampled_from([PLAIN, SGLANG, VLLM]),
)
def test_prompts_are_cut_into_consecutive_chunks_within_the_budget(
    inputs: list[int], budget_pages: int, page: int, slots: int, policy: Policy
) -> None:
    budget = budget_pages * page
    queue = queue_of(*inputs, page=page, policy=policy)
    done = dict.fromkeys(range(len(inputs)), 0)
    started: list[int] = []
    while len(queue) or queue.under_way is not None:
        chunks = queue.chunks(budget, slots, 0)
        started += [one.request.id for one in queue.take_started()]
        assert chunks
        assert sum(chunk.tokens for chunk in chunks) <= budget
        assert sum(not chunk.past_tokens for chunk in chunks) <= slots
        for chunk in chunks:
            number = chunk.sequence.request.id
            assert chunk.past_tokens == done[number]
            done[number] += chunk.tokens
            assert chunk.is_last is (done[number] == inputs[number])
            cut_at_a_page = done[number] % page == 0
            assert chunk.is_last or cut_at_a_page or not policy.aligns_chunks
        assert all(chunk.is_last for chunk in chunks[:-1])
        commit_chunks(chunks)
    assert done == dict(enumerate(inputs))
    assert started == list(range(len(inputs)))


def test_no_slot_stops_new_prompts_but_not_the_one_under_way() -> None:
    queue = queue_of(10, 3)
    assert written(queue.chunks(6, 1, 0)) == [(0, 6, 0)]
    assert written(queue.chunks(6, 0, 0)) == [(0, 4, 6)]
    assert written(queue.chunks(6, 0, 0)) == []
    assert written(queue.chunks(6, 1, 0)) == [(1, 3, 0)]


def test_a_prompt_is_not_looked_at_before_its_step() -> None:
    queue = queue_of(4)
    late = Sequence(Request(1, 0.0, 4, 5))
    queue.add(late, 3)
    assert written(queue.chunks(100, 9, 0)) == [(0, 4, 0)]
    assert queue.steps_to_head(1) == 2
    assert queue.chunks(100, 9, 2) == []
    assert written(queue.chunks(100, 9, 3)) == [(1, 4, 0)]


# --- prompts that lose their pages or go ---------------------------------------------------------


def test_pages_of_a_dropped_prompt_are_free_and_it_starts_again() -> None:
    queue = queue_of(10, pages=12)
    pool = queue._pool
    queue.chunks(6, 1, 0)
    assert pool.used_pages == 6
    queue.drop_under_way(first=True)
    assert pool.used_pages == 0
    assert written(queue.chunks(6, 1, 0)) == [(0, 6, 0)]


@pytest.mark.parametrize(("taken", "again"), [(0, (0, 4, 8)), (6, (0, 6, 4))])
def test_vllm_finds_the_full_pages_of_a_dropped_prompt(
    taken: int, again: tuple[int, int, int]
) -> None:
    """Pages of 4. Ten of its 12 tokens are computed: two full pages and one that is not.

    Of seven pages it had three. Six others go: the four free ones, the one not full, the last.
    """
    queue = queue_of(12, pages=7, page=4, policy=VLLM)
    pool = queue._pool
    queue.chunks(10, 1, 0)
    queue.drop_under_way(first=True)
    assert pool.allocate(taken)
    pool.release(taken)
    assert written(queue.chunks(6, 1, 0)) == [again]


def test_a_prompt_found_whole_computes_its_last_token() -> None:
    """There is no next token without computing one."""
    policy = replace(VLLM, keeps="all")
    queue = queue_of(8, 8, pages=4, page=4, policy=policy)
    pool = queue._pool
    queue.chunks(8, 1, 0)
    first = queue.take_started()[0]
    pool.retain(first.request.id, first.prompt_pages)
    queue.put_back(first, 0, first=True)
    assert written(queue.chunks(8, 1, 0)) == [(0, 1, 7)]
    assert pool.used_pages == 2


def test_a_prompt_can_be_removed_wherever_it_is() -> None:
    queue = queue_of(10, 3, pages=20)
    under_way, waiting = queue.waiting
    queue.chunks(6, 1, 0)
    assert queue.remove(waiting)
    assert queue.remove(under_way)
    assert not queue.remove(under_way)
    assert queue._pool.used_pages == 0
    assert queue.chunks(6, 1, 0) == []


def test_what_a_removed_prompt_left_for_reuse_is_anybodys() -> None:
    queue = queue_of(12, pages=7, page=4, policy=VLLM)
    queue.chunks(10, 1, 0)
    queue.drop_under_way(first=True)
    (dropped,) = queue.waiting
    assert queue._pool.reusable_pages(dropped.request.id) == 2
    assert queue.remove(dropped)
    assert queue._pool.reusable_pages(dropped.request.id) == 0


# --- the ratio of new tokens ---------------------------------------------------------------------


def ratio() -> NewTokenRatio:
    return NewTokenRatio(SGLANG.ratio_start, SGLANG.ratio_least, SGLANG.ratio_decay_steps)


@pytest.mark.parametrize(
    ("steps", "value"),
    [(0, 0.7), (1, 0.7 - 0.602 / 600), (300, 0.399), (600, 0.098), (9999, 0.098)],
)
def test_the_ratio_falls_from_70_to_a_seventh_of_it_in_600_steps(steps: int, value: float) -> None:
    """0.7 x 0.14 = 0.098."""
    one = ratio()
    one.decoded(steps)
    assert one.value == pytest.approx(value, abs=1e-12)


def test_a_retraction_sets_the_ratio_from_those_that_stay() -> None:
    """(30 decoded + 20 x 2 requests) / (100 allowed + 1); its own step does not lower it."""
    one = ratio()
    one.decoded(600)
    one.retracted(30, 100, 2, 20)
    assert one.value == pytest.approx(70 / 101)
    one.decoded(1)
    assert one.value == pytest.approx(70 / 101)
    one.decoded(10)
    assert one.value == pytest.approx(70 / 101 - 10 * 0.602 / 600)
    one.retracted(90, 100, 2, 20)
    assert one.value == 1.0
    one.retracted(0, 0, 0, 20)  # nobody stays
    assert one.value == pytest.approx(0.098)


def test_an_idle_engine_starts_from_the_first_ratio() -> None:
    one = ratio()
    one.retracted(90, 100, 2, 20)
    one.decoded(500)
    one.reset()
    assert one.value == 0.7
