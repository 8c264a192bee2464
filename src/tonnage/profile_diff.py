"""How two profiles differ: their headers, and the times that they predict at common points."""

from __future__ import annotations

from typing import Any

import numpy as np

from tonnage.profile_curves import Series, models_of, series_of
from tonnage.sim.cost.operator_models import OperatorModels
from tonnage.sim.cost.profile import Profile

_FIELDS = ("gpu", "engine", "engine_version", "source", "date", "licence", "driver", "clocks")
_SERIES_PER_FORMAT = 50


def diff_report(first: Profile, second: Profile) -> dict[str, Any]:
    """Return the JSON object of `profile diff`: header fields that differ, ratios, what is alone.

    A ratio is the second's predicted time over the first's, at the measured points of either that
    are of an operator and format which both have.
    """
    of_first, of_second = _by_format(first), _by_format(second)
    models = (models_of(first), models_of(second))
    common = of_first.keys() & of_second.keys()
    return {
        "first": first.header.name,
        "second": second.header.name,
        "header": {
            field: [_plain(getattr(one.header, field)) for one in (first, second)]
            for field in _FIELDS
            if getattr(first.header, field) != getattr(second.header, field)
        },
        "ratios": [
            _ratio(place, [*_spread(of_first[place]), *_spread(of_second[place])], models)
            for place in sorted(common)
        ],
        "only_first": _names(of_first.keys() - common),
        "only_second": _names(of_second.keys() - common),
    }


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else dict(value)


def _names(places: set[tuple[str, str]]) -> list[str]:
    return sorted(f"{operator} {name}" for operator, name in places)


def _by_format(profile: Profile) -> dict[tuple[str, str], list[Series]]:
    found: dict[tuple[str, str], list[Series]] = {}
    for one in series_of(profile):
        found.setdefault((one.operator.table, one.format), []).append(one)
    return found


def _ratio(
    place: tuple[str, str], series: list[Series], models: tuple[OperatorModels, OperatorModels]
) -> dict[str, Any]:
    """Return how the second's times compare with the first's over all points of some series."""
    first, second = models
    ratios = [one.predicted(second, one.x) / one.predicted(first, one.x) for one in series]
    every = np.concatenate(ratios)
    low, median, high = np.quantile(every, [0.1, 0.5, 0.9])
    return {
        "operator": place[0],
        "format": place[1],
        "points": len(every),
        "median": float(median),
        "p10": float(low),
        "p90": float(high),
    }


def _spread(series: list[Series]) -> list[Series]:
    """Return at most so many series, spread over all of them."""
    step = -(-len(series) // _SERIES_PER_FORMAT)
    return series[::step]
