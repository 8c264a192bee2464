"""What one pool would hold with one thing changed: a format of weights or KV, or the layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import pandas as pd

from tonnage.scenarios.load import changed
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import KvFormat, PoolSection
from tonnage.sim.domain import TonnageError

_WEIGHTS = ("native", "bf16", "fp8_block", "int4_g32", "nvfp4")
_TP = (1, 2, 4, 8, 16)


def what_if_rows(scenario: Scenario, role: str) -> pd.DataFrame:
    """Return a row per change of a pool, the pool as it is first; what does not fit says why."""
    pool = {str(name): one for name, one in scenario.pools.named().items()}[role]
    scenario = _quick(scenario)
    rows = [_row(scenario, role, "as it is", {}) | {"now": True}]
    for label, fields in _changes(pool):
        rows.append(_row(scenario, role, label, fields) | {"now": False})
    return pd.DataFrame(rows)


def _changes(pool: PoolSection) -> Iterator[tuple[str, dict[str, object]]]:
    for kv in get_args(KvFormat):
        if kv != pool.kv:
            yield f"kv {kv}", {"kv": kv}
    for weights in _WEIGHTS:
        if weights != pool.weights:
            yield f"weights {weights}", {"weights": weights}
    for tp in _TP:
        if tp != pool.tp:
            one: dict[str, object] = {"tp": tp, "ep": 1, "attention_dp": 1, "dcp": 1}
            yield f"tp {tp}", one
    if pool.attention_dp == 1 and pool.tp > 1:
        yield f"attention_dp {pool.tp}", {"attention_dp": pool.tp, "dcp": 1}
        yield f"dcp {pool.tp}", {"dcp": pool.tp}
    if pool.pp == 1:
        yield "pp 2", {"pp": 2}


def _row(scenario: Scenario, role: str, label: str, fields: dict[str, object]) -> dict[str, Any]:
    from tonnage import api

    row: dict[str, Any] = {"change": label}
    empty = {"GPUs": None, "kv_tokens": None, "requests": None, "longest": None, "why not": ""}
    try:
        overrides = [f"pools.{role}.{name}={value}" for name, value in fields.items()]
        trial = changed(scenario, overrides) if overrides else scenario
        pools = {str(name): one for name, one in api.memory(trial).pools.items()}
    except TonnageError as error:
        return row | empty | {"why not": _reason(error)}
    found = pools[role]
    return row | {
        "GPUs": found["gpus"],
        "kv_tokens": found["kv_tokens"],
        "requests": found["max_concurrency"],
        "longest": found["longest_request_tokens"],
        "why not": "",
    }


def _reason(error: TonnageError) -> str:
    """Return what does not fit, without the field before it and the mend behind it."""
    return str(error).partition(": ")[2].partition(". Smallest change")[0]


def _quick(scenario: Scenario) -> Scenario:
    """Return the scenario with requests of its mean length: a trace is read once, not per row."""
    from tonnage import api

    if scenario.traffic.kind not in ("trace", "sessions"):
        return scenario
    try:
        pools = api.memory(scenario).pools
    except TonnageError:
        return scenario  # the first row says what is wrong
    tokens = next(iter(pools.values()))["tokens_per_request"]
    traffic = f"{{kind: closed, input_tokens: {tokens}, output_tokens: 1}}"
    return changed(scenario, [f"traffic={traffic}", "router.affinity=none"])
