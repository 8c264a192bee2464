"""Where text goes: tables on standard output, progress and errors on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

ReportProgress = Callable[[str, float], None]  # what is being done, and its share from 0 to 1
_PIPE_WIDTH = 220  # a pipe has no width: wide enough that no table is folded


def output_console() -> Console:
    """Return a console that prints text as it is, in colours on a terminal only."""
    width = None if sys.stdout.isatty() else _PIPE_WIDTH
    return Console(markup=False, highlight=False, emoji=False, width=width)


def new_table(console: Console, title: str, columns: Sequence[str], numbers_from: int = 1) -> Table:
    """Return an empty table: lines on a terminal, none in a pipe; numbers to the right."""
    table = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD if console.is_terminal else None,
        header_style="bold",
        pad_edge=False,
    )
    for index, column in enumerate(columns):
        right = index >= numbers_from
        table.add_column(column, justify="right" if right else "left", no_wrap=not right)
    return table


def natural_width(console: Console, table: Table) -> int:
    """Return the width that a table takes when no cell is folded."""
    return console.measure(table, options=console.options.update(max_width=10_000)).maximum


@contextmanager
def progress(quiet: bool) -> Iterator[ReportProgress | None]:
    """Give a function that shows progress: a bar on a terminal, a line per part in a pipe."""
    if quiet:
        yield None
    elif sys.stderr.isatty():
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        ) as bars:
            task = bars.add_task("", total=1.0)
            yield lambda text, share: bars.update(task, description=text, completed=share)
    else:
        yield _lines()


def labelled(report: ReportProgress | None, label: str) -> ReportProgress | None:
    """Put a variant's label before what is reported."""
    if report is None or not label:
        return report
    return lambda text, share: report(f"{label}: {text}", share)


def _lines() -> ReportProgress:
    last = ""

    def report(text: str, share: float) -> None:
        nonlocal last
        if text != last:
            last = text
            print(text, file=sys.stderr)

    return report
