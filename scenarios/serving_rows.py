"""Reads a table of serving results: one row per run, what was served, how, and how fast.

The columns are those of `serving_latency.csv`. Whole numbers may be written as 8.0; an empty cell
is not stated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

from tonnage.scenarios.csv_lines import csv_lines
from tonnage.scenarios.serving_layouts import StatedLayout
from tonnage.sim.domain import BadInputError

_PHASES = ("prefill", "decode")
_LAYOUT = ("tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")
_PLAIN = (
    "id",
    "model",
    "system",
    "backend",
    "backend_version",
    "precision",
    "gemm_quant",
    "moe_quant",
    "mode",
    "isl",
    "osl",
    "concurrency",
    "batch_size",
    "ttft_ms",
    "tpot_ms",
)
COLUMNS = (
    *_PLAIN,
    *_LAYOUT,
    *(f"{phase}_{name}" for phase in _PHASES for name in ("batch_size", "num_workers", *_LAYOUT)),
)


@dataclass(frozen=True, slots=True)
class StatedPool:
    """One phase of a run: its layout, its workers, the requests of one rank; None is not stated."""

    layout: StatedLayout
    workers: int | None = None
    batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class ServingRow:
    """One run: `prefill` and `decode` of a disaggregated one, `serve` of one that is not.

    `concurrency`: the users of the whole system; None is not stated.
    """

    id: str
    model: str
    system: str
    engine: str
    version: str | None
    precision: str | None
    gemm_format: str | None
    moe_format: str | None
    input_tokens: int
    output_tokens: int
    concurrency: int | None
    ttft_s: float
    tpot_s: float
    serve: StatedPool | None = None
    prefill: StatedPool | None = None
    decode: StatedPool | None = None


def read_serving_rows(path: Path) -> list[ServingRow]:
    """Return the rows of a table; BadInputError names the file, and the line and the column."""
    return [_Cells(*line).row() for line in csv_lines(path, COLUMNS)]


@dataclass(frozen=True, slots=True)
class _Cells:
    """The cells of one line, checked as they are read."""

    fields: Mapping[str, str | None]
    where: str

    def row(self) -> ServingRow:
        mode = self._text("mode")
        if mode not in ("agg", "disagg"):
            raise self._refuse("mode", f"{mode!r} is not one of agg, disagg")
        together = mode == "agg"
        return ServingRow(
            id=self._text("id"),
            model=self._text("model"),
            system=self._text("system"),
            engine=self._text("backend"),
            version=self._optional("backend_version"),
            precision=self._optional("precision"),
            gemm_format=self._optional("gemm_quant"),
            moe_format=self._optional("moe_quant"),
            input_tokens=self._positive("isl"),
            output_tokens=self._positive("osl"),
            concurrency=self._whole("concurrency"),
            ttft_s=self._seconds("ttft_ms"),
            tpot_s=self._seconds("tpot_ms"),
            serve=self._pool("") if together else None,
            prefill=None if together else self._pool("prefill_"),
            decode=None if together else self._pool("decode_"),
        )

    def _pool(self, prefix: str) -> StatedPool:
        layout = StatedLayout(
            tp=self._positive(f"{prefix}tp_size"),
            pp=self._whole(f"{prefix}pp_size") or 1,
            attention_dp=self._whole(f"{prefix}attention_dp_size"),
            moe_tp=self._whole(f"{prefix}moe_tp_size") or 1,
            moe_ep=self._whole(f"{prefix}moe_ep_size") or 1,
        )
        workers = self._whole(f"{prefix}num_workers") if prefix else None
        return StatedPool(layout, workers, self._whole(f"{prefix}batch_size"))

    def _text(self, name: str) -> str:
        found = self._optional(name)
        if found is None:
            raise self._refuse(name, "is empty")
        return found

    def _optional(self, name: str) -> str | None:
        return (self.fields[name] or "").strip() or None

    def _whole(self, name: str) -> int | None:
        """Return a whole number above 0; 0 counts as not stated, as in files without experts."""
        number = self._number(name)
        if number is None:
            return None
        if number < 0 or number != int(number):
            raise self._refuse(name, f"{number:g} is not a whole number")
        return int(number) or None

    def _positive(self, name: str) -> int:
        number = self._whole(name)
        if number is None:
            raise self._refuse(name, "must be a whole number above 0")
        return number

    def _seconds(self, name: str) -> float:
        number = self._number(name)
        if number is None or number <= 0:
            raise self._refuse(name, "must be a number of milliseconds above 0")
        return number / 1000

    def _number(self, name: str) -> float | None:
        text = self._optional(name)
        if text is None:
            return None
        try:
            number = float(text)
        except ValueError:
            number = float("nan")
        if not isfinite(number):
            raise self._refuse(name, f"{text!r} is not a number")
        return number

    def _refuse(self, name: str, problem: str) -> BadInputError:
        return BadInputError(f"{self.where}: {name}: {problem}")
