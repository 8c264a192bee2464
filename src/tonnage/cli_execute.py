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
    inject: Annotated[
        str | None,
        typer.Option(metavar="CLASSES", help="Also inject faults on real pages: all, or a list."),
    ] = None,
    injections: Annotated[
        int, typer.Option(min=1, help="Faults of each class that --inject injects.")
    ] = 20,
    json_file: JsonFile = None,
    out: SummaryFolder = None,
) -> None:
    """Run a scenario's steps on real kernels, and compare with what was predicted.

    The same engine runs twice: with predicted step times, and with those of a sample of the
    visited steps, measured on the device, those that take most time first. With --inject, faults
    are then injected on the decode pool's real pages, and it is told what each check caught.

    \b
    Examples:
      tonnage execute laptop
      tonnage execute laptop --budget 30s --tags
      tonnage execute laptop --budget 10s --inject all
      tonnage execute kimi-k2.6-h200 --device cuda --layers 6 --budget 3min
    """
    from tonnage.execution import execute as run
    from tonnage.execution_study import studied
    from tonnage.output import check_destinations, write_json, write_summary
    from tonnage.real_injection import InjectionChoice, inject_faults
    from tonnage.runs import asked_for
    from tonnage.sim.units import parse_seconds
    from tonnage.step_devices import DeviceChoice, device_maker
    from tonnage.terminal import labelled, output_console, progress
    from tonnage.watched_devices import Watch

    check_destinations(json_file, out)
    asked = asked_for(scenario, overrides or [])
    budget_s = parse_seconds(budget)
    choice = DeviceChoice(device, threads, layers, check_tags=tags)
    maker = device_maker(choice)
    faults = None if inject is None else InjectionChoice.named(inject, injections)
    runs = {}
    with progress(quiet=json_file == "-") as report:
        for label, one in asked.scenarios.items():
            watch, told = Watch.of(one, choice, budget_s), labelled(report, label)
            found = run(one, watch.devices(maker), budget_s=budget_s, progress=told)
            runs[label] = studied(one, found, watch).to_dict()
            if faults is not None:
                runs[label]["injection"] = inject_faults(one, choice, faults, told)
    summary = asked.joint(runs)
    if out is not None:
        write_summary(out, summary)
    if write_json(json_file, summary):
        from tonnage.execution_table import print_execution

        print_execution(output_console(), runs)
