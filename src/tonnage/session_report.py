"""The report of a visit to a machine (`make gpu`), as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tonnage.execution_table import FIGURES, error_text, error_without_drift, load_of, shown_figure
from tonnage.profile_tables import held_out_text

Json = Mapping[str, Any]

_RATE = "output_tokens_per_s"


def report_of(whole: Json, titles: Mapping[str, str], compared: tuple[str, str]) -> str:
    """Return the report of what there is: `titles` of all parts, two parts set side by side."""
    lines = [f"# Measured on {whole['machine']['device']}", "", _facts(whole), ""]
    parts = whole["parts"]
    for name, part in parts.items():
        result = part["result"]
        lines += [f"## {part['title']}", "", f"{part['date']}, {part['wall_s']:.0f} s in all.", ""]
        lines += _calibration(result) if "calibration" in result else _execution(result)
        lines.append("")
        if name == compared[0] and compared[1] in parts:
            lines += [*_side_by_side(parts, compared), ""]
    for name, told in whole["failed"].items():
        lines += [f"**{titles[name]} failed**: {told}", ""]
    if whole["missing"]:
        names = ", ".join(titles[name] for name in whole["missing"])
        lines += [f"Not there yet: {names}. Run it again.", ""]
    return "\n".join(lines)


def _facts(whole: Json) -> str:
    known = {name: value for name, value in whole["machine"].items() if value is not None}
    calibrated = whole["parts"].get("calibrate")
    clocks = {} if calibrated is None else calibrated["result"]["profile"]["clocks"]
    texts = [f"{name} {value}" for name, value in known.items()]
    texts += [f"{name} {value:.4g} while busy" for name, value in clocks.items()]
    return "; ".join([f"gpu {whole['gpu']}", *texts]) + "."


def _calibration(result: Json) -> Iterator[str]:
    found = result["calibration"]
    yield (
        f"{found['points']:,} points ({found['measured_now']:,} in the last run, "
        f"{found['measured_s']:.0f} s), {found['not_reached']:,} not reached in the budget, "
        f"{len(found['measure_again'])} with samples far apart."
    )
    if found["not_run"] or found["unserved"]:
        yield f"Not run: {', '.join([*found['not_run'], *found['unserved']])}."
    yield ""
    yield "| operator | format | held out | rows | median error | p90 |"
    yield "|---|---|---|---|---|---|"
    for operator, formats in result["profile"]["errors"].items():
        for name, one in formats.items():
            yield (
                f"| {operator} | {name} | {held_out_text(one)} | {one['n']:,} "
                f"| {one['median']:.1%} | {one['p90']:.1%} |"
            )


def _execution(result: Json) -> Iterator[str]:
    for role, pool in result["pools"].items():
        yield f"{_measured(role, pool)}"
    drift = result["drift"]
    if drift["profile"]:
        for role, pool in drift["pools"].items():
            told = ", ".join(f"{name} {_ratio(one)}" for name, one in pool["families"].items())
            phases = ", ".join(f"{name} {one['ratio']:.3f}" for name, one in pool["phases"].items())
            yield f"Machine now over machine when calibrated, {role}: steps {phases}; {told}."
        if drift["why_not"]:
            yield f"Not divided out of the errors: {drift['why_not']}."
    else:
        yield f"Drift of the machine: nothing to compare with: {drift['why_not']}."
    yield ""
    yield "| load | figure | predicted | executed | error | inside | error without drift |"
    yield "|---|---|---|---|---|---|---|"
    for number, point in enumerate(result["points"]):
        for name, label in FIGURES:
            pair = point["figures"].get(name)
            if pair is not None:
                yield _line(result, number, name, f"| {load_of(point)} | {label} ", pair)


def _line(result: Json, number: int, name: str, begun: str, pair: Json) -> str:
    inside = {True: "yes", False: "no", None: ""}[pair["inside"]]
    return (
        f"{begun}| {shown_figure(name, pair['predicted'], pair['predicted_interval'])} "
        f"| {shown_figure(name, pair['executed'], pair['executed_interval'])} "
        f"| {error_text(pair['error'])} | {inside} "
        f"| {error_text(error_without_drift(result, number, name))} |"
    )


def _ratio(family: Json) -> str:
    return f"{family['ratio']:.3f} ({family['lowest']:.3f} to {family['highest']:.3f})"


def _measured(role: str, pool: Json) -> str:
    device = pool["device"]
    told = (
        f"{role}: {device['layers_run']} of {device['layers']} layers, "
        f"{pool['steps_measured']:,} of {pool['steps_visited']:,} steps measured, standing for "
        f"{pool['share_of_time_measured']:.0%} of the time."
    )
    check_s, predicted_s = device.get("tag_check_s"), device.get("tag_check_predicted_s")
    if check_s is None:
        return told
    predicted = "" if predicted_s is None else f", predicted {predicted_s * 1e6:,.1f} us"
    return f"{told} Tag check: {check_s * 1e6:,.1f} us per step{predicted}."


def _side_by_side(parts: Json, compared: tuple[str, str]) -> Iterator[str]:
    """Yield the output rate of one part over another's, point by point."""
    first, second = (parts[name] for name in compared)
    yield f"### {first['title']} over {second['title']}, output rate"
    yield ""
    yield "| load | predicted | executed |"
    yield "|---|---|---|"
    pairs = zip(first["result"]["points"], second["result"]["points"], strict=True)
    for one, other in pairs:
        ratios = [
            one["figures"][_RATE][side] / other["figures"][_RATE][side]
            for side in ("predicted", "executed")
        ]
        yield f"| {load_of(one)} | {ratios[0]:.3f} | {ratios[1]:.3f} |"
