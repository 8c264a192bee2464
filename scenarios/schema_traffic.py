"""The `traffic` section: the kind of load, its points, and the lengths of its requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Discriminator, model_validator

from tonnage.scenarios.schema_base import (
    Positive,
    PositiveList,
    PositiveSeconds,
    Section,
    Text,
    Whole,
    WholeList,
    field_error,
    shown,
)
from tonnage.sim.domain import BadInputError
from tonnage.sim.traffic.files import read_lengths
from tonnage.sim.traffic.lengths import Constant, LengthDistribution, LogNormal, Uniform


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


class TrafficSection(Section):
    """What load is offered."""

    kind: Literal["closed", "resident", "poisson", "gamma", "trace"] = "closed"
    concurrency: WholeList = (1, 8, 16, 32, 64)
    rate_per_s: PositiveList | None = None
    coefficient_of_variation: Positive = 1.0  # gamma: of the gaps between arrivals
    input_tokens: Length = ConstantLength(tokens=8192)
    output_tokens: Length = ConstantLength(tokens=1000)
    requests: Whole = 512
    path: Text | None = None
    format: Literal["auto", "mooncake", "azure", "csv"] = "auto"
    rate_scale: Positive = 1.0  # trace: 2 replays it twice as fast
    limit: Whole | None = None  # trace: requests read at most
    timeout: PositiveSeconds | None = None  # a client gives up after this long
    output_limit_tokens: Whole | None = None  # that clients allow; null: what they will get

    @model_validator(mode="after")
    def _fits_the_kind(self) -> TrafficSection:
        if self.kind == "trace" and not self.path:
            raise field_error("path", "kind trace needs the path of a trace file")
        if self.kind in ("poisson", "gamma") and not self.rate_per_s:
            raise field_error("rate_per_s", f"kind {self.kind} needs a rate, such as 2.5")
        if self.kind == "resident" and self.timeout is not None:
            problem = "kind resident has requests that never arrive, so no client waits"
            raise field_error("timeout", f"{problem}; set it to null, or use kind closed")
        if self.kind in ("closed", "resident"):
            self._check_concurrency()
        self._check_length("input_tokens", self.input_tokens)
        self._check_length("output_tokens", self.output_tokens)
        return self

    def _check_concurrency(self) -> None:
        if not self.concurrency:
            raise field_error("concurrency", "the list is empty; write it like [1, 8, 16]")
        if list(self.concurrency) != sorted(set(self.concurrency)):
            mend = f"write {sorted(set(self.concurrency))}"
            raise field_error("concurrency", f"the numbers must rise, each once; {mend}")
        if self.requests < self.concurrency[-1]:
            problem = f"{self.requests} requests cannot keep {self.concurrency[-1]} in the system"
            raise field_error("requests", f"{problem}; ask for several times as many")

    def _check_length(self, name: str, length: Length) -> None:
        """Build the distribution once, so that its own conditions are met here; not the file's."""
        if isinstance(length, FileLength):
            return
        try:
            length.distribution(Path())
        except BadInputError as error:
            raise field_error(name, str(error)) from error
