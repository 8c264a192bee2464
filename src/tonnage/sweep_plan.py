"""The points of a sweep: every combination of a scenario's variants, the axes and the seeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tonnage import api
from tonnage.output import plain
from tonnage.runs import asked_for
from tonnage.scenarios.load import changed, parse_yaml
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_traffic import TrafficSection
from tonnage.sim.domain import BadInputError, InfeasibleError
from tonnage.sim.planning.sweep import Axis, Status, grid
from tonnage.sim.traffic.traces import read_trace
from tonnage.sweep_keys import Digests


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """One run of a sweep: where it stands in the grid, and the scenario it runs.

    `key` is the same for the same scenario, seed, files and version of tonnage, whatever sweep it
    is in. `refusal` says why the combination cannot exist; it is not run then.
    """

    variant: str
    over: Mapping[str, Any]
    seed: int
    scenario: Scenario
    key: str
    refusal: str = ""

    @property
    def label(self) -> str:
        """Name the point in a message, such as `pools.serve.tp=2 seed=1`."""
        parts = [self.variant] if self.variant else []
        parts += [f"{name}={value_text(value)}" for name, value in self.over.items()]
        return " ".join([*parts, f"seed={self.seed}"])


@dataclass(frozen=True, slots=True)
class PointResult:
    """What one point came to; `report` is the JSON of `simulate` without its scenario."""

    point: SweepPoint
    status: Status
    message: str
    report: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """A checked sweep; `points` are in the order of the grid, seeds innermost."""

    base: Scenario
    variants: tuple[str, ...]  # empty where the scenario has none
    axes: tuple[Axis, ...]
    points: tuple[SweepPoint, ...]


def plan_sweep(
    scenario: str | Path | Scenario,
    over: Mapping[str, Iterable[Any]],
    *,
    seeds: int | Sequence[int] | None = None,
    overrides: Sequence[str] = (),
) -> SweepPlan:
    """Make and check every point, so that a mistake is found before any work.

    A value that no combination can take is bad input. A combination that cannot exist, such as
    `ep` 8 with `tp` 1, is a point that is not run. `seeds` None is the scenario's own seed, a
    number that many from it on.
    """
    scenarios, base = _scenarios(scenario, overrides)
    axes = tuple(_axis(name, values) for name, values in over.items())
    checks, digests = _Checks({}), Digests()
    cells = [
        _cell(label, one, axes, values, checks)
        for label, one in scenarios.items()
        for values in grid(axes)
    ]
    _refuse_hopeless(axes, cells)
    points = tuple(
        _point(cell, seed, digests) for cell in cells for seed in _seeds(seeds, cell.scenario.seed)
    )
    variants = tuple(scenarios) if len(scenarios) > 1 else ()
    return SweepPlan(base, variants, axes, points)


def parse_over(texts: Sequence[str]) -> dict[str, list[Any]]:
    """Read `a.b=x,y` texts: YAML values, separated by commas outside of brackets and quotes."""
    over: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        name = name.strip()
        if not equals or not name:
            mend = "write it as field=value,value, such as pools.serve.tp=4,8"
            raise BadInputError(f"--over {text}: {mend}")
        if name in over:
            raise BadInputError(f"--over {text}: {name} is there twice; give all values at once")
        over[name] = parse_yaml(f"[{values}]", f"--over {text}")
        if not over[name]:
            raise BadInputError(f"--over {text}: no value; write them like {name}=1,2,4")
    return over


def value_text(value: Any) -> str:
    """Spell a value as YAML on one line."""
    try:
        text = yaml.safe_dump(
            value, default_flow_style=True, width=1_000_000, allow_unicode=True, sort_keys=False
        )
    except yaml.YAMLError as error:
        raise BadInputError(f"{value!r}: is not a number, text, list or mapping") from error
    return str(text).removesuffix("\n").removesuffix("\n...")


# --- scenarios and axes -------------------------------------------------------------------------


def _scenarios(
    scenario: str | Path | Scenario, overrides: Sequence[str]
) -> tuple[Mapping[str, Scenario], Scenario]:
    """Return the scenarios by variant ("" without variants), and the file's main one."""
    if isinstance(scenario, Scenario):
        own = changed(scenario, overrides) if overrides else scenario
        return {"": own}, own
    asked = asked_for(str(scenario), overrides)
    return asked.scenarios, asked.scenarios[asked.main]


def _axis(name: str, values: Iterable[Any]) -> Axis:
    first = name.partition(".")[0]
    if first == "seed":
        raise BadInputError(f"--over {name}: seeds have an option of their own: --seeds 0,1,2")
    if first == "variants":
        raise BadInputError(f"--over {name}: every variant is swept anyway; name another field")
    axis = Axis(name, tuple(plain(list(values))))
    texts = [value_text(value) for value in axis.values]
    for text in texts:
        if texts.count(text) > 1:
            raise BadInputError(f"--over {name}: {text} is there twice; remove one")
    return axis


def _seeds(seeds: int | Sequence[int] | None, first: int) -> Sequence[int]:
    if seeds is None:
        return [first]
    if isinstance(seeds, int):
        if seeds < 1:
            raise BadInputError(f"seeds: {seeds} is not at least 1")
        return range(first, first + seeds)
    if not seeds or min(seeds) < 0 or len(set(seeds)) < len(seeds):
        problem = f"{list(seeds)} are not whole numbers from 0 up, each once"
        raise BadInputError(f"seeds: {problem}; give a count such as 3, or seeds such as 0,1,2")
    return [int(seed) for seed in seeds]


# --- checks -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Cell:
    """A combination of a variant and the axes' values; where it is refused, with the variant."""

    variant: str
    over: Mapping[str, Any]
    scenario: Scenario
    refusal: str


def _cell(
    variant: str, scenario: Scenario, axes: Sequence[Axis], values: Sequence[Any], checks: _Checks
) -> _Cell:
    over = dict(zip((axis.name for axis in axes), values, strict=True))
    texts = [f"{name}={value_text(value)}" for name, value in over.items()]
    try:
        scenario = changed(scenario, texts) if texts else scenario
        checks.check(scenario)
    except BadInputError as error:
        return _Cell(variant, over, scenario, _blamed(str(error), texts))
    return _Cell(variant, over, scenario, "")


def _point(cell: _Cell, seed: int, digests: Digests) -> SweepPoint:
    scenario = cell.scenario.model_copy(update={"seed": seed})
    key = "" if cell.refusal else digests.key(scenario)
    return SweepPoint(cell.variant, cell.over, seed, scenario, key, cell.refusal)


def _blamed(message: str, texts: Sequence[str]) -> str:
    """Spell the axes' values in a message as the command line has them."""
    for text in texts:
        message = message.replace(f"--set {text}", f"--over {text}")
    return message


def _refuse_hopeless(axes: Sequence[Axis], cells: Sequence[_Cell]) -> None:
    """Raise where nothing is left of the grid, or of one value; for the plainest reason."""
    hopeless = []
    for axis in axes:
        for value in axis.values:
            # `is`: the cells hold the axis' own values, and True equals 1.
            refusals = [cell.refusal for cell in cells if cell.over[axis.name] is value]
            if all(refusals):
                hopeless.append((axis.name, value, list(dict.fromkeys(refusals))))
    if not hopeless:
        if all(cell.refusal for cell in cells):  # without an axis, or none of it runs
            raise BadInputError(cells[0].refusal)
        return
    # Of a grid where one axis is wrong, every value of the others is hopeless too.
    name, value, reasons = min(hopeless, key=lambda one: (len(one[2]), one[0] not in one[2][0]))
    at_fault = f"--over {name}={value_text(value)}"
    if len(reasons) > 1:
        both = f"{reasons[0]}; {reasons[-1]}"
        raise BadInputError(f"{at_fault}: no combination is possible: {both}")
    raise BadInputError(reasons[0] if "--over" in reasons[0] else f"{at_fault}: {reasons[0]}")


@dataclass(frozen=True, slots=True)
class _Checks:
    """What parsing does not see: models, GPUs, layouts and traces, each checked once."""

    messages: dict[str, str]

    def check(self, scenario: Scenario) -> None:
        """Raise BadInputError where a run would; what does not fit is no mistake."""
        data, (_, folder) = scenario.resolved(), scenario.origin()
        deployment = [str(folder), *(data[name] for name in ("model", "gpu", "engine", "pools"))]
        self._once(json.dumps(deployment), lambda: _check_deployment(scenario))
        if scenario.traffic.kind == "trace":
            trace = [str(folder), *(data["traffic"][name] for name in ("path", "format", "limit"))]
            self._once(json.dumps(trace), lambda: _check_trace(scenario))

    def _once(self, what: str, check: Callable[[], None]) -> None:
        if what not in self.messages:
            try:
                check()
            except BadInputError as error:
                self.messages[what] = str(error)
            else:
                self.messages[what] = ""
        if self.messages[what]:
            raise BadInputError(self.messages[what])


def _check_deployment(scenario: Scenario) -> None:
    try:
        # Its own traffic would only add the reading of a trace.
        api.memory(scenario.model_copy(update={"traffic": TrafficSection()}))
    except InfeasibleError:
        return


def _check_trace(scenario: Scenario) -> None:
    source = scenario.traffic_spec().trace
    if source is not None:
        for _ in read_trace(source):
            pass
