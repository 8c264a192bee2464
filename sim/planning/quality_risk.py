"""What is known of the quality that a choice of weights and KV may cost, and what is not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tonnage.sim.planning.score_pairs import ScorePair, Standards, compare, pool

Changes = Literal["weights", "kv"]
# met: the loss is shown to be within the budget. exceeded: a loss beyond it is shown. not_shown:
# the questions are too few to say. no_evidence: nothing was compared.
BudgetVerdict = Literal["met", "exceeded", "not_shown", "no_evidence"]
RELEASED_KV = "bf16"  # what models are released for


@dataclass(frozen=True, slots=True)
class Evidence:
    """Published or own scores of a model in which one thing, weights or KV, was changed."""

    model: str
    changes: Changes
    baseline: str
    variant: str
    pairs: tuple[ScorePair, ...]
    source: str
    note: str = ""


@dataclass(frozen=True, slots=True)
class FormatRisk:
    """What is known of one format of one model.

    `is_released`: it is the release's own, so that nothing is lost. `loss_bound`: the loss, in
    shares of all `questions` pooled, that the evidence does not rule out; None without evidence.
    `surely_lost`: what is lost beyond noise.
    `worst_test` is the one whose own interval reaches lowest, to `worst_loss_bound`. `told_apart`:
    tests that are worse beyond noise. `relative_to` is what the loss counts from, and
    `from_release` whether that is the release's own format: else its own loss is not known.
    """

    changes: Changes
    format: str
    is_released: bool
    relative_to: str | None = None
    from_release: bool = True
    loss: float | None = None
    loss_bound: float | None = None
    surely_lost: float = 0.0
    questions: int = 0
    worst_test: str | None = None
    worst_loss_bound: float | None = None
    told_apart: tuple[str, ...] = ()
    source: str | None = None
    note: str = ""

    @property
    def has_evidence(self) -> bool:
        """Whether anything is known: it is the release's own, or was compared with something."""
        return self.is_released or self.loss_bound is not None


@dataclass(frozen=True, slots=True)
class QualityRisk:
    """What is known of a model's weights and KV together; losses of both are taken to add up."""

    model: str
    weights: FormatRisk
    kv: FormatRisk

    @property
    def parts(self) -> tuple[FormatRisk, FormatRisk]:
        """Return the two formats."""
        return self.weights, self.kv

    @property
    def has_evidence(self) -> bool:
        """Whether both formats have evidence."""
        return all(part.has_evidence for part in self.parts)

    @property
    def loss_bound(self) -> float | None:
        """Return the loss that is not ruled out, in shares; None where a format lacks evidence."""
        if not self.has_evidence:
            return None
        return sum(part.loss_bound or 0.0 for part in self.parts)

    def flags(self) -> tuple[str, ...]:
        """Return a line for each format that nothing, or something bad, is known of."""
        found = []
        for part in self.parts:
            if not part.has_evidence:
                found.append(f"{self.model}: no scores are known with {part.changes} {part.format}")
            elif not part.from_release:
                found.append(
                    f"{self.model}: {part.changes} {part.format} were compared with "
                    f"{part.relative_to}, which is not the release's own"
                )
            for test in part.told_apart:
                found.append(
                    f"{self.model}: {part.changes} {part.format} scores worse than "
                    f"{part.relative_to} on {test}, beyond noise"
                )
        return tuple(found)

    def verdict(self, budget: float) -> BudgetVerdict:
        """Say whether the loss is within a budget in shares: 0.01 is one point of a score."""
        bound = self.loss_bound
        if sum(part.surely_lost for part in self.parts) > budget:
            return "exceeded"
        if bound is None:
            return "no_evidence"
        is_whole = all(part.from_release for part in self.parts)
        return "met" if is_whole and bound <= budget else "not_shown"


def quality_risk(
    model: str,
    weights: str,
    kv: str,
    evidence: Sequence[Evidence],
    *,
    native_weights: str | None = None,
    standards: Standards | None = None,
) -> QualityRisk:
    """Say what is known of a model's quality in these weights and this KV.

    `weights` is `native` or a format; `native_weights` names the release's own, so that asking for
    it by name is not a change. Nothing is inferred from one model to another, or from one group
    size to another.
    """
    standards = standards or Standards()
    released = {"weights": {"native", native_weights or "native"}, "kv": {RELEASED_KV}}

    def risk(changes: Changes, number_format: str) -> FormatRisk:
        about = [one for one in evidence if (one.model, one.changes) == (model, changes)]
        return _format_risk(changes, number_format, released[changes], about, standards)

    return QualityRisk(model, risk("weights", weights), risk("kv", kv))


def _format_risk(
    changes: Changes,
    number_format: str,
    released: set[str],
    evidence: Sequence[Evidence],
    standards: Standards,
) -> FormatRisk:
    if number_format in released:
        return FormatRisk(changes, number_format, is_released=True)
    studies = [_judged(one, standards) for one in evidence if one.variant == number_format]
    judged = [risk for risk in studies if risk.loss_bound is not None]
    if not judged:
        return FormatRisk(changes, number_format, is_released=False)
    # Of several studies the one that asked most, not the one with the nicest answer.
    most = max(judged, key=lambda risk: risk.questions)
    return replace(most, from_release=most.relative_to in released)


def _judged(evidence: Evidence, standards: Standards) -> FormatRisk:
    compared = [compare(pair, standards) for pair in evidence.pairs]
    measured = [one for one in compared if one.interval is not None]
    pooled = pool(evidence.pairs, standards.confidence)
    worst = min(measured, key=lambda one: one.interval.low if one.interval else 0.0, default=None)
    return FormatRisk(
        changes=evidence.changes,
        format=evidence.variant,
        is_released=False,
        relative_to=evidence.baseline,
        loss=None if pooled is None else -pooled.difference,
        loss_bound=None if pooled is None else max(0.0, -pooled.interval.low),
        surely_lost=max(0.0, -pooled.interval.high) if pooled is not None else 0.0,
        questions=0 if pooled is None else pooled.questions,
        worst_test=None if worst is None else worst.pair.test,
        worst_loss_bound=None if worst is None or worst.interval is None else -worst.interval.low,
        told_apart=tuple(one.pair.test for one in compared if one.verdict == "worse"),
        source=evidence.source,
        note=evidence.note,
    )
