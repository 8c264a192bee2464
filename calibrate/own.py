"""Calibrate this machine: grid, measurement, fit, profile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tonnage.calibrate.between_ranks import collect_exchanges, exchanges
from tonnage.calibrate.collect import Collected, Measurement, ReportProgress, Row, collect
from tonnage.calibrate.grid import grid
from tonnage.calibrate.machines import catalogue_name, device_kind
from tonnage.calibrate.own_profile import profile_of
from tonnage.calibrate.sizes import Sizes, sizes_for
from tonnage.calibrate.wanted import wanted_of
from tonnage.scenarios.catalogue import load_gpu
from tonnage.scenarios.profiles import state_folder
from tonnage.sim.cost.profile import SUFFIX, Profile, check_place, write_profile
from tonnage.sim.domain import BadInputError

FINISHED = ".finished.jsonl"


@dataclass(frozen=True, slots=True)
class Calibration:
    """What to calibrate; None is this machine's own: its best device, its GPU's name.

    `models`: names of scenarios or models (`calibrate.wanted`). `out`: the profile's folder, by
    default where `profile: auto` looks first. `log`: the file of rows, by default in the user's
    state folder. `fresh`: leave what an interrupted run measured. `sizes`: of the grid, instead of
    the device's quick or full ones. `ranks`: between so many processes collectives are measured,
    by default all GPUs of `cuda`. `budget_s`: wall time after which no point is begun.
    """

    device: str | None = None
    models: tuple[str, ...] = ()
    quick: bool = False
    threads: int = 1
    gpu: str | None = None
    out: Path | None = None
    log: Path | None = None
    fresh: bool = False
    sizes: Sizes | None = None
    ranks: int | None = None
    budget_s: float | None = None


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A profile, where it is, what was measured for it, and formats that no kernel serves."""

    profile: Profile
    place: Path
    collected: Collected
    unserved: tuple[str, ...]
    ranks: int = 1  # between which collectives were measured

    def report(self) -> dict[str, Any]:
        """Return what is said about the measurement beside the profile's header, as JSON."""
        found = self.collected
        return {
            "points": len(found.rows),
            "measured_now": found.new_rows,
            "measured_s": round(found.measured_s, 1),
            "not_reached": found.not_reached,
            "ranks": self.ranks,
            "measure_again": [_doubt(row) for row in found.doubtful],
            "not_run": list(found.not_run),
            "unserved": list(self.unserved),
        }


def _doubt(row: Row) -> dict[str, Any]:
    timing = row["timing"]
    spread = timing["seconds_p80"] / timing["seconds_p20"]
    return {"kernel": row["kernel"], "axes": dict(row["axes"]), "p80_over_p20": round(spread, 2)}


def calibrate(asked: Calibration, progress: ReportProgress | None = None) -> Calibrated:
    """Measure, fit and write a profile of this machine.

    Raises BadInputError where torch or the device is missing, or a model has no such layout. An
    interrupted run leaves a log of whole rows, and the next one goes on with it; so does one that
    its budget ended, whose profile holds what was measured.
    """
    device, device_name = _device(asked.device)
    kind = device_kind(device)
    if asked.threads < 1:
        raise BadInputError(f"threads: {asked.threads}: use 1 or more")
    gpu = catalogue_name(device, device_name, asked.gpu)
    wanted = wanted_of(asked.models, kind)
    sizes = asked.sizes or sizes_for(kind, asked.quick)
    planned = grid(wanted, sizes, load_gpu(gpu), kind == "cuda")
    place = asked.out or state_folder() / f"{gpu}-tonnage{SUFFIX}"
    check_place(place)
    log = asked.log or _log_file(gpu, asked.quick)
    if asked.fresh:
        log.unlink(missing_ok=True)
    ranks = _ranks(asked.ranks, device)
    measurement = Measurement(device, asked.threads, sizes)
    between = collect_exchanges(exchanges(kind, ranks), measurement, log, progress)
    collected = collect(planned.points, measurement, log, progress, asked.budget_s)
    if progress is not None:
        progress("fitting", 1.0)
    profile = profile_of([*collected.rows, *between.rows], gpu)
    place.parent.mkdir(parents=True, exist_ok=True)
    write_profile(profile, place)
    if not collected.not_reached:
        log.replace(log.with_suffix(FINISHED))
    every = replace(
        collected,
        rows=(*collected.rows, *between.rows),
        new_rows=collected.new_rows + between.new_rows,
        measured_s=collected.measured_s + between.measured_s,
    )
    return Calibrated(profile, place, every, planned.unserved, ranks)


def _ranks(asked: int | None, device: str) -> int:
    """Return the ranks between which collectives are measured: all GPUs, or as many as asked."""
    from tonnage.kernels.collectives import check_ranks, ranks_there

    if asked is None:
        return ranks_there(device) if device in ("cpu", "cuda") else 1
    if asked < 1:
        raise BadInputError(f"ranks: {asked}: use 1 or more")
    check_ranks(device_kind(device), asked)
    return asked


def _device(asked: str | None) -> tuple[str, str]:
    if asked is not None:
        device_kind(asked)  # a misspelt one is answered without torch
    if find_spec("torch") is None:
        raise BadInputError("calibrate needs torch: pip install 'tonnage[kernels]'")
    from tonnage.kernels.machine import best_device, check_device

    device = best_device() if asked is None else asked
    return device, check_device(device)


def _log_file(gpu: str, quick: bool) -> Path:
    folder = state_folder().parent / "calibration"
    return folder / f"{gpu}-{'quick' if quick else 'full'}.jsonl"


def split_names(texts: Sequence[str]) -> tuple[str, ...]:
    """Return the names of options that may hold several, with commas between them."""
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())
