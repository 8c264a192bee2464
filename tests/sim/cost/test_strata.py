"""Which steps are measured, and what they say of the others."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.cost.strata import (
    CorrectedExecutor,
    Correction,
    Measurement,
    VisitingExecutor,
    correction,
    measuring_order,
    phases_of,
    share_measured,
    stratum_of,
)
from tonnage.sim.domain import FloatArray, PromptChunk, Step


@dataclass
class Affine:
    """1 ms, 10 us per context token in all, 1 us per prompt token."""

    def run(self, step: Step, max_steps: int) -> FloatArray:
        contexts = step.decode_context_sum + step.decode_requests * np.arange(max_steps)
        new = sum(chunk.new_tokens for chunk in step.prefill_chunks)
        return 1e-3 + 1e-5 * contexts + 1e-6 * new

    def times(self, step: Step) -> list[OperatorTime]:
        return [OperatorTime.assumed("all", float(self.run(step, 1)[0]))]


def decode(requests: int, context: int) -> Step:
    return Step(np.full(requests, context), requests * context, ())


def prefill(new: int, past: int = 0) -> Step:
    return Step(np.zeros(0, dtype=np.int64), 0, (PromptChunk(new, past),))


def test_steps_of_like_size_are_one_stratum() -> None:
    assert stratum_of(decode(8, 1000)) == stratum_of(decode(8, 1100))
    assert stratum_of(decode(8, 1000)) != stratum_of(decode(12, 1000))
    assert stratum_of(decode(8, 1000)) != stratum_of(decode(8, 2000))
    assert stratum_of(prefill(1000)) != stratum_of(prefill(1000, 1000))
    mixed = Step(np.full(8, 1000), 8000, (PromptChunk(1000, 0),))
    assert [stratum_of(one).phase for one in (decode(8, 9), prefill(9), mixed)] == [
        "decode",
        "prefill",
        "mixed",
    ]


def test_the_predicted_times_go_through_unchanged_and_are_added_up() -> None:
    visiting = VisitingExecutor(Affine(), seed=0)
    step = decode(8, 1000)
    for _ in range(5):
        assert (visiting.run(step, 3) == Affine().run(step, 3)).all()
    visited = visiting.visited[stratum_of(step)]
    assert visited.steps == 5
    assert visited.seconds == pytest.approx(5 * 81e-3)


def test_a_step_is_kept_as_often_as_it_takes_time() -> None:
    """Two steps of one stratum, one four times as long: of one kept, it is that in 4 of 5."""
    step, longer = prefill(1000), prefill(1001)

    class Two(Affine):
        def run(self, one: Step, max_steps: int) -> FloatArray:
            return np.full(max_steps, 4.0 if one is longer else 1.0)

    assert stratum_of(step) == stratum_of(longer)
    first = 0
    for seed in range(2000):
        visiting = VisitingExecutor(Two(), seed)
        visiting.run(step, 1)
        visiting.run(longer, 1)
        kept = visiting.visited[stratum_of(step)].samples()[0]
        first += kept.prefill_chunks == longer.prefill_chunks
    assert first / 2000 == pytest.approx(0.8, abs=0.03)  # three standard errors


def test_most_time_is_measured_first_and_each_stratum_once_before_any_twice() -> None:
    visiting = VisitingExecutor(Affine(), seed=0)
    for requests, times in ((1, 3), (16, 3), (4, 3)):
        for _ in range(times):
            visiting.run(decode(requests, 1000), 1)
    order = list(measuring_order(visiting.visited))
    assert [step.decode_requests for _, step in order] == [16, 4, 1] * 3
    one = [Measurement(order[0][0], 1.0, 1.0)]
    assert share_measured(one, visiting.visited) == pytest.approx(161 / (161 + 41 + 11))
    assert share_measured([], visiting.visited) == 0.0


def test_the_heaviest_stratum_of_every_phase_comes_before_all_others() -> None:
    visiting = VisitingExecutor(Affine(), seed=0)
    for requests in (256, 128, 64):  # each alone takes longer than all prompts
        for _ in range(50):
            visiting.run(decode(requests, 4096), 1)
    visiting.run(prefill(16), 1)
    visiting.run(prefill(64), 1)
    order = [stratum.phase for stratum, _ in measuring_order(visiting.visited)]
    assert order[:3] == ["decode", "prefill", "decode"]
    assert phases_of(visiting.visited) == 2


def test_what_was_kept_does_not_change_with_the_batch() -> None:
    visiting = VisitingExecutor(Affine(), seed=0)
    step = decode(2, 10)
    visiting.run(step, 1)
    step.decode_context_tokens[:] = 99
    (kept,) = visiting.visited[stratum_of(decode(2, 10))].samples()
    assert kept.decode_context_tokens.tolist() == [10, 10]


def test_strata_that_were_not_reached_take_the_mean_of_their_phase_by_time() -> None:
    visiting = VisitingExecutor(Affine(), seed=0)
    for step in (decode(1, 1000), decode(16, 1000), decode(64, 1000), prefill(500)):
        visiting.run(step, 1)
    small, large = stratum_of(decode(1, 1000)), stratum_of(decode(16, 1000))
    measured = [Measurement(small, 3.0, 1.0), Measurement(large, 1.0, 1.0)]
    found = correction(measured, visiting.visited)
    assert (found.of(small), found.of(large)) == (3.0, 1.0)
    mean = (11 * 3.0 + 161 * 1.0) / (11 + 161)
    assert found.of(stratum_of(decode(64, 1000))) == pytest.approx(mean)
    assert found.of(stratum_of(prefill(500))) == 1.0  # nothing of its phase was measured


def test_several_samples_of_a_stratum_count_by_their_time() -> None:
    visiting = VisitingExecutor(Affine(), seed=0)
    visiting.run(prefill(500), 1)
    stratum = stratum_of(prefill(500))
    measured = [Measurement(stratum, 2.0, 1.0), Measurement(stratum, 3.0, 3.0)]
    assert correction(measured, visiting.visited).of(stratum) == 1.25


def test_a_segment_is_corrected_step_by_step_as_its_contexts_grow() -> None:
    """Contexts from 900 to 1,900: three strata on the way."""
    step = decode(4, 900)
    strata = [stratum_of(decode(4, context)) for context in range(900, 1900)]
    factors = {stratum: 1.0 + number for number, stratum in enumerate(dict.fromkeys(strata))}
    assert len(factors) == 3
    corrected = CorrectedExecutor(Affine(), Correction(factors, {}))
    whole = corrected.run(step, 1000)
    for steps in (0, 100, 500, 999):
        alone = corrected.run(decode(4, 900 + steps), 1)[0]
        assert whole[steps] == pytest.approx(alone, rel=1e-12)
    assert corrected.times(step)[0].seconds == pytest.approx(alone_s(step) * factors[strata[0]])


def alone_s(step: Step) -> float:
    return float(Affine().run(step, 1)[0])
