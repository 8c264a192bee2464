"""`execute` with the KV watched: checks switched on by the scenario, faults on real pages."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.test_execute_cli import LITTLE, SHORT
from tonnage.cli import app
from tonnage.execution import BETWEEN_RANKS, StepDevice, execute
from tonnage.pools import BuiltPool, built_pools, times_of
from tonnage.scenarios.load import parse_scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.domain import BadInputError, Coverage, IntegritySpec, PromptChunk, Step
from tonnage.step_devices import checked_share

pytest.importorskip("torch", reason="no torch: pip install 'tonnage[kernels]'")

DECODE = Step(np.array([40, 7]), 47.0, ())
PROMPT = Step(np.array([], dtype=int), 0.0, (PromptChunk(5, 12),))
MIXED = Step(np.array([40]), 40.0, (PromptChunk(5, 12),))
WATCHED = ("--set", "pools.decode.integrity=batched", "--set", "pools.decode.page_tokens=16")


def run(*arguments: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(app, ["execute", "laptop", *LITTLE, *SHORT, *arguments])
    return result.exit_code, result.stdout, result.exception


@pytest.mark.parametrize(
    ("spec", "shares"),
    [
        (IntegritySpec(), (0, 0, 0)),
        (IntegritySpec("canary"), (0, 0, 0)),
        (IntegritySpec("batched"), (1, 1, 1)),
        (IntegritySpec("batched", every_steps=4), (0.25, 1, 1)),
        (IntegritySpec("batched", overlapped=True), (0, 0, 0)),
        (IntegritySpec("batched", covers=frozenset({Coverage.DECODE})), (1, 0, 1)),
        (IntegritySpec("batched", covers=frozenset({Coverage.PREFIX})), (0, 1, 1)),
        (IntegritySpec("batched", covers=frozenset({Coverage.HANDOFF})), (0, 0, 0)),
    ],
)
def test_which_steps_wait_for_a_check(
    spec: IntegritySpec, shares: tuple[float, float, float]
) -> None:
    steps = (DECODE, PROMPT, MIXED)
    assert tuple(checked_share(spec, step, "cuda") for step in steps) == shares
    if spec.overlapped:  # nothing runs beside a step on a CPU
        assert [checked_share(spec, step, "cpu") for step in steps] == [1, 1, 1]


class Checking:
    """Takes what is predicted of a step, but for what a device alone does not run."""

    def __init__(self, predictor: StepPredictor) -> None:
        self.predictor = predictor

    def measure(self, step: Step) -> float:
        checked = ("integrity.tag_check", "integrity.launch")
        elsewhere_s = sum(
            one.seconds
            for one in self.predictor.times(step)
            if one.name in BETWEEN_RANKS
            or (one.name.startswith("integrity.") and one.name not in checked)
        )
        return float(self.predictor.run(step, 1)[0]) - elsewhere_s

    def facts(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize("tracker", ["none", "batched"])
def test_the_hosts_part_of_a_check_keeps_its_predicted_time(tracker: str) -> None:
    traffic = {"kind": "poisson", "rate_per_s": 2.0, "input_tokens": 500, "output_tokens": 40}
    pools = {"prefill": {"kv": "bf16"}, "decode": {"integrity": tracker}}
    one = parse_scenario({"traffic": {**traffic, "requests": 8}, "pools": pools})
    times = times_of(one, built_pools(one))

    @contextmanager
    def device(role: Role, pool: BuiltPool, steps: Sequence[Step]) -> Iterator[StepDevice]:
        yield Checking(times[role].executor)

    found = execute(one, device).to_dict()["pools"]["decode"]
    assert found["measured_over_predicted"] == pytest.approx({"decode": 1.0})
    predicted_s = found["device"]["tag_check_predicted_s"]
    assert predicted_s is None if tracker == "none" else 0 < predicted_s < 1e-3


def test_a_watched_pool_is_checked_without_being_asked() -> None:
    code, text, _ = run("--layers", "2", "--budget", "2s", *WATCHED, "--json", "-")
    assert code == 0
    pools = json.loads(text)["pools"]
    decode, prefill = pools["decode"]["device"], pools["prefill"]["device"]
    assert decode["tag_check"] is True
    assert 0 < decode["tag_check_s"] < 0.05
    assert 0 < decode["tag_check_predicted_s"] < 0.05
    assert prefill["tag_check"] is False
    assert prefill["tag_check_s"] is prefill["tag_check_predicted_s"] is None


def test_faults_are_injected_and_the_matrix_is_printed(tmp_path: Path) -> None:
    classes = "stale_page_table,late_writer,corrupted_transfer"
    options = ("--inject", classes, "--injections", "2", "--budget", "1s", "--layers", "2")
    code, text, _ = run(*options, *WATCHED, "--out", str(tmp_path))
    assert code == 0
    assert "tag check" in text
    assert "faults injected on real pages of the decode pool: laptop, 2 layers on cpu" in text
    (row,) = (line.split() for line in text.splitlines() if line.startswith("late_writer"))
    assert row == ["late_writer", "write", "2", "2", "0", "2", "0", "0", "2", "0"]
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    found = {one["name"]: one for one in summary["injection"]["classes"]}
    assert list(found) == classes.split(",")
    assert found["stale_page_table"]["caught_by_tags"] == 2
    assert found["corrupted_transfer"]["caught_by_checksum"] == 2
    assert all(one["neighbours_equal"] == one["injected"] == 2 for one in found.values())
    assert summary["injection"]["page_tokens"] == 16


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--inject", "gremlins"), "use all, or some of stale_page_table"),
        (("--inject", ""), "use all"),
    ],
)
def test_an_unknown_class_is_refused_before_anything_is_run(
    monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], problem: str
) -> None:
    monkeypatch.setattr("tonnage.execution.execute", lambda *_, **__: pytest.fail("was run"))
    code, _, error = run(*options)
    assert code != 0
    assert isinstance(error, BadInputError)
    assert problem in str(error)
