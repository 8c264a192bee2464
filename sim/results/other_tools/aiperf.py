"""Results of aiperf, and of genai-perf before it: `profile_export_aiperf.json`, one load a file.

Its `inter_token_latency` is (request latency - TTFT) / (output tokens - 1) of a request: TPOT here;
gaps between tokens are not in it. `output_token_throughput` is of output tokens alone. The unit
beside each metric says what its numbers are.
Shape: aiperf 0.14 `docs/reference/json-export-schema.md` (schema 1.x), genai-perf 0.0.16.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tonnage.sim.results.other_tools.json_fields import Fields
from tonnage.sim.results.other_tools.measured import STATISTICS, MeasuredPoint

_LATENCIES = {
    "ttft_s": "time_to_first_token",
    "tpot_s": "inter_token_latency",
    "e2e_s": "request_latency",
}
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0}
_USERS, _RATES = ("concurrency",), ("request_rate", "rate")
_NOTE = "TPOT: its inter_token_latency, which is a mean per request; it has no ITL"


def is_aiperf(fields: Fields) -> bool:
    """Tell whether an object is a profile export of aiperf or genai-perf."""
    return isinstance(fields.values.get("request_latency"), Mapping) and isinstance(
        fields.values.get("request_throughput"), Mapping
    )


def aiperf_point(fields: Fields) -> MeasuredPoint:
    """Return the load of one export; a run that did not stream has no TTFT and is refused."""
    rate = fields.section("output_token_throughput")
    figures = {"throughput.output_tokens_per_s": rate.number("avg")}
    for name, key in _LATENCIES.items():
        figures |= _latency(fields.section(key), name)
    users = _setting(fields.values, _USERS)
    rate_per_s = None if users is not None else _setting(fields.values, _RATES)
    return MeasuredPoint(
        tool="aiperf",
        concurrency=None if users is None else round(users),
        rate_per_s=rate_per_s,
        figures=figures,
        completed=fields.optional_section("request_count").whole("avg"),
        failed=fields.optional_section("error_request_count").whole("avg"),
        input_tokens=fields.optional_section("input_sequence_length").optional("avg"),
        output_tokens=fields.optional_section("output_sequence_length").optional("avg"),
        notes=(_NOTE,),
    )


def _latency(metric: Fields, name: str) -> dict[str, float]:
    unit = metric.text("unit") or ""
    if unit not in _UNITS_S:
        raise metric.refuse("unit", f"{unit!r} is not one of {', '.join(_UNITS_S)}")
    metric.number("avg")
    found = {}
    for statistic in STATISTICS:
        value = metric.optional("avg" if statistic == "mean" else statistic)
        if value is not None:
            found[f"latency.{name}.{statistic}"] = value * _UNITS_S[unit]
    return found


def _setting(export: Mapping[str, Any], names: tuple[str, ...]) -> float | None:
    """Return the first number under one of the names: the sweep's point, else the configuration.

    Versions nest it differently (`loadgen.concurrency`, `phases.profiling.concurrency`, a list).
    """
    varied = export.get("run_info")
    values = varied.get("variation_values", {}) if isinstance(varied, Mapping) else {}
    for path, value in values.items() if isinstance(values, Mapping) else ():
        if str(path).rpartition(".")[2] in names and isinstance(value, int | float):
            return float(value)
    return next(_numbers(export.get("input_config"), names), None)


def _numbers(value: Any, names: tuple[str, ...]) -> Iterator[float]:
    if isinstance(value, Mapping):
        for name, inner in value.items():
            is_number = isinstance(inner, int | float) and not isinstance(inner, bool)
            if name in names and is_number:
                yield float(inner)
            else:
                yield from _numbers(inner, names)
    elif isinstance(value, list):
        for inner in value:
            yield from _numbers(inner, names)
