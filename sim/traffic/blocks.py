"""What a prefix cache that forgets nothing would hit, and how long blocks are of use to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from tonnage.sim.domain import FloatArray, IntArray, Request

_NO_PARENT = -1
_NO_ROWS = np.zeros(0, dtype=np.int64)


class Reuse(NamedTuple):
    """One prompt against all before it: its blocks, and the leading ones that were there."""

    blocks: int
    hit_blocks: int
    hit_tokens: int


def prompt_blocks(request: Request) -> int:
    """Return how many of a request's blocks hold tokens of its prompt."""
    if not request.block_ids:
        return 0
    return min(len(request.block_ids), -(-request.input_tokens // request.block_tokens))


class InfiniteCache:
    """A prefix cache without end: a block is hit when it and all before it were there.

    `hit_tokens_if_kept[i]` counts the tokens that would be hit if blocks stayed for `kept_s[i]`
    seconds after their last use. `odd_blocks` counts those whose id was there after another
    beginning: they are no hits, and a trace that keeps to the meaning of ids has none.
    """

    def __init__(self, kept_s: Sequence[float] = ()) -> None:
        self.hit_tokens_if_kept = np.zeros(len(kept_s), dtype=np.int64)
        self.odd_blocks = 0
        self._kept_s = np.asarray(kept_s)
        self._nodes: dict[int, int] = {}  # id of a block -> its row in the columns
        self._parents = np.zeros(0, dtype=np.int64)
        self._tokens = np.zeros(0, dtype=np.int64)
        self._first_s = np.zeros(0)
        self._last_s = np.zeros(0)
        self._turn_before: dict[int | None, tuple[tuple[int, ...], IntArray]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def use(self, request: Request) -> Reuse:
        """Look a prompt up at its arrival; keep its blocks, and those of its output."""
        blocks = prompt_blocks(request)
        path = self._known_path(request)
        hits = min(len(path), blocks)
        if hits and len(self._kept_s):
            self._count_ages(path[:hits], request)
        self._last_s[path] = request.arrival_s
        new = self._append(request, path)
        if request.session is not None:
            self._turn_before[request.session] = (
                request.block_ids,
                np.concatenate([path, new]),
            )
        tokens = min(hits * request.block_tokens, request.input_tokens)
        return Reuse(blocks, hits, tokens)

    def working_set_tokens(self, times_s: FloatArray) -> tuple[IntArray, IntArray]:
        """Return the tokens of distinct blocks by then, and of those that will still be used.

        `times_s` `[times]`, both results `[times]`. A block is in use from its first request to its
        last one, instants included.
        """
        used = slice(0, len(self))
        tokens = self._tokens[used]
        begun = _tokens_until(self._first_s[used], tokens, times_s, "right")
        ended = _tokens_until(self._last_s[used], tokens, times_s, "left")
        return begun, begun - ended

    def _known_path(self, request: Request) -> IntArray:
        """Return the rows of the leading ids that were there, each behind the one before it."""
        start = self._path_of_turn_before(request)
        rows = list(map(self._nodes.get, request.block_ids[len(start) :]))
        if None in rows:
            rows = rows[: rows.index(None)]
        further = np.array(rows, dtype=np.int64)
        parent = start[-1] if len(start) else _NO_PARENT
        behind = self._parents[further] == np.concatenate([[parent], further])[:-1]
        if not behind.all():
            further = further[: int(np.argmin(behind))]
        return np.concatenate([start, further])

    def _path_of_turn_before(self, request: Request) -> IntArray:
        """Return the rows of the turn before, if this one begins with all of it: it mostly does."""
        ids, path = self._turn_before.get(request.session, ((), _NO_ROWS))
        known = len(path)
        return path if known and request.block_ids[:known] == ids[:known] else _NO_ROWS

    def _count_ages(self, path: IntArray, request: Request) -> None:
        # A block is used no later than the one before it: ages rise along the path.
        ages_s = request.arrival_s - self._last_s[path]
        kept = np.searchsorted(ages_s, self._kept_s, side="right")
        self.hit_tokens_if_kept += np.minimum(kept * request.block_tokens, request.input_tokens)

    def _append(self, request: Request, path: IntArray) -> IntArray:
        """Add the blocks behind a known path; return their rows."""
        ids, size, nodes = request.block_ids, request.block_tokens, self._nodes
        first_row = len(nodes)
        parent = int(path[-1]) if len(path) else _NO_PARENT
        for depth in range(len(path), len(ids)):
            if ids[depth] in nodes:  # behind another beginning; so is all that follows
                self.odd_blocks += len(ids) - depth
                break
            nodes[ids[depth]] = len(nodes)
        rows = np.arange(first_row, len(nodes))
        if not len(rows):
            return _NO_ROWS
        self._make_room(len(nodes))
        self._parents[rows] = np.concatenate([[parent], rows[:-1]])
        self._tokens[rows] = size
        if len(path) + len(rows) == len(ids) == prompt_blocks(request):  # the prompt ends in it
            self._tokens[rows[-1]] = min(size, request.input_tokens - size * (len(ids) - 1))
        self._first_s[rows] = self._last_s[rows] = request.arrival_s
        return rows

    def _make_room(self, rows: int) -> None:
        if rows > len(self._parents):
            size = max(1024, 2 * rows)
            self._parents.resize(size, refcheck=False)
            self._tokens.resize(size, refcheck=False)
            self._first_s.resize(size, refcheck=False)
            self._last_s.resize(size, refcheck=False)


def _tokens_until(
    events_s: FloatArray, tokens: IntArray, times_s: FloatArray, side: Literal["left", "right"]
) -> IntArray:
    order = np.argsort(events_s, kind="stable")
    passed = np.concatenate([[0], np.cumsum(tokens[order])])
    counted: IntArray = passed[np.searchsorted(events_s[order], times_s, side=side)]
    return counted
