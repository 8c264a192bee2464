"""Results of other tools: one run in all their shapes reads the same, in our definitions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.sim.results.tool_files import (
    ANSWER,
    E2E_S,
    OUTPUT_PER_S,
    PROMPT,
    REQUESTS,
    TOOLS,
    TPOT_S,
    TTFT_S,
    USERS,
    aiperf,
    guidellm,
    inference_perf,
    sglang_serving,
    vllm_serve,
    write,
)

from tonnage.sim.domain import BadInputError
from tonnage.sim.results.other_tools.read import read_results

TOOL = pytest.mark.parametrize("tool", TOOLS)


@TOOL
def test_one_run_reads_the_same_whatever_tool_wrote_it(tmp_path: Path, tool: str) -> None:
    (point,) = read_results(write(tmp_path, TOOLS[tool]()))
    assert point.tool == tool
    assert (point.concurrency, point.rate_per_s) == (USERS, None)
    wanted = {
        "latency.ttft_s.mean": TTFT_S,
        "latency.ttft_s.p50": TTFT_S,
        "latency.tpot_s.mean": TPOT_S,
        "latency.e2e_s.mean": E2E_S,
        "throughput.output_tokens_per_s": OUTPUT_PER_S,
    }
    assert {name: point.figures[name] for name in wanted} == pytest.approx(wanted)
    lengths = (point.completed, point.input_tokens, point.output_tokens)
    assert lengths == pytest.approx((REQUESTS, PROMPT, ANSWER))


@TOOL
def test_definitions_with_the_first_token_in_them_are_left_out(tmp_path: Path, tool: str) -> None:
    """The whole latency over the output tokens is 11.9 ms here; TPOT is 10."""
    (point,) = read_results(write(tmp_path, TOOLS[tool]()))
    with_first = E2E_S / ANSWER
    assert all(value != pytest.approx(with_first) for value in point.figures.values())


def test_end_to_end_is_the_first_token_and_the_gaps_after_it() -> None:
    assert pytest.approx(TTFT_S + (ANSWER - 1) * TPOT_S) == E2E_S


def test_lines_of_a_jsonl_are_points(tmp_path: Path) -> None:
    lines = [sglang_serving() | {"max_concurrency": users} for users in (1, 8)]
    path = tmp_path / "bench.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert [point.concurrency for point in read_results(path)] == [1, 8]


@pytest.mark.parametrize(
    ("asked", "load"),
    [
        ({"request_rate": 2.5, "max_concurrency": None}, (None, 2.5)),
        ({"request_rate": 2.5, "max_concurrency": 16}, (None, 2.5)),
        ({"request_rate": "inf", "max_concurrency": None}, (REQUESTS, None)),
    ],
)
def test_loads_of_the_engines_clients(
    tmp_path: Path, asked: dict[str, Any], load: tuple[Any, Any]
) -> None:
    (point,) = read_results(write(tmp_path, vllm_serve() | asked))
    assert (point.concurrency, point.rate_per_s) == load


@pytest.mark.parametrize(
    ("strategy", "load"),
    [
        ({"type_": "constant", "rate": 3.0}, (None, 3.0)),
        ({"type_": "poisson", "rate": 3.0}, (None, 3.0)),
        ({"type_": "synchronous"}, (1, None)),
        ({"type_": "throughput", "max_concurrency": 64}, (64, None)),
        ({"type_": "throughput"}, (None, None)),
    ],
)
def test_strategies_of_guidellm(
    tmp_path: Path, strategy: dict[str, Any], load: tuple[Any, Any]
) -> None:
    report = guidellm()
    report["benchmarks"][0]["config"]["strategy"] = strategy
    (point,) = read_results(write(tmp_path, report))
    assert (point.concurrency, point.rate_per_s) == load


def test_a_sweep_of_aiperf_says_its_own_point(tmp_path: Path) -> None:
    export = aiperf()
    export["run_info"] = {"variation_values": {"phases.profiling.concurrency": 40}}
    (point,) = read_results(write(tmp_path, export))
    assert point.concurrency == 40
    export = aiperf() | {"input_config": {"loadgen": {"request_rate": 7.0}}}
    (point,) = read_results(write(tmp_path, export))
    assert (point.concurrency, point.rate_per_s) == (None, 7.0)


def test_stages_of_inference_perf_are_the_points_of_a_folder(tmp_path: Path) -> None:
    for index, rate in enumerate((1.0, 4.0)):
        report = inference_perf()
        report["load_summary"] = {"requested_rate": rate, "count": 10}
        write(tmp_path, report, f"stage_{index}_lifecycle_metrics.json")
    assert [point.rate_per_s for point in read_results(tmp_path)] == [1.0, 4.0]


def test_requests_that_failed_have_no_first_token(tmp_path: Path) -> None:
    data = vllm_serve() | {"ttfts": [0.0, 0.1, 0.2, 0.3]}
    del data["median_ttft_ms"]
    (point,) = read_results(write(tmp_path, data))
    assert point.figures["latency.ttft_s.p50"] == pytest.approx(0.2)


def _without(data: dict[str, Any], *way: str) -> dict[str, Any]:
    inner = data
    for name in way[:-1]:
        inner = inner[name]
    del inner[way[-1]]
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_without(vllm_serve(), "output_throughput"), "output_throughput: is missing"),
        (vllm_serve() | {"mean_ttft_ms": "fast"}, "mean_ttft_ms: 'fast' is not a number"),
        (vllm_serve() | {"mean_ttft_ms": True}, "mean_ttft_ms: True is not a number"),
        (guidellm() | {"benchmarks": []}, "benchmarks: must be a list with something in it"),
        (_without(aiperf(), "time_to_first_token"), "time_to_first_token: is missing"),
        (
            aiperf() | {"request_latency": {"unit": "fortnights", "avg": 1.0}},
            "request_latency: unit: 'fortnights' is not one of ns, us, ms, s, sec, seconds",
        ),
        (
            _without(inference_perf(), "successes", "latency", "time_to_first_token"),
            "successes: latency: time_to_first_token: is missing",
        ),
        ({"some": "thing"}, "is no result of sglang.bench_serving, vllm bench serve, guidellm"),
    ],
)
def test_a_wrong_file_is_refused_with_file_and_field(
    tmp_path: Path, data: dict[str, Any], message: str
) -> None:
    path = write(tmp_path, data)
    with pytest.raises(BadInputError) as refused:
        read_results(path)
    assert str(path) in str(refused.value)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "is empty"), ("[1]", "must be a JSON object"), ('{"a": 1}\nnot json', "line 2")],
)
def test_text_that_is_no_result(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(BadInputError, match=message):
        read_results(path)


def test_a_folder_without_stages(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"stage_\*_lifecycle_metrics.json"):
        read_results(tmp_path)
