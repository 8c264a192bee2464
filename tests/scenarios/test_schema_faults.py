"""The `faults` list of a scenario: what it becomes, and what is told about one that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from tonnage.scenarios.load import parse_scenario
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import BadInputError
from tonnage.sim.serving.data_faults import FaultClass, FaultSpec

SPLIT = {"prefill": {"tp": 8}, "decode": {"tp": 8, "instances": 2}}


def scenario(faults: Any, **fields: Any) -> Scenario:
    data: dict[str, Any] = {"pools": SPLIT, "faults": faults, **fields}
    return parse_scenario(data, "some.yaml")


def test_a_fault_acts_on_the_pool_where_it_can() -> None:
    found = scenario(
        [
            {"kind": "early_reuse", "per_allocation": 1e-4},
            {"kind": "lease_expiry", "per_step": "0.01"},
            {"kind": "wrong_scale", "at": ["500ms", 2], "pool": "prefill", "instance": 0},
        ]
    ).fault_specs(61)
    assert found == (
        FaultSpec(FaultClass.EARLY_REUSE, "decode", per_allocation=1e-4, layers=61),
        FaultSpec(FaultClass.LEASE_EXPIRY, "prefill", per_step=0.01, layers=61),
        FaultSpec(FaultClass.WRONG_SCALE, "prefill", at_s=(0.5, 2.0), instance=0, layers=61),
    )


def test_a_resolved_scenario_says_the_same() -> None:
    first = scenario({"kind": "late_writer", "at": "1s"})
    again = parse_scenario(first.resolved(), "again.yaml")
    assert again.fault_specs(3) == first.fault_specs(3)
    assert "faults" not in scenario([]).resolved()


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        (3, "faults: 3 is not a list; write it like [{kind: early_reuse, per_allocation: 1e-4}]"),
        ([7], "faults.0: 7 is no fault; write it like {kind: early_reuse, per_allocation: 1e-4}"),
        ([{"kind": "early_reus", "per_step": 1}], "faults.0.kind: 'early_reus': did you mean"),
        ([{"per_step": 0.5}], "faults.0.kind: is missing"),
        ([{"kind": "wrong_scale"}], "faults.0.per_allocation: how often?"),
        ([{"kind": "wrong_scale", "per_step": 1, "at": "1s"}], "faults.0.at: beside per_step"),
        ([{"kind": "wrong_scale", "per_step": 2}], "faults.0.per_step: must be"),
        ([{"kind": "wrong_scale", "per_step": 1, "pool": "serve"}], "faults.0.pool: there is no"),
        ([{"kind": "wrong_scale", "per_step": 1, "instance": 2}], "faults.0.instance: there is no"),
        ([{"kind": "lease_expiry", "per_step": 1, "pool": "decode"}], "faults.0.pool: only a"),
        ([{"kind": "corrupted_transfer", "per_step": 1, "pool": "prefill"}], "faults.0.pool: KV"),
        (
            [{"kind": "read_before_load", "per_step": 1, "pool": "prefill"}],
            "faults.0.pool: nothing is loaded there; set cache.host",
        ),
        ([{"kind": "wrong_scale", "at": "-1s"}], "faults.0.at: "),
    ],
)
def test_a_fault_that_cannot_be_is_told_with_its_field(faults: Any, told: str) -> None:
    with pytest.raises(BadInputError, match=r"some\.yaml") as error:
        scenario(faults)
    assert told in str(error.value)


def test_what_is_loaded_from_host_memory_can_be_read_too_early() -> None:
    fault = {"kind": "read_before_load", "per_step": 0.1}
    served = {"serve": {"tp": 8}}
    assert scenario(fault, pools=served, cache={"gpu": True, "host": "10GB"}).faults
    with pytest.raises(BadInputError, match="nothing is loaded there"):
        scenario(fault, pools=served)
