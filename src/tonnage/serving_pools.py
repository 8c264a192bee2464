"""The pools of serving runs, built once for all rows that share them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from tonnage.pools import BuiltPool, built_pools, deployment_of
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.scenarios.serving_runs import Setup
from tonnage.sim.domain import BadInputError, InfeasibleError, ModelSpec, PoolSpec
from tonnage.sim.engine.fleet import Deployment
from tonnage.step_times import StepTimes, step_times

# What ran has fitted: the largest fraction that scripts set (SGLang on four B200, MiniMax in vLLM).
_FRACTION_MOST = 0.97
_StepKey = tuple[str, str, str, ModelSpec, PoolSpec]
Terms = Literal["none", "fitted"]


@dataclass(frozen=True, slots=True)
class BuiltSetup:
    """A deployment that is ready to be simulated; `assumptions` beside those of the row."""

    scenario: Scenario
    pools: dict[Role, BuiltPool]
    times: dict[Role, StepTimes]
    deployment: Deployment
    assumptions: tuple[str, ...] = ()


@dataclass
class SetupBuilder:
    """Builds what rows deployed; equal setups, and equal step times in different ones, once.

    `terms`: with fitted engine terms, or with kernels alone.
    """

    terms: Terms = "fitted"
    _built: dict[Setup, BuiltSetup | str] = field(default_factory=dict)
    _times: dict[_StepKey, StepTimes] = field(default_factory=dict)

    def build(self, setup: Setup) -> BuiltSetup | str:
        """Return the deployment, or in a sentence why there is none."""
        if setup not in self._built:
            try:
                self._built[setup] = self._made(setup)
            except (BadInputError, InfeasibleError) as error:
                self._built[setup] = str(error)
        return self._built[setup]

    def _made(self, setup: Setup) -> BuiltSetup:
        scenario = with_terms(setup.scenario(), self.terms)
        try:
            pools = built_pools(scenario)
        except InfeasibleError:
            if setup.mem_fraction == _FRACTION_MOST:
                raise
            wider = self._made(replace(setup, mem_fraction=_FRACTION_MOST))
            told = f"memory fraction {_FRACTION_MOST:g}: it ran, and the default leaves no KV"
            return replace(wider, assumptions=(told,))
        times = {role: self._step_times(scenario, pool) for role, pool in pools.items()}
        return BuiltSetup(scenario, pools, times, deployment_of(scenario, pools, times))

    def _step_times(self, scenario: Scenario, pool: BuiltPool) -> StepTimes:
        """Return the step times, which neither the chunk nor the number of instances changes."""
        spec = replace(pool.spec, chunk_tokens=1, instances=1)
        engine = scenario.engine_spec()
        key = (engine.name, engine.version, pool.gpu.name, pool.model, spec)
        if key not in self._times:
            self._times[key] = step_times(scenario, pool.spec, pool.model, pool.gpu)
        return self._times[key]


def with_terms(scenario: Scenario, terms: Terms) -> Scenario:
    """Return a scenario that asks for fitted engine terms, or for kernels alone."""
    engine = scenario.engine.model_copy(update={"terms": terms})
    return scenario.model_copy(update={"engine": engine})
