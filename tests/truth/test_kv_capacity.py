"""KV capacities that engines printed, against the memory model."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tonnage.scenarios.capacity_rows import CapacityRow
from tonnage.sim.model.vllm_groups import is_hybrid

ROOT = Path(__file__).resolve().parents[2]


def _table() -> ModuleType:
    path = ROOT / "benchmarks" / "kv_capacity_table.py"
    spec = importlib.util.spec_from_file_location("kv_capacity_table", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


TABLE = _table()
FILE = TABLE.capacity_file()
ROWS: dict[str, CapacityRow] = {}
if FILE is not None:
    ROWS = {row.id: row for row in TABLE.compared_rows(FILE)}
pytestmark = pytest.mark.skipif(FILE is None, reason="shared/truth is not beside the checkout")

# Hybrid models are counted in groups of layers: tests/truth/test_validate_kv.py.
PRINTED = [
    name
    for name, row in ROWS.items()
    if row.kv_tokens is not None and row.kv_bytes is not None and not is_hybrid(row.model)
]
# Errors of the pool, from the configuration alone, where the engine's rules are known. Not
# among them: older engines (K096, K098), a log that contradicts itself (K067) or that left
# the indexer out (K006); docs/memory.md lists them all.
PREDICTED = {
    "K025": 0.10,
    "K036": 0.05,
    "K037": 0.05,
    "K066": 0.01,
    "K068": 0.05,
    "K073": 0.02,
    "K079": 0.01,
    "K085": 0.01,
    "K086": 0.01,
    "K087": 0.01,
    "K089": 0.01,
    "K090": 0.01,
    "V4090": 0.12,
    "R1": 0.01,
}
LOADED = ["K066", "K067", "K077", "K078", "K079", "K082", "K085", "K087", "K089", "K090", "K096"]


def test_rows_of_all_described_models_are_read() -> None:
    assert len(PRINTED) >= 17
    assert {"K001", "K002", "K005", "K036", "K073", "K103"} <= set(PRINTED)


@pytest.mark.parametrize("name", sorted(PRINTED))
def test_printed_bytes_hold_the_printed_tokens(name: str) -> None:
    row = ROWS[name]
    assert row.tokens_from_bytes() == pytest.approx(row.kv_tokens, rel=0.005)


def test_an_offload_store_of_eight_replicas_holds_the_same_bytes_per_token() -> None:
    # K027, GLM-5.3: 59,763,793,920 B of 8 ranks for 138,615 tokens; its pages are padded a little.
    row = ROWS["K027"]
    assert row.kv_bytes is not None
    rate = row.kv_bytes / (row.tokens_from_bytes() or 1)
    stored_rate = 59_763_793_920 / 138_615 / 8
    assert stored_rate == pytest.approx(rate, rel=0.005)


@pytest.mark.parametrize("name", sorted(PREDICTED))
def test_the_configuration_alone_predicts_the_pool(name: str) -> None:
    row = ROWS[name]
    memory = row.predicted()
    assert memory is not None
    assert abs(TABLE.capacity_error(row, memory)) <= PREDICTED[name]


@pytest.mark.parametrize("name", LOADED)
def test_loaded_weights(name: str) -> None:
    row = ROWS[name]
    memory = row.predicted()
    assert memory is not None
    assert memory.weights_bytes_per_gpu == pytest.approx(row.weights_bytes, rel=0.025)


def test_the_document_holds_the_current_tables() -> None:
    document = TABLE.DOCUMENT.read_text()
    assert TABLE.with_section(document, TABLE.generated_section(FILE)) == document
