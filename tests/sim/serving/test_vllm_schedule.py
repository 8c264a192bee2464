"""vLLM on one instance, each rule against a schedule worked by hand.

How to read the tables: `schedule_table.py`. A page holds one token and a step takes eight tokens
unless a test says otherwise. `VLLM` plans one step ahead, as vLLM does since 0.14; `VLLM_SYNC`
does not.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.serving.schedule_table import Ask, rehearse, table
from tonnage.sim.serving.build import SchedulerSpec, serve_scheduler
from tonnage.sim.serving.plan import PromptTaker
from tonnage.sim.serving.policy import VLLM, VLLM_SYNC, Policy
from tonnage.sim.serving.scheduler import Limits


def scheduler(
    pages: int, *, page: int = 1, budget: int = 8, running: int = 8, policy: Policy = VLLM
) -> PromptTaker:
    return serve_scheduler(SchedulerSpec(pages * page, page, Limits(budget, running), policy))


# --- steps --------------------------------------------------------------------------------------


def test_tokens_and_prompts_share_the_budget_of_a_step() -> None:
    """Running requests come first: step 1 has 8 - 1 tokens for prompts, step 2 has 8 - 2."""
    asks = [Ask("A", 4, 3), Ask("B", 10, 2), Ask("C", 3, 1)]
    assert rehearse(scheduler(100), asks) == table("""
        step | prompts     | decode | notes               | free
        0    | A:4@0 B:4@0 |        |                     | 92
        1    | B:6@4 C:1@0 | A      |                     | 84
        2    | C:2@1       | A B    | end A, end B, end C | 80
    """)


def test_no_prompt_when_tokens_use_the_budget_up() -> None:
    asks = [Ask("A", 1, 3), Ask("B", 1, 2), Ask("C", 3, 1, during=0)]
    assert rehearse(scheduler(20, budget=2), asks) == table("""
        step | prompts     | decode | notes | free
        0    | A:1@0 B:1@0 |        |       | 18
        1    |             | A B    | end B | 16
        2    | C:1@0       | A      | end A | 14
        3    | C:2@1       |        | end C | 14
    """)


def test_chunks_are_not_cut_at_a_page() -> None:
    """Pages of 4, steps of 16: B gets the 11 tokens that A leaves."""
    asks = [Ask("A", 5, 1), Ask("B", 14, 1)]
    assert rehearse(scheduler(100, page=4, budget=16), asks) == table("""
        step | prompts      | decode | notes | free
        0    | A:5@0 B:11@0 |        | end A | 95
        1    | B:3@11       |        | end B | 94
    """)


def test_a_page_is_taken_for_the_token_that_a_step_writes() -> None:
    """Pages of 4: the step that writes a request's 5th token takes a page, and the 9th."""
    assert rehearse(scheduler(10, page=4), [Ask("A", 4, 6)]) == table("""
        step | prompts | decode | notes | free
        0    | A:4@0   |        |       | 9
        1    |         | A      |       | 8
        2    |         | A      |       | 8
        3    |         | A      |       | 8
        4    |         | A      |       | 8
        5    |         | A      | end A | 7
    """)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (
            VLLM,
            """
            step | prompts | decode | notes        | free
            0    | A:2@0   |        |              | 48
            1    |         | A      |              | 47
            2    |         | A      |              | 46
            3    |         | A      |              | 45
            4    | B:3@0   | A      |              | 41
            5    |         | A B    | end A, end B | 39
            """,
        ),
        (
            VLLM_SYNC,
            """
            step | prompts | decode | notes | free
            0    | A:2@0   |        |       | 48
            1    |         | A      |       | 47
            2    |         | A      |       | 46
            3    | B:3@0   | A      |       | 42
            4    |         | A B    | end B | 40
            5    |         | A      | end A | 43
            """,
        ),
    ],
)
def test_a_step_is_planned_when_the_one_before_it_starts(policy: Policy, expected: str) -> None:
    """B comes during step 2: its first step is step 4, step 3 without asynchronous scheduling."""
    asks = [Ask("A", 2, 6), Ask("B", 3, 2, during=2)]
    assert rehearse(scheduler(50, policy=policy), asks) == table(expected)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (
            VLLM,
            """
            step | prompts     | decode | notes        | free
            0    | A:2@0 B:2@0 |        |              | 96
            1    |             | A B    | end A        | 94
            2    |             | B      |              | 93
            3    | C:2@0       | B      | end B, end C | 93
            """,
        ),
        (
            VLLM_SYNC,
            """
            step | prompts     | decode | notes | free
            0    | A:2@0 B:2@0 |        |       | 96
            1    |             | A B    | end A | 94
            2    | C:2@0       | B      | end C | 94
            3    |             | B      | end B | 95
            """,
        ),
    ],
)
def test_a_place_is_kept_for_one_step_after_the_last_token(policy: Policy, expected: str) -> None:
    """Two run at most. A's 2 + 1 pages and its place are held through step 2, in which it is not
    computed; without asynchronous scheduling C takes its place at once."""
    asks = [Ask("A", 2, 2), Ask("B", 2, 4), Ask("C", 2, 1)]
    assert rehearse(scheduler(100, running=2, policy=policy), asks) == table(expected)


# --- admission and preemption -------------------------------------------------------------------


def test_a_prompt_starts_only_when_all_of_it_fits() -> None:
    """B's first chunk would fit beside A, its 10 tokens do not. C waits behind it."""
    asks = [Ask("A", 7, 3), Ask("B", 10, 1), Ask("C", 1, 1)]
    assert rehearse(scheduler(16), asks) == table("""
        step | prompts     | decode | notes        | free
        0    | A:7@0       |        |              | 9
        1    |             | A      |              | 8
        2    |             | A      | end A        | 7
        3    | B:8@0       |        |              | 8
        4    | B:2@8 C:1@0 |        | end B, end C | 5
    """)


def test_outputs_are_not_reserved() -> None:
    """Both start although A alone will fill the memory; SGLang charges A's and B's 8 outputs."""
    asks = [Ask("A", 3, 8), Ask("B", 3, 8)]
    assert rehearse(scheduler(12), asks)[0] == "0 | A:3@0 B:3@0 |  |  | 6"


def test_the_latest_is_preempted_and_computed_again_but_for_pages_still_there() -> None:
    """B loses 3 + 4 - 1 pages in step 4. A takes four of them, the last ones first.

    B comes back with 3 + 4 tokens when A has left, and finds the first two.
    """
    asks = [Ask("A", 3, 8), Ask("B", 3, 8)]
    assert rehearse(scheduler(12), asks) == table("""
        step | prompts     | decode | notes     | free
        0    | A:3@0 B:3@0 |        |           | 6
        1    |             | A B    |           | 4
        2    |             | A B    |           | 2
        3    |             | A B    |           | 0
        4    |             | A      | retract B | 5
        5    |             | A      |           | 4
        6    |             | A      |           | 3
        7    |             | A      | end A     | 2
        8    | B:5@2       |        |           | 5
        9    |             | B      |           | 4
        10   |             | B      |           | 3
        11   |             | B      | end B     | 2
    """)


def test_full_pages_only_are_found_again() -> None:
    """Pages of 4. B holds 3 + 5 - 1 tokens when A needs a third page: one full page, one not.

    A takes the one that is not full.
    """
    asks = [Ask("A", 4, 7), Ask("B", 3, 7)]
    assert rehearse(scheduler(4, page=4), asks) == table("""
        step | prompts     | decode | notes     | free
        0    | A:4@0 B:3@0 |        |           | 2
        1    |             | A B    |           | 1
        2    |             | A B    |           | 0
        3    |             | A B    |           | 0
        4    |             | A B    |           | 0
        5    |             | A      | retract B | 1
        6    |             | A      | end A     | 1
        7    | B:4@4       |        |           | 2
        8    |             | B      | end B     | 1
    """)


def test_the_preempted_come_before_all_others() -> None:
    """C could start in step 5, but B is before it, and comes back when A has left."""
    asks = [Ask("A", 3, 8), Ask("B", 3, 8), Ask("C", 1, 1, during=2)]
    assert rehearse(scheduler(12), asks) == table("""
        step | prompts     | decode | notes     | free
        0    | A:3@0 B:3@0 |        |           | 6
        1    |             | A B    |           | 4
        2    |             | A B    |           | 2
        3    |             | A B    |           | 0
        4    |             | A      | retract B | 5
        5    |             | A      |           | 4
        6    |             | A      |           | 3
        7    |             | A      | end A     | 2
        8    | B:5@2 C:1@0 |        | end C     | 4
        9    |             | B      |           | 3
        10   |             | B      |           | 3
        11   |             | B      | end B     | 2
    """)


def test_nobody_is_let_in_by_a_step_that_preempts() -> None:
    """Were B put behind C, C could start in step 4 for all that is free; it starts in step 5."""
    policy = replace(VLLM, requeue_first=False)
    asks = [Ask("A", 3, 8), Ask("B", 3, 8), Ask("C", 1, 1, during=2)]
    assert rehearse(scheduler(12, policy=policy), asks)[4:] == table("""
        step | prompts | decode | notes     | free
        4    |         | A      | retract B | 5
        5    | C:1@0   | A      | end C     | 3
        6    |         | A      |           | 2
        7    |         | A      | end A     | 2
        8    | B:6@1   |        |           | 5
        9    |         | B      |           | 4
        10   |         | B      |           | 3
        11   |         | B      | end B     | 2
    """)


def test_several_preempted_come_back_in_their_order() -> None:
    """Pages of 4, twelve tokens a step. All four need a second page in step 2, and one is free.

    D and C leave 4 tokens each, a full page. A and B take the free page and D's, so C comes back
    first and finds its page.
    """
    asks = [Ask("A", 3, 4), Ask("B", 3, 4), Ask("C", 3, 3), Ask("D", 3, 3)]
    assert rehearse(scheduler(5, page=4, budget=12), asks) == table("""
        step | prompts                 | decode  | notes                | free
        0    | A:3@0 B:3@0 C:3@0 D:3@0 |         |                      | 1
        1    |                         | A B C D |                      | 1
        2    |                         | A B     | retract D, retract C | 1
        3    |                         | A B     | end A, end B         | 1
        4    | C:1@4 D:5@0             |         | end C, end D         | 1
    """)


def test_a_prompt_under_way_is_the_first_to_lose_its_pages() -> None:
    """Four tokens a step. B's 10 pages go when A needs one; A takes two of them, B finds eight."""
    asks = [Ask("A", 3, 6), Ask("B", 12, 1)]
    assert rehearse(scheduler(16, budget=4), asks) == table("""
        step | prompts     | decode | notes | free
        0    | A:3@0 B:1@0 |        |       | 12
        1    | B:3@1       | A      |       | 8
        2    | B:3@4       | A      |       | 4
        3    | B:3@7       | A      |       | 0
        4    |             | A      |       | 9
        5    |             | A      | end A | 8
        6    | B:4@8       |        | end B | 4
    """)
