"""SGLang 0.5.23 on one instance, each rule against a schedule worked by hand.

How to read the tables: `schedule_table.py`. A page holds one token and a step takes eight prompt
tokens unless a test says otherwise. Free pages: those of the pool less, for each request, its
prompt and its tokens but the last.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.sim.engine.harness import AffineTimes, colocated
from tests.sim.serving.schedule_table import Ask, rehearse, table
from tonnage.sim.domain import Request
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.serving.build import SchedulerSpec, serve_scheduler
from tonnage.sim.serving.plan import PromptTaker
from tonnage.sim.serving.policy import SGLANG, Policy
from tonnage.sim.serving.scheduler import Limits
from tonnage.sim.traffic.loads import OpenLoad

# Charges two outputs instead of 4096, so that more requests start than can finish.
RECKLESS = replace(SGLANG, output_charge_most=2)


def scheduler(
    pages: int, *, page: int = 1, chunk: int = 8, running: int = 8, policy: Policy = SGLANG
) -> PromptTaker:
    limits = Limits(chunk, running)
    return serve_scheduler(SchedulerSpec(pages * page, page, limits, policy))


# --- steps --------------------------------------------------------------------------------------


def test_prompts_go_before_tokens() -> None:
    """C comes during step 1, in which B ends, and A's third token waits for C's prompt."""
    asks = [Ask("A", 4, 4), Ask("B", 3, 2), Ask("C", 5, 2, during=1)]
    assert rehearse(scheduler(100), asks) == table("""
        step | prompts     | decode | notes        | free
        0    | A:4@0 B:3@0 |        |              | 93
        1    |             | A B    | end B        | 91
        2    |             | A (B)  |              | 89
        3    | C:5@0       |        |              | 89
        4    |             | A C    | end A, end C | 87
        5    |             | (A C)  |              | 85
    """)


@pytest.mark.parametrize(
    ("lag_steps", "expected"),
    [
        (
            1,
            """
            step | prompts | decode | notes | free
            0    | A:2@0   |        |       | 48
            1    |         | A      |       | 47
            2    |         | A      |       | 46
            3    |         | A      |       | 45
            4    | B:3@0   |        |       | 42
            5    |         | A B    | end B | 40
            6    |         | A (B)  | end A | 38
            7    |         | (A)    |       | 42
            """,
        ),
        (
            0,
            """
            step | prompts | decode | notes | free
            0    | A:2@0   |        |       | 48
            1    |         | A      |       | 47
            2    |         | A      |       | 46
            3    | B:3@0   |        |       | 43
            4    |         | A B    | end B | 41
            5    |         | A      |       | 44
            6    |         | A      | end A | 43
            """,
        ),
    ],
)
def test_a_step_is_planned_when_the_one_before_it_starts(lag_steps: int, expected: str) -> None:
    """B comes during step 2: step 3 is planned by then, so step 4 is its first.

    Without overlapped scheduling it is step 3, and nobody's last token costs a step.
    """
    asks = [Ask("A", 2, 6), Ask("B", 3, 2, during=2)]
    policy = replace(SGLANG, lag_steps=lag_steps)
    assert rehearse(scheduler(50, policy=policy), asks) == table(expected)


def test_an_idle_engine_plans_at_once() -> None:
    """B comes when A's last token is under way, so after A's wasted step nothing delays it."""
    asks = [Ask("A", 2, 2), Ask("B", 3, 1, during=1)]
    assert rehearse(scheduler(50), asks) == table("""
        step | prompts | decode | notes | free
        0    | A:2@0   |        |       | 48
        1    |         | A      | end A | 47
        2    |         | (A)    |       | 46
        3    | B:3@0   |        | end B | 47
        4    |         | (B)    |       | 46
    """)


def test_a_last_token_is_delivered_at_its_own_step() -> None:
    """Steps of 10 ms: A's second token at 20 ms, though the engine works until 30 ms."""
    deployment = colocated(times=AffineTimes(0.01, 0.0, 0.0, 0.0), policy=SGLANG)
    run = simulate(deployment, OpenLoad([Request(0, 0.0, 2, 2), Request(1, 1.0, 2, 2)]))
    assert run.records.frame()["finish_s"].tolist() == pytest.approx([0.02, 1.02], abs=1e-9)
    # B's wasted step has not ended when the last request has.
    assert run.busy_s["serve"] == pytest.approx([0.03 + 0.02], abs=1e-9)


# --- prompts in chunks --------------------------------------------------------------------------


def test_one_prompt_is_under_way_at_a_time() -> None:
    """Eight prompt tokens a step; A's second token waits until no prompt is left."""
    asks = [Ask("A", 4, 2), Ask("B", 14, 2), Ask("C", 3, 2), Ask("D", 9, 1)]
    assert rehearse(scheduler(100), asks) == table("""
        step | prompts            | decode    | notes               | free
        0    | A:4@0 B:4@0        |           |                     | 92
        1    | B:8@4              |           |                     | 84
        2    | B:2@12 C:3@0 D:3@0 |           |                     | 76
        3    | D:6@3              |           | end D               | 70
        4    |                    | A B C (D) | end A, end B, end C | 66
        5    |                    | (A B C)   |                     | 73
    """)


def test_chunks_take_whole_pages_of_the_budget() -> None:
    """Pages of 4, steps of 16: A's 5 tokens count as 8, B is cut at a page and counts as 8, C as 4.

    Free pages: 100 - 2 - 2; then B has 4, C 1, D 1, and A's 2 are held; then D 2, and B's and
    C's are held.
    """
    asks = [Ask("A", 5, 1), Ask("B", 14, 1), Ask("C", 3, 1), Ask("D", 5, 1)]
    assert rehearse(scheduler(100, page=4, chunk=16), asks) == table("""
        step | prompts            | decode | notes        | free
        0    | A:5@0 B:8@0        |        | end A        | 96
        1    | B:6@8 C:3@0 D:4@0  |        | end B, end C | 92
        2    | D:1@4              |        | end D        | 93
        3    |                    | (D)    |              | 98
    """)


# --- admission ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "pages", "both"),
    [
        # Each is charged prompt, allowed outputs and a page: 10 + 20 + 1. What A leaves must be
        # more than B's charge.
        (20, 2 * 31 + 1, True),
        (20, 2 * 31, False),
        # No more than 4096 outputs are charged.
        (10_000, 2 * 4107 + 1, True),
        (10_000, 2 * 4107, False),
    ],
)
def test_a_prompt_is_charged_its_outputs_and_a_page(limit: int, pages: int, both: bool) -> None:
    asks = [Ask("A", 10, 1, limit=limit), Ask("B", 10, 1, limit=limit)]
    first = rehearse(scheduler(pages, chunk=32), asks)[0]
    assert ("B:10@0" in first) is both


@pytest.mark.parametrize(("pages", "row"), [(28, "A:4@8 B:3@0"), (27, "A:4@8")])
def test_the_last_chunk_is_charged_its_outputs_too(pages: int, row: str) -> None:
    """A's last chunk takes 4 + 1 + 9 of the pages - 8 that its first left; B needs 3 + 1 + 1."""
    rows = rehearse(scheduler(pages), [Ask("A", 12, 9), Ask("B", 3, 1)])
    assert rows[1].split(" | ")[1] == row


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        (
            2917,
            """
            step | prompts | decode | notes | free
            0    | A:10@0  |        |       | 2907
            1    |         | A      |       | 2906
            2    | B:100@0 |        | end B | 2806
            3    |         | A (B)  |       | 2804
            4    |         | A      | end A | 2904
            5    |         | (A)    |       | 2903
            """,
        ),
        (
            2916,
            """
            step | prompts | decode | notes | free
            0    | A:10@0  |        |       | 2906
            1    |         | A      |       | 2905
            2    |         | A      |       | 2904
            3    |         | A      | end A | 2903
            4    |         | (A)    |       | 2902
            5    | B:100@0 |        | end B | 2816
            6    |         | (B)    |       | 2815
            """,
        ),
    ],
)
def test_running_requests_are_charged_a_share_that_falls(pages: int, expected: str) -> None:
    """B, which step 2 is the first to look at, is charged 100 + 10 + 1 = 111.

    A may still write 3998 tokens; the ratio is 0.7 - 0.602 / 600 = 0.698997 after one step of
    decoding, so 2794.6 are set aside. Free are pages - 11. With 2917 pages that leaves 111.4:
    enough. With 2916 it leaves 110.4; one step later it would be 2904 - 0.697993 x 3997 = 114.1,
    but the batch counts as full until A leaves.
    """
    asks = [Ask("A", 10, 4, limit=4000), Ask("B", 100, 1, during=0, limit=10)]
    assert rehearse(scheduler(pages, chunk=128), asks) == table(expected)


def test_an_idle_engine_forgets_the_ratio() -> None:
    """After Z's eight steps of decoding B would fit in step 2, as in the case before."""
    one = scheduler(2916, chunk=128)
    rehearse(one, [Ask("Z", 2, 9)])
    asks = [Ask("A", 10, 4, limit=4000), Ask("B", 100, 1, during=0, limit=10)]
    assert rehearse(one, asks)[2] == "2 |  | A |  | 2904"


def test_a_small_prompt_does_not_overtake_one_that_does_not_fit() -> None:
    """B needs 30 + 1 + 1 of 40 - 10 - 0.7 x 2; C would fit, and waits."""
    asks = [Ask("A", 10, 3), Ask("B", 30, 1, during=0), Ask("C", 1, 1, during=0)]
    assert rehearse(scheduler(40, chunk=32), asks) == table("""
        step | prompts      | decode | notes        | free
        0    | A:10@0       |        |              | 30
        1    |              | A      |              | 29
        2    |              | A      | end A        | 28
        3    |              | (A)    |              | 27
        4    | B:30@0 C:1@0 |        | end B, end C | 9
        5    |              | (B C)  |              | 7
    """)


def test_no_more_than_so_many_run() -> None:
    """Two at most: C waits until A's wasted step is over."""
    asks = [Ask("A", 2, 2), Ask("B", 2, 4), Ask("C", 2, 1)]
    assert rehearse(scheduler(100, running=2), asks) == table("""
        step | prompts     | decode | notes | free
        0    | A:2@0 B:2@0 |        |       | 96
        1    |             | A B    | end A | 94
        2    |             | B (A)  |       | 92
        3    | C:2@0       |        | end C | 94
        4    |             | B (C)  | end B | 92
        5    |             | (B)    |       | 94
    """)


# --- retraction ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("keeps", "again"), [("prompt", "B:6@5"), ("nothing", "B:11@0")])
def test_the_longest_prompt_among_equals_is_retracted(keeps: str, again: str) -> None:
    """Six tokens each when the last page is taken; B loses 5 + 6 - 1 pages.

    Its prompt is 5 + 6 now and does not fit beside A's 10 tokens. When A has left, its 5 prompt
    pages are still there.
    """
    policy = replace(RECKLESS, keeps=keeps)
    rows = rehearse(scheduler(20, chunk=16, policy=policy), [Ask("A", 4, 8), Ask("B", 5, 8)])
    assert rows == table(f"""
        step | prompts     | decode | notes     | free
        0    | A:4@0 B:5@0 |        |           | 11
        1    |             | A B    |           | 9
        2    |             | A B    |           | 7
        3    |             | A B    |           | 5
        4    |             | A B    |           | 3
        5    |             | A B    |           | 1
        6    |             | A      | retract B | 10
        7    |             | A      | end A     | 9
        8    |             | (A)    |           | 8
        9    | {again}     |        |           | 9
        10   |             | B      | end B     | 8
        11   |             | (B)    |           | 7
    """)


def test_the_fewest_outputs_go_before_the_longest_prompt() -> None:
    """B has the shorter prompt and came later. C, of B's prompt and outputs, joined last of all."""
    asks = [Ask("A", 6, 7), Ask("B", 3, 7, during=0), Ask("C", 3, 7, during=0)]
    assert rehearse(scheduler(22, policy=RECKLESS), asks)[:8] == table("""
        step | prompts     | decode | notes     | free
        0    | A:6@0       |        |           | 16
        1    |             | A      |           | 15
        2    | B:3@0 C:3@0 |        |           | 9
        3    |             | A B C  |           | 6
        4    |             | A B C  |           | 3
        5    |             | A B C  |           | 0
        6    |             | A B    | retract C | 4
        7    |             | A B    | end A     | 2
    """)


def test_who_was_retracted_waits_behind_the_others_and_the_ratio_is_set_anew() -> None:
    """C waits since step 3, when 7 - 0.698 x 4 was less than its charge of 7 + 1 + 1.

    The retraction in step 6 leaves A with 6 tokens of 8: the ratio is min(1, (6 + 20) / 9) = 1.
    In step 7, A may write 1 more, and 10 - 1 x 1 is not more than 9 (at the old ratio, or had the
    step of the retraction counted, it would be). In step 9, C goes first, then B.
    """
    asks = [Ask("A", 4, 8), Ask("B", 5, 8), Ask("C", 7, 1, during=1)]
    assert rehearse(scheduler(20, chunk=16, policy=RECKLESS), asks) == table("""
        step | prompts     | decode | notes     | free
        0    | A:4@0 B:5@0 |        |           | 11
        1    |             | A B    |           | 9
        2    |             | A B    |           | 7
        3    |             | A B    |           | 5
        4    |             | A B    |           | 3
        5    |             | A B    |           | 1
        6    |             | A      | retract B | 10
        7    |             | A      | end A     | 9
        8    |             | (A)    |           | 8
        9    | C:7@0 B:6@5 |        | end C     | 2
        10   |             | B (C)  | end B     | 0
        11   |             | (B)    |           | 7
    """)


def test_prompt_pages_that_others_took_are_computed_again() -> None:
    """C takes the 15 other free pages, then two of B's last; its wasted step takes one more."""
    asks = [Ask("A", 4, 8), Ask("B", 5, 8), Ask("C", 17, 1, during=1)]
    rows = rehearse(scheduler(20, chunk=32, policy=RECKLESS), asks)
    assert rows[9:] == table("""
        step | prompts | decode | notes | free
        9    | C:17@0  |        | end C | 3
        10   |         | (C)    |       | 2
        11   | B:9@2   |        |       | 9
        12   |         | B      | end B | 8
        13   |         | (B)    |       | 7
    """)


def test_the_last_request_is_aborted_when_no_page_is_left() -> None:
    rows = rehearse(scheduler(7), [Ask("A", 4, 9), Ask("B", 2, 1, during=3)])
    assert rows == table("""
        step | prompts | decode | notes          | free
        0    | A:4@0   |        |                | 3
        1    |         | A      |                | 2
        2    |         | A      |                | 1
        3    |         | A      |                | 0
        4    | B:2@0   |        | abort A, end B | 5
        5    |         | (B)    |                | 4
    """)


def test_nobody_is_aborted_while_another_still_holds_pages() -> None:
    """A has ended and holds 6 pages for its wasted step; B is retracted, not aborted."""
    policy = replace(SGLANG, output_charge_most=1)
    asks = [Ask("A", 3, 4), Ask("B", 3, 6)]
    assert rehearse(scheduler(12, policy=policy), asks) == table("""
        step | prompts     | decode | notes     | free
        0    | A:3@0 B:3@0 |        |           | 6
        1    |             | A B    |           | 4
        2    |             | A B    |           | 2
        3    |             | A B    | end A     | 0
        4    |             | (A)    | retract B | 5
        5    | B:4@3       |        |           | 5
        6    |             | B      | end B     | 4
        7    |             | (B)    |           | 3
    """)
