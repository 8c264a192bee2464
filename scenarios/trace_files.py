"""Where trace files are: beside a scenario, shipped with the package, or in the working folder."""

from __future__ import annotations

from pathlib import Path

from tonnage.sim.domain import BadInputError

SHIPPED_TRACES = Path(__file__).parent / "traces"


def find_trace(name: str, folder: Path) -> Path:
    """Look beside the scenario, among the shipped traces, then in the working folder.

    A folder is a trace too, of sessions in files of their own.
    """
    for place in (folder, SHIPPED_TRACES, Path()):
        if (place / name).exists():
            return place / name
    shipped = ", ".join(sorted(path.name for path in SHIPPED_TRACES.glob("*.gz")))
    raise BadInputError(
        f"no trace file {name!r} beside the scenario or in the working folder; "
        f"give its path, or a shipped one: {shipped}"
    )
