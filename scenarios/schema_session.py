"""The `traffic.session` section: what conversations are like, or a trace of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from tonnage.scenarios.schema_base import Number, Section, Text, Whole, WholeOrZero, field_error
from tonnage.scenarios.schema_lengths import (
    ConstantLength,
    FileLength,
    FileTime,
    Length,
    LogNormalLength,
    LogNormalTime,
    Time,
)
from tonnage.sim.domain import BadInputError
from tonnage.sim.traffic.spec import SessionSpec

_LENGTHS = (
    "turns",
    "first_input_tokens",
    "new_input_tokens",
    "output_tokens",
    "compacted_tokens",
)


class SessionSection(Section):
    """Conversations whose turns repeat what was said before; the defaults are coding agents'.

    Lengths and think times by default are medians and p95 of recorded ones (docs/traffic.md).
    With `path` recorded sessions are replayed, and only `count` of the other fields holds.
    """

    path: Text | None = None
    count: Whole | None = None  # null: all that `path` holds, or 200
    turns: Length = LogNormalLength(median=39, p95=227, max=514)
    shared_prefix_tokens: WholeOrZero = 15_055  # tools and system prompt
    shared_prefixes: Whole = 1
    zipf_exponent: Annotated[Number, Field(ge=0, le=5)] = 1.0
    first_input_tokens: Length = ConstantLength(tokens=8000)
    new_input_tokens: Length = LogNormalLength(median=278, p95=5709)
    output_tokens: Length = LogNormalLength(median=216, p95=1554)
    think_time: Time = LogNormalTime(median=10.0, p95=467.0)
    compact_at_tokens: Whole | None = 128_000  # assumed, as are those that remain; null: never
    compacted_tokens: Length = ConstantLength(tokens=32_000)
    rewrite_share: Annotated[Number, Field(ge=0, le=1)] = 0.0
    block_tokens: Whole = 64

    @model_validator(mode="after")
    def _can_be_drawn(self) -> SessionSection:
        """Build the distributions once, so that their own conditions are met here; not files'."""
        for name in (*_LENGTHS, "think_time"):
            section = getattr(self, name)
            if isinstance(section, FileLength | FileTime):
                continue
            try:
                section.distribution(Path())
            except BadInputError as error:
                raise field_error(name, str(error)) from error
        limit = self.compact_at_tokens
        if limit is not None and limit <= self.shared_prefix_tokens:
            problem = f"{limit} tokens are no more than the shared prefix"
            raise field_error("compact_at_tokens", f"{problem}; raise it or set it to null")
        return self

    def files(self) -> Iterator[str]:
        """Yield the names of the files that the distributions are drawn from."""
        sections = (getattr(self, name) for name in (*_LENGTHS, "think_time"))
        yield from (one.file for one in sections if isinstance(one, FileLength | FileTime))

    def spec(self, folder: Path) -> SessionSpec:
        """Return the domain's value; a relative file lies in `folder`."""
        return SessionSpec(
            count=200 if self.count is None else self.count,
            turns=self.turns.distribution(folder),
            shared_prefix_tokens=self.shared_prefix_tokens,
            shared_prefixes=self.shared_prefixes,
            zipf_exponent=self.zipf_exponent,
            first_input_tokens=self.first_input_tokens.distribution(folder),
            new_input_tokens=self.new_input_tokens.distribution(folder),
            output_tokens=self.output_tokens.distribution(folder),
            think_time=self.think_time.distribution(folder),
            compact_at_tokens=self.compact_at_tokens,
            compacted_tokens=self.compacted_tokens.distribution(folder),
            rewrite_share=self.rewrite_share,
            block_tokens=self.block_tokens,
        )
