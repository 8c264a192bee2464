"""The `clients` and `outages` sections: what they say to the engine, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from tonnage.scenarios.load import parse_scenario
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_outages import outages_spec
from tonnage.sim.domain import BadInputError
from tonnage.sim.serving.breaker import BreakerSpec
from tonnage.sim.serving.outages import InstanceCrash, LinkFault, Outages
from tonnage.sim.serving.retries import BackOff, ClientSpec

SPLIT = {
    "prefill": {"instances": 2, "tp": 8},
    "decode": {"instances": 3, "tp": 8, "kv": "fp8_e4m3"},
}


def scenario(**fields: Any) -> Scenario:
    return parse_scenario({"pools": SPLIT, **fields})


def problem(**fields: Any) -> str:
    with pytest.raises(BadInputError) as raised:
        scenario(**fields)
    return str(raised.value)


def test_by_default_clients_try_once_and_all_is_well() -> None:
    plain = scenario()
    assert plain.clients.spec() is None
    assert outages_spec(plain.outages) is None
    assert not {"clients", "outages"} & set(plain.resolved())
    assert "no_instance" not in plain.resolved()["router"]


def test_clients_in_the_engines_terms() -> None:
    """What is not said is as sglang_router has it."""
    assert scenario(clients={"attempts": 5}).clients.spec() == ClientSpec(
        5, back_off=BackOff(0.05, 1.5, 30.0, 0.2)
    )
    given = {
        "attempts": 3,
        "retry_on": "aborted",
        "back_off": {"first": "1s", "factor": 2, "most": "1min", "jitter": 0.5},
        "breaker": {"scope": "instance"},
        "deadline": "90s",
    }
    assert scenario(clients=given).clients.spec() == ClientSpec(
        3,
        frozenset({"aborted"}),
        BackOff(1.0, 2.0, 60.0, 0.5),
        BreakerSpec("instance", 10, 60.0, 3),
        90.0,
    )


def test_outages_in_the_engines_terms() -> None:
    given = [
        {"kind": "instance_crash", "pool": "decode", "instance": 2, "at": "1min"},
        {"kind": "instance_crash", "rate_per_hour": 0.5, "restart": None, "lost": "recompute"},
        {"kind": "slow_link", "at": "5s", "until": "8s", "factor": 0.25, "pool": "prefill"},
        {"kind": "dead_link", "until": "3s", "instance": "any"},
        {"kind": "lost_abort", "probability": 0.5},
        {"kind": "lost_abort", "probability": 0.5},
    ]
    found = outages_spec(scenario(outages=given, traffic={"timeout": "30s"}).outages)
    assert found == Outages(
        (
            InstanceCrash("decode", 2, 60.0),
            InstanceCrash(rate_per_hour=0.5, restart_s=None, lost="recompute"),
        ),
        (LinkFault(5.0, 8.0, 0.25, "prefill"), LinkFault(0.0, 3.0)),
        0.75,
    )


def test_a_resolved_scenario_says_the_same() -> None:
    given = [{"kind": "instance_crash", "pool": "decode", "at": "1min"}]
    one = scenario(outages=given, clients={"attempts": 2}, router={"no_instance": "wait"})
    assert parse_scenario(one.resolved()).resolved() == one.resolved()


@pytest.mark.parametrize(
    ("outage", "words"),
    [
        ({"kind": "crash"}, "outages.0.kind: 'crash': did you mean 'instance_crash'"),
        ({"at": "1s"}, "outages.0.kind: null"),
        ({"kind": "instance_crash"}, "outages.0.at: a crash needs a time, such as 60s"),
        ({"kind": "instance_crash", "at": "1s", "rate_per_hour": 1}, "outages.0.at"),
        ({"kind": "instance_crash", "at": "1s", "pool": "serve"}, "use prefill or decode"),
        (
            {"kind": "instance_crash", "at": "1s", "pool": "prefill", "instance": 2},
            "outages.0.instance: there is no instance 2; they are 0 to 1",
        ),
        ({"kind": "instance_crash", "at": "1s", "last": "x"}, "outages.0.last: unknown field"),
        ({"kind": "slow_link", "at": "3s"}, "outages.0.until: write the time"),
        ({"kind": "slow_link", "at": "3s", "until": "2s"}, "outages.0.until"),
        ({"kind": "slow_link", "until": "2s", "factor": 0}, "outages.0.factor"),
        ({"kind": "lost_abort"}, "no client leaves before its answer; set traffic.timeout"),
        ("crash", "outages.0: 'crash' is no outage; write it like"),
    ],
    ids=str,
)
def test_what_could_not_happen_is_refused(outage: Any, words: str) -> None:
    assert words in problem(outages=[outage])


def test_what_a_deployment_could_not_do_is_refused() -> None:
    slow = {"kind": "slow_link", "until": "2s"}
    together = {"serve": {"instances": 2, "tp": 8, "kv": "fp8_e4m3"}}
    assert "a serve pool sends no KV anywhere" in problem(outages=[slow], pools=together)
    gone = {"kind": "instance_crash", "at": "1s", "restart": None}
    assert "might wait for ever" in problem(outages=[gone], router={"no_instance": "wait"})
    resident = {"kind": "resident", "concurrency": 8}
    assert "stays up" in problem(outages=[{**gone}], traffic=resident)
    assert "use scope pool" in problem(clients={"breaker": {"scope": "instance"}}, traffic=resident)
    assert "clients.deadline" in problem(clients={"deadline": "1s"}, traffic=resident)
    assert "is not a list" in problem(outages=3)


@pytest.mark.parametrize(
    ("clients", "words"),
    [
        ({"attempts": 0}, "clients.attempts"),
        ({"retry_on": ["abort"]}, "'abort': did you mean 'aborted'?"),
        ({"retry_on": 5}, "clients.retry_on: 5 is not a list"),
        ({"back_off": {"first": "40s"}}, "clients.back_off.most: 30 s is less than first, 40 s"),
        ({"back_off": {"jitter": 2}}, "clients.back_off.jitter"),
        ({"breaker": {"scope": "fleet"}}, "clients.breaker.scope"),
    ],
    ids=str,
)
def test_clients_that_could_not_be_are_refused(clients: Any, words: str) -> None:
    assert words in problem(clients=clients)
