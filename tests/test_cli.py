"""The command: what it prints, writes and returns, and that a mistake ends in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from tonnage import api
from tonnage.cli import main
from tonnage.sim.domain import InfeasibleError


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command left behind."""

    code: int
    output: str
    error: str


@pytest.fixture
def tonnage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command in this process as the entry point does."""

    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["tonnage", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


def small(name: str, *more: str) -> list[str]:
    """Return the arguments of a simulation that takes no time."""
    sets = ["traffic.concurrency=[1, 4]", "traffic.requests=12", "traffic.output_tokens=40"]
    return ["simulate", name, *[part for one in sets for part in ("--set", one)], *more]


# --- what it prints -----------------------------------------------------------------------------


def test_simulate_prints_a_table_with_its_denominator_and_provenance(tonnage: Any) -> None:
    done = tonnage(*small("kimi-k2.6-h200"))
    assert done.code == 0
    assert "tok/s per GPU (of 8)" in done.output
    assert "4 concurrent" in done.output
    assert "TPOT p50 / p95" in done.output
    assert "TTFT" not in done.output  # prefill is not simulated
    assert "Assumptions:" in done.output
    assert "Profile " in done.output


def test_progress_in_a_pipe_is_a_line_per_part(
    tonnage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate = api.simulate

    def reporting(*arguments: Any, progress: Any, **options: Any) -> Any:
        if progress is not None:
            for share in (0.1, 0.2):
                progress("concurrency 1", share)
        return simulate(*arguments, **options)

    monkeypatch.setattr(api, "simulate", reporting)
    assert tonnage(*small("kimi-k2.6-h200")).error == "concurrency 1\n"
    assert tonnage(*small("kimi-k2.6-h200", "--json", "-")).error == ""


def test_json_to_standard_output_is_one_object_and_nothing_else(tonnage: Any) -> None:
    done = tonnage(*small("kimi-k2.6-h200", "--json", "-", "--seed", "7"))
    report = json.loads(done.output)
    assert done.error == ""
    assert report["provenance"]["seed"] == report["scenario"]["seed"] == 7
    assert [point["concurrency"] for point in report["points"]] == [1, 4]
    assert report["memory"]["decode"]["kv_tokens"] > 0


def test_the_same_seed_gives_the_same_json(tonnage: Any) -> None:
    arguments = small("glm-5.2-b200-nvfp4", "--json", "-")
    assert tonnage(*arguments).output == tonnage(*arguments).output


def test_exact_gives_the_same_figures(tonnage: Any) -> None:
    fast = json.loads(tonnage(*small("kimi-k2.6-h200", "--json", "-")).output)
    exact = json.loads(tonnage(*small("kimi-k2.6-h200", "--json", "-", "--exact")).output)
    for one, other in zip(fast["points"], exact["points"], strict=True):
        rates = (point["throughput"]["output_tokens_per_s"] for point in (one, other))
        assert next(rates) == pytest.approx(next(rates), rel=1e-6)


def test_variants_stand_side_by_side(tonnage: Any) -> None:
    sets = ["--set", "traffic.rate_per_s=[1.0]", "--set", "traffic.requests=20"]
    done = tonnage("simulate", "colocated-vs-disaggregated", *sets)
    rows = [line for line in done.output.splitlines() if line.startswith("1 per s")]
    assert [row.split()[3] for row in rows] == ["disaggregated", "colocated"]
    report = json.loads(
        tonnage("simulate", "colocated-vs-disaggregated", *sets, "--json", "-").output
    )
    assert list(report["variants"]) == ["disaggregated", "colocated"]
    assert report["points"] == report["variants"]["disaggregated"]["points"]
    assert list(report["variants"]["colocated"]["memory"]) == ["serve"]


def test_memory_of_a_scenario_and_of_options(tonnage: Any) -> None:
    done = tonnage("memory", "kimi-k2.6-h200")
    assert done.code == 0
    for part in ("weights, sharded", "weights, replicated", "KV cache", "longest single request"):
        assert part in done.output
    assert "(fitted)" in done.output
    options = ["--model", "llama-3.1-8b", "--gpu", "l40s", "--tokens", "4096", "--json", "-"]
    report = json.loads(tonnage("memory", *options).output)
    assert report["memory"]["serve"]["tokens_per_request"] == 4096
    assert report["scenario"]["pools"]["serve"]["tp"] == 1


@pytest.mark.parametrize("kind", ["models", "gpus", "prices", "scenarios"])
def test_list_names_what_ships(tonnage: Any, kind: str) -> None:
    rows = json.loads(tonnage("list", kind, "--json", "-").output)[kind]
    printed = tonnage("list", kind).output
    assert rows
    assert all(row["name"] in printed for row in rows)


@pytest.mark.parametrize("verb", [[], ["simulate"], ["memory"], ["list"], ["quality"]])
def test_help_has_examples(tonnage: Any, verb: list[str]) -> None:
    done = tonnage(*verb, "--help")
    assert done.code == 0
    assert "Examples:" in done.output
    assert "    tonnage " in done.output


def test_version(tonnage: Any) -> None:
    assert tonnage("--version").output.startswith("tonnage ")


# --- what it writes -----------------------------------------------------------------------------


def test_out_writes_summary_points_and_requests(tonnage: Any, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "results"
    done = tonnage(*small("kimi-k2.6-h200", "--out", str(folder)))
    assert done.code == 0
    names = sorted(path.name for path in folder.iterdir())
    assert names == [
        "points.csv",
        "requests_concurrency_1.parquet",
        "requests_concurrency_4.parquet",
        "summary.json",
    ]
    summary = json.loads((folder / "summary.json").read_text())
    points = pd.read_csv(folder / "points.csv")
    rates = [point["throughput"]["output_tokens_per_s"] for point in summary["points"]]
    assert points["throughput.output_tokens_per_s"].tolist() == pytest.approx(rates)
    requests = pd.read_parquet(folder / "requests_concurrency_4.parquet")
    assert len(requests) == summary["points"][1]["requests"]["completed"]


def test_json_to_a_file_prints_the_table_too(tonnage: Any, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = tonnage("memory", "kimi-k2.6-h200", "--json", str(file))
    assert "KV cache" in done.output
    assert json.loads(file.read_text())["memory"]["decode"]["kv_tokens"] > 0
    assert list(tmp_path.iterdir()) == [file]


def test_an_interruption_leaves_nothing_behind(
    tonnage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(frame: pd.DataFrame, path: Path, **_: object) -> None:
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(pd.DataFrame, "to_parquet", interrupted)
    done = tonnage(*small("kimi-k2.6-h200", "--out", str(tmp_path)))
    assert done.code == 130
    assert "Traceback" not in done.error
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written_are_refused_before_the_work(
    tonnage: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "simulate", lambda *_, **__: pytest.fail("the work began"))
    file = tmp_path / "file"
    file.write_text("")
    missing = tonnage(*small("kimi-k2.6-h200", "--json", str(tmp_path / "gone" / "x.json")))
    folder = tonnage(*small("kimi-k2.6-h200", "--json", str(tmp_path)))
    out = tonnage(*small("kimi-k2.6-h200", "--out", str(file / "results")))
    assert [done.code for done in (missing, folder, out)] == [2, 2, 2]
    assert "--json" in missing.error
    assert "is a folder" in folder.error
    assert "--out" in out.error


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["simulate", "kimi-k2.6-h20"], "did you mean 'kimi-k2.6-h200'"),
        (["simulate", "gone.yaml"], "gone.yaml: no such scenario file"),
        (["simulate", "kimi-k2.6-h200", "--set", "pools.decode.tp=7"], "7"),
        (["simulate", "kimi-k2.6-h200", "--set", "pools.decode.tpp=8"], "did you mean 'tp'"),
        (["simulate", "kimi-k2.6-h200", "--set", "model=kimi-k2.66"], "did you mean 'kimi-k2"),
        (["simulate", "kimi-k2.6-h200", "--set", "gpu=h200"], "did you mean 'h200-sxm'"),
        (["simulate", "mooncake-trace", "--set", "traffic.path=gone.jsonl"], "'gone.jsonl'"),
        (["memory"], "give a scenario, or --model"),
        (["memory", "kimi-k2.6-h200", "--model", "glm-5.2"], "not both"),
        (["memory", "--model", "kimi-k2.6", "--tp", "8", "--kv", "fp8"], "pools.serve.kv: 'fp8'"),
        (["memory", "--model", "llama-3.1-8b", "--gpu", "l4"], "did you mean 'l40s'"),
        (["memory", "--model", "llama-3.1-8b", "--tp", "8", "--ep", "3"], "ep 3 does not divide"),
    ],
)
def test_bad_input_is_one_line_and_code_2(
    tonnage: Any, arguments: list[str], expected: str
) -> None:
    done = tonnage(*arguments)
    assert done.code == 2
    assert done.output == ""
    assert done.error.startswith("error: ")
    assert done.error.count("\n") == 1
    assert expected in done.error


@pytest.mark.parametrize("arguments", [["simulat"], ["simulate"], ["list", "cars"], ["--nope"]])
def test_wrong_usage_is_code_2(tonnage: Any, arguments: list[str]) -> None:
    done = tonnage(*arguments)
    assert done.code == 2
    assert "Traceback" not in done.error
    assert "Error: " in done.error


def test_a_truncated_trace_names_file_and_line_and_writes_nothing(
    tonnage: Any, tmp_path: Path
) -> None:
    line = '{"timestamp": 0, "input_length": 100, "output_length": 5}\n'
    (tmp_path / "cut.jsonl").write_text(line * 2 + '{"timestamp": 5, "inp')
    scenario = {"model": "llama-3.1-8b", "traffic": {"kind": "trace", "path": "cut.jsonl"}}
    scenario["pools"] = {"serve": {"tp": 1}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(scenario))
    out = tmp_path / "results"
    done = tonnage("simulate", str(tmp_path / "mine.yaml"), "--out", str(out), "--json", "-")
    assert done.code == 2
    assert done.output == ""
    assert "cut.jsonl: line 3: truncated or invalid JSON" in done.error
    assert not out.exists()


def test_what_does_not_fit_is_code_3(tonnage: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done = tonnage("memory", "--model", "kimi-k2.6", "--gpu", "l40s", "--tp", "8")
    assert done.code == 3
    assert done.error.startswith("error: ")
    assert done.error.count("\n") == 1

    def infeasible(*_: object) -> None:
        raise InfeasibleError("3 GiB are missing")

    monkeypatch.setattr(api, "memory", infeasible)
    done = tonnage("memory", "kimi-k2.6-h200")
    assert (done.code, done.error) == (3, "error: 3 GiB are missing\n")


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = [sys.executable, "-m", "tonnage", "list", "models"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == b""


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['tonnage', '--help']\n"
        "from tonnage.cli import main\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print([name for name in ('pandas', 'simpy', 'pydantic', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
