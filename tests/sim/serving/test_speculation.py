"""Tokens committed per step, against the formula, and steps per request, against exact counting."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tonnage.sim.domain import BadInputError
from tonnage.sim.serving.speculation import accept_probabilities, steps_for


def exact_steps(remaining: int, probabilities: tuple[float, ...]) -> dict[int, float]:
    """Return the distribution of the steps that commit `remaining` tokens, by enumeration."""
    done: dict[int, float] = {}
    states, steps = {0: 1.0}, 0
    while states:
        steps += 1
        following: dict[int, float] = {}
        for committed, chance in states.items():
            for tokens, one in enumerate(probabilities, start=1):
                if committed + tokens >= remaining:
                    done[steps] = done.get(steps, 0.0) + chance * one
                else:
                    total = committed + tokens
                    following[total] = following.get(total, 0.0) + chance * one
        states = following
    return done


@given(st.integers(1, 8), st.floats(0, 1))
def test_the_distribution_has_the_mean_it_was_made_for(draft: int, share: float) -> None:
    mean = 1 + share * draft
    probabilities = accept_probabilities(mean, draft)
    assert len(probabilities) == draft + 1
    assert min(probabilities) >= 0
    assert sum(probabilities) == pytest.approx(1)
    assert sum(n * p for n, p in enumerate(probabilities, 1)) == pytest.approx(mean, abs=1e-9)


def test_each_drafted_token_is_accepted_with_the_same_probability() -> None:
    """0.8 each and three drafts: (1 - 0.8^4) / (1 - 0.8) = 2.952 tokens per step."""
    expected = (0.2, 0.8 * 0.2, 0.8**2 * 0.2, 0.8**3)
    assert accept_probabilities(2.952, 3) == pytest.approx(expected)


def test_the_ends_are_certain() -> None:
    assert accept_probabilities(1, 0) == (1.0,)
    assert accept_probabilities(1, 3) == (1.0, 0.0, 0.0, 0.0)
    assert accept_probabilities(4, 3) == (0.0, 0.0, 0.0, 1.0)


@pytest.mark.parametrize(
    ("mean", "draft", "mend"),
    [(2.6, 0, "use draft_tokens 2 or more"), (0.5, 3, "one token at least")],
)
def test_a_mean_that_cannot_be_is_refused(mean: float, draft: int, mend: str) -> None:
    with pytest.raises(BadInputError, match=mend):
        accept_probabilities(mean, draft)


@pytest.mark.parametrize("remaining", [1, 2, 5, 40])
@pytest.mark.parametrize("probabilities", [accept_probabilities(2.62, 3), (0.5, 0.0, 0.5), (0, 1)])
def test_steps_are_drawn_from_the_exact_distribution(
    remaining: int, probabilities: tuple[float, ...]
) -> None:
    exact = exact_steps(remaining, probabilities)
    rng = np.random.default_rng(remaining)
    draws = 4000
    drawn = np.bincount([steps_for(remaining, probabilities, rng) for _ in range(draws)])
    assert set(np.flatnonzero(drawn)) <= set(exact)
    for steps, chance in exact.items():
        seen = drawn[steps] if steps < len(drawn) else 0
        # Five standard errors of a count, for about a hundred of them.
        tolerance = 5 * np.sqrt(draws * chance * (1 - chance)) + 1e-9
        assert abs(seen - draws * chance) <= tolerance


def test_long_outputs_take_their_length_over_the_mean() -> None:
    """The steps are a renewal process; its correction to n / mean is below one step."""
    probabilities = accept_probabilities(2.62, 3)
    rng = np.random.default_rng(1)
    mean = np.mean([steps_for(10_000, probabilities, rng) for _ in range(200)])
    assert mean == pytest.approx(10_000 / 2.62, rel=0.005)


@pytest.mark.parametrize("probabilities", [(1.0,), accept_probabilities(1.0, 3)])
def test_one_token_a_step_takes_as_many_steps_as_tokens_and_draws_nothing(
    probabilities: tuple[float, ...],
) -> None:
    rng, untouched = np.random.default_rng(0), np.random.default_rng(0)
    assert [steps_for(tokens, probabilities, rng) for tokens in (0, 1, 1000)] == [0, 1, 1000]
    assert rng.random() == untouched.random()


def test_the_same_seed_draws_the_same_steps() -> None:
    probabilities = accept_probabilities(2.62, 3)
    first, second = (
        [steps_for(tokens, probabilities, np.random.default_rng(7)) for tokens in range(100)]
        for _ in range(2)
    )
    assert first == second
