"""TensorRT-LLM on one instance, each rule against a schedule worked by hand.

How to read the tables: `schedule_table.py`. A page holds one token and a step takes eight tokens
unless a test says otherwise.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.serving.schedule_table import Ask, rehearse, table
from tonnage.sim.serving.build import SchedulerSpec, decode_scheduler, serve_scheduler
from tonnage.sim.serving.plan import PromptTaker
from tonnage.sim.serving.policy import TRTLLM, VLLM, Policy, policy_for
from tonnage.sim.serving.scheduler import Limits


def scheduler(
    pages: int, *, page: int = 1, budget: int = 8, running: int = 8, policy: Policy = TRTLLM
) -> PromptTaker:
    return serve_scheduler(SchedulerSpec(pages * page, page, Limits(budget, running), policy))


def test_every_version_schedules_alike() -> None:
    assert policy_for("trtllm", "1.0.0rc3") is policy_for("trtllm", "1.3") is TRTLLM


def test_prompts_and_tokens_share_a_step_and_prompts_are_whole() -> None:
    """Step 0 has 4 tokens left, B needs 6 and waits; step 1 has 8 - 1 for it; C then has none."""
    asks = [Ask("A", 4, 3), Ask("B", 6, 2), Ask("C", 3, 1)]
    assert rehearse(scheduler(100), asks) == table("""
        step | prompts | decode | notes        | free
        0    | A:4@0   |        |              | 96
        1    | B:6@0   | A      |              | 89
        2    | C:3@0   | A B    | end A, end B, end C | 84
    """)


def test_a_prompt_that_fills_a_step_waits_until_nobody_runs() -> None:
    """Eight tokens never fit beside A's; B starts when A has gone."""
    rows = rehearse(scheduler(100), [Ask("A", 2, 4), Ask("B", 8, 1)])
    alone = [row for row in rows if "B:8@0" in row]
    assert len(alone) == 1
    assert alone[0].split(" | ")[2] == ""


def test_a_prompt_longer_than_a_step_is_cut() -> None:
    rows = rehearse(scheduler(100), [Ask("A", 20, 1)])
    assert [row.split(" | ")[1] for row in rows] == ["A:8@0", "A:8@8", "A:4@16"]


def test_a_prompt_waits_for_room_for_all_that_running_ones_may_write() -> None:
    """Ten pages: A takes 2 and may write 5 more; B's 4 + 1 would fit today, and waits for A."""
    rows = rehearse(scheduler(10), [Ask("A", 2, 6), Ask("B", 4, 1)])
    assert rows[0].startswith("0 | A:2@0 |")
    started = next(index for index, row in enumerate(rows) if "B:4@0" in row)
    assert any("end A" in row for row in rows[:started])
    assert not any("retract" in row for row in rows)


def test_vllm_s_rule_would_have_let_it_in() -> None:
    rows = rehearse(
        scheduler(10, policy=replace(TRTLLM, evicts=True, charges_outputs=False)),
        [Ask("A", 2, 6), Ask("B", 4, 1)],
    )
    assert "B:4@0" in rows[0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=7),
    st.integers(20, 40),
    st.sampled_from([1, 2, 4]),
)
def test_nobody_is_evicted(sizes: list[tuple[int, int]], pages: int, page: int) -> None:
    asks = [
        Ask(name, prompt, outputs)
        for name, (prompt, outputs) in zip("ABCDEFG", sizes, strict=False)
    ]
    rows = rehearse(scheduler(pages, page=page, budget=12), asks)
    text = "\n".join(rows)
    assert "retract" not in text
    assert "abort" not in text
    for ask in asks:
        assert text.count(f"end {ask.name}") == 1
        assert text.count(f"{ask.name}:{ask.input_tokens}@0") == 1


@pytest.mark.parametrize("limit", [None, 9])
def test_it_is_the_limit_of_the_client_that_is_reserved(limit: int | None) -> None:
    """A writes 2 tokens; where its client allows 9, B finds no room among 12 pages."""
    rows = rehearse(scheduler(12), [Ask("A", 2, 2, limit=limit), Ask("B", 3, 2)])
    assert ("B:3@0" in rows[0]) == (limit is None)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.integers(2, 9)), min_size=1, max_size=7),
    st.integers(20, 40),
    st.sampled_from([1, 2, 4]),
)
def test_a_decode_instance_evicts_nobody_either(
    sizes: list[tuple[int, int]], pages: int, page: int
) -> None:
    asks = [
        Ask(name, prompt, outputs)
        for name, (prompt, outputs) in zip("ABCDEFG", sizes, strict=False)
    ]
    limits = Limits(8, 8)
    rows = rehearse(decode_scheduler(SchedulerSpec(pages * page, page, limits, TRTLLM)), asks)
    text = "\n".join(rows)
    assert "retract" not in text
    assert "abort" not in text
    for ask in asks:
        assert text.count(f"end {ask.name}") == 1
        assert text.count(f"give {ask.name}") == 1


def test_a_decode_instance_gives_pages_when_all_outputs_fit() -> None:
    """Ten pages: A takes 2 and may take 5 more; B's 3 and 2 wait for A, which vLLM's do not."""
    asks = [Ask("A", 2, 6), Ask("B", 3, 3)]
    for policy, waits in ((TRTLLM, True), (VLLM, False)):
        scheduler = decode_scheduler(SchedulerSpec(10, 1, Limits(8, 8), policy))
        assert ("give B" not in rehearse(scheduler, asks)[0]) == waits
