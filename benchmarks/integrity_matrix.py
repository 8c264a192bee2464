"""What each check of KV pages finds, by the ten thousand: the matrix of docs/integrity.md.

nice python benchmarks/integrity_matrix.py                # prints the tables
nice python benchmarks/integrity_matrix.py --write        # puts them into docs/integrity.md

Each class of faults is injected into a small copy of two deployments on random traffic, with one
check at a time. Finished rows are kept in a file and not run again. Then the statements that the
document makes are checked; one that does not hold ends the program with code 1.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tonnage.integrity_study import StudyTask, crew_of, family_of, results
from tonnage.scenarios.load import parse_scenario
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import BadInputError
from tonnage.sim.planning.journal import Journal
from tonnage.sim.serving.data_faults import FaultClass

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "integrity.md"
ROWS = ROOT / "out" / "integrity-matrix.jsonl"
COMMAND = "python benchmarks/integrity_matrix.py --write"
SEED = 0
_BEGIN, _END = "<!-- begin generated -->", "<!-- end generated -->"

_COMMON = {"model": "llama-3.1-8b", "gpu": "h100-sxm", "seed": SEED}
APART = {
    **_COMMON,
    "name": "apart",
    "engine": {"name": "sglang", "version": "0.5.23"},
    "pools": {"prefill": {"tp": 1, "page_tokens": 64}, "decode": {"tp": 1, "page_tokens": 64}},
}
SHARED = {
    **_COMMON,
    "name": "shared",
    "engine": {"name": "vllm"},
    "pools": {"serve": {"tp": 1}},
    "cache": {"gpu": True, "host": "8GB"},
}
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """One table: a deployment, and how often each check meets each class."""

    title: str
    scenario: Mapping[str, Any]
    counts: Mapping[str, int]


def parts(count: int, fewer: int) -> tuple[Part, ...]:
    """Return the tables: all classes without a check and with tags, fewer of the others."""
    others = dict.fromkeys(("decode-tags", "overlapped", "canary", "checksum"), fewer)
    return (
        Part(
            "Prefill and decode apart (SGLang's rules)",
            APART,
            {"none": count, "batched": count, **others},
        ),
        Part(
            "One pool with a prefix cache (vLLM's rules)",
            SHARED,
            {"none": count, "batched": count, "canary": fewer},
        ),
    )


def measured(part: Part, rows: Journal, workers: int) -> dict[tuple[str, str], Row]:
    """Run what the file has not, and return the rows that can be by check and class."""
    scenario = parse_scenario(dict(part.scenario))
    tasks = [
        StudyTask(scenario, check, kind, count)
        for check, count in part.counts.items()
        for kind in FaultClass
    ]
    keys = {_key(scenario, task): task for task in tasks}
    by_task = {task.key: key for key, task in keys.items()}
    waiting = {task.key: task for key, task in keys.items() if key not in rows.entries}
    done = results(waiting, crew_of(workers, len(waiting)))
    for number, (task_key, result) in enumerate(done, 1):
        rows.append({"key": by_task[task_key], **result})
        print(f"{by_task[task_key]}: {number} of {len(waiting)}", file=sys.stderr, flush=True)
    found = {(task.check, str(task.kind)): rows.entries[key] for key, task in keys.items()}
    return {place: entry for place, entry in found.items() if entry["row"] is not None}


def _key(scenario: Scenario, task: StudyTask) -> str:
    """Name a row; another version of the package measures again."""
    return f"{version('tonnage')} {scenario.name} {task.check} {task.kind} {task.count} seed {SEED}"


# --- what must hold -----------------------------------------------------------------------------


def deviations(found: Mapping[tuple[str, str], Row]) -> Iterator[str]:
    """Say where a row is not as docs/integrity.md has it."""
    for (check, kind), entry in found.items():
        for problem in _problems(check, family_of(FaultClass(kind)), entry["row"]):
            yield f"{kind}, check {check}: {problem}"


def _problems(check: str, family: str, row: Row) -> Iterator[str]:
    caught = row["caught_before"] + row["caught_after"]
    tags = check in ("batched", "decode-tags", "overlapped")
    if not row["met"]:
        yield "nothing was met"
    if tags and row["clean_aborted"]:
        yield f"{row['clean_aborted']} clean requests were aborted"
    if check == "none" and (not row["wrong_reads"] or caught or row["aborted"]):
        yield "without a check wrong reads are counted, and nothing else happens"
    if check == "batched" and family != "content":
        if row["caught_before"] != row["met"]:
            yield f"{row['caught_before']} caught before a read, of {row['met']} met"
        if row["wrong_reads"]:
            yield f"{row['wrong_reads']} wrong reads"
    if tags and family == "content" and caught:
        yield f"{caught} faults of content were caught by tags"
    if check == "decode-tags" and family == "writer" and (caught or not row["wrong_reads"]):
        yield "tags at decode caught a former owner's write, or nobody read it"


# --- the document -------------------------------------------------------------------------------


def matrix_table(part: Part, found: Mapping[tuple[str, str], Row]) -> str:
    """Return the share of met faults that each check caught, class by class."""
    lines = [_line("class", *part.counts), _rule(1 + len(part.counts))]
    for kind in FaultClass:
        cells = [_caught(found.get((check, str(kind)))) for check in part.counts]
        if any(cells):
            lines.append(_line(f"`{kind}`", *cells))
    return "\n".join(lines)


def _caught(entry: Row | None) -> str:
    if entry is None:
        return ""
    row = entry["row"]
    harmful = row["caught_before"] + row["caught_after"] + row["missed"]
    before, after = (row[f"caught_{when}"] / max(harmful, 1) for when in ("before", "after"))
    if row["caught_before"] and row["caught_after"]:
        return f"{before:.1%}, and {after:.1%} late"
    if row["caught_after"]:
        return f"{after:.1%} late"
    return f"{before:.1%}" if row["caught_before"] else "0"


_COLUMNS = {
    "injected": "injected",
    "met": "met",
    "before": "caught_before",
    "after": "caught_after",
    "missed": "missed",
    "wrong reads": "wrong_reads",
    "victims": "victims",
    "aborted": "aborted",
    "clean ones": "clean_aborted",
    "writes refused": "refused_writes",
    "stops": "stops",
    "lost": "lost",
}


def count_table(part: Part, found: Mapping[tuple[str, str], Row]) -> str:
    """Return all counts, a line per check and class."""
    lines = [_line("check", "class", *_COLUMNS), _rule(2 + len(_COLUMNS))]
    for (check, kind), entry in found.items():
        cells = [f"{entry['row'][name]:,}" for name in _COLUMNS.values()]
        lines.append(_line(check, f"`{kind}`", *cells))
    return "\n".join(lines)


def section_of(part: Part, found: Mapping[tuple[str, str], Row]) -> str:
    """Return one part of the document."""
    faults = sum(entry["row"]["injected"] for entry in found.values())
    cpu_s = sum(entry["cpu_s"] for entry in found.values())
    counts = ", ".join(f"{check} {count:,}" for check, count in part.counts.items())
    return (
        f"### {part.title}\n\n"
        "Share of the faults caught before the first wrong read; late: after it; the rest was "
        "missed. Faults that led to nothing are left out.\n\n"
        f"{matrix_table(part, found)}\n\n"
        f"Faults of each class: {counts}; {faults:,} in all, {cpu_s:,.0f} s of one core, "
        f"seed {SEED}.\n\n{count_table(part, found)}\n"
    )


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(columns: int) -> str:
    return f"|{'---|' * columns}"


def with_section(document: str, section: str) -> str:
    """Return the document with its generated part replaced."""
    before, rest = document.split(_BEGIN)
    return f"{before}{_BEGIN}\n{section}{_END}{rest.split(_END)[1]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables, or write them into the document; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--write", action="store_true", help="write docs/integrity.md")
    parser.add_argument("--injections", type=int, default=10_000, help="no check, and page tags")
    parser.add_argument("--fewer", type=int, default=2_000, help="the other checks")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--rows", type=Path, default=ROWS, help="the file of finished rows")
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except BadInputError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    rows, sections, problems = Journal(options.rows), [], []
    for part in parts(options.injections, options.fewer):
        found = measured(part, rows, options.workers)
        sections.append(section_of(part, found))
        problems += [f"{part.scenario['name']}: {text}" for text in deviations(found)]
    section = "\n".join(sections)
    if options.write:
        DOCUMENT.write_text(with_section(DOCUMENT.read_text(), section))
    else:
        print(section)
    for problem in problems:
        print(f"does not hold: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
