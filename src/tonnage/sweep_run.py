"""The `sweep` verb as a function: a grid of scenarios over any executor, kept point by point."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd

from tonnage import api
from tonnage.output import make_folder, plain, whole_file
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import BadInputError
from tonnage.sim.planning.journal import Journal
from tonnage.sim.planning.sweep import Outcome, Status, run_over
from tonnage.sim.planning.workers import (
    GivenExecutor,
    ProcessWorkers,
    ThisProcess,
    Workers,
    cpu_count,
)
from tonnage.sweep_frame import frame_of
from tonnage.sweep_plan import PointResult, SweepPlan, SweepPoint, plan_sweep

JOURNAL = "points.jsonl"
TABLES = ("sweep.csv", "sweep.parquet")


OnResult = Callable[[PointResult], None]


def sweep(
    scenario: str | Path | Scenario,
    over: Mapping[str, Iterable[Any]] | None = None,
    *,
    seeds: int | Sequence[int] | None = None,
    overrides: Sequence[str] = (),
    executor: Executor | None = None,
    workers: int | None = None,
    folder: Path | None = None,
    progress: api.Progress | None = None,
    on_result: OnResult | None = None,
) -> pd.DataFrame:
    """Simulate every combination of the values in `over`; one row per point, seed and load.

    `over` maps dotted fields to values, `overrides` are `a.b=c` texts for all points, `seeds` is a
    number of seeds or the seeds themselves. Runs on `executor` if given, any that is of
    `concurrent.futures` (threads, `dask.distributed.Client.get_executor()`), else on so many
    spawned `workers` (by default one per processor; 1 is this process). With a `folder` finished
    points are kept in it, those already there are not run again, and sweep.csv and sweep.parquet
    are written. `on_result` is called with each point that has been run, as it ends.

    The column `status` says `done`, `infeasible` or `failed`, `message` why. Raises BadInputError
    before any work for a field or value that no point can have.
    """
    plan = plan_sweep(scenario, over or {}, seeds=seeds, overrides=overrides)
    journal = None if folder is None else open_folder(folder)
    crew = workers_for(plan, workers) if executor is None else GivenExecutor(executor)
    frame = frame_of(plan, run_sweep(plan, crew, journal, progress, on_result))
    if folder is not None:
        write_tables(folder, frame)
    return frame


def workers_for(plan: SweepPlan, count: int | None) -> Workers:
    """Return so many processes, no more than there are points; this process where one is enough."""
    count = min(cpu_count() if count is None else count, len(plan.points))
    return GivenExecutor(ThisProcess(), in_flight=1) if count == 1 else ProcessWorkers(count)


# --- the run ------------------------------------------------------------------------------------


def run_sweep(
    plan: SweepPlan,
    workers: Workers,
    journal: Journal | None = None,
    progress: api.Progress | None = None,
    on_result: OnResult | None = None,
) -> list[PointResult]:
    """Run the points that the journal does not hold; return all, in the order of the grid.

    A point is in the journal before `on_result` and `progress` hear of it, so what they raise
    loses nothing. A point that failed before is tried again.
    """
    results = _known(plan, journal)
    runnable = {point.key: point for point in plan.points if not point.refusal}
    failed = 0

    def tell() -> None:
        if progress is not None:
            text = f"{len(results)} of {len(runnable)} points"
            share = len(results) / len(runnable)
            progress(f"{text}, {failed} failed" if failed else text, share)

    tell()
    waiting = [point for key, point in runnable.items() if key not in results]
    with closing(run_over(simulate_point, waiting, workers)) as outcomes:
        for point, outcome in outcomes:
            result = _result(point, outcome)
            if journal is not None:
                journal.append(_entry(result))
            results[point.key] = result
            failed += result.status is Status.FAILED
            if on_result is not None:
                on_result(result)
            tell()
    return [_of(point, results) for point in plan.points]


def simulate_point(point: SweepPoint) -> dict[str, Any]:
    """Return the report of a point as plain JSON values; this is what a worker runs.

    It gets the scenario itself, not its file: checked once, with its overrides in it, and small
    when pickled (2 kB). Only the files that it names must be there for the worker too.
    """
    report = api.simulate(point.scenario).to_dict()
    return {name: plain(part) for name, part in report.items() if name != "scenario"}


def _result(point: SweepPoint, outcome: Outcome) -> PointResult:
    ran = outcome.result.get("provenance", {}).get("version", version("tonnage"))
    if ran != version("tonnage"):
        message = f"its worker runs tonnage {ran}, this is {version('tonnage')}: install the same"
        return PointResult(point, Status.FAILED, message, {})
    return PointResult(point, outcome.status, outcome.message, outcome.result)


def _of(point: SweepPoint, results: Mapping[str, PointResult]) -> PointResult:
    """Return the result of a point, which another one of the same scenario may have brought."""
    if point.refusal:
        return PointResult(point, Status.INFEASIBLE, point.refusal, {})
    result = results[point.key]
    return PointResult(point, result.status, result.message, result.report)


# --- what is kept -------------------------------------------------------------------------------


def open_folder(folder: Path, *, fresh: bool = False) -> Journal:
    """Open the points kept in a folder, made where it is missing; `fresh` forgets them.

    The tables of an earlier sweep are removed: where they are, they are of the last one, complete.
    """
    make_folder(folder)
    for name in (*TABLES, JOURNAL) if fresh else TABLES:
        try:
            (folder / name).unlink(missing_ok=True)
        except OSError as error:
            problem = f"cannot be removed: {error.strerror or error}"
            raise BadInputError(f"{folder / name}: {problem}") from error
    return Journal(folder / JOURNAL)


def write_tables(folder: Path, frame: pd.DataFrame) -> None:
    """Write sweep.csv and sweep.parquet, each whole or not at all."""
    csv, parquet = (folder / name for name in TABLES)
    with whole_file(csv) as file:
        frame.to_csv(file, index=False, lineterminator="\n")
    with whole_file(parquet) as file:
        frame.to_parquet(file, index=False)


def _entry(result: PointResult) -> dict[str, Any]:
    point = result.point
    return {
        "key": point.key,
        "variant": point.variant,
        "over": dict(point.over),
        "seed": point.seed,
        "status": str(result.status),
        "message": result.message,
        "report": result.report,
    }


def _known(plan: SweepPlan, journal: Journal | None) -> dict[str, PointResult]:
    entries = {} if journal is None else journal.entries
    known = {}
    for point in plan.points:
        entry = entries.get(point.key)
        if entry is not None and entry["status"] != Status.FAILED:
            status = Status(entry["status"])
            known[point.key] = PointResult(point, status, entry["message"], entry["report"])
    return known
