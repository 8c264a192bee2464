"""`tonnage validate kv` and `validate run`: files in, JSON, tables and a folder out."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sim.results.tool_files import TPOT_S, sglang_serving, vllm_serve, write
from tonnage.cli import main
from tonnage.scenarios.capacity_rows import COLUMNS, read_capacity_rows
from tonnage.sim.domain import BadInputError, ParallelLayout
from tonnage.sim.results.other_tools.vllm_log import read_vllm_log
from tonnage.validate_run import ReplayChoice, gpu_of_log, validate_vllm_logs
from tonnage.validation_summary import Figure, ValidatedRow

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def invoke(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.argv", ["tonnage", *arguments])
        code: object = 0
        try:
            main()
        except SystemExit as ended:
            code = ended.code
        captured = capsys.readouterr()
        return int(str(code or 0)), captured.out, captured.err

    return invoke


def _capacity_file(folder: Path, *rows: dict[str, str]) -> Path:
    path = folder / "kv.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS)
        writer.writeheader()
        for row in rows:
            writer.writerow({**dict.fromkeys(COLUMNS, ""), **row})
    return path


QWEN = {
    "id": "ours-1",
    "framework": "vllm",
    "version": "0.17.0",
    "model": "Qwen3-14B",
    "hf_repo": "Qwen/Qwen3-14B",
    "gpu": "H100",
    "tp": "1",
    "mem_fraction": "0.95",
    "kv_tokens": "297124",
    "kv_bytes_gib_per_gpu": "45.34",
    "max_model_len": "8192",
    "max_concurrency": "36.27",
}


# --- kv -----------------------------------------------------------------------------------------


def test_kv_of_a_fleet(run: Run, tmp_path: Path) -> None:
    kimi = {
        "id": "ours-2",
        "framework": "vllm",
        "model": "Kimi-K2-Thinking",
        "gpu": "H200",
        "tp": "8",
        "kv_tokens": "715072",
        "kv_bytes_gib_per_gpu": "46.8",
    }
    unknown = {"id": "ours-3", "framework": "vllm", "model": "no-such-model"}
    silent = {**QWEN, "id": "ours-4", "mem_fraction": "", "kv_bytes_gib_per_gpu": ""}
    path = _capacity_file(tmp_path, QWEN, kimi, unknown, silent)
    code, out, _ = run("validate", "kv", str(path), "--json", "-")
    assert code == 0
    told = json.loads(out)
    by_id = {row["id"]: row for row in told["rows"]}
    assert by_id["ours-1"]["basis"] == "configuration"
    assert abs(by_id["ours-1"]["kv_tokens"]["error"]) < 0.01
    assert by_id["ours-1"]["max_concurrency"]["measured"] == 36.27
    assert by_id["ours-2"]["basis"] == "printed pool"
    assert by_id["ours-2"]["kv_tokens"]["predicted"] == pytest.approx(715_072, rel=0.001)
    assert by_id["ours-3"]["refused"] == "the model is not in the catalogue"
    assert by_id["ours-4"]["refused"] == "the memory fraction is not stated"
    counts = told["summary"]
    assert (counts["rows"], counts["predicted"], counts["refused"]) == (4, 2, 2)
    assert counts["median_abs_error"] < 0.01
    assert counts["by_attention"]["mla"]["predicted"] == 1


def test_kv_shows_a_table_and_writes_a_folder(run: Run, tmp_path: Path) -> None:
    path, out_folder = _capacity_file(tmp_path, QWEN), tmp_path / "out"
    code, out, _ = run("validate", "kv", str(path), "--out", str(out_folder))
    assert code == 0
    assert "297,124 / 297,2" in out
    assert "1 of 1 rows predicted" in out
    (row,) = csv.DictReader((out_folder / "rows.csv").read_text(encoding="utf-8").splitlines())
    assert float(row["kv_tokens.measured"]) == 297_124
    page = (out_folder / "scatter.html").read_text(encoding="utf-8")
    assert "kv_tokens" in page
    assert json.loads((out_folder / "summary.json").read_text())["summary"]["predicted"] == 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kv_tokens": "many"}, "line 2: kv_tokens: 'many' is not a number above 0"),
        ({"tp": "1.5"}, "line 2: tp: 1.5 is not a whole number"),
        ({"tp": "8", "ep": "3"}, "line 2: ep 3 does not divide tp 8"),
    ],
)
def test_kv_refuses_a_wrong_cell(
    run: Run, tmp_path: Path, changed: dict[str, str], message: str
) -> None:
    path = _capacity_file(tmp_path, QWEN | changed)
    code, _, err = run("validate", "kv", str(path))
    assert code == 2
    assert err.strip() == f"error: {path}: {message}"


def test_data_parallel_servers_of_sglang_are_servers(tmp_path: Path) -> None:
    servers = {**QWEN, "framework": "sglang", "tp": "2", "dp": "2"}
    (row,) = read_capacity_rows(_capacity_file(tmp_path, servers))
    assert row.layout == ParallelLayout(tp=2)
    (row,) = read_capacity_rows(_capacity_file(tmp_path, {**servers, "framework": "vllm"}))
    assert row.layout == ParallelLayout(tp=4, attention_dp=2)


def test_kv_refuses_a_file_without_its_columns(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "kv.csv"
    path.write_text("id,model\n1,x\n")
    code, _, err = run("validate", "kv", str(path))
    assert code == 2
    assert "missing columns: framework, version" in err


# --- a logged run -------------------------------------------------------------------------------

META: dict[str, Any] = {
    "model": "meta-llama/Llama-3.1-8B",
    "vllm_version": "0.19.0",
    "engine_kwargs": {
        "tensor_parallel_size": 1,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "kv_cache_dtype": "auto",
    },
    "kv_cache": {"num_gpu_blocks": 2588, "block_size": 16},
    "hardware": {"device_name": "NVIDIA H100 80GB HBM3"},
}


def _log_folder(folder: Path, meta: dict[str, Any], requests: int = 6) -> Path:
    folder.mkdir()
    (folder / "meta.json").write_text(json.dumps(meta))
    lines = [
        {
            "request_id": f"r-{number}",
            "input_toks": 500,
            "output_toks": 50,
            "arrival_time": 1.7e9 + number,
            "queued_ts": 100.0 + number + 0.001 * number,
            "first_token_ts": 100.1 + number,
            "last_token_ts": 100.1 + number + 0.49,
        }
        for number in range(requests)
    ]
    (folder / "requests.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_clocks_of_a_log_are_put_on_one(tmp_path: Path) -> None:
    log = read_vllm_log(_log_folder(tmp_path / "run", META))
    first = log.requests[0]
    assert first.arrival_s == 0
    assert [one.ttft_s for one in log.requests] == pytest.approx([0.1] * 6, abs=1e-5)
    assert first.tpot_s == pytest.approx(0.01)
    assert first.e2e_s == pytest.approx(0.59)
    assert log.settings.kv_blocks == 2587  # one is the null block


def test_a_log_is_replayed_with_its_settings(run: Run, tmp_path: Path) -> None:
    folder = _log_folder(tmp_path / "run", META)
    code, out, _ = run("validate", "run", str(folder), "--json", "-")
    assert code == 0
    told = json.loads(out)
    assert [row["id"] for row in told["rows"]] == [f"run/r-{number}" for number in range(6)]
    assert {row["gpu"] for row in told["rows"]} == {"h100-sxm"}
    assert "KV: 41,392 tokens, as the engine logged" in told["assumptions"]["run"]
    # Alone on an H100 each request is served as the kernels allow: about 8 ms a token.
    mean = told["summary"]["mean_tpot"]
    assert mean["measured"] == pytest.approx(0.01)
    assert 0.005 < mean["predicted"] < 0.012
    assert told["summary"]["by_run"]["run"]["predicted"] == 6


def test_a_host_that_takes_longer_is_seen_in_every_token(tmp_path: Path) -> None:
    log = read_vllm_log(_log_folder(tmp_path / "run", META))
    slow = ReplayChoice(overrides=("engine.step_overhead=5ms",))
    plain, slower = (validate_vllm_logs([log], choice) for choice in (ReplayChoice(), slow))
    for one, other in zip(plain.rows, slower.rows, strict=True):
        gained = other.figures["tpot"].predicted - one.figures["tpot"].predicted
        assert gained == pytest.approx(5e-3, rel=1e-6)


def test_the_gpu_is_that_of_the_log_or_of_its_folder(tmp_path: Path) -> None:
    nameless = {key: value for key, value in META.items() if key != "hardware"}
    log = read_vllm_log(_log_folder(tmp_path / "RTXPRO6000_Qwen3-32B", nameless))
    assert gpu_of_log(log) == "rtx-pro-6000"
    pcie = META | {"hardware": {"device_name": "NVIDIA H100 PCIe"}}
    with pytest.raises(BadInputError, match="say which with --gpu"):
        gpu_of_log(read_vllm_log(_log_folder(tmp_path / "pcie", pcie)))
    log = read_vllm_log(_log_folder(tmp_path / "friday", nameless))
    with pytest.raises(BadInputError, match="say which with --gpu"):
        gpu_of_log(log)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": None}, "meta.json: model: is missing"),
        ({"model": "some/other-model"}, "'some/other-model' is not in the catalogue"),
        ({"vllm_version": None}, "meta.json: vllm_version: is missing"),
    ],
)
def test_a_log_that_says_too_little(
    run: Run, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    folder = _log_folder(tmp_path / "run", META | changed)
    code, _, err = run("validate", "run", str(folder))
    assert code == 2
    assert message in err


# --- a client's file ----------------------------------------------------------------------------

SCENARIO = """
name: fleet
model: llama-3.1-8b
gpu: h100-sxm
engine: {name: vllm}
traffic: {kind: closed, concurrency: [1], input_tokens: 1000, output_tokens: 101, requests: 120}
pools: {serve: {tp: 1}}
"""


def test_a_file_is_compared_at_its_own_loads(run: Run, tmp_path: Path) -> None:
    scenario = tmp_path / "fleet.yaml"
    scenario.write_text(SCENARIO)
    lines = [sglang_serving() | {"max_concurrency": users} for users in (4, 2)]
    lines.append(sglang_serving() | {"request_rate": 1.0})
    file = tmp_path / "bench.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    arguments = ("validate", "run", str(file), "--scenario", str(scenario), "--json", "-")
    code, out, _ = run(*arguments)
    assert code == 0
    told = json.loads(out)
    four, two, rate = told["rows"]
    assert (four["id"], two["id"]) == ("1: concurrency 4", "2: concurrency 2")
    assert four["tpot"]["measured"] == TPOT_S
    assert two["tpot"]["predicted"] < four["tpot"]["predicted"]
    assert two["throughput"]["predicted"] < four["throughput"]["predicted"]
    assert "interval" in four["tpot"]
    assert rate["refused"].startswith("the file states no concurrency")
    assert told["summary"]["predicted"] == 2
    assert told["summary"]["tpot_mape"] is not None


def test_a_file_needs_a_scenario_and_says_what_wrote_it(run: Run, tmp_path: Path) -> None:
    file = write(tmp_path, vllm_serve())
    code, _, err = run("validate", "run", str(file))
    assert code == 2
    assert "was written by vllm bench serve; say with --scenario what ran" in err


def test_requests_of_other_lengths_are_pointed_out(run: Run, tmp_path: Path) -> None:
    scenario = tmp_path / "fleet.yaml"
    scenario.write_text(SCENARIO.replace("input_tokens: 1000", "input_tokens: 300"))
    file = write(tmp_path, vllm_serve())
    code, out, _ = run("validate", "run", str(file), "--scenario", str(scenario))
    assert code == 0
    assert "measured with prompts of 1,000 tokens, the scenario's have 300" in out


def test_a_path_that_is_not_there(run: Run, tmp_path: Path) -> None:
    code, _, err = run("validate", "run", str(tmp_path / "none"))
    assert code == 2
    assert "there is no such file or folder" in err


# --- sums ---------------------------------------------------------------------------------------


def test_the_plot_leaves_out_what_has_no_logarithm() -> None:
    from tonnage.validation_output import scatter

    rows = [
        ValidatedRow("a", {"model": "m"}, {"kv": Figure(2.0, 1.0)}),
        ValidatedRow("b", {"model": "m"}, {"kv": Figure(2.0, 0.0)}),
        ValidatedRow("c", {"model": "m"}, refused="why"),
    ]
    points, line = scatter(rows, "kv").data
    assert list(points.x) == [2.0]
    assert list(line.y) == [1.0, 2.0]
