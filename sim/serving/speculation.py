"""How many tokens a speculating request commits per step, and how many steps it therefore takes."""

from __future__ import annotations

from functools import lru_cache
from math import ceil

import numpy as np

from tonnage.sim.domain import BadInputError, FloatArray


def accept_probabilities(accept_length: float, draft_tokens: int) -> tuple[float, ...]:
    """Return the probabilities of committing 1 ... draft_tokens + 1 tokens with that mean.

    Each drafted token is accepted with the same probability p if those before it were, and one
    token comes from the target itself: ``E = (1 - p^(k+1)) / (1 - p)``, solved for p. Source:
    Leviathan, Kalman, Matias, Fast inference from transformers via speculative decoding (2023),
    equation 1. Raises BadInputError when no p has that mean.
    """
    most = draft_tokens + 1
    if accept_length < 1:
        problem = f"{accept_length:g} is below 1, but every step commits one token at least"
        raise BadInputError(f"accept_length: {problem}")
    if accept_length > most:
        raise BadInputError(
            f"accept_length: {accept_length:g} is more than the {most} that {draft_tokens} draft "
            f"tokens can commit; use draft_tokens {ceil(accept_length) - 1} or more"
        )
    exponents = np.arange(most)
    if accept_length == most:
        probability = 1.0
    else:
        from scipy.optimize import brentq  # it takes longer than all else to import

        # The sum of powers is the formula above without its pole at p = 1.
        probability = brentq(lambda p: float(np.sum(p**exponents)) - accept_length, 0.0, 1.0)
    reached = probability ** exponents.astype(np.float64)  # P(at least 1, 2, ... tokens)
    return tuple((reached - np.append(reached[1:], 0.0)).tolist())


def steps_for(
    remaining_output_tokens: int, probabilities: tuple[float, ...], rng: np.random.Generator
) -> int:
    """Draw the number of steps until so many tokens are committed; the last may overshoot.

    `probabilities`: of committing 1, 2, ... tokens in a step, independently of other steps. Where
    every step commits one token, nothing is drawn.
    """
    if probabilities[0] == 1.0 or remaining_output_tokens <= 0:
        return max(remaining_output_tokens, 0)
    bounds, mean = _table(probabilities)
    steps, left = 0, remaining_output_tokens
    while True:
        expected = left / mean
        drawn = rng.random(int(expected + 2 * expected**0.5) + 8)
        totals = (1 + bounds.searchsorted(drawn, side="right")).cumsum()
        if totals[-1] >= left:
            return steps + int(totals.searchsorted(left)) + 1
        steps += len(totals)
        left -= int(totals[-1])


@lru_cache(maxsize=64)
def _table(probabilities: tuple[float, ...]) -> tuple[FloatArray, float]:
    """Return the cumulative probabilities but the last, and the mean."""
    mean = sum(tokens * one for tokens, one in enumerate(probabilities, start=1))
    return np.cumsum(probabilities)[:-1], mean
