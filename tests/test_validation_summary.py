"""Errors of rows and what they come to, by hand."""

from __future__ import annotations

import pytest

from tonnage.validation_summary import Figure, ValidatedRow, by_group, summary


def _row(name: str, predicted: float | None, gpu: str = "h200") -> ValidatedRow:
    if predicted is None:
        return ValidatedRow(name, {"gpu": gpu}, refused="no such model")
    return ValidatedRow(name, {"gpu": gpu}, {"tpot": Figure(10.0, predicted, 8.0, 11.0)})


def test_errors_are_shares_of_what_was_measured() -> None:
    rows = [_row("a", 11.0), _row("b", 8.0), _row("c", None), _row("d", 15.0, "b200")]
    told = summary(rows, ["tpot"])
    assert (told["rows"], told["predicted"], told["refused"]) == (4, 3, 1)
    assert told["reasons"] == {"no such model": 1}
    assert told["tpot_mape"] == pytest.approx((0.1 + 0.2 + 0.5) / 3)
    assert told["tpot_median_abs_error"] == pytest.approx(0.2)
    assert told["tpot_bias"] == pytest.approx(0.1)
    assert told["interval_coverage"] == 1.0
    groups = by_group(rows, ["tpot"], "gpu")
    assert list(groups) == ["b200", "h200"]
    assert groups["b200"]["tpot_mape"] == pytest.approx(0.5)


def test_a_figure_outside_its_interval_is_not_covered() -> None:
    outside = ValidatedRow("x", {}, {"tpot": Figure(12.0, 9.0, 8.0, 11.0)})
    assert summary([_row("a", 9.0), outside], ["tpot"])["interval_coverage"] == 0.5


def test_nothing_predicted_has_no_errors() -> None:
    told = summary([_row("c", None)], ["tpot"])
    assert told["tpot_mape"] is None
    assert told["interval_coverage"] is None
