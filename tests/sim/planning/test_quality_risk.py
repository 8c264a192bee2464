"""What scores say of a format: verdicts, pools of tests, flags and budgets."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.scenarios.catalogue import load_model
from tonnage.scenarios.quality import shipped_evidence
from tonnage.sim.planning.proportions import Counts, Paired, difference_interval
from tonnage.sim.planning.quality_risk import Changes, Evidence, quality_risk
from tonnage.sim.planning.score_pairs import ScorePair, Standards, compare, pool

POINT = Standards(margin=0.01)


def scores(right: int, right_after: int, questions: int, test: str = "t") -> ScorePair:
    return ScorePair(test, right / questions, right_after / questions, questions)


@pytest.mark.parametrize(
    ("pair", "verdict", "within"),
    [
        (scores(900, 700, 1000), "worse", False),
        (scores(700, 900, 1000), "better", False),
        (scores(900, 899, 1000), "undecided", False),  # too few to say within a point
        (scores(90_000, 89_990, 100_000), "within", True),
        (scores(90_000, 89_500, 100_000), "worse", True),  # told from noise, and small
        (ScorePair("t", 0.92, 0.91), "unknown", False),
    ],
)
def test_verdicts(pair: ScorePair, verdict: str, within: bool) -> None:
    found = compare(pair, POINT)
    assert (found.verdict, found.is_within_margin) == (verdict, within)


def test_the_same_score_is_undecided_where_questions_are_few() -> None:
    """61 of 63 twice: no difference at all, and a loss of eight points is not ruled out."""
    found = compare(scores(61, 61, 63), POINT)
    assert found.verdict == "undecided"
    assert found.interval is not None
    assert found.interval.low < -0.08
    assert found.questions_needed is not None
    assert found.questions_needed > 3000


def test_answers_question_by_question_tell_more() -> None:
    """The same shares: taken for independent nothing is seen, paired the loss is beyond noise."""
    pairs = Paired(both=880, only_baseline=20, only_variant=5, neither=95)
    paired = compare(ScorePair("t", 0.900, 0.885, 1000, pairs), POINT)
    apart = compare(scores(900, 885, 1000), POINT)
    assert paired.verdict == "worse"
    assert paired.mcnemar_p == pytest.approx(0.0041, abs=1e-4)
    assert apart.verdict == "undecided"
    assert apart.questions_needed is not None
    assert paired.questions_needed is not None
    assert paired.questions_needed < apart.questions_needed / 5


@given(st.integers(1, 5000), st.data())
def test_a_verdict_never_contradicts_its_interval(questions: int, data: st.DataObject) -> None:
    right, after = (data.draw(st.integers(0, questions)) for _ in range(2))
    found = compare(scores(right, after, questions), POINT)
    assert found.interval is not None
    low, high = found.interval.low, found.interval.high
    assert (found.verdict == "worse") == (high < 0)
    assert (found.verdict == "better") == (low > 0)
    if found.is_within_margin:
        assert abs(found.difference) < 0.01
    if found.verdict == "undecided":
        assert low <= 0 <= high
        assert not found.is_within_margin


def test_rounded_percentages_are_whole_questions() -> None:
    """94.24 % of 1,319 is 1,243 right answers."""
    assert ScorePair("gsm8k", 0.9424, 0.9409, 1319).counts() == (
        Counts(1243, 1319),
        Counts(1241, 1319),
    )


# --- tests together -------------------------------------------------------------------------------


def test_one_test_pooled_is_that_test() -> None:
    found = pool([scores(900, 890, 1000)], 0.95)
    assert found is not None
    alone = difference_interval(Counts(900, 1000), Counts(890, 1000))
    assert (found.interval.low, found.interval.high) == pytest.approx((alone.low, alone.high))


def test_two_halves_of_a_test_are_nearly_the_whole() -> None:
    found = pool([scores(900, 890, 1000), scores(900, 890, 1000)], 0.95)
    assert found is not None
    whole = difference_interval(Counts(1800, 2000), Counts(1780, 2000))
    assert found.difference == pytest.approx(-0.01)
    assert (found.interval.low, found.interval.high) == pytest.approx(
        (whole.low, whole.high), abs=3e-4
    )


def test_coverage_of_all_questions_together_by_simulation() -> None:
    rng = np.random.default_rng(5)
    tests = ((200, 0.9, 0.87), (1000, 0.8, 0.8), (60, 0.97, 0.95))
    truth = sum(n * (after - before) for n, before, after in tests) / 1260
    covered = 0
    for _ in range(1200):
        drawn = [
            scores(rng.binomial(n, before), rng.binomial(n, after), n) for n, before, after in tests
        ]
        found = pool(drawn, 0.95)
        assert found is not None
        covered += found.interval.low <= truth <= found.interval.high
    assert 0.935 < covered / 1200 < 0.975


def test_tests_weigh_by_their_questions() -> None:
    found = pool([scores(500, 400, 1000), scores(50, 50, 100)], 0.95)
    assert found is not None
    assert found.difference == pytest.approx(-100 / 1100)
    assert found.questions == 1100


def test_what_is_counted_elsewhere_or_not_at_all_is_left_out() -> None:
    twice = ScorePair("again", 0.1, 0.9, 1000, pooled=False)
    unknown = ScorePair("unknown", 0.1, 0.9)
    assert pool([scores(9, 8, 10), twice, unknown], 0.95) == pool([scores(9, 8, 10)], 0.95)
    assert pool([unknown], 0.95) is None


# --- evidence and plans ---------------------------------------------------------------------------


def evidence(*pairs: ScorePair, changes: Changes = "kv", variant: str = "fp8_e4m3") -> Evidence:
    return Evidence("m", changes, "bf16", variant, pairs, "a study")


def test_the_release_itself_loses_nothing() -> None:
    risk = quality_risk("m", "native", "bf16", [])
    assert risk.has_evidence
    assert risk.loss_bound == 0.0
    assert risk.flags() == ()
    assert risk.verdict(0.0) == "met"
    assert quality_risk("m", "fp8_block", "bf16", [], native_weights="fp8_block").has_evidence


@pytest.mark.parametrize(
    ("model", "weights", "kv"),
    [("m", "int4_g64", "bf16"), ("m", "int4_g32", "fp8_e4m3"), ("other", "int4_g32", "bf16")],
)
def test_nothing_is_inferred_from_another_model_or_format(
    model: str, weights: str, kv: str
) -> None:
    known = evidence(scores(900, 899, 1000), changes="weights", variant="int4_g32")
    risk = quality_risk(model, weights, kv, [known], native_weights="bf16")
    assert not risk.has_evidence
    assert risk.loss_bound is None
    assert risk.verdict(1.0) == "no_evidence"
    (flag,) = risk.flags()
    assert "no scores are known" in flag


@pytest.mark.parametrize(
    ("pair", "budget", "verdict"),
    [
        (scores(90_000, 89_900, 100_000), 0.01, "met"),
        (scores(90_000, 89_900, 100_000), 0.001, "not_shown"),
        (scores(900, 900, 1000), 0.01, "not_shown"),
        (scores(90_000, 80_000, 100_000), 0.05, "exceeded"),
        (scores(90_000, 80_000, 100_000), 0.2, "met"),
    ],
)
def test_a_budget_is_met_only_when_it_is_shown(
    pair: ScorePair, budget: float, verdict: str
) -> None:
    assert quality_risk("m", "native", "fp8_e4m3", [evidence(pair)]).verdict(budget) == verdict


def test_losses_of_weights_and_kv_add_up() -> None:
    both = [
        evidence(scores(9000, 8990, 10_000)),
        evidence(scores(9000, 8950, 10_000), changes="weights", variant="nvfp4"),
    ]
    risk = quality_risk("m", "nvfp4", "fp8_e4m3", both)
    parts = [part.loss_bound or 0.0 for part in risk.parts]
    assert min(parts) > 0
    assert risk.loss_bound == pytest.approx(sum(parts))


def test_a_test_that_is_surely_worse_is_flagged_though_the_pool_is_not() -> None:
    mixed = evidence(scores(500, 350, 1000, "bad"), scores(90_000, 90_140, 100_000, "large"))
    risk = quality_risk("m", "native", "fp8_e4m3", [mixed])
    assert risk.kv.told_apart == ("bad",)
    assert "worse than bf16 on bad" in risk.flags()[0]
    assert risk.kv.worst_test == "bad"


def test_of_several_studies_the_one_with_most_questions_counts() -> None:
    flattering = evidence(scores(900, 960, 1000))
    thorough = evidence(scores(9000, 8900, 10_000))
    for studies in ([flattering, thorough], [thorough, flattering]):
        risk = quality_risk("m", "native", "fp8_e4m3", studies)
        assert risk.kv.questions == 10_000
        assert risk.kv.loss == pytest.approx(0.01)


def test_a_loss_that_counts_from_another_change_meets_no_budget() -> None:
    """INT4 was compared with FP8, and nobody compared FP8 with the release."""
    known = replace(
        evidence(scores(90_000, 89_990, 100_000), changes="weights", variant="int4_g32"),
        baseline="fp8_block",
    )
    unsure = quality_risk("m", "int4_g32", "bf16", [known], native_weights="bf16")
    assert unsure.verdict(0.01) == "not_shown"
    assert "compared with fp8_block, which is not the release's own" in unsure.flags()[0]
    sure = quality_risk("m", "int4_g32", "bf16", [known], native_weights="fp8_block")
    assert sure.verdict(0.01) == "met"
    assert sure.flags() == ()


def test_evidence_without_numbers_of_questions_is_none() -> None:
    risk = quality_risk("m", "native", "fp8_e4m3", [evidence(ScorePair("t", 0.9, 0.9))])
    assert not risk.has_evidence


def test_what_ships_is_known_of_two_formats() -> None:
    kimi = quality_risk("kimi-k2.6", "native", "fp8_e4m3", shipped_evidence())
    assert kimi.has_evidence
    assert kimi.kv.relative_to == "bf16"
    glm = quality_risk("glm-5.2", "int4_g32", "bf16", shipped_evidence())
    assert glm.weights.relative_to == "fp8_block"
    assert not quality_risk("glm-5.2", "int4_g32", "fp8_e4m3", shipped_evidence()).has_evidence
    # The catalogue's GLM-5.2 is the FP8 release, so that FP8 by name changes nothing of it.
    native = load_model("glm-5.2").native_weight_format
    assert quality_risk(
        "glm-5.2", "int4_g32", "bf16", shipped_evidence(), native_weights=native
    ).weights.from_release
    own = quality_risk("glm-5.2", "fp8_block", "bf16", shipped_evidence(), native_weights=native)
    assert own.weights.is_released
