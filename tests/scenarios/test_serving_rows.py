"""The reader of serving results: what it reads, and what it says of a file that it cannot."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from tonnage.scenarios.serving_rows import COLUMNS, ServingRow, read_serving_rows
from tonnage.sim.domain import BadInputError

TOGETHER = {
    "id": "one",
    "model": "Qwen/Qwen3-32B",
    "system": "h100_sxm",
    "backend": "vllm",
    "backend_version": "0.12.0",
    "mode": "agg",
    "isl": "1024",
    "osl": "128",
    "concurrency": "8.0",
    "batch_size": "8",
    "tp_size": "2",
    "moe_tp_size": "1.0",
    "ttft_ms": "250",
    "tpot_ms": "12.5",
}
APART = {
    **TOGETHER,
    "id": "two",
    "mode": "disagg",
    "prefill_tp_size": "4",
    "prefill_num_workers": "3",
    "decode_tp_size": "8",
    "decode_attention_dp_size": "8",
    "decode_moe_ep_size": "8",
}


def written(folder: Path, *rows: dict[str, str], columns: tuple[str, ...] = COLUMNS) -> Path:
    path = folder / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    return path


def read(folder: Path, row: dict[str, str]) -> ServingRow:
    (found,) = read_serving_rows(written(folder, row))
    return found


def test_a_row_is_in_si_and_empty_cells_are_none(tmp_path: Path) -> None:
    row = read(tmp_path, TOGETHER)
    assert (row.ttft_s, row.tpot_s) == (0.25, 0.0125)
    assert (row.input_tokens, row.output_tokens, row.concurrency) == (1024, 128, 8)
    assert row.precision is None
    assert row.serve is not None
    assert (row.serve.layout.tp, row.serve.layout.attention_dp) == (2, None)
    assert row.prefill is row.decode is None


def test_a_disaggregated_row_has_two_pools(tmp_path: Path) -> None:
    row = read(tmp_path, APART)
    assert row.serve is None
    assert row.prefill is not None
    assert row.decode is not None
    assert (row.prefill.workers, row.decode.workers) == (3, None)
    assert (row.decode.layout.tp, row.decode.layout.attention_dp) == (8, 8)


@pytest.mark.parametrize(
    ("column", "value", "problem"),
    [
        ("isl", "many", "line 2: isl: 'many' is not a number"),
        ("isl", "10.5", "line 2: isl: 10.5 is not a whole number"),
        ("osl", "", "line 2: osl: must be a whole number above 0"),
        ("concurrency", "-4", "line 2: concurrency: -4 is not a whole number"),
        ("tpot_ms", "nan", "line 2: tpot_ms: 'nan' is not a number"),
        ("ttft_ms", "0", "line 2: ttft_ms: must be a number of milliseconds above 0"),
        ("mode", "both", "line 2: mode: 'both' is not one of agg, disagg"),
        ("model", " ", "line 2: model: is empty"),
        ("tp_size", "0", "line 2: tp_size: must be a whole number above 0"),
    ],
)
def test_a_cell_that_is_wrong_is_named(
    tmp_path: Path, column: str, value: str, problem: str
) -> None:
    path = written(tmp_path, {**TOGETHER, column: value})
    with pytest.raises(BadInputError) as caught:
        read_serving_rows(path)
    assert str(caught.value) == f"{path}: {problem}"


def test_all_missing_columns_are_in_one_message(tmp_path: Path) -> None:
    columns = tuple(name for name in COLUMNS if name not in ("isl", "decode_tp_size"))
    path = written(tmp_path, TOGETHER, columns=columns)
    with pytest.raises(BadInputError) as caught:
        read_serving_rows(path)
    assert str(caught.value) == f"{path}: missing columns: isl, decode_tp_size"


def test_further_columns_are_ignored(tmp_path: Path) -> None:
    path = written(tmp_path, {**TOGETHER, "note": "x"}, columns=(*COLUMNS, "note"))
    assert len(read_serving_rows(path)) == 1


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b""])
def test_what_is_no_table_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes(content)
    with pytest.raises(BadInputError, match=r"rows\.csv"):
        read_serving_rows(path)
    with pytest.raises(BadInputError, match=r"cannot be read: No such file"):
        read_serving_rows(tmp_path / "none.csv")
