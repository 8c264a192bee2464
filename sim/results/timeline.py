"""What every instance did when: a row per segment, as columns so that a million stay small."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray

from tonnage.sim.domain import BadInputError, FloatArray, IntArray

_TIMES = ("start_s", "end_s")
_SAMPLED = (
    "running_requests",
    "decode_requests",
    "prompt_requests",
    "waiting_requests",
    "used_pages",
)
_COLUMNS = (
    "instance",
    *_TIMES,
    "steps",
    "decode_requests",
    "prompt_requests",
    "prompt_tokens",
    "waiting_requests",
    "used_pages",
)
_PHASES = ("decode", "prefill", "mixed")
_PENDING_ROWS = 8192

Columns = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class States:
    """What one instance holds from each instant to the next, idle before the first `[instants]`.

    `counts` by name: running, decode and prompt requests are the sums of all segments under way;
    waiting requests and used pages, which micro-batches share, those of the latest to start; all
    are zero where no segment is under way, as is `busy`, which else is one.
    """

    times_s: FloatArray
    counts: Mapping[str, IntArray]


class Timeline:
    """Segments of all instances: times, batch, queue and KV pages.

    A segment is a run of steps with one batch; between segments an instance is idle. Segments of
    one instance overlap where it has several micro-batches under way. `waiting_requests` and
    `used_pages` are the instance's, as the engine gave them for the segment as a whole.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, list[NDArray[Any]]] = {name: [] for name in _COLUMNS}
        self._pending: list[tuple[float, ...]] = []
        self._settled = 0

    def __len__(self) -> int:
        return self._settled + len(self._pending)

    def add(
        self,
        instance: int,
        start_s: float,
        end_s: float,
        steps: int,
        decode_requests: int,
        prompt_requests: int,
        prompt_tokens: int,
        waiting_requests: int,
        used_pages: int,
    ) -> None:
        """Add one segment: `steps` equal-batch steps of one instance from start_s to end_s.

        `prompt_tokens` are those of all its steps together. Raises ValueError, at the latest when
        the timeline is read, for a segment that ends before it starts or a negative count.
        """
        self._pending.append(
            (
                instance,
                start_s,
                end_s,
                steps,
                decode_requests,
                prompt_requests,
                prompt_tokens,
                waiting_requests,
                used_pages,
            )
        )
        if len(self._pending) >= _PENDING_ROWS:
            self._settle()

    def _settle(self) -> None:
        """Turn the pending rows into one block per column, 44 bytes a row."""
        block = {
            name: np.array(values, dtype=_dtype(name))
            for name, values in zip(_COLUMNS, zip(*self._pending, strict=True), strict=True)
        }
        _check(block)
        for name, values in block.items():
            self._blocks[name].append(values)
        self._settled += len(self._pending)
        self._pending.clear()

    def columns(self) -> dict[str, NDArray[Any]]:
        """Return the columns `[segments]` as they are kept, in the order of adding."""
        if self._pending:
            self._settle()
        for name, blocks in self._blocks.items():
            if len(blocks) != 1:
                blocks[:] = [np.concatenate(blocks) if blocks else np.zeros(0, dtype=_dtype(name))]
        return {name: blocks[0] for name, blocks in self._blocks.items()}

    def frame(self) -> pd.DataFrame:
        """Return one row per segment in order of start and instance, with its phase.

        `phase` is prefill, decode, or mixed where prompt chunks and decoding share the steps.
        """
        columns = self.columns()
        order = np.lexsort((columns["instance"], columns["start_s"]))
        frame = pd.DataFrame({name: _wide(values[order]) for name, values in columns.items()})
        prompts, decodes = frame["prompt_requests"] > 0, frame["decode_requests"] > 0
        codes = np.where(prompts, np.where(decodes, 2, 1), 0)
        frame["phase"] = pd.Categorical.from_codes(codes, categories=pd.Index(_PHASES))
        return frame

    def by_instance(self) -> Iterator[tuple[int, dict[str, NDArray[Any]]]]:
        """Give each instance's columns `[its segments]` in order of start."""
        columns = self.columns()
        order = np.lexsort((columns["start_s"], columns["instance"]))
        instances, firsts = np.unique(columns["instance"][order], return_index=True)
        for instance, rows in zip(instances, np.split(order, firsts[1:]), strict=False):
            yield int(instance), {name: values[rows] for name, values in columns.items()}

    def states(self) -> Iterator[tuple[int, States]]:
        """Give each instance's states in order of time."""
        for instance, own in self.by_instance():
            yield instance, _states(own)

    def at(self, times_s: ArrayLike) -> pd.DataFrame:
        """Return the state at each instant `[times]`: one row per time and instance.

        An instant where one segment ends and another starts belongs to the one that starts. All
        counts are zero while an instance is idle; `running_requests` are decode and prompt ones.
        """
        times = np.asarray(times_s, dtype=np.float64).reshape(-1)
        found = {instance: _state_at(states, times) for instance, states in self.states()}
        return _by_time({"time_s": times}, found, _SAMPLED)

    def averages(self, window_s: float, until_s: float | None = None) -> pd.DataFrame:
        """Return time-weighted means per window and instance, from 0 to `until_s`.

        One row per window `[start_s, end_s)` and instance, idle time counted as zero; `busy_share`
        is the share of the window in which the instance ran steps. Without `until_s` the windows
        reach the end of the last segment; the last window is cut there. Raises BadInputError for a
        window that is not positive.
        """
        if not (window_s > 0 and np.isfinite(window_s)):
            raise BadInputError(f"window_s {window_s:g}: must be positive seconds")
        ends = self.columns()["end_s"]
        edges = _edges(window_s, float(ends.max(initial=0.0)) if until_s is None else until_s)
        spans = {"start_s": edges[:-1], "end_s": edges[1:]}
        means = {instance: _means_between(states, edges) for instance, states in self.states()}
        return _by_time(spans, means, ("busy_share", *_SAMPLED))


def _dtype(name: str) -> type[np.float64] | type[np.int32]:
    return np.float64 if name in _TIMES else np.int32


def _wide(values: NDArray[Any]) -> NDArray[Any]:
    """Return whole numbers with 64 bits, so that a reader's products do not overflow."""
    return values if values.dtype == np.float64 else values.astype(np.int64)


def _check(block: Columns) -> None:
    if not (block["end_s"] >= block["start_s"]).all():
        raise ValueError("a segment ends before it starts")
    for name in _COLUMNS:
        if (block[name] < 0).any():
            raise ValueError(f"a segment has a negative {name}")


def _states(own: Columns) -> States:
    starts, ends = own["start_s"], own["end_s"]
    times = np.unique(np.concatenate((starts, ends)))
    begin, end = np.searchsorted(times, starts), np.searchsorted(times, ends)
    latest = np.searchsorted(starts, times, side="right") - 1

    def under_way(values: NDArray[Any]) -> IntArray:
        change = np.zeros(len(times), dtype=np.int64)
        np.add.at(change, begin, values)
        np.subtract.at(change, end, values)
        return np.cumsum(change)

    busy = under_way(np.ones_like(own["steps"])) > 0
    counts = {name: under_way(own[name]) for name in ("decode_requests", "prompt_requests")}
    counts |= {
        name: np.where(busy, _wide(own[name])[latest], 0)
        for name in ("waiting_requests", "used_pages")
    }
    counts["running_requests"] = counts["decode_requests"] + counts["prompt_requests"]
    counts["busy"] = busy.astype(np.int64)
    return States(times, counts)


def _state_at(states: States, times: FloatArray) -> dict[str, NDArray[Any]]:
    row = np.searchsorted(states.times_s, times, side="right") - 1
    return {name: np.where(row >= 0, states.counts[name][row], 0) for name in _SAMPLED}


def _means_between(states: States, edges: FloatArray) -> dict[str, NDArray[Any]]:
    """Return means between consecutive edges, as differences of the running integral.

    The integral of a step function is linear from one of its instants to the next.
    """
    means: dict[str, NDArray[Any]] = {}
    for name, counts in states.counts.items():
        integral = np.append(0.0, np.cumsum(counts[:-1] * np.diff(states.times_s)))
        between = np.diff(np.interp(edges, states.times_s, integral)) / np.diff(edges)
        means["busy_share" if name == "busy" else name] = between
    return means


def _edges(window_s: float, last_s: float) -> FloatArray:
    """Return the edges of the windows; rounding never leaves a sliver at the end."""
    if last_s <= 0:
        return np.zeros(1)
    windows = max(1, math.ceil(last_s / window_s - 1e-9))
    return np.append(np.arange(windows) * window_s, last_s)


def _by_time(
    first: Mapping[str, FloatArray],
    figures: Mapping[int, Mapping[str, NDArray[Any]]],
    names: Sequence[str],
) -> pd.DataFrame:
    """Join the figures `[times]` of every instance to one frame in order of time and instance."""
    times = len(next(iter(first.values())))
    columns = {name: np.repeat(values, len(figures)) for name, values in first.items()}
    columns["instance"] = np.tile(np.array(list(figures), dtype=np.int64), times)
    for name in names:
        own = [by_name[name] for by_name in figures.values()]
        columns[name] = np.stack(own, axis=1).reshape(-1) if own else np.zeros(0)
    return pd.DataFrame(columns)
