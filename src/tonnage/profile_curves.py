"""Measured points of a profile beside what its models predict, series by series."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tonnage.scenarios.catalogue import load_gpu
from tonnage.sim.cost.operator_models import OperatorModels, operator_models
from tonnage.sim.cost.profile import Profile
from tonnage.sim.cost.table_operators import TABLE_OPERATORS, Key, TableOperator
from tonnage.sim.domain import FloatArray


@dataclass(frozen=True, slots=True, eq=False)
class Series:
    """One combination of an operator's keys: the measured seconds over the axis `x`, rising."""

    operator: TableOperator
    key: Key
    x: FloatArray
    seconds: FloatArray

    @property
    def format(self) -> str:
        """Name of the format, as in the header's errors."""
        return self.operator.format_of(self.key)

    @property
    def label(self) -> str:
        """The keys that are not the format, such as `n 4096, k 7168`."""
        shown = (name for name in self.key if name not in self.operator.format_keys)
        texts = ((name, _text(self.key[name])) for name in shown)
        return ", ".join(f"{name} {text}" for name, text in texts if text)

    def predicted(self, models: OperatorModels, x: FloatArray) -> FloatArray:
        """Return the seconds that models predict at points of the axis."""
        return np.asarray(self.operator.ask(models, self.key, x).seconds, dtype=np.float64)


def _text(value: object) -> str:
    if isinstance(value, float | np.floating):
        return "" if np.isnan(value) else f"{value:g}"
    return str(value)


def series_of(profile: Profile) -> Iterator[Series]:
    """Yield the series of every table that a model answers for."""
    for name, operator in TABLE_OPERATORS.items():
        rows = profile.tables.get(name)
        if rows is None:
            continue
        yield from (Series(operator, *one) for one in operator.series(rows))


def models_of(profile: Profile) -> OperatorModels:
    """Return the models of a profile with the datasheet of its GPU."""
    return operator_models(profile, load_gpu(profile.header.gpu))
