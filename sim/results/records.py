"""One row per request, kept as columns so that a hundred thousand of them stay small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from tonnage.sim.domain import FloatArray, IntArray
from tonnage.sim.serving.sequence import Sequence

_INTEGERS = (
    "id",
    "input_tokens",
    "output_tokens",
    "prefill_instance",
    "decode_instance",
    "computed_tokens",
    "generated_tokens",
    "retractions",
    "cached_tokens",
    "host_tokens",
    "nvme_tokens",
    "store_tokens",
    "status_code",
)
STATUSES = ("completed", "rejected", "timed_out", "aborted")
_TIMES = (
    "arrival_s",
    "prefill_start_s",
    "prefill_end_s",
    "transfer_start_s",
    "transfer_end_s",
    "first_token_s",
    "finish_s",
)
_COLUMNS = _INTEGERS + _TIMES
_PENDING_ROWS = 8192
_NAN = float("nan")


_ATTEMPTS = ("attempts", "lost_prompt_tokens", "lost_output_tokens")


@dataclass(frozen=True, slots=True)
class Attempts:
    """How often a request was sent, and the tokens of the attempts that its row does not show."""

    attempts: int
    lost_prompt_tokens: int  # computed
    lost_output_tokens: int


class Records:
    """Requests that ended, in the order in which they ended.

    A row shows the attempt that was served, or else the last one; where clients try again, three
    columns more say what the others cost.
    """

    def __init__(self) -> None:
        self._blocks: dict[str, list[NDArray[Any]]] = {name: [] for name in _COLUMNS}
        self._pending: list[tuple[object, ...]] = []
        self._settled = 0
        self._reasons: dict[int, str] = {}  # row -> why it was not served
        self._attempts: list[Attempts] = []  # by row; empty where every request is sent once

    def __len__(self) -> int:
        return self._settled + len(self._pending)

    @property
    def has_attempts(self) -> bool:
        """Whether it is known how often each request was sent."""
        return bool(self._attempts)

    def add(self, sequence: Sequence, attempts: Attempts | None = None) -> None:
        """Append the row of a request that has ended, one way or the other."""
        if attempts is not None:
            self._attempts.append(attempts)
        reason = sequence.rejected or sequence.aborted
        if reason is not None:
            self._reasons[len(self)] = reason
        self._pending.append(_row(sequence))
        if len(self._pending) >= _PENDING_ROWS:
            self._settle()

    def _settle(self) -> None:
        """Turn the pending rows into one block per column."""
        self._settled += len(self._pending)
        for name, values in zip(_COLUMNS, zip(*self._pending, strict=True), strict=False):
            dtype = np.int64 if name in _INTEGERS else np.float64
            self._blocks[name].append(np.array(values, dtype=dtype))
        self._pending.clear()

    def _column(self, name: str) -> NDArray[Any]:
        if self._pending:
            self._settle()
        blocks = self._blocks[name]
        if len(blocks) != 1:
            dtype = np.int64 if name in _INTEGERS else np.float64
            blocks[:] = [np.concatenate(blocks) if blocks else np.zeros(0, dtype=dtype)]
        return blocks[0]

    def integers(self, name: str) -> IntArray:
        """Return one of the columns of whole numbers `[requests]`."""
        return self._column(name).astype(np.int64, copy=False)

    def attempts(self, name: str) -> IntArray:
        """Return `attempts`, `lost_prompt_tokens` or `lost_output_tokens` `[requests]`."""
        if not self._attempts:
            return np.full(len(self), int(name == "attempts"), dtype=np.int64)
        return np.array([getattr(one, name) for one in self._attempts], dtype=np.int64)

    def times(self, name: str) -> FloatArray:
        """Return one of the columns of times `[requests]`, seconds; NaN where it never was."""
        return self._column(name).astype(np.float64, copy=False)

    def with_status(self, status: str) -> NDArray[np.bool_]:
        """Return the mask `[requests]` of those that ended that way, one of STATUSES."""
        mask: NDArray[np.bool_] = self.integers("status_code") == STATUSES.index(status)
        return mask

    def served(self) -> NDArray[np.bool_]:
        """Return the mask `[requests]` of those that were served to the end."""
        return self.with_status("completed")

    def frame(self) -> pd.DataFrame:
        """Return one row per request in order of id, with its latencies and status."""
        named = [name for name in _INTEGERS if name != "status_code"]
        columns: dict[str, object] = {name: self.integers(name) for name in named}
        columns |= {name: self.times(name) for name in _TIMES}
        if self.has_attempts:
            columns |= {name: self.attempts(name) for name in _ATTEMPTS}
        frame = pd.DataFrame(columns)
        for name in ("prefill_instance", "decode_instance"):
            frame[name] = frame[name].astype("Int64").mask(frame[name] == _index(None))
        frame["ttft_s"] = self.ttft_s()
        frame["tpot_s"] = self.tpot_s()
        frame["e2e_s"] = self.e2e_s()
        frame["status"] = np.array(STATUSES)[self.integers("status_code")]
        frame["reason"] = pd.Series(self._reasons, dtype="str")
        return frame.sort_values("id", ignore_index=True)

    def ttft_s(self) -> FloatArray:
        """Return arrival to first token `[requests]`."""
        return self.times("first_token_s") - self.times("arrival_s")

    def e2e_s(self) -> FloatArray:
        """Return arrival to last token `[requests]`."""
        return self.times("finish_s") - self.times("arrival_s")

    def tpot_s(self) -> FloatArray:
        """Return (e2e - ttft) / (output - 1) `[requests]`; NaN where only one token was asked."""
        further = self.integers("output_tokens") - 1
        spans = self.times("finish_s") - self.times("first_token_s")
        return np.where(further > 0, spans / np.maximum(further, 1), _NAN)


def _row(sequence: Sequence) -> tuple[object, ...]:
    """Return the values of `_COLUMNS`; a time that never was becomes NaN with the block."""
    request = sequence.request
    return (
        request.id,
        request.input_tokens,
        request.output_tokens,
        _index(sequence.prefill_instance),
        _index(sequence.decode_instance),
        sequence.computed_tokens,
        sequence.generated_tokens,
        sequence.retractions,
        sequence.cached_tokens,
        *_loaded_tokens(sequence),
        _status_code(sequence),
        request.arrival_s,
        sequence.prefill_start_s,
        sequence.prefill_end_s,
        sequence.transfer_start_s,
        sequence.transfer_end_s,
        sequence.first_token_s,
        sequence.finish_s,
    )


def _loaded_tokens(sequence: Sequence) -> tuple[int, int, int]:
    """Return the cached tokens that came from host memory, NVMe and the store."""
    if sequence.prefix is None:
        return 0, 0, 0
    loaded = sequence.prefix.loaded_tokens
    return loaded.get("host", 0), loaded.get("nvme", 0), loaded.get("store", 0)


def _status_code(sequence: Sequence) -> int:
    if sequence.rejected is not None:
        return STATUSES.index("rejected")
    if sequence.gave_up:
        return STATUSES.index("timed_out")
    return STATUSES.index("completed" if sequence.aborted is None else "aborted")


def _index(instance: int | None) -> int:
    """Encode a missing instance for the integer column; `frame` turns it back into a blank."""
    return -1 if instance is None else instance
