"""What each table of a profile is asked by: its axis, its other columns, the model that answers.

For those who look at whole tables (reports, comparisons, scaling); a step asks the models itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tonnage.sim.cost.estimate import Estimate
from tonnage.sim.cost.models.attention_table import SHAPE_COLUMNS, shape_of_key
from tonnage.sim.cost.operator_models import OperatorModels
from tonnage.sim.domain import FloatArray

if TYPE_CHECKING:
    import pandas as pd

Key = dict[str, Any]  # a value for each of an operator's key columns
Ask = Callable[[OperatorModels, Key, FloatArray], Estimate]


@dataclass(frozen=True, slots=True)
class TableOperator:
    """One table: seconds over `axis` for every combination of `keys`.

    `format_keys`: those of `keys` that name the format, as in the header's errors.
    """

    table: str
    axis: str
    keys: tuple[str, ...]
    format_keys: tuple[str, ...]
    ask: Ask

    def format_of(self, key: Key) -> str:
        """Return what the header's errors call the format of a combination."""
        return "/".join(_word(name, key[name]) for name in self.format_keys)

    def series(self, rows: pd.DataFrame) -> Iterator[tuple[Key, FloatArray, FloatArray]]:
        """Yield each combination of keys with its values of the axis, rising, and their seconds."""
        names = [name for name in self.keys if name in rows.columns]
        ordered = rows.sort_values([*names, self.axis], ignore_index=True)
        numbers = ordered.groupby(names, dropna=False, sort=False).ngroup().to_numpy()
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        keys = zip(*(ordered[name].iloc[starts].tolist() for name in names), strict=True)
        axis = np.split(ordered[self.axis].to_numpy(np.float64), starts[1:])
        seconds = np.split(ordered["seconds"].to_numpy(np.float64), starts[1:])
        for values, x, times in zip(keys, axis, seconds, strict=False):
            yield dict(zip(names, values, strict=True)), x, times


def _word(name: str, value: Any) -> str:
    if name == "in_graph":
        return "graph" if value else "eager"
    return str(value)


def _gemm(models: OperatorModels, key: Key, m: FloatArray) -> Estimate:
    return models.gemm.seconds(key["format"], m, int(key["n"]), int(key["k"]))


def _decode(models: OperatorModels, key: Key, context_tokens: FloatArray) -> Estimate:
    shape = shape_of_key(tuple(key[name] for name in SHAPE_COLUMNS))
    return models.decode.seconds(shape, float(key["batch"]), context_tokens)


def _prefill(models: OperatorModels, key: Key, new_tokens: FloatArray) -> Estimate:
    shape = shape_of_key(tuple(key[name] for name in SHAPE_COLUMNS))
    past = float(key["past_tokens"])
    return models.prefill.seconds(shape, new_tokens, past, float(key["batch"]))


def _collective(models: OperatorModels, key: Key, message_bytes: FloatArray) -> Estimate:
    gpus = int(key["gpus"])
    if key["op"] == "all_reduce":
        in_graph = bool(key["in_graph"])
        return models.comm.all_reduce(gpus, message_bytes, in_graph=in_graph)
    asked: Estimate = getattr(models.comm, str(key["op"]))(gpus, message_bytes)
    return asked


def _mla_bmm(models: OperatorModels, key: Key, tokens: FloatArray) -> Estimate:
    return models.mla_bmm.seconds(int(key["heads"]), tokens, str(key["format"]))


_MOE_KEYS = ("format", "hidden", "inter", "experts", "top_k", "tp", "ep", "routing")


def _moe(models: OperatorModels, key: Key, tokens: FloatArray) -> Estimate:
    hidden, inter, experts, top_k, tp, ep = (int(key[name]) for name in _MOE_KEYS[1:-1])
    return models.moe.seconds(
        key["format"], tokens, hidden, inter, experts, top_k, tp, ep, str(key["routing"])
    )


_COLLECTIVE_KEYS = ("op", "gpus", "in_graph")
_ATTENTION_FORMAT = ("kind", "kv_format")

TABLE_OPERATORS = {
    one.table: one
    for one in (
        TableOperator("gemm", "m", ("format", "n", "k"), ("format",), _gemm),
        TableOperator("moe", "tokens", _MOE_KEYS, ("format",), _moe),
        TableOperator(
            "attention_decode",
            "context_tokens",
            (*SHAPE_COLUMNS, "batch"),
            _ATTENTION_FORMAT,
            _decode,
        ),
        TableOperator(
            "attention_prefill",
            "new_tokens",
            (*SHAPE_COLUMNS, "batch", "past_tokens"),
            _ATTENTION_FORMAT,
            _prefill,
        ),
        TableOperator("mla_bmm", "tokens", ("format", "heads"), ("format",), _mla_bmm),
        *(
            TableOperator(table, "message_bytes", _COLLECTIVE_KEYS, ("op", "in_graph"), _collective)
            for table in ("all_reduce", "all_gather", "all_to_all")
        ),
    )
}
