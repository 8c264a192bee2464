"""`tonnage memory --fit`: against `tonnage memory` layout by layout, and as a command."""

from __future__ import annotations

import json
import random
import re
import time
from typing import Any

import pytest

from tests.test_cli import tonnage as tonnage
from tonnage import api
from tonnage.memory_fit import FitQuestion, FitReport, fit_memory, layout_text
from tonnage.scenarios.catalogue import gpu_names
from tonnage.scenarios.load import parse_scenario
from tonnage.sim.domain import BadInputError, EngineSpec, InfeasibleError, ParallelLayout
from tonnage.sim.model import hosting
from tonnage.sim.model.hosting import GPU_COUNTS, Fit, best


def by_memory(row: Fit, report: FitReport) -> Fit | None:
    """Ask the `memory` verb for the same layout; None where it says that nothing fits."""
    guest, layout = report.guest, row.layout
    pool = {
        "tp": layout.tp,
        "pp": layout.pp,
        "ep": layout.ep,
        "attention_dp": layout.attention_dp,
        "dcp": layout.dcp,
        "weights": guest.weights,
        "kv": guest.kv_format,
    }
    data = {
        "model": guest.model.name,
        "gpu": row.gpu,
        "engine": {"name": guest.engine.name, "version": guest.engine.version},
        "traffic": {"input_tokens": guest.context_tokens, "output_tokens": 1},
        "pools": {"serve": pool},
    }
    try:
        found = api.memory(parse_scenario(data)).to_dict()["memory"]["serve"]
    except InfeasibleError:
        return None
    return Fit(
        gpu=found["gpu"],
        gpus=found["gpus"],
        layout=layout,
        hosts=found["max_concurrency"] > 0,
        weights_bytes_per_gpu=found["weights_bytes_per_gpu"],
        kv_bytes_per_gpu=found["kv_bytes_per_gpu"],
        kv_tokens=found["kv_tokens"],
        longest_request_tokens=found["longest_request_tokens"],
        max_concurrency=found["max_concurrency"],
        mem_fraction=found["mem_fraction"],
        deficit_bytes_per_gpu=0.0,
    )


@pytest.mark.parametrize(
    "question",
    [
        FitQuestion("kimi-k2.6", 65_536, kv="fp8_e4m3"),
        FitQuestion("glm-5.2", 131_072, weights="int4_g32", kv="fp8_e4m3"),
        FitQuestion("gpt-oss-120b", 100_000, engine=EngineSpec("vllm", "0.33")),
    ],
    ids=lambda question: question.model,
)
def test_every_row_is_what_memory_says_of_that_layout(question: FitQuestion) -> None:
    report = fit_memory(question)
    sample = random.Random(0).sample(report.rows, 8)
    assert any(row.hosts for row in sample)
    for row in sample:
        alone = by_memory(row, report)
        assert alone == row if row.loads else alone is None


def test_the_smallest_is_the_smallest_by_brute_force() -> None:
    report = fit_memory(FitQuestion("minimax-m2.5", 100_000))
    memory = {gpu.name: gpu.memory_bytes for gpu in report.gpus}
    hosting = [row for row in report.rows if row.hosts]
    least = min(row.gpus * memory[row.gpu] for row in hosting)
    smallest = report.smallest()
    assert smallest is not None
    assert smallest.gpus * memory[smallest.gpu] == least
    for gpu in report.gpus:
        first = best(report.of(gpu.name))
        counts = [row.gpus for row in hosting if row.gpu == gpu.name]
        assert (first.gpus if first else None) == min(counts, default=None)


def test_all_gpus_of_the_catalogue_but_the_laptop_are_tried() -> None:
    report = fit_memory(FitQuestion("gpt-oss-20b"))
    assert {gpu.name for gpu in report.gpus} == set(gpu_names()) - {"cpu"}
    assert {row.gpus for row in report.rows} == set(GPU_COUNTS)


def test_the_whole_catalogue_takes_less_than_two_seconds() -> None:
    fit_memory(FitQuestion("gpt-oss-20b", gpu="h200-sxm"))  # reads what is cached
    began_s = time.process_time()
    fit_memory(FitQuestion("kimi-k2.6"))
    assert time.process_time() - began_s < 2.0


def test_what_nothing_holds_says_what_comes_nearest_and_what_would() -> None:
    with pytest.raises(InfeasibleError) as error:
        fit_memory(FitQuestion("glm-5.2", 1_000_000, gpu="l40s"))
    text = str(error.value)
    assert "does not hold a request of 1,000,000 tokens on 1 to 16 of l40s" in text
    assert re.search(r"nearest: 16 x l40s \(tp 8, pp 2\) is short of [0-9.]+ GiB per GPU", text)
    assert text.endswith("Use --weights int4_g128")
    assert fit_memory(FitQuestion("glm-5.2", 1_000_000, "int4_g128", gpu="l40s")).smallest()


def test_a_model_that_loads_but_holds_too_little_says_how_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hosting, "GPU_COUNTS", (1,))
    with pytest.raises(InfeasibleError) as error:
        fit_memory(FitQuestion("llama-3.1-8b", 16_000, gpu="rtx-4090"))
    found = re.search(r"nearest: 1 x rtx-4090 \(tp 1\) holds ([0-9,]+) tokens", str(error.value))
    assert found
    held = int(found[1].replace(",", ""))
    assert 8192 < held < 16_000
    assert fit_memory(FitQuestion("llama-3.1-8b", held, gpu="rtx-4090")).smallest()
    assert "Use --kv fp8_e4m3 or --weights fp8_block" in str(error.value)


def test_a_context_without_positions_is_bad_input() -> None:
    with pytest.raises(BadInputError, match="glm-5 has positions for 202,752 tokens"):
        fit_memory(FitQuestion("glm-5", 300_000))


def test_layouts_are_spelled_without_what_is_one() -> None:
    assert layout_text(ParallelLayout(8, 1, 1, 8)) == "tp 8, attention_dp 8"
    assert layout_text(ParallelLayout()) == "tp 1"


# --- the command ----------------------------------------------------------------------------------


def test_the_command_prints_a_row_per_gpu(tonnage: Any) -> None:
    done = tonnage(
        "memory", "--fit", "--model", "glm-5.2", "--kv", "fp8_e4m3", "--context", "65536"
    )
    assert done.code == 0
    assert "glm-5.2, weights native, KV fp8_e4m3" in done.output
    assert "Least GPU memory in all: " in done.output
    for gpu in set(gpu_names()) - {"cpu"}:
        assert f"\n{gpu} " in done.output
    assert "l40s          none; 16 (tp 8, pp 2) is short of" in done.output


def test_json_has_every_layout(tonnage: Any) -> None:
    found = json.loads(
        tonnage(
            "memory", "--fit", "--model", "gpt-oss-120b", "--tokens", "4096", "--json", "-"
        ).output
    )
    assert found["context_tokens"] == 4096
    assert found["smallest"]["gpus"] == 1
    assert set(found["by_gpu"]) == set(gpu_names()) - {"cpu"}
    assert len(found["rows"]) > 300
    assert found["rows"][0]["layout"] == {"tp": 1, "pp": 1, "ep": 1, "attention_dp": 1, "dcp": 1}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["--model", "kimi-k2.6", "--weights", "bf16", "--gpu", "rtx-4090"],
            3,
            "No smaller format",
        ),
        ([], 2, "say which model with --model"),
        (["kimi-k2.6-h200"], 2, "takes --model, not a scenario"),
        (["--model", "kimi-k2.6", "--tp", "8"], 2, "tries layouts itself; remove --tp"),
        (["--model", "kimi-k2.6", "--attention-dp", "1"], 2, "remove --attention-dp"),
        (["--model", "kimi-k2.6", "--set", "engine.name=vllm"], 2, "takes no --set"),
        (["--model", "kimi", "--gpu", "h200-sxm"], 2, "there is no model named 'kimi'"),
        (["--model", "kimi-k2.6", "--gpu", "h200"], 2, "did you mean 'h200-sxm'?"),
        (["--model", "kimi-k2.6", "--weights", "int4"], 2, "pools.serve.weights: 'int4'"),
        (["--model", "kimi-k2.6", "--kv", "int4"], 2, "pools.serve.kv: 'int4'"),
        (["--model", "kimi-k2.6", "--engine", "x"], 2, "engine.name: 'x'"),
        (
            ["--model", "kimi-k2.6", "--tokens", "9", "--context", "9"],
            2,
            "say the same; remove one",
        ),
        (["--model", "kimi-k2.6", "--context", "300000"], 2, "positions for 262,144 tokens"),
    ],
)
def test_what_cannot_be_answered_is_one_line(
    tonnage: Any, arguments: list[str], code: int, message: str
) -> None:
    done = tonnage("memory", "--fit", *arguments)
    assert done.code == code
    assert message in done.error
    assert done.error.count("\n") == 1
    assert not done.output


def test_a_context_goes_with_fit(tonnage: Any) -> None:
    done = tonnage("memory", "--model", "kimi-k2.6", "--tp", "8", "--context", "9")
    assert done.code == 2
    assert "--context goes with --fit" in done.error
