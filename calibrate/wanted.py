"""Which models, layouts and formats are calibrated for: from names of scenarios and models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tonnage.scenarios.catalogue import (
    load_model,
    model_names,
    scenario_names,
    unknown_name,
)
from tonnage.scenarios.load import load_scenario, load_variants
from tonnage.sim.domain import BadInputError, ModelSpec, ParallelLayout
from tonnage.sim.model.layout import check_layout
from tonnage.sim.model.requantise import with_weights

DEFAULT_NAMES = {"cpu": ("laptop",), "cuda": ("kimi-k2.6-h200", "glm-5.2-h200")}
ENGINE = "sglang"  # whose merging of projections is measured; vLLM's is the same without DP
_WITH_TP = re.compile(r"(?P<name>.+):tp(?P<tp>\d+)")


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model with the weights of one pool, how a rank of it is cut, and its KV formats."""

    model: ModelSpec
    layout: ParallelLayout
    kv_formats: tuple[str, ...]


def wanted_of(names: Iterable[str], device: str) -> list[Wanted]:
    """Return what scenarios and models ask for, each once; without names, the device's defaults.

    A scenario brings the layouts, weight and KV formats of its pools. A model is measured as its
    checkpoint holds it, on one rank or cut (`kimi-k2.6:tp8`), with BF16 and FP8 KV.
    """
    found: list[Wanted] = []
    for name in tuple(names) or DEFAULT_NAMES[device]:
        found += [one for one in _wanted(name) if one not in found]
    return found


def _wanted(name: str) -> Iterator[Wanted]:
    is_scenario = name in scenario_names() or Path(name).suffix in (".yaml", ".yml")
    if is_scenario:
        yield from _of_scenario(name)
        return
    found = _WITH_TP.fullmatch(name)
    model_name, tp = (found["name"], int(found["tp"])) if found else (name, 1)
    if model_name not in model_names() and not Path(model_name).exists():
        known = sorted({*model_names(), *scenario_names()})
        raise BadInputError(unknown_name("model", name, known))
    layout = ParallelLayout(tp=tp)
    model = load_model(model_name)
    check_layout(model, layout)
    yield Wanted(model, layout, ("bf16", "fp8_e4m3"))


def _of_scenario(name: str) -> Iterator[Wanted]:
    for scenario in (load_scenario(name), *load_variants(name).values()):
        model = scenario.model_spec()
        for section in scenario.pools.named().values():
            layout = section.layout()
            check_layout(model, layout)
            yield Wanted(with_weights(model, section.weights), layout, (section.kv,))
