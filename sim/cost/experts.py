"""What the busiest of several expert-parallel ranks is given, under uniform routing.

All ranks wait for the one with the most work, so its load sets the time of a layer. Redundant
experts and their placement by load are not modelled, nor is routing that prefers some experts.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from scipy.special import bdtr, ndtr, pdtr

from tonnage.sim.domain import FloatArray, MoeMlp

# Grid of the excess over the mean by the root of the mean; beyond it the excess is linear in the
# root, for Poisson loads become normal ones.
_ROOTS = np.linspace(0.0, 16.0, 65)
_NODES, _REACH = 200, 12.0  # of the integral over normals: exact to the last digits


def busiest_rank_rows(mlp: MoeMlp, ep: int, tokens: float) -> float:
    """Return the expected rows of the rank with the most, of `tokens * top_k` in all.

    Every token picks k of E experts without replacement. Loads that share a fixed total differ from
    their mean as independent ones with variance ``v = (T k / ep) (E - k) / (E - 1)`` do: for
    a normal ``X_i`` with total fixed is ``Z_i - mean(Z)``, and the common part moves no maximum.
    So the excess over the mean is that of the largest of `ep` independent Poisson loads of mean v.
    """
    mean = tokens * mlp.top_k / ep
    if ep == 1:
        return mean
    variance = mean * (mlp.experts - mlp.top_k) / max(mlp.experts - 1, 1)
    most = tokens * min(mlp.top_k, mlp.experts // ep)
    return float(min(max(mean + _poisson_excess(ep, variance), 1.0), most))


def busiest_rank_experts(mlp: MoeMlp, ep: int, tokens: float) -> float:
    """Return the expected experts touched on the rank with the most, of its `experts / ep`.

    ``sum_x (1 - F(x)^ep)`` with F of ``Binomial(E / ep, 1 - (1 - k/E)^T)``: the experts of a rank
    are touched independently of each other, as they are when the rank's rows are Poisson.
    """
    local = mlp.experts // ep
    touched = 1.0 - (1.0 - mlp.top_k / mlp.experts) ** tokens
    if ep == 1:
        return float(local * touched)
    expected = np.sum(1.0 - bdtr(np.arange(local), local, touched) ** ep)
    return float(min(max(expected, 1.0), tokens * min(mlp.top_k, local)))


def _poisson_excess(ranks: int, mean: float) -> float:
    """Return the expected maximum of independent Poisson loads less their mean; rises with it."""
    excess, slope = _excess_table(ranks)
    root = mean**0.5
    if root > _ROOTS[-1]:
        return float(excess[-1] + slope * (root - _ROOTS[-1]))
    return float(np.interp(root, _ROOTS, excess))


@cache
def _excess_table(ranks: int) -> tuple[FloatArray, float]:
    """Return the excess at `_ROOTS`, and the expected maximum of as many standard normals."""
    excess = np.zeros_like(_ROOTS)
    for index, root in enumerate(_ROOTS[1:], start=1):
        mean = root * root
        loads = np.arange(max(0, int(mean - 10 * root)), int(mean + 12 * root + 30))
        excess[index] = loads[0] + np.sum(1.0 - pdtr(loads, mean) ** ranks) - mean
    return excess, _normal_maximum(ranks)


def _normal_maximum(count: int) -> float:
    """Integrate `1 - F^count - (1 - F)^count` from 0 on; nodes enough for all that is printed."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    values = _REACH * (nodes + 1) / 2
    left = 1.0 - ndtr(values) ** count - ndtr(-values) ** count
    return float(weights @ left * _REACH / 2)
