"""Rows of serving results as runs: formats, lengths, recipes, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tonnage.scenarios.serving_layouts import StatedLayout
from tonnage.scenarios.serving_recipes import Recipe, Served, recipes_for
from tonnage.scenarios.serving_rows import ServingRow, StatedPool
from tonnage.scenarios.serving_runs import Refusal, Run, run_of
from tonnage.scenarios.serving_settings import Settings, settings_of, weights_of
from tonnage.serving_pools import BuiltSetup, SetupBuilder
from tonnage.sim.domain import ParallelLayout
from tonnage.sim.traffic.lengths import Constant, Uniform

ROW = ServingRow(
    id="row",
    model="deepseek-ai/DeepSeek-R1",
    system="b200_sxm",
    engine="trtllm",
    version="1.2.0rc6.post2",
    precision="fp4",
    gemm_format="nvfp4",
    moe_format="nvfp4",
    input_tokens=1024,
    output_tokens=1024,
    concurrency=64,
    ttft_s=0.5,
    tpot_s=0.02,
    serve=StatedPool(StatedLayout(8, 1, 1, 8, 1)),
)
APART = replace(
    ROW,
    version="0.8.1.post1",
    concurrency=875,
    serve=None,
    prefill=StatedPool(StatedLayout(4, 1, 1, 1, 4)),
    decode=StatedPool(StatedLayout(8, 1, 1, 2, 4)),
)


def run(row: ServingRow) -> Run:
    found = run_of(row)
    assert isinstance(found, Run), found
    return found


def refusal(row: ServingRow) -> str:
    found = run_of(row)
    assert isinstance(found, Refusal)
    return found.reason


@pytest.mark.parametrize(
    ("repository", "model", "native", "formats", "weights"),
    [
        ("deepseek-ai/DeepSeek-R1", "deepseek-r1", "fp8_block", ("fp8", "fp8", "fp8"), "native"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-r1", "fp8_block", ("fp4", "nvfp4", "nvfp4"), "nvfp4"),
        ("meta-llama/Llama-3.1-70B", "llama-3.1-70b", "bf16", ("fp8", "fp8", "fp8"), "fp8"),
        ("x/Llama-8B", "llama-3.1-8b", "bf16", ("fp8", "fp8_block", "fp8_block"), "fp8_block"),
        ("Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-a22b", "bf16", ("fp8", "fp8", "fp8"), "fp8_block"),
        ("Qwen/Qwen3.5-397B-A17B", "q", "bf16", ("fp8", "fp8", "fp8_block"), "fp8_block"),
        ("Qwen/Qwen3.5-397B-A17B", "q", "bf16", ("bf16", None, None), "native"),
        ("Qwen/Qwen3-32B", "qwen3-32b", "bf16", (None, None, None), "native"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-r1", "fp8_block", ("bf16", None, None), "bf16"),
        ("openai/gpt-oss-120b", "gpt-oss-120b", "mxfp4", ("fp4", "nvfp4", "nvfp4"), "native"),
        ("moonshotai/Kimi-K2.5", "kimi-k2.5", "int4_g32", ("int4", "int4_wo", "int4_wo"), "native"),
    ],
)
def test_weights(
    repository: str, model: str, native: str, formats: tuple[str | None, ...], weights: str
) -> None:
    assert weights_of(repository, model, native, formats) == weights


def test_kv_formats_are_those_of_the_published_scripts() -> None:
    assert settings_of("deepseek-r1", "sglang", "b200-sxm", "native").kv == "fp8_e4m3"
    assert settings_of("deepseek-r1", "sglang", "h200-sxm", "native").kv == "bf16"
    assert settings_of("deepseek-r1", "trtllm", "h200-sxm", "native").kv == "fp8_e4m3"
    assert settings_of("gpt-oss-120b", "trtllm", "h200-sxm", "native").kv == "bf16"
    assert settings_of("llama-3.1-8b", "trtllm", "h100-sxm", "native").kv == "bf16"
    assert settings_of("a-model", "vllm", "h100-sxm", "fp8") == Settings()


def test_max_num_tokens_follows_the_script() -> None:
    """`MAX_NUM_TOKENS=$(( ($CONC+$ISL+64+63)/64*64 ))`, 8192 at least."""
    settings = settings_of("deepseek-r1", "trtllm", "b200-sxm", "nvfp4")
    assert settings.chunk(1024, 64) == 8192
    for concurrency in (4, 32, 63, 256):
        assert settings.chunk(8192, concurrency) == (concurrency + 8192 + 64 + 63) // 64 * 64


def test_a_row_is_a_deployment_and_its_load() -> None:
    found = run(ROW)
    assert found.setup.pools[0].layout == ParallelLayout(8)
    assert (found.setup.model, found.setup.gpu, found.setup.weights) == (
        "deepseek-r1",
        "b200-sxm",
        "nvfp4",
    )
    assert found.concurrency == 64
    assert found.input_tokens == found.output_tokens == Uniform(819, 1024)
    assert any("KV fp8_e4m3: not stated" in one for one in found.assumptions)


def test_rows_that_differ_in_load_share_their_setup() -> None:
    assert run(ROW).setup == run(replace(ROW, concurrency=4, output_tokens=8192)).setup


def test_lengths_are_alike_where_no_attention_dp_is_stated() -> None:
    plain = replace(ROW, serve=StatedPool(StatedLayout(8)))
    assert run(plain).output_tokens == Constant(1024)
    assert run(replace(plain, input_tokens=4000)).input_tokens == Uniform(3200, 4000)


def test_the_release_that_always_speculates() -> None:
    assert run(ROW).setup.pools[0].draft_tokens == 0
    assert run(replace(ROW, version="1.2.0rc6.post3")).setup.pools[0].draft_tokens == 3
    ranks = StatedPool(StatedLayout(1, 1, 8, 1, 8))
    under_dp = replace(ROW, version="1.2.0rc6.post3", serve=ranks)
    assert run(under_dp).setup.pools[0].draft_tokens == 1


def test_the_batch_of_one_rank_means_attention_dp() -> None:
    stated = StatedPool(StatedLayout(8, moe_ep=8), batch_size=10)
    found = run(replace(ROW, serve=stated, concurrency=80))
    assert found.setup.pools[0].layout == ParallelLayout(8, 1, 8, 8)
    copies = replace(ROW, model="nvidia/Qwen3-32B-NVFP4", concurrency=416)
    copies = replace(copies, serve=StatedPool(StatedLayout(2), batch_size=13))
    assert run(copies).setup.pools[0].instances == 32


def test_experts_are_spread_where_tp_cuts_their_blocks() -> None:
    """MiniMax-M2's experts are 1,536 wide: 12 blocks of 128, which eight ranks would cut."""
    row = replace(ROW, model="MiniMaxAI/MiniMax-M2.5", engine="vllm", precision="fp8")
    row = replace(row, gemm_format="fp8", moe_format="fp8", system="h200_sxm", version="0.18.0")
    assert run(row).setup.pools[0].layout == ParallelLayout(8, 1, 8)
    four = replace(row, serve=StatedPool(StatedLayout(4, 1, 1, 4, 1)))
    assert run(four).setup.pools[0].layout == ParallelLayout(4)
    halves = replace(row, precision="fp4")
    assert run(halves).setup.pools[0].layout == ParallelLayout(8)


def test_workers_come_from_the_published_recipe() -> None:
    found = run(APART)
    assert [pool.instances for pool in found.setup.pools] == [1, 5]
    decode = found.setup.pools[1]
    assert (decode.layout, decode.draft_tokens) == (ParallelLayout(8, 1, 8, 8), 3)
    assert found.setup.gpus == 44
    assert found.others == ()


def test_with_and_without_speculation_are_alternatives() -> None:
    """Taken for speculating: less than half off where it was not, and not twice."""
    found = run(replace(APART, concurrency=90))
    assert found.setup.pools[1].draft_tokens == 3
    assert [other.pools[1].draft_tokens for other in found.others] == [0]


@pytest.mark.parametrize(
    ("changes", "drafts"),
    [
        ({}, (0,)),
        ({"version": "1.2.0rc6.post3"}, (3,)),
        ({"version": "1.1.0rc2.post2"}, (0,)),
        ({"version": "1.1.0rc2.post2", "system": "h200_sxm"}, (3, 0)),
        ({"version": "1.1.0rc2.post2", "system": "h200_sxm", "concurrency": 128}, (3,)),
        ({"engine": "sglang", "version": "0.5.9", "precision": "fp8", "concurrency": 128}, (2,)),
        ({"engine": "sglang", "version": "0.5.9", "precision": "fp8"}, (0,)),
        ({"engine": "sglang", "version": "nightly", "precision": "fp8", "concurrency": 128}, (0,)),
        ({"model": "Qwen/Qwen3-32B", "version": "1.2.0rc6.post3"}, (0,)),
    ],
)
def test_which_runs_speculated(changes: dict[str, Any], drafts: tuple[int, ...]) -> None:
    found = run(replace(ROW, **changes))
    assert tuple(one.pools[0].draft_tokens for one in (found.setup, *found.others)) == drafts


def test_a_row_may_give_the_gpus_of_the_whole_deployment() -> None:
    whole = StatedPool(StatedLayout(44, 1, 1, 44, 1))
    found = run(replace(APART, prefill=whole, decode=whole))
    assert found.setup.gpus == 44


def test_stated_workers_go_before_recipes() -> None:
    prefill = StatedPool(StatedLayout(4, 1, 1, 1, 4), workers=2)
    decode = StatedPool(StatedLayout(1, 1, 8, 1, 8), workers=7)
    found = run(replace(APART, prefill=prefill, decode=decode))
    assert [pool.instances for pool in found.setup.pools] == [2, 7]
    assert found.setup.pools[1].draft_tokens == 0


def test_recipes_of_a_run() -> None:
    served = Served("deepseek-r1", "h200-sxm", "trtllm", "fp8", 8192, 1024, 64)
    dep8 = ParallelLayout(8, 1, 8, 8)
    assert recipes_for(served) == (Recipe(1, dep8, 1, dep8, 2), Recipe(2, dep8, 3, dep8))
    assert recipes_for(replace(served, concurrency=65)) == ()


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (replace(ROW, model="a/b"), "model a/b is not described"),
        (replace(ROW, system="tpu"), "GPU tpu is not described"),
        (replace(ROW, engine="tgi"), "engine tgi is not described"),
        (replace(ROW, concurrency=None), "neither concurrency nor batch_size is stated"),
        (replace(APART, concurrency=None), "concurrency is not stated"),
        (
            replace(APART, concurrency=876),
            "the numbers of workers are not stated, and no published recipe fits",
        ),
        (
            replace(ROW, serve=StatedPool(StatedLayout(2, moe_tp=3))),
            "layout: 3 x 1 GPUs of experts are no multiple of tp 2",
        ),
    ],
)
def test_refusals_give_their_reason(row: ServingRow, reason: str) -> None:
    assert refusal(row) == reason


def test_equal_setups_are_built_once() -> None:
    builder = SetupBuilder()
    small = replace(
        ROW,
        model="meta-llama/Llama-3.1-8B-Instruct",
        engine="vllm",
        version="0.12.0",
        precision=None,
        gemm_format=None,
        moe_format=None,
        system="h200_sxm",
        serve=StatedPool(StatedLayout(1)),
    )
    one = builder.build(run(small).setup)
    assert isinstance(one, BuiltSetup)
    assert builder.build(run(replace(small, concurrency=8)).setup) is one
    two = builder.build(replace(run(small).setup, mem_fraction=0.5))
    assert isinstance(two, BuiltSetup)
    assert two.times["serve"] is one.times["serve"]
    assert two.pools["serve"].memory.kv_tokens < one.pools["serve"].memory.kv_tokens


def test_what_ran_gets_the_memory_that_it_needs() -> None:
    """DeepSeek-R1 in FP8 on four B200: SGLang's default fraction leaves no KV."""
    row = replace(ROW, engine="sglang", version="0.5.9", precision="fp8", gemm_format="fp8")
    row = replace(row, moe_format="fp8_block", serve=StatedPool(StatedLayout(4, 1, 1, 4, 1)))
    setup = run(row).setup
    assert setup.mem_fraction == 0.95
    built = SetupBuilder().build(replace(setup, mem_fraction=0.85))
    assert isinstance(built, BuiltSetup)
    assert built.assumptions == ("memory fraction 0.97: it ran, and the default leaves no KV",)


def test_what_cannot_be_says_why() -> None:
    setup = run(replace(ROW, serve=StatedPool(StatedLayout(72, 1, 1, 72, 1)))).setup
    reason = SetupBuilder().build(setup)
    assert isinstance(reason, str)
    assert "72 does not divide the 128 attention heads" in reason
