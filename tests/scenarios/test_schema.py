"""A scenario file: what it says, and what a user reads when it is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tonnage import scenarios
from tonnage.scenarios.catalogue import load_model, scenario_names
from tonnage.scenarios.load import load_scenario, load_variants, parse_scenario
from tonnage.sim.domain import BadInputError, Objective, ParallelLayout, SpeculationSpec
from tonnage.sim.traffic.lengths import Constant, Empirical, LogNormal, Uniform
from tonnage.sim.traffic.spec import LoadPoint


def message(data: dict[str, Any], overrides: tuple[str, ...] = ()) -> str:
    """Return the message that a wrong scenario gets."""
    with pytest.raises(BadInputError) as caught:
        parse_scenario(data, "mine.yaml", None, overrides)
    return str(caught.value)


# --- what it says -------------------------------------------------------------------------------


def test_an_empty_scenario_is_valid_and_says_all_it_assumed() -> None:
    scenario = parse_scenario({})
    assert scenario.pools.serve is not None
    resolved = scenario.resolved()
    assert resolved["engine"]["version"] == "0.5.23"
    assert resolved["traffic"]["concurrency"] == [1, 8, 16, 32, 64]


def test_the_resolved_scenario_is_a_scenario_that_says_the_same() -> None:
    scenario = load_scenario("mooncake-trace")
    again = parse_scenario(scenario.resolved())
    assert again.resolved() == scenario.resolved()


@pytest.mark.parametrize("name", scenario_names())
def test_shipped_scenarios_load_and_name_themselves(name: str) -> None:
    scenario = load_scenario(name)
    assert scenario.name == name
    assert scenario.description
    assert scenario.model_spec().layers
    for role in scenario.pools.named():
        assert scenario.gpu_spec(role).memory_bytes > 0
    assert scenario.traffic_spec().points()


def test_quantities_take_units() -> None:
    data = {
        "link": {"bandwidth": "400Gb/s", "setup": "2ms"},
        "slo": {"ttft_p95": "5s", "tpot_p50": "50ms"},
    }
    scenario = parse_scenario(data)
    assert scenario.link_spec().bandwidth_bytes_per_s == 50e9
    assert scenario.link_spec().setup_s == 0.002
    assert scenario.objectives() == (Objective("ttft", 0.95, 5.0), Objective("tpot", 0.5, 0.05))


def test_the_engine_fraction_says_where_it_is_from() -> None:
    assert parse_scenario({}).engine_spec().mem_fraction is None
    assert parse_scenario({}).engine_spec().mem_fraction_source == "auto"
    given = parse_scenario({"engine": {"name": "vllm", "mem_fraction": 0.9}}).engine_spec()
    assert (given.version, given.mem_fraction, given.mem_fraction_source) == ("0.33", 0.9, "given")


def test_a_pool_gives_its_layout_and_its_own_gpu() -> None:
    pool = {"tp": 8, "ep": 4, "attention_dp": 2, "gpu": "b200-sxm"}
    scenario = parse_scenario({"pools": {"serve": pool}})
    assert scenario.pools.named()["serve"].layout() == ParallelLayout(8, 1, 4, 2, 1)
    assert scenario.gpu_spec("serve").name == "b200-sxm"


@pytest.mark.parametrize(
    ("length", "kind"),
    [
        (4096, Constant),
        ({"kind": "constant", "tokens": 4096}, Constant),
        ({"kind": "uniform", "low": 1, "high": 9}, Uniform),
        ({"kind": "lognormal", "mean": 2000, "p95": 6000}, LogNormal),
        ({"kind": "lognormal", "median": 2000, "p95": 6000, "max": 10000}, LogNormal),
    ],
)
def test_lengths_are_numbers_or_distributions(length: object, kind: type) -> None:
    spec = parse_scenario({"traffic": {"input_tokens": length}}).traffic_spec()
    assert isinstance(spec.input_tokens, kind)


def test_lengths_may_come_from_a_file_beside_the_scenario(tmp_path: Path) -> None:
    (tmp_path / "lengths.csv").write_text("prompt,answer\n10,1\n30,2\n")
    (tmp_path / "mine.yaml").write_text(
        "traffic: {input_tokens: {file: lengths.csv, column: prompt}}\n"
    )
    lengths = load_scenario(tmp_path / "mine.yaml").traffic_spec().input_tokens
    assert isinstance(lengths, Empirical)
    assert lengths.mean() == 20


def test_rates_and_concurrencies_are_one_or_several() -> None:
    poisson = parse_scenario({"traffic": {"kind": "poisson", "rate_per_s": 2}}).traffic_spec()
    assert poisson.points() == (LoadPoint(rate_per_s=2.0),)
    closed = parse_scenario({"traffic": {"concurrency": 4}}).traffic_spec()
    assert closed.points() == (LoadPoint(concurrency=4),)


def test_a_trace_is_found_beside_the_scenario_before_the_shipped_ones(tmp_path: Path) -> None:
    text = "traffic: {kind: trace, path: mooncake_conversation.jsonl.gz}\n"
    (tmp_path / "mine.yaml").write_text(text)
    shipped = load_scenario(tmp_path / "mine.yaml").traffic_spec().trace
    (tmp_path / "mooncake_conversation.jsonl.gz").write_bytes(b"")
    own = load_scenario(tmp_path / "mine.yaml").traffic_spec().trace
    assert shipped is not None
    assert own is not None
    assert own.path.parent == tmp_path.resolve()
    assert shipped.path != own.path


# --- overrides and variants ---------------------------------------------------------------------


def test_overrides_set_nested_fields_and_read_yaml() -> None:
    overrides = ["pools.decode.instances=3", "traffic.concurrency=[2, 4]", "slo.ttft_p95=5s"]
    scenario = load_scenario("kimi-k2.6-h200", overrides)
    assert scenario.pools.named()["decode"].instances == 3
    assert scenario.traffic.concurrency == (2, 4)
    assert scenario.slo == {"ttft_p95": 5.0}


def test_null_takes_a_pool_away() -> None:
    overrides = ["pools.prefill=null", "pools.decode=null", "pools.serve.tp=8"]
    assert list(load_scenario("mooncake-trace", overrides).pools.named()) == ["serve"]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("pools.decode.tp", "write it as field=value"),
        ("=8", "write it as field=value"),
        ("pools.decode.tpp=8", "pools.decode.tpp: unknown field; did you mean 'tp'?"),
        ("pools.decode.tp=eight", "pools.decode.tp: 'eight' is not a whole number"),
        ("model.name=x", "model holds 'kimi-k2.6' and has no fields to set"),
        ("pools.decode.tp=[8", "line 1"),
    ],
)
def test_a_bad_override_is_named(override: str, expected: str) -> None:
    with pytest.raises(BadInputError) as caught:
        load_scenario("kimi-k2.6-h200", [override])
    assert f"--set {override}" in str(caught.value)
    assert expected in str(caught.value)


def test_variants_are_merged_over_the_scenario(tmp_path: Path) -> None:
    file = tmp_path / "pair.yaml"
    file.write_text(
        "pools: {serve: {tp: 8, kv: bf16}}\n"
        "variants:\n"
        "  as-is: {}\n"
        "  small: {pools.serve.tp: 4}\n"
        "  apart: {pools: {serve: null, prefill: {}, decode: {kv: fp8_e4m3}}}\n"
    )
    variants = load_variants(file, ["pools.serve.instances=2"])
    assert list(variants) == ["as-is", "small", "apart"]
    small = variants["small"].pools.named()["serve"]
    assert (small.tp, small.kv, small.instances) == (4, "bf16", 2)
    assert list(variants["apart"].pools.named()) == ["prefill", "decode"]
    assert (
        variants["as-is"].resolved() == load_scenario(file, ["pools.serve.instances=2"]).resolved()
    )


def test_a_wrong_variant_is_named(tmp_path: Path) -> None:
    file = tmp_path / "pair.yaml"
    file.write_text("variants: {small: {pools.serve.tpp: 4}}\n")
    with pytest.raises(BadInputError, match=r"\(variant small\): pools\.serve\.tpp: unknown field"):
        load_variants(file)


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"pols": {}}, "pols: unknown field; did you mean 'pools'?"),
        ({"pools": {"serve": {"tensor": 8}}}, "pools.serve.tensor: unknown field"),
        ({"pools": {"serve": {"tp": "8"}}}, "pools.serve.tp: '8' is not a whole number"),
        ({"pools": {"serve": {"tp": True}}}, "pools.serve.tp: true is not a whole number"),
        ({"pools": {"serve": {"tp": 0}}}, "pools.serve.tp: must be greater than or equal to 1"),
        ({"pools": {"serve": {"ep": 3}}}, "pools.serve: ep 3 does not divide tp 8"),
        ({"pools": {"serve": {"kv": "fp8"}}}, "pools.serve.kv: 'fp8' is not accepted"),
        ({"pools": {"serve": {}, "decode": {}}}, "pools.serve: serve does prefill and decode"),
        ({"pools": {"decode": {}}}, "pools.prefill: missing"),
        ({"pools": {}}, "pools: no pool"),
        ({"pools": None}, "pools: the section is empty"),
        ({"traffic": {"kind": "resident"}}, "pools.decode: kind resident"),
        ({"traffic": {"kind": "trace"}}, "traffic.path: kind trace needs the path"),
        ({"traffic": {"kind": "gamma"}}, "traffic.rate_per_s: kind gamma needs a rate"),
        ({"traffic": {"concurrency": [8, 1]}}, "traffic.concurrency: the numbers must rise"),
        ({"traffic": {"concurrency": "1,8"}}, "traffic.concurrency: '1,8' is not a list"),
        ({"traffic": {"requests": 8}}, "traffic.requests: 8 requests cannot keep 64"),
        ({"traffic": {"input_tokens": 0}}, "traffic.input_tokens: must be greater"),
        (
            {"traffic": {"input_tokens": {"kind": "uniform", "low": 9, "high": 2}}},
            "traffic.input_tokens: high 2 is below low 9",
        ),
        (
            {"traffic": {"input_tokens": {"kind": "uniform", "lo": 9}}},
            "traffic.input_tokens.lo: unknown field; did you mean 'low'?",
        ),
        ({"slo": {"ttft_p96": "5s"}}, "slo.ttft_p96: unknown objective"),
        ({"slo": {"ttft_p95": "5sec"}}, "slo.ttft_p95: '5sec': unknown unit 'sec'"),
        ({"link": {"bandwidth": "400Gb"}}, "link.bandwidth: '400Gb': a bandwidth ends in '/s'"),
        ({"engine": {"version": 0.5}}, "engine.version: 0.5 is read as a number; write it in quo"),
        ({"engine": {"mem_fraction": 1.2}}, "engine.mem_fraction: must be less than 1"),
        ({"price": {"gpu_hour_usd": "$3"}}, "price.gpu_hour_usd: '$3' is not a number"),
        ({"seed": -1}, "seed: must be greater than or equal to 0"),
    ],
)
def test_a_mistake_names_file_field_and_mend(data: dict[str, Any], expected: str) -> None:
    text = message(data)
    assert text.startswith(f"mine.yaml: {expected}")
    assert "\n" not in text


@pytest.mark.parametrize(
    ("data", "accepted"),
    [
        ({"pools": {"serve": {"integrity": "daily"}}}, "none, batched"),
        ({"traffic": {"kind": "bursts"}}, "closed, resident, poisson, gamma, trace, sessions"),
        (
            {"router": {"policy": "nearest"}},
            "least_requests, token_aware, power_of_two, cache_aware",
        ),
        ({"router": {"affinity": "session"}}, "use none"),
        ({"cache": {"gpu": "perhaps"}}, "not true or false"),
        ({"cache": {"gpu": True, "nvme": "1TB"}}, "set host, such as 200GB"),
        ({"cache": {"host": "100GB"}}, "cache.host: there is no prefix cache on the GPU"),
        ({"engine": {"name": "vllm"}, "cache": {"policy": "lfu"}}, "cache.policy: vllm evicts"),
        ({"profile": "mine.json"}, "use one of auto, datasheet"),
    ],
)
def test_what_is_not_there_is_refused_not_ignored(data: dict[str, Any], accepted: str) -> None:
    assert accepted in message(data)


# --- speculation --------------------------------------------------------------------------------


def speculating(**fields: object) -> dict[str, Any]:
    return {"pools": {"serve": {"speculation": fields}}}


def speculation_of(data: dict[str, Any], model: str = "glm-5.2") -> SpeculationSpec | None:
    pool = parse_scenario(data).pools.named()["serve"]
    return pool.speculation.spec(load_model(model))


def test_without_draft_tokens_there_is_no_speculation() -> None:
    assert speculation_of({}) is None
    assert speculation_of(speculating(accept_length=1.0, draft="mtp")) is None


def test_a_mean_becomes_a_distribution() -> None:
    spec = speculation_of(speculating(accept_length=2.952, draft_tokens=3, draft="mtp"))
    assert spec is not None
    assert (spec.draft, spec.draft_tokens, spec.draft_model) == ("mtp", 3, None)
    assert spec.accept_probabilities == pytest.approx((0.2, 0.16, 0.128, 0.512))
    assert spec.accept_length == pytest.approx(2.952)


def test_a_distribution_replaces_the_mean() -> None:
    given = {"draft_tokens": 2, "draft": "free", "accept_distribution": [0.5, 0.2, 0.3]}
    spec = speculation_of(speculating(**given))
    assert spec is not None
    assert spec.accept_probabilities == (0.5, 0.2, 0.3)
    assert speculation_of(speculating(**given, accept_length=1.8)) == spec
    scenario = parse_scenario(speculating(**given))
    assert scenario.resolved()["pools"]["serve"]["speculation"]["accept_length"] == 1.8
    assert parse_scenario(scenario.resolved()).resolved() == scenario.resolved()


def test_a_draft_may_be_a_model(tmp_path: Path) -> None:
    data = speculating(accept_length=2.0, draft_tokens=2, draft="llama-3.1-8b")
    spec = speculation_of(data, "llama-3.1-70b")
    assert spec is not None
    assert spec.draft == "model"
    assert spec.draft_model == load_model("llama-3.1-8b")
    shipped = Path(scenarios.__file__).parent / "models" / "llama-3.1-8b.json"
    (tmp_path / "config.json").write_bytes(shipped.read_bytes())
    data = speculating(accept_length=2.0, draft_tokens=2, draft=str(tmp_path))
    spec = speculation_of(data, "llama-3.1-70b")
    assert spec is not None
    assert spec.draft_model is not None
    assert spec.draft_model.layers == load_model("llama-3.1-8b").layers
    with pytest.raises(BadInputError, match=r"^draft: there is no model .* mean 'llama-3\.1-8b'"):
        speculation_of(speculating(draft_tokens=2, draft="llama-3.1-8"))


def test_mtp_needs_a_checkpoint_that_carries_it() -> None:
    mtp = speculating(accept_length=1.8, draft_tokens=1, draft="mtp")
    with pytest.raises(BadInputError, match=r"kimi-k2\.6 carries no MTP.*glm-5\.2.* do.*eagle3"):
        speculation_of(mtp, "kimi-k2.6")
    assert speculation_of(mtp, "glm-5.2") is not None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"accept_length": 2.6}, "accept_length: 2.6 is more than the 1 that 0 draft tokens can"),
        ({"accept_length": 4.5, "draft_tokens": 3, "draft": "mtp"}, "use draft_tokens 4 or more"),
        ({"accept_length": 0.5, "draft_tokens": 3, "draft": "mtp"}, "accept_length: 0.5 is below"),
        ({"accept_length": 2, "draft_tokens": 3}, "draft: missing; say what guesses the tokens"),
        ({"draft_tokens": -1}, "draft_tokens: must be greater than or equal to 0"),
        ({"draft_token": 3}, "draft_token: unknown field; did you mean 'draft_tokens'?"),
        (
            {"draft_tokens": 2, "draft": "free", "accept_distribution": [0.5, 0.5]},
            "accept_distribution: has 2 probabilities; draft_tokens 2 needs 3",
        ),
        (
            {"draft_tokens": 1, "draft": "free", "accept_distribution": [0.5, 0.4]},
            "accept_distribution: sums to 0.9; probabilities sum to 1",
        ),
        (
            {"draft_tokens": 1, "draft": "free", "accept_distribution": [1.5, -0.5]},
            "accept_distribution.0: must be less than or equal to 1",
        ),
        (
            {"draft_tokens": 1, "draft": "free", "accept_distribution": 0.5},
            "accept_distribution: 0.5 is not a list; write it like",
        ),
        (
            {
                "draft_tokens": 1,
                "draft": "free",
                "accept_distribution": [0.5, 0.5],
                "accept_length": 1.7,
            },
            "accept_length: 1.7 is not the mean of accept_distribution, 1.5; remove one",
        ),
    ],
)
def test_a_mistake_about_speculation_is_named(fields: dict[str, object], expected: str) -> None:
    text = message(speculating(**fields))
    assert text.startswith("mine.yaml: pools.serve.speculation.")
    assert expected in text
    assert "\n" not in text


def test_a_prefill_pool_does_not_speculate() -> None:
    speculation = {"accept_length": 2.0, "draft_tokens": 3, "draft": "eagle3"}
    text = message({"pools": {"prefill": {"speculation": speculation}, "decode": {}}})
    assert "pools.prefill.speculation.draft_tokens: a prefill pool makes no tokens" in text
    split = {"prefill": {}, "decode": {"speculation": speculation}}
    assert parse_scenario({"pools": split}).pools.named()["decode"].speculation.draft == "eagle3"


def test_unknown_names_name_the_nearest() -> None:
    with pytest.raises(BadInputError, match=r"mine\.yaml: model: .*did you mean 'kimi-k2"):
        parse_scenario({"model": "kimi-k2.66"}, "mine.yaml").model_spec()
    with pytest.raises(BadInputError, match=r"mine\.yaml: pools\.serve\.gpu: .*'h200-sxm'"):
        parse_scenario({"pools": {"serve": {"gpu": "h200-sxn"}}}, "mine.yaml").gpu_spec("serve")


def test_a_missing_trace_is_named_with_the_shipped_ones() -> None:
    text = message({"traffic": {"kind": "trace", "path": "nowhere.jsonl"}})
    assert "traffic.path: no trace file 'nowhere.jsonl'" in text
    assert "mooncake_conversation.jsonl.gz" in text


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"model: a\nmodel: b\n", "line 2: model: the field is there twice"),
        (b"pools:\n  serve: {tp: 8\n", "line 3: "),
        (b"- a\n- b\n", "a scenario is a mapping of fields"),
        (b"model: \xff\n", "not text in UTF-8"),
        (b"model: !!python/object:os.system {}\n", "line 1: "),
    ],
)
def test_a_file_that_is_no_scenario(tmp_path: Path, content: bytes, expected: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)
    with pytest.raises(BadInputError) as caught:
        load_scenario(file)
    assert str(caught.value).startswith(str(file))
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInputError, match=r"gone\.yaml: no such scenario file"):
        load_scenario(tmp_path / "gone.yaml")
    with pytest.raises(BadInputError, match="is a folder"):
        load_scenario(tmp_path)
    with pytest.raises(BadInputError, match=r"no scenario named .*did you mean 'mooncake-trace'"):
        load_scenario("mooncake-trac")


def test_a_timeout_is_a_time_and_not_for_requests_that_never_arrive() -> None:
    asked = parse_scenario({"traffic": {"timeout": "30s", "output_limit_tokens": 4096}})
    assert asked.traffic_spec().timeout_s == 30.0
    assert asked.traffic_spec().output_limit_tokens == 4096
    assert "traffic.timeout" in message({"traffic": {"timeout": "0s"}})
    traffic = {"kind": "resident", "timeout": "30s"}
    pools = {"decode": {"kv": "bf16"}}
    assert "no client waits" in message({"traffic": traffic, "pools": pools})
