"""A timeline as a file, for ui.perfetto.dev or as a table, and as sparklines on a terminal."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from rich.console import Console

from tonnage.chrome_trace import Labels, chrome_trace
from tonnage.output import point_stem, whole_file
from tonnage.sim.domain import BadInputError, FloatArray
from tonnage.sim.results.timeline import Timeline
from tonnage.sim.units import format_seconds

if TYPE_CHECKING:
    from tonnage.api import SimulationReport

_SUFFIXES = (".json", ".json.gz", ".parquet", ".csv")


# --- files --------------------------------------------------------------------------------------


def check_timeline_file(path: Path) -> None:
    """Refuse a name that says no known form, or a place that cannot be written."""
    if _suffix(path) is None:
        names = ", ".join(_SUFFIXES)
        raise BadInputError(f"--timeline {path}: end the name in one of {names}")
    if path.is_dir():
        raise BadInputError(f"--timeline {path}: is a folder; name a file in it")
    if not os.access(path.parent, os.W_OK):
        raise BadInputError(f"--timeline {path}: the folder {path.parent} cannot be written to")


def write_timelines(path: Path, reports: Mapping[str, SimulationReport]) -> None:
    """Write the timelines of all points; `reports` are by variant, "" for one alone."""
    for file, timeline, report in _timelines(path, reports):
        write_timeline(file, timeline, report.labels, report.capacity_pages)


def _timelines(
    path: Path, reports: Mapping[str, SimulationReport]
) -> Iterator[tuple[Path, Timeline, SimulationReport]]:
    """Give each point's file, timeline and report; one point alone has the name that was given."""
    alone = sum(len(report.points) for report in reports.values()) == 1
    for variant, report in reports.items():
        for point in report.points:
            if point.timeline is not None:
                file = path if alone else timeline_file(path, variant, point.figures)
                yield file, point.timeline, report


def timeline_file(path: Path, variant: str, point: Mapping[str, Any]) -> Path:
    """Return the name of one point's file where there are several: `run_colocated_rate_2.json`."""
    suffix = _suffix(path) or path.suffix
    stem = point_stem("", variant, point)
    return path.with_name(f"{path.name[: -len(suffix)]}_{stem}{suffix}") if stem else path


def _suffix(path: Path) -> str | None:
    return next((suffix for suffix in _SUFFIXES if path.name.lower().endswith(suffix)), None)


def write_timeline(
    path: Path, timeline: Timeline, labels: Labels, capacity_pages: Mapping[int, int]
) -> None:
    """Write a timeline whole: `.json` and `.json.gz` as a Chrome trace, `.parquet` and `.csv` rows.

    Raises BadInputError for another name and for a file that cannot be written.
    """
    check_timeline_file(path)
    with whole_file(path) as file:
        if _suffix(path) == ".parquet":
            _labelled(timeline, labels).to_parquet(file, index=False)
        elif _suffix(path) == ".csv":
            _labelled(timeline, labels).to_csv(file, index=False)
        else:
            with _text(file, compressed=_suffix(path) == ".json.gz") as stream:
                stream.writelines(chrome_trace(timeline, labels, capacity_pages))


def _labelled(timeline: Timeline, labels: Labels) -> pd.DataFrame:
    frame = timeline.frame()
    frame.insert(1, "label", frame["instance"].map(dict(labels)))
    return frame


@contextmanager
def _text(file: Path, *, compressed: bool) -> Iterator[IO[str]]:
    """Open a text file; a compressed one holds no date and no name, only the same bytes again."""
    with file.open("wb") as raw:
        if not compressed:
            with io.TextIOWrapper(raw, encoding="utf-8") as stream:
                yield stream
            return
        packed = gzip.GzipFile("", "wb", compresslevel=6, fileobj=raw, mtime=0)
        with packed, io.TextIOWrapper(packed, encoding="utf-8") as stream:
            yield stream


# --- terminal -----------------------------------------------------------------------------------

_BLOCKS = " ▁▂▃▄▅▆▇█"
_ASCII = " .:-=+*#%"
_LONGEST_LINE = 160
_SHORTEST_SPARK = 8


def print_timelines(console: Console, path: Path, reports: Mapping[str, SimulationReport]) -> None:
    """Print a view of each point's timeline under the name of its file."""
    for file, timeline, report in _timelines(path, reports):
        print_timeline(console, str(file), timeline, report.labels, report.capacity_pages)


def print_timeline(
    console: Console,
    title: str,
    timeline: Timeline,
    labels: Labels,
    capacity_pages: Mapping[int, int],
) -> None:
    """Print running requests and KV occupancy of every instance over the run, one line each."""
    console.print(title, style="bold", soft_wrap=True)
    ramp = _ASCII if console.options.ascii_only else _BLOCKS
    for line in timeline_lines(timeline, labels, capacity_pages, console.width, ramp):
        console.print(line, soft_wrap=True)


def timeline_lines(
    timeline: Timeline,
    labels: Labels,
    capacity_pages: Mapping[int, int],
    width: int,
    ramp: str = _BLOCKS,
) -> Iterator[str]:
    """Give a line on the scale, then one per instance, none wider than `width` where that can be.

    A column is the time-weighted mean of its share of the run, drawn against the instance's highest
    column; blank is idle. The numbers are the mean and the maximum over the whole run.
    """
    span_s = float(timeline.columns()["end_s"].max(initial=0.0))
    peaks, pages = _peaks(timeline, labels)
    name_width = max(map(len, labels.values()))
    digits = len(str(max(peaks.values())))
    fixed = name_width + len("  batch || mean .0 max   KV || mean 100% max 100%") + 2 * digits
    columns = max(_SHORTEST_SPARK, (min(width, _LONGEST_LINE) - fixed) // 2)
    yield f"{format_seconds(span_s)} in {columns} columns of {format_seconds(span_s / columns)}"
    means = timeline.averages(span_s / columns) if span_s else timeline.averages(1.0)
    for instance, label in labels.items():
        rows = means[means["instance"] == instance]
        batch = rows["running_requests"].to_numpy() if len(rows) else np.zeros(columns)
        held = rows["used_pages"].to_numpy() if len(rows) else np.zeros(columns)
        capacity = capacity_pages[instance]
        yield (
            f"{label:{name_width}}  batch |{_spark(batch, ramp)}| "
            f"mean {batch.mean():{digits + 2}.1f} max {peaks[instance]:{digits}}  "
            f"KV |{_spark(held, ramp)}| "
            f"mean {held.mean() / capacity:4.0%} max {pages[instance] / capacity:4.0%}"
        )


def _peaks(timeline: Timeline, labels: Labels) -> tuple[dict[int, int], dict[int, int]]:
    """Return the largest batch and the most pages of every instance."""
    batches, pages = dict.fromkeys(labels, 0), dict.fromkeys(labels, 0)
    for instance, states in timeline.states():
        batches[instance] = int(states.counts["running_requests"].max())
        pages[instance] = int(states.counts["used_pages"].max())
    return batches, pages


def _spark(values: FloatArray, ramp: str) -> str:
    """Draw values against the largest; blank is nothing at all, the least that is more shows."""
    top = len(ramp) - 1
    shares = values / max(float(values.max()), 1e-12)
    return "".join(ramp[int(np.ceil(share * top - 1e-9))] for share in shares)
