"""The `tonnage` command: verbs over `tonnage.api`, each with tables, JSON and files.

Heavy modules are imported inside the commands, so that `--help` and a typing error are quick.
"""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from tonnage.cli_calibrate import calibrate
from tonnage.cli_dashboard import dashboard
from tonnage.cli_execute import execute
from tonnage.cli_explain import explain
from tonnage.cli_export import export
from tonnage.cli_fit import report_fit
from tonnage.cli_integrity import integrity
from tonnage.cli_options import Overrides, ScenarioName
from tonnage.cli_plan import plan
from tonnage.cli_profile import profile_app
from tonnage.cli_quality import quality
from tonnage.cli_sweep import sweep
from tonnage.cli_trace import trace_app
from tonnage.cli_validate import validate_app
from tonnage.sim.domain import BadInputError, TonnageError

app = typer.Typer(
    name="tonnage",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Run the command; a user's mistake ends in one line and a code, never in a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal without UTF-8 shows '?'
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except TonnageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        # The reader has gone. Python flushes once more at exit: let that go nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"tonnage {version('tonnage')}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Plan the capacity of LLM serving: what fits, how fast, at what cost.

    \b
    Examples:
      tonnage list scenarios
      tonnage memory kimi-k2.6-h200
      tonnage simulate kimi-k2.6-h200
      tonnage simulate my-fleet.yaml --set pools.decode.instances=2 --json -

    Exit codes: 0 done, 2 bad input, 3 it does not fit.
    """


_JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write the report as JSON; '-' prints only it."),
]
_OutFolder = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Write the report's files there.")
]
_Seed = Annotated[
    int | None, typer.Option("--seed", min=0, help="Seed of the traffic, instead of the file's.")
]


@app.command()
def simulate(
    scenario: ScenarioName,
    overrides: Overrides = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Step token by token; slower, the same result.")
    ] = False,
    replications: Annotated[
        int, typer.Option(min=1, help="Runs per point with seeds that follow; shows means.")
    ] = 1,
    ceiling: Annotated[
        bool,
        typer.Option("--ceiling", help="Search the largest load that meets the objectives."),
    ] = False,
    n_plus_one: Annotated[
        bool,
        typer.Option("--n-plus-one", help="Check the objectives with one instance down, by pool."),
    ] = False,
    seed: _Seed = None,
    json_file: _JsonFile = None,
    out: _OutFolder = None,
    timeline: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write and draw what every instance did when."),
    ] = None,
) -> None:
    """Predict throughput, latency and cost of a scenario.

    --out writes summary.json, points.csv and requests*.parquet, one per point; where clients try
    again or instances go down, attempts*.parquet and retries.html with its plots. --timeline writes
    a .json or .json.gz for ui.perfetto.dev, or rows as .parquet or .csv, a file per point.

    \b
    Examples:
      tonnage simulate kimi-k2.6-h200
      tonnage simulate mooncake-trace --set traffic.rate_scale=2 --out results
      tonnage simulate colocated-vs-disaggregated --json report.json
      tonnage simulate glm-5.2-h200 --set 'traffic.concurrency=[1, 8]' --json -
      tonnage simulate kimi-k2.6-h200 --timeline kimi.json.gz
      tonnage simulate glm-5.2-h200 --set 'slo.tpot_p95=50ms' --ceiling --replications 5
    """
    from tonnage import api
    from tonnage.n_plus_one import print_n_plus_one, require_objectives
    from tonnage.output import check_destinations, write_folder, write_json
    from tonnage.retry_plots import write_retries
    from tonnage.runs import asked_for
    from tonnage.terminal import labelled, progress
    from tonnage.timeline import check_timeline_file, print_timelines, write_timelines

    check_destinations(json_file, out)
    if timeline is not None:
        check_timeline_file(timeline)
    seeded = [] if seed is None else [f"seed={seed}"]
    asked = asked_for(scenario, [*(overrides or []), *seeded])
    for one in asked.scenarios.values() if n_plus_one else ():
        require_objectives(one)
    with progress(quiet=json_file == "-") as report_progress:
        reports = {
            label: api.simulate(
                one,
                exact=exact,
                replications=replications,
                ceiling=ceiling,
                progress=labelled(report_progress, label),
                timeline=timeline is not None,
            )
            for label, one in asked.scenarios.items()
        }
        runs = {label: report.to_dict() for label, report in reports.items()}
        for label, one in asked.scenarios.items() if n_plus_one else ():
            found = api.n_plus_one(one, progress=labelled(report_progress, label))
            runs[label]["n_plus_one"] = found
    summary = asked.joint(runs)
    if out is not None:
        records = {
            label: [point.records for point in report.points] for label, report in reports.items()
        }
        write_folder(out, summary, runs, records)
        retries = write_retries(out, reports)
    if timeline is not None:
        write_timelines(timeline, reports)
    if write_json(json_file, summary):
        from tonnage.tables import print_simulation
        from tonnage.terminal import output_console

        print_simulation(output_console(), runs)
        if n_plus_one:
            print_n_plus_one(output_console(), runs)
        if out is not None and retries is not None:
            output_console().print(f"Attempts over time: {retries}", soft_wrap=True)
        if timeline is not None:
            print_timelines(output_console(), timeline, reports)


@app.command()
def memory(
    ctx: typer.Context,
    scenario: Annotated[
        str | None, typer.Argument(metavar="[SCENARIO]", help="A scenario file or a shipped name.")
    ] = None,
    overrides: Overrides = None,
    model: Annotated[
        str | None, typer.Option(help="Instead of a scenario: a model, config.json or its folder.")
    ] = None,
    gpu: Annotated[
        str, typer.Option(help="A shipped GPU or a file; with --fit, that one alone.")
    ] = "h200-sxm",
    tp: Annotated[int, typer.Option(help="Tensor-parallel GPUs of a stage.")] = 1,
    pp: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    ep: Annotated[int, typer.Option(help="Expert-parallel ranks within TP.")] = 1,
    attention_dp: Annotated[int, typer.Option(help="Attention replicas within TP.")] = 1,
    dcp: Annotated[int, typer.Option(help="Ranks that share the KV of one request.")] = 1,
    weights: Annotated[str, typer.Option(help="native, fp8_block, int4_g32, nvfp4 ...")] = "native",
    kv: Annotated[str, typer.Option(help="bf16 or fp8_e4m3.")] = "bf16",
    engine: Annotated[str, typer.Option(help="sglang, vllm or trtllm.")] = "sglang",
    engine_version: Annotated[str, typer.Option(help="The engine's version, or auto.")] = "auto",
    mem_fraction: Annotated[str, typer.Option(help="The engine's fraction, or auto.")] = "auto",
    tokens: Annotated[
        int | None, typer.Option(help="Length of a request, prompt and answer together.")
    ] = None,
    fit: Annotated[
        bool, typer.Option("--fit", help="Which GPUs, and how many, can host --model at all.")
    ] = False,
    context: Annotated[
        int | None, typer.Option(min=1, help="With --fit: tokens that one request must hold.")
    ] = None,
    json_file: _JsonFile = None,
    out: _OutFolder = None,
) -> None:
    """Show what fits on the GPUs: weights, KV tokens, concurrency, the longest request.

    \b
    Examples:
      tonnage memory kimi-k2.6-h200
      tonnage memory --model glm-5.2 --gpu b200-sxm --tp 4 --weights nvfp4 --kv fp8_e4m3
      tonnage memory --model ./my-model/config.json --gpu h100-sxm --tp 8 --tokens 32768 --json -
      tonnage memory --model llama-3.1-70b --tp 4 --engine vllm --mem-fraction 0.9
      tonnage memory --fit --model glm-5.2 --context 131072 --kv fp8_e4m3
    """
    if fit:
        if scenario is not None:
            raise BadInputError("memory --fit: takes --model, not a scenario")
        report_fit(ctx, json_file, out)
        return
    if context is not None:
        raise BadInputError("memory: --context goes with --fit; without it, write --tokens")
    if (scenario is None) == (model is None):
        raise BadInputError("memory: give a scenario, or --model with --gpu and --tp, not both")
    pool = {"tp": tp, "pp": pp, "ep": ep, "attention_dp": attention_dp, "dcp": dcp}
    pool_and_formats = {**pool, "weights": weights, "kv": kv}
    engine_data = {"name": engine, "version": engine_version, "mem_fraction": mem_fraction}
    data: dict[str, Any] = {"name": model, "model": model, "gpu": gpu, "engine": engine_data}
    data["pools"] = {"serve": pool_and_formats}
    if tokens is not None:  # a request holds that many when its last token, here its first, is out
        data["traffic"] = {"input_tokens": tokens, "output_tokens": 1}
    _report_memory(scenario, data, overrides or [], json_file, out)


def _report_memory(
    scenario: str | None,
    options: dict[str, Any],
    overrides: list[str],
    json_file: str | None,
    out: Path | None,
) -> None:
    from tonnage import api
    from tonnage.output import check_destinations, write_json, write_summary
    from tonnage.runs import asked_for, one_scenario
    from tonnage.scenarios.load import parse_scenario

    check_destinations(json_file, out)
    if scenario is not None:
        asked = asked_for(scenario, overrides)
    else:
        asked = one_scenario(parse_scenario(options, "the options", None, overrides))
    runs = {label: api.memory(one).to_dict() for label, one in asked.scenarios.items()}
    summary = asked.joint(runs)
    if out is not None:
        write_summary(out, summary)
    if write_json(json_file, summary):
        from tonnage.memory_table import print_memory
        from tonnage.terminal import output_console

        print_memory(output_console(), runs)


app.command()(calibrate)
app.command()(dashboard)
app.command()(explain)
app.command()(execute)
app.command()(export)
app.command()(integrity)
app.command()(plan)
app.command()(sweep)
app.command()(quality)
app.add_typer(profile_app, name="profile")
app.add_typer(trace_app, name="trace")
app.add_typer(validate_app, name="validate")


class _Kind(StrEnum):
    MODELS = "models"
    GPUS = "gpus"
    PRICES = "prices"
    PROFILES = "profiles"
    SCENARIOS = "scenarios"


@app.command("list")
def list_shipped(
    kind: Annotated[_Kind, typer.Argument(help="What to list.")], json_file: _JsonFile = None
) -> None:
    """List what ships with the package.

    \b
    Examples:
      tonnage list models
      tonnage list gpus --json -
      tonnage list scenarios
    """
    from tonnage import listing
    from tonnage.output import check_destinations, write_json

    check_destinations(json_file, None)
    makers = {
        _Kind.MODELS: listing.models,
        _Kind.GPUS: listing.gpus,
        _Kind.PRICES: listing.prices,
        _Kind.PROFILES: listing.profiles,
        _Kind.SCENARIOS: listing.scenarios,
    }
    rows = makers[kind]()
    if write_json(json_file, {kind.value: rows}):
        from tonnage.terminal import output_console

        listing.print_rows(output_console(), rows)
