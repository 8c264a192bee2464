"""Held-out errors: what a shipped form predicts of rows that it never saw.

A fold leaves rows out, a trainer makes a predictor of the rest, and every row that was left out is
judged. Errors are those of thinned tables; the rows that they are judged on are not thinned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from tonnage.calibrate.held_out import summary
from tonnage.sim.cost.models.attention import AttentionShape
from tonnage.sim.cost.models.attention_table import Columns, shapes_of
from tonnage.sim.domain import FloatArray

# Rows of one shape to predicted seconds and the regime that the model says the shape is in.
Predictor = Callable[[AttentionShape, Columns], tuple[FloatArray, str]]
Trainer = Callable[[pd.DataFrame], Predictor]
Values = Callable[[pd.DataFrame], "pd.Series[Any]"]


@dataclass(frozen=True, slots=True)
class Fold:
    """One split. `question`: names the figure, "" is the main one; `regime` None: the model's own.

    `held_out`: what was left out, in words.
    """

    question: str
    held_out: str
    train: pd.DataFrame
    test: pd.DataFrame
    regime: str | None = None


def whole_values(
    thinned: pd.DataFrame,
    rows: pd.DataFrame,
    value_of: Values,
    question: str,
    held_out: str,
    regime: str | None = None,
) -> Iterator[Fold]:
    """Yield folds that leave out every row of one kind with one value of a shape's property."""
    trained, judged_values = value_of(thinned), value_of(rows)
    for kind in sorted(set(thinned["kind"])):
        of_kind = thinned["kind"] == kind
        values = sorted(set(trained[of_kind]))
        for value in values if len(values) > 1 else ():
            train = thinned[of_kind & (trained != value)]
            test = rows[(rows["kind"] == kind) & (judged_values == value)]
            yield Fold(question, held_out, train, test, regime)


def judged(folds: Iterable[Fold], trainer: Trainer) -> pd.DataFrame:
    """Return a line per judged row: kind and format, question, regime, place, true / predicted."""
    lines = [one for fold in folds if len(fold.train) for one in _judged(fold, trainer)]
    columns = ["format", "question", "held_out", "regime", "place", "ratio"]
    return pd.concat(lines, ignore_index=True) if lines else pd.DataFrame(columns=columns)


def _judged(fold: Fold, trainer: Trainer) -> Iterator[pd.DataFrame]:
    predict = trainer(fold.train)
    for shape, rows in shapes_of(fold.test):
        predicted, place = predict(shape, rows)
        inside = "interpolation" if place in ("measured", "heads") else "extrapolation"
        yield pd.DataFrame(
            {
                "format": f"{shape.kind}/{shape.kv_format}",
                "question": fold.question,
                "held_out": fold.held_out,
                "regime": fold.regime or inside,
                "place": "outside" if fold.regime == "extrapolation" else place,
                "ratio": rows["seconds"] / predicted,
            }
        )


def summarised(lines: pd.DataFrame, operator: str) -> pd.DataFrame:
    """Return a row per format, question and regime; the question stands in the format's name."""
    rows = []
    for (name, question, regime), part in lines.groupby(["format", "question", "regime"]):
        errors = np.log(part["ratio"].to_numpy(float))
        figures = summary(str(regime), str(part["held_out"].iloc[0]), errors)
        label = f"{name}, {question}" if question else str(name)
        rows.append({"operator": operator, "format": label, **figures})
    return pd.DataFrame(rows)


def intervals(lines: pd.DataFrame) -> dict[str, dict[str, list[float]]]:
    """Return the factors true / predicted at 5 % and 95 % by format and place, for the models.

    Places: measured (between the knots of a shape), heads, outside, scaled.
    """
    found: dict[str, dict[str, list[float]]] = {}
    for (name, place), part in lines.groupby(["format", "place"]):
        low, high = np.quantile(part["ratio"].to_numpy(float), [0.05, 0.95])
        found.setdefault(str(name), {})[str(place)] = [_rounded(low), _rounded(high)]
    return found


def every_second(values: pd.Series[Any]) -> pd.Series[bool]:
    """Return which rows lie on the second, fourth ... of the distinct values, the ends excepted."""
    return values.isin(sorted(set(values))[1:-1:2])


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
