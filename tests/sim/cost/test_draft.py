"""What a draft adds to a step: its passes, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from tonnage.scenarios.catalogue import load_gpu, load_model
from tonnage.sim.cost.draft import SpeculatingExecutor, step_executor
from tonnage.sim.cost.roofline import RooflineExecutor
from tonnage.sim.domain import FloatArray, ModelSpec, ParallelLayout, PromptChunk, Step
from tonnage.sim.domain import SpeculationSpec as Spec
from tonnage.sim.model.draft import draft_layout, draft_of
from tonnage.sim.model.requantise import with_weights

H200 = load_gpu("h200-sxm")
TP8 = ParallelLayout(tp=8)


def glm() -> ModelSpec:
    return with_weights(load_model("glm-5.2"), "int4_g32")


def roofline(
    kv_format: str, captured: tuple[int, ...] = ()
) -> Callable[[ModelSpec, ParallelLayout], RooflineExecutor]:
    def make(model: ModelSpec, layout: ParallelLayout) -> RooflineExecutor:
        return RooflineExecutor(model, layout, H200, kv_format, "sglang", captured)

    return make


def verify(contexts: list[int], query_tokens: int) -> Step:
    return Step(np.array(contexts), sum(contexts), (), 2.0 * len(contexts), query_tokens)


def drafting_s(
    model: ModelSpec, step: Step, draft: str, layout: ParallelLayout = TP8, steps: int = 1
) -> FloatArray:
    """Return what the draft adds to the target's own time."""
    spec = draft_of(model, Spec(1, (0.5, 0.5), draft))
    both = step_executor(roofline("fp8_e4m3"), model, layout, spec)
    target = step_executor(roofline("fp8_e4m3"), model, layout)
    return both.run(step, steps) - target.run(step, steps)


def test_an_eagle3_draft_reads_its_weights_in_every_pass() -> None:
    """One request, no context: bytes of one GPU over 4.8 TB/s, and little else.

    Latent projections on every rank, the rest an eighth; the projection of three hidden states only
    in the first of three passes.
    """
    whole = 1536 * 2 * 7168 + 576 * 2 * 7168
    split = 64 * 192 * 1536 + 64 * 256 * 512 + 7168 * 8192 + 3 * 7168 * 18432 + 163840 * 7168
    entry = 3 * 7168 * 7168
    expected_s = 2 * (3 * (whole + split / 8) + entry) / 4.8e12
    added_s = drafting_s(load_model("kimi-k2.6"), verify([0], 4), "eagle3")
    assert added_s[0] == pytest.approx(expected_s, rel=0.01)


def test_an_mtp_layer_is_run_once_per_drafted_token() -> None:
    """The first pass computes the tokens just verified, the others one per request."""
    model, contexts = glm(), [4000] * 8
    draft = draft_of(model, Spec(1, (0.5, 0.5), "mtp"))
    assert draft is not None
    alone = RooflineExecutor(draft.passes[0], TP8, H200, "fp8_e4m3")
    one = replace(verify(contexts, 4), query_tokens=1)
    expected_s = alone.run(verify(contexts, 4), 5) + 2 * alone.run(one, 5)
    added_s = drafting_s(model, verify(contexts, 4), "mtp", steps=5)
    assert added_s == pytest.approx(expected_s, rel=1e-9)


def test_several_mtp_layers_take_turns() -> None:
    """The second pass runs the second layer, and it runs all later ones."""
    first, second = glm().mtp_layers[0], load_model("llama-3.1-8b").layers[0]
    model = replace(glm(), mtp_layers=(first, second))
    one_each = [replace(model, mtp_layers=(layer,)) for layer in (first, second)]
    step, single = verify([0] * 4, 5), replace(verify([0] * 4, 5), query_tokens=1)
    layers = []
    for part in one_each:
        draft = draft_of(part, Spec(1, (0.5, 0.5), "mtp"))
        assert draft is not None
        layers.append(RooflineExecutor(draft.passes[0], TP8, H200, "fp8_e4m3"))
    expected_s = layers[0].run(step, 1) + 3 * layers[1].run(single, 1)
    assert drafting_s(model, step, "mtp") == pytest.approx(expected_s, rel=1e-9)
    short = verify([0] * 4, 2)
    assert drafting_s(model, short, "mtp") == pytest.approx(layers[0].run(short, 1), rel=1e-9)


def test_a_prompt_passes_the_draft_once() -> None:
    """The draft needs the KV of the prompt; nothing is guessed before there is a token."""
    model = load_model("kimi-k2.6")
    step = Step(np.zeros(0, dtype=np.int64), 0, (PromptChunk(4096, 0),))
    draft = draft_of(model, Spec(3, (0.25,) * 4, "eagle3"))
    assert draft is not None
    alone = RooflineExecutor(draft.passes[0], TP8, H200, "fp8_e4m3")
    assert drafting_s(model, step, "eagle3") == pytest.approx(alone.run(step, 1), rel=1e-9)


def test_a_draft_model_runs_whole() -> None:
    target, small = load_model("llama-3.1-70b"), load_model("llama-3.1-8b")
    draft = draft_of(target, Spec(2, (0.2, 0.3, 0.5), "model", small))
    both = step_executor(roofline("bf16"), target, TP8, draft)
    alone = RooflineExecutor(small, TP8, H200, "bf16")
    step = verify([1000], 3)
    expected_s = alone.run(step, 1) + alone.run(replace(step, query_tokens=1), 1)
    target_s = RooflineExecutor(target, TP8, H200, "bf16").run(step, 1)
    assert both.run(step, 1) == pytest.approx(target_s + expected_s, rel=1e-12)


def test_ranks_draft_in_lockstep() -> None:
    layout = ParallelLayout(tp=8, attention_dp=8, ep=8)
    ranks = tuple(verify([3000, 9000], 4) for _ in range(8))
    joint = replace(verify([3000, 9000] * 8, 4), ranks=ranks)
    even = drafting_s(glm(), replace(joint, ranks=()), "mtp", layout, 10)
    assert drafting_s(glm(), joint, "mtp", layout, 10) == pytest.approx(even, rel=1e-9)


@pytest.mark.parametrize("spec", [None, Spec(0, (1.0,)), Spec(3, (1.0, 0.0, 0.0, 0.0), "free")])
def test_a_draft_that_costs_nothing_leaves_the_target_alone(spec: Spec | None) -> None:
    model = load_model("kimi-k2.6")
    make = roofline("bf16", (1, 2, 4))
    alone = step_executor(make, model, TP8, draft_of(model, spec))
    assert not isinstance(alone, SpeculatingExecutor)
    plain = RooflineExecutor(model, TP8, H200, "bf16", captured_sizes=(1, 2, 4))
    step = verify([500] * 3, 1)
    assert alone.run(step, 20).tolist() == plain.run(step, 20).tolist()


def test_a_draft_runs_in_one_stage_with_its_contexts_whole() -> None:
    layout = ParallelLayout(tp=8, pp=2, ep=8, dcp=8)
    draft = draft_of(load_model("kimi-k2.6"), Spec(1, (0.5, 0.5), "eagle3"))
    assert draft is not None
    assert draft_layout(draft.held, layout) == TP8
    mtp = draft_of(glm(), Spec(1, (0.5, 0.5), "mtp"))
    assert mtp is not None
    assert draft_layout(mtp.held, layout) == replace(TP8, ep=8)
