"""Edits of a scenario's text: the value is there, everything else is as it was."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.dashboard.yaml_edit import with_value
from tonnage.scenarios.catalogue import scenario_names, scenario_path

TEXT = """# what it is
name: a   # the name
pools:
  decode:
    tp: 8
    kv: bf16   # cheap
  prefill: {tp: 4, kv: bf16}
# about prices
price: {gpu_hour_usd: 3.5}
empty:
"""


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        ("name", "b", "name: b   # the name"),
        ("pools.decode.kv", "fp8_e4m3", "    kv: fp8_e4m3   # cheap"),
        ("pools.prefill.kv", "fp8_e4m3", "  prefill: {tp: 4, kv: fp8_e4m3}"),
        ("pools.prefill.ep", 4, "  prefill: {tp: 4, kv: bf16, ep: 4}"),
        ("pools.decode.ep", 8, "    ep: 8"),
        ("empty", [1, 2], "empty: [1, 2]"),
        ("slo.ttft_p95", "5s", "slo: {ttft_p95: 5s}"),
    ],
)
def test_one_line_changes_and_no_comment_is_lost(path: str, value: object, line: str) -> None:
    changed = with_value(TEXT, path.split("."), value)
    assert line in changed.splitlines()
    new = set(changed.splitlines()) - set(TEXT.splitlines())
    assert new == {line}
    assert changed.count("#") == TEXT.count("#")


def test_a_field_is_added_before_the_comment_of_the_next_section() -> None:
    changed = with_value(TEXT, ("pools", "serve"), {"tp": 2}).splitlines()
    assert changed.index("  serve: {tp: 2}") < changed.index("# about prices")


def test_a_block_is_replaced_whole() -> None:
    changed = with_value(TEXT, ("pools",), {"serve": {"tp": 2}})
    assert yaml.safe_load(changed)["pools"] == {"serve": {"tp": 2}}
    assert "# about prices" in changed


def test_an_empty_text_gets_its_first_field() -> None:
    assert with_value("", ("traffic", "requests"), 9) == "traffic: {requests: 9}\n"
    assert yaml.safe_load(with_value("# only this", ("a",), 1)) == {"a": 1}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(scenario_names()),
    path=st.lists(st.sampled_from(["model", "pools", "traffic", "decode", "tp", "new"]), min_size=1)
    .map(tuple)
    .filter(lambda path: len(path) < 4),
    value=st.one_of(st.integers(), st.text("ab:#'\" -1y", max_size=8), st.none(), st.booleans()),
)
def test_the_text_says_what_a_change_of_its_data_would(
    name: str, path: tuple[str, ...], value: object
) -> None:
    text = scenario_path(name).read_text()
    expected = yaml.safe_load(text)
    place = expected
    for key in path[:-1]:
        if not isinstance(place.get(key), dict):
            place[key] = {}
        place = place[key]
    place[path[-1]] = value
    assert yaml.safe_load(with_value(text, path, value)) == expected
