"""Arguments and options that several verbs take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ScenarioName = Annotated[
    str, typer.Argument(metavar="SCENARIO", help="A scenario file or a shipped name.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FIELD=VALUE", help="Override a field, as often as needed."),
]
JsonFile = Annotated[
    str | None,
    typer.Option("--json", metavar="FILE|-", help="Write it as JSON; '-' prints only it."),
]
SummaryFolder = Annotated[
    Path | None, typer.Option("--out", metavar="DIR", help="Write summary.json there.")
]
