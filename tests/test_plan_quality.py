"""The quality budget of a plan: what is out of it, what is not shown, what is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.test_planner import TINY
from tonnage.plan_quality import PREFIX, FormatJudge
from tonnage.planner import plan
from tonnage.scenarios.load import parse_scenario
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import BadInputError

KIMI = {**TINY, "model": "kimi-k2.6", "gpu": "h200-sxm"}


def scenario(base: dict[str, Any], folder: Path | None = None, **changes: Any) -> Scenario:
    data = {**base, "plan": {**base["plan"], **changes}}
    return parse_scenario(data) if folder is None else parse_scenario(data, "own.yaml", folder)


def scores(folder: Path, right: int) -> str:
    """Write scores of Llama in INT4: of 20,000 questions 18,000 right before, `right` after."""
    counts = {"questions": 20_000, "baseline_correct": 18_000, "variant_correct": right}
    comparison = {
        "model": "llama-3.1-8b",
        "changes": "weights",
        "baseline": "bf16",
        "variant": "int4_g32",
        "tests": {"ours": counts},
    }
    file = {"date": "2026-10-01", "source": "made up", "comparisons": [comparison]}
    (folder / "scores.yaml").write_text(yaml.safe_dump(file), encoding="utf-8")
    return "scores.yaml"


def test_without_a_budget_nothing_is_refused() -> None:
    judge = FormatJudge(scenario(KIMI))
    assert judge.refusal("nvfp4", "fp8_e4m3") is None
    assert list(judge.flags("native", "bf16")) == []
    (flag,) = judge.flags("nvfp4", "bf16")
    assert flag == f"{PREFIX}kimi-k2.6: no scores are known with weights nvfp4"


def test_what_is_not_ruled_out_is_flagged_or_refused() -> None:
    """Published: FP8 KV of Kimi K2.6 loses 0.43 points of 28,628 questions, or up to 1.01."""
    flags = list(FormatJudge(scenario(KIMI, quality_budget=1.0)).flags("native", "fp8_e4m3"))
    assert any("a loss of 1.01 points is not ruled out, the budget is 1" in one for one in flags)
    assert not list(FormatJudge(scenario(KIMI, quality_budget=1.1)).flags("native", "fp8_e4m3"))
    strict = FormatJudge(scenario(KIMI, quality_budget=1.0, unproven="refuse"))
    refusal = strict.refusal("native", "fp8_e4m3")
    assert refusal is not None
    assert "plan.quality_budget 1" in refusal
    assert strict.refusal("native", "bf16") is None
    assert "no scores are known" in str(strict.refusal("nvfp4", "bf16"))


def test_a_plan_leaves_out_what_scores_show_to_lose_too_much(tmp_path: Path) -> None:
    """5 points less, beyond any doubt: not tried with a budget of 1, and the reason is told."""
    name = scores(tmp_path, right=17_000)
    wanted = {"weights": ["native", "int4_g32"], "scores": name}
    report = plan(scenario(TINY, tmp_path, **wanted, quality_budget=1.0), workers=1)
    assert {pool.weights for pool in report.best.pools} == {"native"}
    reasons = [one.reason for one in report.rejected if "quality_budget 1" in one.reason]
    assert reasons
    assert all("scores show a loss of" in one for one in reasons)


def test_a_plan_says_what_is_not_known_of_its_formats() -> None:
    report = plan(scenario(TINY, weights=["int4_g32"]), workers=1)
    assumptions = report.best.provenance.assumptions
    assert f"{PREFIX}llama-3.1-8b: no scores are known with weights int4_g32" in assumptions
    assert any("a checkpoint in int4_g32 has to be found or made" in one for one in assumptions)


def test_scores_that_are_not_there_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"none\.yaml: cannot be read"):
        plan(scenario(TINY, tmp_path, scores="none.yaml"), workers=1)


def test_an_evidence_rule_needs_a_budget() -> None:
    with pytest.raises(BadInputError, match=r"plan\.unproven.*quality_budget"):
        scenario(TINY, unproven="refuse")
