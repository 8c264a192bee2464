"""The Chrome trace of a timeline, read back: names, steps, counters, and that it adds up."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sim.engine.harness import colocated, poisson_requests
from tests.timeline_samples import CAPACITY, LABELS, counters_of, example, nanoseconds, of_kind
from tonnage.chrome_trace import chrome_trace
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.results.timeline import Timeline
from tonnage.sim.serving.policy import VLLM
from tonnage.sim.traffic.loads import OpenLoad


def events_of(timeline: Timeline) -> list[dict[str, Any]]:
    """Return the events of the trace, read back as any reader does."""
    trace = json.loads("".join(chrome_trace(timeline, LABELS, CAPACITY)))
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def test_pools_are_processes_and_instances_threads_also_those_that_never_ran() -> None:
    metadata = of_kind(events_of(example()), "M")
    named = {
        (event["name"], event["pid"], event["tid"]): next(iter(event["args"].values()))
        for event in metadata
    }
    assert named == {
        ("process_name", 1, 1): "prefill",
        ("process_name", 2, 2): "decode",
        ("process_sort_index", 1, 1): 1,
        ("process_sort_index", 2, 2): 2,
        ("thread_name", 1, 1000): "prefill 0",
        ("thread_name", 1, 2000): "prefill 1",
        ("thread_name", 2, 3000): "decode 0",
        ("thread_sort_index", 1, 1000): 1000,
        ("thread_sort_index", 1, 2000): 2000,
        ("thread_sort_index", 2, 3000): 3000,
    }


def test_a_segment_is_a_complete_event_and_one_batch_size_in_a_row_is_one() -> None:
    slices = of_kind(events_of(example()), "X")
    rows = [
        (
            event["tid"],
            event["name"],
            event["ts"],
            event["dur"],
            event["args"]["steps"],
            event["args"]["decode_requests"],
            event["args"]["prompt_tokens"],
            event["args"]["mean_step_ms"],
        )
        for event in slices
    ]
    assert rows == [
        (1000, "prefill", 0.0, 100_000.0, 2, 0, 4096, 50.0),
        (3000, "decode", 50_000.0, 250_000.0, 5, 8, 0, 50.0),  # two segments of batch 8
        (3000, "decode", 300_000.0, 100_000.0, 2, 7, 0, 50.0),
        (1000, "prefill", 350_000.0, 50_000.0, 1, 0, 512, 50.0),
        (3000, "mixed", 400_000.0, 80_000.0, 1, 7, 600, 80.0),
    ]


def test_equal_batches_that_do_not_touch_stay_apart() -> None:
    timeline = Timeline()
    timeline.add(2, 0.0, 0.1, 4, 8, 0, 0, 0, 10)
    timeline.add(2, 0.2, 0.3, 4, 8, 0, 0, 0, 10)
    assert [event["ts"] for event in of_kind(events_of(timeline), "X")] == [0.0, 200_000.0]


def test_micro_batches_under_way_together_have_a_thread_each() -> None:
    timeline = Timeline()
    for index in range(4):  # each begins in the middle of the one before
        timeline.add(2, 0.1 * index, 0.1 * index + 0.2, 1, 8 + index, 0, 0, 0, 40)
    events = events_of(timeline)
    threads = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert threads == {
        "prefill 0": 1000,
        "prefill 1": 2000,
        "decode 0, 1 under way": 3000,
        "decode 0, 2 under way": 3001,
    }
    assert [event["tid"] for event in of_kind(events, "X")] == [3000, 3001, 3000, 3001]
    running = [8, 17, 19, 21, 11, 0]
    assert [value for _, value in counters_of(events)["decode 0 running"]] == running


def test_counters_change_where_the_state_does_and_are_zero_when_idle() -> None:
    series = counters_of(events_of(example()))
    assert series["decode 0 running"] == [(50_000, 8), (300_000, 7), (400_000, 9), (480_000, 0)]
    assert series["decode 0 waiting"] == [(50_000, 1), (250_000, 0)]
    assert series["decode 0 KV"] == [
        (50_000, 50.0),
        (250_000, 52.5),
        (300_000, 45.0),
        (400_000, 60.0),
        (480_000, 0.0),
    ]
    assert series["prefill 0 running"] == [(0, 3), (100_000, 0), (350_000, 1), (400_000, 0)]
    assert "prefill 1 running" not in series


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Segments of the three instances, touching or apart, one or two under way, on no grid."""
    timeline = Timeline()
    for instance in draw(st.lists(st.sampled_from(list(LABELS)), max_size=4)):
        time_s = draw(st.sampled_from([0.0, 1 / 3, 5000.1]))
        for _ in range(draw(st.integers(1, 8))):
            start_s = time_s + draw(st.sampled_from([0.0, 0.0, 1e-9, 0.3]))
            time_s = start_s + draw(st.floats(1e-6, 0.5))
            decode, prompt = draw(st.sampled_from([(8, 0), (8, 0), (9, 0), (0, 3), (8, 2)]))
            tokens = draw(st.integers(1, 4096)) if prompt else 0
            steps, waiting = draw(st.integers(1, 64)), draw(st.integers(0, 3))
            pages = draw(st.integers(0, CAPACITY[instance]))
            timeline.add(instance, start_s, time_s, steps, decode, prompt, tokens, waiting, pages)
    return timeline


@given(timelines())
def test_a_trace_read_back_is_sorted_without_overlap_and_adds_up(timeline: Timeline) -> None:
    events, frame = events_of(timeline), timeline.frame()
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)
    slices = of_kind(events, "X")
    by_thread: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in slices:
        start, duration = nanoseconds(event["ts"]), nanoseconds(event["dur"])
        assert duration >= 0
        by_thread[event["tid"]].append((start, start + duration))
    for spans in by_thread.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    for name in ("steps", "prompt_tokens"):
        assert sum(event["args"][name] for event in slices) == frame[name].sum()
    busy_s = sum(nanoseconds(event["dur"]) for event in slices) / 1e9
    assert busy_s == pytest.approx((frame["end_s"] - frame["start_s"]).sum(), abs=1e-9 * len(frame))
    decoded = sum(event["args"]["steps"] * event["args"]["decode_requests"] for event in slices)
    assert decoded == (frame["steps"] * frame["decode_requests"]).sum()
    for name, values in counters_of(events).items():
        assert all(value >= 0 for _, value in values)
        assert values[-1][1] == 0
        assert all(one != other for (_, one), (_, other) in pairwise(values))
        if name.endswith("KV"):
            assert all(value <= 100 for _, value in values)


@given(timelines())
def test_counters_hold_the_state_at_every_instant(timeline: Timeline) -> None:
    series, frame = counters_of(events_of(timeline)), timeline.frame()
    instants = sorted({*frame["start_s"], *frame["end_s"]})
    between = [(one + other) / 2 for one, other in pairwise(instants) if other - one > 1e-8]
    for state in timeline.at(between).itertuples():
        label, capacity = LABELS[state.instance], CAPACITY[state.instance]
        expected = {
            "running": state.running_requests,
            "waiting": state.waiting_requests,
            "KV": pytest.approx(100 * state.used_pages / capacity, abs=0.0501),
        }
        for name, value in expected.items():
            before = [held for ts, held in series[f"{label} {name}"] if ts <= state.time_s * 1e6]
            assert (before[-1] if before else 0) == value


def test_an_empty_timeline_is_a_trace_of_names() -> None:
    assert {event["ph"] for event in events_of(Timeline())} == {"M"}


def test_micro_batches_of_a_pipeline_are_drawn_beside_each_other() -> None:
    timeline = Timeline()
    load = OpenLoad(poisson_requests(60, 8.0, 500, 60))
    simulate(colocated(policy=VLLM, stages=2), load, timeline=timeline)
    labels, capacity = {0: "serve 0"}, {0: 1_000_000}
    events = json.loads("".join(chrome_trace(timeline, labels, capacity)))["traceEvents"]
    by_thread: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for event in of_kind(events, "X"):
        start = nanoseconds(event["ts"])
        by_thread[event["tid"]].append((start, start + nanoseconds(event["dur"])))
    assert len(by_thread) == 2
    for spans in by_thread.values():
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
