"""A fitted section offers what the trace did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.sim.traffic.session_specs import drawn
from tonnage.scenarios.load import parse_scenario
from tonnage.sim.domain import Request
from tonnage.sim.traffic.blocks import InfiniteCache
from tonnage.sim.traffic.build import build_sessions
from tonnage.sim.traffic.describe import describe
from tonnage.sim.traffic.durations import LogNormalDuration
from tonnage.sim.traffic.fit import duration_section, length_section, traffic_section, zipf_exponent
from tonnage.sim.traffic.lengths import Constant, LogNormal
from tonnage.sim.traffic.sessions import SessionSource
from tonnage.sim.traffic.spec import LoadPoint, TraceSource, TrafficSpec

TRACES = Path(__file__).parents[3] / "scenarios" / "traces"


def spec_of(section: dict[str, Any]) -> TrafficSpec:
    """Read a section as a scenario does."""
    return parse_scenario({"traffic": section}).traffic_spec()


def hit_rate_and_mean_input(sessions: SessionSource) -> tuple[float, float]:
    """Send all turns, session by session, through an endless cache."""
    cache = InfiniteCache()
    hits = blocks = 0
    inputs = []
    for session in sessions:
        ids: tuple[int, ...] = ()
        for turn in session.turns:
            ids = (*ids[: turn.kept_blocks], *turn.new_block_ids)
            tokens = (turn.input_tokens, turn.output_tokens)
            size = session.block_tokens
            reuse = cache.use(Request(0, 0.0, *tokens, None, session.number, ids, size))
            hits, blocks = hits + reuse.hit_blocks, blocks + reuse.blocks
            inputs.append(turn.input_tokens)
    return hits / blocks, float(np.mean(inputs))


def test_sessions_fitted_to_recorded_ones_are_like_them() -> None:
    description = describe(TraceSource(TRACES / "agentic_sample.csv.gz"))
    section = traffic_section(description)
    traffic = spec_of(section)
    hit_rate, mean_input = hit_rate_and_mean_input(
        build_sessions(traffic, LoadPoint(concurrency=1), 1)
    )
    figures = description.figures
    assert hit_rate == pytest.approx(figures["reuse"]["block_hit_rate"], abs=0.02)
    assert mean_input == pytest.approx(figures["input_tokens"]["mean"], rel=0.25)


def test_a_trace_of_drawn_sessions_gives_their_parameters_back(tmp_path: Path) -> None:
    source = drawn(
        count=1500,
        rate_per_s=2.0,
        block_tokens=512,
        shared_prefixes=1,
        shared_prefix_tokens=1024,
        turns=LogNormal.from_median_and_p95(3, 10),
        first_input_tokens=LogNormal.from_median_and_p95(2000, 8000),
        new_input_tokens=LogNormal.from_median_and_p95(600, 2400),
        output_tokens=Constant(64),
        think_time=LogNormalDuration(20.0, 90.0),
    )
    rows = []
    for session in source:
        time_s, ids = session.start_s, ()
        for turn in session.turns:
            ids = (*ids[: turn.kept_blocks], *turn.new_block_ids)
            time_s += turn.think_s
            prompt = -(-turn.input_tokens // 512)
            rows.append((time_s, turn.input_tokens, 64, ids[:prompt]))
    rows.sort(key=lambda row: row[0])
    path = tmp_path / "trace.jsonl"
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = (dict(zip(names, (1e3 * row[0], *row[1:]), strict=True)) for row in rows)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))

    section = traffic_section(describe(TraceSource(path)))
    session_section = section["session"]
    assert section["rate_per_s"] == pytest.approx(1500 / rows[-1][0], rel=0.02)
    # A prompt with no whole block beyond the shared prefix may be taken for a turn of another.
    assert session_section["count"] == pytest.approx(1500, rel=0.02)
    assert session_section["shared_prefix_tokens"] == 1024
    assert session_section["output_tokens"] == 64
    for name, median, p95 in (
        ("turns", 3, 10),
        ("first_input_tokens", 2000, 8000),
        ("new_input_tokens", 600, 2400),
    ):
        assert session_section[name]["median"] == pytest.approx(median, rel=0.1)
        assert session_section[name]["p95"] == pytest.approx(p95, rel=0.15)
    assert float(session_section["think_time"]["median"][:-1]) == pytest.approx(20.0, rel=0.1)
    assert spec_of(section).points() == (LoadPoint(rate_per_s=section["rate_per_s"]),)


def test_a_trace_without_sessions_becomes_a_process_with_its_lengths(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    times_s = np.cumsum(rng.gamma(0.25, 4.0 / 2.0, size=4000))
    lengths = np.rint(rng.lognormal(6.0, 1.0, size=4000)).astype(int) + 1
    path = tmp_path / "trace.csv"
    rows = zip(times_s.tolist(), lengths.tolist(), strict=True)
    path.write_text(
        "arrival_s,input_tokens,output_tokens\n" + "".join(f"{t},{n},7\n" for t, n in rows)
    )
    section = traffic_section(describe(TraceSource(path)))
    assert section["kind"] == "gamma"
    assert section["coefficient_of_variation"] == pytest.approx(2.0, rel=0.1)
    assert section["rate_per_s"] == pytest.approx(2.0, rel=0.1)
    assert section["output_tokens"] == 7
    assert section["requests"] == 4000
    assert spec_of(section).input_tokens.mean() == pytest.approx(lengths.mean(), rel=0.1)


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.5])
def test_the_exponent_of_a_zipf_law_is_found(exponent: float) -> None:
    shares = np.arange(1.0, 51.0) ** -exponent
    counts = np.rint(100_000 * shares / shares.sum()).astype(int).tolist()
    assert zipf_exponent(counts) == pytest.approx(exponent, abs=0.01)
    assert zipf_exponent([7]) == 1.0


def test_distributions_that_are_no_long_tail() -> None:
    assert length_section(pd.Series([5.0] * 9)) == 5
    assert length_section(pd.Series([np.nan, -3.0, 0.0])) == 1
    mostly = pd.Series([4.0] * 99 + [9.0])
    assert length_section(mostly) == {"kind": "uniform", "low": 4, "high": 9}
    assert duration_section(pd.Series([], dtype=float)) == "0s"
    assert duration_section(pd.Series([3.0, 3.0])) == "3s"
    assert duration_section(pd.Series([0.0, 0.0, 0.0, 8.0])) == "2s"
