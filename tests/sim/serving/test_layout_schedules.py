"""Attention-DP ranks and micro-batches of a pipeline against schedules worked by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from tests.sim.engine.harness import AffineTimes, colocated
from tests.sim.serving.schedule_table import Ask, rehearse, table
from tonnage.pools import built_pools, deployment_of, times_of
from tonnage.scenarios.load import parse_scenario
from tonnage.sim.domain import FloatArray, Request, Step
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.serving.build import SchedulerSpec, decode_scheduler, serve_scheduler
from tonnage.sim.serving.policy import PLAIN, SGLANG, VLLM, Policy
from tonnage.sim.serving.scheduler import Limits
from tonnage.sim.traffic.loads import OpenLoad


class SlowestRank:
    """A rank takes 10 ms, 1 ms per sequence and 1 ms per prompt token; the slowest one counts."""

    def run(self, step: Step, max_steps: int) -> FloatArray:
        slowest_ms = max(
            10 + rank.decode_requests + sum(chunk.new_tokens for chunk in rank.prefill_chunks)
            for rank in step.ranks
        )
        return np.full(max_steps, slowest_ms / 1000)


def two_ranks(policy: Policy, *, running: int = 8) -> SchedulerSpec:
    """Twenty pages of one token per rank."""
    return SchedulerSpec(40, 1, Limits(8, running), policy, ranks=2)


# --- attention-DP -------------------------------------------------------------------------------


def test_ranks_step_together_each_with_its_own_pages() -> None:
    """In turn: A and C to the first rank, B and D to the second, which is idle until step 3."""
    asks = [Ask("A", 4, 4), Ask("B", 2, 1), Ask("C", 3, 2), Ask("D", 6, 2, during=1)]
    assert rehearse(serve_scheduler(two_ranks(SGLANG)), asks) == table("""
        step | prompts             | decode    | notes        | free
        0    | A:4@0 C:3@0 / B:2@0 | /         | end B        | 13 / 18
        1    | /                   | A C / (B) | end C        | 11 / 17
        2    | /                   | A (C) /   |              | 9 / 20
        3    | / D:6@0             | A /       | end A        | 13 / 14
        4    | /                   | (A) / D   | end D        | 12 / 13
        5    | /                   | / (D)     |              | 20 / 12
    """)


def test_sglang_shares_a_chunk_between_ranks_and_expects_fewer_outputs() -> None:
    ranks = SGLANG.for_ranks(8)
    assert (ranks.ratio_start, ranks.ratio_least) == pytest.approx((0.21, 0.0294))
    assert SGLANG.for_ranks(1) is SGLANG
    assert SGLANG.rank_chunk_tokens(8192, 8) == 1024
    assert VLLM.for_ranks(8) == VLLM
    assert VLLM.rank_chunk_tokens(8192, 8) == 8192


def test_a_scenario_gives_each_rank_its_part_of_a_chunk() -> None:
    serve = {"tp": 8, "attention_dp": 8, "kv": "bf16", "chunk_tokens": 8192}
    plain = {"traffic": {"requests": 64}, "model": "deepseek-v3", "pools": {"serve": serve}}
    scenario = parse_scenario(plain)
    built = built_pools(scenario)
    plan = deployment_of(scenario, built, times_of(scenario, built)).pools["serve"]
    assert plan.scheduling.limits.chunk_tokens == 1024


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (
            "round_robin",
            """
            step | prompts       | decode | notes | free
            0    | A:2@0 / B:2@0 | /      | end B | 18 / 18
            1    | /             | A /    |       | 17 / 20
            2    | C:2@0 /       | /      |       | 15 / 20
            3    | /             | A C /  | end C | 13 / 20
            4    | /             | A /    | end A | 15 / 20
            """,
        ),
        (
            "least_requests",
            """
            step | prompts       | decode | notes        | free
            0    | A:2@0 / B:2@0 | /      | end B        | 18 / 18
            1    | /             | A /    |              | 17 / 20
            2    | / C:2@0       | A /    |              | 16 / 18
            3    | /             | A / C  | end A, end C | 15 / 17
            """,
        ),
    ],
)
def test_who_gets_the_next_request(choice: str, expected: str) -> None:
    """C comes when B has left the second rank: the first one's turn, the second has fewer."""
    policy = replace(PLAIN, rank_choice=choice)
    asks = [Ask("A", 2, 4), Ask("B", 2, 1), Ask("C", 2, 2, during=1)]
    assert rehearse(serve_scheduler(two_ranks(policy)), asks) == table(expected)


def test_running_requests_are_limited_per_rank() -> None:
    """One each: C waits for A although B's rank is free; it stays where it was put."""
    asks = [Ask("A", 2, 4), Ask("B", 2, 1), Ask("C", 2, 1)]
    assert rehearse(serve_scheduler(two_ranks(VLLM, running=2)), asks) == table("""
        step | prompts       | decode | notes | free
        0    | A:2@0 / B:2@0 | /      | end B | 18 / 18
        1    | /             | A /    |       | 17 / 18
        2    | /             | A /    |       | 16 / 20
        3    | /             | A /    | end A | 15 / 20
        4    | C:2@0 /       | /      | end C | 18 / 20
    """)


def test_a_rank_retracts_for_itself() -> None:
    """The first rank as in `test_decode_pool.py`; the second, with X, has room and goes on.

    B gets pages in step 9, its KV during that step, so it decodes from step 11 on.
    """
    policy = replace(SGLANG, reserved_decode_tokens=1)
    asks = [Ask("A", 5, 9), Ask("X", 3, 12), Ask("B", 5, 9)]
    assert rehearse(decode_scheduler(two_ranks(policy)), asks) == table("""
        step | prompts | decode  | notes                  | free
        -    | /       | /       | give A, give B, give X | 10 / 17
        0    | /       | A B / X |                        | 8 / 16
        1    | /       | A B / X |                        | 6 / 15
        2    | /       | A B / X |                        | 4 / 14
        3    | /       | A B / X |                        | 2 / 13
        4    | /       | A B / X |                        | 0 / 12
        5    | /       | A / X   | retract B              | 9 / 11
        6    | /       | A / X   |                        | 8 / 10
        7    | /       | A / X   | end A                  | 7 / 9
        8    | /       | (A) / X |                        | 6 / 8
        9    | /       | / X     | back B                 | 10 / 7
        10   | /       | / X     | end X                  | 10 / 6
        11   | /       | B / (X) |                        | 9 / 5
        12   | /       | B /     |                        | 8 / 20
        13   | /       | B /     | end B                  | 7 / 20
        14   | /       | (B) /   |                        | 6 / 20
    """)


def on_ranks(requests: list[Request], ranks: int = 2) -> pd.DataFrame:
    deployment = colocated(times=SlowestRank(), ranks=ranks)
    return simulate(deployment, OpenLoad(requests)).records.frame()


def test_one_ranks_prompt_holds_the_others_step() -> None:
    """B comes at 5 ms. A's second token takes as long as B's prompt, the third 11 ms."""
    frame = on_ranks([Request(0, 0.0, 4, 3), Request(1, 0.005, 20, 1)])
    assert frame["first_token_s"].tolist() == pytest.approx([0.014, 0.044], abs=1e-9)
    assert frame["finish_s"].tolist() == pytest.approx([0.055, 0.044], abs=1e-9)


@pytest.mark.parametrize(
    ("outputs", "step_ms"),
    [((11, 11, 11, 11), 12), ((11, 1, 11, 1), 12), ((11, 11, 1, 1), 11)],
)
def test_the_fuller_rank_sets_the_step(outputs: tuple[int, ...], step_ms: int) -> None:
    """Requests 0 and 2 are on the first rank. Two there take as long as two on each."""
    requests = [Request(number, 0.0, 2, output) for number, output in enumerate(outputs)]
    frame = on_ranks(requests)
    assert frame["first_token_s"].tolist() == pytest.approx([0.014] * 4, abs=1e-9)
    assert frame["finish_s"][0] == pytest.approx(0.014 + 10 * step_ms / 1000, abs=1e-9)


# --- pipeline stages ----------------------------------------------------------------------------


def in_a_pipeline(requests: list[Request], times: AffineTimes, **changes: object) -> pd.DataFrame:
    settings = {"stages": 2, "running": 2, **changes}
    deployment = colocated(times=times, **settings)
    return simulate(deployment, OpenLoad(requests)).records.frame()


TWENTY_MS = AffineTimes(0.02, 0.0, 0.0, 0.0)


@pytest.mark.parametrize("policy", [PLAIN, SGLANG], ids=["plain", "sglang"])
def test_two_micro_batches_overlap(policy: Policy) -> None:
    """A pass is two stages of 10 ms. One request per micro-batch; C waits for A's place.

    stage 1 | A 0-10  | B 10-20 | A 20-30 | B 30-40 | A 40-50 | B 50-60 | C 60-70
    stage 2 |         | A 10-20 | B 20-30 | A 30-40 | B 40-50 | A 50-60 | B 60-70 | C 70-80

    SGLang plans without lag in a pipeline, so A's place is free at once.
    """
    requests = [Request(0, 0.0, 4, 3), Request(1, 0.0, 4, 3), Request(2, 0.0, 4, 1)]
    frame = in_a_pipeline(requests, TWENTY_MS, policy=policy)
    assert frame["first_token_s"].tolist() == pytest.approx([0.02, 0.03, 0.08], abs=1e-9)
    assert frame["finish_s"].tolist() == pytest.approx([0.06, 0.07, 0.08], abs=1e-9)


def test_two_stages_give_twice_the_tokens_of_one_micro_batch() -> None:
    """Two streams of 100 tokens take 20 ms per token each, as one alone does."""
    requests = [Request(number, 0.0, 4, 101) for number in range(2)]
    both, alone = in_a_pipeline(requests, TWENTY_MS), in_a_pipeline(requests[:1], TWENTY_MS)
    assert both["tpot_s"].tolist() == pytest.approx([0.02, 0.02], abs=1e-9)
    assert alone["tpot_s"].tolist() == pytest.approx([0.02], abs=1e-9)


def test_a_micro_batch_waits_for_the_one_ahead_at_every_stage() -> None:
    """A's prompt takes 2 x 20 ms, B's 2 x 10 ms: B is through stage 1 at 30, and A leaves stage 2
    at 40 ms."""
    times = AffineTimes(0.019, 0.0, 0.0, 0.001)
    frame = in_a_pipeline([Request(0, 0.0, 21, 1), Request(1, 0.0, 1, 1)], times)
    assert frame["finish_s"].tolist() == pytest.approx([0.04, 0.05], abs=1e-9)


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    """Chunk 1 is through at 20 ms; chunk 2 enters at 10 ms, behind it, and is through at 30 ms."""
    frame = in_a_pipeline([Request(0, 0.0, 16, 1)], TWENTY_MS, chunk_tokens=8)
    assert frame["finish_s"].tolist() == pytest.approx([0.03], abs=1e-9)


def test_a_micro_batch_that_has_run_less_takes_prompts_as_well() -> None:
    """A and B are alone for half a second, in one micro-batch. C and D come to the other.

    D ends with its second pass, at 550 ms. E, there since 511 ms, takes its place in the next.
    """
    early = [Request(0, 0.0, 4, 100), Request(1, 0.0, 4, 100)]
    late = [Request(2, 0.505, 4, 50), Request(3, 0.505, 4, 2), Request(4, 0.511, 4, 1)]
    frame = in_a_pipeline(early + late, TWENTY_MS, running=4)
    assert frame["finish_s"][3:].tolist() == pytest.approx([0.55, 0.57], abs=1e-9)
