"""The two logged vLLM runs predicted from profiles: nothing of the logs goes into the step times.

No term is fitted on them. The RTX PRO 6000's kernels are imported tables, its all-reduce those of
the logged vLLM version; the RTX 4090 has no tables at all: an L40S's, moved by the datasheets.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tonnage.sim.results.other_tools.vllm_log import read_vllm_log
from tonnage.validate_run import ReplayChoice, validate_vllm_logs

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT.parent / "shared" / "truth" / "vllm_runs"
pytestmark = pytest.mark.skipif(not RUNS.exists(), reason="shared/truth is not beside the checkout")
IMPORTED, SCALED = "RTXPRO6000_Qwen3-32B", "RTX4090_Llama-3.1-8B"


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    logs = [read_vllm_log(RUNS / name) for name in (IMPORTED, SCALED)]
    return validate_vllm_logs(logs, ReplayChoice()).to_dict()


@pytest.mark.parametrize(
    ("name", "ttft", "tpot", "e2e"), [(IMPORTED, 0.10, 0.08, 0.08), (SCALED, 0.14, 0.10, 0.12)]
)
def test_means_and_requests(
    told: dict[str, Any], name: str, ttft: float, tpot: float, e2e: float
) -> None:
    run = told["summary"]["by_run"][name]
    assert run["predicted"] == run["rows"] == 300
    assert abs(run["mean_ttft"]["error"]) < ttft
    assert abs(run["mean_tpot"]["error"]) < tpot
    assert run["e2e_median_abs_error"] < e2e


def test_the_log_says_where_its_times_come_from(told: dict[str, Any]) -> None:
    assert "rtx-pro-6000-vllm-0.19" in told["assumptions"][IMPORTED][0]
    assert "timed on l40s, scaled by the datasheets to rtx-4090" in told["assumptions"][SCALED][0]


def test_how_gpus_reach_each_other_is_what_matters_without_nvlink() -> None:
    """With the later collection's all-reduce, from a machine whose GPUs reach each other."""
    log = read_vllm_log(RUNS / IMPORTED)
    choice = ReplayChoice(profile="rtx-pro-6000-vllm")
    run = validate_vllm_logs([log], choice).to_dict()["summary"]["by_run"][IMPORTED]
    assert run["mean_tpot"]["error"] < -0.2
    assert run["mean_ttft"]["error"] < -0.25
