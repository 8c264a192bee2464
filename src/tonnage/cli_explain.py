"""The `explain` verb."""

from __future__ import annotations

from typing import Annotated

import typer

from tonnage.cli_options import JsonFile, Overrides, ScenarioName, SummaryFolder


def explain(
    scenario: ScenarioName,
    overrides: Overrides = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests that decode; the scenario's most by default.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of their context; prompt and half an answer.")
    ] = None,
    prompt: Annotated[
        int | None, typer.Option(help="Tokens of the prompt chunk; the scenario's mean prompt.")
    ] = None,
    json_file: JsonFile = None,
    out: SummaryFolder = None,
) -> None:
    """Show where a step's time goes, operator by operator, with provenance and the roofline.

    \b
    Examples:
      tonnage explain kimi-k2.6-h200
      tonnage explain glm-5.2-h200 --requests 64 --context 8192
      tonnage explain kimi-k2.6-h200 --set pools.decode.kv=bf16 --json -
    """
    from tonnage import api
    from tonnage.output import check_destinations, write_json, write_summary
    from tonnage.runs import asked_for

    check_destinations(json_file, out)
    asked = asked_for(scenario, overrides or [])
    runs = {
        label: api.explain(one, requests=requests, context_tokens=context, prompt_tokens=prompt)
        for label, one in asked.scenarios.items()
    }
    summary = asked.joint(runs)
    if out is not None:
        write_summary(out, summary)
    if write_json(json_file, summary):
        from tonnage.explain_table import print_explanation
        from tonnage.terminal import output_console

        print_explanation(output_console(), runs)
