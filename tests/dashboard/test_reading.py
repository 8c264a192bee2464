"""What is typed and uploaded: strict, bounded, and from one folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tonnage.dashboard.reading import (
    MOST_TEXT_BYTES,
    MOST_UPLOAD_BYTES,
    read_scenario,
    read_variants,
    upload_text,
)
from tonnage.scenarios.catalogue import scenario_names, scenario_path
from tonnage.scenarios.load import load_scenario, load_variants
from tonnage.sim.domain import BadInputError


@pytest.mark.parametrize("name", scenario_names())
def test_a_shipped_scenario_reads_as_its_file(name: str, tmp_path: Path) -> None:
    text = scenario_path(name).read_text()
    assert read_scenario(text, tmp_path).resolved() == load_scenario(name).resolved()
    variants = {label: one.resolved() for label, one in read_variants(text, tmp_path).items()}
    assert variants == {label: one.resolved() for label, one in load_variants(name).items()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "line 1"),
        ("- a list", "write a mapping"),
        ("modle: kimi-k2.6", "did you mean 'model'"),
        ("pools: {serve: {tp: 7.5}}", "pools.serve.tp: 7.5 is not a whole number"),
        ("seed: &a 1\ntraffic: {requests: *a}", r"line 2: \*a is an alias"),
        ("traffic: {requests: 2000000}", "at most 1,000,000 here"),
        ("traffic: {kind: sessions, session: {count: 30000}}", "at most 20,000 here"),
        (f"traffic: {{concurrency: {list(range(1, 90))}}}", "89 points; at most 64"),
        (f"name: {'x' * MOST_TEXT_BYTES}", "longer than 200 kB"),
        ("model: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    ],
)
def test_a_bad_scenario_says_what_to_mend(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=message):
        read_scenario(text, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        "model: {outside}/config.json",
        "model: ../config.json",
        "profile: /etc/a.profile",
        "gpu: sub/../../gpu.yaml",
        "traffic: {{kind: trace, path: {outside}/trace.csv}}",
        "traffic: {{input_tokens: {{kind: file, file: {outside}/lengths.csv}}}}",
        "pools: {{serve: {{speculation: {{draft: /etc/config.json}}}}}}",
        "variants: {{a: {{model: /etc/passwd}}}}",
        "model: link/config.json",
    ],
)
def test_no_file_outside_the_folder_is_named(text: str, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    inside = tmp_path / "inside"
    outside.mkdir()
    inside.mkdir()
    (inside / "link").symlink_to(outside)
    with pytest.raises(BadInputError, match="outside the dashboard's folder"):
        read_scenario(text.format(outside=outside), inside)


def test_prose_may_hold_what_looks_like_a_path(tmp_path: Path) -> None:
    scenario = read_scenario("description: /etc/passwd is not opened", tmp_path)
    assert scenario.description.startswith("/etc")


def test_a_file_in_the_folder_is_read(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("input_tokens\n100\n300\n")
    text = "traffic: {input_tokens: {kind: file, file: lengths.csv, column: input_tokens}}"
    lengths = read_scenario(text, tmp_path).traffic_spec().input_tokens
    assert lengths.mean() == 200


def test_an_upload_is_text_and_not_too_large() -> None:
    assert upload_text("a.csv", b"\xef\xbb\xbfid\n1\n") == "id\n1\n"
    with pytest.raises(BadInputError, match="200 MB; at most 20 MB can be uploaded"):
        upload_text("a.csv", bytes(10 * MOST_UPLOAD_BYTES))
    with pytest.raises(BadInputError, match="save it as UTF-8"):
        upload_text("a.csv", b"\xff\xfe")
