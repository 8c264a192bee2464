"""The scheduler replays two logged vLLM runs with the log's own step times.

Given: arrivals, lengths, limits, and the duration of each step in order, derived from the
requests' token times. Compared: step counts, batch sizes, and the running and waiting requests
that the engine's statistics showed each second. See `docs/vllm_replay.md`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.sim.engine.harness import colocated
from tests.truth.reference_vllm import Replay, Rules, replay
from tests.truth.vllm_log import (
    BLOCK_TOKENS,
    RUNS,
    StepClock,
    VllmRun,
    mean_error,
    read_run,
    step_clock,
)
from tonnage.sim.domain import FloatArray, Request, Step
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.results.timeline import Timeline
from tonnage.sim.serving.policy import VLLM
from tonnage.sim.traffic.loads import OpenLoad

pytestmark = pytest.mark.skipif(not RUNS.exists(), reason="shared/truth is not beside the checkout")
MEMORY_BINDS = "RTX4090_Llama-3.1-8B"  # 2,587 blocks: requests are preempted
SLOTS_BIND = "RTXPRO6000_Qwen3-32B"  # 128 sequences; nobody is preempted
BOTH = pytest.mark.parametrize("name", [MEMORY_BINDS, SLOTS_BIND])


@cache
def logged(name: str) -> tuple[VllmRun, StepClock]:
    run = read_run(name)
    return run, step_clock(run)


@cache
def reference(name: str) -> Replay:
    run, clock = logged(name)
    return replay(run.requests, clock.step_s(), Rules.of(run))


@dataclass
class LoggedTimes:
    """Gives the log's durations in order, and notes the sequences and tokens of each step."""

    step_s: FloatArray
    batches: list[tuple[int, int]] = field(default_factory=list)

    def run(self, step: Step, max_steps: int) -> FloatArray:
        assert max_steps == 1  # exact
        chunks = [chunk.new_tokens for chunk in step.prefill_chunks]
        self.batches.append(
            (step.decode_requests + len(chunks), step.decode_requests + sum(chunks))
        )
        return self.step_s[[min(len(self.batches), len(self.step_s)) - 1]]


@cache
def simulated(name: str) -> tuple[list[tuple[int, int]], pd.DataFrame]:
    """Return the batch of each of the simulator's steps, and its state at the log's samples."""
    run, clock = logged(name)
    times, timeline = LoggedTimes(clock.step_s()), Timeline()
    deployment = colocated(
        times=times,
        kv_tokens=Rules.of(run).blocks * BLOCK_TOKENS,
        page_tokens=BLOCK_TOKENS,
        chunk_tokens=run.token_budget,
        running=run.max_num_seqs,
        policy=VLLM,
    )
    load = OpenLoad(
        [
            Request(number, request.arrival_s, request.input_tokens, request.output_tokens)
            for number, request in enumerate(run.requests)
        ]
    )
    simulate(deployment, load, exact=True, timeline=timeline)
    return times.batches, timeline.at(run.sample_ends_s)


# --- what the log says ------------------------------------------------------------------------


@BOTH
def test_the_log_counts_every_token_of_its_requests(name: str) -> None:
    run, _ = logged(name)
    assert run.output_tokens.sum() == sum(request.output_tokens for request in run.requests)
    earliest_s, latest_s = run.sample_origin_range_s
    assert latest_s - earliest_s < 0.035  # so well known is where the log's seconds begin


def test_without_preemption_the_steps_between_token_times_are_whole_numbers() -> None:
    _, clock = logged(SLOTS_BIND)
    assert not clock.lost_steps.any()
    assert not clock.prompt_steps_off.any()
    assert abs(clock.steps - clock.steps.round()).max() < 0.08
    assert clock.steps[-1] == pytest.approx(2266, abs=1e-6)


def test_with_preemption_requests_lose_steps_and_prompts_hardly_any() -> None:
    _, clock = logged(MEMORY_BINDS)
    assert clock.lost_steps.min() >= 0
    assert np.count_nonzero(clock.prompt_steps_off > 1e-6) <= 2
    assert clock.prompt_steps_off.sum() < 3.1


# --- the simulator against the log ------------------------------------------------------------


@BOTH
def test_as_many_steps_as_the_log(name: str) -> None:
    _, clock = logged(name)
    batches, _ = simulated(name)
    assert len(batches) == pytest.approx(clock.steps[-1], rel=0.003)


@pytest.mark.parametrize(
    ("name", "running_most", "waiting_most"),
    [(MEMORY_BINDS, 0.05, 0.03), (SLOTS_BIND, 0.01, 0.03)],
)
def test_running_and_waiting_requests_over_time(
    name: str, running_most: float, waiting_most: float
) -> None:
    run, _ = logged(name)
    _, state = simulated(name)
    assert mean_error(state["running_requests"].to_numpy(float), run.running) < running_most
    assert mean_error(state["waiting_requests"].to_numpy(float), run.waiting) < waiting_most


def test_the_share_of_blocks_in_use() -> None:
    run, _ = logged(MEMORY_BINDS)
    _, state = simulated(MEMORY_BINDS)
    used = state["used_pages"].to_numpy(float) / Rules.of(run).blocks
    assert abs(used - run.kv_used).mean() < 0.025


def test_batch_sizes_step_by_step() -> None:
    """Where nobody is preempted, token times tell how many requests got a token in each step."""
    run, clock = logged(SLOTS_BIND)
    first = clock.steps_at([request.first_token_s for request in run.requests]).round()
    last = clock.steps_at([request.last_token_s for request in run.requests]).round()
    step = np.arange(1, clock.steps[-1] + 0.5)[:, np.newaxis]
    in_log = ((first <= step) & (step <= last)).sum(axis=1)
    replayed = reference(SLOTS_BIND).column(4)
    assert len(replayed) == len(in_log)
    assert np.mean(replayed == in_log) > 0.85
    assert mean_error(replayed, in_log) < 0.003


@BOTH
def test_tokens_per_second(name: str) -> None:
    run, _ = logged(name)
    assert mean_error(reference(name).tokens_per_second(run), run.output_tokens) < 0.10


# --- the simulator against vLLM's rules, written out ------------------------------------------


@BOTH
def test_every_step_has_the_batch_of_the_reference(name: str) -> None:
    assert simulated(name)[0] == reference(name).batches


@BOTH
def test_the_reference_counts_running_and_waiting_as_vllm_does(name: str) -> None:
    run, _ = logged(name)
    assert mean_error(reference(name).at_samples(run, 1), run.running) < 0.045
    assert mean_error(reference(name).at_samples(run, 2), run.waiting) < 0.02


def _prompts_in_step(replayed: Replay) -> int:
    """Return how many requests, from the first on, got their first token in the log's step."""
    run, clock = logged(SLOTS_BIND)
    in_log = clock.steps_at([request.first_token_s for request in run.requests]).round() - 1
    same = [a.first_step == b for a, b in zip(replayed.sequences, in_log, strict=False)]
    return same.index(False)


def test_a_step_is_planned_while_the_one_before_it_runs() -> None:
    run, clock = logged(SLOTS_BIND)
    no_lag = replace(Rules.of(run), plans_ahead=False)
    assert _prompts_in_step(reference(SLOTS_BIND)) == 48
    assert _prompts_in_step(replay(run.requests[:20], clock.step_s(), no_lag)) == 1


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        (MEMORY_BINDS, {"requeues_at_head": False}),
        (MEMORY_BINDS, {"blocks": 2328}),  # a tenth fewer
        (SLOTS_BIND, {"max_num_seqs": 115}),
        (SLOTS_BIND, {"token_budget": 1024}),
    ],
)
def test_wrong_rules_miss_the_ten_per_cent(name: str, wrong: dict[str, Any]) -> None:
    run, clock = logged(name)
    replayed = replay(run.requests, clock.step_s(), replace(Rules.of(run), **wrong))
    errors = [
        mean_error(replayed.at_samples(run, 1), run.running),
        mean_error(replayed.at_samples(run, 2), run.waiting),
    ]
    assert max(errors) > 0.10
