"""The `execute` verb."""

from __future__ import annotations

from typing import Annotated

import typer

from tonnage.cli_options import JsonFile, Overrides, ScenarioName, SummaryFolder


def execute(
    scenario: ScenarioName,
    overrides: Overrides = None,
    budget: Annotated[
        str, typer.Option(metavar="TIME", help="Time to measure steps in, all pools together.")
    ] = "90s",
    device: Annotated[str, typer.Option(help="Where steps run: cpu, cuda, cuda:1 ...")] = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="Threads of a CPU.")] = 1,
    layers: Annotated[
        int | None, typer.Option(min=1, help="Run so many layers and scale; all by default.")
    ] = None,
    tags: Annotated[
        bool, typer.Option("--tags", help="Check the page tags in every step.")
    ] = False,
    json_file: JsonFile = None,
    out: SummaryFolder = None,
) -> None:
    """Run a scenario's steps on real kernels, and compare with what was predicted.

    The same engine runs twice: with predicted step times, and with those of a sample of the
    visited steps, measured on the device, those that take most time first.

    \b
    Examples:
      tonnage execute laptop
      tonnage execute laptop --budget 30s --tags
      tonnage execute kimi-k2.6-h200 --device cuda --layers 6 --budget 3min
    """
    from tonnage.execution import execute as run
    from tonnage.output import check_destinations, write_json, write_summary
    from tonnage.runs import asked_for
    from tonnage.sim.units import parse_seconds
    from tonnage.step_devices import DeviceChoice, device_maker
    from tonnage.terminal import labelled, output_console, progress

    check_destinations(json_file, out)
    asked = asked_for(scenario, overrides or [])
    budget_s = parse_seconds(budget)
    maker = device_maker(DeviceChoice(device, threads, layers, check_tags=tags))
    with progress(quiet=json_file == "-") as report:
        runs = {
            label: run(one, maker, budget_s=budget_s, progress=labelled(report, label)).to_dict()
            for label, one in asked.scenarios.items()
        }
    summary = asked.joint(runs)
    if out is not None:
        write_summary(out, summary)
    if write_json(json_file, summary):
        from tonnage.execution_table import print_execution

        print_execution(output_console(), runs)
