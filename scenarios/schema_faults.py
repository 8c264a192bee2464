"""The `faults` list: what goes wrong with the pages of a pool, how often, and where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from tonnage.scenarios.schema_base import (
    Number,
    Section,
    WholeOrZero,
    did_you_mean,
    field_error,
    shown,
)
from tonnage.sim.domain import BadInputError
from tonnage.sim.serving.data_faults import FaultClass, FaultSpec
from tonnage.sim.units import parse_seconds

_KINDS = tuple(kind.value for kind in FaultClass)
_RATES = ("per_allocation", "per_step", "at")
_EXAMPLE = "{kind: early_reuse, per_allocation: 1e-4}"
PoolName = Literal["auto", "prefill", "decode", "serve"]
Probability = Annotated[Number, Field(gt=0, le=1)]


def _known_kind(value: object) -> object:
    if value not in _KINDS:
        raise field_error("", f"{shown(value)}: {did_you_mean(str(value), _KINDS)}")
    return value


def _times(value: object) -> object:
    entries = value if isinstance(value, list | tuple) else [value]
    try:
        times_s = tuple(parse_seconds(entry) for entry in entries)
    except BadInputError as error:
        raise field_error("", str(error)) from error
    if any(time_s < 0 for time_s in times_s):
        raise field_error("", "a time is negative; count from the start of the run")
    return times_s


class FaultSection(Section):
    """One class of faults (docs/integrity.md), in each instance of a pool, or in one of them.

    Exactly one of `per_allocation`, a probability for every page that is given; `per_step`, one for
    every step of the engine; and `at`, a time or a list of times. `pool: auto` is the pool where
    the class can act; of several, the one that decodes.
    """

    kind: Annotated[str, BeforeValidator(_known_kind)]
    per_allocation: Probability | None = None
    per_step: Probability | None = None
    at: Annotated[tuple[float, ...], BeforeValidator(_times)] = ()
    pool: PoolName = "auto"
    instance: WholeOrZero | None = None

    @model_validator(mode="after")
    def _happens_in_one_way(self) -> FaultSection:
        given = [name for name in _RATES if getattr(self, name) not in (None, ())]
        if not given:
            raise field_error("per_allocation", f"how often? give one of {', '.join(_RATES)}")
        if len(given) > 1:
            raise field_error(given[1], f"beside {given[0]}; give one of {', '.join(_RATES)}")
        return self

    def role(self, roles: Sequence[str]) -> str:
        """Return the pool on which it acts."""
        if self.pool != "auto":
            return self.pool
        return "prefill" if self.kind == FaultClass.LEASE_EXPIRY else roles[-1]

    def spec(self, roles: Sequence[str], layers: int) -> FaultSpec:
        """Return the fault for a deployment of these pools; `layers`: of the model."""
        return FaultSpec(
            FaultClass(self.kind),
            self.role(roles),
            self.per_allocation,
            self.per_step,
            self.at,
            self.instance,
            layers,
        )


def _a_list(value: Any) -> Any:
    if isinstance(value, dict):
        return [value]
    if not isinstance(value, list | tuple):
        raise field_error("", f"{shown(value)} is not a list; write it like [{_EXAMPLE}]")
    for number, entry in enumerate(value):
        if not isinstance(entry, dict | FaultSection):
            problem = f"{shown(entry)} is no fault; write it like {_EXAMPLE}"
            raise field_error(str(number), problem)
    return value


FaultList = Annotated[tuple[FaultSection, ...], BeforeValidator(_a_list)]


def check_faults(
    faults: Sequence[FaultSection],
    instances: Mapping[str, int],
    *,
    resident: bool,
    loads: bool,
) -> None:
    """Raise where a fault could not happen in a deployment, given as instances by role.

    `loads`: prompts bring a part of their KV from host memory.
    """
    hands_over = "prefill" in instances and not resident
    for number, fault in enumerate(faults):
        field, role = f"faults.{number}", fault.role(list(instances))
        _check_place(field, fault, role, instances)
        if fault.kind == FaultClass.LEASE_EXPIRY and not (role == "prefill" and hands_over):
            problem = "only a prefill pool keeps pages for another instance"
            raise field_error(f"{field}.pool", f"{problem}; use pools prefill and decode")
        if fault.kind == FaultClass.CORRUPTED_TRANSFER and not (role == "decode" and hands_over):
            problem = "KV arrives at a decode pool alone, from a prefill pool"
            raise field_error(f"{field}.pool", f"{problem}; use pools prefill and decode")
        arrives = loads if role != "decode" else hands_over
        if fault.kind == FaultClass.READ_BEFORE_LOAD and not arrives:
            problem = "nothing is loaded there; set cache.host, or use pools prefill and decode"
            raise field_error(f"{field}.pool", problem)


def _check_place(field: str, fault: FaultSection, role: str, instances: Mapping[str, int]) -> None:
    if role not in instances:
        raise field_error(f"{field}.pool", f"there is no such pool; use {' or '.join(instances)}")
    most = instances[role]
    if fault.instance is not None and fault.instance >= most:
        problem = f"there is no instance {fault.instance}; they are 0 to {most - 1}"
        raise field_error(f"{field}.instance", problem)
