"""What a plan's formats may cost in quality: which are out of its budget, and what is not known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tonnage.quality_report import known_risk
from tonnage.scenarios.quality import read_evidence
from tonnage.scenarios.schema import Scenario
from tonnage.sim.planning.quality_risk import Evidence, QualityRisk

PREFIX = "quality: "  # of what is said of formats among a plan's assumptions
_POINTS = 100.0


@dataclass(slots=True)
class FormatJudge:
    """Judges weights and KV of a scenario's model, by the published scores and the user's own."""

    scenario: Scenario
    _own: tuple[Evidence, ...] = ()
    _risks: dict[tuple[str, str], QualityRisk] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read the user's own scores, before any work is done."""
        self._own = _own_scores(self.scenario)

    def risk(self, weights: str, kv: str) -> QualityRisk:
        """Return what is known of the model in these formats."""
        if (weights, kv) not in self._risks:
            model = self.scenario.model_spec()
            self._risks[weights, kv] = known_risk(model, weights, kv, self._own)
        return self._risks[weights, kv]

    def refusal(self, weights: str, kv: str) -> str | None:
        """Return why formats are not tried, None where they are within the budget, or may be."""
        plan = self.scenario.plan
        if plan.quality_budget is None:
            return None
        risk = self.risk(weights, kv)
        verdict = risk.verdict(plan.quality_budget / _POINTS)
        budget = f"plan.quality_budget {plan.quality_budget:g}"
        if verdict == "exceeded":
            lost = sum(part.surely_lost for part in risk.parts) * _POINTS
            shown = f"scores show a loss of {lost:.2f} points or more"
            return f"{shown} with {weights} weights and {kv} KV, {budget}"
        if verdict == "met" or plan.unproven == "flag":
            return None
        return f"{_unshown(risk)} with {weights} weights and {kv} KV, {budget}"

    def flags(self, weights: str, kv: str) -> Iterator[str]:
        """Yield what is not known of formats that are tried, or speaks against them."""
        risk, budget = self.risk(weights, kv), self.scenario.plan.quality_budget
        yield from (PREFIX + text for text in risk.flags())
        if budget is None or not risk.has_evidence or risk.verdict(budget / _POINTS) != "not_shown":
            return
        yield (
            f"{PREFIX}{risk.model} with {weights} weights and {kv} KV: {_unshown(risk)}, "
            f"the budget is {budget:g}"
        )


def _unshown(risk: QualityRisk) -> str:
    bound = risk.loss_bound
    if bound is None:
        return "no scores are known"
    if not all(part.from_release for part in risk.parts):
        return "scores are not compared with the release's own format"
    return f"a loss of {bound * _POINTS:.2f} points is not ruled out"


def _own_scores(scenario: Scenario) -> tuple[Evidence, ...]:
    """Read the user's own scores; a relative path starts from the scenario's folder."""
    if scenario.plan.scores is None:
        return ()
    _, folder = scenario.origin()
    return read_evidence(folder / scenario.plan.scores)
