"""What `validate` shows and writes: tables; summary.json, rows.csv and scatter.html."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from tonnage.output import (
    JsonObject,
    flattened,
    make_folder,
    plain,
    whole_file,
    write_summary,
    write_text,
)
from tonnage.sim.units import GIB
from tonnage.terminal import new_table
from tonnage.validation_summary import Figure, ValidatedRow

if TYPE_CHECKING:
    import plotly.graph_objects as go

_MOST_ROWS = 60  # shown of a long file; --json and --out have all


def write_validation(
    folder: Path, told: JsonObject, rows: Sequence[ValidatedRow], figures: Sequence[str]
) -> None:
    """Write rows.csv and scatter.html, then summary.json: where that is, the rest is complete."""
    make_folder(folder)
    with whole_file(folder / "rows.csv") as file:
        _write_rows(file, told["rows"])
    write_text(folder / "scatter.html", scatter_page(rows, figures))
    write_summary(folder, told)


def _write_rows(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    flat = [flattened(plain(row)) for row in rows]
    for row in flat:
        if isinstance(row.get("notes"), list):
            row["notes"] = "; ".join(row["notes"])
    columns = list(dict.fromkeys(column for row in flat for column in row))
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(flat)


def scatter_page(rows: Sequence[ValidatedRow], figures: Sequence[str]) -> str:
    """Return a page that needs nothing else: measured against predicted, one plot per figure."""
    parts = [
        scatter(rows, name).to_html(full_html=False, include_plotlyjs=index == 0)
        for index, name in enumerate(_present(rows, figures))
    ]
    body = "\n".join(parts) or "<p>No row could be predicted.</p>"
    return (
        "<!doctype html>\n<html><head><meta charset='utf-8'>"
        f"<title>Predicted against measured</title></head><body>\n{body}\n</body></html>\n"
    )


def scatter(rows: Sequence[ValidatedRow], name: str) -> go.Figure:
    """Return one figure's plot on logarithmic axes, with the line on which both agree."""
    import plotly.graph_objects as go  # heavy

    shown = [(row, row.figures[name]) for row in rows if _is_positive(row, name)]
    plot = go.Figure()
    for label in dict.fromkeys(row.groups.get("model", "") for row, _ in shown):
        of_label = [pair for pair in shown if pair[0].groups.get("model", "") == label]
        plot.add_scatter(
            x=[one.measured for _, one in of_label],
            y=[one.predicted for _, one in of_label],
            mode="markers",
            name=label,
            text=[f"{row.id}: {one.error:+.1%}" for row, one in of_label],
            hovertemplate="%{text}<br>measured %{x:.4g}<br>predicted %{y:.4g}",
        )
    values = [value for _, one in shown for value in (one.measured, one.predicted)]
    ends = [min(values), max(values)] if values else []
    plot.add_scatter(x=ends, y=ends, mode="lines", name="equal", line={"color": "grey"})
    plot.update_layout(title=name, width=760, height=620)
    plot.update_xaxes(title="measured", type="log")
    plot.update_yaxes(title="predicted", type="log")
    return plot


def _is_positive(row: ValidatedRow, name: str) -> bool:
    one = row.figures.get(name)
    return one is not None and one.measured > 0 and one.predicted > 0


def _present(rows: Sequence[ValidatedRow], figures: Sequence[str]) -> list[str]:
    return [name for name in figures if any(name in row.figures for row in rows)]


def print_rows(
    console: Console, rows: Sequence[ValidatedRow], figures: Sequence[str], labels: Sequence[str]
) -> None:
    """Print each row: measured, predicted and error of its figures, or why it has none."""
    names = _present(rows, figures)
    titles = ["row", *labels, *(f"{name}: measured / predicted" for name in names), "error"]
    table = new_table(console, "", titles, numbers_from=1 + len(labels))
    for row in rows[:_MOST_ROWS]:
        cells = [row.id, *(row.groups.get(label, "") for label in labels)]
        if row.refused is None:
            cells += [_pair(row.figures.get(name), name) for name in names]
            cells.append(_errors(row, names))
            table.add_row(*cells)
    console.print(table)
    if len(rows) > _MOST_ROWS:
        console.print(f"... and {len(rows) - _MOST_ROWS:,} rows more: --json or --out has them")


def print_refusals(console: Console, rows: Sequence[ValidatedRow]) -> None:
    """Print why rows are not predicted, with their names."""
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row.refused is not None:
            reasons.setdefault(row.refused, []).append(row.id)
    for reason, names in sorted(reasons.items(), key=lambda pair: -len(pair[1])):
        listed = ", ".join(names[:8]) + (" ..." if len(names) > 8 else "")
        console.print(f"Not predicted: {len(names)}, {reason}: {listed}", soft_wrap=True)


def print_groups(
    console: Console, title: str, groups: Mapping[str, Mapping[str, Any]], names: Sequence[str]
) -> None:
    """Print counts and errors of each group of rows."""
    titles = [title, "rows", "predicted"]
    titles += [f"{name}: {what}" for name in names for what in ("median", "mean", "bias")]
    table = new_table(console, "", titles)
    for group, told in groups.items():
        cells = [group, str(told["rows"]), str(told["predicted"])]
        for name in names:
            keys = (f"{name}_median_abs_error", f"{name}_mape", f"{name}_bias")
            cells += [share(told[key], signed=key.endswith("bias")) for key in keys]
        table.add_row(*cells)
    console.print(table)


def share(value: float | None, *, signed: bool = False) -> str:
    """Return a share as per cent; - where there is none."""
    if value is None:
        return "-"
    return f"{value:+.1%}" if signed else f"{value:.1%}"


def _pair(one: Figure | None, name: str) -> str:
    if one is None:
        return "-"
    return f"{_number(one.measured, name)} / {_number(one.predicted, name)}"


def _number(value: float, name: str) -> str:
    if name.endswith("_bytes"):
        return f"{value / GIB:.2f} GiB"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _errors(row: ValidatedRow, names: Sequence[str]) -> str:
    return ", ".join(f"{row.figures[name].error:+.1%}" for name in names if name in row.figures)


def print_runs(
    console: Console, runs: Mapping[str, Mapping[str, Any]], figures: Sequence[str]
) -> None:
    """Print of each run the means, measured and predicted, and the errors of its requests."""
    titles = ["run", "requests", "figure", "mean measured", "predicted", "error"]
    titles += ["requests: median error", "p90"]
    table = new_table(console, "", titles, numbers_from=3)
    for run, told in runs.items():
        for name in figures:
            mean = told.get(f"mean_{name}")
            if mean is None:
                continue
            table.add_row(
                run,
                f"{told['predicted']} of {told['rows']}",
                name,
                f"{mean['measured']:.4g} s",
                f"{mean['predicted']:.4g} s",
                share(mean["error"], signed=True),
                share(told[f"{name}_median_abs_error"]),
                share(told[f"{name}_p90_abs_error"]),
            )
    console.print(table)
