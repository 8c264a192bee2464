"""The fit of engine terms: known terms are found again, folds hold whole configurations."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tonnage.calibrate.engine_fit import Design, EngineFit, fold_of
from tonnage.calibrate.engine_samples import Kernels, Sample
from tonnage.calibrate.fit_engines import cross_validated, intervals
from tonnage.scenarios.serving_layouts import StatedLayout
from tonnage.scenarios.serving_rows import ServingRow, StatedPool
from tonnage.scenarios.serving_runs import PoolSetup, Run, Setup
from tonnage.sim.domain import ParallelLayout
from tonnage.sim.traffic.lengths import Constant
from tonnage.validate_latency import Predicted

_ROW = ServingRow(
    *("row", "model", "h100_sxm", "vllm", "0.19.0", "bf16", None, None),
    *(1024, 1024, 8, 0.1, 0.01),
    serve=StatedPool(StatedLayout(1)),
)
_SETUP = Setup(
    *("model", "h100-sxm", "vllm", "0.19.0", "native", None),
    (PoolSetup("serve", 1, ParallelLayout(), "bf16"),),
)
_PRODUCT, _EXPERTS, _STEP_S, _REQUEST_S, _STEPS = 1.4, 0.7, 0.8e-3, 0.03, 4.0


def _samples(count: int = 120, noise: float = 0.0) -> list[Sample]:
    """Draw runs whose times follow known terms, up to a noise that multiplies them."""
    rng = np.random.default_rng(1)
    found = []
    for number in range(count):
        product_s, experts_s = rng.uniform(1e-3, 20e-3, 2)
        prompt_s = {"product.fp8": product_s * 8, "experts.fp8": experts_s * 8}
        batch = int(rng.integers(1, 64))
        alone_s = product_s + experts_s
        error = np.exp(noise * rng.standard_normal())
        tpot_s = (_PRODUCT * product_s + _EXPERTS * experts_s + _STEP_S + 5e-6 * batch) * error
        first_s = 8 * (_PRODUCT * product_s + _EXPERTS * experts_s)
        ttft_s = first_s + _REQUEST_S + _STEPS * tpot_s
        simulated = Predicted(8 * alone_s, alone_s)
        decode_s = {"product.fp8": product_s, "experts.fp8": experts_s}
        kernels = Kernels(simulated, decode_s, prompt_s, 0.0, batch)
        row = replace(_ROW, id=f"row {number}", tpot_s=tpot_s, ttft_s=ttft_s)
        setup = replace(_SETUP, model=f"model {number // 6}")
        run = Run(setup, batch, Constant(1024), Constant(1024))
        found.append(Sample(row, run, "hopper", kernels))
    return found


def test_known_terms_are_found_again() -> None:
    design = Design.of(_samples())
    fit = EngineFit(design)
    fit.fit_tpot(np.ones(len(design.samples)))
    fit.fit_ttft(np.ones(len(design.samples)))
    terms = fit.terms()["vllm", "hopper", "gqa"]
    assert terms.factors["product.fp8"] == pytest.approx(_PRODUCT, rel=0.03)
    assert terms.factors["experts.fp8"] == pytest.approx(_EXPERTS, rel=0.03)
    assert terms.step_s == pytest.approx(_STEP_S, rel=0.25)
    assert terms.request_s == pytest.approx(_REQUEST_S, rel=0.1)
    assert terms.request_steps == pytest.approx(_STEPS, rel=0.1)
    assert fit.tpot_s() == pytest.approx(design.tpot_s, rel=0.03)
    assert fit.ttft_s() == pytest.approx(design.ttft_s, rel=0.05)


def test_a_few_wild_rows_do_not_move_the_terms() -> None:
    samples = _samples()
    wild = [replace(one, row=replace(one.row, tpot_s=3 * one.row.tpot_s)) for one in samples[:8]]
    design = Design.of([*wild, *samples[8:]])
    fit = EngineFit(design)
    fit.fit_tpot(np.ones(len(design.samples)))
    assert fit.terms()["vllm", "hopper", "gqa"].factors["product.fp8"] == pytest.approx(
        _PRODUCT, rel=0.06
    )


def test_rows_that_may_be_another_deployment_teach_nothing() -> None:
    samples = _samples()
    other = [
        replace(
            one,
            run=replace(one.run, others=(_SETUP,)),
            row=replace(one.row, tpot_s=9 * one.row.tpot_s),
        )
        for one in samples[60:]
    ]
    design = Design.of([*samples[:60], *other])
    fit = EngineFit(design)
    fit.fit_tpot(np.ones(len(design.samples)))
    assert fit.terms()["vllm", "hopper", "gqa"].factors["product.fp8"] == pytest.approx(
        _PRODUCT, rel=0.05
    )


def test_without_rows_the_terms_are_the_prior() -> None:
    design = Design.of(_samples(12))
    fit = EngineFit(design)
    fit.fit_tpot(np.zeros(12))
    assert set(fit.terms()["vllm", "hopper", "gqa"].factors.values()) == {1.0}


def test_a_fold_holds_out_whole_configurations() -> None:
    names = [f"setup {number // 5}" for number in range(100)]
    folds = fold_of(names, 5)
    assert all(len({folds[i] for i in range(100) if names[i] == one}) == 1 for one in set(names))
    assert np.bincount(folds).tolist() == [20] * 5


def test_the_interval_holds_four_fifths_of_what_was_held_out() -> None:
    held_out = cross_validated(Design.of(_samples(300, noise=0.1)))
    low, high = intervals(held_out)["vllm", "hopper"]["tpot_agg"]
    ratios = held_out.ratios("tpot")
    assert np.mean((ratios >= low) & (ratios <= high)) == pytest.approx(0.8, abs=0.01)
    assert (low, high) == (pytest.approx(0.88, abs=0.04), pytest.approx(1.14, abs=0.04))
