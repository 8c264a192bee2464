"""The `validate` verbs: predicted against measured."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tonnage.cli_options import JsonFile, Overrides
from tonnage.sim.domain import BadInputError

if TYPE_CHECKING:
    from tonnage.sim.results.other_tools.vllm_log import VllmLog
    from tonnage.validate_run import ReplayChoice

validate_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Compare predictions with what was measured.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

ValidationFolder = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", help="Write summary.json, rows.csv, scatter.html there."),
]


@validate_app.command("kv")
def validate_kv_rows(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A CSV of printed KV capacities.")],
    json_file: JsonFile = None,
    out: ValidationFolder = None,
) -> None:
    """Compare the KV capacities that engines printed with what the memory model predicts.

    A row is predicted from its configuration. Where that says too little but the pool's bytes are
    printed, they are taken as given and the tokens in them predicted; each row says which.
    The columns are in docs/validate.md; an empty cell is not stated.

    \b
    Examples:
      tonnage validate kv kv_capacity.csv
      tonnage validate kv our-fleet.csv --json - | jq .summary.median_abs_error
      tonnage validate kv our-fleet.csv --out validation
    """
    from tonnage.output import check_destinations, write_json
    from tonnage.validate_kv import FIGURES, validate_kv
    from tonnage.validation_output import (
        print_groups,
        print_refusals,
        print_rows,
        share,
        write_validation,
    )

    check_destinations(json_file, out)
    found = validate_kv(file)
    told = found.to_dict()
    if out is not None:
        write_validation(out, told, found.rows, (*FIGURES, "weights_bytes"))
    if write_json(json_file, told):
        from tonnage.terminal import output_console

        console, counts = output_console(), told["summary"]
        print_rows(console, found.rows, FIGURES, ("model", "gpu", "engine", "basis"))
        print_refusals(console, found.rows)
        for group in ("basis", "attention", "gpu", "engine"):
            print_groups(console, group, counts[f"by_{group}"], ("kv",))
        median = share(counts["median_abs_error"])
        console.print(
            f"{counts['predicted']} of {counts['rows']} rows predicted; median error {median}"
        )


@validate_app.command("latency")
def validate_latency_rows(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A CSV of serving results.")],
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes. [default: one per core]")
    ] = None,
    json_file: JsonFile = None,
    out: ValidationFolder = None,
) -> None:
    """Compare the latencies of benchmark runs with what is predicted for them.

    Each row's deployment is simulated under its load, users in a closed loop; first tokens wait in
    the queues of the simulation. Rows that differ in their name alone are simulated once.
    The columns are in docs/validate.md; an empty cell is not stated.

    \b
    Examples:
      tonnage validate latency serving_latency.csv
      tonnage validate latency our-runs.csv --json - | jq .summary.tpot_mape
      tonnage validate latency our-runs.csv --workers 8 --out validation
    """
    from tonnage.output import check_destinations, write_json
    from tonnage.terminal import output_console, progress
    from tonnage.validate_latency import FIGURES, GROUPS, validate_latency
    from tonnage.validation_output import (
        print_groups,
        print_refusals,
        print_rows,
        share,
        write_validation,
    )

    check_destinations(json_file, out)
    with progress(quiet=json_file == "-") as report:
        found = validate_latency(file, workers=workers, progress=report)
    told = found.to_dict()
    if out is not None:
        write_validation(out, told, found.rows, FIGURES)
    if write_json(json_file, told):
        console, counts = output_console(), told["summary"]
        print_rows(console, found.rows, FIGURES, ("engine", "gpu"))
        print_refusals(console, found.rows)
        for group in GROUPS:
            print_groups(console, group, counts[f"by_{group}"], FIGURES)
        errors = ", ".join(f"{name} {share(counts[f'{name}_mape'])}" for name in FIGURES)
        inside = share(counts["interval_coverage"])
        console.print(f"{counts['predicted']} of {counts['rows']} rows predicted; MAPE: {errors}")
        console.print(f"{inside} of the measured figures lie inside the intervals of 80 %")


@validate_app.command("run")
def validate_measured_run(
    path: Annotated[
        Path,
        typer.Argument(metavar="PATH", help="A logged vLLM run, several in a folder, or a file."),
    ],
    scenario: Annotated[
        str | None,
        typer.Option(help="What was served, for a client's file: a scenario or a shipped name."),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="The GPU of a logged run that does not name it.")
    ] = None,
    profile: Annotated[
        str | None, typer.Option(help="The profile of a logged run's step times.")
    ] = None,
    overrides: Overrides = None,
    json_file: JsonFile = None,
    out: ValidationFolder = None,
) -> None:
    """Compare a measured run, request by request or point by point, with what is predicted for it.

    A folder with meta.json and requests.jsonl is a logged run of vLLM: its arrivals and lengths
    are replayed with its settings. A file of sglang.bench_serving, vllm bench serve, guidellm,
    aiperf or inference-perf (or its folder of stages) is compared with --scenario at each of its
    loads; their definitions are converted.

    \b
    Examples:
      tonnage validate run vllm_runs
      tonnage validate run vllm_runs/RTXPRO6000_Qwen3-32B --json -
      tonnage validate run my-run --gpu h100-sxm --set engine.step_overhead=1ms --out validation
      tonnage validate run bench.jsonl --scenario my-fleet.yaml
    """
    from tonnage.output import check_destinations

    check_destinations(json_file, out)
    logs = _logs(path)
    if logs:
        if scenario is not None:
            raise BadInputError(f"{path}: is a logged run and says what was served; no --scenario")
        from tonnage.validate_run import ReplayChoice

        choice = ReplayChoice(gpu, profile, tuple(overrides or ()))
        _report_logs(logs, choice, json_file, out)
        return
    if gpu is not None or profile is not None:
        raise BadInputError(
            f"{path}: --gpu and --profile are for logged runs; a file takes --scenario and --set"
        )
    _report_results(path, scenario, overrides or [], json_file, out)


def _logs(path: Path) -> list[VllmLog]:
    from tonnage.sim.results.other_tools.vllm_log import is_vllm_log, read_vllm_log

    if not path.exists():
        raise BadInputError(f"{path}: there is no such file or folder")
    if not path.is_dir():
        return []
    folders = [path] if is_vllm_log(path) else sorted(filter(is_vllm_log, path.iterdir()))
    return [read_vllm_log(folder) for folder in folders]


def _report_logs(
    logs: list[VllmLog], choice: ReplayChoice, json_file: str | None, out: Path | None
) -> None:
    from tonnage.output import write_json
    from tonnage.validate_run import FIGURES, validate_vllm_logs
    from tonnage.validation_output import print_refusals, write_validation

    found = validate_vllm_logs(logs, choice)
    told = found.to_dict()
    if out is not None:
        write_validation(out, told, found.rows, FIGURES)
    if write_json(json_file, told):
        from tonnage.terminal import output_console
        from tonnage.validation_output import print_runs

        console = output_console()
        print_runs(console, told["summary"]["by_run"], FIGURES)
        print_refusals(console, found.rows)
        for name, lines in found.assumptions.items():
            console.print(f"{name}:")
            for line in lines:
                console.print(f"  - {line}", soft_wrap=True)


def _report_results(
    path: Path, scenario: str | None, overrides: list[str], json_file: str | None, out: Path | None
) -> None:
    from tonnage.output import write_json
    from tonnage.sim.results.other_tools.read import read_results
    from tonnage.terminal import output_console, progress
    from tonnage.validate_results import FIGURES, validate_results
    from tonnage.validation_output import print_refusals, print_rows, write_validation

    points = read_results(path)
    if scenario is None:
        raise BadInputError(
            f"{path}: was written by {points[0].tool}; say with --scenario what ran"
        )
    with progress(quiet=json_file == "-") as report:
        found = validate_results(points, scenario, overrides, progress=report)
    told = found.to_dict()
    if out is not None:
        write_validation(out, told, found.rows, tuple(FIGURES))
    if write_json(json_file, told):
        console = output_console()
        print_rows(console, found.rows, ("throughput", "ttft", "tpot", "e2e"), ("tool",))
        print_refusals(console, found.rows)
        for note in dict.fromkeys(note for row in found.rows for note in row.notes):
            console.print(f"  - {note}", soft_wrap=True)
