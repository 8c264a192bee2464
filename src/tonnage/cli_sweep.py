"""The `sweep` verb of the command line; `tonnage.sweep_run` does the work."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.sim.domain import BadInputError, InfeasibleError

if TYPE_CHECKING:
    from tonnage.sim.planning.workers import Workers
    from tonnage.sweep_plan import PointResult, SweepPlan


def sweep(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="A scenario file or a shipped name.")
    ],
    over: Annotated[
        list[str] | None,
        typer.Option("--over", metavar="FIELD=A,B", help="Values to try; several make a grid."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="FIELD=VALUE", help="Override a field in all points."),
    ] = None,
    seeds: Annotated[
        str | None,
        typer.Option(metavar="N|A,B", help="How many seeds, or which; '7,' is seed 7 alone."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes; 1 is this one. Default: one per processor."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="A Dask scheduler instead, such as tcp://host:8786."),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Forget the points that DIR holds.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Keep the points and write the tables there."),
    ] = None,
    json_file: Annotated[
        str | None,
        typer.Option(
            "--json", metavar="FILE|-", help="Write all rows as JSON; '-' prints only it."
        ),
    ] = None,
) -> None:
    """Simulate a grid of scenarios: every combination of the --over values, variants and seeds.

    With --out every finished point is kept at once in DIR/points.jsonl: the same command again goes
    on where it was stopped, and tries failed points again. At the end DIR/sweep.csv and
    DIR/sweep.parquet hold one row per point, seed and load.

    \b
    Examples:
      tonnage sweep kimi-k2.6-h200 --over pools.decode.kv=bf16,fp8_e4m3 --out kv
      tonnage sweep my-fleet.yaml --over traffic.rate_per_s=1,2,4 --seeds 5 --out rates
      tonnage sweep my-fleet.yaml --over 'pools.serve={tp: 4},{tp: 8, ep: 8}' --out layouts
      tonnage sweep my-fleet.yaml --over 'traffic.concurrency=[1, 8],[64]' --workers 4 --out load
      tonnage sweep my-fleet.yaml --seeds 20 --cluster tcp://head:8786 --out replications

    Exit codes: 0 a point was simulated and none failed, 1 some failed, 2 bad input, 3 none fits.
    """
    from tonnage.output import check_destinations
    from tonnage.sweep_frame import frame_of
    from tonnage.sweep_plan import parse_over, plan_sweep
    from tonnage.sweep_run import open_folder, run_sweep, write_tables
    from tonnage.terminal import progress

    if cluster is not None and workers is not None:
        raise BadInputError("--cluster brings its own workers; leave --workers out")
    if fresh and out is None:
        raise BadInputError("--fresh forgets the points in the folder of --out; give one")
    check_destinations(json_file, out)
    axes = parse_over(over or [])
    plan = plan_sweep(scenario, axes, seeds=_parse_seeds(seeds), overrides=overrides or [])
    with _workers(plan, workers, cluster) as crew:
        journal = None if out is None else open_folder(out, fresh=fresh)
        with _saying_how_to_go_on(out), progress(quiet=json_file == "-") as report_progress:
            results = run_sweep(plan, crew, journal, report_progress)
    frame = frame_of(plan, results)
    if out is not None:
        write_tables(out, frame)
    _print(plan, results, json_file, frame)
    _end(results)


def _parse_seeds(text: str | None) -> int | list[int] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    try:
        numbers = [int(part) for part in parts if part]
    except ValueError:
        numbers = []
    if not numbers:
        mend = "give a count such as 3, or seeds such as 0,1,2"
        raise BadInputError(f"--seeds {text}: not whole numbers; {mend}")
    return numbers[0] if len(parts) == 1 else numbers


def _seeds_text(seeds: Sequence[int]) -> str:
    if len(seeds) > 3 and list(seeds) == list(range(seeds[0], seeds[-1] + 1)):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(str(seed) for seed in seeds)


@contextmanager
def _workers(plan: SweepPlan, count: int | None, cluster: str | None) -> Iterator[Workers]:
    from tonnage.sweep_run import workers_for

    if cluster is None:
        yield workers_for(plan, count)
        return
    from tonnage.cluster import cluster_workers

    with cluster_workers(cluster) as workers:
        yield workers


@contextmanager
def _saying_how_to_go_on(out: Path | None) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        kept = "nothing is kept without --out"
        if out is not None:
            kept = f"finished points are kept in {out}: run the same command to go on"
        print(f"stopped; {kept}", file=sys.stderr)
        raise


def _print(
    plan: SweepPlan, results: Sequence[PointResult], json_file: str | None, frame: Any
) -> None:
    from tonnage.output import json_text, write_text
    from tonnage.sweep_frame import report_of

    report = report_of(plan, results, frame)
    if json_file == "-":
        typer.echo(json_text(report))
        return
    if json_file is not None:
        write_text(Path(json_file), json_text(report) + "\n")
    from tonnage.sweep_table import print_sweep
    from tonnage.tables import print_provenance, print_scenario
    from tonnage.terminal import output_console

    console = output_console()
    print_scenario(console, report["scenario"])
    print_sweep(console, plan, results)
    provenance = {**report["provenance"], "seed": _seeds_text(report["seeds"])}
    print_provenance(console, {"": {"provenance": provenance}})


def _end(results: Sequence[PointResult]) -> None:
    """Say what is missing and return the exit code that goes with it."""
    from tonnage.sim.planning.sweep import Status

    failed = [result for result in results if result.status is Status.FAILED]
    if failed:
        first = f"{failed[0].point.label}: {failed[0].message}"
        counted = f"{len(failed)} of {len(results)} points failed"
        mend = "run the same command to try them again"
        print(f"error: {counted}; {mend}; the first: {first}", file=sys.stderr)
        raise typer.Exit(1)
    if all(result.status is Status.INFEASIBLE for result in results):
        first = f"{results[0].point.label}: {results[0].message}"
        raise InfeasibleError(f"none of the {len(results)} points fits; the first: {first}")
