"""Published recipes of disaggregated runs, for result files that leave the workers out.

`recipes/*.yaml` hold them by GPU, engine, weights, lengths and concurrency.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from tonnage.scenarios.serving_layouts import short_layout
from tonnage.sim.domain import BadInputError, ParallelLayout

_FOLDER = Path(__file__).parent / "recipes"
_LINE = re.compile(r"([\d ]+) = (\d+) (\w+) > (\d+) (\w+)(?: mtp(\d))?")


@dataclass(frozen=True, slots=True)
class Served:
    """What a recipe is looked up by; `weights`: fp8, nvfp4 ... or native."""

    model: str
    gpu: str
    engine: str
    weights: str
    input_tokens: int
    output_tokens: int
    concurrency: int


@dataclass(frozen=True, slots=True)
class Recipe:
    """The two pools of one run; `draft_tokens` of its own MTP layers, 0 without speculation."""

    prefill_workers: int
    prefill: ParallelLayout
    decode_workers: int
    decode: ParallelLayout
    draft_tokens: int = 0

    @property
    def gpus(self) -> int:
        """GPUs of both pools."""
        return self.prefill_workers * self.prefill.gpus + self.decode_workers * self.decode.gpus


def recipes_for(served: Served) -> tuple[Recipe, ...]:
    """Return the recipes of such runs; with and without speculation where both were published."""
    return _recipes().get(served, ())


@cache
def _recipes() -> dict[Served, tuple[Recipe, ...]]:
    found: dict[Served, tuple[Recipe, ...]] = {}
    for path in sorted(_FOLDER.glob("*.yaml")):
        for served, recipe in _of_file(path):
            known = found.get(served, ())
            if recipe not in known:
                found[served] = (*known, recipe)
    return found


def _of_file(path: Path) -> Iterator[tuple[Served, Recipe]]:
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    for key, lines in data["runs"].items():
        gpu, engine, weights, lengths = key.split()
        input_tokens, output_tokens = map(int, lengths.split("x"))
        for line in lines:
            users, recipe = _of_line(line, path)
            for concurrency in users:
                yield (
                    Served(
                        data["model"],
                        gpu,
                        engine,
                        weights,
                        input_tokens,
                        output_tokens,
                        concurrency,
                    ),
                    recipe,
                )


def _of_line(line: str, path: Path) -> tuple[list[int], Recipe]:
    found = _LINE.fullmatch(line)
    if found is None:
        raise BadInputError(f"{path}: {line!r}: write it like 8 16 = 1 dep4 > 5 tep8 mtp3")
    recipe = Recipe(
        int(found[2]),
        short_layout(found[3]),
        int(found[4]),
        short_layout(found[5]),
        int(found[6] or 0),
    )
    return [int(one) for one in found[1].split()], recipe
