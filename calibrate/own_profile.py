"""A profile of this machine: measured, fitted, held out, and put where `profile: auto` looks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import date
from importlib.metadata import version
from typing import Any

import numpy as np

from tonnage.calibrate.build import EXPECTED, errors_by_operator, plain_columns, residual_counts
from tonnage.calibrate.held_out import rounded
from tonnage.calibrate.own_fits import fits_of
from tonnage.calibrate.own_tables import FRAMEWORK, random_experts, tables_of
from tonnage.scenarios.catalogue import load_gpu
from tonnage.sim.cost.profile import Profile, ProfileHeader
from tonnage.sim.cost.table_operators import TABLE_OPERATORS
from tonnage.sim.domain import BadInputError

Row = Mapping[str, Any]

_CLOCKS = {"sm_clock_hz": "sm_hz", "memory_clock_hz": "memory_hz", "power_w": "power_w"}


def profile_of(rows: Iterable[Row], gpu: str, *, day: date | None = None) -> Profile:
    """Return the profile of measured rows, which are all of one machine.

    `gpu`: the catalogue's name of what was measured. `day`: of its header (default: today).
    """
    kept = list(rows)
    if not kept:
        raise BadInputError("nothing was measured: there are no rows to make a profile of")
    spec = load_gpu(gpu)
    kernels_version = version("tonnage")
    tables = tables_of(kept, kernels_version)
    for table in tables.values():
        table["seconds"] = rounded(table["seconds"])
    fits = fits_of(tables, random_experts(kept), spec)
    origin = kept[0]["provenance"]
    header = {
        "name": f"{gpu}-{FRAMEWORK}",
        "gpu": gpu,
        "engine": FRAMEWORK,
        "engine_version": kernels_version,
        "source": "measured",
        "source_text": f"the kernels of this package on {origin['device']}",
        "date": (day or date.today()).isoformat(),
        "tonnage_version": kernels_version,
        "driver": origin["driver"],
        "clocks": _clocks(kept),
        "fitted": {**fits.fitted, "machine": machine_of(kept)},
        "errors": errors_by_operator(fits.frame()) if fits.errors else {},
        "missing": [name for name in EXPECTED if name not in tables],
        "notes": _notes(origin, kept),
    }
    plain = {name: plain_columns(table) for name, table in tables.items()}
    profile = Profile(ProfileHeader.model_validate(header), plain)
    answered = [(name, plain[name]) for name in TABLE_OPERATORS if name in plain]
    counts = residual_counts(profile, answered)
    return Profile(profile.header.model_copy(update={"residuals": counts}), plain)


def machine_of(rows: Iterable[Row]) -> dict[str, Any]:
    """Return what the rows were measured on: device, threads, versions; what tables leave out."""
    kept = list(rows)
    origin = kept[0]["provenance"]
    names = ("device", "threads", "torch", "triton", "cuda", "commit")
    found = {name: origin[name] for name in names if origin[name] is not None}
    return {**found, "latent_widths": _latent_widths(kept)}


def _latent_widths(rows: Iterable[Row]) -> dict[str, list[int]]:
    """Return the widths of a key and a value in the rows of MLA prefill, by the number of heads."""
    found: dict[str, list[int]] = {}
    for row in rows:
        if row["kernel"] == "mla_prefill":
            axes = row["axes"]
            found.setdefault(str(axes["heads"]), [axes["key"], axes["value"]])
    return found


def _clocks(rows: Iterable[Row]) -> dict[str, float]:
    """Return the medians of what a GPU did while it was measured; empty for a CPU."""
    kept = list(rows)
    found = {}
    for name, as_named in _CLOCKS.items():
        values = [row["state"][name] for row in kept if row["state"][name] is not None]
        if values:
            found[as_named] = float(np.median(values))
    return found


def _notes(origin: Row, rows: list[Row]) -> list[str]:
    threads = origin["threads"]
    timed = "processor time" if threads == 1 else "wall time"
    on = f"{threads} {'thread' if threads == 1 else 'threads'} of a CPU, {timed}" if threads else ""
    dates = sorted({str(row["provenance"]["date"])[:10] for row in rows})
    measured = f"measured on {dates[0]}" + (f" to {dates[-1]}" if len(dates) > 1 else "")
    versions = f"torch {origin['torch']}" + (f", triton {origin['triton']}" if not threads else "")
    return [f"{len(rows):,} points, {measured}, {versions}" + (f", {on}" if on else "")]
