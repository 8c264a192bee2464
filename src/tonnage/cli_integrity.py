"""The `integrity` verb."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tonnage.cli_options import JsonFile, Overrides, ScenarioName


def integrity(
    scenario: ScenarioName,
    overrides: Overrides = None,
    injections: Annotated[
        int, typer.Option(min=1, help="Faults of each class, for each check.")
    ] = 200,
    classes: Annotated[
        str, typer.Option(metavar="LIST", help="Classes of faults, with commas, or all.")
    ] = "all",
    checks: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="none, batched, decode-tags, overlapped, canary, checksum, scenario (as written).",
        ),
    ] = None,
    requests_per_day: Annotated[
        float | None,
        typer.Option(metavar="R", help="Of the fleet; what the scenario offers or serves."),
    ] = None,
    fault_rate: Annotated[
        float, typer.Option(metavar="P", help="Probability of a fault per request.")
    ] = 1e-9,
    workers: Annotated[int, typer.Option(min=1, help="Processes that inject; 1 is this one.")] = 2,
    json_file: JsonFile = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write summary.json, matrix.csv, integrity.html there."),
    ] = None,
) -> None:
    """Show what checks of the KV catch, by injection, what they cost, and a fleet's year.

    Faults of every class are injected into a small copy of the scenario's pools: its engine's
    rules, its lengths scaled to it, one check at a time. Beside it stands what each check adds to
    a step and a handoff. Without --checks: none, batched, canary, checksum, and the scenario's own
    where that is another one.

    \b
    Examples:
      tonnage integrity kimi-k2.6-h200
      tonnage integrity integrity-overhead --requests-per-day 1e9 --fault-rate 1e-9
      tonnage integrity my-fleet.yaml --classes late_writer --checks decode-tags,batched
      tonnage integrity retry-storm --injections 2000 --out integrity
    """
    from tonnage.integrity_report import IntegritySettings, integrity_reports
    from tonnage.integrity_study import checks_named, classes_named
    from tonnage.output import check_destinations, write_json
    from tonnage.runs import asked_for
    from tonnage.terminal import progress

    check_destinations(json_file, out)
    settings = IntegritySettings(
        injections,
        classes_named(classes),
        None if checks is None else checks_named(checks),
        requests_per_day,
        fault_rate,
        workers,
    )
    asked = asked_for(scenario, overrides or [])
    with progress(quiet=json_file == "-") as report:
        found = integrity_reports(asked.scenarios, settings, report)
    runs = {label: one.to_dict() for label, one in found.items()}
    summary = asked.joint(runs)
    page = None
    if out is not None:
        from tonnage.integrity_page import write_integrity

        page = write_integrity(out, summary, runs)
    if write_json(json_file, summary):
        from tonnage.integrity_table import print_integrity
        from tonnage.terminal import output_console

        print_integrity(output_console(), runs)
        if page is not None:
            output_console().print(f"Heat map: {page}", soft_wrap=True)
