"""Reads scores of models in several formats: the published ones shipped here, or a user's own."""

from __future__ import annotations

import datetime
from functools import cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError, model_validator

from tonnage.scenarios.load import parse_yaml
from tonnage.scenarios.messages import first_problem
from tonnage.scenarios.schema_base import Number, Section, Text, Whole, WholeOrZero, field_error
from tonnage.sim.domain import BadInputError
from tonnage.sim.planning.proportions import Paired
from tonnage.sim.planning.quality_risk import Evidence
from tonnage.sim.planning.score_pairs import ScorePair

_HERE = Path(__file__).parent / "quality"
_PERCENT = 100.0
Percent = Annotated[Number, Field(ge=0, le=_PERCENT)]
Name = Annotated[Text, Field(min_length=1)]

_PAIRED = ("both", "only_baseline", "only_variant", "neither")
_COUNTED = ("questions", "baseline_correct", "variant_correct")
_SCORED = ("baseline", "variant")


class ScoresSection(Section):
    """One test, given in one of three ways; the later ones say more.

    Percentages `baseline` and `variant`, with the number of `questions` where it is known; right
    answers `baseline_correct` and `variant_correct` of `questions`; or the questions answered
    rightly by `both`, by one alone and by `neither`.
    """

    questions: Whole | None = None
    baseline: Percent | None = None
    variant: Percent | None = None
    baseline_correct: WholeOrZero | None = None
    variant_correct: WholeOrZero | None = None
    both: WholeOrZero | None = None
    only_baseline: WholeOrZero | None = None
    only_variant: WholeOrZero | None = None
    neither: WholeOrZero | None = None
    pooled: bool = True

    @model_validator(mode="after")
    def _says_it_one_way(self) -> ScoresSection:
        given = {name for name in self.model_fields_set if name != "pooled"}
        ways = {"percentages": _SCORED, "counts": _COUNTED, "pairs": _PAIRED}
        for way, names in ways.items():
            allowed = {*names, "questions"} if way == "percentages" else set(names)
            if set(names) <= given <= allowed:
                self._check_counts()
                return self
        texts = "; or ".join(", ".join(names) for names in ways.values())
        raise field_error("", f"a test needs {texts}")

    def _check_counts(self) -> None:
        for name in ("baseline_correct", "variant_correct"):
            value = getattr(self, name)
            if value is not None and self.questions is not None and value > self.questions:
                problem = f"{value} right answers are more than the {self.questions} questions"
                raise field_error(name, f"{problem}; correct one of them")
        if self.both is not None and not any(getattr(self, name) for name in _PAIRED):
            raise field_error("both", "no question at all; leave the test out")

    def pair(self, test: str) -> ScorePair:
        """Return the two scores in shares."""
        if self.both is not None:
            # The validator has seen that all four are there.
            pairs = Paired(*(getattr(self, name) for name in _PAIRED))
            shares = pairs.baseline.share, pairs.variant.share
            return ScorePair(test, *shares, pairs.questions, pairs, self.pooled)
        if self.baseline_correct is not None and self.variant_correct is not None:
            assert self.questions is not None
            first, second = self.baseline_correct, self.variant_correct
            shares = first / self.questions, second / self.questions
            return ScorePair(test, *shares, self.questions, None, self.pooled)
        assert self.baseline is not None
        assert self.variant is not None
        shares = self.baseline / _PERCENT, self.variant / _PERCENT
        return ScorePair(test, *shares, self.questions, None, self.pooled)


class ComparisonSection(Section):
    """One model with one thing changed, and its scores before and after."""

    model: Name
    changes: Literal["weights", "kv"]
    baseline: Name
    variant: Name
    note: Text = ""
    tests: Annotated[dict[str, ScoresSection], Field(min_length=1)]

    def evidence(self, source: str) -> Evidence:
        """Return it as what the planner reads."""
        return Evidence(
            model=self.model,
            changes=self.changes,
            baseline=self.baseline,
            variant=self.variant,
            pairs=tuple(scores.pair(test) for test, scores in self.tests.items()),
            source=source,
            note=" ".join(self.note.split()),
        )


class QualityFile(Section):
    """The contents of a file of scores."""

    date: datetime.date
    source: Name
    comparisons: Annotated[tuple[ComparisonSection, ...], Field(min_length=1)]


@cache
def shipped_evidence() -> tuple[Evidence, ...]:
    """Return the published scores that the package ships."""
    return tuple(one for path in sorted(_HERE.glob("*.yaml")) for one in read_evidence(path))


def read_evidence(path: Path) -> tuple[Evidence, ...]:
    """Return the scores of a file; a mistake names the file, the field and the mend."""
    try:
        data = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInputError(f"{path}: cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise BadInputError(f"{path}: scores have the fields date, source and comparisons")
    try:
        file = QualityFile.model_validate(data)
    except ValidationError as error:
        raise BadInputError(f"{path}: {first_problem(error, data)}") from error
    source = f"{' '.join(file.source.split())} ({file.date.isoformat()})"
    return tuple(section.evidence(source) for section in file.comparisons)
