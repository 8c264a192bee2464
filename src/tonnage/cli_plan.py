"""The `plan` verb: the cheapest fleet that meets the objectives, as tables, JSON and files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli_options import JsonFile, Overrides, ScenarioName

if TYPE_CHECKING:
    from tonnage.planner import PlanReport


def plan(
    scenario: ScenarioName,
    overrides: Overrides = None,
    rank: Annotated[
        int,
        typer.Option(
            "--rank", min=0, help="Simulate so many of the best screened fleets, show the orders."
        ),
    ] = 0,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="Simulate other formats in each pool, for their margins."),
    ] = False,
    what_if: Annotated[
        bool,
        typer.Option(
            "--what-if", help="Instances or a region down, growth, what the cost hangs on."
        ),
    ] = False,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes that simulate; 2 where not given.")
    ] = None,
    json_file: JsonFile = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write plans, scenarios and front.html there."),
    ] = None,
) -> None:
    """Search the cheapest fleet that meets a scenario's objectives.

    Thousands of fleets are screened by closed forms: GPUs, layouts, formats of weights and KV,
    replicas, together or apart. The cheapest that may do are simulated over several seeds; one
    passes when the bounds of its intervals are within every objective. `best` may need what stock
    engines lack, `launchable` does not. The section `plan` of the scenario says what is tried.

    --out writes plan.json, best.json and launchable.json (for `tonnage export`), best.yaml and
    launchable.yaml (for `tonnage simulate`) and front.html; with --what-if what-if.html too.

    \b
    Examples:
      tonnage plan kimi-agents
      tonnage plan kimi-agents --set slo.ttft_p95=10s --out plans
      tonnage plan my-fleet.yaml --set 'plan.gpus=[h100-sxm, h200-sxm]' --set plan.max_gpus=64
      tonnage plan kimi-agents --rank 20
      tonnage plan kimi-agents --compare
      tonnage plan kimi-agents --what-if --out plans
      tonnage plan my-fleet.yaml --json - > plan.json

    Exit code 3: nothing within the limits meets the objectives; the nearest is named.
    """
    from tonnage import api
    from tonnage.output import check_destinations, write_json
    from tonnage.scenarios.load import load_scenario
    from tonnage.terminal import progress

    check_destinations(json_file, out)
    asked = load_scenario(scenario, overrides or [])
    try:
        with progress(quiet=json_file == "-") as told:
            report = api.plan(
                asked,
                workers=workers,
                rank=rank,
                compare=compare,
                what_ifs=what_if,
                progress=told,
            )
    except KeyboardInterrupt:
        print("stopped; nothing was written", file=sys.stderr)
        raise
    if out is not None:
        write_plan(out, report)
    if write_json(json_file, report.to_dict()):
        from tonnage.plan_table import print_plan
        from tonnage.terminal import output_console

        print_plan(output_console(), report)
        if out is not None:
            print(f"written to {out}")


def write_plan(folder: Path, report: PlanReport) -> None:
    """Write the plans, their scenarios and the front; plan.json last, when the rest is there."""
    import yaml

    from tonnage.output import json_text, make_folder, plain, write_text
    from tonnage.plan_chart import front_html
    from tonnage.plan_tornado_chart import tornado_html

    make_folder(folder)
    plans = {"best": report.best, "launchable": report.launchable}
    for name, one in plans.items():
        if one is None:
            continue
        write_text(folder / f"{name}.json", json_text(one.to_dict()) + "\n")
        data = plain({**report.files[name], "name": f"{report.scenario.name}-{name}"})
        write_text(folder / f"{name}.yaml", yaml.safe_dump(data, sort_keys=False))
    write_text(folder / "front.html", front_html(report))
    if report.what_if is not None:
        write_text(folder / "what-if.html", tornado_html(report.scenario.name, report.what_if))
    write_text(folder / "plan.json", json_text(report.to_dict()) + "\n")
