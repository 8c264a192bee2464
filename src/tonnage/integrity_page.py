"""The files of `tonnage integrity --out`: the matrix as CSV, and a page with its heat map."""

from __future__ import annotations

import csv
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tonnage.integrity_table import (
    YEAR_HEADS,
    caught_text,
    consequence_text,
    cost_cells,
    cost_places,
    coverage_text,
    matrix_cells,
    wrap_text,
    year_cells,
    year_title,
)
from tonnage.output import make_folder, plain, whole_file, write_summary, write_text

if TYPE_CHECKING:
    import plotly.graph_objects as go

Json = Mapping[str, Any]

MATRIX, PAGE = "matrix.csv", "integrity.html"
# Read wrongly, caught after that, caught in time.
_COLOURS = [[0.0, "#d73027"], [0.5, "#fee08b"], [1.0, "#1a9850"]]
_LATE = 0.5


def write_integrity(folder: Path, summary: dict[str, Any], runs: Mapping[str, Json]) -> Path:
    """Write matrix.csv, integrity.html and, last, summary.json; return the page."""
    make_folder(folder)
    _write_matrix(folder / MATRIX, runs)
    page = folder / PAGE
    write_text(page, integrity_page(runs))
    write_summary(folder, summary)
    return page


def _write_matrix(path: Path, runs: Mapping[str, Json]) -> None:
    rows = [_line(label, plain(row)) for label, report in runs.items() for row in report["matrix"]]
    with whole_file(path) as file, file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def _line(variant: str, row: Json) -> dict[str, Any]:
    low, high = row["before_interval"] or (None, None)
    counts = {name: value for name, value in row.items() if name != "before_interval"}
    line: dict[str, Any] = {"variant": variant} if variant else {}
    return line | counts | {"before_low": low, "before_high": high}


def integrity_page(runs: Mapping[str, Json]) -> str:
    """Return the page: per variant the heat map, what each check costs, and a year."""
    scenario = next(iter(runs.values()))["scenario"]
    title = html.escape(f"{scenario['name']}: integrity of the KV")
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        "<style>body{font:16px system-ui;max-width:64rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse;font-size:14px}"
        "td,th{padding:.2rem .6rem;text-align:left;border-bottom:1px solid #ddd}</style>",
        f"</head><body><h1>{title}</h1><p>{html.escape(scenario['description'])}</p>",
    ]
    for number, (label, report) in enumerate(runs.items()):
        if label:
            parts.append(f"<h2>{html.escape(label)}</h2>")
        figure = heat_map(report)
        parts.append(_paragraph(_coverage(report)))
        parts.append(
            figure.to_html(full_html=False, include_plotlyjs=number == 0, div_id=f"plot-{number}")
        )
        parts += _tables(report)
    return "\n".join([*parts, "</body></html>", ""])


def _coverage(report: Json) -> str:
    pools = report["coverage"].items()
    return "The pools' own checks: " + "; ".join(f"{role}: {coverage_text(p)}" for role, p in pools)


def _tables(report: Json) -> list[str]:
    costs = [
        (check, place, *cost_cells(one))
        for check, cost in report["costs"].items()
        for place, one in cost_places(cost)
    ]
    heads = ("check", "where", "us added", "of a step", "throughput lost", "of which, us")
    year = [year_cells(row) for row in report["year"]["rows"]]
    notes = "".join(f"<li>{html.escape(note)}</li>" for note in report["notes"])
    return [
        _table(heads, costs),
        _paragraph(year_title(report["year"])),
        _table(YEAR_HEADS, year),
        _paragraph(wrap_text(report["tag_wrap"])),
        _paragraph(consequence_text(report)),
        f"<ul>{notes}</ul>",
    ]


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in heads)
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def heat_map(report: Json) -> go.Figure:
    """Return the matrix in colours: caught in time, caught late, read wrongly."""
    import plotly.graph_objects as go

    checks = report["settings"]["checks"]
    names, scores, texts, hovers = [], [], [], []
    for name, family, rows in matrix_cells(report):
        cells = [rows[check] for check in checks]
        names.append(f"{name} ({family})")
        scores.append([_score(cell) for cell in cells])
        texts.append([caught_text(cell) for cell in cells])
        hovers.append([_hover(cell) for cell in cells])
    figure = go.Figure()
    figure.add_heatmap(
        z=scores,
        x=list(checks),
        y=names,
        text=texts,
        texttemplate="%{text}",
        customdata=hovers,
        hovertemplate="%{y}, %{x}<br>%{customdata}<extra></extra>",
        colorscale=_COLOURS,
        zmin=0.0,
        zmax=1.0,
        showscale=False,
        xgap=2,
        ygap=2,
    )
    figure.update_layout(
        template="plotly_white",
        margin={"l": 10, "r": 10, "t": 30, "b": 10},
        height=80 + 40 * max(len(names), 1),
        xaxis_side="top",
        yaxis={"autorange": "reversed", "automargin": True},
    )
    return figure


def _score(row: Json) -> float | None:
    if row["before_share"] is None:
        return None
    return float(row["before_share"] + _LATE * row["late_share"])


def _hover(row: Json) -> str:
    return (
        f"{row['injected']:,} injected, {row['met']:,} met<br>"
        f"{row['caught_before']:,} caught before a wrong read, {row['caught_after']:,} after, "
        f"{row['missed']:,} missed<br>{row['wrong_reads']:,} wrong reads, "
        f"{row['clean_aborted']:,} clean requests aborted, {row['lost']:,} lost with the process"
    )
