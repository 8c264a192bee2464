"""The tables of `tonnage quality`: a row per test, a sentence per verdict, errors per format."""

from __future__ import annotations

from rich.console import Console

from tonnage.quality_errors import ErrorReport, TensorErrors
from tonnage.quality_report import JudgedEvidence, QualityReport
from tonnage.sim.planning.proportions import Interval
from tonnage.sim.planning.score_pairs import Comparison, Standards
from tonnage.terminal import new_table

_POINTS = 100.0
_MOST_TENSORS = 40


def print_quality(console: Console, report: QualityReport) -> None:
    """Print a table per format of a model, and what to make of it."""
    if not report.judged:
        text = f"No scores of {report.asked} in other formats are known: "
        console.print(f"{text}any change of its weights or KV is without evidence.", soft_wrap=True)
        return
    for judged in report.judged:
        _print_judged(console, judged, report.standards)
    chance = report.compared * (1.0 - report.standards.confidence)
    sure = f"{report.standards.confidence:.0%}"
    console.print(
        f"{report.compared} tests compared at {sure}: about {chance:.1f} would be told apart by "
        "chance alone.",
        soft_wrap=True,
    )
    for note in report.notes:
        console.print(f"  - {note}", soft_wrap=True)


def print_errors(console: Console, report: ErrorReport) -> None:
    """Print the relative error of every tensor by format, the tensors that suffer most first."""
    title = f"Error of {report.kind}, root mean square relative to the values ({report.source})"
    formats = list(report.tensors[0].errors)
    heads = ["tensor", "shape", "peak / rms", "outliers", *formats]
    table = new_table(console, title, heads, numbers_from=2)
    rows = list(report.tensors)
    if len(rows) > _MOST_TENSORS:
        rows = sorted(rows, key=_worst, reverse=True)[:_MOST_TENSORS]
    for tensor in rows:
        errors = [_error(tensor, label) for label in formats]
        size = " x ".join(map(str, tensor.shape))
        peak, outliers = tensor.values["peak_over_rms"], tensor.values["outlier_share"]
        table.add_row(tensor.name, size, f"{peak:.1f}", f"{outliers:.2%}", *errors)
    console.print(table)
    if len(rows) < len(report.tensors):
        text = f"The {len(rows)} of {len(report.tensors)} tensors that suffer most; --json has all."
        console.print(text, soft_wrap=True)
    if report.skipped:
        text = f"{len(report.skipped)} tensors were left out; --json says which and why."
        console.print(text, soft_wrap=True)
    if any(tensor.values["outlier_share"] for tensor in rows):
        console.print("all values / those that are no outliers (beyond 6 times the rms)")
    console.print("An error of numbers is not one of answers: scores are what say that.")


def verdict_text(one: Comparison, standards: Standards) -> str:
    """Say in words what a comparison shows."""
    margin = f"{standards.margin * _POINTS:g}"
    if one.interval is None:
        return "number of questions not known: nothing can be said"
    if one.verdict in ("worse", "better"):
        sizes = sorted(abs(limit) * _POINTS for limit in (one.interval.low, one.interval.high))
        text = f"{one.verdict} by {sizes[0]:.2f} to {sizes[1]:.2f}"
        return f"{text}, within {margin}" if one.is_within_margin else text
    if one.verdict == "within":
        return f"no difference found; within {margin} either way"
    loss = max(0.0, -one.interval.low) * _POINTS
    return f"no difference found; a loss of {loss:.2f} is not ruled out"


def _print_judged(console: Console, judged: JudgedEvidence, standards: Standards) -> None:
    given = judged.evidence
    head = f"{given.model}: {given.changes} {given.variant} against {given.baseline}"
    console.print(head, style="bold", soft_wrap=True)
    titles = ["test", "verdict", "questions", given.baseline, given.variant, "difference"]
    needed = f"needed for ±{standards.margin * _POINTS:g}"
    titles += [f"{standards.confidence:.0%} interval", "shows", needed]
    table = new_table(console, "", titles, numbers_from=2)
    for one in judged.comparisons:
        table.add_row(*_cells(one, standards))
    console.print(table)
    if judged.pooled is not None:
        pooled = judged.pooled
        console.print(
            f"all {pooled.questions:,} questions of {len(pooled.tests)} tests: "
            f"{pooled.difference * _POINTS:+.2f} points, {_interval(pooled.interval)}",
            soft_wrap=True,
        )
    for line in (f"source: {given.source}", given.note and f"note: {given.note}"):
        if line:
            console.print(line, soft_wrap=True, style="dim")
    console.print()


def _cells(one: Comparison, standards: Standards) -> list[str]:
    pair = one.pair
    questions = "-" if pair.questions is None else f"{pair.questions:,}"
    if one.mcnemar_p is not None:
        questions = f"{questions} paired, p {one.mcnemar_p:.2g}"
    return [
        pair.test,
        verdict_text(one, standards),
        questions,
        f"{pair.baseline * _POINTS:.2f}",
        f"{pair.variant * _POINTS:.2f}",
        f"{one.difference * _POINTS:+.2f}",
        _interval(one.interval),
        "-" if one.detectable is None else f"{one.detectable * _POINTS:.2f}",
        "-" if one.questions_needed is None else f"{one.questions_needed:,}",
    ]


def _interval(interval: Interval | None) -> str:
    if interval is None:
        return "-"
    return f"{interval.low * _POINTS:+.2f} to {interval.high * _POINTS:+.2f}"


def _error(tensor: TensorErrors, label: str) -> str:
    error = tensor.errors[label]
    if error is None:
        return "-"
    if tensor.values["outlier_share"] == 0:
        return f"{error['relative_rms']:.2%}"
    return f"{error['relative_rms']:.2%} / {error['ordinary_rms']:.2%}"


def _worst(tensor: TensorErrors) -> float:
    known = (error["relative_rms"] for error in tensor.errors.values() if error is not None)
    return max(known, default=0.0)
