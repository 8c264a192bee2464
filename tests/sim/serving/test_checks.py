"""Checks counted from steps: a segment as its steps one by one, and counted by hand."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.sim.domain import Coverage, IntegritySpec, PromptChunk, Step
from tonnage.sim.serving.checks import CheckCount, CheckTally


def step_of(contexts: list[int]) -> Step:
    return Step(np.array(contexts, dtype=np.int64), float(sum(contexts)), ())


def tallied(
    spec: IntegritySpec, steps: list[tuple[Step, int]], page: int, extra: int
) -> CheckCount:
    count = CheckCount()
    tally = CheckTally(spec, page, extra, count)
    for step, times in steps:
        tally.take_in(step, times, 0)
    return count


@settings(max_examples=40, deadline=None)
@given(
    contexts=st.lists(st.integers(1, 200), min_size=1, max_size=6),
    steps=st.integers(1, 90),
    page=st.sampled_from([1, 4, 64]),
    extra=st.sampled_from([0, 5]),
    every=st.integers(1, 5),
)
def test_a_segment_compares_what_its_steps_do(
    contexts: list[int], steps: int, page: int, extra: int, every: int
) -> None:
    """By hand: every page that holds a token, in every step that is looked at."""
    spec = IntegritySpec("batched", every, frozenset({Coverage.DECODE}))
    count = tallied(spec, [(step_of(contexts), steps)], page, extra)
    looked_at = range(0, steps, every)
    by_hand = sum(-(-(one + step + extra) // page) for step in looked_at for one in contexts)
    assert (count.entries, count.runs) == (by_hand, len(looked_at))
    assert count.unchecked_steps == steps - len(looked_at)
    one_by_one = [(step_of([one + step for one in contexts]), 1) for step in range(steps)]
    assert tallied(spec, one_by_one, page, extra) == count


def test_each_place_has_its_own_entries() -> None:
    """A chunk of 6 tokens after 10 on pages of 4: it reads 3 pages and writes 2, one of them again.

    Two requests decode beside it, on 3 and 5 pages, and write a page each.
    """
    step = Step(np.array([12, 17], dtype=np.int64), 29.0, (PromptChunk(6, 10),))
    expected = {Coverage.DECODE: 8, Coverage.PREFIX: 3, Coverage.WRITER: 2 + 2}
    for place, entries in expected.items():
        spec = IntegritySpec("batched", covers=frozenset({place}))
        assert tallied(spec, [(step, 1)], 4, 0).entries == entries
    assert tallied(IntegritySpec("canary"), [(step, 1)], 4, 0) == CheckCount()
