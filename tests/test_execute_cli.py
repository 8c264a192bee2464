"""`tonnage execute` on the kernels of a CPU."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tonnage.cli import app
from tonnage.sim.domain import BadInputError, InfeasibleError
from tonnage.step_devices import DeviceChoice, device_maker

pytest.importorskip("torch", reason="no torch: pip install 'tonnage[kernels]'")

LITTLE = ("--set", "traffic.concurrency=2", "--set", "traffic.requests=4")
SHORT = ("--set", "traffic.input_tokens=64", "--set", "traffic.output_tokens=8")
SPECULATION = {"draft": "free", "draft_tokens": 2, "accept_length": 2}
SPECULATING = tuple(
    part
    for field, value in SPECULATION.items()
    for part in ("--set", f"pools.decode.speculation.{field}={value}")
)


def run(*arguments: str) -> tuple[int, str, BaseException | None]:
    result = CliRunner().invoke(app, ["execute", *arguments])
    return result.exit_code, result.stdout, result.exception


def test_a_laptop_scenario_is_executed_and_compared(tmp_path: Path) -> None:
    code, text, _ = run("laptop", *LITTLE, *SHORT, "--budget", "4s", "--out", str(tmp_path))
    assert code == 0
    assert "standing for" in text
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    for role, pool in summary["pools"].items():
        assert 0 < pool["share_of_time_measured"] <= 1.0 + 1e-9
        assert pool["device"]["backend"] == "cpu"
        assert pool["device"]["kv_pages"] > 0
        assert set(pool["measured_over_predicted"]) == {role}
    (point,) = summary["points"]
    pair = point["figures"]["tpot_s.mean"]
    assert pair["error"] == pytest.approx(pair["predicted"] / pair["executed"] - 1)
    assert summary["executed"][0]["requests"]["completed"] == 4


def test_json_alone_and_fewer_layers_with_the_tag_check() -> None:
    options = ("--layers", "2", "--tags", "--budget", "2s", "--json", "-")
    code, text, _ = run("laptop", *LITTLE, *SHORT, *options)
    assert code == 0
    device = json.loads(text)["pools"]["decode"]["device"]
    assert device["layers_run"] == 2 < device["layers"]
    assert device["tag_check"] is True


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("laptop", "--device", "tpu"), "use cpu or cuda"),
        (("laptop", "--budget", "soon"), "is not a duration"),
        (("laptop", "--budget", "0s"), "nothing to measure"),
        (("laptop", *SPECULATING), "switch speculation off"),
    ],
)
def test_a_mistake_is_one_message(arguments: tuple[str, ...], problem: str) -> None:
    code, _, error = run(*arguments, *LITTLE, *SHORT)
    assert code != 0
    assert isinstance(error, BadInputError)
    assert problem in str(error)


def test_a_rank_that_does_not_fit_is_refused_before_it_is_made() -> None:
    code, _, error = run("kimi-k2.6-h200", *LITTLE, *SHORT)
    assert code != 0
    assert isinstance(error, InfeasibleError)
    assert "run fewer layers" in str(error)


def test_without_torch_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(BadInputError, match=r"pip install 'tonnage\[kernels\]'"):
        device_maker(DeviceChoice())
