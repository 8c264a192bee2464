"""A profile of collectives alone, the all-reduce of another version than the full collection's.

How fast GPUs without NVLink reduce depends on the machine: whether they reach each other over PCIe
or only through host memory. Collections of one GPU at different times differ by two to three times
in that, and in nothing else. `python -m tonnage.calibrate.build_collectives rtx-pro-6000-vllm
0.19.0` makes the profile `rtx-pro-6000-vllm-0.19`; what it lacks, the GPU's full profile fills in.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from datetime import date
from importlib.metadata import version as installed_version
from pathlib import Path

from tonnage.calibrate import fit_comm
from tonnage.calibrate.build import EXPECTED, errors_by_operator, plain_columns
from tonnage.calibrate.imports import wheel
from tonnage.sim.cost.models.comm import OPERATIONS
from tonnage.sim.cost.profile import SUFFIX, Profile, ProfileHeader, write_profile
from tonnage.sim.domain import BadInputError

_EXPERTS = "expert_comm"  # not of an engine version


def build_collectives(gpu: str, engine: str, version: str, day: date) -> Profile:
    """Return the profile of collectives on a GPU, the all-reduce that of an engine version.

    Raises BadInputError where the package is missing or has no such collection.
    """
    folder = wheel.GPU_FOLDERS.get(gpu)
    if folder is None or not wheel.kernel_tables(folder, "comm", engine, version):
        what = f"all-reduce of {engine} {version} on {gpu}"
        raise BadInputError(f"{wheel.DISTRIBUTION} has no {what}")
    fit = fit_comm.fit(folder, engine, version)
    tables = {name: rows for name, rows in fit.tables.items() if len(rows) and name != _EXPERTS}
    header = {
        "name": f"{gpu}-{engine}-{short_version(version)}",
        "gpu": gpu,
        "engine": engine,
        "engine_version": version,
        "source": "imported",
        "source_text": (
            f"collectives' timings of {wheel.DISTRIBUTION} {wheel.package_version()} (NVIDIA "
            f"CORPORATION & AFFILIATES), {folder}, {engine} {version}; changed: filtered, in SI "
            "units, fitted"
        ),
        "licence": wheel.LICENCE,
        "date": day.isoformat(),
        "tonnage_version": installed_version("tonnage"),
        "fitted": {"comm": fit.fitted["comm"]},
        "errors": errors_by_operator(fit.errors[fit.errors["operator"].isin(list(OPERATIONS))]),
        "missing": [name for name in EXPECTED if name not in tables],
    }
    plain = {name: plain_columns(rows) for name, rows in tables.items()}
    return Profile(ProfileHeader.model_validate(header), plain)


def short_version(version: str) -> str:
    """Return the first two numbers of a version, as in 0.19."""
    return ".".join(re.findall(r"\d+", version)[:2])


def main(arguments: Iterable[str] | None = None) -> None:
    """Make one profile of collectives."""
    parser = argparse.ArgumentParser(
        prog="python -m tonnage.calibrate.build_collectives", description=__doc__
    )
    parser.add_argument("name", help="such as rtx-pro-6000-vllm")
    parser.add_argument("version", help="of the engine that was timed, such as 0.19.0")
    parser.add_argument("--out", type=Path, default=Path("scenarios/profiles"))
    parser.add_argument("--date", type=date.fromisoformat, default=date.today())
    given = parser.parse_args(None if arguments is None else list(arguments))
    gpu, _, engine = given.name.rpartition("-")
    profile = build_collectives(gpu, engine, given.version, given.date)
    place = given.out / f"{profile.header.name}{SUFFIX}"
    write_profile(profile, place)
    print(f"{place}: {sum(map(len, profile.tables.values()))} rows")


if __name__ == "__main__":
    main()
