"""Measure and fit what ranks send each other, where there are more ranks than one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import pandas as pd

from tonnage.calibrate.collect import (
    Collected,
    Measurement,
    ReportProgress,
    Row,
    point_key,
    provenance_of,
    row_key,
    same_machine,
)
from tonnage.calibrate.fit_comm import fit_collective
from tonnage.calibrate.points import Point
from tonnage.sim.cost.models.comm import OPERATIONS
from tonnage.sim.domain import GpuSpec

POINT_TO_POINT = "point_to_point"  # a table that no model reads yet
_MESSAGE_BYTES = {
    "cpu": tuple(4**power for power in range(5, 12)),  # 1 KiB to 4 MiB
    "cuda": tuple(4**power for power in range(5, 15)),  # 1 KiB to 256 MiB
}


@dataclass(frozen=True, slots=True)
class Exchange:
    """One operation between so many ranks."""

    op: str
    ranks: int
    message_bytes: int
    graph: bool

    def point(self) -> Point:
        """Return it as what a log knows."""
        axes = {"gpus": self.ranks, "message_bytes": self.message_bytes}
        return Point(self.op, axes, 0.0, float(self.message_bytes), False, self.graph)


def exchanges(kind: str, ranks: int, message_bytes: Sequence[int] = ()) -> list[Exchange]:
    """Return what is measured between 2, 4, 8 ... ranks; nothing where there is one."""
    sizes = tuple(message_bytes) or _MESSAGE_BYTES[kind]
    found = []
    for count in numbers_of_ranks(ranks):
        for op in (*OPERATIONS, POINT_TO_POINT):
            if op == POINT_TO_POINT and count != 2:
                continue
            in_graphs = (False, True) if op == "all_reduce" and kind == "cuda" else (False,)
            found += [Exchange(op, count, size, one) for one in in_graphs for size in sizes]
    return found


def numbers_of_ranks(most: int) -> list[int]:
    """Return 2, 4, 8 ... up to a number of ranks, and that number."""
    doubled = [2**power for power in range(1, max(most, 1).bit_length())]
    return sorted({*(one for one in doubled if one <= most), *([most] if most > 1 else [])})


def collect_exchanges(
    wanted: Sequence[Exchange],
    measurement: Measurement,
    log: Path,
    progress: ReportProgress | None = None,
) -> Collected:
    """Measure what the log lacks, a row on disk before the next is begun."""
    if not wanted:
        return Collected((), (), (), 0.0, 0)
    from tonnage.kernels.collectives import Collective, RankMethod, measured_collectives
    from tonnage.kernels.row_log import RowLog

    begun_s = monotonic()
    kind = measurement.device.partition(":")[0]
    origin, facts = provenance_of(measurement)
    with RowLog(log, row_key) as rows:
        before = len(rows.rows)
        known = {point_key(row) for row in rows.rows if same_machine(row["provenance"], facts)}
        missing = [one for one in wanted if _key(one) not in known]
        for count in sorted({one.ranks for one in missing}):
            some = [one for one in missing if one.ranks == count]
            asked = [Collective(one.op, one.message_bytes, one.graph) for one in some]
            measured = measured_collectives(asked, count, RankMethod(kind), origin)
            for number, row in enumerate(measured):
                rows.append({**row.as_row(), "repeat": 0})
                if progress is not None:
                    text = f"measuring {row.kernel} between {count} ranks"
                    progress(text, (number + 1) / len(some))
        keys = {_key(one) for one in wanted}
        kept = tuple(
            row
            for row in rows.rows
            if point_key(row) in keys and same_machine(row["provenance"], facts)
        )
        spent_s = monotonic() - begun_s
        return Collected(kept, (), (), spent_s, len(rows.rows) - before)


def _key(one: Exchange) -> str:
    point = one.point()
    names = {"kernel": point.kernel, "axes": dict(point.axes), "cold": False, "graph": point.graph}
    return point_key(names)


# --- rows to tables, tables to fits -------------------------------------------------------------


def exchange_tables(rows: Sequence[Row]) -> dict[str, pd.DataFrame]:
    """Return `all_reduce`, `all_gather` (with reduce-scatter), `all_to_all`, `point_to_point`."""
    tables = {**OPERATIONS, POINT_TO_POINT: POINT_TO_POINT}
    made = [
        {
            "op": row["kernel"],
            "in_graph": bool(row["graph"]),
            "gpus": row["axes"]["gpus"],
            "message_bytes": row["axes"]["message_bytes"],
            "seconds": float(row["timing"]["seconds_median"]),
            "kernel": row["backend"],
        }
        for row in rows
        if row["kernel"] in tables
    ]
    found: dict[str, list[dict[str, Any]]] = {}
    for one in made:
        found.setdefault(tables[one["op"]], []).append(one)
    keys = ["op", "in_graph", "gpus", "message_bytes"]
    return {
        name: pd.DataFrame(one).sort_values(keys, ignore_index=True) for name, one in found.items()
    }


def fit_exchanges(
    tables: Mapping[str, pd.DataFrame], gpu: GpuSpec
) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    """Return the fitted `comm` of measured tables, and rows of errors."""
    operations: dict[str, Any] = {}
    errors: list[pd.DataFrame] = []
    known = {name: tables[name] for name in OPERATIONS.values() if name in tables}
    for rows_of_table in known.values():
        for (op, in_graph), rows in rows_of_table.groupby(["op", "in_graph"]):
            launch = "graph" if in_graph else "eager"
            operations[f"{op}/{launch}"], found = fit_collective(str(op), rows)
            errors.append(found.assign(operator=str(op), format=launch))
    each = (row for frame in errors for row in frame.to_dict("records"))
    # What was measured was one machine, whatever the datasheet says of nodes.
    together = max((int(rows["gpus"].max()) for rows in known.values()), default=1)
    return {
        "source": "measured",
        "nvlink_gpus": max(together, gpu.gpus_per_node),
        "operations": operations,
    }, ({str(name): value for name, value in row.items()} for row in each)
