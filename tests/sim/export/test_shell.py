"""Launch scripts: valid bash whose programs get exactly the words meant for them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import tonnage
from tests.sim.export.plans import PLANS, fleet, pool, with_pool
from tonnage.plan_export import Exported
from tonnage.sim.domain import ParallelLayout
from tonnage.sim.export.commands import Command
from tonnage.sim.export.flags import Option, argument_list
from tonnage.sim.planning.fleet_plan import FleetPlan, PlannedSpeculation

_STUB = '#!/bin/bash\nprintf \'%s\\0\' "${0##*/}" "$@"\n'
_SHOW = "#!/bin/bash\nenv -0\n"
PLACES = {"NODE_RANK": "1", "LEADER": "10.0.0.9", "DECODE_MODEL": "org/int4", "HOST_ADDRESS": "h"}


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make programs named as the engines', which print the words they are given."""
    folder = tmp_path_factory.mktemp("programs")
    for name in ("python3", "vllm", "vllm-router"):
        (folder / name).write_text(_STUB)
        (folder / name).chmod(0o755)
    return folder


def script_of(plan: FleetPlan) -> str:
    return tonnage.export(plan, plan.engine).text  # type: ignore[arg-type]


def run(text: str, role: str, programs: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", **variables}
    command = ["bash", "-c", text, "fleet.sh", role]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def words(text: str, role: str, programs: Path, **variables: str) -> list[str]:
    """Return the words that a role's program is started with."""
    done = run(text, role, programs, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\0")[:-1]


def values_of(given: list[str]) -> dict[str, str]:
    """Return the word behind each word: the value behind each flag."""
    return dict(pairwise(given))


def options_of(given: list[str]) -> list[Option]:
    """Return words as options: a word behind a flag is its value."""
    options: list[Option] = []
    for word in given:
        if word.startswith("--"):
            options.append(Option(word))
        elif options and options[-1].value is None:
            options[-1] = replace(options[-1], value=word)
    return options


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_script_is_valid_bash(plan: FleetPlan) -> None:
    checked = subprocess.run(["bash", "-n"], input=script_of(plan), text=True, capture_output=True)
    assert (checked.returncode, checked.stderr) == (0, "")


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_every_flag_is_one_that_the_pinned_engine_takes(plan: FleetPlan, programs: Path) -> None:
    arguments = argument_list({"sglang": "sglang-0.5.23", "vllm": "vllm-0.33.0"}[plan.engine])
    for one in plan.pools:
        given = words(script_of(plan), one.role, programs, **PLACES)
        options = options_of(given)
        assert len(options) > 10
        assert [arguments.problem(option) for option in options] == [None] * len(options)


def test_sglang_gets_the_settings_of_the_pool(programs: Path) -> None:
    given = words(script_of(PLANS["kimi-agents"]), "prefill", programs)
    assert given[:5] == [
        "python3",
        "-m",
        "sglang.launch_server",
        "--model-path",
        "moonshotai/Kimi-K2.6",
    ]
    pairs = values_of(given)
    assert pairs["--tp-size"] == "8"
    assert pairs["--attn-dp-size"] == "8"
    assert pairs["--ep-size"] == "8"
    assert pairs["--mem-fraction-static"] == "0.871"
    assert pairs["--max-running-requests"] == "64"  # of an instance: SGLang shares it out
    assert pairs["--context-length"] == "131072"
    assert pairs["--page-size"] == "64"
    assert pairs["--chunked-prefill-size"] == "8192"
    assert pairs["--kv-cache-dtype"] == "fp8_e4m3"
    assert pairs["--disaggregation-mode"] == "prefill"
    assert pairs["--disaggregation-transfer-backend"] == "mooncake"
    assert pairs["--disaggregation-bootstrap-port"] == "8998"


def test_both_sides_sum_what_one_of_them_checks(programs: Path) -> None:
    text = script_of(PLANS["kimi-agents"])
    for role in ("prefill", "decode"):
        assert "--disaggregation-enable-kv-checksum" in words(text, role, programs)


def test_vllm_counts_requests_by_rank_and_takes_the_attention_ranks(programs: Path) -> None:
    given = words(script_of(PLANS["llama-apart"]), "decode", programs, **PLACES)
    pairs = values_of(given)
    assert given[:3] == ["vllm", "serve", "org/int4"]  # the variable goes before the plan's
    assert (pairs["--tensor-parallel-size"], pairs["--data-parallel-size"]) == ("4", "2")
    assert pairs["--pipeline-parallel-size"] == "2"
    assert pairs["--max-num-seqs"] == "48"  # 96 of an instance, two ranks
    assert pairs["--gpu-memory-utilization"] == "0.871"
    assert (
        pairs["--kv-transfer-config"] == '{"kv_connector":"NixlConnector","kv_role":"kv_consumer"}'
    )
    assert "--enable-prefix-caching" not in given  # a decode pool computes no prompts


def test_speculation_says_who_drafts_and_how_many(programs: Path) -> None:
    decode = words(script_of(PLANS["glm-long"]), "decode", programs, **PLACES)
    pairs = values_of(decode)
    assert pairs["--speculative-algorithm"] == "NEXTN"
    assert pairs["--speculative-num-steps"] == "3"
    assert pairs["--speculative-num-draft-tokens"] == "4"  # the drafted and the one that is sure
    serve = words(script_of(PLANS["llama-chat"]), "serve", programs)
    pairs = values_of(serve)
    assert pairs["--spec-method"] == "draft_model"
    assert pairs["--spec-model"] == "meta-llama/Llama-3.1-8B"
    assert pairs["--spec-tokens"] == "3"
    assert pairs["--quantization"] == "fp8_per_tensor"


def test_host_memory_becomes_the_engines_unit(programs: Path) -> None:
    serve = words(script_of(PLANS["llama-chat"]), "serve", programs)
    assert values_of(serve)["--kv-offloading-size"] == "64"  # GiB
    llama = replace(PLANS["llama-chat"], engine="sglang", engine_version="0.5.23")
    serve = values_of(words(script_of(llama), "serve", programs))
    assert serve["--hicache-size"] == "17"  # GB of each of four GPUs


def test_a_latent_is_kept_once_per_attention_group(programs: Path) -> None:
    plan = replace(PLANS["kimi-agents"], host_cache_bytes=800e9)
    prefill = words(script_of(plan), "prefill", programs)
    assert "--enable-hierarchical-cache" in prefill
    assert values_of(prefill)["--hicache-size"] == "100"  # eight ranks, a pool each
    whole = with_pool(plan, "prefill", layout=ParallelLayout(tp=8))
    assert values_of(words(script_of(whole), "prefill", programs))["--hicache-size"] == "800"
    assert "--hicache-size" not in words(script_of(plan), "decode", programs)


def test_vllm_sends_kv_and_keeps_it_in_host_memory(programs: Path) -> None:
    plan = replace(PLANS["llama-apart"], host_cache_bytes=64.0 * 2**30)
    prefill = words(script_of(plan), "prefill", programs, **PLACES)
    assert "--kv-offloading-size" not in prefill  # it would replace the connector that sends
    config = json.loads(values_of(prefill)["--kv-transfer-config"])
    assert config["kv_connector"] == "MultiConnector"
    sends, keeps = config["kv_connector_extra_config"]["connectors"]
    assert sends == {"kv_connector": "NixlConnector", "kv_role": "kv_producer"}
    assert keeps["kv_connector_extra_config"] == {"cpu_bytes_to_use": 64 * 2**30}
    decode = values_of(words(script_of(plan), "decode", programs, **PLACES))
    assert json.loads(decode["--kv-transfer-config"])["kv_connector"] == "NixlConnector"


def test_nodes_of_an_instance_know_their_place(programs: Path) -> None:
    given = words(script_of(PLANS["glm-long"]), "prefill", programs, **PLACES)
    pairs = values_of(given)
    assert (pairs["--nnodes"], pairs["--node-rank"]) == ("2", "1")
    assert pairs["--dist-init-addr"] == "10.0.0.9:20000"
    vllm = script_of(PLANS["llama-apart"])
    assert "--headless" in words(vllm, "decode", programs, **PLACES)
    first = words(vllm, "decode", programs, **{**PLACES, "NODE_RANK": "0"})
    assert "--headless" not in first
    assert values_of(first)["--master-addr"] == "10.0.0.9"


def test_instances_that_share_a_node_take_their_own_gpus_and_ports(tmp_path: Path) -> None:
    (tmp_path / "vllm").write_text(_SHOW)
    (tmp_path / "vllm").chmod(0o755)
    text = script_of(PLANS["llama-apart"])
    done = run(text, "prefill", tmp_path, SLOT="1", HOST_ADDRESS="10.1.1.1")
    seen = dict(line.split("=", 1) for line in done.stdout.split("\0")[:-1])
    assert seen["CUDA_VISIBLE_DEVICES"] == "4,5,6,7"
    assert seen["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.1.1.1"
    assert seen["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5601"


@pytest.mark.parametrize(
    ("role", "variables", "wanted"),
    [
        ("decode", {"NODE_RANK": "0", "LEADER": "a"}, "set DECODE_MODEL"),
        ("prefill", {}, "NODE_RANK: 0 to 1"),
        ("prefill", {"NODE_RANK": "2", "LEADER": "a"}, "NODE_RANK: 0 to 1"),
        ("prefill", {"NODE_RANK": "0"}, "LEADER: the address of node 0"),
        ("router", {"PREFILL_URLS": "http://a:1", "DECODE_URLS": "http://b:1"}, "2 URLs of decode"),
        ("serve", {}, "the first argument is one of: prefill decode router"),
    ],
)
def test_what_is_missing_is_named(
    role: str, variables: Mapping[str, str], wanted: str, programs: Path
) -> None:
    done = run(script_of(PLANS["glm-long"]), role, programs, **variables)
    assert done.returncode == 2
    assert wanted in done.stderr
    assert done.stdout == ""


def test_the_router_is_given_every_instance(programs: Path) -> None:
    urls = {"PREFILL_URLS": "http://a:30000 http://b:30000", "DECODE_URLS": "http://c:30000"}
    given = words(script_of(PLANS["kimi-agents"]), "router", programs, **urls)
    assert given[:3] == ["python3", "-m", "sglang_router.launch_router"]
    assert given[3:6] == ["--pd-disaggregation", "--policy", "cache_aware"]
    joined = " ".join(given)
    assert "--prefill http://a:30000 8998 --prefill http://b:30000 8998" in joined
    assert "--decode http://c:30000" in joined
    router = argument_list("sglang-router-0.3.2")
    assert {router.problem(one) for one in options_of(given[3:])} == {None}


def test_prefill_instances_on_one_node_have_their_own_bootstrap_port(programs: Path) -> None:
    plan = with_pool(PLANS["kimi-agents"], "prefill", layout=pool("prefill").layout)
    halves = with_pool(plan, "prefill", layout=replace(plan.pools[0].layout, tp=4))
    urls = {"PREFILL_URLS": "http://a:30000 http://a:30001", "DECODE_URLS": "http://c:30000"}
    given = " ".join(words(script_of(halves), "router", programs, **urls))
    assert "--prefill http://a:30000 8998 --prefill http://a:30001 8999" in given
    started = words(script_of(halves), "prefill", programs, SLOT="1")
    pairs = values_of(started)
    assert (pairs["--port"], pairs["--disaggregation-bootstrap-port"]) == ("30001", "8999")


def test_sessions_return_by_the_routers_own_means(programs: Path) -> None:
    text = script_of(PLANS["llama-chat"])
    given = words(text, "router", programs, SERVE_URLS="http://a:8000 http://b:8001")
    assert given[:3] == ["vllm-router", "--policy", "consistent_hash"]
    assert "x-session-id" in text


def test_a_single_instance_needs_no_router() -> None:
    text = script_of(with_pool(PLANS["llama-chat"], "serve", instances=1))
    assert "start_router" not in text


NASTY = 'it\'s "quoted" $(touch owned) `touch owned` ; touch owned\n touch owned \\ $HOME'


def test_names_with_quotes_and_commands_stay_names(programs: Path, tmp_path: Path) -> None:
    plan = replace(PLANS["kimi-agents"], name=NASTY, model=NASTY, binds=NASTY)
    found: Exported = tonnage.export(plan, "sglang", checkpoints={"prefill": NASTY, "decode": "d"})
    environment = {"PATH": f"{programs}:{os.environ['PATH']}"}
    command = ["bash", "-c", found.text, "fleet.sh", "prefill", "--extra", NASTY]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path
    )
    given = done.stdout.split("\0")[:-1]
    assert given[given.index("--model-path") + 1] == NASTY
    assert given[given.index("--served-model-name") + 1] == " ".join(NASTY.split())
    assert given[-2:] == ["--extra", NASTY]
    assert list(tmp_path.iterdir()) == []


def test_a_files_name_is_one_that_kubernetes_takes() -> None:
    plan = replace(PLANS["kimi-agents"], name='42: it\'s "mine"')
    assert tonnage.export(plan, "sglang").file_name == "fleet-42-it-s-mine.sglang.sh"


def test_a_pool_that_drafts_by_eagle_asks_for_its_checkpoint(programs: Path) -> None:
    plan = with_pool(
        PLANS["kimi-agents"], "decode", speculation=PlannedSpeculation("eagle3", 3, 2.62)
    )
    text = script_of(plan)
    assert "set DECODE_DRAFT_MODEL" in run(text, "decode", programs).stderr
    given = words(text, "decode", programs, DECODE_DRAFT_MODEL="nvidia/draft")
    pairs = values_of(given)
    assert pairs["--speculative-algorithm"] == "EAGLE3"
    assert pairs["--speculative-draft-model-path"] == "nvidia/draft"


def test_older_engines_get_the_flags_they_had(programs: Path) -> None:
    plan = replace(PLANS["kimi-agents"], engine_version="0.5.21")
    given = words(script_of(plan), "prefill", programs)
    assert values_of(given)["--dp-size"] == "8"
    assert "--enable-dp-attention" in given
    assert "--attn-dp-size" not in given


def test_words_for_a_manifest_name_what_is_to_be_filled_in() -> None:
    command = Command(("run",), (Option("--model", None, "DECODE_MODEL"), Option("", "x")))
    assert command.words() == ["run", "--model", "FILL-IN-DECODE-MODEL", "x"]


def test_a_fleet_of_many_pools_is_not_one_that_routers_know() -> None:
    from tonnage.sim.domain import BadInputError

    with pytest.raises(BadInputError, match="a fleet is one serve pool, or one prefill"):
        tonnage.export(fleet(pools=(pool("serve"), pool("decode"))), "sglang")
