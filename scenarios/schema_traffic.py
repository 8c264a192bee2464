"""The `traffic` section: the kind of load, its points, and the lengths of its requests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from tonnage.scenarios.schema_base import (
    Number,
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
from tonnage.scenarios.schema_lengths import ConstantLength as ConstantLength
from tonnage.scenarios.schema_lengths import FileLength as FileLength
from tonnage.scenarios.schema_lengths import Length as Length
from tonnage.scenarios.schema_lengths import LogNormalLength as LogNormalLength
from tonnage.scenarios.schema_lengths import UniformLength as UniformLength
from tonnage.scenarios.schema_session import SessionSection
from tonnage.sim.domain import BadInputError
from tonnage.sim.traffic.shapes import DIURNAL, DayShape

_Points = tuple[tuple[float, float], ...]


def shape_points(value: object) -> object:
    """Let `diurnal` be its points; check that a list is one of pairs of numbers."""
    if value is None:
        return None
    if value == "diurnal":
        return DIURNAL
    pairs = value if isinstance(value, list | tuple) else ()
    points = tuple(tuple(pair) for pair in pairs if isinstance(pair, list | tuple))
    if not points or len(points) != len(pairs) or any(len(pair) != 2 for pair in points):
        example = "[[0, 0.5], [9, 1.5], [18, 1.0]]"
        problem = f"{shown(value)} is no shape of a day; write diurnal, or hours and factors"
        raise field_error("", f"{problem}: {example}")
    return points


def checked_shape(points: _Points | None) -> _Points | None:
    """Have the domain check the points."""
    if points is not None:
        try:
            DayShape(points)
        except BadInputError as error:
            raise field_error("", str(error)) from error
    return points


# What sessions have of their own, so that nobody sets the wrong one and wonders.
_NOT_OF_SESSIONS = {
    "input_tokens": "traffic.session.new_input_tokens",
    "output_tokens": "traffic.session.output_tokens",
    "requests": "traffic.session.count",
    "path": "traffic.session.path",
}


class TrafficSection(Section):
    """What load is offered."""

    kind: Literal["closed", "resident", "poisson", "gamma", "trace", "sessions"] = "closed"
    concurrency: WholeList = (1, 8, 16, 32, 64)
    rate_per_s: PositiveList | None = None
    coefficient_of_variation: Positive = 1.0  # gamma: of the gaps between arrivals
    input_tokens: Length = ConstantLength(tokens=8192)
    output_tokens: Length = ConstantLength(tokens=1000)
    requests: Whole = 512
    path: Text | None = None
    format: Literal["auto", "mooncake", "azure", "csv", "sessions"] = "auto"
    rate_scale: Positive = 1.0  # trace: 2 replays it twice as fast
    limit: Whole | None = None  # trace: requests read at most
    timeout: PositiveSeconds | None = None  # a client gives up after this long
    output_limit_tokens: Whole | None = None  # that clients allow; null: what they will get
    session: SessionSection | None = None  # kind sessions
    # Of a rate over the day: `diurnal`, or [[hour, factor], ...]; the run begins at `start_hour`.
    shape: Annotated[
        _Points | None, BeforeValidator(shape_points), AfterValidator(checked_shape)
    ] = None
    start_hour: Annotated[Number, Field(ge=0, lt=24)] = 0.0

    @model_validator(mode="before")
    @classmethod
    def _sessions_have_a_section(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("kind") == "sessions":
            return {"session": {}, **data}
        return data

    @model_validator(mode="after")
    def _fits_the_kind(self) -> TrafficSection:
        if self.kind == "trace" and not self.path:
            raise field_error("path", "kind trace needs the path of a trace file")
        if self.kind in ("poisson", "gamma") and not self.rate_per_s:
            raise field_error("rate_per_s", f"kind {self.kind} needs a rate, such as 2.5")
        if self.kind == "resident" and self.timeout is not None:
            problem = "kind resident has requests that never arrive, so no client waits"
            raise field_error("timeout", f"{problem}; set it to null, or use kind closed")
        if self.kind == "sessions":
            self._check_sessions()
        elif self.session is not None:
            raise field_error("session", f"kind {self.kind} has no sessions; use kind sessions")
        if self.shape is not None and self.points_are != "rates":
            problem = "only a rate has a shape over the day"
            raise field_error("shape", f"{problem}; use kind poisson, gamma or sessions with one")
        if self.points_are == "users":
            self._check_concurrency()
        self._check_length("input_tokens", self.input_tokens)
        self._check_length("output_tokens", self.output_tokens)
        return self

    @property
    def points_are(self) -> Literal["users", "rates", "trace"]:
        """What a point of the curve is given by."""
        if self.kind == "trace":
            return "trace"
        by_rate = self.kind in ("poisson", "gamma") or (self.kind == "sessions" and self.rate_per_s)
        return "rates" if by_rate else "users"

    def _check_sessions(self) -> None:
        if self.session is None:
            raise field_error("session", "kind sessions needs it; remove the line for its defaults")
        defaults = TrafficSection()
        for name, mend in _NOT_OF_SESSIONS.items():
            if getattr(self, name) != getattr(defaults, name):
                raise field_error(name, f"kind sessions does not read it; set {mend}")
        if self.rate_per_s and self.concurrency != defaults.concurrency:
            problem = "sessions begin at a rate or a number of them is under way, not both"
            raise field_error("rate_per_s", f"{problem}; remove it or concurrency")

    def day_shape(self) -> DayShape | None:
        """Return the shape of the rate over the day."""
        return None if self.shape is None else DayShape(self.shape, self.start_hour)

    def files(self) -> Iterator[str]:
        """Yield the names of the files that lengths and durations are drawn from."""
        lengths = (self.input_tokens, self.output_tokens)
        yield from (one.file for one in lengths if isinstance(one, FileLength))
        if self.session is not None:
            yield from self.session.files()

    def _check_concurrency(self) -> None:
        if not self.concurrency:
            raise field_error("concurrency", "the list is empty; write it like [1, 8, 16]")
        if list(self.concurrency) != sorted(set(self.concurrency)):
            mend = f"write {sorted(set(self.concurrency))}"
            raise field_error("concurrency", f"the numbers must rise, each once; {mend}")
        if self.kind != "sessions" and self.requests < self.concurrency[-1]:
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
