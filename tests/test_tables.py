"""Renderers: what a table shows of the JSON form, on a terminal and in a pipe."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tonnage.memory_table import Segment, bar_cells, print_memory, segments
from tonnage.output import json_text
from tonnage.tables import print_simulation

GIB = 2.0**30
MEMORY: dict[str, Any] = {
    "checkpoint_bytes_per_gpu": 60 * GIB,
    "weights_bytes_per_gpu": 64 * GIB,
    "weights_by_role": {"attention": 4 * GIB, "routed_expert": 60 * GIB},
    "replicated_bytes_by_role": {"attention": 4 * GIB},
    "activation_bytes_per_gpu": 2 * GIB,
    "graph_bytes_per_gpu": 1 * GIB,
    "reserved_bytes_per_gpu": 13 * GIB,
    "gpu_memory_bytes": 140 * GIB,
    "kv_bytes_per_gpu": 60 * GIB,
    "kv_bytes_per_token": 35_136.0,
    "kv_tokens": 1_800_000,
    "kv_tokens_per_rank": 900_000,
    "max_concurrency": 400,
    "tokens_per_request": 4499,
    "mem_fraction": 0.9,
    "mem_fraction_source": "auto",
}
POINT: dict[str, Any] = {
    "concurrency": 64,
    "rate_per_s": None,
    "gpus": 24,
    "throughput": {"output_tokens_per_s": 2192.0, "output_tokens_per_s_per_gpu": 91.3},
    "latency": {"ttft_s": {"p50": 0.12, "p95": 0.4}, "tpot_s": {"p50": 0.0292, "p95": None}},
    "requests": {"completed": 512, "rejected": 0},
}


def report(**changes: Any) -> dict[str, Any]:
    """Return a report in the form of the JSON output."""
    pool = {"instances": 3, "gpu": None, "tp": 8, "pp": 1, "ep": 8, "attention_dp": 2, "dcp": 1}
    scenario = {
        "name": "mine [v2]",
        "model": "kimi-k2.6",
        "gpu": "h200-sxm",
        "engine": {"name": "sglang", "version": "0.5.23"},
        "pools": {"serve": {**pool, "weights": "native", "kv": "fp8_e4m3"}},
    }
    provenance = {"profile": "h200", "source": "imported", "version": "1", "seed": 3}
    return {
        "scenario": scenario,
        "provenance": {**provenance, "assumptions": ["no speculation"]},
        "memory": {"serve": MEMORY},
        "ceilings": {"memory_concurrency": 1200},
        "points": [{**POINT, **changes}],
    }


def printed(show: Any, runs: dict[str, Any], terminal: bool = False, width: int = 200) -> str:
    """Return what a renderer prints."""
    stream = io.StringIO()
    console = Console(
        file=stream, force_terminal=terminal, width=width, markup=False, highlight=False
    )
    show(console, runs)
    return stream.getvalue()


def test_a_simulation_table_shows_figures_units_and_where_they_are_from() -> None:
    text = printed(print_simulation, {"": report()})
    for part in (
        "mine [v2]: kimi-k2.6, sglang 0.5.23",
        "64 concurrent",
        "tok/s per GPU (of 24)",
        "2,192",
        "120 ms / 400 ms",
        "29.2 ms / -",
        "serve: 3 x 8 h200-sxm (TP8 EP8 DP2), weights native, KV fp8_e4m3",
        "1,800,000 tokens",
        "memory allows 1,200 concurrent requests",
        "Profile h200 (imported); tonnage 1; seed 3",
        "- no speculation",
    ):
        assert part in text
    for absent in ("USD", "SLO", "e2e", "rejected"):
        assert absent not in text


def test_requests_that_do_not_fit_are_shown() -> None:
    text = printed(print_simulation, {"": report(resident_requests=50)})
    assert "64 concurrent (50 held)" in text
    rejected = report(requests={"completed": 500, "rejected": 12})
    assert "rejected" in printed(print_simulation, {"": rejected})


def test_a_pipe_gets_no_lines_and_no_colours() -> None:
    piped = printed(print_simulation, {"": report()})
    assert piped.isascii()
    assert "\x1b" not in piped
    assert "\x1b" in printed(print_simulation, {"": report()}, terminal=True)


def test_a_narrow_terminal_leaves_columns_out_and_says_which() -> None:
    wide = report(slo={"attainment": 0.98}, latency={"itl_s": {"p95": 0.03}, **POINT["latency"]})
    assert "ITL p95" in printed(print_simulation, {"": wide})
    text = printed(print_simulation, {"": wide}, terminal=True, width=90)
    assert "Too narrow for ITL p95, completed" in text
    assert "120 ms / 400 ms" in text


def test_the_memory_bar_adds_up_to_the_gpu() -> None:
    parts = segments(MEMORY)
    assert sum(part.size_bytes for part in parts) == MEMORY["gpu_memory_bytes"]
    text = printed(print_memory, {"": report()})
    bar = next(line for line in text.splitlines() if "[W" in line)
    assert "140.0 GiB per GPU" in bar
    assert bar.index("W") < bar.index("R") < bar.index("A") < bar.index("K") < bar.index(".")
    assert "900,000 per attention rank" in text
    assert "of these replicated: attention 4.0 GiB" in text
    assert "concurrent requests per instance: 400 of 4,499 tokens each" in text


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=6).filter(any))
def test_bar_cells_add_up_and_show_every_part(sizes: list[float]) -> None:
    parts = tuple(Segment("", "x", "", size) for size in sizes)
    cells = bar_cells(parts, 64)
    assert sum(cells) == 64
    total = sum(sizes)
    for size, count in zip(sizes, cells, strict=True):
        assert (count > 0) == (size / total > 0)


def test_json_has_no_number_that_json_lacks() -> None:
    data = {"a": math.nan, "b": [math.inf, 1.5], "c": {"d": (1, 2)}}
    assert json.loads(json_text(data)) == {"a": None, "b": [None, 1.5], "c": {"d": [1, 2]}}


@pytest.mark.parametrize("variant", ["first", "second"])
def test_variants_have_a_column(variant: str) -> None:
    text = printed(print_simulation, {"first": report(), "second": report()})
    assert f"64 concurrent  {variant}" in text
    assert text.count("- no speculation") == 1
