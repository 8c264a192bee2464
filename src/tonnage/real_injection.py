"""Faults injected on the real pages of a scenario's decode pool, in the pool's own geometry."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from tonnage.pools import BuiltPool, built_pools
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_pools import Role
from tonnage.sim.domain import BadInputError
from tonnage.step_devices import DeviceChoice, free_bytes

Told = Callable[[str, float], None]
_PAGES_MIN, _PAGES_MAX = 2, 8  # of a context, where a page holds enough tokens
_TOKENS_MIN, _TOKENS_MAX = 33, 128  # where it does not


@dataclass(frozen=True, slots=True)
class InjectionChoice:
    """Which classes of faults are injected, how often each, and on how many requests."""

    classes: tuple[Any, ...]  # kernels.execute.faults.Fault
    count: int = 20
    requests: int = 6

    @classmethod
    def named(cls, names: str, count: int) -> InjectionChoice:
        """Return classes by a list with commas, or all; raise BadInputError for one unknown."""
        from tonnage.kernels.execute.faults import faults_named

        if count < 1:
            raise BadInputError(f"--injections {count}: injects nothing; use 1 or more")
        return cls(faults_named(names), count)


def inject_faults(
    scenario: Scenario, device: DeviceChoice, choice: InjectionChoice, told: Told | None = None
) -> dict[str, Any]:
    """Return the JSON object of an injection: what was injected, and what each check caught.

    One rank of the decode pool runs, or of the only pool, with one layer of each kind where
    `device` does not name how many. Raises as the kernels do, before any fault is injected.
    """
    from tonnage.kernels.execute.injection import injected
    from tonnage.kernels.timing import fixed_threads

    pools = built_pools(scenario)
    role: Role = "decode" if "decode" in pools else "serve"
    pool = pools[role]
    model, size = _rank(pool, device), _size(pool, choice)
    threads = fixed_threads(device.threads) if device.device == "cpu" else nullcontext()
    reports = []
    with threads:
        for number, fault in enumerate(choice.classes):
            if told is not None:
                told(f"injecting {fault.name}", number / len(choice.classes))
            reports.append(injected(model, fault, choice.count, size, scenario.seed))
    found = {
        "pool": role,
        "device": device.device,
        "backend": model.place.backend,
        "model": pool.model.name,
        "layers_run": sum(group.run for group in model.groups),
        "kv": pool.spec.kv_format,
        "page_tokens": size.page_tokens,
        "requests": size.requests,
        "context_tokens": [size.tokens_min, size.tokens_max],
        "seed": scenario.seed,
        "classes": [report.to_dict() for report in reports],
    }
    del model
    gc.collect()
    return found


def _rank(pool: BuiltPool, device: DeviceChoice) -> Any:
    """Return one rank of the pool's model whose rows know nothing of each other."""
    from tonnage.kernels.execute.plan import layer_kinds
    from tonnage.kernels.executor import RankModel, RankSpec, place_on

    layers = device.layers or layer_kinds(pool.model)
    spec = RankSpec(pool.model, pool.spec.layout, pool.spec.kv_format, layers)
    place = place_on(device.device, rows_alone=device.device == "cpu")
    return RankModel(spec, place, free_bytes(device.device))


def _size(pool: BuiltPool, choice: InjectionChoice) -> Any:
    from tonnage.kernels.execute.scene import SceneSize

    page_tokens, longest = pool.spec.page_tokens, pool.model.max_context_tokens
    return SceneSize(
        requests=choice.requests,
        tokens_min=min(max(_PAGES_MIN * page_tokens + 1, _TOKENS_MIN), longest),
        tokens_max=min(max(_PAGES_MAX * page_tokens, _TOKENS_MAX), longest),
        page_tokens=page_tokens,
    )
