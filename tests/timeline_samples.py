"""A hand-made timeline, and the events of a Chrome trace read back, for the tests of timelines."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tonnage.sim.results.timeline import Timeline

LABELS = {0: "prefill 0", 1: "prefill 1", 2: "decode 0"}
CAPACITY = {0: 100, 1: 100, 2: 400}


def example() -> Timeline:
    """Prefill 0 works twice, prefill 1 never; decode 0 grows, then shares a step with a prompt."""
    timeline = Timeline()
    timeline.add(0, 0.0, 0.100, 2, 0, 3, 4096, 5, 30)
    timeline.add(2, 0.050, 0.250, 4, 8, 0, 0, 1, 200)
    timeline.add(2, 0.250, 0.300, 1, 8, 0, 0, 0, 210)  # the same batch goes on
    timeline.add(2, 0.300, 0.400, 2, 7, 0, 0, 0, 180)
    timeline.add(0, 0.350, 0.400, 1, 0, 1, 512, 0, 10)
    timeline.add(2, 0.400, 0.480, 1, 7, 2, 600, 0, 240)
    return timeline


def of_kind(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """Return the events of one type."""
    return [event for event in events if event["ph"] == kind]


def counters_of(events: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Return every counter's times in microseconds and values."""
    series = defaultdict(list)
    for event in of_kind(events, "C"):
        (value,) = event["args"].values()
        series[event["name"]].append((event["ts"], value))
    return dict(series)


def nanoseconds(time_us: float) -> int:
    """Round as Perfetto does when it reads a number of microseconds."""
    return round(time_us * 1000)
