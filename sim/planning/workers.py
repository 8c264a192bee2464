"""Where points run: in this process, in spawned processes, or on an executor that was given."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any, Protocol

from tonnage.sim.domain import BadInputError

_GIVEN_IN_FLIGHT = 256  # enough for a large cluster; an item is a few kilobytes


class Workers(Protocol):
    """An executor, how many items it may hold at once, and how it begins and ends."""

    in_flight: int

    def executor(self) -> Executor:
        """Return the executor, started."""
        ...

    def renew(self) -> bool:
        """Replace an executor that broke; False where that cannot be done."""
        ...

    def close(self) -> None:
        """End it after its work."""
        ...

    def stop(self) -> None:
        """End it at once, whatever still runs."""
        ...


def cpu_count() -> int:
    """Return the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class GivenExecutor:
    """Somebody else's executor: used, neither renewed nor ended."""

    def __init__(self, executor: Executor, in_flight: int = _GIVEN_IN_FLIGHT) -> None:
        self._executor = executor
        self.in_flight = in_flight

    def executor(self) -> Executor:
        """Return it as it is."""
        return self._executor

    def renew(self) -> bool:
        """Leave it broken."""
        return False

    def close(self) -> None:
        """Leave it to its owner."""

    def stop(self) -> None:
        """Leave it to its owner."""


class ThisProcess(Executor):
    """Runs what is submitted here and now."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Return a future that has ended already."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class ProcessWorkers:
    """So many spawned processes: a forked one would share locks and threads of its parent."""

    def __init__(self, count: int) -> None:
        if count < 1:
            raise BadInputError(f"workers: {count} is not at least 1")
        self._count = count
        self._pool: ProcessPoolExecutor | None = None
        self.in_flight = 2 * count  # one runs, one waits: no worker is idle for a round trip

    def executor(self) -> Executor:
        """Return the pool; it is started when it is first asked for.

        Raises BadInputError where no process can start, as in a script without a main guard.
        """
        if self._pool is None:
            self._pool = self._started()
        return self._pool

    def renew(self) -> bool:
        """Start a new pool."""
        self.stop()
        self._pool = self._started()
        return True

    def close(self) -> None:
        """Let the processes end by themselves."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()

    def stop(self) -> None:
        """Kill the processes: a point can take hours, and nobody waits for it any more."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        processes = list((pool._processes or {}).values())
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()

    def _started(self) -> ProcessPoolExecutor:
        spawn = multiprocessing.get_context("spawn")
        pool = ProcessPoolExecutor(self._count, mp_context=spawn, initializer=_begin_worker)
        try:
            with _interrupts_ignored():
                ready = pool.submit(os.getpid)
            ready.result()
        except (BrokenExecutor, RuntimeError) as error:  # the latter in a child that runs it again
            raise BadInputError(
                "worker processes cannot start; a script that sweeps needs the guard "
                "`if __name__ == '__main__':`, or workers=1"
            ) from error
        return pool


def _begin_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    threading.Thread(target=_end_with_the_parent, daemon=True).start()


def _end_with_the_parent() -> None:
    """End this process when its parent is gone: a pool's worker would wait for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _interrupts_ignored() -> Iterator[None]:
    """Let processes that start here ignore Ctrl-C from their first instruction on."""
    before = signal.getsignal(signal.SIGINT)
    # Only the main thread may change a handler, and one that is not Python's cannot be put back.
    if threading.current_thread() is not threading.main_thread() or before is None:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
