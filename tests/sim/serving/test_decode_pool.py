"""Decode instances of a disaggregated deployment, each rule against a schedule worked by hand.

How to read the tables: `schedule_table.py`; a page holds one token. A request has its first token
when its KV arrives, so one of n outputs decodes n - 1 steps. A row before the steps is an idle
engine's plan.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from tests.sim.engine.harness import AffineTimes, disaggregated
from tests.sim.serving.schedule_table import Ask, rehearse, table
from tonnage.sim.domain import Request
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.serving.build import SchedulerSpec, decode_scheduler, prefill_scheduler
from tonnage.sim.serving.plan import Receiver
from tonnage.sim.serving.policy import SGLANG, VLLM, Policy
from tonnage.sim.serving.scheduler import Limits
from tonnage.sim.serving.sequence import Sequence
from tonnage.sim.traffic.loads import OpenLoad


def pool(pages: int, policy: Policy, *, page: int = 1, running: int = 8) -> Receiver:
    return decode_scheduler(SchedulerSpec(pages * page, page, Limits(8, running), policy))


def sglang(reserved_tokens: int) -> Policy:
    return replace(SGLANG, reserved_decode_tokens=reserved_tokens)


# --- giving pages (SGLang) ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        (
            30,
            """
            step | prompts | decode  | notes                     | free
            -    |         |         | give A, give B, give C    | 12
            0    |         | A B C   |                           | 9
            1    |         | A B C   |                           | 6
            2    |         | A B C   | end A, end B, end C       | 3
            3    |         | (A B C) |                           | 0
            """,
        ),
        (
            29,
            """
            step | prompts | decode | notes          | free
            -    |         |        | give A, give B | 17
            0    |         | A B    |                | 15
            1    |         | A B    |                | 13
            2    |         | A B    | end A, end B   | 11
            3    |         | (A B)  |                | 9
            -    |         |        | give C         | 23
            4    |         | C      |                | 22
            5    |         | C      |                | 21
            6    |         | C      | end C          | 20
            7    |         | (C)    |                | 19
            """,
        ),
    ],
)
def test_so_many_tokens_are_kept_for_each_that_holds_pages(pages: int, expected: str) -> None:
    """Four for each of A and B, so C's 6 + 4 must fit into what 12 pages and 8 tokens leave."""
    asks = [Ask("A", 6, 4), Ask("B", 6, 4), Ask("C", 6, 4)]
    assert rehearse(pool(pages, sglang(4)), asks) == table(expected)


@pytest.mark.parametrize(("pages", "both"), [(100 + 612 + 512, True), (100 + 612 + 511, False)])
def test_sglang_keeps_512_tokens_for_each(pages: int, both: bool) -> None:
    first = rehearse(pool(pages, SGLANG), [Ask("A", 100, 9), Ask("B", 100, 9)])[0]
    assert ("give B" in first) is both


@pytest.mark.parametrize(("pages", "both"), [(6, True), (5, False)])
def test_whole_pages_are_needed(pages: int, both: bool) -> None:
    """Pages of 4: B's 6 tokens take 8 and keep 4; A's take 8 and keep 4."""
    asks = [Ask("A", 6, 2), Ask("B", 6, 2)]
    first = rehearse(pool(pages, sglang(4), page=4), asks)[0]
    assert ("give B" in first) is both


def test_the_first_gets_pages_whatever_the_reserve() -> None:
    assert rehearse(pool(10, SGLANG), [Ask("A", 8, 2)]) == table("""
        step | prompts | decode | notes  | free
        -    |         |        | give A | 2
        0    |         | A      | end A  | 1
        1    |         | (A)    |        | 0
    """)


@pytest.mark.parametrize(
    ("pages", "expected"),
    [
        (
            32,
            """
            step | prompts | decode | notes         | free
            -    |         |        | give A        | 26
            0    |         | A      |               | 25
            1    |         | A      |               | 24
            2    |         | A      | give B, end A | 17
            3    |         | (A)    |               | 16
            4    |         | B      |               | 25
            5    |         | B      |               | 24
            6    |         | B      | end B         | 23
            7    |         | (B)    |               | 22
            """,
        ),
        (
            31,
            """
            step | prompts | decode | notes  | free
            -    |         |        | give A | 25
            0    |         | A      |        | 24
            1    |         | A      |        | 23
            2    |         | A      | end A  | 22
            3    |         | (A)    |        | 21
            -    |         |        | give B | 25
            4    |         | B      |        | 24
            5    |         | B      |        | 23
            6    |         | B      | end B  | 22
            7    |         | (B)    |        | 21
            """,
        ),
    ],
)
def test_the_longest_running_one_must_be_able_to_finish(pages: int, expected: str) -> None:
    """A may write 20 tokens. In step 2 it has 6 + 3 and could need 26 - 9 = 17 more.

    B needs 6 + 1 of the pages - 8 - 17 that are left. Its KV comes during step 2, so it decodes
    from step 4 on.
    """
    asks = [Ask("A", 6, 4, limit=20), Ask("B", 6, 4, during=0)]
    assert rehearse(pool(pages, sglang(1)), asks) == table(expected)


@pytest.mark.parametrize(("pages", "gives"), [(60, True), (59, False)])
def test_a_new_one_must_be_able_to_finish_with_the_others_retracted(
    pages: int, gives: bool
) -> None:
    """In step 2, A and its 8 stored tokens are there: B may need 6 + 40 - (6 + 3) = 37 tokens.

    Free are pages - 8, less the 24 - 9 = 15 that A may need.
    """
    asks = [Ask("A", 6, 5, limit=18), Ask("B", 6, 2, during=0, limit=40)]
    rows = rehearse(pool(pages, sglang(1)), asks)
    assert ("give B" in rows[3]) is gives


def test_no_more_than_so_many_hold_pages() -> None:
    """Two at most, those included whose KV is on its way: C gets pages when A has left."""
    asks = [Ask("A", 2, 2), Ask("B", 2, 2, kv=1), Ask("C", 2, 2)]
    assert rehearse(pool(90, sglang(1), running=2), asks) == table("""
        step | prompts | decode | notes          | free
        -    |         |        | give A, give B | 86
        0    |         | A      | end A          | 85
        1    |         | (A)    |                | 84
        2    |         | B      | give C, end B  | 85
        3    |         | (B)    |                | 84
        4    |         | C      | end C          | 87
        5    |         | (C)    |                | 86
    """)


# --- taking them back (SGLang) ------------------------------------------------------------------


def test_who_lost_its_pages_comes_back_before_any_new_one() -> None:
    """Of equals, the last to join is retracted.

    C comes during step 1, needs 2 + 1 tokens and finds 4 - 2 in step 3. In step 6, 9 - 1 would be
    enough for it, but B is first, and needs 10 + 1.
    """
    asks = [Ask("A", 5, 9), Ask("B", 5, 9), Ask("C", 2, 2, during=1)]
    assert rehearse(pool(20, sglang(1)), asks) == table("""
        step | prompts | decode | notes          | free
        -    |         |        | give A, give B | 10
        0    |         | A B    |                | 8
        1    |         | A B    |                | 6
        2    |         | A B    |                | 4
        3    |         | A B    |                | 2
        4    |         | A B    |                | 0
        5    |         | A      | retract B      | 9
        6    |         | A      |                | 8
        7    |         | A      | end A          | 7
        8    |         | (A)    |                | 6
        -    |         |        | back B, give C | 8
        9    |         | B C    | end C          | 6
        10   |         | B (C)  |                | 4
        11   |         | B      | end B          | 7
        12   |         | (B)    |                | 6
    """)


def test_the_reserve_for_the_longest_does_not_hold_back_who_was_retracted() -> None:
    """B, the one with the fewest tokens, loses 5 + 5 - 1 pages in step 8.

    In step 10, C has left and A has 5 + 11 of 56 tokens. Free are 45: enough for B's 9 + 1 beside
    1 for A, but not for D's 3 + 1 beside the 40 that A may need.
    """
    asks = [
        Ask("A", 5, 14, limit=51),
        Ask("C", 30, 10),
        Ask("B", 5, 20, during=0),
        Ask("D", 3, 2, during=8),
    ]
    assert rehearse(pool(60, sglang(1)), asks)[:12] == table("""
        step | prompts | decode | notes            | free
        -    |         |        | give A, give C   | 25
        0    |         | A C    |                  | 23
        1    |         | A C    |                  | 21
        2    |         | A C    | give B           | 14
        3    |         | A C    |                  | 12
        4    |         | A C B  |                  | 9
        5    |         | A C B  |                  | 6
        6    |         | A C B  |                  | 3
        7    |         | A C B  |                  | 0
        8    |         | A C    | retract B, end C | 7
        9    |         | A (C)  |                  | 5
        10   |         | A      | back B           | 35
    """)


def test_kv_takes_its_time_back_from_host_memory() -> None:
    """V gets its 6 + 7 - 1 pages back in step 8; its KV is there during step 10."""
    asks = [Ask("V", 6, 9), Ask("X", 3, 8), Ask("Y", 3, 14)]
    assert rehearse(pool(32, sglang(1)), asks, restore_steps=2) == table("""
        step | prompts | decode | notes                  | free
        -    |         |        | give V, give X, give Y | 20
        0    |         | V X Y  |                        | 17
        1    |         | V X Y  |                        | 14
        2    |         | V X Y  |                        | 11
        3    |         | V X Y  |                        | 8
        4    |         | V X Y  |                        | 5
        5    |         | V X Y  |                        | 2
        6    |         | X Y    | retract V, end X       | 12
        7    |         | Y (X)  |                        | 10
        8    |         | Y      | back V                 | 8
        9    |         | Y      |                        | 7
        10   |         | Y      |                        | 6
        11   |         | Y      |                        | 5
        12   |         | Y V    | end Y                  | 3
        13   |         | V (Y)  | end V                  | 1
        14   |         | (V)    |                        | 17
    """)


def test_the_last_is_aborted_when_all_else_is_on_its_way() -> None:
    """B's pages cannot be taken while its KV travels, and A is the only one that decodes."""
    policy = replace(sglang(1), output_charge_most=1)
    asks = [Ask("A", 4, 9), Ask("B", 5, 3, kv=9)]
    assert rehearse(pool(12, policy), asks) == table("""
        step | prompts | decode | notes          | free
        -    |         |        | give A, give B | 3
        0    |         | A      |                | 2
        1    |         | A      |                | 1
        2    |         | A      |                | 0
        -    |         |        | abort A        | 7
        3    |         | B      |                | 6
        4    |         | B      | end B          | 5
        5    |         | (B)    |                | 4
    """)


# --- vLLM: the prompt first, then pages; what is lost is computed again here ---------------------


def test_vllm_computes_a_preempted_request_again_where_it_decodes() -> None:
    """The latest to join is preempted, B in step 3, C in step 10.

    B has 3 + 4 tokens, of whose pages A leaves two. C, there since step 3, waits until no prompt
    does; it loses its pages with its first step, before it has a second token, and finds them.
    """
    asks = [Ask("A", 3, 8), Ask("B", 3, 8), Ask("C", 2, 2, during=3)]
    assert rehearse(pool(12, VLLM), asks) == table("""
        step | prompts | decode | notes            | free
        -    |         |        | give A, give B   | 6
        0    |         | A B    |                  | 4
        1    |         | A B    |                  | 2
        2    |         | A B    |                  | 0
        3    |         | A      | retract B        | 5
        4    |         | A      |                  | 4
        5    |         | A      |                  | 3
        6    |         | A      | end A            | 2
        7    | B:5@2   |        |                  | 5
        8    |         | B      | give C           | 2
        9    |         | B      |                  | 1
        10   |         | B      | retract C, end B | 2
        11   | C:1@2   |        | end C            | 9
    """)


def test_prefill_holds_its_pages_until_the_kv_is_handed_over() -> None:
    prefill = prefill_scheduler(SchedulerSpec(10, 1, Limits(8, 8), SGLANG))
    one, two = (Sequence(Request(number, 0.0, 6, 3)) for number in range(2))
    prefill.add(one)
    prefill.add(two)
    assert prefill.next_step().step is not None
    assert list(prefill.commit(1).prefilled) == [one]
    assert prefill.used_pages() == 6
    assert prefill.next_step().step is None  # the second needs 6 of 4
    prefill.hand_over(one)
    assert list(prefill.next_step().started) == [two]
    assert prefill.used_pages() == 6


# --- on the clock -------------------------------------------------------------------------------
# Every step takes 10 ms; KV travels 0.1 ms and 1 ms per token, one request after the other.


def frame_of(policy: Policy, requests: list[Request], **changes: float) -> pd.DataFrame:
    """Run requests through a prefill instance with room and a decode instance of `pages`."""
    pages = int(changes.pop("pages"))
    settings = {"bandwidth_bytes_per_s": 70_272e3, **changes}
    deployment = disaggregated(times=AffineTimes(0.01, 0.0, 0.0, 0.0), policy=policy, **settings)
    decode = deployment.pools["decode"]
    small = replace(decode.scheduling, kv_tokens=pages)
    pools = {**deployment.pools, "decode": replace(decode, scheduling=small)}
    run = simulate(replace(deployment, pools=pools), OpenLoad(requests))
    assert run.pages_left == 0
    return run.records.frame()


def test_sglang_gives_decode_pages_before_it_computes_the_prompt() -> None:
    """A: prompt until 10, KV until 20.1, tokens at 30.1 and 40.1 ms, and a wasted step.

    B gets pages when A has left, at 50.1 ms; only then its prompt is computed.
    """
    frame = frame_of(sglang(4), [Request(0, 0.0, 10, 3), Request(1, 0.0, 10, 3)], pages=20)
    milestones = ["prefill_start_s", "prefill_end_s", "first_token_s", "finish_s"]
    assert frame[milestones].to_numpy() == pytest.approx(
        np.array([[0.0, 0.01, 0.0201, 0.0401], [0.0501, 0.0601, 0.0702, 0.0902]]), abs=1e-8
    )


def test_vllm_computes_the_prompt_before_it_has_decode_pages() -> None:
    """Both prompts until 10 ms. B's KV leaves when A has ended, at 40.1 ms, without wasted step."""
    frame = frame_of(VLLM, [Request(0, 0.0, 10, 3), Request(1, 0.0, 10, 3)], pages=19)
    milestones = ["prefill_end_s", "transfer_start_s", "first_token_s", "finish_s"]
    assert frame[milestones].to_numpy() == pytest.approx(
        np.array([[0.01, 0.01, 0.0201, 0.0401], [0.01, 0.0401, 0.0502, 0.0702]]), abs=1e-8
    )


@pytest.mark.parametrize("restore_s_per_token", [0.0, 1e-3])
def test_a_backed_up_request_waits_for_its_kv(restore_s_per_token: float) -> None:
    """The KV of both is there at 10.1 ms.

    After five steps no page is free: B has 6 tokens and loses 5 + 5 pages. A gets its ninth token
    in step 8 and leaves after step 9, at 100.1 ms. B's KV comes back, and three steps follow.
    """
    frame = frame_of(
        sglang(1),
        [Request(0, 0.0, 5, 9), Request(1, 0.0, 5, 9)],
        pages=20,
        bandwidth_bytes_per_s=1e18,
        restore_s_per_token=restore_s_per_token,
    )
    assert frame["retractions"].tolist() == [0, 1]
    assert frame["computed_tokens"].tolist() == [5, 5]  # nothing is computed again
    restored_s = 0.1001 + 10 * restore_s_per_token
    assert frame["finish_s"].tolist() == pytest.approx([0.0901, restored_s + 0.03], abs=1e-8)
