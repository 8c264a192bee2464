"""What the checks of KV pages find: one class of faults and one check at a time, over processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from time import process_time
from typing import Any

from tonnage.injection import LengthPairs, injection_study, light_deployment
from tonnage.pools import built_pools, deployment_of, times_of
from tonnage.scenarios.schema import Scenario
from tonnage.scenarios.schema_base import did_you_mean
from tonnage.sim.domain import BadInputError, Coverage, IntegritySpec, TonnageError
from tonnage.sim.engine.fleet import Deployment
from tonnage.sim.planning.sweep import Status, run_over
from tonnage.sim.planning.workers import GivenExecutor, ProcessWorkers, ThisProcess, Workers
from tonnage.sim.serving.data_faults import CONTENT, PAGE_IDENTITY, FaultClass
from tonnage.sim.traffic.build import build_load
from tonnage.sim.traffic.loads import OpenLoad
from tonnage.sim.traffic.sessions import SessionLoad
from tonnage.sim.traffic.spec import TrafficSpec

Told = Callable[[str, float], None]

AS_WRITTEN = "scenario"  # the check that the scenario's own pools have
CHECKS: Mapping[str, IntegritySpec | None] = {
    "none": IntegritySpec(),
    "batched": IntegritySpec("batched"),
    "decode-tags": IntegritySpec("batched", covers=frozenset({Coverage.DECODE})),
    "overlapped": IntegritySpec("batched", overlapped=True),
    "canary": IntegritySpec("canary"),
    "checksum": IntegritySpec(handoff_checksum=True),
    AS_WRITTEN: None,
}
DEFAULT_CHECKS = ("none", "batched", "canary", "checksum")
FAMILIES = ("page identity", "writer", "content")
_LENGTHS_READ = 500  # requests of the scenario whose lengths are drawn from


@dataclass(frozen=True, slots=True)
class StudyTask:
    """So many faults of one class, on a small copy of a scenario's pools with one check.

    `lengths`: those of the scenario's requests; without, random ones.
    """

    scenario: Scenario
    check: str
    kind: FaultClass
    count: int
    lengths: LengthPairs = ()

    @property
    def key(self) -> str:
        """Tell tasks apart that can come out differently."""
        fields = self.scenario.resolved()
        pools = dict(fields["pools"])
        if self.check != AS_WRITTEN:
            pools = {name: _without_check(pool) for name, pool in pools.items()}
        named = ("name", "description", "pools", "faults", "clients", "outages")
        rest = {name: value for name, value in fields.items() if name not in named}
        return json.dumps([rest, pools, self.check, self.kind, self.count, list(self.lengths)])


def _without_check(pool: Any) -> Any:
    if not isinstance(pool, dict):
        return pool
    return {name: value for name, value in pool.items() if name != "integrity"}


def family_of(kind: FaultClass) -> str:
    """Return what a class of faults hurts: page identity, a writer's right, or content."""
    if kind in PAGE_IDENTITY:
        return "page identity"
    return "content" if kind in CONTENT else "writer"


def run_task(task: StudyTask) -> dict[str, Any]:
    """Return the row of a task as plain values, None where the class cannot happen."""
    start_s = process_time()
    deployment, layers = _deployment(task.scenario)
    row = injection_study(
        light_deployment(deployment, CHECKS[task.check]),
        task.kind,
        task.count,
        layers=layers,
        lengths=task.lengths,
        seed=task.scenario.seed,
    )
    return {"row": None if row is None else asdict(row), "cpu_s": process_time() - start_s}


_built: dict[str, tuple[Deployment, int]] = {}  # of the last scenario: a worker has many tasks


def _deployment(scenario: Scenario) -> tuple[Deployment, int]:
    """Return what a scenario runs, and the layers of its model."""
    text = scenario.model_dump_json()
    if text not in _built:
        pools = built_pools(scenario)
        deployment = deployment_of(scenario, pools, times_of(scenario, pools))
        _built.clear()
        _built[text] = deployment, len(next(iter(pools.values())).model.layers)
    return _built[text]


# --- many of them -------------------------------------------------------------------------------


def study(
    tasks: Sequence[StudyTask], workers: int, told: Told | None = None
) -> dict[str, dict[str, Any]]:
    """Return what `run_task` returns, by the tasks' keys; tasks of one key run once.

    `workers`: spawned processes; 1 is this one. Raises what a task raised.
    """
    waiting = {task.key: task for task in tasks}
    done: dict[str, dict[str, Any]] = {}
    for key, result in results(waiting, crew_of(workers, len(waiting))):
        done[key] = dict(result)
        if told is not None:
            task = waiting[key]
            told(f"{task.kind}, check {task.check}", len(done) / len(waiting))
    return done


def crew_of(workers: int, tasks: int) -> Workers:
    """Return so many processes, no more than there are tasks; this one where that is enough."""
    if workers < 1:
        raise BadInputError(f"--workers {workers}: write 1 or more")
    count = min(workers, tasks)
    return GivenExecutor(ThisProcess(), in_flight=1) if count <= 1 else ProcessWorkers(count)


def results(
    waiting: Mapping[str, StudyTask], crew: Workers
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield each task's key and result as it ends."""
    with closing(run_over(run_task, waiting.values(), crew)) as outcomes:
        for task, outcome in outcomes:
            if outcome.status is not Status.DONE:
                raise TonnageError(f"{task.kind}, check {task.check}: {outcome.message}")
            yield task.key, outcome.result


# --- what is injected, and into which traffic ---------------------------------------------------


def lengths_of(traffic: TrafficSpec, seed: int) -> tuple[tuple[int, int], ...]:
    """Return prompts and answers, in tokens, of a scenario's first requests."""
    load = build_load(traffic, traffic.points()[0], seed)
    pairs: Iterable[Any]
    if isinstance(load, OpenLoad):
        pairs = load.requests
    elif isinstance(load, SessionLoad):
        pairs = (turn for session in load.sessions for turn in session.turns)
    else:
        pairs = load.lengths
    read = islice(pairs, _LENGTHS_READ)
    return tuple((one.input_tokens, one.output_tokens) for one in read)


def checks_named(names: str) -> tuple[str, ...]:
    """Return checks from a list with commas."""
    return _named("--checks", names, tuple(CHECKS))


def classes_named(names: str) -> tuple[FaultClass, ...]:
    """Return classes of faults from a list with commas, or all."""
    if names == "all":
        return tuple(FaultClass)
    return tuple(map(FaultClass, _named("--classes", names, [kind.value for kind in FaultClass])))


def _named(option: str, names: str, known: Sequence[str]) -> tuple[str, ...]:
    chosen = tuple(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    for name in chosen:
        if name not in known:
            raise BadInputError(f"{option} {name}: {did_you_mean(name, known)}")
    if not chosen:
        raise BadInputError(f"{option}: names nothing; choose from {', '.join(known)}")
    return chosen
