"""Fits what engines make of their kernels on measured serving runs; anyone can run it again.

`python -m tonnage.calibrate.fit_engines serving_latency.csv` simulates every run with kernels
alone, fits the terms of `sim.cost.engine_terms`, cross-validates with whole configurations held
out, and with `--write` stores terms and intervals in `scenarios/engine_terms.json`.

A run's time per token is taken as linear in the terms: the kernels of a decode step and, where one
pool does both phases, its share of prompt steps, by operator family, times what the simulation
makes of that sum. Factors are shared by all models of an engine on one generation of GPUs and
shrink to 1; there is none per row or model.
"""

from __future__ import annotations

import argparse
import pickle
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd

from tonnage.calibrate.engine_fit import Design, EngineFit, fold_of
from tonnage.calibrate.engine_samples import Kernels, Sample, kernels_of, samples_of
from tonnage.scenarios.engine_terms import FittedTerms, write_terms
from tonnage.scenarios.serving_rows import ServingRow, read_serving_rows
from tonnage.scenarios.serving_runs import Run, run_of
from tonnage.sim.domain import FloatArray
from tonnage.validate_latency import grouped_by_setup, throughput

FOLDS = 5
_LOW, _HIGH = 0.10, 0.90  # quantiles of held-out errors: an interval of 80 %
_FIGURES = ("tpot", "ttft", "throughput")
_LEAST_ROWS = 20  # for an interval of its own


@dataclass(frozen=True, slots=True)
class HeldOut:
    """Predictions of every row by terms that its configuration had no part in `[n]`."""

    design: Design
    tpot_s: FloatArray
    ttft_s: FloatArray

    def ratios(self, figure: str) -> FloatArray:
        """Return measured over predicted `[n]`."""
        design = self.design
        if figure == "tpot":
            return design.tpot_s / self.tpot_s
        if figure == "ttft":
            return design.ttft_s / self.ttft_s
        measured = _throughputs(design, design.ttft_s, design.tpot_s)
        ratios: FloatArray = measured / _throughputs(design, self.ttft_s, self.tpot_s)
        return ratios


def kernels_of_rows(
    rows: Sequence[ServingRow],
    workers: int | None,
    most_users: int | None,
    known: dict[Run, Kernels],
) -> list[Sample]:
    """Simulate the runs of all rows with kernels alone, each distinct one once.

    `most_users`: leaves out runs of more, which take longest. `known`: those that were simulated
    before; the others are added.
    """
    runs = {
        row.id: run
        for row in rows
        if isinstance(run := run_of(row), Run)
        and (most_users is None or run.concurrency <= most_users)
    }
    parts = grouped_by_setup([one for one in dict.fromkeys(runs.values()) if one not in known])
    with ProcessPoolExecutor(max_workers=workers) as pool:
        for part, found in zip(parts, pool.map(_kernels_of_part, parts), strict=True):
            known |= {
                run: one for run, one in zip(part, found, strict=True) if isinstance(one, Kernels)
            }
            print(f"\r{len(known):5d} of {sum(map(len, parts))} runs", end="", flush=True)
    print()
    return samples_of(
        (row, runs[row.id], known[runs[row.id]]) for row in rows if runs.get(row.id) in known
    )


def _kernels_of_part(runs: Sequence[Run]) -> list[Kernels | str]:
    return [kernels_of(run) for run in runs]


def cross_validated(design: Design) -> HeldOut:
    """Fit with each fold held out in turn, and predict it."""
    fold = fold_of([one.configuration for one in design.samples], FOLDS)
    tpot_s, ttft_s = np.zeros(len(fold)), np.zeros(len(fold))
    for held_out in range(FOLDS):
        out = fold == held_out
        fit = fitted(design, (~out).astype(float))
        tpot_s[out], ttft_s[out] = fit.tpot_s()[out], fit.ttft_s()[out]
    return HeldOut(design, tpot_s, ttft_s)


def fitted(design: Design, chosen: FloatArray) -> EngineFit:
    """Fit all terms on the rows whose weight `[n]` is not 0."""
    fit = EngineFit(design)
    fit.fit_tpot(chosen)
    fit.fit_ttft(chosen)
    return fit


def errors(held_out: HeldOut) -> pd.DataFrame:
    """Return the held-out errors of every row with what it is."""
    design = held_out.design
    frame = pd.DataFrame(
        {
            "id": [one.row.id for one in design.samples],
            "model": [one.row.model for one in design.samples],
            "gpu": [one.row.system for one in design.samples],
            "engine": [one.row.engine for one in design.samples],
            "version": [one.row.version or "" for one in design.samples],
            "precision": [one.row.precision or "" for one in design.samples],
            "mode": [_mode(one) for one in design.samples],
            "users": [one.run.concurrency for one in design.samples],
        }
    )
    for figure in _FIGURES:
        frame[figure] = 1 / held_out.ratios(figure) - 1
    return frame


def intervals(held_out: HeldOut) -> dict[tuple[str, str], dict[str, tuple[float, float]]]:
    """Return the factors that hold 80 % of the held-out rows, by group, mode and figure.

    Where a group has too few rows of a mode, those of all groups.
    """
    design = held_out.design
    modes = np.array([_mode(one) for one in design.samples])
    found: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}
    for index, group in enumerate(design.groups):
        told = found.setdefault(group, {})
        for mode in ("agg", "disagg"):
            rows = (modes == mode) & (design.group == index)
            if rows.sum() < _LEAST_ROWS:
                rows = modes == mode
            if not rows.any():
                continue
            for figure in _FIGURES:
                low, high = np.quantile(held_out.ratios(figure)[rows], (_LOW, _HIGH))
                told[f"{figure}_{mode}"] = (float(low), float(high))
    return found


def summary(frame: pd.DataFrame, by: Sequence[str]) -> pd.DataFrame:
    """Return rows, mean absolute errors and biases of groups."""
    grouped = frame.groupby(list(by), dropna=False)
    told = {"rows": grouped.size()}
    for figure in _FIGURES:
        told[f"{figure}_mape"] = grouped[figure].apply(lambda one: one.abs().mean())
        told[f"{figure}_bias"] = grouped[figure].median()
    return pd.DataFrame(told).round(3)


def _mode(sample: Sample) -> str:
    return "agg" if sample.row.serve else "disagg"


def _throughputs(design: Design, ttft_s: FloatArray, tpot_s: FloatArray) -> FloatArray:
    return np.array(
        [
            throughput(one.run.concurrency, one.row.output_tokens, first, each)
            for one, first, each in zip(design.samples, ttft_s, tpot_s, strict=True)
        ]
    )


def _terms(design: Design, held_out: HeldOut) -> Iterator[FittedTerms]:
    fit = fitted(design, np.ones(len(design.samples)))
    bounds = intervals(held_out)
    counts = np.bincount(design.group, minlength=len(design.groups))
    for (engine, generation, attention), terms in fit.terms().items():
        group = engine, generation
        rows = int(counts[design.groups.index(group)])
        yield FittedTerms(engine, generation, attention, rows, terms, bounds[group])
    print(f"speculation's accepted tokens: time per token x {fit.draft_factor:.3f}")


def main() -> None:
    """Fit, cross-validate, print, and write if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="serving results, as serving_latency.csv")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--most-users", type=int, default=None)
    parser.add_argument("--kernels", type=Path, help="keep what was simulated here, or reuse it")
    parser.add_argument("--write", action="store_true", help="store terms and intervals")
    asked = parser.parse_args()
    design = Design.of(_samples(asked))
    held_out = cross_validated(design)
    frame = errors(held_out)
    with pd.option_context("display.width", 200, "display.max_rows", 200):
        for by in (["engine", "model", "gpu", "precision", "mode"], ["engine", "gpu"], ["mode"]):
            print(summary(frame, by).to_string())
        print(summary(frame.assign(all="all"), ["all"]).to_string())
    terms = list(_terms(design, held_out))
    if asked.write:
        digest = sha256(asked.file.read_bytes()).hexdigest()[:16]
        write_terms(terms, f"{asked.file.name} (sha256 {digest}), {len(design.samples)} rows")


def _samples(asked: argparse.Namespace) -> list[Sample]:
    kept: Path | None = asked.kernels
    known: dict[Run, Kernels] = {}
    if kept is not None and kept.is_file():
        known = pickle.loads(kept.read_bytes())  # a file that this script wrote
    rows = read_serving_rows(asked.file)
    samples = kernels_of_rows(rows, asked.workers, asked.most_users, known)
    if kept is not None:
        kept.write_bytes(pickle.dumps(known))
    return samples


if __name__ == "__main__":
    main()
