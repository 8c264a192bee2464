"""Two logged vLLM runs, and when each of their engine's steps ended.

`requests.jsonl` holds the engine's own clock for every request: when it was queued, first
planned, gave its first and its last token. `timeseries.csv` holds what the engine's statistics
said after the last step of each second. `docs/vllm_replay.md` explains what is derived here.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import coo_matrix

from tonnage.sim.domain import FloatArray

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT.parent / "shared" / "truth" / "vllm_runs"
BLOCK_TOKENS = 16
# A plan that follows an output by less than this was made at that output.
SAME_BOUNDARY_S = 1e-3
# One step lost by a preempted request weighs as much as so many steps of uneven pace.
LOST_STEP_WEIGHT = 0.01
# One step too few or too many between a prompt's plan and its first token.
PROMPT_STEP_WEIGHT = 10.0


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request; times in seconds since the first request reached the engine."""

    input_tokens: int
    output_tokens: int
    arrival_s: float
    planned_s: float
    first_token_s: float
    last_token_s: float


@dataclass(frozen=True, slots=True)
class VllmRun:
    """A logged run; the arrays hold one value per second of the log.

    A value was read after the last step that ended before `sample_ends_s`; token counts are sums
    over the second. `usable_blocks` is None where the log does not give it.
    """

    requests: list[LoggedRequest]
    max_num_seqs: int
    token_budget: int
    usable_blocks: int | None
    sample_ends_s: FloatArray
    sample_origin_range_s: tuple[float, float]
    output_tokens: FloatArray
    running: FloatArray
    waiting: FloatArray
    kv_used: FloatArray  # share


def read_run(name: str) -> VllmRun:
    """Read one folder of `shared/truth/vllm_runs`."""
    folder = RUNS / name
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text().splitlines()]
    with (folder / "timeseries.csv").open() as file:
        rows = list(csv.DictReader(file))
    meta = json.loads((folder / "meta.json").read_text())
    blocks = meta.get("kv_cache", {}).get("num_gpu_blocks")
    requests = _requests(lines)
    low_s, high_s = _origin_range(requests, _column(rows, "prompt_throughput"))
    return VllmRun(
        requests=requests,
        max_num_seqs=meta["engine_kwargs"]["max_num_seqs"],
        token_budget=meta["engine_kwargs"]["max_num_batched_tokens"],
        usable_blocks=None if blocks is None else blocks - 1,  # block 0 is the null block
        sample_ends_s=(low_s + high_s) / 2 + _column(rows, "t"),
        sample_origin_range_s=(low_s, high_s),
        output_tokens=_column(rows, "gen_throughput"),
        running=_column(rows, "running"),
        waiting=_column(rows, "waiting"),
        kv_used=_column(rows, "kv_cache_pct") / 100,
    )


def _column(rows: list[dict[str, str]], name: str) -> FloatArray:
    return np.array([float(row[name]) for row in rows])


def _requests(lines: list[dict[str, Any]]) -> list[LoggedRequest]:
    """Put arrivals (the client's clock) and token times (the engine's) on one clock.

    The clocks' difference is the least time by which a request was queued after its arrival.
    """
    offset_s = min(line["queued_ts"] - line["arrival_time"] for line in lines)
    zero_s = min(line["arrival_time"] for line in lines) + offset_s
    return [
        LoggedRequest(
            input_tokens=line["input_toks"],
            output_tokens=line["output_toks"],
            arrival_s=line["arrival_time"] + offset_s - zero_s,
            planned_s=line["scheduled_ts"] - zero_s,
            first_token_s=line["first_token_ts"] - zero_s,
            last_token_s=line["last_token_ts"] - zero_s,
        )
        for line in lines
    ]


def _origin_range(requests: list[LoggedRequest], prompt_tokens: FloatArray) -> tuple[float, float]:
    """Return the earliest and latest start of the log's first second.

    A prompt is counted, whole, in the second of its first token, so the running sum of the column
    says which first tokens lie before and after the end of every second.
    """
    ordered = sorted(requests, key=lambda request: request.first_token_s)
    first_s = [request.first_token_s for request in ordered]
    counted = np.searchsorted(
        np.cumsum([request.input_tokens for request in ordered]),
        np.cumsum(prompt_tokens),
        side="right",
    )
    low_s, high_s = -math.inf, math.inf
    for second, done in enumerate(counted, start=1):
        if done:
            low_s = max(low_s, first_s[done - 1] - second)
        if done < len(first_s):
            high_s = min(high_s, first_s[done] - second)
    assert low_s < high_s, "prompt_throughput contradicts the first tokens' times"
    return low_s, high_s


@dataclass(frozen=True, slots=True)
class StepClock:
    """How many steps had ended at each time at which the log shows that one ended.

    Between two such times the steps are taken to be equally long. `lost_steps[i]`: steps between
    the first and last token of request i that gave it no token. `prompt_steps_off[i]`: steps by
    which its first token came too early or too late for its plan.
    """

    ended_s: FloatArray
    steps: FloatArray
    lost_steps: FloatArray
    prompt_steps_off: FloatArray

    def step_s(self) -> FloatArray:
        """Return the steps' durations in order, the first from the first plan."""
        numbers = np.arange(int(self.steps[-1] + 1e-6) + 1)
        return np.diff(np.interp(numbers, self.steps, self.ended_s))

    def steps_at(self, times_s: Sequence[float]) -> FloatArray:
        """Return how many steps had ended at each time, that which ended just then included."""
        return np.interp(times_s, self.ended_s, self.steps)


def step_clock(run: VllmRun, lost_step_weight: float = LOST_STEP_WEIGHT) -> StepClock:
    """Derive the steps' ends from the requests' times; no column of the time series is used.

    A linear program: known are the instants at which a step ended, unknown how many steps lie
    between two of them (one or more).

    - A request gets one token per step from its first token to its last, so `output_tokens - 1`
      steps lie between them: exactly, if a solution exists (nobody was preempted); else at least.
    - A prompt planned at the end of step k gives its first token at the end of step k + 2 (a step
      is planned when the one before it starts), or later by no more steps than it takes at the
      budget less a token for every other request.
    - Of all solutions: the least sum of lost steps (weighed low) and of changes of pace between
      neighbouring stretches without a prompt.
    """
    ended_s = _step_ends(run)
    rows = _Rows(len(ended_s) - 1, len(run.requests))
    gap_s = np.diff(ended_s)
    is_prompt = np.zeros(len(gap_s), dtype=bool)
    for index, request in enumerate(run.requests):
        planned = int(np.searchsorted(ended_s, request.planned_s, side="right")) - 1
        first = int(np.searchsorted(ended_s, request.first_token_s))
        last = int(np.searchsorted(ended_s, request.last_token_s))
        rows.add_tokens(index, first, last, request.output_tokens - 1)
        is_prompt[planned:first] = True
        if index:  # the first request starts an idle engine: its first plan has no step before it
            most = 2 + math.ceil(request.input_tokens / (run.token_budget - run.max_num_seqs))
            rows.add_prompt(index, planned, first, 2, most)
    rows.add_pace(np.flatnonzero(~is_prompt), gap_s)
    solution = rows.solve(may_lose=False, lost_step_weight=lost_step_weight)
    if solution is None:
        solution = rows.solve(may_lose=True, lost_step_weight=lost_step_weight)
    assert solution is not None
    counts, lost_steps, off = solution
    return StepClock(ended_s, np.concatenate([[0.0], np.cumsum(counts)]), lost_steps, off)


def _step_ends(run: VllmRun) -> FloatArray:
    """Return the instants at which a step is known to have ended, after that of the first plan.

    They are the times of first and last tokens, and plans that follow none of these at once: a
    plan is made when a step has ended.
    """
    tokens_s = np.unique([(r.first_token_s, r.last_token_s) for r in run.requests])
    plans_s = np.unique([request.planned_s for request in run.requests])
    before = np.searchsorted(tokens_s, plans_s) - 1
    since_s = np.where(before < 0, np.inf, plans_s - tokens_s[before])
    return np.sort(np.concatenate([tokens_s, plans_s[since_s > SAME_BOUNDARY_S]]))


class _Rows:
    """The linear program's variables and rows.

    Variables: steps per gap, changes of pace, lost steps and prompt steps off per request.
    """

    def __init__(self, gaps: int, requests: int) -> None:
        self._gaps = gaps
        self._requests = requests
        self._equal: list[tuple[dict[int, float], float]] = []
        self._most: list[tuple[dict[int, float], float]] = []
        self._pace_weights: list[float] = []

    def add_tokens(self, request: int, first: int, last: int, steps: int) -> None:
        row = dict.fromkeys(range(first, last), 1.0)
        self._equal.append((row | {self._gaps + request: -1.0}, steps))

    def add_prompt(self, request: int, planned: int, first: int, least: int, most: int) -> None:
        off = self._gaps + self._requests + request
        self._most.append((dict.fromkeys(range(planned, first), -1.0) | {off: -1.0}, -least))
        self._most.append((dict.fromkeys(range(planned, first), 1.0) | {off: -1.0}, most))

    def add_pace(self, decode_gaps: NDArray[np.intp], gap_s: FloatArray) -> None:
        """Weigh a change of pace by the shorter of the two stretches: both sides in steps."""
        for left, right in itertools.pairwise(decode_gaps):
            change = self._gaps + 2 * self._requests + len(self._pace_weights)
            for sign in (1, -1):
                row = {left: sign / gap_s[left], right: -sign / gap_s[right], change: -1.0}
                self._most.append((row, 0.0))
            self._pace_weights.append(min(gap_s[left], gap_s[right]))

    def solve(
        self, *, may_lose: bool, lost_step_weight: float
    ) -> tuple[FloatArray, FloatArray, FloatArray] | None:
        gaps, requests = self._gaps, self._requests
        costs = np.concatenate(
            [
                np.zeros(gaps),
                np.full(requests, lost_step_weight),
                np.full(requests, PROMPT_STEP_WEIGHT),
                self._pace_weights,
            ]
        )
        bounds = [(1.0, None)] * gaps + [(0.0, None if may_lose else 0.0)] * requests
        bounds += [(0.0, None)] * (len(costs) - len(bounds))
        equal, steps = _matrix(self._equal, len(costs))
        most, limits = _matrix(self._most, len(costs))
        result = linprog(
            costs, A_eq=equal, b_eq=steps, A_ub=most, b_ub=limits, bounds=bounds, method="highs"
        )
        if not result.success:
            return None
        lost, off = result.x[gaps : gaps + requests], result.x[gaps + requests :][:requests]
        return result.x[:gaps], lost, off


def _matrix(
    rows: list[tuple[dict[int, float], float]], columns: int
) -> tuple[coo_matrix, FloatArray]:
    entries = [(i, j, x) for i, (row, _) in enumerate(rows) for j, x in row.items()]
    row_of, column_of, values = zip(*entries, strict=True)
    matrix = coo_matrix((values, (row_of, column_of)), shape=(len(rows), columns))
    return matrix.tocsr(), np.array([limit for _, limit in rows])


def mean_error(predicted: FloatArray, logged: FloatArray) -> float:
    """Return the mean absolute error over the log's mean."""
    return float(np.abs(predicted - logged).mean() / logged.mean())
