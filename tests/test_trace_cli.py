"""`tonnage trace describe`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from tonnage.cli import main
from tonnage.scenarios.load import load_scenario, parse_scenario

SAMPLE = "agentic_sample.csv.gz"


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


def test_a_shipped_trace_is_described_by_name(tonnage: Any) -> None:
    done = tonnage("trace", "describe", "mooncake_conversation.jsonl.gz")
    assert done.code == 0
    assert "12,031 requests" in done.output
    assert "36.6% of 288,500 blocks of 512 tokens" in done.output
    assert "3.4 requests per s over 3,537 s" in done.output
    assert re.search(r"turns of a session +1\.49", done.output)
    assert "sessions are inferred" in done.output


def test_the_printed_section_is_one_of_a_scenario(tonnage: Any) -> None:
    done = tonnage("trace", "describe", SAMPLE)
    text = done.output[done.output.index("traffic:") :].split("\n  - ")[0]
    scenario = parse_scenario(yaml.safe_load(text))
    assert scenario.traffic.kind == "sessions"
    assert scenario.traffic_spec().sessions is not None
    assert "set traffic.concurrency" in done.output


def test_json_alone_is_one_object(tonnage: Any) -> None:
    done = tonnage("trace", "describe", "agentic_0002.json.gz", "--json", "-")
    report = json.loads(done.output)
    assert done.error == ""
    assert report["requests"] == 33
    assert report["reuse"]["block_hit_rate"] == pytest.approx(0.934675, abs=1e-6)
    assert report["working_set"]["per"] == "trace"
    assert report["sessions"]["turns"]["max"] == 33
    parse_scenario({"traffic": report["traffic"]})


def test_files_hold_what_was_printed(tonnage: Any, tmp_path: Path) -> None:
    out, file = tmp_path / "report", tmp_path / "x.json"
    done = tonnage("trace", "describe", SAMPLE, "--out", str(out), "--json", str(file))
    assert done.code == 0
    names = ["requests.csv", "summary.json", "trace.html", "traffic.yaml", "working_set.csv"]
    assert sorted(one.name for one in out.iterdir()) == names
    summary = json.loads((out / "summary.json").read_text())
    assert summary == json.loads(file.read_text())
    requests = pd.read_csv(out / "requests.csv")
    assert len(requests) == summary["requests"]
    hit_rate = requests["hit_blocks"].sum() / requests["blocks"].sum()
    assert hit_rate == pytest.approx(summary["reuse"]["block_hit_rate"])
    assert len(pd.read_csv(out / "working_set.csv")) == 200
    scenario = tmp_path / "mine.yaml"
    scenario.write_text((out / "traffic.yaml").read_text())
    assert load_scenario(scenario).traffic.session is not None


def test_the_page_needs_nothing_else_and_is_the_same_again(tonnage: Any, tmp_path: Path) -> None:
    pages = []
    for name in ("one", "two"):
        tonnage("trace", "describe", SAMPLE, "--out", str(tmp_path / name))
        pages.append((tmp_path / name / "trace.html").read_bytes())
    assert pages[0] == pages[1]
    page = pages[0].decode()
    assert not re.search(r"<script[^>]+src=|<link", page)
    assert page.count("Plotly.newPlot(") >= 7
    headings = ("Lengths", "Hits", "Time kept", "Working set", "Turns", "Think time", "Context")
    assert re.findall(r"<h2>([^<]+)</h2>", page) == [*headings, "Fitted, for a scenario"]


def test_a_trace_without_blocks_has_the_plots_that_it_can(tonnage: Any, tmp_path: Path) -> None:
    file = tmp_path / "plain<b>.csv"
    file.write_text("arrival_s,input_tokens,output_tokens\n0,10,2\n70,20,3\n200,30,4\n")
    done = tonnage("trace", "describe", str(file), "--out", str(tmp_path / "out"))
    assert done.code == 0
    assert "no block ids" in done.output
    page = (tmp_path / "out" / "trace.html").read_text()
    assert "<h1>plain&lt;b&gt;.csv: 3 requests</h1>" in page
    assert re.findall(r"<h2>([^<]+)</h2>", page) == [
        "Arrivals",
        "Lengths",
        "Fitted, for a scenario",
    ]
    assert not (tmp_path / "out" / "working_set.csv").exists()
    traffic = yaml.safe_load((tmp_path / "out" / "traffic.yaml").read_text())
    assert traffic["traffic"]["input_tokens"] == {
        "kind": "lognormal",
        "median": 20,
        "p95": 29,
        "max": 30,
    }


def test_one_request_alone_can_be_described(tonnage: Any, tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    file.write_text('{"timestamp": 9, "input_length": 700, "output_length": 5, "hash_ids": [1]}\n')
    done = tonnage("trace", "describe", str(file), "--out", str(tmp_path / "out"))
    assert (done.code, done.error) == (0, "reading\n")
    assert "1 session, inferred" in done.output


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("cut.jsonl", '{"timestamp": 0, "input_length": 9, "outp', "cut.jsonl: line 1: truncated"),
        ("cut.json", '{"id": "x", "requests": [{"t": 0', "cut.json: truncated or invalid JSON"),
        ("odd.csv", "when,what\n1,2\n", "odd.csv: line 1: not a known trace"),
        ("none.csv", "", "none.csv: the trace is empty"),
        (
            "bad.csv",
            "arrival_s,input_tokens,output_tokens\n0,10,2\n1,x,2\n",
            "bad.csv: line 3: input_tokens: 'x' is not a number; mend or remove the line",
        ),
        (
            "bad.json",
            '{"block_size": 64, "requests": [{"t": 0, "in": 5, "out": 1, "hash_ids": [1, 2]}]}',
            "bad.json: requests[0]: 2 blocks of 64 tokens do not fit into 5 tokens",
        ),
    ],
)
def test_a_bad_file_is_one_line_and_nothing_is_written(
    tonnage: Any, tmp_path: Path, name: str, text: str, expected: str
) -> None:
    (tmp_path / name).write_text(text)
    out = tmp_path / "out"
    done = tonnage("trace", "describe", str(tmp_path / name), "--out", str(out), "--json", "-")
    assert (done.code, done.output) == (2, "")
    assert done.error.startswith("error: ")
    assert done.error.count("\n") == 1
    assert expected in done.error
    assert not out.exists()


def test_what_is_not_there(tonnage: Any, tmp_path: Path) -> None:
    gone = tonnage("trace", "describe", "gone.csv")
    assert gone.code == 2
    assert "'gone.csv'" in gone.error
    assert "mooncake_conversation.jsonl.gz" in gone.error
    file = tmp_path / "file"
    file.write_text("")
    out = tonnage("trace", "describe", SAMPLE, "--out", str(file / "out"))
    assert (out.code, out.output) == (2, "")
    assert "--out" in out.error
