"""The figures of docs/retries.md: the storm and its plot, crashes by what becomes of the requests.

python benchmarks/retries.py            # prints the tables
python benchmarks/retries.py --plot docs/retry-storm.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from tonnage import api
from tonnage.retry_plots import RetrySeries, retry_series
from tonnage.scenarios.load import load_variants, parse_scenario
from tonnage.scenarios.schema import Scenario

_BACK_S, _END_S = 150.0, 300.0
_SPLIT = {
    "name": "crash",
    "model": "llama-3.1-8b",
    "gpu": "h100-sxm",
    "traffic": {
        "kind": "poisson",
        "rate_per_s": 15,
        "input_tokens": {"kind": "lognormal", "mean": 2000, "p95": 6000, "max": 16000},
        "output_tokens": {"kind": "lognormal", "mean": 200, "p95": 500, "max": 800},
        "requests": 3000,
    },
    "pools": {
        "prefill": {"instances": 3, "tp": 1},
        "decode": {"instances": 2, "tp": 1},
    },
}


def storm(requests: int | None = None) -> dict[str, api.PointReport]:
    """Simulate the variants of the shipped storm."""
    sets = [] if requests is None else [f"traffic.requests={requests}"]
    found = load_variants("retry-storm", sets)
    return {name: api.simulate(scenario).points[0] for name, scenario in found.items()}


def storm_row(name: str, point: api.PointReport) -> str:
    """Return the line of one variant."""
    records, figures = point.records, point.figures
    served, asked = records["finish_s"], records["arrival_s"]
    shares = [
        served.between(*span).sum() / asked.between(*span).sum()
        for span in ((0.0, 60.0), (60.0, _BACK_S), (_BACK_S, 210.0), (210.0, _END_S))
    ]
    cells = [
        name,
        f"{figures['requests']['completed']:,}",
        f"{figures['attempts']['made'] - figures['attempts']['refused']:,}",
        *(f"{share:.0%}" for share in shares),
        f"{figures['wasted_tokens']['prompt_tokens'] / 1e6:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def crash_row(lost: str, attempts: int, noticed: str, breaker: str | None) -> str:
    """Simulate one decode instance of two that dies after 60 s, away for 60 s."""
    crash = {"kind": "instance_crash", "pool": "decode", "instance": 0, "at": "60s"}
    clients: dict[str, Any] = {"attempts": attempts, "back_off": {"first": "1s", "factor": 2}}
    if breaker is not None:
        clients["breaker"] = {"scope": breaker}
    scenario = parse_scenario(
        {**_SPLIT, "outages": [{**crash, "lost": lost, "noticed": noticed}], "clients": clients}
    )
    return "| " + " | ".join(crash_cells(scenario)) + " |"


def crash_cells(scenario: Scenario) -> list[str]:
    """Return the figures of a run with a crash."""
    figures = api.simulate(scenario).points[0].figures
    latency, wasted = figures["latency"], figures["wasted_tokens"]
    return [
        f"{figures['requests']['completed']:,}",
        f"{figures['requests']['aborted']:,}",
        f"{figures['outages']['requests_lost']:,}",
        f"{latency['e2e_s']['p50']:.2f}",
        f"{latency['e2e_s']['p99']:.2f}",
        f"{wasted['prompt_tokens'] / 1e3:,.0f}",
        f"{wasted['output_tokens'] / 1e3:,.1f}",
    ]


# --- the plot -----------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 640, 150, 46, 24, 44


def svg(points: dict[str, api.PointReport]) -> str:
    """Draw attempts and answers of the given variants below each other."""
    height = _TOP + len(points) * (_HEIGHT + _GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _WIDTH + 20} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{_LEFT + _WIDTH + 20}" height="{height}" fill="white"/>',
    ]
    for number, (name, point) in enumerate(points.items()):
        assert point.attempts is not None
        series = retry_series(point.attempts, point.records)
        parts += _panel(name, series, _TOP + number * (_HEIGHT + _GAP))
    return "\n".join([*parts, "</svg>", ""])


def _panel(name: str, series: RetrySeries, top: int) -> list[str]:
    most = 100.0  # requests per second, the same in all panels
    x = [_LEFT + time_s / _END_S * _WIDTH for time_s in series.time_s if time_s <= _END_S]
    bottom = top + _HEIGHT

    def line(rates: Any, colour: str, dash: str = "") -> str:
        places = " ".join(
            f"{at:.1f},{bottom - rate / most * _HEIGHT:.1f}"
            for at, rate in zip(x, rates, strict=False)
        )
        return (
            f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="1.5"'
            f' stroke-dasharray="{dash}"/>'
        )

    crash_x, width = _LEFT + 60.0 / _END_S * _WIDTH, 90.0 / _END_S * _WIDTH
    ticks = [
        _label(_LEFT + at_s / _END_S * _WIDTH, bottom + 13, "middle", f"{at_s} s")
        for at_s in range(0, 301, 60)
    ]
    levels = [
        _label(_LEFT - 5, bottom - rate / most * _HEIGHT + 4, "end", str(rate))
        for rate in (0, 50, 100)
    ]
    return [
        f'<rect x="{crash_x}" y="{top}" width="{width}" height="{_HEIGHT}" fill="#ffe8d0"/>',
        f'<text x="{_LEFT}" y="{top - 6}">{name}: per second, attempts (red), requests (grey), '
        "served (green); one of two instances away (shaded)</text>",
        *ticks,
        *levels,
        line(series.sent_per_s, "#d62728"),
        line(series.asked_per_s, "#7f7f7f", "3 2"),
        line(series.served_per_s, "#2ca02c"),
    ]


def _label(x: float, y: float, anchor: str, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>'


def main() -> None:
    """Print the tables, or write the plot."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plot", type=Path)
    asked = parser.parse_args()
    points = storm()
    if asked.plot is not None:
        drawn = {name: points[name] for name in ("at once", "back-off and breaker")}
        asked.plot.write_text(svg(drawn), encoding="utf-8")
        return
    for name, point in points.items():
        print(storm_row(name, point))
    for case in (
        ("fail", 1, "0s", None),
        ("retry", 3, "0s", None),
        ("recompute", 3, "0s", None),
        ("retry", 3, "10s", None),
        ("retry", 3, "10s", "instance"),
    ):
        print(case, crash_row(*case))


if __name__ == "__main__":
    main()
