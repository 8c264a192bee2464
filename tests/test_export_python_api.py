"""The example of docs/python_api.md, executed as it stands."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import tonnage
from tonnage.sim.planning.fleet_plan import FleetPlan

PAGE = Path(__file__).parents[1] / "docs" / "python_api.md"


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the blocks one after the other, and return the names that they leave."""
    folder = tmp_path_factory.mktemp("example")
    (folder / "chat.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    names: dict[str, Any] = {"folder": folder, "__name__": "example"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for block in blocks("python"):
            exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_memory_and_simulation_are_dataclasses_with_frames(example: dict[str, Any]) -> None:
    assert example["memory"].pools["serve"]["kv_tokens"] > 100_000
    assert example["figures"]["latency"]["ttft_s"]["p95"] > 0
    assert isinstance(example["requests"], pd.DataFrame)
    assert len(example["requests"]) == 200


def test_a_sweep_is_a_frame_of_its_points(example: dict[str, Any]) -> None:
    loads = example["loads"]
    assert list(loads["traffic.rate_per_s"]) == [4, 16]
    rates = loads["throughput.output_tokens_per_s"]
    assert rates.iloc[1] > rates.iloc[0]


def test_a_plan_is_found_exported_and_its_script_is_valid(example: dict[str, Any]) -> None:
    fleet = example["fleet"]
    assert isinstance(fleet, FleetPlan)
    assert fleet.launchable
    assert fleet.feasible
    script = (example["folder"] / "chat.vllm.sh").read_text()
    assert f"--max-num-seqs {fleet.pools[0].max_running_requests}" in script
    checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
    assert checked.returncode == 0
    assert (example["folder"] / "chat.html").stat().st_size > 3_000_000


def test_every_function_that_the_page_names_is_one_of_the_package() -> None:
    table = PAGE.read_text(encoding="utf-8").split("## An example")[0]
    named = set(re.findall(r"^\| `(\w+)\(", table, re.MULTILINE))
    assert {"memory", "simulate", "sweep", "plan", "export"} <= named <= set(tonnage.__all__)
    for name in named:
        assert callable(getattr(tonnage, name))
