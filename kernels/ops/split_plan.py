"""How many programs share one request's context in decode attention."""

from __future__ import annotations

SPLIT_TOKENS_MIN = 256  # below, a split costs more than it gains (SGLang pull request 35801)
SPLITS_MAX = 64


def split_count(programs: int, context_tokens_max: int, resident: int) -> int:
    """Return splits such that `programs` (batch x head blocks) times splits fill the GPU once.

    `resident` is the number of programs the GPU holds at a time. More than one wave of them only
    adds partial results (vLLM pull request 50629: +22 %).
    """
    by_occupancy = resident // max(programs, 1)
    by_length = -(-context_tokens_max // SPLIT_TOKENS_MIN)
    return max(1, min(by_occupancy, by_length, SPLITS_MAX))
