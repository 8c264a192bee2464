"""`tonnage validate run`: a logged run of vLLM, replayed on predicted step times.

The real arrivals and lengths go into the engine's scheduler with the settings that the log states;
every request's TTFT, TPOT and end-to-end time are compared with what the log says. The log holds no
token ids, so nothing is shared between prompts even where the prefix cache was on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tonnage.pools import built_pools, deployment_of, times_of
from tonnage.scenarios.capacity_names import kv_format_of, model_of
from tonnage.scenarios.catalogue import gpu_names
from tonnage.scenarios.load import parse_scenario
from tonnage.scenarios.profiles import profile_paths
from tonnage.scenarios.schema import Scenario
from tonnage.sim.cost.operator_times import interval_factors
from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.domain import BadInputError, FloatArray, Request, Step
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.engine.simulate import simulate
from tonnage.sim.results.other_tools.vllm_log import LoggedRequest, VllmLog, VllmSettings
from tonnage.sim.results.records import Records
from tonnage.sim.serving.build import SchedulerSpec
from tonnage.sim.traffic.loads import OpenLoad
from tonnage.validation_summary import Figure, ValidatedRow, by_group, summary

FIGURES = ("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class RunValidation:
    """The requests of logged runs, each with its figures in seconds, and what was assumed."""

    rows: tuple[ValidatedRow, ...]
    assumptions: dict[str, list[str]]  # by run

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of `validate run` on logged runs."""
        runs = sorted(self.assumptions)
        told = run_summary(self.rows) | {
            "by_run": {
                name: run_summary([row for row in self.rows if row.groups["run"] == name])
                for name in runs
            },
            **{f"by_{key}": by_group(self.rows, FIGURES, key) for key in ("model", "gpu")},
        }
        return {
            "rows": [row.to_dict() for row in self.rows],
            "summary": told,
            "assumptions": self.assumptions,
        }


def run_summary(rows: Sequence[ValidatedRow]) -> dict[str, Any]:
    """Return the errors of single requests, and of the mean of each figure over all of them."""
    told = summary(rows, FIGURES)
    for name in FIGURES:
        found = [row.figures[name] for row in rows if name in row.figures]
        if found:
            measured = float(np.mean([one.measured for one in found]))
            mean = Figure(measured, float(np.mean([one.predicted for one in found])))
            told[f"mean_{name}"] = mean.to_dict()
    return told


@dataclass(frozen=True, slots=True)
class ReplayChoice:
    """What a user says of a run that its log does not, or says otherwise; None is the log's."""

    gpu: str | None = None
    profile: str | None = None
    overrides: tuple[str, ...] = ()


def validate_vllm_logs(logs: Sequence[VllmLog], choice: ReplayChoice) -> RunValidation:
    """Replay every run and compare its requests."""
    rows: list[ValidatedRow] = []
    assumptions = {}
    for log in logs:
        scenario = scenario_of(log, choice)
        found, lines = _replayed(log, scenario)
        rows += found
        assumptions[log.name] = lines
    return RunValidation(tuple(rows), assumptions)


def scenario_of(log: VllmLog, choice: ReplayChoice) -> Scenario:
    """Return the deployment that a log describes; BadInputError where it says too little."""
    stated = log.settings
    model = model_of(stated.model, "")
    if model is None:
        raise BadInputError(f"{log.name}: model: {stated.model!r} is not in the catalogue")
    if stated.quantization is not None:
        asked = any(text.startswith("pools.serve.weights=") for text in choice.overrides)
        if not asked:
            problem = f"{stated.quantization!r} is not known; say --set pools.serve.weights=..."
            raise BadInputError(f"{log.name}: quantization: {problem}")
    gpu = choice.gpu or gpu_of_log(log)
    engine: dict[str, Any] = {"name": "vllm", "version": stated.version}
    if stated.mem_fraction is not None:
        engine["mem_fraction"] = stated.mem_fraction
    data = {
        "name": log.name,
        "model": model,
        "gpu": gpu,
        "engine": engine,
        "pools": {"serve": _pool(stated)},
        "profile": choice.profile or profile_of_version(gpu, stated.version),
    }
    return parse_scenario(data, log.name, None, list(choice.overrides))


def gpu_of_log(log: VllmLog) -> str:
    """Return the GPU that a log names, or that its folder's name begins with."""
    text = re.sub(r"[^a-z0-9]", "", (log.settings.gpu or log.name).lower())
    for name in sorted(gpu_names(), key=len, reverse=True):
        short = name.removesuffix("-sxm").replace("-", "")
        is_other_board = short != name.replace("-", "") and re.search("pcie|nvl", text)
        if short in text and not is_other_board:
            return name
    where = "neither meta.json nor the folder's name says a GPU of the catalogue"
    raise BadInputError(f"{log.name}: {where}; say which with --gpu")


def profile_of_version(gpu: str, version: str) -> str:
    """Return the profile that was timed with this very version, where there is one; else auto.

    Collections of a GPU under two versions were made on two machines, and differ where machines
    do: in how its GPUs reach each other.
    """
    name = f"{gpu}-vllm-{'.'.join(version.split('.')[:2])}"
    return name if name in profile_paths() else "auto"


def _pool(stated: VllmSettings) -> dict[str, Any]:
    tp = stated.tp * stated.dp  # SGLang's convention: tp counts the attention-DP ranks too
    pool: dict[str, Any] = {
        "tp": tp,
        "pp": stated.pp,
        "ep": tp if stated.expert_parallel else 1,
        "attention_dp": stated.dp,
        "kv": kv_format_of(stated.kv_dtype),
    }
    if stated.chunk_tokens is not None:
        pool["chunk_tokens"] = stated.chunk_tokens
    if stated.running_requests is not None:
        pool["max_running_requests"] = stated.running_requests * stated.dp
    if stated.block_tokens is not None:
        pool["page_tokens"] = stated.block_tokens
    return pool


def _replayed(log: VllmLog, scenario: Scenario) -> tuple[list[ValidatedRow], list[str]]:
    pools = built_pools(scenario)
    times = times_of(scenario, pools)
    deployment = deployment_of(scenario, pools, times)
    lines = list(times["serve"].assumptions)
    stated = log.settings
    if stated.kv_blocks is not None and stated.block_tokens is not None:
        kv_tokens = stated.kv_blocks * stated.block_tokens * stated.dp
        deployment = _with_kv_tokens(deployment, kv_tokens)
        lines.append(f"KV: {kv_tokens:,} tokens, as the engine logged")
    else:
        lines.append(f"KV: {pools['serve'].memory.kv_tokens:,} tokens, predicted")
    if stated.prefix_caching is not False:
        lines.append("prompts share nothing: the log holds no token ids")
    groups = {
        "run": log.name,
        "model": scenario.model,
        "gpu": scenario.gpu,
        "engine": f"vllm {stated.version}",
    }
    load = OpenLoad(
        [
            Request(number, one.arrival_s, one.input_tokens, one.output_tokens)
            for number, one in enumerate(log.requests)
        ]
    )
    predicted = _by_request(simulate(deployment, load, seed=scenario.seed).records)
    factors = _interval_factors(log, deployment.pools["serve"].scheduling, times["serve"].executor)
    rows = [
        _row(f"{log.name}/{one.id}", groups, one, predicted[number], factors)
        for number, one in enumerate(log.requests)
    ]
    return rows, lines


def _interval_factors(
    log: VllmLog, scheduling: SchedulerSpec, executor: StepPredictor
) -> tuple[float, float]:
    """Return the factors on a full batch's step if all operators are off the same way.

    They are carried over to every time: with a queue, all of them go with the steps.
    """
    inputs, outputs = (
        float(np.mean([getattr(one, name) for one in log.requests]))
        for name in ("input_tokens", "output_tokens")
    )
    context = max(1, round(inputs + outputs / 2))
    requests = min(scheduling.limits.max_running_requests, scheduling.kv_tokens // context)
    requests = max(1, min(requests, len(log.requests)))
    contexts = np.full(requests, context, dtype=np.int64)
    return interval_factors(executor.times(Step(contexts, float(requests * context), ())))


def _with_kv_tokens(deployment: Deployment, kv_tokens: int) -> Deployment:
    plan = deployment.pools["serve"]
    plan = replace(plan, scheduling=replace(plan.scheduling, kv_tokens=kv_tokens))
    return replace(deployment, pools={"serve": plan})


def _by_request(records: Records) -> FloatArray:
    """Return TTFT, TPOT and end-to-end time `[requests, 3]`, in order of arrival."""
    columns = np.column_stack([records.ttft_s(), records.tpot_s(), records.e2e_s()])
    ordered: FloatArray = columns[np.argsort(records.integers("id"))]
    return ordered


def _row(
    name: str,
    groups: dict[str, str],
    logged: LoggedRequest,
    predicted: FloatArray,
    factors: tuple[float, float],
) -> ValidatedRow:
    if not np.isfinite(predicted[[0, 2]]).all():
        return ValidatedRow(name, groups, refused="it does not fit the predicted pool")

    def figure(measured: float, value: float) -> Figure:
        return Figure(measured, value, value * factors[0], value * factors[1])

    figures = {
        "ttft": figure(logged.ttft_s, float(predicted[0])),
        "e2e": figure(logged.e2e_s, float(predicted[2])),
    }
    if logged.tpot_s:
        figures["tpot"] = figure(logged.tpot_s, float(predicted[1]))
    return ValidatedRow(name, groups, figures)
