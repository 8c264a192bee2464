"""A bounded, fair queue before one worker process, and what has been computed so far.

Sessions take turns: whoever asks for ten runs waits behind somebody who asks for one. Whoever asks
for what is under way shares it, and it is stopped when nobody waits for it any more.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from tonnage.sim.domain import BadInputError, TonnageError

State = Literal["waiting", "running", "done", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of the one worker anybody may ask for."""

    waiting_per_session: int = 3
    waiting: int = 24
    run_s: float = 900.0
    kept: int = 48  # results; the oldest are forgotten


@dataclass(slots=True, eq=False)
class Job:
    """One thing to compute, and for whom; `key` says what it is, so that it is done once."""

    key: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    sessions: set[str] = field(default_factory=set)
    state: State = "waiting"
    text: str = ""
    share: float = 0.0
    result: Any = None
    error: TonnageError | None = None

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self.state in ("done", "failed", "cancelled")


class Runs:
    """The queue, its worker and the results; safe to use from several threads."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._changed = threading.Condition()
        self._turns: list[str] = []  # sessions, the one that was served last at the end
        self._closed = False
        self._worker = _start_worker()
        self._thread = threading.Thread(target=self._serve, name="runs", daemon=True)
        self._thread.start()

    # --- what pages ask -------------------------------------------------------------------------

    def submit(self, session: str, key: str, function: Callable[..., Any], *arguments: Any) -> Job:
        """Ask for a result: `function(*arguments, told)` in the worker, once for each key.

        Raises BadInputError where this session, or everybody, waits for too much already.
        """
        with self._changed:
            job = self._jobs.get(key)
            if job is not None and job.state in ("waiting", "running", "done"):
                self._jobs.move_to_end(key)
                if not job.ended:
                    job.sessions.add(session)
                return job
            self._refuse_too_many(session)
            job = Job(key, function, arguments, {session})
            self._jobs[key] = job
            self._jobs.move_to_end(key)
            self._changed.notify_all()
            return job

    def _refuse_too_many(self, session: str) -> None:
        waiting = [job for job in self._jobs.values() if job.state == "waiting"]
        own = sum(session in job.sessions for job in waiting)
        if own >= self.limits.waiting_per_session:
            raise BadInputError(f"{own} of your runs wait already; cancel one or wait for it")
        if len(waiting) >= self.limits.waiting:
            raise BadInputError(f"{len(waiting)} runs wait already; try again in a minute")

    def get(self, key: str) -> Job | None:
        """Return what became of a key; None where it was never asked for, or is forgotten."""
        with self._changed:
            return self._jobs.get(key)

    def ahead(self, job: Job) -> int:
        """Return how many jobs are before one that waits."""
        with self._changed:
            order = self._order()
            running = any(one.state == "running" for one in self._jobs.values())
            return running + (order.index(job) if job in order else 0)

    def cancel(self, session: str, job: Job) -> None:
        """Wait for a job no more; it is stopped where nobody else does."""
        with self._changed:
            job.sessions.discard(session)
            if job.sessions or job.ended:
                return
            running = job.state == "running"
            job.state = "cancelled"
            if running:
                _kill(self._worker)
            self._changed.notify_all()

    def wait(self, job: Job, timeout_s: float) -> bool:
        """Return whether a job has ended within so many seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: job.ended, timeout_s)

    def close(self) -> None:
        """Stop the worker and its thread."""
        with self._changed:
            self._closed = True
            _kill(self._worker)
            self._changed.notify_all()
        self._thread.join()
        _end(self._worker)

    # --- the thread -----------------------------------------------------------------------------

    def _order(self) -> list[Job]:
        """Return the waiting jobs in the order in which they will run: sessions take turns."""
        waiting = [job for job in self._jobs.values() if job.state == "waiting"]
        turns = [one for one in self._turns if any(one in job.sessions for job in waiting)]
        for job in waiting:
            turns[:0] = [one for one in sorted(job.sessions) if one not in turns]
        order: list[Job] = []
        while len(order) < len(waiting):
            for session in turns:
                own = [job for job in waiting if session in job.sessions and job not in order]
                order += own[:1]
        return order

    def _serve(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._order()))
                if self._closed:
                    return
                job = self._order()[0]
                job.state = "running"
                served = sorted(job.sessions)
                self._turns = [one for one in self._turns if one not in served] + served
            self._run(job)
            with self._changed:
                self._forget()
                self._changed.notify_all()

    def _run(self, job: Job) -> None:
        """Have the worker do a job, and take a new worker where it was stopped or died."""
        late = threading.Event()
        if self._worker.poll() is not None:
            _end(self._worker)
            self._worker = _start_worker()
        worker = self._worker

        def stop_late() -> None:
            late.set()
            _kill(worker)

        timer = threading.Timer(self.limits.run_s, stop_late)
        timer.start()
        try:
            self._converse(worker, job)
        except (EOFError, OSError, pickle.UnpicklingError):
            self._worker_ended(job, late.is_set())
        finally:
            timer.cancel()

    def _converse(self, worker: subprocess.Popen[bytes], job: Job) -> None:
        assert worker.stdin is not None
        assert worker.stdout is not None
        pickle.dump((job.function, job.arguments), worker.stdin)
        worker.stdin.flush()
        while not job.ended:
            kind, value, share = pickle.load(worker.stdout)
            with self._changed:
                if job.ended:
                    break
                if kind == "progress":
                    job.text, job.share = value, share
                elif kind == "done":
                    job.result, job.share, job.state = value, 1.0, "done"
                else:
                    job.error, job.state = value, "failed"
        if job.state == "cancelled":
            raise EOFError

    def _worker_ended(self, job: Job, late: bool) -> None:
        _end(self._worker)
        with self._changed:
            if not job.ended:
                limit = f"{self.limits.run_s / 60:g} minutes"
                problem = f"took longer than the {limit} that one may take" if late else "stopped"
                mend = "ask for fewer points or requests, or run it with the command line"
                job.state, job.error = "failed", BadInputError(f"the run {problem}; {mend}")
            if not self._closed:
                self._worker = _start_worker()

    def _forget(self) -> None:
        ended = [key for key, job in self._jobs.items() if job.ended]
        for key in ended[: max(0, len(ended) - self.limits.kept)]:
            del self._jobs[key]


def _start_worker() -> subprocess.Popen[bytes]:
    # A session of its own, so that a kill reaches what the worker starts.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tonnage.dashboard.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )


def _kill(worker: subprocess.Popen[bytes]) -> None:
    if worker.poll() is not None:
        return
    if sys.platform == "win32":
        worker.kill()
        return
    try:
        os.killpg(worker.pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _end(worker: subprocess.Popen[bytes]) -> None:
    _kill(worker)
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                continue  # what was to be written has nobody to go to
