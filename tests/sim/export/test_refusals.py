"""What an engine cannot do is refused with the field and the mend, or told in the file."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import tonnage
from tests.sim.export.plans import PLANS, with_pool
from tonnage.sim.domain import BadInputError, IntegritySpec, ParallelLayout
from tonnage.sim.planning.fleet_plan import FleetPlan, PlannedRouter, PlannedSpeculation

KIMI, CHAT, APART = PLANS["kimi-agents"], PLANS["llama-chat"], PLANS["llama-apart"]
Change = Callable[[FleetPlan], FleetPlan]


def _layout(tp: int, **shares: int) -> ParallelLayout:
    return ParallelLayout(tp=tp, **shares)


def pool_change(role: str, **changes: Any) -> Change:
    return lambda plan: with_pool(plan, role, **changes)


@pytest.mark.parametrize("to", ["engine", "dynamo", "kubernetes"])
@pytest.mark.parametrize(
    ("plan", "change", "found", "mend"),
    [
        (KIMI, pool_change("decode", kv="bf16"), "pools.decode.kv: bf16", "one format"),
        (APART, pool_change("decode", kv="bf16"), "pools.decode.kv: bf16", "one format"),
        (KIMI, pool_change("decode", page_tokens=32), "pools.decode.page_tokens: 32", "page size"),
        (
            KIMI,
            lambda plan: replace(plan, needs=("a page-tag check",)),
            "needs: a page-tag",
            "--which",
        ),
        (KIMI, lambda plan: replace(plan, link="nvmeof"), "link: nvmeof", "rdma, tcp, nvlink"),
        (APART, lambda plan: replace(plan, link="nvmeof"), "link: nvmeof", "rdma, tcp, nvlink"),
        (
            KIMI,
            pool_change("prefill", chunk_tokens=1000),
            "chunk_tokens: 125 of a rank",
            "multiple",
        ),
        (
            CHAT,
            pool_change("serve", layout=ParallelLayout(tp=4, ep=2)),
            "layout.ep: 2 of 4",
            "ep = tp",
        ),
        (CHAT, pool_change("serve", layout=_layout(4, dcp=2)), "layout.dcp: 2", "dcp 1"),
        (
            APART,
            pool_change("decode", layout=_layout(8, dcp=4)),
            "layout.dcp: 4",
            "without",
        ),
        (
            KIMI,
            pool_change("decode", layout=ParallelLayout(tp=9)),
            "pools.decode.layout: 9 GPUs do not spread evenly over nodes of 8",
            "multiple of 8",
        ),
        (
            CHAT,
            pool_change("serve", speculation=PlannedSpeculation("free", 3, 2.0)),
            "pools.serve.speculation.draft: free",
            "mtp, eagle3 or a draft model",
        ),
        (
            KIMI,
            pool_change(
                "decode",
                layout=ParallelLayout(tp=8, attention_dp=8),
                speculation=PlannedSpeculation("llama-3.1-8b", 3, 2.0),
            ),
            "pools.decode.speculation.draft: llama-3.1-8b",
            "mtp or eagle3",
        ),
        (
            KIMI,
            pool_change(
                "decode",
                layout=ParallelLayout(tp=8, pp=2),
                speculation=PlannedSpeculation("eagle3", 3, 2.0),
            ),
            "pools.decode.speculation.draft: eagle3",
            "pp 1",
        ),
        (
            CHAT,
            lambda plan: replace(plan, router=PlannedRouter("fastest")),
            "router.policy: 'fastest'",
            "round_robin",
        ),
    ],
)
def test_what_would_not_start_is_refused(
    plan: FleetPlan, change: Change, found: str, mend: str, to: str
) -> None:
    asked: Any = plan.engine if to == "engine" else to
    with pytest.raises(BadInputError, match=f"{re.escape(found)}.*{re.escape(mend)}"):
        tonnage.export(change(plan), asked)


@pytest.mark.parametrize("to", ["csv", "markdown", "html"])
def test_what_no_engine_starts_can_still_be_told_of(to: Any) -> None:
    plan = replace(with_pool(KIMI, "decode", kv="bf16"), needs=("KV conversion",))
    assert "KV conversion" in tonnage.export(plan, to).text


@pytest.mark.parametrize(
    ("plan", "change", "told"),
    [
        (
            KIMI,
            pool_change("decode", integrity=IntegritySpec(tracker="batched")),
            "pools.decode.integrity.tracker batched: sglang has no page tags",
        ),
        (
            KIMI,
            pool_change("decode", integrity=IntegritySpec(tracker="canary")),
            "pools.decode.integrity.tracker canary: its canary watches models with MHA",
        ),
        (
            CHAT,
            pool_change("serve", integrity=IntegritySpec(tracker="canary")),
            "pools.serve.integrity.tracker canary: vllm has no KV canary",
        ),
        (
            APART,
            pool_change("decode", integrity=IntegritySpec(handoff_checksum=True)),
            "pools.decode.integrity.handoff_checksum: vllm sums nothing",
        ),
        (
            APART,
            pool_change("decode", max_running_requests=97),
            "max_running_requests 97: vllm gives each of 2 ranks 48",
        ),
        (
            KIMI,
            lambda plan: replace(plan, engine_version="0.5.25"),
            "checked against sglang 0.5.23",
        ),
        (KIMI, lambda plan: replace(plan, model="not-here"), "model not-here: not at hand"),
        (
            KIMI,
            lambda plan: replace(plan, router=PlannedRouter("least_requests")),
            "router.policy least_requests: the router has no such policy; power_of_two",
        ),
        (
            KIMI,
            lambda plan: replace(plan, router=PlannedRouter("cache_aware", "session")),
            "x-smg-routing-key",
        ),
    ],
)
def test_what_is_done_otherwise_stands_in_the_file(
    plan: FleetPlan, change: Change, told: str
) -> None:
    asked: Any = plan.engine
    found = tonnage.export(change(plan), asked)
    assert any(told in one for one in found.remarks)
    assert told in found.text


def test_a_canary_is_started_where_the_engine_has_one_for_the_model() -> None:
    watched = IntegritySpec(tracker="canary")
    plan = with_pool(
        replace(CHAT, engine="sglang", engine_version="0.5.23"), "serve", integrity=watched
    )
    assert "--kv-canary raise" in tonnage.export(plan, "sglang").text
    latent = with_pool(KIMI, "decode", integrity=watched)
    assert "--kv-canary" not in tonnage.export(latent, "sglang").text


def test_a_plan_of_one_engine_is_not_written_as_anothers_commands() -> None:
    with pytest.raises(BadInputError, match="--to vllm: the plan is for sglang"):
        tonnage.export(KIMI, "vllm")


def test_an_engine_without_flags_is_refused_but_its_table_is_not() -> None:
    plan = replace(KIMI, engine="trtllm", engine_version="1.0.0")
    with pytest.raises(BadInputError, match="engine: no flags are known for 'trtllm'"):
        tonnage.export(plan, "kubernetes")
    assert "trtllm" in tonnage.export(plan, "csv").text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mem_fraction": 1.2}, "pools.decode.mem_fraction: 1.2; write a share"),
        ({"instances": 0}, "pools.decode.instances: 0; write 1 or more"),
        ({"chunk_tokens": -1}, "pools.decode.chunk_tokens: -1; write 1 or more"),
        ({"kv": "int2"}, "pools.decode.kv: int2"),
        (
            {"max_model_tokens": 300_000},
            "max_model_tokens: 300000; the model has positions for 262",
        ),
    ],
)
def test_a_number_that_no_engine_takes_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(BadInputError, match=re.escape(words)):
        tonnage.export(with_pool(KIMI, "decode", **changes), "sglang")


def test_a_word_that_the_engine_does_not_know_is_refused() -> None:
    plan = with_pool(with_pool(KIMI, "decode", kv="int2"), "prefill", kv="int2")
    with pytest.raises(BadInputError, match="--kv-cache-dtype int2: not one of auto"):
        tonnage.export(plan, "sglang")


def test_an_unknown_gpu_is_named() -> None:
    with pytest.raises(BadInputError, match="there is no gpu named 'h900'"):
        tonnage.export(with_pool(KIMI, "decode", gpu="h900"), "csv")


@pytest.mark.parametrize("name", ["decoder", "decode.draft.x", ""])
def test_a_checkpoint_of_no_pool_is_named(name: str) -> None:
    with pytest.raises(BadInputError, match="not a pool"):
        tonnage.export(KIMI, "sglang", checkpoints={name: "x"})
