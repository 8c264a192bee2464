"""What a load asks of a fleet: reuse found in ids, samples that keep means, sessions midway."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tonnage.scenarios.load import load_scenario
from tonnage.sim.domain import BadInputError, Request
from tonnage.sim.planning.stationary import StationarySessions
from tonnage.sim.planning.workload import Workload, of_requests, workload_of
from tonnage.sim.traffic.build import build_sessions
from tonnage.sim.traffic.lengths import Constant
from tonnage.sim.traffic.spec import LoadPoint, TrafficSpec

AGENTS = load_scenario("kimi-agents").traffic_spec()


def test_reuse_is_found_in_the_ids_of_a_trace() -> None:
    requests = [
        Request(0, 0.0, 20, 5, block_ids=(1, 2), block_tokens=10),
        Request(1, 3.0, 30, 5, block_ids=(1, 2, 3), block_tokens=10),
        Request(2, 4.0, 10, 5, block_ids=(9,), block_tokens=10),
        Request(3, 8.0, 20, 5, block_ids=(1, 2), block_tokens=10),
    ]
    found = of_requests(requests, None)
    assert found.cached_tokens.tolist() == [0, 20, 0, 19]  # one token is always computed
    assert found.reuse_s.tolist() == [3.0, 5.0, math.inf, math.inf]
    assert found.rate_per_s == pytest.approx(3 / 8)


def test_requests_that_arrive_at_once_have_no_rate() -> None:
    with pytest.raises(BadInputError, match="at once"):
        of_requests([Request(0, 0.0, 10, 1), Request(1, 0.0, 10, 1)], None)


def test_resident_requests_cannot_be_planned_for() -> None:
    with pytest.raises(BadInputError, match=r"traffic\.kind"):
        workload_of(TrafficSpec("resident", (4,)), LoadPoint(concurrency=4), 0)


def test_a_closed_load_has_users_and_an_open_one_a_rate() -> None:
    lengths = {"input_tokens": Constant(100), "output_tokens": Constant(10), "requests": 50}
    closed = workload_of(TrafficSpec("closed", (4,), **lengths), LoadPoint(concurrency=4), 0)
    assert (closed.users, closed.rate_per_s) == (4, None)
    assert (closed.decode_context_tokens, closed.held_tokens) == (105, 110)
    poisson = TrafficSpec("poisson", rates_per_s=(2.0,), **lengths)
    assert workload_of(poisson, LoadPoint(rate_per_s=2.0), 0).rate_per_s == 2.0


def test_a_sample_by_strata_keeps_what_waiting_is_made_of() -> None:
    whole = workload_of(AGENTS, LoadPoint(concurrency=64), 0)
    fresh = whole.input_tokens - whole.cached_tokens
    errors = []
    for seed in range(5):
        sample = whole.sampled(96, seed)
        assert len(sample.input_tokens) <= 96
        assert sample.weights is not None
        assert sample.weights.sum() == pytest.approx(1.0)
        computed = sample.input_tokens - sample.cached_tokens
        errors.append(
            (sample.mean(computed) / fresh.mean(), sample.mean(computed**2) / np.mean(fresh**2))
        )
    assert np.mean(errors, axis=0) == pytest.approx([1.0, 1.0], rel=0.05)


def test_agents_find_nearly_all_of_their_prompts_in_an_endless_cache() -> None:
    found = workload_of(AGENTS, LoadPoint(concurrency=64), 0)
    share = found.mean(found.cached_tokens) / found.mean_input_tokens
    assert share == pytest.approx(0.972, abs=0.005)  # kept blocks over prompts, of the draws
    assert found.think_s == pytest.approx(116, rel=0.05)


# --- sessions in their middle -------------------------------------------------------------------


def stationary(users: int, span_s: float, seed: int = 0) -> StationarySessions:
    source = build_sessions(AGENTS, LoadPoint(concurrency=users), seed)
    return StationarySessions(source, users, span_s, seed)


def test_users_are_as_far_on_as_in_a_running_system() -> None:
    """A turn of a run in the steady state is any turn, so contexts have the mean of all turns."""
    whole: Workload = workload_of(AGENTS, LoadPoint(concurrency=64), 0)
    inputs = [turn.input_tokens for one in stationary(200, 500.0) for turn in one.turns[1:]]
    assert np.mean(inputs) == pytest.approx(whole.mean_input_tokens, rel=0.1)


def test_the_pace_is_that_of_the_sessions() -> None:
    whole = workload_of(AGENTS, LoadPoint(concurrency=64), 0)
    turns = sum(len(one.turns) - 1 for one in stationary(300, 1000.0))
    assert turns == pytest.approx(300 * 1000.0 / (whole.think_s + 5.0), rel=0.15)


def test_the_first_turn_leaves_the_context_that_the_next_one_keeps() -> None:
    for session in stationary(40, 300.0):
        first, second = session.turns[:2]
        assert (first.output_tokens, first.kept_blocks) == (1, 0)
        assert second.kept_blocks <= len(first.new_block_ids)
        assert len(first.new_block_ids) * session.block_tokens <= first.input_tokens + 64


def test_two_users_of_one_session_share_its_prefix_alone() -> None:
    ids = [set(one.turns[0].new_block_ids) for one in stationary(60, 100.0)]
    shared = [
        one for index, mine in enumerate(ids) for other in ids[:index] for one in mine & other
    ]
    assert shared  # some prefix is common
    assert max(shared) < 1 << 40  # and nothing but prefixes is


def test_a_sample_keeps_answers_and_contexts_whole() -> None:
    """A few requests stand for all prompts; what decodes is known of all, long answers included."""
    rng = np.random.default_rng(0)
    outputs = np.round(np.exp(rng.normal(5.0, 1.5, 5000)))
    inputs = np.round(rng.uniform(100, 5000, 5000))
    whole = Workload(inputs, np.zeros(5000), outputs, np.full(5000, np.inf), rate_per_s=1.0)
    part = whole.sampled(64, 0)
    assert len(part.input_tokens) <= 64
    for name in ("mean_output_tokens", "decode_steps", "held_tokens", "decode_context_tokens"):
        assert getattr(part, name) == getattr(whole, name)
    assert part.longest_tokens == whole.longest_tokens
    assert part.all is whole
    # The sample alone would miss it, which is why it is not asked.
    assert abs(part.mean(part.output_tokens) / whole.mean_output_tokens - 1) > 0.05
