"""Serving results as runs that can be simulated: what was deployed, and the load it met.

`run_of` gives a row's run, or the reason why it cannot be predicted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tonnage.scenarios.catalogue import load_model
from tonnage.scenarios.load import parse_scenario
from tonnage.scenarios.schema import ENGINE_VERSIONS, Scenario
from tonnage.scenarios.serving_recipes import Recipe, Served, recipes_for
from tonnage.scenarios.serving_rows import ServingRow, StatedPool
from tonnage.scenarios.serving_settings import (
    GPUS,
    Settings,
    model_of,
    settings_of,
    weights_of,
)
from tonnage.scenarios.serving_speculation import published_drafts, speculates_first
from tonnage.sim.domain import BadInputError, MoeMlp, ParallelLayout
from tonnage.sim.serving.policy import KNOWN_POLICIES
from tonnage.sim.traffic.lengths import Constant, LengthDistribution, Uniform
from tonnage.sim.units import version_key

LENGTHS_FROM = 0.8  # of the nominal length: `--random-range-ratio 0.8`
# Of an MTP draft that follows an accepted one: what the time per token of runs that speculate
# comes to (`calibrate/fit_engines.py`); DeepSeek-V3 reports 0.85 to 0.90 for its second token.
ACCEPTED_SHARE = 0.75
_FP8_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a row is not predicted."""

    reason: str


@dataclass(frozen=True, slots=True)
class PoolSetup:
    """One pool as a scenario has it; None is the engine's default."""

    role: str
    instances: int
    layout: ParallelLayout
    kv: str
    chunk_tokens: int | None = None
    max_running_requests: int | None = None
    draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Setup:
    """What a row deployed: equal for rows that differ in load alone.

    `accepted_share`: of an MTP draft that follows an accepted one.
    """

    model: str
    gpu: str
    engine: str
    version: str
    weights: str
    mem_fraction: float | None
    pools: tuple[PoolSetup, ...]
    accepted_share: float = ACCEPTED_SHARE

    @property
    def gpus(self) -> int:
        """GPUs of all pools."""
        return sum(pool.instances * pool.layout.gpus for pool in self.pools)

    def scenario(self) -> Scenario:
        """Return it as a scenario without traffic of its own."""
        engine: dict[str, Any] = {"name": self.engine, "version": self.version}
        if self.mem_fraction is not None:
            engine["mem_fraction"] = self.mem_fraction
        data = {
            "name": "row",
            "model": self.model,
            "gpu": self.gpu,
            "engine": engine,
            "pools": {pool.role: self._section(pool) for pool in self.pools},
        }
        return parse_scenario(data, "row")

    def _section(self, pool: PoolSetup) -> dict[str, Any]:
        layout = pool.layout
        section: dict[str, Any] = {
            "instances": pool.instances,
            "tp": layout.tp,
            "pp": layout.pp,
            "ep": layout.ep,
            "attention_dp": layout.attention_dp,
            "weights": self.weights,
            "kv": pool.kv,
            "chunk_tokens": pool.chunk_tokens,
            "max_running_requests": pool.max_running_requests,
        }
        if pool.draft_tokens and pool.role != "prefill":
            accepted = sum(self.accepted_share**n for n in range(pool.draft_tokens + 1))
            speculation = {"draft_tokens": pool.draft_tokens, "draft": "mtp"}
            section["speculation"] = {**speculation, "accept_length": round(accepted, 6)}
        return section


@dataclass(frozen=True, slots=True)
class Run:
    """A row as a benchmark: users in a closed loop on a deployment.

    `others`: deployments that were published for the same columns, another layout or speculation;
    one of them may be what was measured. `polled_every_steps`: decode steps after which the server
    looks at new requests.
    """

    setup: Setup
    concurrency: int
    input_tokens: LengthDistribution
    output_tokens: LengthDistribution
    assumptions: tuple[str, ...] = ()
    others: tuple[Setup, ...] = ()
    polled_every_steps: int = 1


def run_of(row: ServingRow) -> Run | Refusal:
    """Return a row as a run, or why it cannot be."""
    model, gpu = model_of(row.model), GPUS.get(row.system)
    if model is None:
        return Refusal(f"model {row.model} is not described")
    if gpu is None:
        return Refusal(f"GPU {row.system} is not described")
    if row.engine not in KNOWN_POLICIES:
        return Refusal(f"engine {row.engine} is not described")
    formats = (row.precision, row.gemm_format, row.moe_format)
    native = load_model(model).native_weight_format
    weights = weights_of(row.model, model, native, formats)
    base = Setup(model, gpu, row.engine, _version(row), weights, None, ())
    try:
        return _served(row, base) if row.serve else _handed_over(row, base)
    except BadInputError as error:
        return Refusal(f"layout: {error}")


def lengths(tokens: int, *, varied: bool) -> LengthDistribution:
    """Return the lengths of a run: uniform from 80 % of the nominal one, or all alike."""
    return Uniform(max(1, int(LENGTHS_FROM * tokens)), tokens) if varied else Constant(tokens)


def _served(row: ServingRow, base: Setup) -> Run | Refusal:
    stated = row.serve
    assert stated is not None
    layout, instances = stated.layout.layout(), 1
    concurrency = row.concurrency or stated.batch_size
    if concurrency is None:
        return Refusal("neither concurrency nor batch_size is stated")
    assumptions = []
    if _is_per_rank(row, stated, layout):
        # Files without an attention-DP column: the batch of one rank is a share of the users.
        assert row.concurrency is not None
        assert stated.batch_size is not None
        copies = row.concurrency // stated.batch_size
        if copies == layout.tp and layout.ep == layout.tp:
            layout = replace(layout, attention_dp=layout.tp)
            assumptions.append("batch_size is a rank's: attention-DP")
        else:
            instances = copies
            assumptions.append(f"batch_size is an instance's: {copies} instances")
    if _cuts_blocks(base, layout):
        layout = replace(layout, ep=layout.tp)
        assumptions.append("experts spread whole: tp alone would cut their FP8 blocks")
    settings = settings_of(base.model, base.engine, base.gpu, base.weights)
    settings = _fitting(settings, base, layout)
    options = published_drafts(row, base.model, base.gpu, layout)
    if options[0]:
        which = "some" if len(options) > 1 else "all"
        assumptions.append(f"{options[0]} MTP drafts, as {which} public runs of {row.version}")
    chunk = settings.chunk(row.input_tokens, concurrency)
    plain = PoolSetup("serve", instances, layout, settings.kv, chunk, settings.max_running_requests)
    setups = [
        replace(
            base,
            mem_fraction=settings.mem_fraction,
            pools=(replace(plain, draft_tokens=drafts),),
        )
        for drafts in options
    ]
    return _run(row, setups, concurrency, assumptions)


def _handed_over(row: ServingRow, base: Setup) -> Run | Refusal:
    if row.concurrency is None:
        return Refusal("concurrency is not stated")
    assert row.prefill is not None
    assert row.decode is not None
    workers = row.prefill.workers, row.decode.workers
    recipes = _candidates(row, base)
    if workers[0] is None or workers[1] is None:
        if not recipes:
            return Refusal("the numbers of workers are not stated, and no published recipe fits")
        how = ["workers and layouts of the published recipe"]
    else:
        stated = (row.prefill.layout.layout(), row.decode.layout.layout())
        chosen = Recipe(workers[0], stated[0], workers[1], stated[1])
        recipes = tuple(one for one in recipes if replace(one, draft_tokens=0) == chosen) or (
            chosen,
        )
        how = ["speculation of the published recipe"] if recipes[0].draft_tokens else []
    setups = [_apart(row, base, recipe) for recipe in recipes]
    return _run(row, setups, row.concurrency, how)


def _apart(row: ServingRow, base: Setup, recipe: Recipe) -> Setup:
    settings = settings_of(base.model, base.engine, base.gpu, base.weights)
    chunk = settings.chunk(row.input_tokens, row.concurrency or 0)
    prefill = PoolSetup(
        "prefill",
        recipe.prefill_workers,
        recipe.prefill,
        settings.kv,
        chunk,
        settings.max_running_requests,
    )
    decode = PoolSetup(
        "decode",
        recipe.decode_workers,
        recipe.decode,
        settings.kv,
        chunk,
        draft_tokens=recipe.draft_tokens,
    )
    return replace(base, mem_fraction=settings.mem_fraction, pools=(prefill, decode))


def _candidates(row: ServingRow, base: Setup) -> tuple[Recipe, ...]:
    """Return the published recipes that agree with what a row says, the likeliest first."""
    assert row.concurrency is not None
    assert row.prefill is not None
    assert row.decode is not None
    weights = base.weights
    if weights == "native" and row.precision == "fp8":
        weights = "fp8"
    model = "deepseek-r1" if base.model.startswith("deepseek") else base.model
    lengths_of = row.input_tokens, row.output_tokens
    served = Served(model, base.gpu, base.engine, weights, *lengths_of, row.concurrency)
    tps = row.prefill.layout.tp, row.decode.layout.tp
    fitting = []
    for recipe in recipes_for(served):
        gpus = recipe.prefill.gpus, recipe.decode.gpus
        # Some files give the GPUs of the whole deployment in both columns.
        if row.prefill.workers is not None or gpus == tps or tps == (recipe.gpus, recipe.gpus):
            fitting.append(recipe)
    speculates = speculates_first(row, base.gpu)
    return tuple(sorted(fitting, key=lambda one: (one.draft_tokens > 0) != speculates))


def _fitting(settings: Settings, base: Setup, layout: ParallelLayout) -> Settings:
    """Return the settings of a layout that leaves little room: SGLang's script for four B200."""
    is_tight = base.model.startswith("deepseek") and base.weights == "native"
    if base.engine == "sglang" and is_tight and layout.gpus == 4:
        return replace(settings, mem_fraction=0.95, chunk_tokens=8192, max_running_requests=32)
    return settings


def _cuts_blocks(base: Setup, layout: ParallelLayout) -> bool:
    """Tell whether ranks would cut the 128 x 128 blocks of the experts' FP8 weights.

    vLLM refuses that; its MiniMax-M2 recipes pass `--enable-expert-parallel` with tp 8.
    """
    if base.weights not in ("native", "fp8_block"):
        return False
    model = load_model(base.model)
    if model.native_weight_format != "fp8_block" and base.weights == "native":
        return False
    widths = {
        layer.mlp.intermediate_size for layer in model.layers if isinstance(layer.mlp, MoeMlp)
    }
    ways = layout.tp // layout.ep
    return any(width % (ways * _FP8_BLOCK) for width in widths)


def _is_per_rank(row: ServingRow, stated: StatedPool, layout: ParallelLayout) -> bool:
    if stated.layout.attention_dp not in (None, 1) or layout.attention_dp > 1:
        return False
    if row.concurrency is None or stated.batch_size is None:
        return False
    return row.concurrency > stated.batch_size and row.concurrency % stated.batch_size == 0


def _run(
    row: ServingRow, setups: Sequence[Setup], concurrency: int, assumptions: Sequence[str]
) -> Run:
    kv = setups[0].pools[-1].kv
    varied = _lengths_vary(row)
    spread = "lengths from 80 % to 100 %" if varied else "all lengths alike"
    told = (*assumptions, f"KV {kv}: not stated", f"{spread}, 10 requests a user, all at once")
    input_tokens = lengths(row.input_tokens, varied=varied)
    output_tokens = lengths(row.output_tokens, varied=varied)
    others = tuple(setups[1:])
    polled = _polled_every_steps(setups[0], concurrency)
    return Run(setups[0], concurrency, input_tokens, output_tokens, told, others, polled)


def _polled_every_steps(setup: Setup, concurrency: int) -> int:
    if setup.pools[0].role != "serve":
        return 1
    settings = settings_of(setup.model, setup.engine, setup.gpu, setup.weights)
    return settings.polled_every_steps(concurrency)


def _lengths_vary(row: ServingRow) -> bool:
    """Tell whether requests differ in length.

    InferenceX's do (`--random-range-ratio 0.8`), and so does what was measured at 1000, 2000 ...
    tokens. Files without an attention-DP column that ask for powers of two move in step: their
    first tokens take as long as all prompts together, in each wave anew.
    """
    is_together = row.serve is not None and row.serve.layout.attention_dp is None
    powers = all(tokens & (tokens - 1) == 0 for tokens in (row.input_tokens, row.output_tokens))
    return not (is_together and powers)


def _version(row: ServingRow) -> str:
    """Return the engine's version; for Dynamo's, or none, that of the engine in March 2026."""
    assumed = {"sglang": "0.5.9", "vllm": "0.18.0", "trtllm": "1.2.0"}
    if row.version is None:
        return assumed.get(row.engine, ENGINE_VERSIONS[row.engine])
    try:
        number = version_key(row.version)
    except BadInputError:
        return assumed[row.engine]
    return assumed[row.engine] if row.engine == "trtllm" and number[0] == 0 else row.version
