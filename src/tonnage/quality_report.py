"""`tonnage quality`: what scores say of a format, and how far formats move numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tonnage.scenarios.catalogue import model_names, unknown_name
from tonnage.scenarios.quality import read_evidence, shipped_evidence
from tonnage.sim.domain import BadInputError, ModelSpec
from tonnage.sim.planning.quality_risk import Evidence, QualityRisk, quality_risk
from tonnage.sim.planning.score_pairs import Comparison, Pooled, Standards, compare, pool

_FILE_SUFFIXES = (".yaml", ".yml", ".json")
NOTES = (
    "no difference found is not the same as none: see what an interval does not rule out",
    "tests without answers question by question are taken for independent; the same questions "
    "under both formats mostly agree, so such intervals are wider than they need be",
    "scores say nothing of tasks that were not tested",
)


@dataclass(frozen=True, slots=True)
class JudgedEvidence:
    """One format of one model: its tests compared, and all questions together."""

    evidence: Evidence
    comparisons: tuple[Comparison, ...]
    pooled: Pooled | None

    def to_dict(self) -> dict[str, Any]:
        """Return its JSON object; differences and intervals are shares of 1."""
        given = self.evidence
        return {
            "model": given.model,
            "changes": given.changes,
            "baseline": given.baseline,
            "variant": given.variant,
            "source": given.source,
            "note": given.note,
            "tests": [_comparison(one) for one in self.comparisons],
            "pooled": None if self.pooled is None else asdict(self.pooled),
        }


@dataclass(frozen=True, slots=True)
class QualityReport:
    """What was judged, by which standards; `asked` is the model or file, None for all."""

    asked: str | None
    standards: Standards
    judged: tuple[JudgedEvidence, ...]
    notes: tuple[str, ...] = field(default=NOTES)

    @property
    def compared(self) -> int:
        """Return how many tests were compared."""
        known = (one.interval for judged in self.judged for one in judged.comparisons)
        return sum(interval is not None for interval in known)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of the `quality` verb."""
        chance = self.compared * (1.0 - self.standards.confidence)
        return {
            "asked": self.asked,
            "standards": asdict(self.standards),
            "comparisons": [one.to_dict() for one in self.judged],
            "compared": self.compared,
            "told_apart_by_chance": chance,
            "notes": list(self.notes),
            "provenance": {"version": version("tonnage")},
        }


def quality(asked: str | None = None, standards: Standards | None = None) -> QualityReport:
    """Judge the scores of a model, of a file of one's own, or all that ship.

    A model of which no scores are known has an empty report. Raises BadInputError for a name that
    is neither, and for a file that says something that cannot be.
    """
    standards = standards or Standards()
    check_standards(standards)
    judged = tuple(_judged(one, standards) for one in _evidence(asked))
    return QualityReport(asked, standards, judged)


def known_risk(
    model: ModelSpec, weights: str, kv: str, own: Sequence[Evidence] = ()
) -> QualityRisk:
    """Return what is known of a model, as its catalogue entry is, in these weights and this KV.

    From the scores that ship, and one's `own`.
    """
    return quality_risk(
        model.name,
        weights,
        kv,
        (*shipped_evidence(), *own),
        native_weights=model.native_weight_format,
    )


def check_standards(standards: Standards) -> None:
    """Refuse a margin, a confidence or a power that says nothing."""
    if not 0 < standards.margin < 1:
        points = 100 * standards.margin
        raise BadInputError(f"--margin {points:g}: write points of a score, above 0, below 100")
    for name in ("confidence", "power"):
        value = getattr(standards, name)
        if not 0.5 < value < 1:
            raise BadInputError(f"--{name} {value:g}: write a share above 0.5 and below 1")


def _evidence(asked: str | None) -> Sequence[Evidence]:
    if asked is None:
        return shipped_evidence()
    path = Path(asked)
    if path.is_file():
        return read_evidence(path)
    if path.suffix in _FILE_SUFFIXES:
        raise BadInputError(f"quality: {asked}: no such file; check the path")
    found = [one for one in shipped_evidence() if one.model == asked]
    if not found and asked not in model_names():
        mend = "or give a file of scores"
        raise BadInputError(f"{unknown_name('model', asked, model_names())}; {mend}")
    return found


def _judged(evidence: Evidence, standards: Standards) -> JudgedEvidence:
    comparisons = tuple(compare(pair, standards) for pair in evidence.pairs)
    return JudgedEvidence(evidence, comparisons, pool(evidence.pairs, standards.confidence))


def _comparison(one: Comparison) -> dict[str, Any]:
    pair = one.pair
    return {
        "test": pair.test,
        "questions": pair.questions,
        "baseline": pair.baseline,
        "variant": pair.variant,
        "paired": pair.pairs is not None,
        "difference": one.difference,
        "interval": None if one.interval is None else [one.interval.low, one.interval.high],
        "verdict": one.verdict,
        "is_within_margin": one.is_within_margin,
        "questions_needed": one.questions_needed,
        "detectable": one.detectable,
        "mcnemar_p": one.mcnemar_p,
    }
