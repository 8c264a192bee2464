"""Points over executors: order, laziness, what breaks, and what is kept."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tonnage.sim.domain import BadInputError, InfeasibleError
from tonnage.sim.planning.journal import Journal
from tonnage.sim.planning.sweep import Axis, Status, grid, run_over
from tonnage.sim.planning.workers import GivenExecutor, ProcessWorkers, ThisProcess, Workers

Work = Callable[[int], Mapping[str, Any]]

# What spawned processes run lies in a module that they can import, whoever started the tests.
WORK = """
import os


class Unpicklable(Exception):
    def __init__(self, one, two):
        super().__init__("cannot be made again from its text")


def square(item):
    return {"square": item * item}


def die_at_3(item):
    if item == 3:
        os._exit(1)
    return {"square": item * item}


def raise_at_3(item):
    if item == 3:
        raise Unpicklable(1, 2)
    return {"square": item * item}


def wait_for_ever(item):
    open(item, "w").close()
    while True:
        pass
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Give the module of functions that workers run."""
    (tmp_path / "sweep_work.py").write_text(WORK)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("sweep_work", None)
    yield import_module("sweep_work")
    sys.modules.pop("sweep_work", None)


def here() -> Workers:
    """Return workers that run what they get at once."""
    return GivenExecutor(ThisProcess(), in_flight=1)


# --- the grid -----------------------------------------------------------------------------------


def test_the_last_axis_changes_fastest() -> None:
    axes = (Axis("a", (1, 2)), Axis("b", ("x", "y", "z")))
    expected = [(1, "x"), (1, "y"), (1, "z"), (2, "x"), (2, "y"), (2, "z")]
    assert list(grid(axes)) == expected


def test_no_axis_is_one_point_and_an_axis_without_values_is_refused() -> None:
    assert list(grid([])) == [()]
    with pytest.raises(BadInputError, match=r"traffic\.requests: no value"):
        Axis("traffic.requests", ())


# --- running ------------------------------------------------------------------------------------


def test_what_a_point_raises_is_its_own_outcome() -> None:
    def some_raise(item: int) -> Mapping[str, Any]:
        if item == 1:
            raise InfeasibleError("3 GiB are missing")
        if item == 2:
            raise ValueError("two\nlines")
        if item == 3:
            raise BadInputError("line 3: truncated")
        return {"item": item}

    outcomes = dict(run_over(some_raise, range(5), here()))
    assert [outcomes[item].status for item in range(5)] == [
        Status.DONE,
        Status.INFEASIBLE,
        Status.FAILED,
        Status.FAILED,
        Status.DONE,
    ]
    assert outcomes[0].result == {"item": 0}
    assert outcomes[1].message == "3 GiB are missing"
    assert outcomes[2].message.startswith("ValueError: two lines (test_sweep.py, line ")
    assert outcomes[3].message == "line 3: truncated"


def test_items_are_taken_only_as_workers_become_free() -> None:
    taken: list[int] = []
    ahead: list[int] = []

    def items() -> Iterator[int]:
        for item in range(20):
            taken.append(item)
            yield item

    with ThreadPoolExecutor(2) as threads:
        outcomes = run_over(lambda item: {"item": item}, items(), GivenExecutor(threads, 3))
        for ended, _ in enumerate(outcomes, start=1):
            ahead.append(len(taken) - ended)
    assert len(taken) == len(ahead) == 20
    assert max(ahead) < 3


def test_threads_do_the_work_and_stay_their_owners() -> None:
    names = set()
    with ThreadPoolExecutor(2, thread_name_prefix="mine") as threads:
        for _, outcome in run_over(
            lambda _: {"thread": threading.current_thread().name}, range(6), GivenExecutor(threads)
        ):
            names.add(outcome.result["thread"][:4])
        assert threads.submit(int, "7").result() == 7  # not shut down
    assert names == {"mine"}


def test_spawned_processes_do_the_work(work: Any) -> None:
    workers = ProcessWorkers(2)
    outcomes = dict(run_over(work.square, range(7), workers))
    assert {item: o.result["square"] for item, o in outcomes.items()} == {
        item: item * item for item in range(7)
    }
    assert multiprocessing.active_children() == []


def test_an_exception_that_cannot_be_pickled_back_fails_its_point_only(work: Any) -> None:
    outcomes = dict(run_over(work.raise_at_3, range(6), ProcessWorkers(1)))
    assert [i for i, o in outcomes.items() if o.status is Status.FAILED] == [3]
    assert outcomes[3].message.startswith("Unpicklable: cannot be made again")
    assert len(outcomes) == 6


def test_a_dead_process_costs_its_own_point_only(work: Any) -> None:
    ended = list(run_over(work.die_at_3, range(8), ProcessWorkers(2)))
    assert sorted(item for item, _ in ended) == list(range(8))
    outcomes = dict(ended)
    assert [i for i, o in sorted(outcomes.items()) if o.status is not Status.DONE] == [3]
    assert outcomes[3].message == "its worker process died: killed, or out of memory"
    assert outcomes[7].result == {"square": 49}


def test_a_given_pool_that_breaks_ends_in_failed_points_not_in_an_exception(work: Any) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        outcomes = dict(run_over(work.die_at_3, range(8), GivenExecutor(pool, in_flight=2)))
    assert [outcomes[item].status for item in range(3)] == [Status.DONE] * 3
    assert all(outcomes[item].status is Status.FAILED for item in range(3, 8))
    assert "executor broke" in outcomes[5].message


def test_a_cancelled_future_is_a_failed_point() -> None:
    class Cancelling(Executor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.cancel()
            future.set_running_or_notify_cancel()
            return future

    (outcome,) = [o for _, o in run_over(lambda _: {}, [1], GivenExecutor(Cancelling()))]
    assert (outcome.status, outcome.message) == (Status.FAILED, "cancelled by the executor")


def test_an_interruption_kills_what_still_runs(work: Any, tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    outcomes = run_over(work.wait_for_ever, [str(begun)], _Interrupting(begun))
    with pytest.raises(KeyboardInterrupt):
        next(outcomes)
    assert begun.exists()
    assert multiprocessing.active_children() == []


class _Interrupting(ProcessWorkers):
    """Presses Ctrl-C, once the point runs, where the next one would be submitted."""

    def __init__(self, begun: Path) -> None:
        super().__init__(1)
        self._begun = begun

    def executor(self) -> Executor:
        pool = super().executor()

        class Submitting(Executor):
            def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
                future = pool.submit(fn, *args, **kwargs)
                while not begun.exists() and not future.done():
                    pass
                raise KeyboardInterrupt

        begun = self._begun
        return Submitting()


def test_a_script_without_its_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from tonnage.sim.planning.sweep import run_over\n"
        "from tonnage.sim.planning.workers import ProcessWorkers\n"
        "print(list(run_over(dict, [()], ProcessWorkers(1))))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "if __name__ == '__main__':" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("count", [0, -1])
def test_workers_are_at_least_one(count: int) -> None:
    with pytest.raises(BadInputError, match="not at least 1"):
        ProcessWorkers(count)


# --- what is kept -------------------------------------------------------------------------------


def test_a_journal_is_read_again_and_its_last_word_counts(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "points.jsonl")
    journal.append({"key": "a", "status": "failed"})
    journal.append({"key": "b", "status": "done", "value": 0.1 + 0.2})
    journal.append({"key": "a", "status": "done"})
    again = Journal(tmp_path / "points.jsonl")
    assert again.entries == journal.entries
    assert again.entries["a"]["status"] == "done"
    assert again.entries["b"]["value"] == 0.1 + 0.2


@pytest.mark.parametrize("tail", ['{"key":"c","sta', '{"key":"c","status":"done"}', "\0\0\0\n"])
def test_a_line_cut_short_is_removed_and_the_next_one_is_whole(tmp_path: Path, tail: str) -> None:
    path = tmp_path / "points.jsonl"
    whole = '{"key":"a","status":"done"}\n{"key":"b","status":"done"}\n'
    path.write_text(whole + tail)
    journal = Journal(path)
    assert list(journal.entries) == ["a", "b"]
    assert path.read_text() == whole
    journal.append({"key": "c", "status": "done"})
    assert list(Journal(path).entries) == ["a", "b", "c"]


@pytest.mark.parametrize("line", ['{"key":"b"', "[1, 2]", '{"seed": 1}'])
def test_damage_that_no_crash_leaves_is_refused_by_line_and_kept(tmp_path: Path, line: str) -> None:
    path = tmp_path / "points.jsonl"
    text = f'{{"key":"a"}}\n{line}\n{{"key":"c"}}\n'
    path.write_text(text)
    with pytest.raises(BadInputError, match=r"points\.jsonl: line 2: not a point"):
        Journal(path)
    assert path.read_text() == text


def test_a_journal_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "gone" / "points.jsonl")
    with pytest.raises(BadInputError, match=r"points\.jsonl: cannot be written"):
        journal.append({"key": "a"})
    os.mkdir(tmp_path / "folder.jsonl")
    with pytest.raises(BadInputError, match="cannot be read"):
        Journal(tmp_path / "folder.jsonl")
