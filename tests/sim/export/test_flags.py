"""The flag tables: every flag and value in them is one that the listed versions take."""

from __future__ import annotations

import pytest

from tonnage.sim.export.flags import (
    FlagTable,
    Option,
    argument_list,
    dynamo_data,
    engines,
    flag_table,
)
from tonnage.sim.serving.router import POLICIES
from tonnage.sim.units import version_key

ENGINE_VERSIONS = [
    ("sglang", "0.5.21"),
    ("sglang", "0.5.23"),
    ("vllm", "0.31.0"),
    ("vllm", "0.33.0"),
]


@pytest.mark.parametrize(("engine", "version"), ENGINE_VERSIONS)
def test_every_flag_of_a_table_is_known_to_its_versions(engine: str, version: str) -> None:
    table = flag_table(engine, version)
    assert table.listed_version == version
    rows = [row for row in table.data["settings"] if row["flag"]]
    used = 0
    for row in rows:
        since, until = row.get("since", "0"), row.get("until", "999")
        if not version_key(since) <= version_key(version) < version_key(until):
            continue
        used += 1
        values = row.get("values", {}).values() or [None]
        for value in values:
            if row.get("form") == "switch":
                assert table.arguments.problem(Option(row["flag"])) is None
            elif value is not None:
                assert table.arguments.problem(Option(row["flag"], value)) is None
            else:
                assert "no such flag" not in str(table.arguments.problem(Option(row["flag"], "1")))
    assert used > 15


@pytest.mark.parametrize(("engine", "version"), ENGINE_VERSIONS)
def test_the_flags_of_nodes_and_quantisation_are_known(engine: str, version: str) -> None:
    table = flag_table(engine, version)
    nodes = table.data["nodes"]
    assert table.arguments.problem(Option(nodes["count"], "2")) is None
    assert table.arguments.problem(Option(nodes["rank"], "1")) is None
    assert table.arguments.problem(Option(nodes["address"], "10.0.0.1")) is None
    if nodes["follower"]:
        assert table.arguments.problem(Option(nodes["follower"])) is None
    for method in table.data["online_weights"].values():
        assert table.arguments.problem(Option("--quantization", method)) is None


@pytest.mark.parametrize("engine", engines())
def test_every_policy_of_ours_is_one_of_the_routers_or_has_a_nearest(engine: str) -> None:
    router = flag_table(engine, "0.33").data["router"]
    arguments = argument_list(router["arguments"])
    assert set(router["policies"]) | set(router["nearest"]) == set(POLICIES)
    for affinity in router["affinity"].values():
        assert arguments.problem(Option("--policy", affinity["policy"])) is None
        for flag, value in affinity["options"]:
            assert arguments.problem(Option(flag, value)) is None
    for word in (*router["policies"].values(), *router["nearest"].values()):
        for flag in ("--policy", "--prefill-policy", "--decode-policy"):
            assert arguments.problem(Option(flag, word)) is None
    for flag in (router["disaggregated"], "--service-discovery"):
        assert arguments.problem(Option(flag)) is None


def test_dynamo_knows_its_routing_modes() -> None:
    data = dynamo_data()
    arguments = argument_list(data["arguments"])
    assert set(data["policies"]) | set(data["nearest"]) == set(POLICIES)
    for mode in (*data["policies"].values(), *data["nearest"].values(), data["prefix_affinity"]):
        assert arguments.problem(Option("--router-mode", mode)) is None
    assert arguments.problem(Option(data["session_affinity"], "3600")) is None


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        (Option("--mem-fraction-static", "0.9"), None),
        (Option("--tensor-parallel-size", "8"), None),  # an alias
        (Option("--mem-fraction", "0.9"), "--mem-fraction: sglang 0.5.23 has no such flag"),
        (Option("--tp-size", "eight"), "--tp-size eight: not of type int"),
        (Option("--mem-fraction-static", "most"), "not of type float"),
        (Option("--kv-cache-dtype", "fp8"), "--kv-cache-dtype fp8: not one of auto"),
        (Option("--disable-radix-cache", "true"), "--disable-radix-cache: takes no value"),
        (Option("--tp-size"), "--tp-size: needs a value"),
        (Option("--no-dcp-replicate-q-proj"), None),
        (Option("--no-disable-radix-cache"), "no such flag"),  # a switch without the other form
        (Option("--no-such-thing"), "no such flag"),
    ],
)
def test_a_list_says_what_is_wrong_with_an_option(option: Option, problem: str | None) -> None:
    found = argument_list("sglang-0.5.23").problem(option)
    assert found is None if problem is None else problem in str(found)


def test_json_that_is_none_is_told() -> None:
    vllm = argument_list("vllm-0.33.0")
    assert vllm.problem(Option("--kv-transfer-config", '{"a":1}')) is None
    assert "not of type json" in str(vllm.problem(Option("--kv-transfer-config", "{a}")))


@pytest.mark.parametrize(
    ("version", "listed"),
    [("0.5.10", "0.5.21"), ("0.5.21", "0.5.21"), ("0.5.22", "0.5.21"), ("0.6.0", "0.5.23")],
)
def test_a_version_without_a_list_is_checked_against_the_nearest(version: str, listed: str) -> None:
    assert flag_table("sglang", version).listed_version == listed


def test_a_setting_has_one_flag_per_version() -> None:
    table = flag_table("sglang", "0.5.22")
    options = table.options({"attention_dp": 8, "has_attention_dp": True, "tp": 8, "pp": 1})
    assert options == [Option("--tp-size", "8"), Option("--attn-dp-size", "8")]
    older = FlagTable(table.data, "0.5.21").options({"attention_dp": 8, "has_attention_dp": True})
    assert older == [Option("--dp-size", "8"), Option("--enable-dp-attention")]
