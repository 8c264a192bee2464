"""A profile of one GPU under one engine, put together from what every part makes of its tables.

`python -m tonnage.calibrate.build` makes the profiles that ship with the package.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterable, Iterator
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pandas as pd

from tonnage.calibrate import fit_attention, fit_comm, fit_gemm, fit_moe, moe_rows
from tonnage.calibrate.imports import attention, sparse_attention, wheel
from tonnage.scenarios.catalogue import load_gpu
from tonnage.sim.cost.operator_models import operator_models
from tonnage.sim.cost.profile import (
    RESIDUAL_OCTAVES,
    SUFFIX,
    Profile,
    ProfileHeader,
    write_profile,
)
from tonnage.sim.cost.table_operators import TABLE_OPERATORS, Key
from tonnage.sim.domain import BadInputError, FloatArray

ENGINES = ("sglang", "vllm", "trtllm")
SHIPPED_GPUS = ("h100-sxm", "h200-sxm", "b200-sxm", "b300-sxm", "gb200", "gb300")

ReportProgress = Callable[[str, float], None]


class Part(Protocol):
    """What makes the tables of some operators; `gpu` is a folder of the package (`h200_sxm`)."""

    def tables(self, gpu: str, engine: str) -> dict[str, pd.DataFrame]:
        """Return thinned tables by name; those that the source lacks are absent or empty."""

    def fitted(self, gpu: str, engine: str) -> dict[str, Any]:
        """Return the parameters of the fitted forms by operator, as JSON values."""

    def held_out_errors(self, gpu: str, engine: str) -> pd.DataFrame:
        """Return a row per operator, format and regime: held_out, n, median, p90, low, high."""


# In the order of their work.
PARTS: dict[str, Part] = {
    "gemm": fit_gemm,
    "moe": fit_moe,
    "attention": fit_attention,
    "comm": fit_comm,
}
# The tables that a complete source has.
EXPECTED = (
    *("gemm", "quantise", "moe", "attention_decode", "attention_prefill", "linear_attention"),
    *("mla_bmm", "all_reduce", "all_gather", "all_to_all", "expert_comm"),
)
_BINS = 40
_MOST_SERIES = 400


def build_profile(
    gpu: str,
    engine: str,
    *,
    day: date | None = None,
    progress: ReportProgress | None = None,
    only: Collection[str] | None = None,
) -> Profile:
    """Return the profile of a GPU (`h200-sxm`) under an engine, from the installed package.

    `day` is the date in its header (default: today); with the same date it has the same bytes.
    `only`: names of `PARTS`, for a profile of some operators. Raises BadInputError where the
    package is missing or has no such data.
    """
    folder = _folder(gpu, engine)
    chosen = {name: part for name, part in PARTS.items() if only is None or name in only}
    tables: dict[str, pd.DataFrame] = {}
    fitted: dict[str, Any] = {}
    errors = []
    for index, (name, part) in enumerate(chosen.items()):
        if progress is not None:
            progress(f"{gpu} {engine}: {name}", index / len(chosen))
        tables |= {
            table: plain_columns(rows)
            for table, rows in part.tables(folder, engine).items()
            if len(rows)
        }
        fitted |= part.fitted(folder, engine)
        errors.append(part.held_out_errors(folder, engine))
    if not tables:
        raise BadInputError(f"{wheel.DISTRIBUTION} has no tables of {engine} on {gpu}")
    header = {
        **_origin(gpu, engine, day or date.today()),
        "fitted": fitted,
        "errors": errors_by_operator(pd.concat(errors)),
        "missing": [name for name in EXPECTED if name not in tables],
    }
    profile = Profile(ProfileHeader.model_validate(header), tables)
    if progress is not None:
        progress(f"{gpu} {engine}: residuals of all rows", 1.0)
    counts = residual_counts(profile, measured_rows(folder, engine, tables))
    return Profile(profile.header.model_copy(update={"residuals": counts}), tables)


def measured_rows(
    folder: str, engine: str, tables: Collection[str]
) -> Iterator[tuple[str, pd.DataFrame]]:
    """Yield every measured row behind some tables, before thinning, by table."""
    if "gemm" in tables:
        yield "gemm", fit_gemm.engine_rows(folder, engine)
    if "moe" in tables:
        rows = moe_rows.engine_rows(folder, engine)
        yield "moe", rows.assign(seconds=rows["measured_s"])  # before it was made to rise
    if "attention_decode" in tables:
        yield "attention_decode", attention.decode_rows(folder, engine)
        yield "attention_decode", sparse_attention.decode_rows(folder)
    if "attention_prefill" in tables:
        yield "attention_prefill", attention.prefill_rows(folder, engine)
        yield "attention_prefill", sparse_attention.prefill_rows(folder)


def residual_counts(
    profile: Profile, measured: Iterable[tuple[str, pd.DataFrame]]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return how many rows lie in each bin of log2(measured / predicted), by table and format.

    Of a format with more than `_MOST_SERIES` curves, so many are taken, spread over all of them.
    """
    models = operator_models(profile, load_gpu(profile.header.gpu))
    edges = np.linspace(-RESIDUAL_OCTAVES, RESIDUAL_OCTAVES, _BINS + 1)
    counts: dict[str, dict[str, tuple[int, ...]]] = {}
    for table, rows in measured:
        operator = TABLE_OPERATORS[table]
        by_format: dict[str, list[tuple[Key, FloatArray, FloatArray]]] = {}
        for one in operator.series(rows):
            by_format.setdefault(operator.format_of(one[0]), []).append(one)
        for name, series in sorted(by_format.items()):
            found = np.zeros(_BINS, dtype=np.int64)
            for key, x, seconds in series[:: -(-len(series) // _MOST_SERIES)]:
                octaves = np.log2(seconds / operator.ask(models, key, x).seconds)
                clipped = np.clip(octaves, -RESIDUAL_OCTAVES, RESIDUAL_OCTAVES)
                found += np.histogram(clipped, edges)[0]
            counts.setdefault(table, {})[name] = tuple(found.tolist())
    return counts


def _folder(gpu: str, engine: str) -> str:
    """Return the package's folder of a GPU, or refuse what it does not have."""
    if engine not in ENGINES:
        raise BadInputError(f"engine: {engine!r}: use one of {', '.join(ENGINES)}")
    if gpu not in wheel.GPU_FOLDERS:
        known = ", ".join(wheel.GPU_FOLDERS)
        raise BadInputError(f"gpu: {wheel.DISTRIBUTION} has no timings of {gpu!r}; it has {known}")
    wheel.package_version()
    return wheel.GPU_FOLDERS[gpu]


def _origin(gpu: str, engine: str, day: date) -> dict[str, Any]:
    folder = wheel.GPU_FOLDERS[gpu]
    package = f"{wheel.DISTRIBUTION} {wheel.package_version()}"
    return {
        "name": f"{gpu}-{engine}",
        "gpu": gpu,
        "engine": engine,
        "engine_version": wheel.current_version(folder, engine) or "",
        "source": "imported",
        "source_text": (
            f"kernel timings of {package} (NVIDIA CORPORATION & AFFILIATES), {folder}; changed: "
            "filtered, in SI units, thinned, fitted; rows name the framework and the kernel"
        ),
        "licence": wheel.LICENCE,
        "date": day.isoformat(),
        "tonnage_version": version("tonnage"),
    }


def plain_columns(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table whose categories are text, with rows numbered from 0."""
    plain = table.reset_index(drop=True)
    for name in plain.columns:
        if isinstance(plain[name].dtype, pd.CategoricalDtype):
            plain[name] = plain[name].astype(str)
    return plain


def errors_by_operator(rows: pd.DataFrame) -> dict[str, dict[str, dict[str, Any]]]:
    """Return held-out errors by operator and format; those of extrapolation stand inside them.

    Where nothing but extrapolation was tried, its figures stand alone.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    ordered = rows.sort_values(["operator", "format", "regime"], ascending=[True, True, False])
    for row in ordered.to_dict("records"):
        formats = found.setdefault(str(row["operator"]), {})
        error = {
            "regime": str(row["regime"]),
            "held_out": str(row["held_out"]),
            "n": int(row["n"]),
            "median": _rounded(row["median"]),
            "p90": _rounded(row["p90"]),
            "interval": [_rounded(row["low"]), _rounded(row["high"])],
        }
        beside = formats.setdefault(str(row["format"]), error)
        if beside is not error:
            beside["extrapolation"] = error
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def main(arguments: Iterable[str] | None = None) -> None:
    """Make shipped profiles; a line per part on the terminal."""
    parser = argparse.ArgumentParser(prog="python -m tonnage.calibrate.build", description=__doc__)
    parser.add_argument("names", nargs="*", help="such as h200-sxm-sglang; default: all")
    parser.add_argument("--out", type=Path, default=Path("scenarios/profiles"))
    parser.add_argument("--date", type=date.fromisoformat, default=None)
    given = parser.parse_args(None if arguments is None else list(arguments))
    names = [f"{gpu}-{engine}" for gpu in SHIPPED_GPUS for engine in ENGINES]
    for name in given.names or names:
        gpu, _, engine = name.rpartition("-")
        profile = build_profile(gpu, engine, day=given.date, progress=_print_line)
        place = given.out / f"{name}{SUFFIX}"
        write_profile(profile, place)
        size = sum(file.stat().st_size for file in place.iterdir())
        print(f"{place}: {size / 1e6:.2f} MB, {sum(map(len, profile.tables.values())):,} rows")


def _print_line(text: str, share: float) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    main()
