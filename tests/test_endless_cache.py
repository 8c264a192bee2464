"""With room for everything, a simulation hits what a count over the raw trace says."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tonnage import api
from tonnage.scenarios.load import parse_scenario

TRACES = Path(__file__).parents[1] / "scenarios" / "traces"
PROMPTS = 1500  # of the Mooncake trace


def hit_rate(traffic: dict[str, Any], **cache: Any) -> float:
    """Return the share of input tokens that hit on one instance."""
    data = {
        "traffic": {"kind": "trace", **traffic},
        "pools": {"serve": {"tp": 8, "kv": "fp8_e4m3"}},
        "cache": {"gpu": True, **cache},
    }
    report = api.simulate(parse_scenario(data)).to_dict()
    point = report["points"][0]
    assert point["requests"]["rejected"] == 0
    return float(point["cache"]["input_token_hit_rate"])


def counted(prompts: list[tuple[int, list[int]]], block_tokens: int) -> float:
    """Return that share by brute force: prompts of (tokens, ids), one after the other.

    A block is hit where it and all before it were in one earlier prompt; a token is always left.
    """
    prefixes: dict[tuple[int, int], int] = {}  # (the prefix without its last block, that block)
    cached = tokens = 0
    for length, ids in prompts:
        known, prefix, depth = len(prefixes), -1, 0
        for block in ids:
            prefix = prefixes.setdefault((prefix, block), len(prefixes))
            depth += prefix < known
        cached += min(depth, (length - 1) // block_tokens) * block_tokens
        tokens += length
    return cached / tokens


@pytest.mark.parametrize("name", ["agentic_0001", "agentic_0002", "agentic_0043"])
def test_raw_sessions_hit_what_is_counted(name: str) -> None:
    """To 0.1 point: the last block of a prompt is in place a step later than its request ends."""
    session = json.loads(gzip.decompress((TRACES / f"{name}.json.gz").read_bytes()))
    prompts = [(one["in"], one["hash_ids"]) for one in session["requests"]]
    found = hit_rate({"path": f"{name}.json.gz"})
    assert found == pytest.approx(counted(prompts, 64), abs=0.001)


def test_mooncake_hits_what_is_counted() -> None:
    """One prompt after the other by their number, so nothing is computed beside its twin."""
    lines = gzip.decompress((TRACES / "mooncake_conversation.jsonl.gz").read_bytes()).splitlines()
    records = [json.loads(line) for line in lines[:PROMPTS]]
    prompts = [(one["input_length"], one["hash_ids"]) for one in records]
    traffic = {"path": "mooncake_conversation.jsonl.gz", "limit": PROMPTS, "rate_scale": 0.05}
    found = hit_rate(traffic, host="100TB")
    assert found == pytest.approx(counted(prompts, 512), abs=0.001)
