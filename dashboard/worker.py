"""The one process that computes for the pages: tasks in on its standard input, answers out.

It belongs to the server that started it. Nobody else writes to its pipes, so pickle is safe there.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import IO, Any, Literal, NoReturn

from tonnage.sim.domain import BadInputError, InfeasibleError, TonnageError

# ("progress", text, share) | ("done", result) | ("failed", message)
Answer = tuple[Literal["progress", "done", "failed"], Any, float]
MOST_MEMORY_BYTES = 8 * 2**30
_BETWEEN_TOLD_S = 0.2


def main() -> None:
    """Answer tasks until the server closes the pipe."""
    # Files of their own: processes that a task starts close the standard input, for which they
    # would wait for ever while a thread reads from it.
    tasks = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what is printed must not mix with answers
    _limit_memory()
    waiting: queue.SimpleQueue[tuple[Callable[..., Any], tuple[Any, ...]]] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(tasks, waiting), daemon=True).start()
    _warm_up()
    while True:
        function, arguments = waiting.get()
        _send(answers, _answer(function, arguments, _teller(answers)))


def _receive(tasks: IO[bytes], waiting: queue.SimpleQueue[Any]) -> None:
    """Pass tasks on, and end the process with its server, whatever it is busy with."""
    while True:
        try:
            waiting.put(pickle.load(tasks))
        except EOFError:
            _end()
        except Exception:  # a task that nobody can do: better no worker than one that never answers
            traceback.print_exc()
            _end()


def _warm_up() -> None:
    """Import what runs need before somebody waits for it."""
    import tonnage.api
    import tonnage.planner  # noqa: F401 - to be there, not to be used


def _limit_memory() -> None:
    """Keep a run from the memory of the machine, where the system can."""
    if sys.platform != "win32":
        import resource

        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        most = MOST_MEMORY_BYTES if hard < 0 else min(hard, MOST_MEMORY_BYTES)
        resource.setrlimit(resource.RLIMIT_AS, (most, hard))


def _teller(answers: IO[bytes]) -> Callable[[str, float], None]:
    last_s = 0.0

    def told(text: str, share: float) -> None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s >= _BETWEEN_TOLD_S:
            last_s = now_s
            _send(answers, ("progress", text, share))

    return told


def _answer(function: Callable[..., Any], arguments: tuple[Any, ...], told: Any) -> Answer:
    try:
        return "done", function(*arguments, told), 1.0
    except TonnageError as error:
        return "failed", error if isinstance(error, BadInputError) else _plain(error), 1.0
    except MemoryError:
        limit = f"{MOST_MEMORY_BYTES / 2**30:.0f} GiB"
        message = f"the run needs more than the {limit} that one may have; ask for fewer requests"
        return "failed", BadInputError(message), 1.0
    except Exception:
        traceback.print_exc()
        message = "the run failed for a reason that is no fault of the scenario; see the server log"
        return "failed", BadInputError(message), 1.0


def _plain(error: TonnageError) -> TonnageError:
    """Return the error without what it carries: an error with other arguments cannot be pickled."""
    return InfeasibleError(str(error))


def _send(answers: IO[bytes], answer: Answer) -> None:
    try:
        pickle.dump(answer, answers, protocol=pickle.HIGHEST_PROTOCOL)
        answers.flush()
    except BrokenPipeError:
        _end()  # the server has gone


def _end() -> NoReturn:
    """End this process, and with it those that a task has started."""
    if sys.platform != "win32" and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main()
