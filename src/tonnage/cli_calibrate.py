"""The `calibrate` verb of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

_SHOWN_DOUBTS = 8


def calibrate(
    device: Annotated[
        str | None,
        typer.Option(
            help="cpu, cuda or cuda:1; default: a GPU where there is one.", metavar="NAME"
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A coarse grid: minutes on two cores, less on a GPU.")
    ] = False,
    models: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAMES",
            help="Scenarios, or models as kimi-k2.6:tp8, commas between; default: laptop, or "
            "kimi-k2.6-h200 and glm-5.2-h200 on a GPU.",
        ),
    ] = None,
    threads: Annotated[
        int, typer.Option(min=1, help="Threads of a CPU; `execute` takes as many.")
    ] = 1,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="What the catalogue calls the device.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FOLDER", help="Where; default: where `profile: auto` looks first."
        ),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume/--fresh", help="Go on with what an interrupted run measured."),
    ] = True,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Measure collectives between so many processes; default: all GPUs, none on a CPU.",
        ),
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Begin no point after this, and fit what there is."),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE|-", help="Write the report as JSON; '-' prints only it."
        ),
    ] = None,
) -> None:
    """Measure this machine's kernels and make a profile that predictions rest on.

    Measures every kernel that the models' layers run and generic shapes beside, fits, and holds
    whole shapes out to say how far off the result is. May be interrupted: the next run goes on.
    Needs: pip install 'tonnage[kernels]'.

    \b
    Examples:
      tonnage calibrate --device cpu --quick
      tonnage calibrate --device cuda --models kimi-k2.6:tp8,glm-5.2-h200
      tonnage calibrate --device cpu --quick --threads 2 --out ./mine.profile
      tonnage calibrate --device cuda --ranks 4 --budget 5min
      tonnage profile show cpu-tonnage --out report
    """
    from tonnage import api
    from tonnage.output import check_destinations, write_json
    from tonnage.profile_tables import header_report, print_header
    from tonnage.sim.units import parse_seconds
    from tonnage.terminal import output_console, progress

    check_destinations(json_file, None)
    with progress(quiet=json_file == "-") as report_progress:
        done = api.calibrate(
            device,
            models or (),
            quick=quick,
            threads=threads,
            gpu=gpu,
            out=out,
            fresh=not resume,
            ranks=ranks,
            budget_s=None if budget is None else parse_seconds(budget),
            progress=report_progress,
        )
    report = {**header_report(done.profile, done.place), "calibration": done.report()}
    if write_json(json_file, report):
        print_header(output_console(), report)
        _print_measured(output_console(), report["calibration"])


def _print_measured(console: Console, found: dict[str, Any]) -> None:
    """Print how much was measured, and what should be measured again."""
    taken = f"{found['measured_now']:,} rows in {found['measured_s']:,.0f} s"
    console.print(f"{found['points']:,} points, of which measured now: {taken}", soft_wrap=True)
    if found["ranks"] > 1:
        console.print(f"Collectives between up to {found['ranks']} ranks")
    if found["not_reached"]:
        console.print(f"Not reached in the budget: {found['not_reached']:,} points; run it again")
    doubts = found["measure_again"]
    if doubts:
        console.print(f"Measure again, samples lie far apart ({len(doubts)} points):")
        for one in sorted(doubts, key=lambda one: -one["p80_over_p20"])[:_SHOWN_DOUBTS]:
            axes = ", ".join(f"{name} {value}" for name, value in one["axes"].items())
            console.print(f"  {one['kernel']} {axes}: p80 is {one['p80_over_p20']} x p20")
    for name, what in (("not_run", "Not run here"), ("unserved", "No kernel for")):
        if found[name]:
            console.print(f"{what}: {', '.join(found[name])}", soft_wrap=True)
