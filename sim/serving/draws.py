"""Random numbers one at a time, drawn in blocks: one alone would take microseconds."""

from __future__ import annotations

import numpy as np

_BLOCK = 1024


class Draws:
    """Uniform numbers from a generator of its own."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng
        self._numbers: list[float] = []

    def uniform(self) -> float:
        """Return a number from [0, 1)."""
        if not self._numbers:
            self._numbers = self._rng.random(_BLOCK).tolist()
        return self._numbers.pop()

    def below(self, count: int) -> int:
        """Return one of 0 ... count - 1."""
        return int(self.uniform() * count)
