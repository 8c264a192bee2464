"""A timeline in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open.

Source of the format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator, Mapping
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tonnage.sim.domain import IntArray
from tonnage.sim.results.timeline import States, Timeline

Labels = Mapping[int, str]  # of every instance, such as "decode 0": its pool and place in it
_Columns = Mapping[str, NDArray[Any]]
_Event = tuple[int, str]  # its time in nanoseconds, and its JSON

_THREADS = 1000  # of one instance: far more than stages of a pipeline, and above all process ids
_KV_DECIMALS = 1  # a finer occupancy would be a counter event in nearly every step


def chrome_trace(
    timeline: Timeline, labels: Labels, capacity_pages: Mapping[int, int]
) -> Iterator[str]:
    """Give the pieces of a trace's JSON text, its events in order of time.

    A pool is a process, an instance a thread (one per micro-batch under way together); steps are
    X events named by their phase; what runs, waits and is held are C events. Times are in
    microseconds with three decimals.
    """
    pools = list(dict.fromkeys(map(_pool, labels.values())))
    process = {instance: 1 + pools.index(_pool(label)) for instance, label in labels.items()}
    threads = dict.fromkeys(labels, 1)
    streams: list[Iterator[_Event]] = []
    for instance, own in timeline.by_instance():
        pid = f'"pid":{process[instance]}'
        start_ns, end_ns = _nanoseconds(own["start_s"]), _nanoseconds(own["end_s"])
        thread = _threads(start_ns, end_ns)
        threads[instance] = int(thread.max()) + 1
        for index in range(threads[instance]):
            rows = np.flatnonzero(thread == index)
            where = f'{pid},"tid":{_thread_id(instance, index)}'
            mine = {name: values[rows] for name, values in own.items()}
            streams.append(_slices(where, mine, start_ns[rows], end_ns[rows]))
    for instance, states in timeline.states():
        pid = f'"pid":{process[instance]}'
        streams += _counters(labels[instance], pid, states, capacity_pages[instance])
    yield '{"traceEvents":[\n'
    yield ",\n".join(_names(labels, process, threads))
    for _, text in heapq.merge(*streams, key=itemgetter(0)):
        yield ",\n"
        yield text
    yield '\n],"displayTimeUnit":"ms"}\n'


def _pool(label: str) -> str:
    """Return the pool of a label such as `decode 0`."""
    return label.rpartition(" ")[0] or label


def _thread_id(instance: int, index: int) -> int:
    """Number threads over all processes, for readers name a thread by its number alone.

    No thread has a process's number: readers take that one for the process's main thread.
    """
    return _THREADS * (1 + instance) + index


def _names(labels: Labels, process: Mapping[int, int], threads: Mapping[int, int]) -> Iterator[str]:
    """Give the metadata events: names and order of processes and threads."""
    for pid, pool in {process[one]: _pool(label) for one, label in labels.items()}.items():
        yield _metadata("process_name", "name", pool, pid, pid)
        yield _metadata("process_sort_index", "sort_index", pid, pid, pid)
    for instance, label in labels.items():
        pid = process[instance]
        for index in range(threads[instance]):
            tid = _thread_id(instance, index)
            name = label if threads[instance] == 1 else f"{label}, {index + 1} under way"
            yield _metadata("thread_name", "name", name, pid, tid)
            yield _metadata("thread_sort_index", "sort_index", tid, pid, tid)


def _metadata(name: str, key: str, value: str | int, pid: int, tid: int) -> str:
    event = {"ph": "M", "name": name, "pid": pid, "tid": tid, "args": {key: value}}
    return json.dumps(event, separators=(",", ":"))


def _nanoseconds(times_s: NDArray[Any]) -> IntArray:
    """Round to what a reader keeps, so that neighbours touch: it drops events that overlap."""
    return np.rint(times_s * 1e9).astype(np.int64)


def _microseconds(time_ns: int) -> str:
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"


def _threads(start_ns: IntArray, end_ns: IntArray) -> IntArray:
    """Return the thread of each segment `[segments]`: the first on which it overlaps no other."""
    threads = np.zeros(len(start_ns), dtype=np.int64)
    if (end_ns[:-1] <= start_ns[1:]).all():
        return threads
    free_ns: list[int] = []
    for row, (start, end) in enumerate(_rows(start_ns, end_ns)):
        index = next((i for i, free in enumerate(free_ns) if free <= start), len(free_ns))
        free_ns[index : index + 1] = [end]
        threads[row] = index
    return threads


def _slices(where: str, own: _Columns, start_ns: IntArray, end_ns: IntArray) -> Iterator[_Event]:
    """Give an X event per segment; decode segments of one batch size that touch become one."""
    decode, prompts = own["decode_requests"], own["prompt_requests"]
    only_decode = prompts == 0
    same = only_decode[1:] & only_decode[:-1] & (decode[1:] == decode[:-1])
    first = np.flatnonzero(np.append(True, ~(same & (start_ns[1:] == end_ns[:-1]))))
    last = np.append(first[1:], len(start_ns)) - 1
    steps = np.add.reduceat(own["steps"], first, dtype=np.int64)
    tokens = np.add.reduceat(own["prompt_tokens"], first, dtype=np.int64)
    rows = (start_ns[first], end_ns[last], steps, decode[first], prompts[first], tokens)
    for start, end, count, decoding, prefilling, prompt_tokens in _rows(*rows):
        phase = "decode" if not prefilling else "mixed" if decoding else "prefill"
        mean_ms = round((end - start) / 1e6 / count, 6) if count else 0
        yield (
            start,
            f'{{"ph":"X","name":"{phase}",{where},"ts":{_microseconds(start)},'
            f'"dur":{_microseconds(end - start)},"args":{{"steps":{count},'
            f'"decode_requests":{decoding},"prompt_requests":{prefilling},'
            f'"prompt_tokens":{prompt_tokens},"mean_step_ms":{mean_ms}}}}}',
        )


def _counters(label: str, pid: str, states: States, capacity_pages: int) -> list[Iterator[_Event]]:
    """Return the series of one instance; readers take them for the process's, so it is named."""
    kv_percent = np.round(100 * states.counts["used_pages"] / capacity_pages, _KV_DECIMALS)
    series = (
        ("running", "requests", states.counts["running_requests"]),
        ("waiting", "requests", states.counts["waiting_requests"]),
        ("KV", "percent", kv_percent),
    )
    time_ns = _nanoseconds(states.times_s)
    return [
        _counter(f'"name":{json.dumps(f"{label} {name}")},{pid}', unit, time_ns, values)
        for name, unit, values in series
    ]


def _counter(head: str, unit: str, time_ns: IntArray, values: NDArray[Any]) -> Iterator[_Event]:
    """Give a C event where a value changes, the last one of a nanosecond."""
    kept = np.append(time_ns[1:] > time_ns[:-1], True)
    time_ns, values = time_ns[kept], values[kept]
    changed = np.append(True, values[1:] != values[:-1])
    for time, value in _rows(time_ns[changed], values[changed]):
        yield (
            time,
            f'{{"ph":"C",{head},"ts":{_microseconds(time)},"args":{{"{unit}":{value}}}}}',
        )


def _rows(*columns: NDArray[Any]) -> Iterator[tuple[Any, ...]]:
    """Give the rows as Python's numbers, a block at a time, for whole columns of them are large."""
    for at in range(0, len(columns[0]), 4096):
        yield from zip(*(column[at : at + 4096].tolist() for column in columns), strict=True)
