"""How flows share the ports that they cross: max-min fairness, without a clock."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from typing import NamedTuple

_TIE = 1 + 1e-12  # ports whose levels differ by rounding alone are full together


class Demand(NamedTuple):
    """`flows` alike: the ports that each crosses, and how fast it could go alone.

    `crosses`: (port, bytes that pass it per byte of the flow). `most_bytes_per_s`: of one flow.
    """

    flows: int
    crosses: tuple[tuple[int, float], ...]
    most_bytes_per_s: float


def max_min_rates(
    demands: ListLike[Demand], capacity_bytes_per_s: Mapping[int, float]
) -> list[float]:
    """Return the bytes per second of one flow of each demand, in their order.

    Progressive filling: all flows speed up together; those that cross a port that is full, or have
    reached their own limit, stay as they are, the others go on. No flow can then be faster without
    slowing one that is no faster than itself (Bertsekas and Gallager, Data Networks, 6.5.2).
    """
    if len(demands) == 1:  # as most often: nobody to share with but its own kind
        return [_next_stop(demands, capacity_bytes_per_s)[0]]
    rates = [0.0] * len(demands)
    growing = list(range(len(demands)))
    left = {port: capacity_bytes_per_s[port] for demand in demands for port, _ in demand.crosses}
    while growing:
        level, stopped = _next_stop([demands[index] for index in growing], left)
        for index in (growing[place] for place in stopped):
            rates[index] = level
            for port, share in demands[index].crosses:
                left[port] -= level * share * demands[index].flows
        growing = [index for index in growing if not rates[index]]
    return rates


def _next_stop(
    growing: ListLike[Demand], left_bytes_per_s: Mapping[int, float]
) -> tuple[float, list[int]]:
    """Return the rate at which the next flows stop speeding up, and the places of those."""
    loads: dict[int, float] = {}
    for demand in growing:
        for port, share in demand.crosses:
            loads[port] = loads.get(port, 0.0) + share * demand.flows
    levels = {port: left_bytes_per_s[port] / load for port, load in loads.items()}
    own = min(demand.most_bytes_per_s for demand in growing)
    level = min(own, min(levels.values(), default=own))
    stopped = [
        place
        for place, demand in enumerate(growing)
        if demand.most_bytes_per_s <= level * _TIE
        or any(levels[port] <= level * _TIE for port, _ in demand.crosses)
    ]
    return level, stopped
