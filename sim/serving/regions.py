"""Which region a request comes in at, when instances stand in several."""

from __future__ import annotations

import numpy as np

from tonnage.sim.serving.draws import Draws
from tonnage.sim.serving.hash_ring import HashRing


class Regions:
    """Regions that requests come in at by chance, or by their key.

    Without a key a session starts anywhere, and before each of its further requests it hops with
    `hop_probability` to another region, where it then stays; requests of no session come in
    anywhere. With a key the region is that of the key, always.
    """

    def __init__(self, regions: int, hop_probability: float, rng: np.random.Generator) -> None:
        """Start with no sessions."""
        self._regions = regions
        self._hop_probability = hop_probability
        self._draws = Draws(rng)
        self._ring = HashRing(range(regions))
        self._region_of: dict[int, int] = {}

    def enter(self, session: int | None, key: int | None) -> int:
        """Return the region of a request."""
        if key is not None:
            return self._ring.preferred(key)
        if session is None:
            return self._draws.below(self._regions)
        region = self._region_of.get(session)
        if region is None:
            region = self._draws.below(self._regions)
        elif self._draws.uniform() < self._hop_probability:
            region = (region + 1 + self._draws.below(self._regions - 1)) % self._regions
        self._region_of[session] = region
        return region
