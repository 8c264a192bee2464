"""The files that exports are compared with; `python -m tests.sim.export.golden` renews them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import tonnage
from tests.sim.export.plans import PLANS
from tonnage.plan_export import Exported
from tonnage.sim.export.formats import FORMATS
from tonnage.sim.planning.fleet_plan import FleetPlan

FOLDER = Path(__file__).resolve().parents[2] / "golden"
# Charts are plotly's own markup, of its version; what they draw is tested on the figures.
_CHART = re.compile(r"<div style=.*?</div>\n(?=<h2>|<p class)", re.DOTALL)


def formats_of(plan: FleetPlan) -> list[str]:
    """Return the formats that a plan can be exported to."""
    return [to for to in FORMATS if to not in ("sglang", "vllm") or to == plan.engine]


@cache
def exported(name: str, to: str) -> Exported:
    """Return a plan in a format."""
    return tonnage.export(PLANS[name], to)


def golden_text(name: str, to: str) -> str:
    """Return what the golden file holds: the text, without the markup of charts."""
    text = exported(name, to).text
    return _CHART.sub("<div>chart</div>\n", text) if to == "html" else text


def cases() -> Iterator[tuple[str, str]]:
    """Yield every plan with every format."""
    for name, plan in PLANS.items():
        for to in formats_of(plan):
            yield name, to


def golden_path(name: str, to: str) -> Path:
    """Return where the golden file of a plan in a format lies."""
    return FOLDER / exported(name, to).file_name


def main() -> None:
    """Write every golden file; review the difference before it is kept."""
    FOLDER.mkdir(exist_ok=True)
    for name, to in cases():
        golden_path(name, to).write_text(golden_text(name, to), encoding="utf-8")


if __name__ == "__main__":
    main()
