"""The queue: each thing once, turns for everybody, limits, and a worker that can be stopped."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dashboard.tasks import broken, doubled, endless, refused, stamped, with_child
from tonnage.dashboard.runs import Job, Limits, Runs
from tonnage.sim.domain import BadInputError, InfeasibleError

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))  # where the worker finds the tasks of this test
        queue = Runs(Limits(waiting_per_session=2, waiting=3, kept=8))
        yield queue
        queue.close()


def ended(runs: Runs, job: Job) -> Job:
    assert runs.wait(job, 30)
    return job


def running(runs: Runs, job: Job) -> None:
    """Wait until a job has told something."""
    until_s = time.monotonic() + 30
    while not job.text and time.monotonic() < until_s:
        time.sleep(0.01)
    assert job.state == "running"


def test_a_result_is_computed_once_and_kept(runs: Runs) -> None:
    job = ended(runs, runs.submit("a", "double 4", doubled, 4))
    assert (job.state, job.result) == ("done", 8)
    assert runs.submit("b", "double 4", doubled, 4) is job
    assert runs.get("double 4") is job


def test_an_error_of_the_scenario_comes_back_as_it_is(runs: Runs) -> None:
    job = ended(runs, runs.submit("a", "refused", refused))
    assert isinstance(job.error, InfeasibleError)
    assert str(job.error).endswith("use kv: fp8_e4m3")


def test_an_error_of_the_code_tells_nobody_what_it_was(runs: Runs) -> None:
    job = ended(runs, runs.submit("a", "broken", broken))
    assert job.state == "failed"
    assert "secret" not in str(job.error)


def test_a_cancelled_run_stops_and_the_next_one_has_a_worker(runs: Runs) -> None:
    job = runs.submit("a", "endless", endless)
    running(runs, job)
    runs.submit("b", "endless", endless)
    runs.cancel("a", job)
    assert job.state == "running"  # b waits for it too
    runs.cancel("b", job)
    assert job.state == "cancelled"
    assert ended(runs, runs.submit("a", "double 5", doubled, 5)).result == 10


def test_a_task_that_the_worker_cannot_do_fails_and_the_next_one_works(runs: Runs) -> None:
    job = ended(runs, runs.submit("a", "unknown", Unknown(), 1))
    assert job.state == "failed"
    assert ended(runs, runs.submit("a", "double 6", doubled, 6)).result == 12


class Unknown:
    """Something that only this process can read."""

    def __reduce__(self) -> tuple[object, ...]:
        return (int, ("no number",))

    def __call__(self, *_: object) -> None:
        """Do nothing: it never comes to this."""


def test_sessions_take_turns_and_nobody_fills_the_queue(runs: Runs) -> None:
    blocker = runs.submit("greedy", "block", endless)
    running(runs, blocker)
    first = runs.submit("greedy", "first", stamped)
    second = runs.submit("greedy", "second", stamped)
    with pytest.raises(BadInputError, match="2 of your runs wait"):
        runs.submit("greedy", "third", stamped)
    other = runs.submit("modest", "other", stamped)
    with pytest.raises(BadInputError, match="3 runs wait already"):
        runs.submit("third", "fourth", stamped)
    assert [runs.ahead(job) for job in (other, first, second)] == [1, 2, 3]
    runs.cancel("greedy", blocker)
    times = [ended(runs, job).result for job in (other, first, second)]
    assert times == sorted(times)


def test_what_is_old_is_forgotten(runs: Runs) -> None:
    for number in range(10):
        ended(runs, runs.submit("a", f"number {number}", doubled, number))
    runs.wait(runs.submit("a", "number 9", doubled, 9), 1)
    assert runs.get("number 0") is None
    assert runs.get("number 9") is not None


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
def test_when_the_server_goes_nothing_stays_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    queue = Runs()
    child = ended(queue, queue.submit("a", "child", with_child)).result
    assert is_running(child)
    queue.close()
    assert ends(child)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
def test_a_worker_whose_server_died_ends_with_what_it_started() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-m", "tonnage.dashboard.worker"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as worker:
        assert worker.stdin is not None
        assert worker.stdout is not None
        pickle.dump((with_child, ()), worker.stdin)
        worker.stdin.flush()
        kind, child, _ = pickle.load(worker.stdout)
        assert (kind, is_running(child)) == ("done", True)
        worker.stdin.close()
        worker.wait(10)
    assert ends(child)


def ends(process: int) -> bool:
    """Tell whether a process ends within some seconds."""
    until_s = time.monotonic() + 5
    while is_running(process) and time.monotonic() < until_s:
        time.sleep(0.02)
    return not is_running(process)


def is_running(process: int) -> bool:
    """Tell whether a process runs; one that has ended and waits to be asked for does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_run_that_takes_too_long_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    queue = Runs(Limits(run_s=4.0))
    try:
        job = ended(queue, queue.submit("a", "endless", endless))
        assert "longer than" in str(job.error)
    finally:
        queue.close()
