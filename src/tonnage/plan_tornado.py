"""What a plan's cost hangs on: each input lower and higher, and the fleets screened again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tonnage.plan_search import Search, Table, screened_tables
from tonnage.plan_space import Space
from tonnage.sim.cost.operator_times import OperatorTime
from tonnage.sim.domain import PromptChunk, Step
from tonnage.sim.planning.candidates import PoolOption
from tonnage.sim.planning.screen import Screened, screen
from tonnage.sim.planning.search import price_order
from tonnage.sim.planning.workload import Workload

_SPREAD = 0.2  # of what has no interval of its own
_HITS = 0.1  # of the tokens that are found in the cache


@dataclass(frozen=True, slots=True)
class Cost:
    """The cheapest fleet that the closed form finds good; None where there is none.

    `usd_per_million_output_tokens` is that of the day, where the scenario says how full it is.
    """

    value: str  # of the input
    fleet: str | None
    usd_per_hour: float | None
    usd_per_million_output_tokens: float | None


@dataclass(frozen=True, slots=True)
class Swing:
    """One input, lower and higher than in the plan, and what that makes of its cost."""

    name: str
    base: Cost
    low: Cost
    high: Cost

    @property
    def width(self) -> float:
        """How far apart the costs of a token are; more than any where a side has no fleet."""
        ends = [one.usd_per_million_output_tokens for one in (self.low, self.high)]
        first, second = ends
        return float("inf") if first is None or second is None else abs(second - first)


def good_enough(search: Search) -> float:
    """Return the largest share of a limit that counts as good: that of the plan where it is more.

    The plan was simulated, so the closed form is off where it puts the plan beyond a limit.
    """
    assert search.best is not None
    return max(1.0, search.best.screened_worst)


def tornado(search: Search) -> Iterator[Swing]:
    """Yield what every input does to the cost, the one that does most first."""
    yield from sorted(_swings(search), key=lambda one: -one.width)


def _swings(search: Search) -> Iterator[Swing]:
    found = [table.screened for table in search.tables]
    low, high = 1 - _SPREAD, 1 + _SPREAD

    def base(value: str) -> Cost:
        return _cheapest(search, search.tables, found, value)

    def ends(
        name: str, value: str, each: Callable[[float], Cost], factors: Sequence[float]
    ) -> Swing:
        return Swing(name, base(value), each(factors[0]), each(factors[1]))

    yield ends(
        "price of a GPU", "as given", lambda one: _priced(base("as given"), one), (low, high)
    )
    yield _utilised(search, base(""))
    yield ends("traffic", "as planned", lambda one: _loaded(search, one), (low, high))
    yield ends("lengths", "as planned", lambda one: _longer(search, one), (low, high))
    if search.space.workload.cached_tokens.any():
        hits = search.space.workload
        share = float(hits.mean(hits.cached_tokens) / hits.mean(hits.input_tokens))
        # None is found that is not repeated: the share can only fall.
        yield ends(
            "cache hits",
            f"{share:.1%}",
            lambda one: _hit(search, share, one),
            (1 - _HITS, 1 - _HITS / 2),
        )
    yield _timed(search, base("as predicted"))


# --- inputs -------------------------------------------------------------------------------------


def _priced(base: Cost, factor: float) -> Cost:
    """Every GPU at another price: the cheapest fleet stays the cheapest."""
    return _times(base, f"{factor - 1:+.0%}", factor, factor)


def _utilised(search: Search, base: Cost) -> Swing:
    """Over a day: tokens of the mean load pay for the GPUs of its peak."""
    mean = search.scenario.price.mean_load()
    share = 1.0 if mean is None else mean
    low, high = share * (1 - _SPREAD), min(share * (1 + _SPREAD), 1.0)
    costs = [_times(base, f"{one:.0%}", 1.0, share / one) for one in (low, high)]
    given = "" if mean is not None else " (none is given)"
    return Swing("utilisation", replace(base, value=f"{share:.0%}{given}"), *costs)


def _loaded(search: Search, factor: float) -> Cost:
    found = _screened(search, lambda load: load.scaled(factor))
    return _cheapest(search, search.tables, found, f"{factor - 1:+.0%}")


def _hit(search: Search, share: float, factor: float) -> Cost:
    found = _screened(search, lambda load: load.with_hits(factor))
    return _cheapest(search, search.tables, found, f"{share * factor:.1%}")


def _longer(search: Search, factor: float) -> Cost:
    """Prompts and answers by a factor; steps are timed again, as contexts are others."""
    space = Space(search.scenario, search.space.workload.lengthened(factor))
    tables = screened_tables(space, search.scenario, lambda _text, _share: None)
    return _cheapest(search, tables, [one.screened for one in tables], f"{factor - 1:+.0%}")


def _timed(search: Search, base: Cost) -> Swing:
    """Every step at the bounds of its interval, as wide as those of the plan's own steps."""
    prompts, decodes = _bounds(search, prompts=True), _bounds(search, prompts=False)
    costs = []
    for end in (0, 1):
        found = [
            _rescreened(search, table, table.offer.workload, (prompts[end], decodes[end]))
            for table in search.tables
        ]
        text = f"prompts {prompts[end] - 1:+.0%}, tokens {decodes[end] - 1:+.0%}"
        costs.append(_cheapest(search, search.tables, found, text))
    return Swing("step times", base, *costs)


# --- screening again ----------------------------------------------------------------------------


def _screened(search: Search, change: Callable[[Workload], Workload]) -> list[Screened]:
    return [
        _rescreened(search, table, change(table.offer.workload), (1.0, 1.0))
        for table in search.tables
    ]


def _rescreened(
    search: Search, table: Table, workload: Workload, slower: tuple[float, float]
) -> Screened:
    offer = replace(
        table.offer,
        workload=workload,
        firsts=[_slower(one, *slower) for one in table.firsts],
        seconds=[_slower(one, *slower) for one in table.seconds],
    )
    return screen(offer, table.screened.fleets, search.scenario.objectives())


def _slower(option: PoolOption, prompts: float, decodes: float) -> PoolOption:
    """Return a configuration whose steps take so many times as long."""
    if (prompts, decodes) == (1.0, 1.0):
        return option
    prompt, decode = option.prompt, option.decode
    if prompt is not None:
        prompt = replace(
            prompt,
            alone_s=prompt.alone_s * prompts,
            busy_s=prompt.busy_s * prompts,
            past_s=prompt.past_s * prompts,
        )
    if decode is not None:
        decode = replace(decode, step_s=decode.step_s * decodes)
    return replace(option, prompt=prompt, decode=decode)


def _cheapest(
    search: Search, tables: Sequence[Table], found: Sequence[Screened], value: str
) -> Cost:
    limit = good_enough(search)
    mean = search.scenario.price.mean_load() or 1.0
    for index, row in price_order(found):
        one = found[index]
        if float(one.worst[row]) <= limit:
            usd = float(one.fleets.usd_per_hour[row])
            tokens = float(one.usd_per_million_output_tokens[row]) / mean
            return Cost(value, tables[index].fleet(row).text, usd, tokens)
    return Cost(value, None, None, None)


def _times(base: Cost, value: str, hour: float, token: float) -> Cost:
    """Return a cost with other prices and the same fleet."""
    if base.usd_per_hour is None or base.usd_per_million_output_tokens is None:
        return replace(base, value=value)
    tokens = base.usd_per_million_output_tokens * token
    return Cost(value, base.fleet, base.usd_per_hour * hour, tokens)


# --- intervals ----------------------------------------------------------------------------------


def _bounds(search: Search, *, prompts: bool) -> tuple[float, float]:
    """Return the bounds of a step of the plan, as shares of it: operators off all to one side."""
    assert search.best is not None
    index, row = search.best.key
    table = search.tables[index]
    config, _ = search.best.fleet.pools[0 if prompts else -1]
    if prompts:
        times = table.firsts[int(table.screened.fleets.first[row])].prompt
        assert times is not None
        chunk = PromptChunk(times.chunk_tokens, 0)
        step = Step(np.zeros(0, dtype=np.int64), 0.0, (chunk,))
    else:
        requests = max(1, round(float(table.screened.batch[row])))
        context = round(search.space.workload.decode_context_tokens)
        step = Step(np.full(requests, context, dtype=np.int64), requests * context, ())
    operators = search.space.times(table.setting, config, step)
    return _share(operators, "low_s"), _share(operators, "high_s")


def _share(times: Sequence[OperatorTime], name: str) -> float:
    whole_s = sum(one.seconds for one in times)
    return float(sum(getattr(one, name) for one in times) / whole_s) if whole_s else 1.0
