"""The fitted terms of engines, as data: those of an engine on a GPU, and how sure they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from tonnage.sim.cost.engine_terms import EngineTerms, attention_kind
from tonnage.sim.domain import GpuSpec, ModelSpec

TERMS_FILE = Path(__file__).parent / "engine_terms.json"
_GENERATIONS = {"9": "hopper", "10": "blackwell"}  # by major compute capability


@dataclass(frozen=True, slots=True)
class FittedTerms:
    """Terms of one engine on one generation of GPUs for a kind of attention, and what they rest on.

    `rows`: measured runs behind them. `intervals`: factors on a prediction between which 80 % of
    the held-out runs lie, by figure: tpot, ttft, throughput, each for agg and disagg.
    """

    engine: str
    generation: str
    attention: str
    rows: int
    terms: EngineTerms
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, rounded to what a fit can tell."""
        terms = asdict(self.terms)
        terms["factors"] = {name: round(one, 3) for name, one in sorted(self.terms.factors.items())}
        numbers = {
            name: float(f"{value:.3g}") for name, value in terms.items() if name != "factors"
        }
        return {
            "engine": self.engine,
            "generation": self.generation,
            "attention": self.attention,
            "rows": self.rows,
            **numbers,
            "factors": terms["factors"],
            "intervals": {
                name: [round(low, 3), round(high, 3)]
                for name, (low, high) in sorted(self.intervals.items())
            },
        }


def generation_of(gpu: GpuSpec) -> str:
    """Return which GPUs run an engine's kernels alike, by compute capability."""
    major = gpu.compute_capability.partition(".")[0]
    return _GENERATIONS.get(major, f"sm{major}")


def terms_for(engine: str, gpu: GpuSpec, model: ModelSpec) -> FittedTerms | None:
    """Return the terms that were fitted for an engine on such GPUs; None where none were.

    For a kind of attention that was not measured there, those of another: all but launches and
    requests are the same.
    """
    kinds = (attention_kind(model), "gqa", "mla")
    known = (_terms().get((engine, generation_of(gpu), kind)) for kind in kinds)
    return next((one for one in known if one is not None), None)


def write_terms(terms: Sequence[FittedTerms], source: str, path: Path = TERMS_FILE) -> None:
    """Write fitted terms, with a word on where they come from."""
    ordered = sorted(terms, key=lambda one: (one.engine, one.generation, one.attention))
    data = {"source": source, "terms": [one.to_dict() for one in ordered]}
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


@cache
def _terms() -> dict[tuple[str, str, str], FittedTerms]:
    if not TERMS_FILE.is_file():
        return {}
    data = json.loads(TERMS_FILE.read_text(encoding="utf-8"))
    found = map(_from_dict, data["terms"])
    return {(one.engine, one.generation, one.attention): one for one in found}


def _from_dict(data: dict[str, Any]) -> FittedTerms:
    rest = dict(data)
    names = (rest.pop("engine"), rest.pop("generation"), rest.pop("attention"), rest.pop("rows"))
    intervals = {name: (low, high) for name, (low, high) in rest.pop("intervals").items()}
    return FittedTerms(*names, EngineTerms(**rest), intervals)
