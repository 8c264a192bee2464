"""`tonnage memory --fit`: options to question to table."""

from __future__ import annotations

from pathlib import Path

import typer

from tonnage.sim.domain import BadInputError

_TRIED = ("tp", "pp", "ep", "attention_dp", "dcp")  # by --fit itself


def report_fit(ctx: typer.Context, json_file: str | None, out: Path | None) -> None:
    """Answer `memory --fit` from the options of the command; print, or write JSON."""
    from tonnage.memory_fit import FitQuestion, fit_memory
    from tonnage.output import check_destinations, write_json, write_summary
    from tonnage.scenarios.load import parse_scenario

    options = ctx.params
    if options["model"] is None:
        raise BadInputError("memory --fit: say which model with --model, a shipped name or a file")
    if options["overrides"]:
        raise BadInputError("memory --fit: takes no --set; use the options of its own")
    for name in _TRIED:
        if _is_given(ctx, name):
            option = f"--{name.replace('_', '-')}"
            raise BadInputError(f"memory --fit: tries layouts itself; remove {option}")
    if options["context"] is not None and options["tokens"] is not None:
        raise BadInputError("memory --fit: --context and --tokens say the same; remove one")
    check_destinations(json_file, out)
    fields = {key: options[option] for key, option in _ENGINE_OPTIONS.items()}
    weights, kv = options["weights"], options["kv"]
    checked = parse_scenario(  # one place knows the names of formats and engines
        {"engine": fields, "pools": {"serve": {"weights": weights, "kv": kv}}}, "the options"
    )
    report = fit_memory(
        FitQuestion(
            model=options["model"],
            context_tokens=options["context"] or options["tokens"],
            weights=weights,
            kv=kv,
            engine=checked.engine_spec(),
            gpu=options["gpu"] if _is_given(ctx, "gpu") else None,
        )
    )
    summary = report.to_dict()
    if out is not None:
        write_summary(out, summary)
    if write_json(json_file, summary):
        from tonnage.fit_table import print_fit
        from tonnage.terminal import output_console

        print_fit(output_console(), report)


_ENGINE_OPTIONS = {"name": "engine", "version": "engine_version", "mem_fraction": "mem_fraction"}


def _is_given(ctx: typer.Context, name: str) -> bool:
    source = ctx.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"
