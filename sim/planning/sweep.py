"""Points run over any executor: the grid's order, what each point came to, and what breaks.

The executor is any `concurrent.futures.Executor`. A point that raises, or whose process dies, is an
outcome like any other: the rest goes on.
"""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Future, wait
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import PurePath
from typing import Any, Generic, TypeVar

from tonnage.sim.domain import BadInputError, InfeasibleError, TonnageError
from tonnage.sim.planning.workers import Workers

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Axis:
    """One field that a sweep varies, and its values in the order they are shown."""

    name: str
    values: tuple[Any, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise BadInputError(f"{self.name}: no value to sweep over; give at least one")


def grid(axes: Sequence[Axis]) -> Iterator[tuple[Any, ...]]:
    """Yield one value per axis, every combination; the last axis changes fastest."""
    return itertools.product(*(axis.values for axis in axes))


class Status(StrEnum):
    """What a point came to."""

    DONE = "done"
    INFEASIBLE = "infeasible"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A point's result, or one line that says why there is none."""

    status: Status
    result: Mapping[str, Any] = field(default_factory=dict)
    message: str = ""


def attempt(work: Callable[[Item], Mapping[str, Any]], item: Item) -> Outcome:
    """Do the work and turn what it raises into an outcome.

    It runs beside the work, in its process: an exception that does not survive pickling would take
    the whole pool down.
    """
    try:
        return Outcome(Status.DONE, work(item))
    except InfeasibleError as error:
        return Outcome(Status.INFEASIBLE, message=str(error))
    except Exception as error:
        return Outcome(Status.FAILED, message=_reason(error))


def run_over(
    work: Callable[[Item], Mapping[str, Any]], items: Iterable[Item], workers: Workers
) -> Generator[tuple[Item, Outcome], None, None]:
    """Yield every item with its outcome as it is finished, in whatever order.

    `work` and the items must be picklable where the workers are processes. Items are taken from the
    iterable as workers become free, never more than `workers.in_flight` ahead. When a process dies,
    the items that its pool held are run again one at a time, so that the one to blame is known and
    the others are not lost. An interruption stops the workers at once.
    """
    run = _Run(work, workers)
    try:
        yield from run.outcomes(iter(items))
    except BaseException:
        run.cancel()
        workers.stop()
        raise
    workers.close()


class _Run(Generic[Item]):
    def __init__(self, work: Callable[[Item], Mapping[str, Any]], workers: Workers) -> None:
        self._work = work
        self._workers = workers
        self._pending: dict[Future[Outcome], Item] = {}

    def outcomes(self, queue: Iterator[Item]) -> Iterator[tuple[Item, Outcome]]:
        while True:
            for item in itertools.islice(queue, self._workers.in_flight - len(self._pending)):
                self._submit(item)
            if not self._pending:
                return
            finished, _ = wait(self._pending, return_when=FIRST_COMPLETED)
            yield from self._collect(finished)

    def cancel(self) -> None:
        for future in self._pending:
            future.cancel()

    def _submit(self, item: Item) -> Future[Outcome]:
        future: Future[Outcome]
        try:
            future = self._workers.executor().submit(attempt, self._work, item)
        except TonnageError:  # no worker can start: that is no fault of this item
            raise
        except Exception as error:  # broken or closed, as one that broke while it ran
            future = Future()
            future.set_exception(error)
        self._pending[future] = item
        return future

    def _collect(self, finished: Iterable[Future[Outcome]]) -> Iterator[tuple[Item, Outcome]]:
        lost = []
        for future in finished:
            item = self._pending.pop(future)
            if _is_broken(future):
                lost.append(item)
            else:
                yield item, _outcome(future)
        if not lost:
            return
        wait(self._pending)  # a pool that breaks ends all that it holds
        if not self._workers.renew():
            yield from ((item, Outcome(Status.FAILED, message=_EXECUTOR_BROKE)) for item in lost)
            return
        for future in list(self._pending):
            item = self._pending.pop(future)
            if _is_broken(future):
                lost.append(item)
            else:
                yield item, _outcome(future)
        for item in lost:
            yield item, self._alone(item)

    def _alone(self, item: Item) -> Outcome:
        future = self._submit(item)
        wait([future])
        del self._pending[future]
        if not _is_broken(future):
            return _outcome(future)
        self._workers.renew()
        return Outcome(Status.FAILED, message=_WORKER_DIED)


_WORKER_DIED = "its worker process died: killed, or out of memory"
_EXECUTOR_BROKE = "the executor broke while it held this point; give a new one and run it again"


def _is_broken(future: Future[Outcome]) -> bool:
    return not future.cancelled() and isinstance(future.exception(), BrokenExecutor)


def _outcome(future: Future[Outcome]) -> Outcome:
    if future.cancelled():
        return Outcome(Status.FAILED, message="cancelled by the executor")
    error = future.exception()
    if error is not None:  # not from the work: the way there or back
        return Outcome(Status.FAILED, message=_reason(error))
    return future.result()


def _reason(error: BaseException) -> str:
    """Return one line: the message of an own error; of any other the type and the place too."""
    text = " ".join(str(error).split())
    if isinstance(error, TonnageError):
        return text
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({PurePath(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' if text else ''}{text}{place}"
