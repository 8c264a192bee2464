"""`tonnage quality`: scores of formats judged, and how far formats move numbers."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tonnage.cli_options import JsonFile, SummaryFolder
from tonnage.sim.domain import BadInputError

if TYPE_CHECKING:
    from tonnage.quality_errors import ErrorReport


class _Kind(StrEnum):
    WEIGHTS = "weights"
    KV = "kv"


def quality(
    asked: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL|FILE]", help="A model, or your own scores (YAML)."),
    ] = None,
    margin: Annotated[
        float, typer.Option(metavar="POINTS", help="A difference that would not matter.")
    ] = 1.0,
    confidence: Annotated[float, typer.Option(help="Of the intervals, as a share.")] = 0.95,
    power: Annotated[float, typer.Option(help="Of the numbers of questions needed.")] = 0.8,
    tensors: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Numeric error of formats on a safetensors file."),
    ] = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Numeric error on Gaussian values with outliers.")
    ] = False,
    kind: Annotated[
        _Kind, typer.Option("--as", help="What the tensors are: weights, or KV.")
    ] = _Kind.WEIGHTS,
    json_file: JsonFile = None,
    out: SummaryFolder = None,
) -> None:
    """Say whether formats of weights and KV are known to cost quality, and what is not known.

    \b
    Examples:
      tonnage quality
      tonnage quality kimi-k2.6 --margin 0.5
      tonnage quality my-scores.yaml --confidence 0.99 --json -
      tonnage quality --synthetic
      tonnage quality --tensors model-00001.safetensors --as weights
    """
    from tonnage.output import check_destinations, write_json, write_summary
    from tonnage.sim.planning.score_pairs import Standards

    if tensors is not None and synthetic:
        raise BadInputError("quality: --tensors and --synthetic: give one of the two")
    check_destinations(json_file, out)
    summary: dict[str, Any] = {}
    report = errors = None
    if asked is not None or (tensors is None and not synthetic):
        from tonnage.quality_report import quality as judge

        report = judge(asked, Standards(margin / 100.0, confidence, power))
        summary |= report.to_dict()
    if tensors is not None or synthetic:
        errors = _measured(tensors, kind, quiet=json_file == "-")
        summary["numeric_errors"] = errors.to_dict()
    if out is not None:
        write_summary(out, summary)
    if write_json(json_file, summary):
        from tonnage.quality_table import print_errors, print_quality
        from tonnage.terminal import output_console

        if report is not None:
            print_quality(output_console(), report)
        if errors is not None:
            print_errors(output_console(), errors)


def _measured(tensors: Path | None, kind: _Kind, quiet: bool) -> ErrorReport:
    """Measure the tensors of a file, synthetic ones without it."""
    from tonnage.quality_errors import file_errors, synthetic_errors
    from tonnage.terminal import progress

    if tensors is None:
        return synthetic_errors(kind.value)
    with progress(quiet=quiet) as report_progress:
        return file_errors(tensors, kind.value, report_progress)
