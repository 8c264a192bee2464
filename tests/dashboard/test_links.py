"""A scenario in an address: there and back, and nothing that should not be unpacked."""

from __future__ import annotations

import base64
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.dashboard.links import LONGEST_LINK, decoded, encoded
from tonnage.dashboard.reading import MOST_TEXT_BYTES
from tonnage.scenarios.catalogue import scenario_names, scenario_path
from tonnage.sim.domain import BadInputError


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=300))
def test_a_text_comes_back(text: str) -> None:
    packed = encoded(text)
    assert packed.isascii()
    assert not set(packed) & set("+/=&?#% ")
    assert decoded(packed) == text


@pytest.mark.parametrize("name", scenario_names())
def test_every_shipped_scenario_fits_an_address(name: str) -> None:
    text = scenario_path(name).read_text()
    assert len(encoded(text)) < LONGEST_LINK / 2
    assert decoded(encoded(text)) == text


@pytest.mark.parametrize("change", [lambda one: one[:-8], lambda one: "AAAA" + one, lambda _: "%"])
def test_a_damaged_link_is_told(change: object) -> None:
    assert callable(change)
    with pytest.raises(BadInputError, match="damaged or cut"):
        decoded(change(encoded("model: kimi-k2.6")))


def test_a_small_link_does_not_unpack_into_a_large_text() -> None:
    bomb = base64.urlsafe_b64encode(zlib.compress(bytes(50 * MOST_TEXT_BYTES), 9)).decode()
    with pytest.raises(BadInputError, match=r"longer than|more than a scenario"):
        decoded(bomb)
    small = base64.urlsafe_b64encode(zlib.compress(bytes(MOST_TEXT_BYTES + 5), 9)).decode()
    assert len(small) < LONGEST_LINK
    with pytest.raises(BadInputError, match="more than a scenario"):
        decoded(small.rstrip("="))
