"""What a check is made of: measured rows where there are any, else estimates with intervals."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pandas as pd
import pytest

from tonnage.kernels.cache_specs import TAG_CHECK
from tonnage.scenarios.catalogue import load_gpu
from tonnage.sim.cost.check_prices import (
    ENTRY_BYTES,
    CheckRows,
    Price,
    TagRows,
    check_prices,
)

H200 = load_gpu("h200-sxm")


def test_an_entry_moves_what_the_kernel_says_it_moves() -> None:
    """The rest of the kernel's bytes is the count and the two results of a request."""
    one, two = ({"requests": 8, "pages": pages, "ragged": 0} for pages in (128, 256))
    assert TAG_CHECK.bytes(two) - TAG_CHECK.bytes(one) == 8 * 128 * ENTRY_BYTES
    assert TAG_CHECK.bytes({"requests": 8, "pages": 0, "ragged": 0}) == 8 * 12


@pytest.mark.parametrize("gpu", ["h200-sxm", "b200-sxm", "cpu"])
@pytest.mark.parametrize("ways", [1, 8])
def test_every_price_lies_within_its_interval(gpu: str, ways: int) -> None:
    prices = check_prices(load_gpu(gpu), ways=ways)
    for one in fields(prices):
        price = getattr(prices, one.name)
        if isinstance(price, Price):
            assert 0 <= price.low_s <= price.seconds <= price.high_s, one.name
    for entries, row in ((1, 1), (8192, 8192), (1_000_000, 64)):
        price = prices.kernel(entries, row)
        assert 0 < price.low_s < price.seconds < price.high_s


def test_an_end_is_every_price_at_that_end() -> None:
    prices = check_prices(H200, ways=4)
    for high in (False, True):
        ended = prices.end(high=high)
        for one in fields(prices):
            before, after = getattr(prices, one.name), getattr(ended, one.name)
            if isinstance(before, Price):
                assert after.seconds == (before.high_s if high else before.low_s)
        whole = prices.kernel(5000, 600)
        assert ended.kernel(5000, 600).seconds == (whole.high_s if high else whole.low_s)


def test_the_kernel_on_a_gpu_is_a_start_two_reads_a_block_and_the_bytes() -> None:
    """2,000 pages in one row, in blocks of 1,024; 44 bytes an entry at 60 % of 4.8 TB/s."""
    price = check_prices(H200).kernel(2000, 2000)
    expected_s = 2.5e-6 + 2 * 0.6e-6 * 2000 / 1024 + 2000 * 44 / (0.6 * 4.8e12)
    assert price.seconds == pytest.approx(expected_s)
    assert price.source == "datasheet"
    # a program walks 4,096 pages of a row at most; others walk the rest beside it
    wide = check_prices(H200).kernel(20_000, 20_000).seconds
    assert wide == pytest.approx(2.5e-6 + 8 * 0.6e-6 + 20_000 * 44 / (0.6 * 4.8e12))


def test_measured_rows_take_the_place_of_the_form_and_go_on_at_their_last_slope() -> None:
    rows = pd.DataFrame(
        {"requests": [1, 8, 8], "pages": [128, 128, 4096], "seconds": [4e-6, 5e-6, 10e-6]}
    )
    prices = check_prices(H200, CheckRows.from_tables({"page_tags": rows}))
    at_a_row = prices.kernel(8 * 128, 128)
    assert at_a_row.seconds == pytest.approx(5e-6)
    assert (at_a_row.source, at_a_row.inside) == ("measured", True)
    assert at_a_row.high_s == pytest.approx(6.25e-6)
    assert prices.kernel(1, 1).seconds == pytest.approx(4e-6)
    slope = np.log(2) / np.log(32)
    beyond = prices.kernel(8 * 4096 * 32, 4096)
    assert beyond.seconds == pytest.approx(10e-6 * 32**slope)
    assert not beyond.inside
    assert prices.zeroing_kernels(10_000) == 0  # the rows hold those kernels
    assert check_prices(H200).zeroing_kernels(10_000) == 2
    assert prices.end(high=True).kernel(1, 1).seconds == pytest.approx(5e-6)


def test_one_measured_row_grows_with_its_entries() -> None:
    rows = TagRows.of(pd.DataFrame({"requests": [8], "pages": [128], "seconds": [4e-6]}))
    assert rows.seconds(np.array([1024.0, 2048.0])) == pytest.approx([4e-6, 8e-6])


def test_measured_launches_are_taken() -> None:
    launch = pd.DataFrame({"in_graph": [False, False, True], "seconds": [6e-6, 8e-6, 1.5e-6]})
    prices = check_prices(H200, CheckRows.from_tables({"launch": launch}))
    assert prices.launch.seconds == pytest.approx(7e-6)
    assert prices.node.seconds == pytest.approx(1.5e-6)
    assert (prices.launch.source, prices.node.source) == ("measured", "measured")
    on_cpu = CheckRows.from_tables({"launch": launch.iloc[:1]})
    assert on_cpu.graph_launch_s is None


def test_nothing_is_launched_copied_or_agreed_on_a_cpu() -> None:
    prices = check_prices(load_gpu("cpu"), ways=1)
    for one in (prices.node, prices.launch, prices.readback, prices.agree_eager):
        assert one.seconds == 0
    measured = {64: 148e-6, 32_768: 529e-6}  # docs/kernels.md, one thread
    for entries, seconds in measured.items():
        assert prices.kernel(entries, 64).seconds == pytest.approx(seconds, rel=0.01)
