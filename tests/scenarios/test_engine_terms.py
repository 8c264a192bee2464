"""The shipped terms of engines: whom they hold for, and that they stay what a fit can tell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tonnage.pools import built_pools, times_of
from tonnage.scenarios.catalogue import load_gpu, load_model
from tonnage.scenarios.engine_terms import (
    TERMS_FILE,
    FittedTerms,
    generation_of,
    terms_for,
    write_terms,
)
from tonnage.scenarios.load import parse_scenario
from tonnage.sim.cost.engine_terms import EngineTerms, attention_kind

_KINDS = {
    "llama-3.1-8b": "gqa",
    "deepseek-r1": "mla",
    "glm-5": "dsa",
    "qwen3.5-397b-a17b": "linear",
}


@pytest.mark.parametrize("engine", ["sglang", "vllm", "trtllm"])
@pytest.mark.parametrize("gpu", ["h100-sxm", "h200-sxm", "b200-sxm", "b300-sxm", "gb200", "gb300"])
def test_every_engine_has_terms_on_the_gpus_that_were_measured(engine: str, gpu: str) -> None:
    found = terms_for(engine, load_gpu(gpu), load_model("llama-3.1-8b"))
    assert found is not None
    assert found.rows >= 100
    assert all(0.2 < one < 5 for one in found.terms.factors.values())
    for low, high in found.intervals.values():
        assert 0 < low < 1.6
        assert high > max(low, 0.8)


def test_other_gpus_have_none() -> None:
    assert generation_of(load_gpu("l40s")) == "sm8"
    assert terms_for("vllm", load_gpu("l40s"), load_model("llama-3.1-8b")) is None


def test_launches_and_requests_go_by_the_kind_of_attention() -> None:
    kinds = {name: attention_kind(load_model(name)) for name in _KINDS}
    assert kinds == _KINDS
    gqa, mla = (
        terms_for("trtllm", load_gpu("b200-sxm"), load_model(name)) for name in list(_KINDS)[:2]
    )
    assert gqa is not None
    assert mla is not None
    assert gqa.terms.factors == mla.terms.factors
    assert (gqa.attention, mla.attention) == ("gqa", "mla")


def test_terms_survive_the_file(tmp_path: Path) -> None:
    terms = EngineTerms({"product.fp8": 1.25}, 1e-3, 2e-5, 1e-5, 0.03, 4.0)
    told = FittedTerms("vllm", "hopper", "mla", 12, terms, {"tpot_agg": (0.9, 1.1)})
    write_terms([told], "a test", tmp_path / "terms.json")
    data = json.loads((tmp_path / "terms.json").read_text())
    assert data["terms"][0]["factors"] == {"product.fp8": 1.25}
    assert set(data["terms"][0]) == set(json.loads(TERMS_FILE.read_text())["terms"][0])


def test_a_scenario_asks_for_terms_and_is_told_of_them() -> None:
    data = {"model": "llama-3.1-8b", "gpu": "h100-sxm", "engine": {"name": "vllm"}}
    data |= {"pools": {"serve": {"tp": 1}}}
    alone = parse_scenario(data, "alone")
    fitted = parse_scenario({**data, "engine": {"name": "vllm", "terms": "fitted"}}, "fitted")
    told = [times_of(one, built_pools(one))["serve"].assumptions for one in (alone, fitted)]
    assert not any("engine terms" in text for text in told[0])
    assert any("engine terms of vllm on hopper GPUs" in text for text in told[1])
