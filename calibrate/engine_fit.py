"""The fit of engine terms: a time per token that is linear in them, errors as ratios.

Gauss-Newton on the logarithms of the terms, with priors, and residuals beyond `_OUTLIER` of the
expected error weighed down: some rows were run with settings that their file does not tell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from tonnage.calibrate.engine_samples import Sample
from tonnage.sim.cost.engine_terms import EngineTerms
from tonnage.sim.domain import FloatArray, IntArray
from tonnage.validate_latency import polling_s as waited_s

Group = tuple[str, str]  # engine, generation of GPUs
Kind = tuple[str, str, str]  # and the kind of attention, which sets how prompts are launched

_ERROR = 0.10  # that a row is expected to be off by: what the shrinkage is weighed against
_OUTLIER = 1.5
# Of the logarithm of a factor around 0; 0.35 at first, narrowed when held-out rows of SGLang on
# H200 were thrown a third off by what other models had moved.
_FACTOR_SPREAD = 0.2
_HOST_SPREAD = 1.2
_PRIOR_STEP_S, _PRIOR_SEQUENCE_S = 0.2e-3, 5e-6  # guesses, with a wide spread
_DRAFT_SPREAD = 0.3
_ITERATIONS, _LONGEST_STEP, _SETTLED = 40, 0.7, 1e-3
_LAUNCHES_S = np.linspace(0.0, 60e-6, 31)  # that are tried, of one kernel outside a graph
_LEAST_RELATIVE = 0.05  # an error of a first token below this weighs no more


@dataclass(frozen=True, slots=True)
class Design:
    """Samples as arrays, `n` rows.

    `families` `[n, terms]`: seconds of a decode step and its prompts by family; `prompts` likewise
    of one prompt. `ratio` `[n]`: what was simulated over the sum of `families`.
    """

    samples: tuple[Sample, ...]
    names: tuple[tuple[Group, str], ...]
    groups: tuple[Group, ...]
    families: FloatArray
    prompts: FloatArray
    ratio: FloatArray
    group: IntArray
    drafting: FloatArray
    tpot_s: FloatArray
    ttft_s: FloatArray

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Design:
        """Arrange samples."""
        group_of = [(one.row.engine, one.generation) for one in samples]
        groups = tuple(sorted(set(group_of)))
        names = sorted(
            {
                (group, name)
                for group, one in zip(group_of, samples, strict=True)
                for name in (*one.kernels.decode_s, *one.kernels.prompt_s)
            }
        )
        place = {name: index for index, name in enumerate(names)}
        families = np.zeros((len(samples), len(names)))
        prompts = np.zeros_like(families)
        for row, (group, one) in enumerate(zip(group_of, samples, strict=True)):
            kernels = one.kernels
            for name, seconds in kernels.decode_s.items():
                families[row, place[group, name]] += seconds
            for name, seconds in kernels.prompt_s.items():
                prompts[row, place[group, name]] += seconds
                families[row, place[group, name]] += seconds * kernels.prompts_per_step
        simulated = np.array([one.kernels.simulated.tpot_s for one in samples])
        return cls(
            tuple(samples),
            tuple(names),
            groups,
            families,
            prompts,
            simulated / families.sum(axis=1),
            np.array([groups.index(group) for group in group_of]),
            np.array([float(one.drafts > 0) for one in samples]),
            np.array([one.row.tpot_s for one in samples]),
            np.array([one.row.ttft_s for one in samples]),
        )

    @property
    def batch(self) -> FloatArray:
        """Requests of a rank that decode `[n]`."""
        return np.array([one.kernels.batch for one in self.samples])

    @property
    def prompts_per_step(self) -> FloatArray:
        """Prompts that a pool of both phases computes between two steps `[n]`."""
        return np.array([one.kernels.prompts_per_step for one in self.samples])


class EngineFit:
    """Terms of all groups at once, as one vector of logarithms."""

    def __init__(self, design: Design) -> None:
        """Start from the priors."""
        self.design = design
        terms, groups = len(design.names), len(design.groups)
        self._step, self._sequence = terms, terms + groups
        self._draft = terms + 2 * groups
        self.prior = np.zeros(self._draft + 1)
        self.prior[self._step : self._sequence] = np.log(_PRIOR_STEP_S)
        self.prior[self._sequence : self._draft] = np.log(_PRIOR_SEQUENCE_S)
        self.spread = np.full(len(self.prior), _FACTOR_SPREAD)
        self.spread[self._step : self._draft] = _HOST_SPREAD
        self.spread[self._draft] = _DRAFT_SPREAD
        self.logs = self.prior.copy()
        kind_of = [(one.row.engine, one.generation, one.attention) for one in design.samples]
        self.kinds: tuple[Kind, ...] = tuple(sorted(set(kind_of)))
        self._kind = np.array([self.kinds.index(one) for one in kind_of])
        self.request = np.zeros((len(self.kinds), 2))  # request_s, request_steps
        self.launch_s = np.zeros(len(self.kinds))
        # What another published deployment may have been behind teaches nothing.
        self._certain = np.array([float(not one.run.others) for one in design.samples])

    # --- time per token -------------------------------------------------------------------------

    def tpot_s(self) -> FloatArray:
        """Return the predicted time per token `[n]`."""
        return self._parts()[3]

    def fit_tpot(self, chosen: FloatArray) -> None:
        """Fit all but the terms of requests on the rows whose weight `[n]` is not 0."""
        design, rows = self.design, np.arange(len(chosen))
        for _ in range(_ITERATIONS):
            kernels_s, steps_s, sequences_s, predicted_s = self._parts()
            alone_s = kernels_s.sum(axis=1) + steps_s + sequences_s
            residual = np.log(predicted_s / design.tpot_s) / _ERROR
            size = np.maximum(np.abs(residual), _OUTLIER)
            weight = chosen * self._certain * _OUTLIER / size
            slope = np.zeros((len(rows), len(self.logs)))
            slope[:, : self._step] = kernels_s / alone_s[:, None]
            slope[rows, self._step + design.group] = steps_s / alone_s
            slope[rows, self._sequence + design.group] = sequences_s / alone_s
            slope[:, self._draft] = design.drafting
            slope /= _ERROR
            weighed = slope * weight[:, None]
            curvature = weighed.T @ slope + np.diag(1 / self.spread**2)
            gradient = weighed.T @ residual + (self.logs - self.prior) / self.spread**2
            step = np.clip(np.linalg.solve(curvature, -gradient), -_LONGEST_STEP, _LONGEST_STEP)
            self.logs = self.logs + step
            if np.abs(step).max() < _SETTLED:
                return

    def _parts(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        design = self.design
        kernels_s = design.families * np.exp(self.logs[: self._step])
        steps_s = np.exp(self.logs[self._step : self._sequence])[design.group]
        steps_s = steps_s * (1 + design.prompts_per_step)
        sequences_s = np.exp(self.logs[self._sequence : self._draft])[design.group] * design.batch
        drafts = np.exp(self.logs[self._draft] * design.drafting)
        total_s = (kernels_s.sum(axis=1) + steps_s + sequences_s) * design.ratio * drafts
        return kernels_s, steps_s, sequences_s, total_s

    @property
    def draft_factor(self) -> float:
        """What the time per token of runs that speculate is off by."""
        return float(np.exp(self.logs[self._draft]))

    # --- first tokens ---------------------------------------------------------------------------

    def ttft_s(self) -> FloatArray:
        """Return the predicted time to the first token `[n]`."""
        request = self.request[self._kind]
        waiting_s: FloatArray = request[:, 0] + request[:, 1] * self.tpot_s()
        return self._queued_s() + waiting_s

    def fit_ttft(self, chosen: FloatArray) -> None:
        """Fit launches and requests, kind by kind, on relative errors (least absolute ones)."""
        design, steps_s = self.design, self.tpot_s()
        for kind in range(len(self.kinds)):
            rows = (self._kind == kind) & (chosen * self._certain > 0)
            if not rows.any():
                continue
            columns = np.stack([np.ones(rows.sum()), steps_s[rows]], axis=1)
            best = np.inf
            for launch_s in _LAUNCHES_S:
                self.launch_s[kind], kept = launch_s, self.launch_s[kind]
                missing_s = (design.ttft_s - self._queued_s())[rows]
                found, error = _least_absolute(columns, missing_s, design.ttft_s[rows])
                if error < best:
                    best, self.request[kind] = error, found
                else:
                    self.launch_s[kind] = kept

    def _queued_s(self) -> FloatArray:
        """Return the simulated first token with the fitted kernels in place.

        A prompt that waits for pages waits for whole answers: then it goes by the time per token.
        """
        design = self.design
        simulated_s = np.array([one.kernels.simulated.ttft_s for one in design.samples])
        alone_s = design.prompts.sum(axis=1)
        kernels_s = (design.prompts * np.exp(self.logs[: self._step])).sum(axis=1)
        launches = np.array([one.kernels.launches for one in design.samples])
        prompts = np.maximum(kernels_s, launches * self.launch_s[self._kind]) / alone_s
        tokens = self.tpot_s() / np.array([one.kernels.simulated.tpot_s for one in design.samples])
        share = np.clip((simulated_s / alone_s - 5.0) / 20.0, 0.0, 1.0)
        polling_s = np.array(
            [
                waited_s(one.run, step_s)
                for one, step_s in zip(design.samples, self.tpot_s(), strict=True)
            ]
        )
        queued_s: FloatArray = simulated_s * (share * tokens + (1 - share) * prompts) + polling_s
        return queued_s

    # --- results --------------------------------------------------------------------------------

    def terms(self) -> dict[Kind, EngineTerms]:
        """Return the terms of every kind; in a group all but launches and requests are alike."""
        factors: dict[Group, dict[str, float]] = {group: {} for group in self.design.groups}
        for (owner, name), log in zip(self.design.names, self.logs, strict=False):
            if "." in name or name in ("all_reduce", "small_kernels", "sampling"):
                factors[owner][name] = float(np.exp(log))
        found = {}
        for index, (engine, generation, attention) in enumerate(self.kinds):
            group = self.design.groups.index((engine, generation))
            found[engine, generation, attention] = EngineTerms(
                factors[engine, generation],
                step_s=float(np.exp(self.logs[self._step + group])),
                sequence_s=float(np.exp(self.logs[self._sequence + group])),
                launch_s=float(self.launch_s[index]),
                request_s=float(self.request[index, 0]),
                request_steps=float(self.request[index, 1]),
            )
        return found


def _least_absolute(
    columns: FloatArray, wanted_s: FloatArray, measured_s: FloatArray
) -> tuple[FloatArray, float]:
    """Return terms of at least 0 and the mean relative error that they leave."""
    found = np.zeros(columns.shape[1])
    for _ in range(_ITERATIONS):
        errors = np.abs((columns @ found - wanted_s) / measured_s)
        weight = 1 / (np.sqrt(np.maximum(errors, _LEAST_RELATIVE)) * measured_s)
        found = nnls(columns * weight[:, None], wanted_s * weight)[0]
    relative = np.abs((columns @ found - wanted_s) / measured_s)
    return found, float(np.minimum(relative, 1.0).mean())


def fold_of(configurations: Sequence[str], folds: int, seed: int = 0) -> IntArray:
    """Return a fold for every row `[n]`; those of one configuration are in one."""
    distinct = sorted(set(configurations))
    drawn = np.random.default_rng(seed).permutation(len(distinct)) % folds
    known = dict(zip(distinct, drawn.tolist(), strict=True))
    return np.array([known[one] for one in configurations])
