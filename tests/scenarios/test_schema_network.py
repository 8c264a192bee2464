"""The `link` and `router` sections: what they mean, and what a user reads when they are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tonnage.scenarios.link_presets import LINK_PRESETS
from tonnage.scenarios.load import parse_scenario
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import BadInputError
from tonnage.sim.serving.router import RoutingSpec

SPLIT = {"prefill": {"instances": 2}, "decode": {"instances": 4}}
TRACE = {"kind": "trace", "path": "mooncake_conversation.jsonl.gz"}


def scenario(**sections: Any) -> Scenario:
    return parse_scenario({"pools": SPLIT, "traffic": TRACE} | sections, "mine.yaml")


def message(**sections: Any) -> str:
    with pytest.raises(BadInputError) as caught:
        scenario(**sections).link_spec()
    return str(caught.value)


# --- link ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gpu", "kind", "bytes_per_s"),
    [
        ("h200-sxm", "rdma", 50e9),
        ("a100-80g", "rdma", 25e9),
        ("h200-sxm", "nvlink", 450e9),
        ("h200-sxm", "pcie", 64e9),
    ],
)
def test_without_a_bandwidth_it_is_the_datasheets(gpu: str, kind: str, bytes_per_s: float) -> None:
    link = scenario(gpu=gpu, link={"kind": kind}).link_spec()
    assert (link.bandwidth_bytes_per_s, link.source) == (bytes_per_s, "datasheet")


def test_each_end_has_the_ports_of_its_own_gpu() -> None:
    pools = {"prefill": {"gpu": "a100-80g"}, "decode": {"gpu": "b200-sxm"}}
    link = scenario(pools=pools).link_spec()
    assert link.bandwidth_bytes_per_s == 25e9
    assert link.receiver_bandwidth_bytes_per_s == 100e9


def test_a_bandwidth_may_be_of_a_node_and_not_all_of_it_usable() -> None:
    link = {"bandwidth": "200GB/s", "per": "node", "efficiency": 0.7, "setup": "1ms"}
    spec = scenario(link=link).link_spec()
    assert spec.bandwidth_bytes_per_s == pytest.approx(0.7 * 25e9)
    assert (spec.setup_s, spec.source) == (1e-3, "given")


def test_a_preset_takes_the_place_of_what_it_knows() -> None:
    link = {"preset": "mooncake-tcp-8x400g", "kind": "rdma", "bandwidth": "400Gb/s"}
    given = scenario(link=link)
    spec = given.link_spec()
    assert (spec.kind, spec.bandwidth_bytes_per_s) == ("tcp", 41e9 / 8)
    assert spec.source.startswith("mooncake-tcp-8x400g: Mooncake Transfer Engine")
    again = parse_scenario(given.resolved())
    assert again.link_spec() == spec


def test_the_benchmarks_preset_meets_the_times_that_it_was_fitted_to() -> None:
    """Published for Qwen3-8B (147,456 B of KV per token), eight adapters of 200 Gb/s."""
    published_ms = {128: 0.54, 256: 0.61, 512: 0.92, 1024: 1.50, 2048: 2.51}
    published_ms |= {4096: 4.75, 8192: 8.84, 16384: 16.43, 32768: 31.65}
    preset = LINK_PRESETS["vllm-mooncake-8x200g"]
    for tokens, time_ms in published_ms.items():
        predicted_s = preset.setup_s + tokens * 147_456 / preset.node_bandwidth_bytes_per_s
        assert predicted_s == pytest.approx(time_ms * 1e-3, rel=0.08)


def test_chunks_leave_early_where_the_engine_lets_them() -> None:
    assert scenario().sends_early()
    assert not scenario(link={"overlap": False}).sends_early()
    assert not scenario(engine={"name": "vllm"}).sends_early()


@pytest.mark.parametrize(
    ("sections", "mend"),
    [
        ({"link": {"preset": "mooncake-tcp"}}, "link.preset: there is no 'mooncake-tcp'; did you"),
        ({"link": {"kind": "tcp"}}, "link.bandwidth: that of tcp on h200-sxm is not known; give"),
        ({"link": {"kind": "nvmeof"}}, "give it, such as 10GB/s"),
        ({"link": {"kind": "nvlink"}, "gpu": "l40s"}, "that of nvlink on l40s is not known"),
        ({"link": {"efficiency": 1.2}}, "link.efficiency: must be less than or equal to 1"),
        ({"link": {"overlap": "maybe"}}, "link.overlap: 'maybe' is not true, false or auto"),
        ({"link": {"convert": "both"}}, "sender, receiver"),
        (
            {"link": {"overlap": True}, "engine": {"name": "vllm"}},
            "link.overlap: vllm gives decode pages after the prompt",
        ),
    ],
)
def test_a_wrong_link_is_told_how_to_mend_it(sections: dict[str, Any], mend: str) -> None:
    assert mend in message(**sections)


# --- router -------------------------------------------------------------------------------------


def test_a_router_is_token_aware_without_affinity_by_default() -> None:
    assert scenario().routing_spec() == RoutingSpec()


def test_prefill_and_decode_policies_replace_the_common_one() -> None:
    router = {"policy": "random", "prefill": "cache_aware", "down": {"decode": 3}}
    spec = scenario(router=router).routing_spec()
    policies = [spec.policy_of(role) for role in ("prefill", "decode")]
    assert policies == ["cache_aware", "random"]
    assert spec.down == {"decode": (3,)}


@pytest.mark.parametrize(
    ("router", "factor"),
    [
        ({"affinity": "session"}, None),
        ({"affinity": "prefix"}, 1.25),
        ({"affinity": "prefix", "load_factor": 2}, 2.0),
        ({"affinity": "session", "load_factor": 1.5}, 1.5),
    ],
)
def test_when_an_instance_is_full(router: dict[str, Any], factor: float | None) -> None:
    assert scenario(router=router).routing_spec().load_factor == factor


@pytest.mark.parametrize(
    ("router", "mend"),
    [
        ({"policy": "nearest"}, "power_of_two, cache_aware"),
        ({"regions": 3}, "router.regions: 3, but the prefill pool has 2 instances to put there"),
        ({"hop_probability": 1.5}, "router.hop_probability: must be less than or equal to 1"),
        ({"load_factor": 0.9}, "router.load_factor: must be greater than or equal to 1"),
        ({"down": {"decode": [0, 4]}}, "there is no instance 4; they are 0 to 3"),
        ({"down": {"prefill": [1, 0]}}, "router.down.prefill: no instance is left"),
        ({"regions": 2, "down": {"prefill": 0, "decode": [2, 3]}}, "no region is left with an"),
        ({"down": {"serve": 0}}, "router.down.serve: there is no such pool"),
        ({"down": 1}, "write it like {decode: [0]}"),
        ({"polcy": "random"}, "did you mean 'policy'"),
    ],
)
def test_a_wrong_router_is_told_how_to_mend_it(router: dict[str, Any], mend: str) -> None:
    assert mend in message(router=router)


def test_affinity_needs_something_to_be_bound_to() -> None:
    problem = message(router={"affinity": "session"}, traffic={"kind": "closed"})
    assert "router.affinity: requests of kind closed belong to no session" in problem
