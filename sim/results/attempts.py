"""Every attempt of every request, as its client saw it, and what went wrong meanwhile."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from tonnage.sim.domain import FloatArray

# `refused`: by a breaker, so that it was never sent.
OUTCOMES = ("served", "aborted", "rejected", "timed_out", "refused")
_NAN = float("nan")


class AttemptLog:
    """Attempts in the order in which they were made."""

    def __init__(self) -> None:
        self._request = array("q")
        self._number = array("q")
        self._start_s = array("d")
        self._end_s = array("d")
        self._outcome = array("b")

    def __len__(self) -> int:
        return len(self._request)

    def begin(self, request: int, number: int, now_s: float) -> int:
        """Note an attempt and return its row."""
        self._request.append(request)
        self._number.append(number)
        self._start_s.append(now_s)
        self._end_s.append(_NAN)
        self._outcome.append(-1)
        return len(self._request) - 1

    def end(self, row: int, now_s: float, outcome: str) -> None:
        """Note how an attempt ended for its client, one of OUTCOMES."""
        self._end_s[row] = now_s
        self._outcome[row] = OUTCOMES.index(outcome)

    def counts(self) -> dict[str, int]:
        """Return how many attempts there were, and how many ended which way."""
        outcomes = np.array(self._outcome)
        ended = {name: int((outcomes == code).sum()) for code, name in enumerate(OUTCOMES)}
        return {"made": len(self), **ended}

    def start_s(self) -> FloatArray:
        """Return when attempts were made `[attempts]`, those that a breaker refused left out."""
        sent = np.array(self._outcome) != OUTCOMES.index("refused")
        starts: FloatArray = np.array(self._start_s)[sent]
        return starts

    def frame(self) -> pd.DataFrame:
        """Return one row per attempt; the end is blank where the run ended first."""
        codes = np.array(self._outcome)
        return pd.DataFrame(
            {
                "id": np.array(self._request, dtype=np.int64),
                "attempt": np.array(self._number, dtype=np.int64),
                "start_s": np.array(self._start_s, dtype=np.float64),
                "end_s": np.array(self._end_s, dtype=np.float64),
                "outcome": np.array([*OUTCOMES, ""])[codes],
            }
        )


@dataclass(frozen=True, slots=True)
class Crash:
    """One instance that died, when it was back (None: not at all), and the requests it had."""

    time_s: float
    role: str
    instance: int
    back_s: float | None
    requests: int


@dataclass(slots=True)
class OutageLog:
    """What went wrong: crashes, spans of slow links, aborts that were lost, breakers that opened.

    `moved`: times that a request went on elsewhere after a crash.
    """

    crashes: list[Crash] = field(default_factory=list)
    slow_links_s: list[tuple[float, float]] = field(default_factory=list)
    lost_aborts: int = 0
    moved: int = 0
    breakers_opened: int = 0

    def figures(self) -> dict[str, int]:
        """Return the JSON object of a point's `outages`."""
        return {
            "crashes": len(self.crashes),
            "requests_lost": sum(crash.requests for crash in self.crashes),
            "requests_moved": self.moved,
            "lost_aborts": self.lost_aborts,
            "breakers_opened": self.breakers_opened,
        }
