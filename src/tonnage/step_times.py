"""Which step times a pool is predicted with: a profile's operators, scaled ones, the datasheet."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import cast

from tonnage.scenarios.catalogue import load_gpu
from tonnage.scenarios.engine_terms import FittedTerms, generation_of, terms_for
from tonnage.scenarios.profiles import ProfileChoice, choose_profile
from tonnage.scenarios.schema import Scenario
from tonnage.sim.cost.check_prices import check_prices
from tonnage.sim.cost.draft import step_executor
from tonnage.sim.cost.engine_terms import KERNELS_ALONE
from tonnage.sim.cost.estimate import Source
from tonnage.sim.cost.integrity import StepCheck, step_check
from tonnage.sim.cost.measured import MeasuredExecutor, StepAssumptions
from tonnage.sim.cost.operator_models import OperatorModels, operator_models
from tonnage.sim.cost.profile import Profile, load_profile
from tonnage.sim.cost.roofline import RooflineExecutor
from tonnage.sim.cost.scaled import ScaledExecutor
from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.cost.watched import WatchedExecutor
from tonnage.sim.domain import EngineSpec, GpuSpec, ModelSpec, ParallelLayout, PoolSpec
from tonnage.sim.model.draft import draft_of
from tonnage.sim.model.engine_rules import captured_batch_sizes


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What predicts the steps of one pool, and where its times come from.

    `profile`: the name of the profile; `source`: measured, imported, scaled or datasheet.
    """

    executor: StepPredictor
    profile: str
    source: Source
    assumptions: tuple[str, ...]


def step_times(scenario: Scenario, pool: PoolSpec, model: ModelSpec, gpu: GpuSpec) -> StepTimes:
    """Choose the profile of a pool and build what predicts its steps."""
    engine = scenario.engine_spec()
    choice = choose_profile(scenario.profile, gpu, engine.name, scenario.origin()[1])
    maker = _Maker(scenario, pool, engine, gpu, choice, model)
    executor = step_executor(maker.make, model, pool.layout, draft_of(model, pool.speculation))
    executor = maker.watched(executor, model)
    profile = choice.load()
    name = "datasheet" if profile is None else profile.header.name
    source = cast(Source, choice.source)
    return StepTimes(executor, name, source, tuple(maker.assumptions(profile)))


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes executors of one pool's GPU, engine and formats for a model and a layout."""

    scenario: Scenario
    pool: PoolSpec
    engine: EngineSpec
    gpu: GpuSpec
    choice: ProfileChoice
    target: ModelSpec

    def make(self, model: ModelSpec, layout: ParallelLayout) -> StepPredictor:
        if self.choice.path is None:
            return self._roofline(model, layout, self.gpu)
        if self.choice.scaled_from is None:
            return self._measured(model, layout, self.gpu)
        timed = load_gpu(self.choice.scaled_from)
        return ScaledExecutor(
            self._measured(model, layout, timed),
            self._roofline(model, layout, timed),
            self._roofline(model, layout, self.gpu),
            timed.memory_bandwidth_bytes_per_s / self.gpu.memory_bandwidth_bytes_per_s,
        )

    def watched(self, executor: StepPredictor, model: ModelSpec) -> StepPredictor:
        """Return what predicts the steps with the check of the KV; the same where there is none."""
        check = self._check(model)
        if check is None:
            return executor
        layout = self.pool.layout
        captured = self._captured(layout)
        return WatchedExecutor(executor, check, layout, captured[-1] if captured else 0)

    def _check(self, model: ModelSpec) -> StepCheck | None:
        spec, layout, path = self.pool.integrity, self.pool.layout, self.choice.path
        if spec.tracker == "none":
            return None
        if _is_cpu(self.gpu):  # nothing runs beside a step
            spec = replace(spec, overlapped=False)
        if path is None or self.choice.scaled_from is not None:
            prices = check_prices(self.gpu, ways=layout.attention_tp)
        else:
            models = _models(path, self.choice.back_fill, self.gpu.name)
            prices = check_prices(self.gpu, models.checks, models.comm, layout.attention_tp)
        return step_check(spec, model, layout, self.pool.page_tokens, prices)

    def _roofline(self, model: ModelSpec, layout: ParallelLayout, gpu: GpuSpec) -> RooflineExecutor:
        return RooflineExecutor(
            model, layout, gpu, self.pool.kv_format, self.engine.name, self._captured(layout)
        )

    def _measured(self, model: ModelSpec, layout: ParallelLayout, gpu: GpuSpec) -> MeasuredExecutor:
        assert self.choice.path is not None
        return MeasuredExecutor(
            model,
            layout,
            gpu,
            self.pool.kv_format,
            self.engine.name,
            _models(self.choice.path, self.choice.back_fill, gpu.name),
            self._captured(layout),
            self._step_assumptions(),
        )

    def _step_assumptions(self) -> StepAssumptions:
        asked = self.scenario.engine
        return StepAssumptions(
            routing=asked.routing,
            shared_expert_beside=not _is_cpu(self.gpu),  # there is no second stream
            step_overhead_s=asked.step_overhead,
            terms=KERNELS_ALONE if self.fitted is None else self.fitted.terms,
        )

    @property
    def fitted(self) -> FittedTerms | None:
        """What was fitted for the engine on such GPUs, where the scenario asks for it."""
        if self.scenario.engine.terms == "none":
            return None
        return terms_for(self.engine.name, self.gpu, self.target)

    def _captured(self, layout: ParallelLayout) -> tuple[int, ...]:
        if self.pool.role == "prefill":
            return ()
        speculation = self.pool.speculation
        query_tokens = 1 if speculation is None else speculation.query_tokens
        per_rank = max(1, self.pool.max_running_requests // self.pool.layout.attention_dp)
        if _is_cpu(self.gpu):  # no graphs: nothing is padded
            return tuple(range(1, per_rank + 1))
        return captured_batch_sizes(self.engine, self.gpu, layout.tp, per_rank, query_tokens)

    def assumptions(self, profile: Profile | None) -> list[str]:
        return [*self._assumptions_of_steps(profile), *self._check_assumptions()]

    def _terms_assumptions(self) -> list[str]:
        if self.scenario.engine.terms == "none":
            return []
        generation = generation_of(self.gpu)
        if self.fitted is None:
            return [
                f"{self.pool.role}: no engine terms for {self.engine.name} on {generation} GPUs"
            ]
        return [
            f"{self.pool.role}: engine terms of {self.engine.name} on {generation} GPUs, fitted on "
            f"{self.fitted.rows} measured runs"
        ]

    def _check_assumptions(self) -> list[str]:
        role, spec = self.pool.role, self.pool.integrity
        if spec.tracker == "none":
            return []
        if spec.tracker == "canary":
            return [f"{role}: canary: every record that a pass reads is verified, before and after"]
        how = "before the step, which waits for it"
        if spec.overlapped:
            how = "beside the step, so that a bad step runs once before the abort"
        where = "in its graph" if spec.in_graph else "launched by the host"
        return [
            f"{role}: page tags: one check per rank {how}, {where}; each rank checks its own copy "
            "of the page table, and the ranks agree on the verdict",
            *(
                [f"{role}: page tags: the mean of {spec.every_steps} steps is charged to each"]
                if spec.every_steps > 1
                else []
            ),
        ]

    def _assumptions_of_steps(self, profile: Profile | None) -> list[str]:
        role = self.pool.role
        if profile is None:
            return [
                f"{role}: step times: {self.choice.why}; a roofline without launch, latency or "
                "engine overheads (a lower bound)"
            ]
        facts = self._step_assumptions()
        small = (
            "small operators: measured"
            if "small_ops" in profile.tables
            else "small kernels 2.5 us each, sampling 65 us and 0.9 us per row: estimates of a "
            "trace study"
        )
        return [
            f"{role}: step times: {self.choice.why}",
            f"routing of tokens to experts: {facts.routing}",
            *self._terms_assumptions(),
            f"{small}; engine overhead {facts.step_overhead_s * 1e3:g} ms per step",
        ]


def _is_cpu(gpu: GpuSpec) -> bool:
    return gpu.compute_capability == "0.0"


@lru_cache(maxsize=32)  # a table of serving results names this many profiles
def _models(path: Path, back_fill: tuple[Path, ...], gpu: str) -> OperatorModels:
    """Return the operator models of a profile, tables that it lacks taken from others."""
    profile = load_profile(path)
    for other in back_fill:
        stand_in = load_profile(other)
        lacking = [name for name in stand_in.tables if name not in profile.tables]
        if lacking:
            tables = {name: stand_in.tables[name] for name in lacking}
            fitted = {**stand_in.header.fitted, **profile.header.fitted}
            header = profile.header.model_copy(update={"fitted": fitted})
            profile = replace(profile, header=header, tables={**profile.tables, **tables})
    return operator_models(profile, load_gpu(gpu))
