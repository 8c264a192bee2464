"""The attention tables of a profile: rows to one grid per shape, and the keys of their forms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from tonnage.sim.cost.models.attention import (
    NO_PROJECTION,
    AttentionForm,
    AttentionShape,
    Content,
    Work,
)
from tonnage.sim.cost.models.grid import Grid
from tonnage.sim.domain import FloatArray

if TYPE_CHECKING:
    import pandas as pd

SHAPE_COLUMNS = (
    "kind",
    "kv_format",
    "heads",
    "kv_heads",
    "head_dim",
    "window_tokens",
    "projection_format",
    "hidden_size",
)

NUMBER_COLUMNS = ("batch", "context_tokens", "new_tokens", "past_tokens", "seconds")

Columns = Mapping[str, FloatArray]
_WorkOf = Callable[..., Work]

# Where no residual was held out for a family; as wide as the widest that were.
_UNKNOWN_INTERVAL = (0.5, 2.0)


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredGrid:
    """Seconds of one shape `[batches, tokens]`, NaN where not measured, and what the rows are."""

    shape: AttentionShape
    batches: FloatArray
    tokens: FloatArray
    seconds: FloatArray
    content: Content
    framework: str
    _residuals: dict[tuple[AttentionForm, _WorkOf], Grid] = field(default_factory=dict)

    @property
    def reach(self) -> FloatArray:
        """Largest measured number of tokens of each batch `[batches]`."""
        known = ~np.isnan(self.seconds)
        return np.asarray(np.where(known, self.tokens, 0.0).max(axis=1))

    def residuals(self, form: AttentionForm, work_of: _WorkOf) -> Grid:
        """Return log(measured / form) over (batch, tokens), the edge's value beyond the grid."""
        key = (form, work_of)
        if key not in self._residuals:
            work = work_of(self.shape, self.batches[:, None], self.tokens)
            logs = np.log(self.seconds / form.seconds(work))
            self._residuals[key] = Grid((self.batches, self.tokens), logs)
        return self._residuals[key]


def form_key(shape: AttentionShape) -> str:
    """Return the family that shares one form: ``mla/bf16/576``; modules add what else they hold."""
    key = f"{shape.kind}/{shape.kv_format}/{shape.head_dim}"
    if shape.projection_format == NO_PROJECTION:
        return key
    return f"{key}/{shape.projection_format}/{shape.hidden_size}"


def intervals_of(
    intervals: Mapping[str, Any], shape: AttentionShape, regime: str
) -> tuple[float, float]:
    """Return the factors at 5 % and 95 % of a kind, KV format and regime."""
    found = intervals.get(f"{shape.kind}/{shape.kv_format}", {}).get(regime)
    return (float(found[0]), float(found[1])) if found else _UNKNOWN_INTERVAL


def shapes_of(table: pd.DataFrame) -> list[tuple[AttentionShape, Columns]]:
    """Return each shape of a table, in one order, with the numbers of its rows."""
    if table.empty:
        return []
    numbers = {
        name: table[name].to_numpy(np.float64) for name in NUMBER_COLUMNS if name in table.columns
    }
    return [
        (shape, {name: values[index] for name, values in numbers.items()})
        for shape, index in _rows_of_shapes(table)
    ]


def _rows_of_shapes(table: pd.DataFrame) -> list[tuple[AttentionShape, NDArray[np.intp]]]:
    """Return each shape with the positions of its rows; one pass over the table."""
    import pandas as pd

    label = np.zeros(len(table), dtype=np.int64)
    for name in SHAPE_COLUMNS:
        codes, values = pd.factorize(table[name], use_na_sentinel=False, sort=True)
        label = label * (len(values) + 1) + codes
    _, first, group = np.unique(label, return_index=True, return_inverse=True)
    order = np.argsort(group, kind="stable")
    bounds = np.cumsum(np.bincount(group))[:-1]
    keys = [table[name].iloc[first].tolist() for name in SHAPE_COLUMNS]
    shapes = [shape_of_key(key) for key in zip(*keys, strict=True)]
    return list(zip(shapes, np.split(order, bounds), strict=True))


def shape_of_key(key: tuple[Any, ...]) -> AttentionShape:
    """Return the shape of the values of `SHAPE_COLUMNS`; NaN is no window, no hidden size."""
    kind, kv_format, heads, kv_heads, head_dim, window, projection, hidden = key
    return AttentionShape(
        str(kind),
        str(kv_format),
        int(heads),
        int(kv_heads),
        int(head_dim),
        None if np.isnan(window) else int(window),
        str(projection),
        None if np.isnan(hidden) else int(hidden),
    )


class Grids(Mapping[AttentionShape, MeasuredGrid]):
    """The grid of every shape of a table over batch and the column `tokens`, made when read."""

    def __init__(self, table: pd.DataFrame, tokens: str) -> None:
        self._rows = dict(_rows_of_shapes(table)) if len(table) else {}
        self._made: dict[AttentionShape, MeasuredGrid] = {}
        if self._rows:
            names = ("batch", tokens, "seconds")
            self._numbers = [table[name].to_numpy(np.float64) for name in names]
            self._content = table["content"].to_numpy(dtype=object)
            self._framework = table["source_framework"].to_numpy(dtype=object)
        self.kernels = {
            shape: str(table["kernel"].iloc[index[0]]) if "kernel" in table.columns else ""
            for shape, index in self._rows.items()
        }

    def __getitem__(self, shape: AttentionShape) -> MeasuredGrid:
        if shape not in self._made:
            self._made[shape] = self._grid(shape, self._rows[shape])
        return self._made[shape]

    def __iter__(self) -> Iterator[AttentionShape]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def _grid(self, shape: AttentionShape, index: NDArray[np.intp]) -> MeasuredGrid:
        batch, tokens, times = (values[index] for values in self._numbers)
        batches, row_of = np.unique(batch, return_inverse=True)
        knots, column_of = np.unique(tokens, return_inverse=True)
        seconds = np.full((len(batches), len(knots)), np.nan)
        seconds[row_of, column_of] = times
        content = cast(Content, str(self._content[index[0]]))
        frameworks = "+".join(sorted(set(self._framework[index])))
        return MeasuredGrid(shape, batches, knots, seconds, content, frameworks)
