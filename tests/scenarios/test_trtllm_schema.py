"""TensorRT-LLM as the engine of a scenario."""

from __future__ import annotations

from typing import Any

import pytest

from tonnage.pools import built_pools, times_of
from tonnage.scenarios.load import parse_scenario
from tonnage.sim.domain import BadInputError
from tonnage.sim.export.flags import flag_table

DATA: dict[str, Any] = {
    "model": "llama-3.1-8b",
    "gpu": "h200-sxm",
    "engine": {"name": "trtllm"},
    "pools": {"serve": {"tp": 1}},
}


def test_a_scenario_takes_its_defaults_and_its_profile() -> None:
    scenario = parse_scenario(DATA, "mine")
    assert scenario.engine_spec().version == "1.3"
    pools = built_pools(scenario)
    spec = pools["serve"].spec
    assert (spec.chunk_tokens, spec.page_tokens, spec.max_running_requests) == (8192, 32, 2048)
    assert pools["serve"].memory.mem_fraction == 0.9
    assert times_of(scenario, pools)["serve"].profile == "h200-sxm-trtllm"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cache": {"gpu": True, "policy": "lfu"}}, "trtllm evicts what was used least recently"),
        (
            {"pools": {"prefill": {"tp": 1}, "decode": {"tp": 1}}, "link": {"overlap": True}},
            "trtllm gives decode pages after the prompt",
        ),
    ],
)
def test_what_it_does_not_do_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        parse_scenario({**DATA, **change}, "mine")


def test_its_flags_are_not_known() -> None:
    with pytest.raises(BadInputError, match="no flags are known for 'trtllm'"):
        flag_table("trtllm", "1.3")
