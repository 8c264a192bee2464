"""Distributions in a scenario: token counts and durations, each a number or a mapping."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, model_validator

from tonnage.scenarios.schema_base import (
    Positive,
    PositiveSeconds,
    Seconds,
    Section,
    Text,
    Whole,
    field_error,
    shown,
)
from tonnage.sim.traffic.durations import (
    ConstantDuration,
    DurationDistribution,
    EmpiricalDuration,
    ExponentialDuration,
    LogNormalDuration,
)
from tonnage.sim.traffic.files import read_durations, read_lengths
from tonnage.sim.traffic.lengths import Constant, LengthDistribution, LogNormal, Uniform

# --- tokens -------------------------------------------------------------------------------------


class ConstantLength(Section):
    """The same number of tokens for every request."""

    kind: Literal["constant"] = "constant"
    tokens: Whole = 1000

    def distribution(self, folder: Path) -> LengthDistribution:
        """Return the domain's distribution."""
        return Constant(self.tokens)


class UniformLength(Section):
    """Whole numbers between two ends, both included."""

    kind: Literal["uniform"] = "uniform"
    low: Whole = 1
    high: Whole = 1000

    def distribution(self, folder: Path) -> LengthDistribution:
        """Return the domain's distribution."""
        return Uniform(self.low, self.high)


class LogNormalLength(Section):
    """A long tail given by its 95 % quantile and either its mean or its median."""

    kind: Literal["lognormal"] = "lognormal"
    mean: Positive | None = None
    median: Positive | None = None
    p95: Positive = 4000.0
    max: Whole | None = None

    @model_validator(mode="after")
    def _one_centre(self) -> LogNormalLength:
        if (self.mean is None) == (self.median is None):
            raise field_error("", "a lognormal needs either mean or median beside p95")
        return self

    def distribution(self, folder: Path) -> LengthDistribution:
        """Return the domain's distribution."""
        if self.mean is not None:
            return LogNormal.from_mean_and_p95(self.mean, self.p95, self.max)
        assert self.median is not None  # _one_centre
        return LogNormal.from_median_and_p95(self.median, self.p95, self.max)


class FileLength(Section):
    """Lengths drawn from one column of a CSV file."""

    kind: Literal["file"] = "file"
    file: Text = ""
    column: Text = "tokens"

    def distribution(self, folder: Path) -> LengthDistribution:
        """Read the file; a relative one lies in the scenario's `folder`."""
        return read_lengths(folder / self.file, self.column)


_KINDS = ("constant", "uniform", "lognormal", "file")


def _with_kind(value: object) -> object:
    """Let a bare number be a constant and a mapping with `file` a file."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return {"kind": "constant", "tokens": value}
    if isinstance(value, dict):
        kind = value.get("kind", "file" if "file" in value else None)
        if kind not in _KINDS:
            raise field_error("kind", f"{shown(kind)} is not one of {', '.join(_KINDS)}")
        return {**value, "kind": kind}
    if isinstance(value, Section):
        return value
    raise field_error(
        "",
        f"{shown(value)} is not a length; write a number of tokens, "
        "{kind: uniform, low: 1000, high: 3000}, {kind: lognormal, mean: 2000, p95: 6000} "
        "or {file: lengths.csv, column: tokens}",
    )


Length = Annotated[
    Annotated[ConstantLength | UniformLength | LogNormalLength | FileLength, Discriminator("kind")],
    BeforeValidator(_with_kind),
]

# --- durations ----------------------------------------------------------------------------------


class ConstantTime(Section):
    """The same duration every time."""

    kind: Literal["constant"] = "constant"
    duration: Seconds = 0.0

    def distribution(self, folder: Path) -> DurationDistribution:
        """Return the domain's distribution."""
        return ConstantDuration(self.duration)


class ExponentialTime(Section):
    """A memoryless duration."""

    kind: Literal["exponential"] = "exponential"
    mean: PositiveSeconds = 10.0

    def distribution(self, folder: Path) -> DurationDistribution:
        """Return the domain's distribution."""
        return ExponentialDuration(self.mean)


class LogNormalTime(Section):
    """A long tail given by its median and its 95 % quantile, cut at `max`."""

    kind: Literal["lognormal"] = "lognormal"
    median: PositiveSeconds = 10.0
    p95: PositiveSeconds = 60.0
    max: PositiveSeconds | None = None

    def distribution(self, folder: Path) -> DurationDistribution:
        """Return the domain's distribution."""
        return LogNormalDuration(self.median, self.p95, self.max)


class FileTime(Section):
    """Durations in seconds drawn from one column of a CSV file."""

    kind: Literal["file"] = "file"
    file: Text = ""
    column: Text = "seconds"

    def distribution(self, folder: Path) -> DurationDistribution:
        """Read the file; a relative one lies in the scenario's `folder`."""
        return EmpiricalDuration(read_durations(folder / self.file, self.column))


_TIMES = ("constant", "exponential", "lognormal", "file")


def _time_with_kind(value: object) -> object:
    """Let a bare duration be a constant and a mapping with `file` a file."""
    if isinstance(value, Section):
        return value
    if isinstance(value, dict):
        kind = value.get("kind", "file" if "file" in value else None)
        if kind not in _TIMES:
            raise field_error("kind", f"{shown(kind)} is not one of {', '.join(_TIMES)}")
        return {**value, "kind": kind}
    return {"kind": "constant", "duration": value}


Time = Annotated[
    Annotated[ConstantTime | ExponentialTime | LogNormalTime | FileTime, Discriminator("kind")],
    BeforeValidator(_time_with_kind),
]
