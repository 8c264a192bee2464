"""How far a machine has moved since its profile was measured, from kernels that are timed again.

Before, while and after a pool's steps are measured, points of the profile's own rows are timed as
they were then. Their seconds now over those then are the drift of a family of operators; weighted
by a step's predicted time in each family they are the drift of a phase.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean, median
from typing import Any

from tonnage.calibrate.reference_points import (
    DECODE_FAMILY,
    EXPERT_FAMILY,
    PREFILL_FAMILY,
    SMALL_OPERATORS,
    Reference,
    Seconds,
    family_of_product,
    references_of,
)
from tonnage.calibrate.wanted import ENGINE, Wanted
from tonnage.execution import BETWEEN_RANKS
from tonnage.pools import BuiltPool
from tonnage.scenarios.profiles import choose_profile
from tonnage.scenarios.schema import Scenario
from tonnage.sim.cost.fused import fused_products
from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.cost.profile import Profile
from tonnage.sim.cost.step_time import StepPredictor
from tonnage.sim.cost.strata import Phase, stratum_of
from tonnage.sim.domain import Step

LEAST_SHARE = 0.5  # of a step's predicted time: references of less than this stand for no step
BETWEEN = "between ranks"
_SAME_MACHINE = ("device", "threads", "torch", "triton")


@dataclass(frozen=True, slots=True)
class FamilyDrift:
    """Seconds now over then, of every round: the mean of a family's points."""

    rounds: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median of the rounds."""
        return median(self.rounds)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of one family."""
        return {"ratio": self.ratio, "lowest": min(self.rounds), "highest": max(self.rounds)}


@dataclass(frozen=True, slots=True)
class PhaseDrift:
    """The drift of the steps of a phase; `share`: of their predicted time that families cover."""

    ratio: float
    share: float

    def to_dict(self) -> dict[str, float]:
        """Return the JSON object of one phase."""
        return {"ratio": self.ratio, "share_of_time_compared": self.share}


@dataclass(frozen=True, slots=True)
class PoolDrift:
    """The drift while one pool was measured."""

    families: Mapping[str, FamilyDrift]
    phases: Mapping[Phase, PhaseDrift]

    def why_not_divided(self) -> str | None:
        """Say why errors cannot be told without this drift, None where they can."""
        for phase, one in self.phases.items():
            if one.share < LEAST_SHARE:
                return f"the reference kernels stand for {one.share:.0%} of a {phase} step's time"
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of one pool."""
        return {
            "families": {name: one.to_dict() for name, one in self.families.items()},
            "phases": {phase: one.to_dict() for phase, one in self.phases.items()},
        }


def own_profile(scenario: Scenario, pool: BuiltPool) -> Profile | None:
    """Return the profile that a pool is predicted from, None where it is the datasheet."""
    engine = scenario.engine_spec()
    return choose_profile(scenario.profile, pool.gpu, engine.name, scenario.origin()[1]).load()


def why_no_comparison(profile: Profile | None, machine: Mapping[str, Any]) -> str | None:
    """Say why a profile's rows cannot be timed again here, None where they can.

    `machine`: device, threads, torch and triton as they are here; None does not apply.
    """
    if profile is None:
        return "predicted from the datasheet, not from rows measured on this machine"
    header = profile.header
    if header.source != "measured" or "machine" not in header.fitted:
        return f"the profile {header.name} was not measured on this machine"
    there = header.fitted["machine"]
    for name in _SAME_MACHINE:
        if there.get(name) != machine.get(name):
            return (
                f"the profile {header.name} was measured with {name} {there.get(name)}, "
                f"and this is {machine.get(name)}"
            )
    return None


def this_machine(device: str, threads: int) -> dict[str, Any]:
    """Return what the header of a profile that was measured here and now would say."""
    from tonnage.kernels.provenance import provenance

    found = provenance(device, threads)
    return {name: getattr(found, name) for name in _SAME_MACHINE}


@dataclass(slots=True)
class DriftRounds:
    """The references of one pool, and what they took in every round."""

    references: Sequence[Reference]
    seconds: Seconds
    ratios: dict[str, list[float]] = field(default_factory=dict)
    rounds: int = 0

    def again(self) -> None:
        """Time every reference once more."""
        self.rounds += 1
        for one in self.references:
            now = self.seconds(one)
            if now is not None:
                then = [call.seconds for call in one.calls]
                ratio = geometric_mean(a / b for a, b in zip(now, then, strict=True))
                self.ratios.setdefault(one.family, []).append(ratio)

    def families(self) -> dict[str, FamilyDrift]:
        """Return the drift of every family that was timed."""
        return {name: FamilyDrift(tuple(ratios)) for name, ratios in self.ratios.items()}


def references_of_steps(
    profile: Profile, pool: BuiltPool, steps: Sequence[Step], on_gpu: bool
) -> list[Reference]:
    """Return references for the heaviest step of each phase; `steps`: the heaviest first.

    Of a family that several phases have, the first phase's points stand for all.
    """
    wanted = Wanted(pool.model, pool.spec.layout, (pool.spec.kv_format,))
    found: dict[str, Reference] = {}
    for step in heaviest_by_phase(steps).values():
        for one in references_of(profile, wanted, step, on_gpu):
            found.setdefault(one.family, one)
    return list(found.values())


def heaviest_by_phase(steps: Sequence[Step]) -> dict[Phase, Step]:
    """Return the first step of every phase."""
    found: dict[Phase, Step] = {}
    for step in steps:
        found.setdefault(stratum_of(step).phase, step)
    return found


def pool_drift(
    families: Mapping[str, FamilyDrift],
    pool: BuiltPool,
    predictor: StepPredictor,
    steps: Sequence[Step],
) -> PoolDrift:
    """Return the drift of a pool's phases: families weighted by a step's predicted time in them."""
    name_of = family_names(pool)
    phases = {
        phase: _phase_drift(families, predictor.times(step), name_of)
        for phase, step in heaviest_by_phase(steps).items()
    }
    return PoolDrift(families, phases)


def _phase_drift(
    families: Mapping[str, FamilyDrift],
    times: Sequence[OperatorTime],
    name_of: Callable[[str], str],
) -> PhaseDrift:
    """Weigh families by their time; what none of them stands for drifts as the others do.

    What goes between ranks does not drift: it was not executed.
    """
    weights: dict[str, float] = {}
    for one in times:
        weights[name_of(one.name)] = weights.get(name_of(one.name), 0.0) + one.seconds
    between_s = weights.pop(BETWEEN, 0.0)
    run_s = sum(weights.values())
    compared_s = sum(weights.get(name, 0.0) for name in families)
    if not compared_s:
        return PhaseDrift(1.0, 0.0)
    drifted_s = sum(weights.get(name, 0.0) * one.ratio for name, one in families.items())
    ratio = (drifted_s / compared_s * run_s + between_s) / (run_s + between_s)
    return PhaseDrift(ratio, compared_s / run_s)


def family_names(pool: BuiltPool) -> Callable[[str], str]:
    """Return what names the family of an operator of a step, "" where none stands for it.

    `BETWEEN` is what goes between ranks.
    """
    products = {
        f"{product.role.value}.{product.name}": family_of_product(product.format)
        for product, _ in fused_products(pool.model, pool.spec.layout, ENGINE)
    }
    fixed = {"routed_experts": EXPERT_FAMILY, "small_operators": SMALL_OPERATORS}
    fixed |= dict.fromkeys(BETWEEN_RANKS, BETWEEN)

    def name_of(operator: str) -> str:
        if operator.startswith("decode_"):
            return DECODE_FAMILY
        if operator.startswith("prefill_"):
            return PREFILL_FAMILY
        return products.get(operator) or fixed.get(operator, "")

    return name_of
