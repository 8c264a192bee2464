"""The timeline of segments: rows, states at instants, and means over windows."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.sim.domain import BadInputError
from tonnage.sim.results.timeline import Timeline

COUNTS = ("decode_requests", "prompt_requests", "waiting_requests", "used_pages")
Row = tuple[int, float, float, int, int, int, int, int, int]

# Two instances: 0 prefills twice with a pause, 1 decodes, then decodes beside a prompt chunk.
SEGMENTS: list[Row] = [
    (0, 0.0, 1.0, 2, 0, 3, 4096, 5, 30),
    (1, 0.5, 2.5, 4, 8, 0, 0, 1, 70),
    (0, 2.0, 2.5, 1, 0, 1, 512, 0, 10),
    (1, 2.5, 3.0, 1, 8, 2, 600, 0, 90),
]


def timeline_of(rows: list[Row]) -> Timeline:
    """Return a timeline of these segments."""
    timeline = Timeline()
    for row in rows:
        timeline.add(*row)
    return timeline


@st.composite
def rows_of_instances(draw: st.DrawFn) -> list[Row]:
    """Segments of up to three instances, one or two under way at a time, in order of their end."""
    rows: list[Row] = []
    for instance in draw(st.lists(st.integers(0, 9), max_size=3, unique=True)):
        for _ in range(draw(st.integers(1, 2))):
            time_s = 0.0
            for _ in range(draw(st.integers(0, 5))):
                start_s = time_s + draw(st.sampled_from([0.0, 0.0, 0.25, 1.7]))
                time_s = start_s + draw(st.floats(1e-6, 3.0))
                counts = [draw(st.integers(0, 50)) for _ in range(6)]
                rows.append((instance, start_s, time_s, *counts))
    return sorted(rows, key=lambda row: row[2])


def state_by_search(rows: list[Row], instance: int, time_s: float) -> dict[str, int]:
    """Return an instance's state by looking at every segment."""
    own = [row for row in rows if row[0] == instance and row[1] <= time_s]
    under_way = [row for row in own if time_s < row[2]]
    if not under_way:
        return dict.fromkeys(("running_requests", *COUNTS), 0)
    latest = max(own, key=lambda row: (row[1], rows.index(row)))
    decode, prompt = (sum(row[column] for row in under_way) for column in (4, 5))
    counts = (decode + prompt, decode, prompt, latest[7], latest[8])
    return dict(zip(("running_requests", *COUNTS), counts, strict=True))


# --- rows ---------------------------------------------------------------------------------------


def test_a_row_per_segment_in_order_of_start_with_its_phase() -> None:
    frame = timeline_of(SEGMENTS).frame()
    assert list(frame.columns) == [
        "instance",
        "start_s",
        "end_s",
        "steps",
        "decode_requests",
        "prompt_requests",
        "prompt_tokens",
        "waiting_requests",
        "used_pages",
        "phase",
    ]
    assert list(frame["phase"]) == ["prefill", "decode", "prefill", "mixed"]
    rows = list(frame.drop(columns="phase").itertuples(index=False, name=None))
    assert rows == SEGMENTS


def test_rows_added_late_are_sorted_in() -> None:
    assert timeline_of(SEGMENTS[::-1]).frame().equals(timeline_of(SEGMENTS).frame())


def test_many_segments_take_44_bytes_each_and_keep_their_values() -> None:
    timeline = Timeline()
    for index in range(20_000):
        timeline.add(index % 3, float(index), index + 1.0, 1, index, 0, 0, 2 * index, 7)
        if index == 9_000:
            assert len(timeline.frame()) == len(timeline) == 9_001  # reading does not end adding
    columns = timeline.columns()
    assert sum(values.nbytes for values in columns.values()) == 44 * 20_000
    frame = timeline.frame()
    assert frame["decode_requests"].tolist() == list(range(20_000))
    assert frame["waiting_requests"].sum() == 2 * sum(range(20_000))


def test_products_of_a_frame_do_not_overflow() -> None:
    frame = timeline_of([(0, 0.0, 1.0, 4096, 10**6, 0, 0, 0, 0)]).frame()
    assert (frame["steps"] * frame["decode_requests"]).item() == 4096 * 10**6


def test_no_segments_are_an_empty_frame() -> None:
    timeline = Timeline()
    assert len(timeline) == len(timeline.frame()) == 0
    assert "phase" in timeline.frame()
    assert list(timeline.at([0.0, 1.0])["running_requests"]) == []
    assert list(timeline.averages(1.0)["busy_share"]) == []


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ((0, 1.0, 0.5, 1, 1, 0, 0, 0, 0), "ends before it starts"),
        ((0, float("nan"), 0.5, 1, 1, 0, 0, 0, 0), "ends before it starts"),
        ((0, 0.0, 0.5, 1, 1, 0, 0, 0, -1), "negative used_pages"),
        ((0, 0.0, 0.5, -1, 1, 0, 0, 0, 0), "negative steps"),
    ],
)
def test_a_segment_that_cannot_be_is_refused(row: Row, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        timeline_of([row]).frame()


def test_an_end_that_rounding_has_put_past_the_next_start_is_no_overlap() -> None:
    times = [0.0, 0.1, 0.2, 0.3, 0.4]
    timeline = Timeline()
    for start_s in times:
        timeline.add(0, start_s, start_s + 0.1, 1, 4, 0, 0, 0, 0)
    assert 0.2 + 0.1 > 0.3  # by a rounding, which the frame keeps
    assert timeline.averages(0.5)["running_requests"].item() == pytest.approx(4.0, rel=1e-12)


# --- states -------------------------------------------------------------------------------------


def test_states_at_instants_by_hand() -> None:
    states = timeline_of(SEGMENTS).at([0.25, 1.0, 2.5, 3.0])
    table = {
        # (time, instance): running, decode, prompt, waiting, pages
        (0.25, 0): (3, 0, 3, 5, 30),
        (0.25, 1): (0, 0, 0, 0, 0),  # not yet begun
        (1.0, 0): (0, 0, 0, 0, 0),  # its segment has just ended
        (1.0, 1): (8, 8, 0, 1, 70),
        (2.5, 0): (0, 0, 0, 0, 0),
        (2.5, 1): (10, 8, 2, 0, 90),  # the segment that starts decides
        (3.0, 0): (0, 0, 0, 0, 0),
        (3.0, 1): (0, 0, 0, 0, 0),
    }
    rows = states.itertuples(index=False, name=None)
    assert {(time, instance): counts for time, instance, *counts in rows} == {
        key: list(counts) for key, counts in table.items()
    }


@given(rows_of_instances(), st.lists(st.floats(0, 20), max_size=8))
def test_states_are_those_of_the_segment_around_the_instant(
    rows: list[Row], times: list[float]
) -> None:
    instants = [*times, *(row[1] for row in rows), *(row[2] for row in rows)]
    states = timeline_of(rows).at(instants)
    expected = [
        {"time_s": time, "instance": instance, **state_by_search(rows, instance, time)}
        for time in instants
        for instance in sorted({row[0] for row in rows})
    ]
    assert states.to_dict("records") == expected


def test_micro_batches_under_way_together_add_up_and_share_queue_and_pages() -> None:
    timeline = timeline_of(
        [(3, 0.0, 2.0, 1, 8, 0, 0, 4, 100), (3, 1.0, 3.0, 1, 6, 1, 256, 2, 120)],
    )
    states = timeline.at([0.5, 1.5, 2.5, 3.5])
    assert states["running_requests"].tolist() == [8, 15, 7, 0]
    assert states["waiting_requests"].tolist() == [4, 2, 2, 0]
    assert states["used_pages"].tolist() == [100, 120, 120, 0]
    means = timeline.averages(4.0, until_s=4.0)
    assert means["busy_share"].item() == pytest.approx(0.75)  # not 2 + 2 of 4 s
    assert means["running_requests"].item() == pytest.approx((8 * 2 + 7 * 2) / 4)
    assert means["used_pages"].item() == pytest.approx((100 + 120 * 2) / 4)


# --- means --------------------------------------------------------------------------------------


def test_means_over_windows_by_hand() -> None:
    means = timeline_of(SEGMENTS).averages(2.0)
    assert list(means["start_s"]) == [0.0, 0.0, 2.0, 2.0]
    assert list(means["end_s"]) == [2.0, 2.0, 3.0, 3.0]  # the last window ends with the run
    assert list(means["instance"]) == [0, 1, 0, 1]
    assert means["busy_share"].tolist() == pytest.approx([0.5, 0.75, 0.5, 1.0])
    # instance 1: 8 for 1.5 of 2 s; then 8 for half and 10 for half of the last second
    assert means["running_requests"].tolist() == pytest.approx([1.5, 6.0, 0.5, 9.0])
    assert means["waiting_requests"].tolist() == pytest.approx([2.5, 0.75, 0.0, 0.5])
    assert means["used_pages"].tolist() == pytest.approx([15.0, 52.5, 5.0, 80.0])


def test_windows_can_reach_beyond_the_last_segment() -> None:
    means = timeline_of(SEGMENTS).averages(3.0, until_s=6.0)
    assert means["used_pages"].tolist()[2:] == [0.0, 0.0]
    assert means["busy_share"].tolist()[2:] == [0.0, 0.0]


@pytest.mark.parametrize("window_s", [0.0, -1.0, float("nan"), float("inf")])
def test_a_window_that_is_not_positive_is_refused(window_s: float) -> None:
    with pytest.raises(BadInputError, match="window_s"):
        timeline_of(SEGMENTS).averages(window_s)


@given(rows_of_instances(), st.floats(0.05, 5.0), st.none() | st.floats(0.5, 30.0))
def test_means_are_states_added_up(rows: list[Row], window_s: float, until_s: float | None) -> None:
    means = timeline_of(rows).averages(window_s, until_s)
    end_s = max((row[2] for row in rows), default=0.0) if until_s is None else until_s
    instances = sorted({row[0] for row in rows})
    windows = means.drop_duplicates("start_s")[["start_s", "end_s"]].to_numpy().tolist()
    if rows:
        assert windows[0][0] == 0.0
        assert windows[-1][1] == end_s
        assert all(end == start for (_, end), (start, _) in pairwise(windows))
        assert all(end - start == pytest.approx(window_s) for start, end in windows[:-1])
        assert 0 < windows[-1][1] - windows[-1][0] <= window_s * (1 + 1e-6)
    brute = [
        mean_by_search(rows, instance, start, end)
        for start, end in windows
        for instance in instances
    ]
    got = means[["busy_share", "running_requests", *COUNTS]].to_numpy(dtype=float)
    assert got.shape == (len(brute), 6)
    np.testing.assert_allclose(got, np.array(brute).reshape(-1, 6), rtol=1e-9, atol=1e-8)


def mean_by_search(rows: list[Row], instance: int, start_s: float, end_s: float) -> list[float]:
    """Return busy share, running, and the four counts, adding up the states one by one."""
    changes = {time for row in rows for time in row[1:3] if start_s < time < end_s}
    sums = np.zeros(6)
    for from_s, to_s in pairwise(sorted({start_s, end_s, *changes})):
        own = [row for row in rows if row[0] == instance and row[1] <= from_s < row[2]]
        state = state_by_search(rows, instance, from_s)
        sums += (to_s - from_s) * np.array([bool(own), *state.values()])
    return list(sums / (end_s - start_s))


def test_one_window_over_all_is_the_mean_of_the_frame() -> None:
    rng = np.random.default_rng(0)
    timeline, time_s = Timeline(), 0.0
    for _ in range(10_000):
        start_s = time_s + float(rng.choice([0.0, 0.01]))
        time_s = start_s + float(rng.exponential(0.02))
        timeline.add(0, start_s, time_s, 1, int(rng.integers(1, 200)), 0, 0, 0, 5)
    frame: pd.DataFrame = timeline.frame()
    lengths: Any = frame["end_s"] - frame["start_s"]
    whole = timeline.averages(time_s)
    assert whole["busy_share"].item() == pytest.approx(lengths.sum() / time_s, rel=1e-12)
    expected = (lengths * frame["decode_requests"]).sum() / time_s
    assert whole["running_requests"].item() == pytest.approx(expected, rel=1e-12)
    fine = timeline.averages(time_s / 77)
    weights = fine["end_s"] - fine["start_s"]
    assert (fine["running_requests"] * weights).sum() / time_s == pytest.approx(expected)
