"""Serving results predicted: every row's deployment, its load replayed, its latencies compared.

Rows that differ in nothing but their name are simulated once. Throughput is that of a closed loop,
`concurrency x osl / (TTFT + osl x TPOT)`, both for what was measured and what is predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache
from math import isfinite
from pathlib import Path
from typing import Any

from tonnage.closed_replay import ClosedRun, replay
from tonnage.scenarios.catalogue import load_gpu, load_model
from tonnage.scenarios.engine_terms import terms_for
from tonnage.scenarios.serving_rows import ServingRow, read_serving_rows
from tonnage.scenarios.serving_runs import Refusal, Run, Setup, run_of
from tonnage.serving_pools import SetupBuilder, Terms
from tonnage.sim.engine.fleet import Deployment
from tonnage.validation_summary import Figure, ValidatedRow, by_group, summary

FIGURES = ("tpot", "ttft", "throughput")
GROUPS = ("model", "gpu", "engine", "mode")
Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class Predicted:
    """Mean latencies that are predicted for a run.

    `bounds`: factors on each figure between which 80 % of held-out runs lie, where they are known.
    """

    ttft_s: float
    tpot_s: float
    bounds: dict[str, tuple[float, float] | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LatencyValidation:
    """All rows of a file, predicted or refused."""

    rows: tuple[ValidatedRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON object of `validate latency`."""
        return {"rows": [row.to_dict() for row in self.rows], "summary": self.summary()}

    def summary(self) -> dict[str, Any]:
        """Return errors over all rows, and by model, GPU, engine and mode."""
        told = summary(self.rows, FIGURES)
        return told | {f"by_{group}": by_group(self.rows, FIGURES, group) for group in GROUPS}


def validate_latency(
    path: Path, *, workers: int | None = None, progress: Progress | None = None
) -> LatencyValidation:
    """Predict every row of a file in the columns of `serving_latency.csv`.

    `workers`: processes; default one per core. Raises BadInputError for a file that cannot be read.
    """
    rows = read_serving_rows(path)
    runs = [run_of(row) for row in rows]
    wanted = list(dict.fromkeys(one for one in runs if isinstance(one, Run)))
    predicted = dict(zip(wanted, predict_runs(wanted, workers, progress), strict=True))
    return LatencyValidation(
        tuple(
            _validated(row, run, run.reason if isinstance(run, Refusal) else predicted[run])
            for row, run in zip(rows, runs, strict=True)
        )
    )


def predict_runs(
    runs: Sequence[Run], workers: int | None = None, progress: Progress | None = None
) -> list[Predicted | str]:
    """Return the latencies of runs, or why one cannot be predicted, in their order."""
    order = sorted(range(len(runs)), key=lambda index: repr(runs[index].setup))
    parts = grouped_by_setup([runs[index] for index in order])
    found: list[Predicted | str] = []
    with ProcessPoolExecutor(max_workers=workers) as pool:
        for part in pool.map(_predict_part, parts):
            found += part
            if progress is not None:
                progress("predicting rows", len(found) / len(runs))
    by_index = dict(zip(order, found, strict=True))
    return [by_index[index] for index in range(len(runs))]


def grouped_by_setup(runs: Sequence[Run]) -> list[list[Run]]:
    """Group runs of one deployment, so that it is built once."""
    parts: dict[Setup, list[Run]] = {}
    for run in runs:
        parts.setdefault(run.setup, []).append(run)
    return list(parts.values())


def _predict_part(runs: Iterable[Run]) -> list[Predicted | str]:
    return [predict(run) for run in runs]


def predict(run: Run) -> Predicted | str:
    """Return the latencies of one run, or why it cannot be predicted."""
    found = simulated(run, "fitted")
    if isinstance(found, str):
        return found
    waited_s = polling_s(run, found.tpot_s)
    fitted = terms_for(run.setup.engine, load_gpu(run.setup.gpu), load_model(run.setup.model))
    if fitted is None:
        return replace(found, ttft_s=found.ttft_s + waited_s)
    delay_s = fitted.terms.request_delay_s(found.tpot_s)
    mode = "agg" if run.setup.pools[0].role == "serve" else "disagg"
    bounds = {name: fitted.intervals.get(f"{name}_{mode}") for name in FIGURES}
    return Predicted(found.ttft_s + waited_s + delay_s, found.tpot_s, bounds)


def polling_s(run: Run, step_s: float) -> float:
    """Return the mean wait of a request until the server looks for new ones."""
    return (run.polled_every_steps - 1) / 2 * step_s


def simulated(run: Run, terms: Terms) -> Predicted | str:
    """Return the simulated latencies of one run, before what passes outside the scheduler."""
    deployment = deployment_for(run.setup, terms)
    if isinstance(deployment, str):
        return deployment
    load = ClosedRun(run.concurrency, run.input_tokens, run.output_tokens)
    means = replay(deployment, load)
    if means.unserved or not (isfinite(means.ttft_s) and isfinite(means.tpot_s)):
        return f"{means.unserved} of {means.simulated} requests do not fit"
    return Predicted(means.ttft_s, means.tpot_s)


@cache
def _builder(terms: Terms) -> SetupBuilder:
    return SetupBuilder(terms)


def deployment_for(setup: Setup, terms: Terms = "fitted") -> Deployment | str:
    """Return what the engine runs for a row's setup, or why it cannot be built."""
    built = _builder(terms).build(setup)
    return built if isinstance(built, str) else built.deployment


def _validated(row: ServingRow, run: Run | Refusal, predicted: Predicted | str) -> ValidatedRow:
    groups = {
        "model": row.model,
        "gpu": row.system,
        "engine": row.engine,
        "mode": "agg" if row.serve else "disagg",
    }
    if isinstance(predicted, str):
        return ValidatedRow(row.id, groups, refused=predicted)
    assert isinstance(run, Run)
    users, tokens = run.concurrency, row.output_tokens
    pairs = {
        "tpot": (row.tpot_s, predicted.tpot_s),
        "ttft": (row.ttft_s, predicted.ttft_s),
        "throughput": (
            throughput(users, tokens, row.ttft_s, row.tpot_s),
            throughput(users, tokens, predicted.ttft_s, predicted.tpot_s),
        ),
    }
    figures = {name: _figure(*pair, predicted.bounds.get(name)) for name, pair in pairs.items()}
    return ValidatedRow(row.id, groups, figures, notes=run.assumptions)


def _figure(measured: float, predicted: float, bounds: tuple[float, float] | None) -> Figure:
    if bounds is None:
        return Figure(measured, predicted)
    return Figure(measured, predicted, predicted * bounds[0], predicted * bounds[1])


def throughput(concurrency: int, output_tokens: int, ttft_s: float, tpot_s: float) -> float:
    """Return the output tokens per second of users who each wait for their last answer."""
    return concurrency * output_tokens / (ttft_s + output_tokens * tpot_s)
