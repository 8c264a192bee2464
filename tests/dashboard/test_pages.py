"""Every page, run without a browser: what is there first, after a click, and after a mistake."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from tonnage.dashboard.links import encoded
from tonnage.dashboard.runs import Runs
from tonnage.scenarios.catalogue import scenario_path

SMALL = """
name: small
model: llama-3.1-8b
gpu: h100-sxm
traffic: {kind: poisson, rate_per_s: [2, 8], input_tokens: 500, output_tokens: 50, requests: 60}
pools:
  serve: {instances: 1, tp: 1, kv: bf16}   # one GPU
slo: {ttft_p95: 2s, tpot_p95: 30ms}
price: {gpu_hour_usd: 3}
plan:
  {gpus: [h100-sxm], max_gpus: 2, tp: [1], pp: [1], requests: 100, seeds: 2, verify: 1,
   shapes: [colocated], weights: [native], chunk_tokens: [auto]}
variants: {at once: {}, two: {pools: {serve: {instances: 2}}}}
"""
PAGES = (
    "explore",
    "memory",
    "throughput",
    "timeline",
    "plan",
    "integrity",
    "calibration",
    "compare",
    "validate",
)
pytestmark = pytest.mark.usefixtures("queue")


def _script(name: str) -> None:
    import importlib

    importlib.import_module(f"tonnage.dashboard.views.{name}").page()


def opened(name: str, text: str | None = None, **address: str) -> AppTest:
    """Run a page as a session that begins with a text, or with an address."""
    test = AppTest.from_function(_script, kwargs={"name": name}, default_timeout=60)
    for key, value in (address or ({} if text is None else {"s": encoded(text)})).items():
        test.query_params[key] = value
    return test.run()


def button(test: AppTest, label: str) -> Any:
    return next(one for one in test.button if one.label == label)


def until(test: AppTest, ended: Callable[[AppTest], bool]) -> AppTest:
    """Run a page again and again until it shows what is waited for."""
    until_s = time.monotonic() + 45
    while not ended(test) and time.monotonic() < until_s:
        time.sleep(0.1)
        test.run()
    assert not test.exception
    assert ended(test), [one.value for one in (*test.error, *test.info)]
    return test


def after(name: str, click: str, text: str = SMALL) -> AppTest:
    """Run a page, press a button, and wait until the work is done."""
    test = opened(name, text)
    if not button(test, click).disabled:
        button(test, click).click().run()
    return until(test, lambda one: button(one, click).disabled and no_progress(one))


def no_progress(test: AppTest) -> bool:
    return not any(one.label == "Cancel" for one in test.button)


def labels(test: AppTest) -> list[str]:
    return [one.label for one in test.metric]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_opens_and_says_what_to_do(name: str) -> None:
    test = opened(name, SMALL)
    assert not test.exception
    assert not test.error
    assert test.title[0].value.lower() == name
    assert test.info or test.metric or test.dataframe


def test_explore_runs_what_is_typed_and_what_is_chosen() -> None:
    test = after("explore", "Run")
    assert "Most output tokens/s" in labels(test)
    assert len(test.dataframe[0].value) == 2
    assert {one.label for one in test.download_button} >= {"CSV", "JSON", "HTML"}


def test_a_widget_changes_the_text_and_keeps_its_comments() -> None:
    test = opened("explore", SMALL)
    test.selectbox(key="field pools.serve.kv").set_value("fp8_e4m3").run()
    assert "kv: fp8_e4m3}   # one GPU" in test.text_area(key="editor").value
    assert "s" in test.query_params
    button(test, "Undo").click().run()
    assert test.text_area(key="editor").value == SMALL


def test_the_text_changes_the_widgets() -> None:
    test = opened("explore", SMALL)
    test.text_area(key="editor").set_value(SMALL.replace("tp: 1,", "tp: 2,")).run()
    assert test.selectbox(key="field pools.serve.tp").value == 2


def test_a_change_that_makes_no_scenario_is_told_and_not_made() -> None:
    test = opened("explore", SMALL)
    test.text_input(key="field traffic.rate_per_s").set_value("2, many").run()
    assert "Not changed. " in test.error[0].value
    assert "traffic.rate_per_s" in test.error[0].value
    assert test.text_area(key="editor").value == SMALL


def test_bad_yaml_is_told_beside_it_and_on_the_other_pages() -> None:
    test = opened("explore", SMALL)
    test.text_area(key="editor").set_value("modle: kimi-k2.6\n").run()
    assert "did you mean 'model'?" in test.error[0].value
    assert "widgets are here again" in test.info[0].value
    other = opened("memory", "modle: kimi-k2.6\n")
    assert "did you mean 'model'?" in other.error[0].value
    assert not other.exception


def test_what_does_not_fit_is_told_in_place_with_a_mend() -> None:
    text = SMALL.replace("llama-3.1-8b", "kimi-k2.6")
    for name in ("explore", "memory"):
        test = opened(name, text)
        assert not test.exception
        assert "Smallest change that fits" in test.error[0].value


def test_together_becomes_apart_and_together_again() -> None:
    test = opened("memory", SMALL)
    test.segmented_control(key="field shape").set_value("apart").run()
    assert {"prefill: KV tokens", "decode: KV tokens"} <= set(labels(test))
    test.segmented_control(key="field shape").set_value("together").run()
    assert "serve: KV tokens" in labels(test)


def test_memory_says_what_other_formats_hold() -> None:
    test = opened("memory", scenario="kimi-k2.6-h200")
    assert [one.value for one in test.metric][:2] == ["1,369,135", "304"]
    rows = test.dataframe[1].value.set_index("change")
    assert rows.loc["kv bf16", "kv_tokens"] == 684_567


def test_an_unknown_or_damaged_link_is_told() -> None:
    for address in ({"scenario": "no-such"}, {"s": "AAAA"}):
        test = opened("memory", None, **address)
        assert test.warning[0].value.startswith("link: ")
        assert not test.exception


def test_throughput_and_timeline_draw_the_run() -> None:
    test = after("throughput", "Run")
    assert [one.value for one in test.selectbox][:2] == ["all output", "TTFT"]
    assert {"CSV", "HTML"} <= {one.label for one in test.download_button}
    assert after("timeline", "Run").multiselect[0].value == ["serve 0"]


def test_a_plan_is_found_and_can_be_taken_away() -> None:
    test = after("plan", "Search")
    assert "USD per hour" in labels(test)
    known = {one.label for one in test.download_button}
    assert {"plan.json", "sglang", "kubernetes", "html"} <= known
    assert any("vllm" in one.value for one in test.caption)


def test_a_plan_without_objectives_says_that_it_needs_some() -> None:
    test = opened("plan", SMALL.replace("slo: {ttft_p95: 2s, tpot_p95: 30ms}", ""))
    assert "needs objectives" in test.info[0].value


def test_a_plan_that_nothing_meets_names_what_binds() -> None:
    text = SMALL.replace("ttft_p95: 2s", "ttft_p95: 1ms")
    test = opened("plan", text)
    button(test, "Search").click().run()
    until(test, lambda one: bool(one.error))
    assert "ttft_p95" in test.error[0].value


def test_integrity_fills_its_matrix() -> None:
    test = opened("integrity", SMALL)
    test.select_slider(key="faults").set_value(25).run()
    button(test, "Inject").click().run()
    until(test, lambda one: len(one.dataframe) >= 2)
    assert "batched" in set(test.dataframe[0].value["check"])


def test_compare_runs_variants_and_shows_what_differs() -> None:
    test = opened("compare", SMALL)
    for name in ("at once", "two"):
        button(test, f"Run variant: {name}").click().run()
    until(test, lambda one: len(one.dataframe) >= 3)
    assert "pools.serve.instances" in set(test.dataframe[0].value["field"])


def test_calibration_shows_the_errors_of_a_profile() -> None:
    test = opened("calibration")
    assert "median error, %" in test.dataframe[0].value.columns
    test.selectbox(key="profile").set_value("h100-sxm-vllm").run()
    assert not test.exception


def test_validate_takes_a_table_and_refuses_another() -> None:
    test = opened("validate")
    test.segmented_control(key="kind").set_value("kv").run()
    test.file_uploader(key="upload kv").upload("bad.csv", b"no,such\n1,2\n", "text/csv").run()
    button(test, "Predict").click().run()
    until(test, lambda one: bool(one.error))
    assert "uploaded.csv" in test.error[0].value


LATENCY = (  # one row, as measured for the table whose columns these are
    "id,model,system,backend,backend_version,precision,gemm_quant,moe_quant,mode,isl,osl,"
    "concurrency,batch_size,tp_size,pp_size,attention_dp_size,moe_tp_size,moe_ep_size,"
    "prefill_batch_size,prefill_num_workers,prefill_tp_size,prefill_pp_size,"
    "prefill_attention_dp_size,prefill_moe_tp_size,prefill_moe_ep_size,decode_batch_size,"
    "decode_num_workers,decode_tp_size,decode_pp_size,decode_attention_dp_size,"
    "decode_moe_tp_size,decode_moe_ep_size,ttft_ms,tpot_ms\n"
    "one,MiniMaxAI/MiniMax-M2.5,b300_sxm,vllm,0.19.0,fp8,fp8,fp8,agg,1024,1024,128,128,4,1,1,4,1,"
    ",,,,,,,,,,,,,,205.6,17.79\n"
)


def test_validate_predicts_the_rows_of_a_table() -> None:
    test = opened("validate")
    file = test.file_uploader(key="upload latency")
    file.upload("rows.csv", LATENCY.encode(), "text/csv").run()
    button(test, "Predict").click().run()
    until(test, lambda one: bool(one.metric))
    assert [one.value for one in test.metric] == ["1", "1", "0"]
    assert any(one.value.startswith("tpot: median error") for one in test.subheader)


def test_two_sessions_share_a_result_and_one_can_cancel(queue: Runs) -> None:
    first, second = opened("explore", SMALL), opened("throughput", SMALL)
    assert after("explore", "Run").metric
    assert not first.run().exception
    assert button(second.run(), "Run").disabled
    long = scenario_path("retry-storm").read_text()
    test = opened("timeline", long)
    button(test, "Run").click().run()
    assert not no_progress(test)
    button(test, "Cancel").click().run()
    until(test, no_progress)
    assert any(one.value.startswith("Cancelled. ") for one in test.info)
