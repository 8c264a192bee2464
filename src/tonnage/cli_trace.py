"""The `trace` verbs of the command line."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

trace_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Recorded traffic: what is in it, and a load that is like it.",
)


class _Format(StrEnum):
    AUTO = "auto"
    MOONCAKE = "mooncake"
    AZURE = "azure"
    CSV = "csv"
    SESSIONS = "sessions"


@trace_app.callback()
def verbs() -> None:
    """Keep `describe` a verb of its own, though it is the only one."""


@trace_app.command("describe")
def describe(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A trace, a folder of sessions, or a shipped one.")
    ],
    trace_format: Annotated[
        _Format, typer.Option("--format", help="What the file is, if its first line does not tell.")
    ] = _Format.AUTO,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Read that many requests at most; not of sessions.")
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE|-", help="Write the report as JSON; '-' prints only it."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write the report's files there.")
    ] = None,
) -> None:
    """Show a trace's load, lengths, sessions and reuse, and a traffic section fitted to it.

    --out writes trace.html (plots, in one file), requests.csv, working_set.csv, traffic.yaml and
    summary.json.

    \b
    Examples:
      tonnage trace describe mooncake_conversation.jsonl.gz
      tonnage trace describe my-requests.csv --out report
      tonnage trace describe sessions/ --json -
    """
    from tonnage.output import check_destinations, write_json
    from tonnage.scenarios.trace_files import find_trace
    from tonnage.sim.traffic import describe as description
    from tonnage.sim.traffic.spec import TraceSource
    from tonnage.terminal import output_console, progress
    from tonnage.trace_report import print_description, report_of, write_report

    check_destinations(json_file, out)
    source = TraceSource(find_trace(file, Path()), trace_format.value, limit=limit)
    with progress(quiet=json_file == "-") as report_progress:
        if report_progress is not None:
            report_progress("reading", 0.0)
        found = description.describe(source)
    report = report_of(found)
    page = None if out is None else write_report(out, found, report)
    if write_json(json_file, report):
        print_description(output_console(), report)
        if page is not None:
            output_console().print(f"Plots: {page}", soft_wrap=True)
