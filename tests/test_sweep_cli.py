"""The sweep: its grid, its figures, what it keeps, and that one point never costs the others."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import tonnage as package
from tonnage import api
from tonnage.cli import main
from tonnage.scenarios.load import load_scenario
from tonnage.sim.domain import BadInputError
from tonnage.sweep_plan import parse_over, plan_sweep
from tonnage.sweep_run import sweep

TINY = {
    "name": "tiny",
    "model": "llama-3.1-8b",
    "gpu": "h100-sxm",
    "traffic": {
        "kind": "poisson",
        "rate_per_s": 2.0,
        "input_tokens": 200,
        "output_tokens": 10,
        "requests": 8,
    },
    "pools": {"serve": {"tp": 1}},
    "price": {"gpu_hour_usd": 2.0},
}
RATES = ["--over", "traffic.rate_per_s=1,2,4"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command left behind."""

    code: int
    output: str
    error: str


@pytest.fixture
def tonnage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run `tonnage sweep` in this process as the entry point does."""

    def run(*arguments: str | Path) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["tonnage", "sweep", *(str(a) for a in arguments)])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return run


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Return the file of a scenario that takes no time."""
    return written(tmp_path / "tiny.yaml", TINY)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """Return the list of (rate, seed) that are simulated in this process from now on."""
    runs: list[tuple[float, int]] = []
    simulate = api.simulate

    def counting(scenario: Any, **options: Any) -> Any:
        runs.append((scenario.traffic.rate_per_s[0], scenario.seed))
        return simulate(scenario, **options)

    monkeypatch.setattr(api, "simulate", counting)
    return runs


def written(path: Path, data: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(data, sort_keys=False))
    return path


def tables(folder: Path) -> tuple[bytes, bytes]:
    """Return the bytes of both tables."""
    return (folder / "sweep.csv").read_bytes(), (folder / "sweep.parquet").read_bytes()


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "points.jsonl").read_text().splitlines()]


# --- the grid and its figures -------------------------------------------------------------------


def test_two_spawned_workers_fill_the_grid_in_order(
    tonnage: Any, tiny: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "results"
    over = [*RATES, "--over", "pools.serve.kv=bf16,fp8_e4m3"]
    done = tonnage(tiny, *over, "--seeds", "2", "--workers", "2", "--out", out)
    assert done.code == 0
    assert sorted(p.name for p in out.iterdir()) == ["points.jsonl", "sweep.csv", "sweep.parquet"]
    frame = pd.read_parquet(out / "sweep.parquet")
    rates = [1, 1, 1, 1, 2, 2, 2, 2, 4, 4, 4, 4]
    assert frame["traffic.rate_per_s"].tolist() == frame["rate_per_s"].tolist() == rates
    assert frame["pools.serve.kv"].tolist() == ["bf16", "bf16", "fp8_e4m3", "fp8_e4m3"] * 3
    assert frame["seed"].tolist() == [0, 1] * 6
    assert set(frame["status"]) == {"done"}
    assert frame["requests.completed"].tolist() == [8] * 12
    assert frame.columns[:5].tolist() == [*parse_over(over[1::2]), "seed", "status", "message"]
    assert pd.read_csv(out / "sweep.csv")["latency.ttft_s.p95"].tolist() == pytest.approx(
        frame["latency.ttft_s.p95"].tolist()
    )
    assert len(entries(out)) == 12
    assert done.error.splitlines()[0] == "0 of 12 points"
    assert done.error.splitlines()[-1] == "12 of 12 points"


def test_a_row_is_what_simulate_says_with_the_same_overrides(tiny: Path) -> None:
    frame = sweep(tiny, {"traffic.rate_per_s": [3.0], "pools.serve.tp": [2]}, seeds=[5], workers=1)
    same = ["traffic.rate_per_s=3.0", "pools.serve.tp=2", "seed=5"]
    (point,) = api.simulate(load_scenario(tiny, same)).points
    row = frame.iloc[0]
    assert (
        row["throughput.output_tokens_per_s"] == point.figures["throughput"]["output_tokens_per_s"]
    )
    assert row["latency.ttft_s.p95"] == point.figures["latency"]["ttft_s"]["p95"]
    assert row["gpus"] == 2


def test_every_point_of_a_load_is_a_row(tiny: Path) -> None:
    frame = sweep(tiny, {"traffic.rate_per_s": [[1, 2], 4]}, workers=1)
    assert frame["traffic.rate_per_s"].tolist() == ["[1, 2]", "[1, 2]", "4"]
    assert frame["rate_per_s"].tolist() == [1, 2, 4]


def test_a_default_that_follows_from_the_axis_is_taken_anew(tiny: Path) -> None:
    plan = plan_sweep(tiny, {"engine.name": ["sglang", "vllm"]})
    versions = {
        p.scenario.engine_spec().name: p.scenario.engine_spec().version for p in plan.points
    }
    assert versions["sglang"] != versions["vllm"]


def test_variants_are_an_axis_and_what_cannot_exist_is_a_row(tiny: Path, tmp_path: Path) -> None:
    apart = {"pools": {"serve": None, "prefill": {"tp": 1}, "decode": {"tp": 1}}}
    file = written(tmp_path / "two.yaml", {**TINY, "variants": {"together": {}, "apart": apart}})
    frame = sweep(file, {"pools.serve.instances": [1, 2]}, workers=1)
    assert frame["variant"].tolist() == ["together", "together", "apart", "apart"]
    assert frame["status"].tolist() == ["done", "done", "infeasible", "infeasible"]
    assert frame["gpus"].tolist()[:2] == [1, 2]
    assert "--over pools.serve.instances=1" in frame["message"][2]
    assert "serve does prefill and decode itself" in frame["message"][2]
    alone = sweep(load_scenario(file), {"pools.serve.instances": [1, 2]}, workers=1)
    assert alone["gpus"].tolist() == [1, 2]
    assert "variant" not in alone


def test_a_value_that_fits_no_combination_is_refused_but_a_combination_is_a_row(
    tmp_path: Path,
) -> None:
    moe = {**TINY, "model": "qwen3-30b-a3b"}
    file = written(tmp_path / "moe.yaml", moe)
    frame = sweep(file, {"pools.serve.tp": [1, 2], "pools.serve.ep": [1, 2]}, workers=1)
    assert frame["status"].tolist() == ["done", "infeasible", "done", "done"]
    assert "ep 2 does not divide tp 1" in frame["message"][1]
    with pytest.raises(BadInputError, match=r"--over pools\.serve\.ep=3"):
        sweep(file, {"pools.serve.tp": [1, 2], "pools.serve.ep": [1, 3]}, workers=1)


def test_several_seeds_are_a_mean_and_a_half_width(
    tonnage: Any, tiny: Path, tmp_path: Path
) -> None:
    done = tonnage(tiny, "--seeds", "3", "--workers", "1", "--json", tmp_path / "report.json")
    assert done.code == 0
    report = json.loads((tmp_path / "report.json").read_text())
    figures = pd.Series([row["throughput.output_tokens_per_s"] for row in report["rows"]])
    # Student's t for two degrees of freedom: 4.303 (any table of the distribution).
    half = 4.303 * figures.std(ddof=1) / 3**0.5
    assert f"{figures.mean():.1f} ± {half:.1f}" in done.output
    assert "tok/s per GPU (of 1)" in done.output
    assert report["seeds"] == [0, 1, 2]
    assert report["scenario"]["name"] == "tiny"
    assert report["provenance"]["version"]


def test_the_table_shows_the_axes_that_vary(tonnage: Any, tiny: Path) -> None:
    done = tonnage(tiny, "--over", "pools.serve.tp=1,2", "--over", "gpu=h200-sxm", "--workers", "1")
    head, first, second = done.output.splitlines()[1:4]
    assert head.split()[:2] == ["pools.serve.tp", "GPUs"]
    assert "tok/s per GPU (all GPUs)" in head
    assert [row.split()[:2] for row in (first, second)] == [["1", "1"], ["2", "2"]]


def test_json_to_standard_output_is_one_object_and_nothing_else(tonnage: Any, tiny: Path) -> None:
    done = tonnage(tiny, *RATES, "--workers", "1", "--json", "-")
    report = json.loads(done.output)
    assert done.error == ""
    assert [row["rate_per_s"] for row in report["rows"]] == [1, 2, 4]
    assert report["over"] == {"traffic.rate_per_s": [1, 2, 4]}


def test_the_public_name_is_the_function_whatever_was_imported_before() -> None:
    assert package.sweep is sweep
    assert "sweep" in package.__all__


# --- the same bytes -----------------------------------------------------------------------------


class Backwards(Executor):
    """Runs what it got, the last first, once it has `count` tasks."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._tasks: list[tuple[Future[Any], Any, Any]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.append((future, fn, args))
        if len(self._tasks) == self._count:
            threading.Thread(target=self._run).start()
        return future

    def _run(self) -> None:
        for future, fn, args in reversed(self._tasks):
            future.set_result(fn(*args))


def test_neither_workers_nor_the_order_of_completion_change_a_byte(
    tiny: Path, tmp_path: Path
) -> None:
    over = {"traffic.rate_per_s": [1, 2], "pools.serve.tp": [1, 2]}
    sweep(tiny, over, seeds=2, workers=1, folder=tmp_path / "one")
    sweep(tiny, over, seeds=2, workers=2, folder=tmp_path / "two")
    sweep(tiny, over, seeds=2, executor=Backwards(8), folder=tmp_path / "backwards")
    with ThreadPoolExecutor(3) as threads:
        sweep(tiny, over, seeds=2, executor=threads, folder=tmp_path / "threads")
    one = tables(tmp_path / "one")
    assert all(tables(tmp_path / name) == one for name in ("two", "backwards", "threads"))
    keys = [entry["key"] for entry in entries(tmp_path / "one")]
    assert [entry["key"] for entry in entries(tmp_path / "backwards")] == keys[::-1]


# --- what is kept -------------------------------------------------------------------------------


def test_after_an_interruption_the_same_command_goes_on(
    tonnage: Any,
    tiny: Path,
    tmp_path: Path,
    simulated: list[tuple[float, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [tiny, *RATES, "--seeds", "2", "--workers", "1"]
    assert tonnage(*command, "--out", tmp_path / "whole").code == 0
    simulated.clear()

    def pressing(quiet: bool) -> Any:
        return _Pressing()

    out = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        patch.setattr("tonnage.terminal.progress", pressing)
        stopped = tonnage(*command, "--out", out)
    assert stopped.code == 130
    assert stopped.error == (
        f"stopped; finished points are kept in {out}: run the same command to go on\n"
    )
    assert simulated == [(1.0, 0), (1.0, 1)]
    assert [path.name for path in out.iterdir()] == ["points.jsonl"]

    simulated.clear()
    assert tonnage(*command, "--out", out).code == 0
    assert simulated == [(2.0, 0), (2.0, 1), (4.0, 0), (4.0, 1)]
    assert tables(out) == tables(tmp_path / "whole")

    simulated.clear()
    wider = ["--over", "traffic.rate_per_s=4,2,8"]  # points are known whatever the grid
    assert tonnage(tiny, *wider, "--workers", "1", "--out", out).code == 0
    assert simulated == [(8.0, 0)]
    assert pd.read_csv(out / "sweep.csv")["rate_per_s"].tolist() == [4, 2, 8]


class _Pressing:
    """A display of progress that presses Ctrl-C at the second point."""

    def __enter__(self) -> Any:
        def report(text: str, share: float) -> None:
            if text.startswith("2 of"):
                raise KeyboardInterrupt

        return report

    def __exit__(self, *_: object) -> None:
        return None


def test_a_line_cut_short_is_run_again(
    tonnage: Any, tiny: Path, tmp_path: Path, simulated: list[tuple[float, int]]
) -> None:
    command = [tiny, *RATES, "--workers", "1", "--out", tmp_path / "out"]
    assert tonnage(*command).code == 0
    whole = tables(tmp_path / "out")
    points = tmp_path / "out" / "points.jsonl"
    points.write_bytes(points.read_bytes()[:-200])
    simulated.clear()
    assert tonnage(*command).code == 0
    assert simulated == [(4.0, 0)]
    assert tables(tmp_path / "out") == whole
    assert len(entries(tmp_path / "out")) == 3


def test_fresh_starts_over(
    tonnage: Any, tiny: Path, tmp_path: Path, simulated: list[tuple[float, int]]
) -> None:
    command = [tiny, *RATES, "--workers", "1", "--out", tmp_path / "out"]
    assert tonnage(*command).code == tonnage(*command).code == 0
    assert len(simulated) == 3
    assert tonnage(*command, "--fresh").code == 0
    assert len(simulated) == 6
    assert len(entries(tmp_path / "out")) == 3


def test_an_edited_trace_is_another_point(tmp_path: Path) -> None:
    trace = tmp_path / "mine.csv"
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,100,5\n1,100,5\n")
    traffic = {"kind": "trace", "path": "mine.csv"}
    file = written(tmp_path / "mine.yaml", {**TINY, "traffic": traffic})
    (before,) = plan_sweep(file, {}).points
    assert plan_sweep(file, {}).points[0].key == before.key
    trace.write_text("arrival_s,input_tokens,output_tokens\n0,100,5\n2,100,5\n")
    assert plan_sweep(file, {}).points[0].key != before.key


def test_on_result_hears_of_a_point_that_is_already_kept(tiny: Path, tmp_path: Path) -> None:
    kept: list[int] = []

    def count(result: Any) -> None:
        assert result.status == "done"
        kept.append(len(entries(tmp_path / "out")))

    over = {"traffic.rate_per_s": [1, 2]}
    sweep(tiny, over, workers=1, folder=tmp_path / "out", on_result=count)
    assert kept == [1, 2]


# --- points that bring nothing ------------------------------------------------------------------


@pytest.fixture
def broken_at_2(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Let the simulation of rate 2 divide by zero, until the patch is undone."""
    simulate = api.simulate

    def broken(scenario: Any, **options: Any) -> Any:
        if scenario.traffic.rate_per_s == (2.0,):
            raise ZeroDivisionError("division by zero")
        return simulate(scenario, **options)

    with monkeypatch.context() as patch:
        patch.setattr(api, "simulate", broken)
        yield patch


def test_a_failed_point_is_a_row_and_is_tried_again(
    tonnage: Any, tiny: Path, tmp_path: Path, broken_at_2: pytest.MonkeyPatch
) -> None:
    command = [tiny, *RATES, "--workers", "1", "--out", tmp_path / "out"]
    done = tonnage(*command)
    assert done.code == 1
    message = done.error.splitlines()[-1]
    assert message.startswith("error: 1 of 3 points failed; run the same command to try them again")
    assert "traffic.rate_per_s=2 seed=0: ZeroDivisionError: division by zero" in message
    assert "Traceback" not in done.error
    frame = pd.read_csv(tmp_path / "out" / "sweep.csv")
    assert frame["status"].tolist() == ["done", "failed", "done"]
    assert frame["requests.completed"].isna().tolist() == [False, True, False]
    broken_at_2.undo()
    assert tonnage(*command).code == 0
    frame = pd.read_csv(tmp_path / "out" / "sweep.csv")
    assert frame["status"].tolist() == ["done"] * 3
    assert len(entries(tmp_path / "out")) == 4


def test_what_does_not_fit_is_a_row_and_code_3_only_where_nothing_fits(
    tonnage: Any, tiny: Path, tmp_path: Path
) -> None:
    large = [tiny, "--set", "model=llama-3.1-70b", "--workers", "1", "--out", tmp_path / "out"]
    some = tonnage(*large, "--over", "pools.serve.tp=1,4")
    frame = pd.read_csv(tmp_path / "out" / "sweep.csv")
    assert some.code == 0
    assert frame["status"].tolist() == ["infeasible", "done"]
    assert "does not fit 1 x h100-sxm" in frame["message"][0]
    assert "infeasible: pools.serve.tp=1 seed=0: " in some.output
    none = tonnage(*large, "--over", "pools.serve.tp=1,2")
    assert none.code == 3
    assert none.error.splitlines()[-1].startswith("error: none of the 2 points fits; the first: ")
    assert pd.read_csv(tmp_path / "out" / "sweep.csv")["status"].tolist() == ["infeasible"] * 2


def test_a_worker_of_another_version_is_not_believed(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api, "version", lambda _: "0.0.7")
    frame = sweep(tiny, workers=1)
    assert frame["status"].tolist() == ["failed"]
    assert frame["message"][0].startswith("its worker runs tonnage 0.0.7, this is ")


# --- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--over", "traffic.rate_pers=1,2"], "unknown field; did you mean 'rate_per_s'?"),
        (["--over", "traffic.rate_pers=1,2"], "with --over traffic.rate_pers=1: "),
        (["--over", "traffic.rate_per_s=1,fast"], "with --over traffic.rate_per_s=fast: "),
        (["--over", "model=llama-3.1-8b,llama-3.1-8"], "did you mean 'llama-3.1-8b'"),
        (["--over", "pools.serve.tp=1,7"], "--over pools.serve.tp=7: "),
        (["--over", "traffic.rate_per_s=1,,2"], "--over traffic.rate_per_s=1,,2: "),
        (["--over", "traffic.rate_per_s="], "no value"),
        (["--over", "traffic.rate_per_s"], "write it as field=value,value"),
        (["--over", "pools.serve.tp=1,2,1"], "1 is there twice"),
        (["--over", "gpu=l40s", "--over", "gpu=h20"], "gpu is there twice"),
        (["--over", "seed=1,2"], "--seeds 0,1,2"),
        (["--over", "variants.a.seed=1"], "every variant is swept anyway"),
        (["--set", "pools.serve.tpp=2"], "with --set pools.serve.tpp=2"),
        (["--seeds", "two"], "--seeds two: not whole numbers"),
        (["--seeds", "0"], "seeds: 0 is not at least 1"),
        (["--seeds", "1,1"], "each once"),
        (["--cluster", "tcp://127.0.0.1:1", "--workers", "2"], "leave --workers out"),
    ],
)
def test_a_mistake_is_one_line_and_leaves_what_was_kept(
    tonnage: Any, tiny: Path, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    kept = {"points.jsonl": b'{"key":"a"}\n{"cut', "sweep.csv": b"seed\n", "sweep.parquet": b"x"}
    for name, data in kept.items():
        (out / name).write_bytes(data)
    done = tonnage(tiny, *arguments, "--fresh", "--out", out)
    assert done.code == 2
    assert done.output == ""
    assert done.error.startswith("error: ")
    assert done.error.count("\n") == 1
    assert expected in done.error
    assert {path.name: path.read_bytes() for path in out.iterdir()} == kept


def test_a_damaged_trace_is_found_before_the_work(tonnage: Any, tmp_path: Path) -> None:
    (tmp_path / "cut.jsonl").write_text('{"timestamp": 0, "input_length": 100, "outp')
    traffic = {"kind": "trace", "path": "cut.jsonl"}
    file = written(tmp_path / "mine.yaml", {**TINY, "traffic": traffic})
    done = tonnage(file, "--over", "traffic.rate_scale=1,2", "--out", tmp_path / "out")
    assert done.code == 2
    assert "cut.jsonl: line 1: truncated or invalid JSON" in done.error
    assert not (tmp_path / "out").exists()


def test_a_cluster_without_its_package_names_the_extra(
    tonnage: Any, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    done = tonnage(tiny, "--cluster", "tcp://127.0.0.1:1")
    assert done.code == 2
    assert "pip install 'tonnage[cluster]'" in done.error


def test_fresh_without_a_folder_is_a_mistake(tonnage: Any, tiny: Path) -> None:
    assert "--fresh" in tonnage(tiny, "--fresh").error


def test_help_has_examples(tonnage: Any) -> None:
    done = tonnage("--help")
    assert done.code == 0
    assert "Examples:" in done.output
    assert "    tonnage sweep my-fleet.yaml --over traffic.rate_per_s=1,2,4" in done.output


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("a.b=1,2.5", [1, 2.5]),
        ("a.b=bf16, fp8_e4m3", ["bf16", "fp8_e4m3"]),
        ("a.b=[1, 2],[4]", [[1, 2], [4]]),
        ("a.b={x: 1, y: [2, 3]},null", [{"x": 1, "y": [2, 3]}, None]),
        ("a.b='1, 2',\"x\"", ["1, 2", "x"]),
        ("a.b=300ms", ["300ms"]),
    ],
)
def test_values_are_yaml_split_at_the_top_level(text: str, values: list[Any]) -> None:
    assert parse_over([text]) == {"a.b": values}
