"""What is injected into which traffic, and the program that fills docs/integrity.md."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.engine.harness import colocated, disaggregated
from tonnage.injection import injection_study, light_deployment, random_requests
from tonnage.integrity_study import CHECKS, StudyTask, lengths_of
from tonnage.pools import built_pools, deployment_of, times_of
from tonnage.scenarios.load import load_scenario, load_variants
from tonnage.sim.domain import IntegritySpec
from tonnage.sim.serving.data_faults import FaultClass
from tonnage.sim.serving.policy import SGLANG

ROOT = Path(__file__).resolve().parents[1]


def _tool() -> ModuleType:
    place = ROOT / "benchmarks" / "integrity_matrix.py"
    spec = importlib.util.spec_from_file_location("integrity_matrix", place)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there for their types
    spec.loader.exec_module(module)
    return module


matrix = _tool()


# --- traffic ------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 200_000), st.integers(1, 20_000)), min_size=1, max_size=20),
    st.sampled_from([1, 4, 64]),
)
def test_scaled_requests_always_fit(lengths: list[tuple[int, int]], page_tokens: int) -> None:
    """Whatever the scenario's lengths: something of everything, and no request fills a pool."""
    light = light_deployment(disaggregated(policy=SGLANG, page_tokens=page_tokens))
    page = min(page_tokens, 4)
    requests = random_requests(light, 0, 0, lengths)
    assert min(one.input_tokens for one in requests) >= 1
    assert min(one.output_tokens for one in requests) >= 2
    assert max(one.total_tokens for one in requests) <= 24 * page + 3
    arrivals_s = [one.arrival_s for one in requests]
    assert arrivals_s == sorted(arrivals_s)


@pytest.mark.parametrize(
    ("lengths", "prompt", "answer"),
    [([(8192, 1000)], 16, 16), ([(100, 100)], 16, 16), ([(100, 300)], 8, 24), ([(1, 900)], 4, 28)],
)
def test_scaled_requests_keep_their_proportion_within_bounds(
    lengths: list[tuple[int, int]], prompt: int, answer: int
) -> None:
    """Of eight pages of four tokens, answers take between four and seven."""
    light = light_deployment(colocated(policy=SGLANG, page_tokens=16))
    requests = random_requests(light, 0, 0, lengths)
    assert {(one.input_tokens, one.output_tokens) for one in requests} == {(prompt, answer)}


def test_scaled_requests_keep_their_spread() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers((100, 500), (1900, 1500), size=(500, 2)).tolist()
    requests = random_requests(
        light_deployment(colocated(page_tokens=4)), 0, 0, [tuple(one) for one in lengths]
    )
    for given_tokens, drawn in (
        (np.array(lengths)[:, 0], [one.input_tokens for one in requests]),
        (np.array(lengths)[:, 1], [one.output_tokens for one in requests]),
    ):
        spread = given_tokens.std() / given_tokens.mean()
        assert np.std(drawn) / np.mean(drawn) == pytest.approx(spread, rel=0.3)


def test_traffic_that_gives_no_occasion_ends_the_study() -> None:
    """Every request is longer than the pool allows: none runs, and no page goes wrong."""
    light = light_deployment(colocated(policy=SGLANG, page_tokens=4))
    pools = {role: replace(plan, longest_request_tokens=1) for role, plan in light.pools.items()}
    row = injection_study(replace(light, pools=pools), FaultClass.STALE_PAGE_TABLE, 10)
    assert row is not None
    assert row.injected == 0


def test_a_check_beside_the_step_is_late_for_what_the_step_reads() -> None:
    before, beside = (
        injection_study(
            light_deployment(disaggregated(policy=SGLANG), IntegritySpec("batched", overlapped=on)),
            FaultClass.STALE_PAGE_TABLE,
            60,
        )
        for on in (False, True)
    )
    assert before is not None
    assert beside is not None
    assert (before.caught_after, before.wrong_reads) == (0, 0)
    assert beside.caught_after > 10
    assert beside.caught_after <= beside.wrong_reads
    assert beside.caught_before + beside.caught_after == beside.met


def test_tasks_that_come_out_the_same_run_once() -> None:
    variants = load_variants("integrity-overhead")
    keys = {
        name: {StudyTask(one, check, FaultClass.DOUBLE_FREE, 5).key for check in CHECKS}
        for name, one in variants.items()
    }
    shared = keys["none"] & keys["batched"]
    assert len(shared) == len(CHECKS) - 1  # all but the check that each has itself
    assert len(set().union(*keys.values())) == len(shared) + len(variants)


def test_lengths_are_those_of_the_scenario() -> None:
    fixed = load_scenario("integrity-overhead")
    assert set(lengths_of(fixed.traffic_spec(), 0)) == {(8192, 1000)}
    agents = lengths_of(load_scenario("kimi-agents").traffic_spec(), 0)
    assert len(agents) == 500
    assert len(set(agents)) > 100


# --- the program of the document ----------------------------------------------------------------


def row(**counts: int) -> dict[str, Any]:
    names = ("injected", *matrix._COLUMNS.values())
    return {"row": dict.fromkeys(names, 0) | {"met": 10, **counts}, "cpu_s": 1.0}


GOOD = {
    ("none", "early_reuse"): row(missed=10, wrong_reads=12),
    ("batched", "early_reuse"): row(caught_before=10, aborted=9),
    ("decode-tags", "late_writer"): row(missed=10, wrong_reads=10),
    ("batched", "wrong_scale"): row(missed=10, wrong_reads=10),
}


def test_what_holds_is_not_complained_of() -> None:
    assert list(matrix.deviations(GOOD)) == []


@pytest.mark.parametrize(
    ("place", "changed", "complaint"),
    [
        (("none", "early_reuse"), {"wrong_reads": 0}, "wrong reads are counted"),
        (("batched", "early_reuse"), {"caught_before": 9}, "9 caught before a read, of 10 met"),
        (("batched", "early_reuse"), {"wrong_reads": 1}, "1 wrong reads"),
        (("batched", "early_reuse"), {"clean_aborted": 2}, "2 clean requests were aborted"),
        (("decode-tags", "late_writer"), {"caught_after": 1}, "caught a former owner's write"),
        (("batched", "wrong_scale"), {"caught_before": 3}, "3 faults of content"),
        (("batched", "early_reuse"), {"met": 0, "caught_before": 0}, "nothing was met"),
    ],
)
def test_what_does_not_hold_is_said(
    place: tuple[str, str], changed: dict[str, int], complaint: str
) -> None:
    bad = {place: {**GOOD[place], "row": GOOD[place]["row"] | changed}}
    assert any(complaint in text for text in matrix.deviations(bad))


def test_finished_rows_are_kept_and_not_run_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(count: int, fewer: int) -> tuple[Any, ...]:
        return (matrix.Part("Apart", matrix.APART, {"batched": count}),)

    monkeypatch.setattr(matrix, "parts", small)
    file = tmp_path / "rows.jsonl"
    command = ["--injections", "5", "--rows", str(file)]
    assert matrix.main(command) == 0
    first = capsys.readouterr()
    assert first.err.count("batched") == len(FaultClass)
    assert "| `early_reuse` | 100.0% |" in first.out
    assert "Faults of each class: batched 5; 45 in all" in first.out
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-1]))
    assert matrix.main(command) == 0
    again = capsys.readouterr()
    assert again.err.count("batched") == 1
    rows = [json.loads(line)["row"] for line in file.read_text().splitlines()]
    assert rows[-1] == json.loads(lines[-1])["row"]


def test_the_document_has_ten_thousand_of_every_class_and_its_statements_hold() -> None:
    """Read back from the tables as they stand."""
    document = (ROOT / "docs" / "integrity.md").read_text()
    part = document.split(matrix._BEGIN)[1].split(matrix._END)[0]
    apart = part.split("### ")[1]
    found = {}
    for line in apart.splitlines():
        cells = [cell.strip(" `") for cell in line.strip("|").split("|")]
        if len(cells) == 2 + len(matrix._COLUMNS) and re.fullmatch(r"[\d,]+", cells[2]):
            counts = [int(cell.replace(",", "")) for cell in cells[2:]]
            values = dict(zip(matrix._COLUMNS.values(), counts, strict=True))
            found[cells[0], cells[1]] = {"row": values}
    for kind in FaultClass:
        for check in ("none", "batched"):
            assert found[check, str(kind)]["row"]["injected"] == 10_000
        for check in ("decode-tags", "overlapped", "canary", "checksum"):
            assert found[check, str(kind)]["row"]["injected"] >= 2000
    assert list(matrix.deviations(found)) == []


def test_a_resident_batch_that_a_stop_has_emptied_goes_on() -> None:
    """The users of those that were lost send at once, while the idle instance is still planning."""
    scenario = load_scenario("kimi-k2.6-h200", ["model=llama-3.1-8b", "pools.decode.tp=1"])
    pools = built_pools(scenario)
    deployment = deployment_of(scenario, pools, times_of(scenario, pools))
    light = light_deployment(deployment, IntegritySpec("canary"))
    row = injection_study(light, FaultClass.STALE_PAGE_TABLE, 30, layers=4)
    assert row is not None
    assert row.injected == 30
    assert row.stops > 0
