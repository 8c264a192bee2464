"""What an engine makes of its kernels: factors by family, the host's time, launches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tonnage.scenarios.catalogue import load_gpu, load_model
from tonnage.scenarios.profiles import find_profile
from tonnage.sim.cost.engine_terms import EngineTerms
from tonnage.sim.cost.measured import MeasuredExecutor, StepAssumptions
from tonnage.sim.cost.operator_models import operator_models
from tonnage.sim.cost.operator_times import total_s
from tonnage.sim.cost.profile import load_profile
from tonnage.sim.domain import ParallelLayout, PromptChunk, Step

_NOBODY = np.zeros(0, dtype=np.int64)
_DECODE = Step(np.full(8, 1000, dtype=np.int64), 8000.0, ())
_PROMPT = Step(_NOBODY, 0.0, (PromptChunk(2000, 0),))
_TINY = Step(_NOBODY, 0.0, (PromptChunk(1, 0),))


@pytest.fixture(scope="module")
def executor_with() -> object:
    gpu, model = load_gpu("h100-sxm"), load_model("qwen3-30b-a3b")
    models = operator_models(load_profile(find_profile("h100-sxm-vllm")), gpu)

    def make(terms: EngineTerms) -> MeasuredExecutor:
        facts = replace(StepAssumptions(), terms=terms)
        layout = ParallelLayout(2)
        return MeasuredExecutor(model, layout, gpu, "bf16", "vllm", models, (8,), facts)

    return make


def _families(executor: MeasuredExecutor, step: Step) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in executor.times(step):
        found[one.family] = found.get(one.family, 0.0) + one.seconds
    return found


@pytest.mark.parametrize("step", [_DECODE, _PROMPT])
def test_a_factor_changes_its_family_and_no_other(executor_with, step: Step) -> None:
    alone = _families(executor_with(EngineTerms()), step)
    for family in alone:
        if not family:
            continue
        doubled = _families(executor_with(EngineTerms({family: 2.0})), step)
        expected = {name: (2 if name == family else 1) * s for name, s in alone.items()}
        assert doubled == pytest.approx(expected), family


@pytest.mark.parametrize("step", [_DECODE, _PROMPT])
def test_what_is_run_is_what_is_told(executor_with, step: Step) -> None:
    terms = EngineTerms({"product.bf16": 1.3, "all_reduce": 0.5}, 1e-3, 2e-5, 5e-6)
    executor = executor_with(terms)
    assert executor.run(step, 1)[0] == pytest.approx(total_s(executor.times(step)))


def test_the_host_takes_its_time_per_step_and_sequence(executor_with) -> None:
    alone = executor_with(EngineTerms()).run(_DECODE, 3)
    hosted = executor_with(EngineTerms(step_s=1e-3, sequence_s=1e-5)).run(_DECODE, 3)
    assert hosted - alone == pytest.approx(np.full(3, 1e-3 + 8 * 1e-5))


def test_a_pass_outside_a_graph_lasts_as_long_as_its_launches(executor_with) -> None:
    executor = executor_with(EngineTerms(launch_s=50e-6))
    assert executor.launches > 48 * 6  # layers, and at least so many kernels in each
    assert executor.run(_TINY, 1)[0] >= executor.launches * 50e-6
    assert executor.run(_DECODE, 1)[0] == executor_with(EngineTerms()).run(_DECODE, 1)[0]


def test_a_request_waits_for_the_host_and_for_steps() -> None:
    terms = EngineTerms(request_s=0.01, request_steps=3.0)
    assert terms.request_delay_s(0.02) == pytest.approx(0.01 + 0.06)
