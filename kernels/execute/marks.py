"""Where the time of a step goes: processor time between marks, while it is asked for."""

from __future__ import annotations

import time


class Marks:
    """Sums the processor time that ends at each mark, by the mark's name; off until `begin`.

    A GPU runs behind its marks, so they tell nothing there.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last: float | None = None

    def begin(self) -> None:
        """Forget all and start."""
        self.seconds.clear()
        self._last = time.process_time()

    def end(self) -> dict[str, float]:
        """Stop, and return the seconds by name, most first."""
        self._last = None
        return dict(sorted(self.seconds.items(), key=lambda item: -item[1]))

    def mark(self, name: str) -> None:
        """Charge the time since the last mark."""
        if self._last is not None:
            now = time.process_time()
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
            self._last = now
