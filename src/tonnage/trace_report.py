"""A described trace on the terminal, as tables in files, and as one page with its plots."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from rich.console import Console

from tonnage.output import make_folder, whole_file, write_summary, write_text
from tonnage.sim.traffic.describe import TraceDescription
from tonnage.sim.traffic.fit import traffic_section
from tonnage.sim.units import format_seconds
from tonnage.terminal import new_table
from tonnage.trace_plots import plots

Json = Mapping[str, Any]
_SHOWN = ("mean", "p5", "p50", "p90", "p95", "p99", "max")


def report_of(description: TraceDescription) -> dict[str, Any]:
    """Return the JSON object of `trace describe`: the figures and a `traffic` section."""
    traffic = traffic_section(description)
    notes = list(description.figures["notes"])
    if "concurrency" in traffic:
        notes.append("how many sessions are under way is not in the trace: set traffic.concurrency")
    return {**description.figures, "notes": notes, "traffic": traffic}


# --- terminal -----------------------------------------------------------------------------------


def print_description(console: Console, report: Json) -> None:
    """Print the figures of a trace and a `traffic` section that offers the same."""
    console.print(f"{report['file']}: {report['requests']:,} requests", style="bold")
    for line in figure_lines(report):
        console.print(line, soft_wrap=True)
    table = new_table(console, "", ["", *_SHOWN])
    for name, figures in _distributions(report):
        table.add_row(name, *[_number(figures[key]) for key in _SHOWN])
    console.print(table)
    console.print("Fitted, for a scenario:", style="bold")
    console.print(section_text(report["traffic"]), soft_wrap=True)
    for note in report["notes"]:
        console.print(f"  - {note}", style="dim", soft_wrap=True)


def figure_lines(report: Json) -> Iterator[str]:
    """Say what is one figure each, in lines."""
    if report["rate_per_s"] is not None:
        yield f"{report['rate_per_s']:.3g} requests per s over {format_seconds(report['span_s'])}"
    parts = [
        f"{title} {report[key]:.2f}"
        for title, key in (
            ("gaps vary by", "gap_coefficient_of_variation"),
            ("dispersion per minute", "dispersion_per_minute"),
        )
        if report.get(key) is not None
    ]
    if parts:
        yield f"{', '.join(parts)} (a Poisson process: 1)"
    sessions, reuse = report["sessions"], report["reuse"]
    if sessions is not None:
        many = "session" if sessions["count"] == 1 else "sessions"
        yield f"{sessions['count']:,} {many}, {sessions['source']}"
    if reuse is not None:
        yield (
            f"endless prefix cache: {reuse['block_hit_rate']:.1%} of {reuse['blocks']:,} blocks of "
            f"{reuse['block_tokens']} tokens, {reuse['input_token_hit_rate']:.1%} of input tokens; "
            f"{reuse['first_seen_block_share']:.1%} of blocks are seen for the first time"
        )
        kept = reuse["input_token_hit_rate_if_kept"].items()
        rates = ", ".join(f"{float(kept_s) / 60:g} min {rate:.1%}" for kept_s, rate in kept)
        yield f"input tokens hit if blocks are kept for: {rates}"
        yield _working_set_line(report["working_set"])


def _working_set_line(found: Json) -> str:
    of_one = "" if found["per"] == "trace" else f" per {found['per']}"
    return (
        f"working set{of_one}: {found['used_again_tokens_mean'] / 1e3:,.0f} thousand tokens that "
        f"are used again on average, {found['used_again_tokens_max'] / 1e3:,.0f} at most; "
        f"{found['seen_tokens'] / 1e3:,.0f} distinct in all"
    )


def _distributions(report: Json) -> Iterator[tuple[str, Json]]:
    sessions = report["sessions"] or {}
    named = [
        ("input tokens", report["input_tokens"]),
        ("output tokens", report["output_tokens"]),
        ("turns of a session", sessions.get("turns")),
        ("first input tokens", sessions.get("first_input_tokens")),
        ("new input tokens of a turn", sessions.get("new_input_tokens")),
        ("tools and system tokens", sessions.get("tool_and_system_tokens")),
        ("think time, s", sessions.get("think_s")),
        ("length of a session, s", report.get("session_span_s")),
    ]
    yield from ((name, figures) for name, figures in named if figures)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def section_text(traffic: Json) -> str:
    """Return a `traffic` section as YAML."""
    text: str = yaml.safe_dump(
        {"traffic": dict(traffic)}, sort_keys=False, default_flow_style=None, width=100
    )
    return text.rstrip()


# --- files --------------------------------------------------------------------------------------


def write_report(folder: Path, description: TraceDescription, report: Json) -> Path:
    """Write requests.csv, working_set.csv, traffic.yaml, trace.html and summary.json.

    Returns the page. The summary comes last: where it is, the rest is complete.
    """
    make_folder(folder)
    _write_csv(folder / "requests.csv", description.table.rows)
    found = description.working_set
    if found is not None:
        columns = {
            "time_s": found.times_s,
            "seen_tokens": found.seen_tokens,
            "used_again_tokens": found.used_again_tokens,
        }
        _write_csv(folder / "working_set.csv", pd.DataFrame(columns))
    write_text(folder / "traffic.yaml", section_text(report["traffic"]) + "\n")
    page = folder / "trace.html"
    write_text(page, trace_page(description, report))
    write_summary(folder, dict(report))
    return page


def _write_csv(path: Path, frame: pd.DataFrame) -> None:
    with whole_file(path) as file:
        frame.to_csv(file, index=False)


def trace_page(description: TraceDescription, report: Json) -> str:
    """Return one page that needs nothing else: figures, the fitted section, and the plots."""
    title = html.escape(f"{report['file']}: {report['requests']:,} requests")
    parts = [
        "<!doctype html>",
        f'<html lang="en"><head><meta charset="utf-8"><title>{title}</title>',
        "<style>body{font:16px system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}"
        "table{border-collapse:collapse}td,th{padding:.2rem .8rem;text-align:right}"
        "td:first-child{text-align:left}pre{background:#f4f4f4;padding:1rem;overflow:auto}</style>",
        f"</head><body><h1>{title}</h1>",
        *(f"<p>{html.escape(line)}</p>" for line in figure_lines(report)),
        _html_table(report),
    ]
    for number, (name, caption, figure) in enumerate(plots(description)):
        parts.append(f"<h2>{name}</h2><p>{html.escape(caption)}</p>")
        parts.append(
            figure.to_html(full_html=False, include_plotlyjs=number == 0, div_id=f"plot-{number}")
        )
    parts.append("<h2>Fitted, for a scenario</h2>")
    parts.append(f"<pre>{html.escape(section_text(report['traffic']))}</pre>")
    parts += [f"<p>{html.escape(note)}</p>" for note in report["notes"]]
    return "\n".join([*parts, "</body></html>", ""])


def _html_table(report: Json) -> str:
    head = "".join(f"<th>{name}</th>" for name in ("", *_SHOWN))
    rows = [
        f"<tr><td>{name}</td>"
        + "".join(f"<td>{_number(figures[key])}</td>" for key in _SHOWN)
        + "</tr>"
        for name, figures in _distributions(report)
    ]
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"
