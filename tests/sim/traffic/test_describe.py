"""The figures of a trace against counts by hand and by brute force."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from tonnage.sim.traffic.arrivals import GammaArrivals
from tonnage.sim.traffic.describe import describe, dispersion
from tonnage.sim.traffic.spec import TraceSource

TRACES = Path(__file__).parents[3] / "scenarios" / "traces"
RAW_SESSIONS = ("agentic_0001", "agentic_0002", "agentic_0043")


def mooncake(folder: Path, rows: list[tuple[float, int, int, list[int]]]) -> Path:
    """Write a trace of (seconds, input, output, ids)."""
    path = folder / "trace.jsonl"
    lines = (
        {"timestamp": 1e3 * time_s, "input_length": i, "output_length": o, "hash_ids": ids}
        for time_s, i, o, ids in rows
    )
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


# --- published and brute-force hit rates --------------------------------------------------------


def test_an_endless_cache_hits_the_published_share_of_the_mooncake_blocks() -> None:
    path = TRACES / "mooncake_conversation.jsonl.gz"
    found = describe(TraceSource(path)).figures
    assert round(found["reuse"]["block_hit_rate"], 3) == 0.366

    hits = blocks = hit_tokens = tokens = 0
    seen: set[int] = set()
    for line in gzip.decompress(path.read_bytes()).splitlines():
        record = json.loads(line)
        for place, block in enumerate(record["hash_ids"]):
            fill = min(512, record["input_length"] - 512 * place)
            blocks, tokens = blocks + 1, tokens + fill
            if block in seen:
                hits, hit_tokens = hits + 1, hit_tokens + fill
        seen.update(record["hash_ids"])
    assert found["reuse"]["blocks"] == blocks
    assert found["reuse"]["distinct_blocks"] == len(seen)
    assert found["reuse"]["block_hit_rate"] == pytest.approx(hits / blocks, abs=1e-12)
    assert found["reuse"]["first_seen_block_share"] == pytest.approx(len(seen) / blocks)
    assert found["reuse"]["input_token_hit_rate"] == pytest.approx(hit_tokens / tokens, abs=1e-12)
    assert found["requests"] == 12_031
    assert found["input_tokens"]["mean"] == pytest.approx(12_035, abs=0.5)
    assert found["output_tokens"]["mean"] == pytest.approx(343, abs=0.5)
    assert not any("another beginning" in note for note in found["notes"])


@pytest.mark.parametrize("name", RAW_SESSIONS)
def test_an_endless_cache_hits_what_a_count_over_the_raw_session_says(name: str) -> None:
    path = TRACES / f"{name}.json.gz"
    session = json.loads(gzip.decompress(path.read_bytes()))
    prompts = [request["hash_ids"] for request in session["requests"]]
    prefixes: dict[tuple[int, int], int] = {}  # (the prefix without its last block, that block)
    hits = 0
    for ids in prompts:
        known, prefix = len(prefixes), -1
        for block in ids:
            prefix = prefixes.setdefault((prefix, block), len(prefixes))
            hits += prefix < known
    blocks = sum(map(len, prompts))
    reuse = describe(TraceSource(path)).figures["reuse"]
    assert reuse["block_hit_rate"] == pytest.approx(hits / blocks, abs=1e-12)
    tokens = sum(request["in"] for request in session["requests"])
    assert reuse["input_token_hit_rate"] == pytest.approx(64 * hits / tokens, abs=1e-12)


def test_recorded_sessions_hit_what_they_share_with_the_turn_before() -> None:
    path = TRACES / "agentic_sample.csv.gz"
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    header = lines[0].split(",")
    shared, blocks = (header.index(n) for n in ("shared_prefix_blocks_with_prev", "n_blocks"))
    rows = [line.split(",") for line in lines[1:]]
    expected = sum(int(row[shared]) for row in rows) / sum(int(row[blocks]) for row in rows)
    found = describe(TraceSource(path)).figures
    assert found["reuse"]["block_hit_rate"] == pytest.approx(expected, abs=1e-12)
    assert found["rate_per_s"] is None
    assert found["sessions"]["source"] == "recorded"
    assert found["sessions"]["turns"]["mean"] == len(rows) / found["sessions"]["count"]
    assert any("own clock" in note for note in found["notes"])


# --- load ---------------------------------------------------------------------------------------


def test_a_poisson_process_has_variation_and_dispersion_one(tmp_path: Path) -> None:
    for coefficient, expected in ((1.0, 1.0), (2.0, 4.0)):  # the dispersion goes to the square
        process = GammaArrivals(2.0, coefficient)
        blocks_s = list(process.times_s(np.random.default_rng(5), 20_000))
        path = tmp_path / f"{coefficient}.csv"
        lines = (f"{time_s},10,5\n" for block_s in blocks_s for time_s in block_s.tolist())
        path.write_text("arrival_s,input_tokens,output_tokens\n" + "".join(lines))
        found = describe(TraceSource(path)).figures
        assert found["rate_per_s"] == pytest.approx(2.0, rel=0.05)
        assert found["gap_coefficient_of_variation"] == pytest.approx(coefficient, rel=0.05)
        assert found["dispersion_per_minute"] == pytest.approx(expected, rel=0.25)
        assert found["reuse"] is found["sessions"] is None


def test_dispersion_by_hand() -> None:
    # Three whole minutes with 3, 0 and 3 arrivals; the one after 180 s is in no whole minute.
    arrivals_s = np.array([0.0, 1.0, 2.0, 130.0, 131.0, 132.0, 190.0])
    assert dispersion(arrivals_s, 60.0) == pytest.approx(2.0 / 2.0)
    assert dispersion(arrivals_s[:3], 60.0) is None


# --- sessions -----------------------------------------------------------------------------------


def test_sessions_are_told_by_their_blocks(tmp_path: Path) -> None:
    rows = [
        (0.0, 1100, 20, [0, 1, 2]),  # the first of a session
        (1.0, 1100, 20, [0, 3, 4]),  # another one behind the same system prompt
        (10.0, 1200, 30, [0, 1, 5]),  # goes on with the first: its two whole blocks are there
        (12.0, 700, 30, [0, 6]),  # one whole block alone says nothing
        (13.0, 900, 30, [0, 7]),
        (30.0, 1700, 5, [0, 1, 8, 9]),  # goes on with the third line
        (31.0, 1200, 5, [0, 1, 10]),  # begins like it, but that one has been gone on with
    ]
    found = describe(TraceSource(mooncake(tmp_path, rows)))
    frame = found.table.rows
    assert frame["session"].tolist() == [0, 1, 0, 2, 3, 0, 4]
    assert frame["turn"].tolist() == [0, 0, 1, 0, 0, 2, 0]
    assert frame["new_input_tokens"].dropna().tolist() == [80.0, 470.0]
    assert frame["think_s"].dropna().tolist() == [10.0, 20.0]
    sessions = found.figures["sessions"]
    assert (sessions["source"], sessions["count"]) == ("inferred", 5)
    assert sessions["turns"]["max"] == 3


def test_time_kept_and_working_set_by_hand(tmp_path: Path) -> None:
    rows = [(0.0, 1024, 1, [0, 1]), (100.0, 1024, 1, [0, 1]), (1000.0, 512, 1, [0])]
    found = describe(TraceSource(mooncake(tmp_path, rows)))
    kept = found.figures["reuse"]["input_token_hit_rate_if_kept"]
    assert kept["60"] == 0.0
    assert kept["300"] == pytest.approx(1024 / 2560)  # the third comes 900 s after the second
    assert kept["900"] == kept["3600"] == pytest.approx(1536 / 2560)
    assert found.working_set is not None
    times_s = found.working_set.times_s
    assert np.all(found.working_set.seen_tokens == 1024)
    assert np.all(found.working_set.used_again_tokens == np.where(times_s <= 100.0, 1024, 512))


def test_a_coarse_clock_is_pointed_out(tmp_path: Path) -> None:
    rows = [(float(3 * (n // 4)), 100, 5, [n]) for n in range(40)]
    notes = describe(TraceSource(mooncake(tmp_path, rows))).figures["notes"]
    assert any("40 requests have 10 arrival times" in note for note in notes)


def test_a_trace_of_one_request_has_no_rate(tmp_path: Path) -> None:
    found = describe(TraceSource(mooncake(tmp_path, [(5.0, 600, 5, [1, 2])]))).figures
    assert found["rate_per_s"] is found["gap_coefficient_of_variation"] is None
    assert found["reuse"]["block_hit_rate"] == 0.0
