"""A profile comes back as written, is written whole or not at all, and says what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tonnage.sim.cost.profile import (
    HEADER_FILE,
    SCHEMA_VERSION,
    Profile,
    ProfileHeader,
    load_header,
    load_profile,
    write_profile,
)
from tonnage.sim.domain import BadInputError


def header(**changed: Any) -> ProfileHeader:
    fields: dict[str, Any] = {
        "name": "h200-sxm-sglang",
        "gpu": "h200-sxm",
        "engine": "sglang",
        "engine_version": "0.5.14",
        "source": "imported",
        "source_text": "kernel tables of a package",
        "licence": "Apache-2.0",
        "date": "2026-11-30",
        "tonnage_version": "0.1.0",
        "fitted": {"gemm": {"bf16": {"t0_s": 3.9e-6, "knots": [1, 8, 64]}}},
        "errors": {"gemm": {"bf16": error()}},
        "missing": ("all_to_all",),
    }
    return ProfileHeader(**{**fields, **changed})


def error(**changed: Any) -> dict[str, Any]:
    fields = {"median": 0.04, "p90": 0.2, "interval": [0.9, 1.2], "held_out": "(n, k)", "n": 9}
    return {**fields, **changed}


def gemm_table() -> pd.DataFrame:
    return pd.DataFrame(
        {
            "format": ["bf16", "fp8"],
            "m": [1, 64],
            "seconds": [1.25e-5, 3e-5],
            "in_graph": [True, False],
        }
    )


def sample() -> Profile:
    return Profile(header(), {"gemm": gemm_table()})


# --- round trip ---------------------------------------------------------------------------------

_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
_columns = st.sampled_from(["text", "int64", "int32", "float64", "float32", "bool"])
_table_names = st.from_regex(r"[a-z0-9][a-z0-9_]{0,8}", fullmatch=True)


@st.composite
def tables(draw: st.DrawFn) -> pd.DataFrame:
    rows = draw(st.integers(0, 5))
    data: dict[str, Any] = {}
    for name in draw(st.lists(_texts, min_size=1, max_size=4, unique=True)):
        kind = draw(_columns)
        if kind == "text":
            values = draw(st.lists(_texts, min_size=rows, max_size=rows))
            data[f"c_{name}"] = pd.Series(values, dtype="str")
        else:
            data[f"c_{name}"] = draw(arrays(np.dtype(kind), rows))
    return pd.DataFrame(data)


@settings(max_examples=60, deadline=None)
@given(
    tables=st.dictionaries(_table_names, tables(), max_size=3),
    gpu=_texts.filter(bool),
    median=st.floats(0, 1),
)
def test_a_profile_comes_back_as_it_was_written(
    tables: dict[str, pd.DataFrame],
    gpu: str,
    median: float,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    errors = {"gemm": {"bf16": error(median=median, p90=1.0)}}
    written = Profile(header(gpu=gpu, errors=errors), tables)
    place = tmp_path_factory.mktemp("round") / "one.profile"
    write_profile(written, place)
    read = load_profile(place)
    assert read.header == written.header == load_header(place)
    assert list(read.tables) == sorted(tables)
    for name, table in tables.items():
        pd.testing.assert_frame_equal(read.tables[name], table)


def test_the_same_profile_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        write_profile(sample(), tmp_path / name)
    for file in (HEADER_FILE, "gemm.parquet"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert b"pandas" not in (tmp_path / "one" / "gemm.parquet").read_bytes()


def test_a_profile_is_read_once_until_it_changes(tmp_path: Path) -> None:
    place = tmp_path / "one.profile"
    write_profile(sample(), place)
    first = load_profile(place)
    assert load_profile(place) is first
    write_profile(Profile(header(licence="MIT, or so"), {}), place)
    assert load_profile(place).header.licence == "MIT, or so"
    assert sorted(path.name for path in place.iterdir()) == [HEADER_FILE]


# --- written whole or not at all ----------------------------------------------------------------


def test_what_is_no_profile_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(BadInputError, match="is there and is no profile"):
        write_profile(sample(), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_failure_halfway_leaves_the_old_profile_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "one.profile"
    write_profile(sample(), place)
    before = (place / HEADER_FILE).read_bytes()

    def full(self: Path, *args: object, **kwargs: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)  # the header is written last
    with pytest.raises(BadInputError, match=r"one\.profile: cannot be written: No space left"):
        write_profile(Profile(header(licence="other"), {}), place)
    monkeypatch.undo()
    assert (place / HEADER_FILE).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["one.profile"]
    assert load_profile(place).header.licence == "Apache-2.0"


def test_a_failed_rename_brings_the_old_profile_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "one.profile"
    write_profile(sample(), place)
    rename = Path.rename

    def failing(self: Path, target: Path) -> Path:
        if self.name.endswith(".tmp"):
            raise OSError(5, "Input/output error")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(BadInputError, match="Input/output error"):
        write_profile(Profile(header(licence="other"), {}), place)
    assert load_profile(place).header.licence == "Apache-2.0"
    assert [path.name for path in tmp_path.iterdir()] == ["one.profile"]


def test_a_link_to_a_profile_goes_on_pointing_to_it(tmp_path: Path) -> None:
    write_profile(sample(), tmp_path / "real.profile")
    (tmp_path / "link.profile").symlink_to("real.profile")
    write_profile(Profile(header(licence="other"), {}), tmp_path / "link.profile")
    assert (tmp_path / "link.profile").is_symlink()
    assert load_profile(tmp_path / "real.profile").header.licence == "other"


# --- what a reader is told ----------------------------------------------------------------------


def broken(place: Path, **changed: Any) -> Path:
    """Write a profile whose header then says something else."""
    write_profile(sample(), place)
    data = json.loads((place / HEADER_FILE).read_text())
    (place / HEADER_FILE).write_text(json.dumps({**data, **changed}))
    return place


def refusal(place: Path) -> str:
    with pytest.raises(BadInputError) as caught:
        load_profile(place)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_place_without_a_profile_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none") == f"{tmp_path}/none: no profile there: it has no header.json"


@pytest.mark.parametrize("part", [0.0, 0.3, 0.99])
@pytest.mark.parametrize("file", [HEADER_FILE, "gemm.parquet"])
def test_a_truncated_file_is_named_with_the_mend(tmp_path: Path, file: str, part: float) -> None:
    place = tmp_path / "one.profile"
    write_profile(sample(), place)
    content = (place / file).read_bytes()
    (place / file).write_bytes(content[: int(part * len(content))])
    told = refusal(place)
    assert told.startswith(str(place / file))
    assert "cut off" in told
    assert "tonnage profile import" in told


def test_one_changed_byte_is_found(tmp_path: Path) -> None:
    place = tmp_path / "one.profile"
    write_profile(sample(), place)
    content = bytearray((place / "gemm.parquet").read_bytes())
    content[len(content) // 2] ^= 1
    (place / "gemm.parquet").write_bytes(content)
    assert "cut off or changed" in refusal(place)


def test_a_missing_table_is_named(tmp_path: Path) -> None:
    place = tmp_path / "one.profile"
    write_profile(sample(), place)
    (place / "gemm.parquet").unlink()
    assert refusal(place).startswith(f"{place / 'gemm.parquet'}: cannot be read: No such file")


def test_a_newer_profile_asks_for_a_newer_tonnage(tmp_path: Path) -> None:
    told = refusal(broken(tmp_path / "one.profile", schema_version=SCHEMA_VERSION + 1))
    assert f"schema_version: {SCHEMA_VERSION + 1} is newer than {SCHEMA_VERSION}" in told
    assert "upgrade tonnage" in told


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"schema_version": None}, "schema_version: missing"),
        ({"gpu": None}, "gpu: Input should be a valid string"),
        ({"source": "guessed"}, "source: Input should be 'measured', 'imported' or 'scaled'"),
        ({"date": "yesterday"}, "date: "),
        ({"colour": "red"}, "colour: Extra inputs are not permitted"),
        ({"tables": None}, "tables: Input should be a valid dictionary"),
        ({"tables": {"../x": {"rows": 1, "sha256": ""}}}, "tables.../x"),
        ({"errors": {"gemm": {"bf16": {"median": 0.1}}}}, "errors.gemm.bf16 lacks held_out"),
        ({"errors": {"gemm": {"bf16": error(interval=[1.2, 0.9])}}}, "are not rising positive"),
        ({"errors": {"gemm": {"bf16": error(median=0.5)}}}, "median 0.5 and p90 0.2 do not rise"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changed: dict[str, Any], told: str) -> None:
    message = refusal(broken(tmp_path / "one.profile", **changed))
    assert message.startswith(f"{tmp_path}/one.profile/header.json: ")
    assert told in message


@pytest.mark.parametrize("seconds", [0.0, -1e-6, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(seconds: float) -> None:
    table = gemm_table()
    table.loc[0, "seconds"] = seconds
    with pytest.raises(BadInputError, match="seconds must be positive"):
        Profile(header(), {"gemm": table})


@pytest.mark.parametrize(
    ("name", "table", "told"),
    [
        ("Gemm", gemm_table(), "small letters"),
        ("../gemm", gemm_table(), "small letters"),
        ("gemm", pd.DataFrame({"m": [object()]}), "not text or numbers"),
        ("gemm", pd.DataFrame({"m": pd.Categorical(["a"])}), "not text or numbers"),
        ("gemm", pd.DataFrame([[1, 2]], columns=["m", "m"]), "each once"),
        ("gemm", pd.DataFrame([[1, 2]]), "must be text"),
    ],
)
def test_a_table_that_could_not_come_back_is_refused(
    name: str, table: pd.DataFrame, told: str
) -> None:
    with pytest.raises(BadInputError, match=told):
        Profile(header(), {name: table})
