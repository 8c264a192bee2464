"""A timeline as files and on a terminal, by hand-made segments and through the command."""

from __future__ import annotations

import gzip
import io
import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from tests.sim.engine.harness import colocated, disaggregated, poisson_requests
from tests.timeline_samples import CAPACITY, LABELS, counters_of, example
from tonnage.cli import main
from tonnage.sim.domain import BadInputError
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.results.timeline import Timeline
from tonnage.sim.serving.policy import PLAIN, SGLANG, VLLM
from tonnage.sim.traffic.loads import OpenLoad
from tonnage.timeline import (
    check_timeline_file,
    print_timeline,
    timeline_file,
    timeline_lines,
    write_timeline,
)

# --- files --------------------------------------------------------------------------------------


def test_a_compressed_trace_is_the_same_text_and_the_same_bytes_again(tmp_path: Path) -> None:
    plain, packed = tmp_path / "run.json", tmp_path / "run.json.gz"
    write_timeline(plain, example(), LABELS, CAPACITY)
    write_timeline(packed, example(), LABELS, CAPACITY)
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert len(json.loads(plain.read_text())["traceEvents"]) > 10
    again = tmp_path / "again.json.gz"
    write_timeline(again, example(), LABELS, CAPACITY)
    assert again.read_bytes() == packed.read_bytes()


def test_tables_hold_the_frame_with_labels(tmp_path: Path) -> None:
    expected = example().frame()
    for name, read in (("run.parquet", pd.read_parquet), ("run.csv", pd.read_csv)):
        write_timeline(tmp_path / name, example(), LABELS, CAPACITY)
        table = read(tmp_path / name)
        labels = ["prefill 0", "decode 0", "decode 0", "decode 0", "prefill 0", "decode 0"]
        assert table.pop("label").tolist() == labels
        assert table.to_dict("records") == expected.to_dict("records")


def test_a_trace_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text("the run before")
    with pytest.raises(KeyError):
        write_timeline(file, example(), {0: "prefill 0"}, CAPACITY)  # an instance has no label
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
    assert file.read_text() == "the run before"


@pytest.mark.parametrize("name", ["run", "run.txt", "run.gz", "json"])
def test_a_name_of_no_known_form_is_refused_with_the_forms(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadInputError, match=r"\.json, \.json\.gz, \.parquet, \.csv"):
        check_timeline_file(tmp_path / name)


def test_places_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(BadInputError, match="is a folder"):
        check_timeline_file(tmp_path / "folder.json")
    with pytest.raises(BadInputError, match="cannot be written to"):
        check_timeline_file(tmp_path / "missing" / "run.json")
    check_timeline_file(tmp_path / "Run.JSON.gz")


@pytest.mark.parametrize(
    ("name", "variant", "point", "expected"),
    [
        ("run.json.gz", "", {"concurrency": 4}, "run_concurrency_4.json.gz"),
        ("run.csv", "colocated", {"rate_per_s": 2.5}, "run_colocated_rate_2.5.csv"),
        ("run.v2.parquet", "a/b", {}, "run.v2_a-b.parquet"),
        ("run.json", "", {}, "run.json"),
    ],
)
def test_each_of_several_points_has_its_own_name(
    name: str, variant: str, point: dict[str, Any], expected: str
) -> None:
    assert timeline_file(Path("out") / name, variant, point) == Path("out") / expected


# --- terminal -----------------------------------------------------------------------------------


def test_sparklines_by_hand() -> None:
    timeline = Timeline()
    timeline.add(0, 0.0, 1.0, 1, 0, 2, 100, 0, 100)  # a tenth of the run, all of the memory
    timeline.add(2, 5.0, 10.0, 9, 8, 0, 0, 0, 40)
    labels = {0: "prefill 0", 2: "decode 0"}
    lines = list(timeline_lines(timeline, labels, CAPACITY, width=81))
    assert lines == [
        "10 s in 10 columns of 1 s",
        "prefill 0  batch |█         | mean 0.2 max 2  KV |█         | mean  10% max 100%",
        "decode 0   batch |     █████| mean 4.0 max 8  KV |     █████| mean   5% max  10%",
    ]
    assert {len(line) for line in lines[1:]} == {80}


def test_a_column_is_a_mean_over_its_share_of_the_run() -> None:
    timeline = Timeline()
    timeline.add(2, 0.0, 1.0, 1, 16, 0, 0, 0, 400)
    timeline.add(2, 1.0, 1.25, 1, 8, 0, 0, 0, 200)  # a quarter of a column: 2 of 16 on average
    timeline.add(2, 7.0, 8.0, 1, 1, 0, 0, 0, 1)
    (_, line) = timeline_lines(timeline, {2: "decode 0"}, CAPACITY, width=1)
    drawn = "decode 0  batch |█▁     ▁| mean  2.4 max 16  KV |█▁     ▁| mean  14% max 100%"
    assert line == drawn


@pytest.mark.parametrize("width", [76, 80, 120, 220])
def test_lines_fit_the_terminal(width: int) -> None:
    lines = list(timeline_lines(example(), LABELS, CAPACITY, width))
    assert max(map(len, lines)) <= width
    assert max(map(len, lines)) >= min(width, 160) - 1
    assert [line.split("  ")[0] for line in lines[1:]] == list(LABELS.values())


def test_a_terminal_without_unicode_gets_ascii() -> None:
    raw = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="replace")
    print_timeline(Console(file=raw, width=80), "run.json", example(), LABELS, CAPACITY)
    raw.seek(0)
    text = raw.read()
    assert text.startswith("run.json\n")
    assert "?" not in text
    assert "%" in text.splitlines()[2]


def test_an_instance_that_never_ran_and_an_empty_run_are_blank() -> None:
    lines = list(timeline_lines(example(), LABELS, CAPACITY, width=70))
    assert lines[2].startswith("prefill 1  batch |  ")
    assert lines[2].endswith("mean   0% max   0%")
    assert set(lines[2].split("|")[1]) == {" "}
    assert len(list(timeline_lines(Timeline(), LABELS, CAPACITY, width=70))) == 4


# --- the engine ---------------------------------------------------------------------------------

DEPLOYMENTS = {
    "plain, prefill first": colocated(2, policy=PLAIN),
    "sglang": colocated(policy=SGLANG),
    "vllm": colocated(policy=VLLM, chunk_tokens=256),
    "vllm, ranks": colocated(policy=VLLM, ranks=2),
    "sglang, apart": disaggregated(2, 2, policy=SGLANG),
    "vllm, apart": disaggregated(2, 2, policy=VLLM),
}
LOAD = OpenLoad(poisson_requests(60, 8.0, 500, 60))


@pytest.mark.parametrize("deployment", DEPLOYMENTS.values(), ids=DEPLOYMENTS)
@pytest.mark.parametrize("exact", [False, True], ids=["segments", "exact"])
def test_the_engine_fills_it_with_its_busy_time(deployment: Deployment, exact: bool) -> None:
    timeline = Timeline()
    run = simulate(deployment, LOAD, exact=exact, timeline=timeline)
    frame = timeline.frame()
    assert (frame["start_s"] >= 0).all()
    in_time = frame[frame["end_s"] <= run.makespan_s]  # after it the engines only wind down
    busy_s = (in_time["end_s"] - in_time["start_s"]).groupby(in_time["instance"]).sum()
    expected = [one for pool in run.busy_s.values() for one in pool]
    assert busy_s.tolist() == pytest.approx(expected, rel=1e-12)
    shares = timeline.averages(run.makespan_s, until_s=run.makespan_s)["busy_share"]
    assert (shares * run.makespan_s).tolist() == pytest.approx(expected, rel=1e-2)
    assert frame["prompt_tokens"].sum() == 60 * 500


def test_segments_and_single_steps_draw_the_same_batches() -> None:
    deployment = DEPLOYMENTS["vllm"]
    states = []
    for exact in (False, True):
        timeline = Timeline()
        run = simulate(deployment, LOAD, exact=exact, timeline=timeline)
        middles = [(index + 0.5) / 1000 * run.makespan_s for index in range(1000)]
        states.append(timeline.at(middles)["running_requests"].tolist())
    assert states[0] == states[1]


# --- the command --------------------------------------------------------------------------------


@pytest.fixture
def tonnage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command as the entry point does; return its code, output and errors."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["tonnage", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def scenario(tmp_path: Path) -> str:
    """Llama 3.1 8B on one H100 under vLLM, which has all running requests in every step."""
    file = tmp_path / "tiny.yaml"
    file.write_text(
        """
name: tiny
model: llama-3.1-8b
gpu: h100-sxm
engine: {name: vllm}
traffic: {kind: poisson, rate_per_s: 20, input_tokens: 1000, output_tokens: 50, requests: 60}
pools: {serve: {instances: 1, tp: 1}}
"""
    )
    return str(file)


def test_average_running_is_littles_law_over_the_records(
    tonnage: Any, scenario: str, tmp_path: Path
) -> None:
    rows, out = tmp_path / "run.parquet", tmp_path / "out"
    code, _, _ = tonnage("simulate", scenario, "--timeline", str(rows), "--out", str(out))
    assert code == 0
    frame = pd.read_parquet(rows)
    (record_file,) = out.glob("requests*.parquet")
    records = pd.read_parquet(record_file)
    makespan_s = json.loads((out / "summary.json").read_text())["points"][0]["makespan_s"]
    running = frame["decode_requests"] + frame["prompt_requests"]
    average = (running * (frame["end_s"] - frame["start_s"])).sum() / makespan_s
    in_batch_s = (records["finish_s"] - records["prefill_start_s"]).sum()
    assert average == pytest.approx(in_batch_s / makespan_s, rel=1e-9)
    assert average > 2
    assert (frame["steps"] * frame["decode_requests"]).sum() == 60 * 49  # the prompt gives one
    assert frame["prompt_tokens"].sum() == 60 * 1000
    assert set(frame["label"]) == {"serve 0"}


def test_a_decode_pool_runs_a_request_from_its_arrival_but_for_the_step_under_way(
    tonnage: Any, tmp_path: Path
) -> None:
    rows, out = tmp_path / "run.csv", tmp_path / "out"
    sets = ["--set", "traffic.rate_per_s=[2.0]", "--set", "traffic.requests=20"]
    arguments = ["colocated-vs-disaggregated", *sets, "--timeline", str(rows), "--out", str(out)]
    assert tonnage("simulate", *arguments)[0] == 0
    frame = pd.read_csv(tmp_path / "run_disaggregated_rate_2.csv")
    records = pd.read_parquet(out / "requests_disaggregated_rate_2.parquet")
    time_s = frame["end_s"] - frame["start_s"]
    prefill = frame["label"].str.startswith("prefill")
    assert (time_s * frame["prompt_requests"])[prefill].sum() == pytest.approx(
        (records["prefill_end_s"] - records["prefill_start_s"]).sum(), rel=1e-9
    )
    decode_s = (records["finish_s"] - records["transfer_end_s"]).sum()
    longest_step_s = (time_s / frame["steps"])[~prefill].max()
    missing_s = decode_s - (time_s * frame["decode_requests"])[~prefill].sum()
    assert 0 <= missing_s <= len(records) * longest_step_s


def test_a_file_and_a_view_for_every_point_of_every_variant(tonnage: Any, tmp_path: Path) -> None:
    sets = ["--set", "traffic.rate_per_s=[1.0, 2.0]", "--set", "traffic.requests=8"]
    file = str(tmp_path / "run.json.gz")
    arguments = ["colocated-vs-disaggregated", *sets, "--timeline", file]
    code, output, _ = tonnage("simulate", *arguments)
    assert code == 0
    names = {
        f"run_{variant}_rate_{rate}.json.gz"
        for variant in ("colocated", "disaggregated")
        for rate in (1, 2)
    }
    assert {path.name for path in tmp_path.iterdir()} == names
    headings = [line for line in output.splitlines() if line.startswith(str(tmp_path))]
    assert {Path(line).name for line in headings} == names
    for name in names:
        trace = json.loads(gzip.decompress((tmp_path / name).read_bytes()))
        processes = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
        assert processes == ({"serve"} if "colocated" in name else {"prefill", "decode"})


def test_kv_fills_up_and_stays_within_capacity(tonnage: Any, scenario: str, tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    sets = ["traffic.rate_per_s=1000", "traffic.input_tokens=8000", "traffic.requests=80"]
    arguments = [part for one in sets for part in ("--set", one)]
    code, output, _ = tonnage("simulate", scenario, *arguments, "--timeline", str(file))
    assert code == 0
    series = counters_of(json.loads(file.read_text())["traceEvents"])
    assert 90 < max(value for _, value in series["serve 0 KV"]) <= 100
    assert max(value for _, value in series["serve 0 waiting"]) > 0
    (line,) = [line for line in output.splitlines() if line.startswith("serve 0  batch |")]
    assert int(line.rstrip("%").rsplit(" ", 1)[1]) in range(90, 101)


def test_a_resident_curve_draws_its_one_decode_instance(tonnage: Any, tmp_path: Path) -> None:
    sets = ["traffic.concurrency=[4]", "traffic.requests=12", "traffic.output_tokens=40"]
    arguments = [part for one in sets for part in ("--set", one)]
    file = tmp_path / "run.csv"
    assert tonnage("simulate", "kimi-k2.6-h200", *arguments, "--timeline", str(file))[0] == 0
    frame = pd.read_csv(file)
    assert set(frame["label"]) == {"decode 0"}
    assert frame["decode_requests"].max() == 4


def test_the_figures_do_not_change_and_the_same_seed_gives_the_same_bytes(
    tonnage: Any, scenario: str, tmp_path: Path
) -> None:
    plain = tonnage("simulate", scenario, "--json", "-")
    files = [tmp_path / "one.json.gz", tmp_path / "two.json.gz"]
    for file in files:
        drawn = tonnage("simulate", scenario, "--json", "-", "--timeline", str(file))
        assert drawn == plain
    assert files[0].read_bytes() == files[1].read_bytes()


def test_a_bad_name_is_refused_before_the_work(tonnage: Any, scenario: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, output, error = tonnage(
        "simulate", scenario, "--timeline", str(tmp_path / "run.pdf"), "--out", str(out)
    )
    assert (code, output) == (2, "")
    assert error.startswith("error: --timeline ")
    assert ".json.gz" in error
    assert not out.exists()
