"""The handoff of a scenario: bytes on the wire by layout and format, conversions, assumptions."""

from __future__ import annotations

from typing import Any

import pytest

from tonnage import api
from tonnage.handoff import End, Terms, handoff_figures, handoff_of
from tonnage.scenarios.catalogue import load_gpu, load_model
from tonnage.scenarios.load import parse_scenario
from tonnage.sim.domain import LinkSpec, ParallelLayout
from tonnage.sim.engine.handoff import Handoff

H200 = load_gpu("h200-sxm")
KIMI_BF16, KIMI_FP8 = 70_272, 35_136  # per token, on every GPU
TOKENS = 8192


def terms(*, sender_converts: bool = False) -> Terms:
    return Terms(LinkSpec("rdma", 50e9, 0.0), "sglang", True, sender_converts)


def handoff(
    model: str = "kimi-k2.6",
    *,
    prefill: ParallelLayout | None = None,
    decode: ParallelLayout | None = None,
    kv: tuple[str, str] = ("bf16", "bf16"),
    sender_converts: bool = False,
) -> Handoff:
    spec = load_model(model)
    ends = [
        End(spec, layout or ParallelLayout(tp=8), kv_format, H200)
        for layout, kv_format in zip((prefill, decode), kv, strict=True)
    ]
    return handoff_of(terms(sender_converts=sender_converts), *ends)


def test_the_bytes_on_the_wire_halve_when_the_sender_converts() -> None:
    kv = ("bf16", "fp8_e4m3")
    assert handoff(kv=kv).wire_bytes(TOKENS) == KIMI_BF16 * TOKENS
    assert handoff(kv=kv, sender_converts=True).wire_bytes(TOKENS) == KIMI_FP8 * TOKENS


@pytest.mark.parametrize("sender_converts", [False, True])
def test_a_conversion_reads_one_format_and_writes_the_other(sender_converts: bool) -> None:
    one = handoff(kv=("bf16", "fp8_e4m3"), sender_converts=sender_converts)
    expected_s = (KIMI_BF16 + KIMI_FP8) * TOKENS / H200.memory_bandwidth_bytes_per_s
    here, there = one.sender_convert_s, one.receiver_convert_s
    if not sender_converts:
        here, there = there, here
    assert here(TOKENS) == pytest.approx(expected_s, rel=1e-12)
    assert there(TOKENS) == 0.0


def test_equal_formats_take_no_conversion() -> None:
    one = handoff(sender_converts=True)
    assert one.sender_convert_s(TOKENS) == one.receiver_convert_s(TOKENS) == 0.0


@pytest.mark.parametrize(
    ("prefill", "decode", "sent", "taken_in"),
    [
        # One latent, on every GPU of both ends: each GPU sends its own to its peer.
        ({"tp": 8}, {"tp": 8}, 1.0, 1.0),
        # Eight receivers each want a copy that four senders have: two copies each.
        ({"tp": 4}, {"tp": 8}, 2.0, 1.0),
        # One rank's single GPU takes what eight GPUs share out.
        ({"tp": 8}, {"tp": 8, "attention_dp": 8}, 1 / 8, 1.0),
        ({"tp": 8, "attention_dp": 8}, {"tp": 8}, 8.0, 1.0),
    ],
)
def test_replicated_kv_crosses_once_per_gpu_that_holds_it(
    prefill: dict[str, int], decode: dict[str, int], sent: float, taken_in: float
) -> None:
    one = handoff(prefill=ParallelLayout(**prefill), decode=ParallelLayout(**decode))
    assert one.wire_bytes(TOKENS) == pytest.approx(sent * KIMI_BF16 * TOKENS)
    assert one.receiver_share == pytest.approx(taken_in / sent)
    ranks = one.sender_ranks, one.receiver_ranks
    assert ranks == (prefill.get("attention_dp", 1), decode.get("attention_dp", 1))


def test_split_heads_cross_once() -> None:
    """Llama 70B has 8 KV heads: 40,960 B per token and GPU on 8 GPUs, twice that on 4."""
    wide, narrow = ParallelLayout(tp=8), ParallelLayout(tp=4)
    down = handoff("llama-3.1-70b", prefill=wide, decode=narrow)
    assert down.wire_bytes(TOKENS) == pytest.approx(40_960 * TOKENS)
    assert down.receiver_share == pytest.approx(2.0)
    up = handoff("llama-3.1-70b", prefill=narrow, decode=wide)
    assert up.wire_bytes(TOKENS) == pytest.approx(81_920 * TOKENS)
    assert up.receiver_share == pytest.approx(0.5)


def test_stages_send_side_by_side() -> None:
    """61 layers on two stages: the fuller one has 31; one GPU takes in both."""
    staged = ParallelLayout(tp=4, pp=2)
    one = handoff(prefill=staged, decode=ParallelLayout(tp=4))
    assert one.wire_bytes(TOKENS) == pytest.approx(31 / 61 * KIMI_BF16 * TOKENS)
    assert one.receiver_share == pytest.approx(61 / 31)


def test_what_changes_until_the_end_of_a_prompt_leaves_last() -> None:
    """Half of gpt-oss's layers keep a window of 128 tokens."""
    one = handoff("gpt-oss-120b", prefill=ParallelLayout(tp=1), decode=ParallelLayout(tp=1))
    assert one.early_bytes is not None
    window_bytes = 128 * 36_864
    assert one.wire_bytes(TOKENS) - one.early_bytes(TOKENS) == pytest.approx(window_bytes)


def test_the_figures_of_one_prompt() -> None:
    """Kimi's BF16 latent of 8,192 tokens at 50 GB/s: 11.5 ms, and 0.18 ms to convert."""
    figures = handoff_figures(handoff(kv=("bf16", "fp8_e4m3")), TOKENS)
    assert figures["wire_s"] == pytest.approx(0.01151, rel=1e-3)
    assert figures["receiver_convert_s"] == pytest.approx(0.00018, rel=1e-2)
    assert figures["sender_convert_s"] == 0.0


# --- scenarios ----------------------------------------------------------------------------------


def report(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = {
        "traffic": {"concurrency": 4, "input_tokens": 4000, "output_tokens": 20, "requests": 12},
        "pools": {"prefill": {"kv": "bf16"}, "decode": {"kv": "fp8_e4m3"}},
    }
    return api.simulate(parse_scenario(data | changes)).to_dict()


def test_the_report_says_that_stock_engines_refuse_mixed_kv_types() -> None:
    assumptions = report(link={"convert": "sender"})["provenance"]["assumptions"]
    (line,) = [text for text in assumptions if "refuse" in text]
    assert "the sender converts KV from bf16 to fp8_e4m3" in line
    assert "stock SGLang and vLLM refuse mixed KV types" in line
    same = report(pools={"prefill": {}, "decode": {}})["provenance"]["assumptions"]
    assert not any("refuse" in text for text in same)


@pytest.mark.parametrize(("convert", "tokens_bytes"), [("sender", 35_136), ("receiver", 70_272)])
def test_explain_tells_the_time_of_the_conversion(convert: str, tokens_bytes: int) -> None:
    data = {
        "traffic": {"input_tokens": 8192},
        "pools": {"prefill": {"kv": "bf16"}, "decode": {"kv": "fp8_e4m3"}},
        "link": {"convert": convert},
    }
    handoff = api.explain(parse_scenario(data))["handoff"]
    assert handoff["wire_bytes_per_gpu"] == tokens_bytes * 8192
    assert handoff[f"{convert}_convert_s"] == pytest.approx(0.00018, rel=1e-2)


def test_a_slow_link_shows_in_the_time_to_the_first_token() -> None:
    """4,000 tokens are 281 MB per GPU: at 1 GB/s that is 281 ms, half of it in FP8."""
    slow = {"bandwidth": "1GB/s", "overlap": False}
    ttft_s = {
        convert: report(link=slow | {"convert": convert}, traffic=one_user())["points"][0][
            "latency"
        ]["ttft_s"]["mean"]
        for convert in ("sender", "receiver")
    }
    fast = report(link={"bandwidth": "1000GB/s"}, traffic=one_user())["points"][0]
    computed_s = fast["latency"]["ttft_s"]["mean"]
    assert ttft_s["receiver"] - computed_s == pytest.approx(0.281, rel=0.01)
    assert ttft_s["sender"] - computed_s == pytest.approx(0.1405, rel=0.01)


def one_user() -> dict[str, Any]:
    return {"concurrency": 1, "input_tokens": 4000, "output_tokens": 2, "requests": 3}
