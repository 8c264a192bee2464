"""Published serving results, 2,469 rows: read, laid out as their names say, nearly all as runs."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tonnage.scenarios.serving_rows import ServingRow, read_serving_rows
from tonnage.scenarios.serving_runs import Refusal, Run, run_of

ROOT = Path(__file__).parents[2]
PLACES = [folder / "shared" / "truth" / "serving_latency.csv" for folder in (ROOT.parent, ROOT)]
FILE = next((path for path in PLACES if path.is_file()), None)

pytestmark = pytest.mark.skipif(FILE is None, reason="shared/truth is not beside the checkout")
_NAMED = re.compile(r"_tp(\d+)(?:_\d)?_ep(\d+|none)")


@pytest.fixture(scope="module")
def rows() -> list[ServingRow]:
    assert FILE is not None
    return read_serving_rows(FILE)


def test_every_row_is_read(rows: list[ServingRow]) -> None:
    assert len(rows) == 2469
    assert Counter(row.serve is None for row in rows) == {False: 1691, True: 778}


def test_layouts_are_those_of_the_names(rows: list[ServingRow]) -> None:
    """A name says `tp8_ep8`; its columns may say tp 64. Names without ep say tp alone."""
    checked = 0
    for row in rows:
        named = _NAMED.search(row.id)
        if row.serve is None or named is None:
            continue
        layout = row.serve.layout.layout()
        tp = layout.attention_tp if row.serve.layout.attention_dp is None else layout.tp
        assert tp == int(named[1]), row.id
        if named[2] != "none":
            assert layout.ep == int(named[2]), row.id
        checked += 1
    assert checked > 1000


def test_batch_sizes_divide_by_the_stated_ranks(rows: list[ServingRow]) -> None:
    for row in rows:
        if row.serve is None or row.serve.batch_size is None or row.concurrency is None:
            continue
        ranks = row.serve.layout.attention_dp
        if ranks is not None and ranks > 1:
            assert abs(row.serve.batch_size - row.concurrency / ranks) < 1, row.id


def test_nearly_all_rows_are_runs(rows: list[ServingRow]) -> None:
    found = [run_of(row) for row in rows]
    reasons = Counter(one.reason for one in found if isinstance(one, Refusal))
    runs = [one for one in found if isinstance(one, Run)]
    assert len(runs) / len(rows) > 0.95
    assert set(reasons) == {
        "the numbers of workers are not stated, and no published recipe fits",
        "concurrency is not stated",
    }
    assert len({one.setup for one in runs}) < 500


def test_recipes_agree_with_the_rows_that_state_workers(rows: list[ServingRow]) -> None:
    """Where a row states its workers, the recipes of its run hold that layout in most cases."""
    known, agree = 0, 0
    for row in rows:
        if row.prefill is None or row.decode is None or row.prefill.workers is None:
            continue
        blank = _without_workers(row)
        guessed, stated = run_of(blank), run_of(row)
        if not isinstance(guessed, Run) or not isinstance(stated, Run):
            continue
        known += 1
        decodes = [
            (run.setup.pools[1].instances, run.setup.pools[1].layout.tp)
            for run in (guessed, stated)
        ]
        agree += decodes[0] == decodes[1]
    assert known > 60
    assert agree / known > 0.8


def _without_workers(row: ServingRow) -> ServingRow:
    assert row.prefill is not None
    assert row.decode is not None
    pools = []
    for pool in (row.prefill, row.decode):
        layout = pool.layout.layout()
        plain = replace(pool.layout, tp=layout.tp, attention_dp=1, moe_tp=layout.tp, moe_ep=1)
        pools.append(replace(pool, workers=None, layout=plain))
    return replace(row, prefill=pools[0], decode=pools[1])
