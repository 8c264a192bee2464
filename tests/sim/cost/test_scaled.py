"""A GPU that nobody timed: what it must be by theory, and against GPUs that were timed."""

from __future__ import annotations

from functools import cache
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from tonnage.scenarios.catalogue import load_gpu, load_model
from tonnage.scenarios.profiles import choose_profile, find_profile
from tonnage.sim.cost.measured import MeasuredExecutor
from tonnage.sim.cost.operator_models import operator_models
from tonnage.sim.cost.profile import load_profile
from tonnage.sim.cost.roofline import RooflineExecutor
from tonnage.sim.cost.scaled import ScaledExecutor
from tonnage.sim.domain import ParallelLayout, PromptChunk, Step

MODEL, LAYOUT = load_model("llama-3.1-8b"), ParallelLayout()
GPUS = ("h100-sxm", "h200-sxm", "l40s", "rtx-pro-6000")


def _decode(requests: int, context: int) -> Step:
    contexts = np.full(requests, context, dtype=np.int64)
    return Step(contexts, float(requests * context), ())


def _prompt(tokens: int) -> Step:
    return Step(np.zeros(0, dtype=np.int64), 0.0, (PromptChunk(tokens, 0),))


STEPS = (_decode(1, 1000), _decode(64, 1200), _prompt(512), _prompt(2048))


@cache
def _timed(gpu: str) -> MeasuredExecutor:
    models = operator_models(load_profile(find_profile(f"{gpu}-vllm")), load_gpu(gpu))
    return MeasuredExecutor(MODEL, LAYOUT, load_gpu(gpu), "bf16", "vllm", models)


def _roofline(gpu: str) -> RooflineExecutor:
    return RooflineExecutor(MODEL, LAYOUT, load_gpu(gpu), "bf16", "vllm")


def _scaled(timed: str, wanted: str) -> ScaledExecutor:
    bandwidths = [load_gpu(gpu).memory_bandwidth_bytes_per_s for gpu in (timed, wanted)]
    ratio = bandwidths[0] / bandwidths[1]
    return ScaledExecutor(_timed(timed), _roofline(timed), _roofline(wanted), ratio)


@pytest.mark.parametrize("step", STEPS)
def test_scaled_to_itself_a_gpu_is_itself(step: Step) -> None:
    there = _timed("h200-sxm").run(step, 1)
    assert _scaled("h200-sxm", "h200-sxm").run(step, 1) == pytest.approx(there)


@pytest.mark.parametrize("step", STEPS)
def test_never_below_the_roofline(step: Step) -> None:
    for timed, wanted in permutations(GPUS, 2):
        least = _roofline(wanted).run(step, 1)
        assert (_scaled(timed, wanted).run(step, 1) >= least).all()


def test_prompts_of_gpus_that_were_timed_are_met_better_than_by_one_ratio() -> None:
    errors, ratio_errors = [], []
    for timed, wanted in permutations(GPUS, 2):
        for step in STEPS[2:]:
            true = float(_timed(wanted).run(step, 1)[0])
            there, here = (float(_roofline(gpu).run(step, 1)[0]) for gpu in (timed, wanted))
            errors.append(abs(float(_scaled(timed, wanted).run(step, 1)[0]) / true - 1))
            ratio_errors.append(abs(float(_timed(timed).run(step, 1)[0]) * here / there / true - 1))
    assert np.mean(errors) < 0.12
    assert np.mean(errors) < 0.75 * np.mean(ratio_errors)


def test_operators_add_up_to_the_step() -> None:
    scaled = _scaled("l40s", "rtx-pro-6000")
    total = sum(one.seconds for one in scaled.times(STEPS[3]))
    assert total == pytest.approx(float(scaled.run(STEPS[3], 1)[0]), rel=0.02)
    assert {one.source for one in scaled.times(STEPS[3])} <= {"scaled", "datasheet"}


def test_an_rtx_4090_is_moved_from_the_l40s() -> None:
    choice = choose_profile("auto", load_gpu("rtx-4090"), "vllm", Path())
    assert (choice.source, choice.scaled_from) == ("scaled", "l40s")
