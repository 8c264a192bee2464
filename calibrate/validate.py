"""How far the shipped profiles are off: `python -m tonnage.calibrate.validate`.

Writes the part of docs/validation.md that lies between two marks. The figures are those in the
profiles' headers: when a profile was built, whole shapes were held out and predicted from the
tables as they ship.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tonnage.sim.cost.profile import HEADER_FILE, SUFFIX, ProfileHeader, load_header
from tonnage.sim.domain import BadInputError

BEGIN = "<!-- kernels: written by tonnage.calibrate.validate -->"
END = "<!-- /kernels -->"
P90_TARGET = 0.25
_ENGINES = ("sglang", "vllm", "trtllm")


@dataclass(frozen=True, slots=True)
class Figure:
    """The held-out error of one operator and format of one profile, in one regime."""

    operator: str
    number_format: str
    gpu: str
    engine: str
    regime: str
    held_out: str
    rows: int
    median: float
    p90: float

    @property
    def target(self) -> float | None:
        """The median that was asked for, None where none was or beyond the measured grid."""
        if self.regime != "interpolation":
            return None
        return target_of(self.operator, self.number_format)

    @property
    def misses(self) -> tuple[str, ...]:
        """What is above its target: median, p90, both or none."""
        if self.target is None:
            return ()
        limits = {"median": self.target, "p90": P90_TARGET}
        return tuple(name for name, limit in limits.items() if getattr(self, name) > limit)


def target_of(operator: str, number_format: str) -> float | None:
    """Return the median error that an operator and format was to reach, None where none was set.

    A format with a remark (`gqa/bf16, knots`) answers a lesser question than whole shapes do.
    """
    if ", " in number_format:
        return None
    if operator == "gemm":
        return 0.06
    if operator in ("moe", "attention_prefill"):
        return 0.08
    if operator == "attention_decode":
        is_fp8_gqa = number_format.startswith("gqa/fp8")
        return 0.12 if is_fp8_gqa else 0.08
    return None


def figures(headers: Iterable[ProfileHeader]) -> list[Figure]:
    """Return the figures of profiles, sorted by operator, format, regime, GPU and engine."""
    found = [figure for header in headers for figure in _figures(header)]
    regimes = ("interpolation", "extrapolation")
    return sorted(
        found,
        key=lambda one: (
            *(one.operator, one.number_format, regimes.index(one.regime)),
            *(one.gpu, _ENGINES.index(one.engine)),
        ),
    )


def _figures(header: ProfileHeader) -> Iterator[Figure]:
    for operator, formats in header.errors.items():
        for number_format, error in formats.items():
            place = (operator, number_format, header.gpu, header.engine)
            yield _figure(place, error.get("regime", "interpolation"), error)
            if "extrapolation" in error:
                yield _figure(place, "extrapolation", error["extrapolation"])


def _figure(place: tuple[str, str, str, str], regime: str, error: Mapping[str, Any]) -> Figure:
    return Figure(*place, regime, error["held_out"], error["n"], error["median"], error["p90"])


# --- the page -----------------------------------------------------------------------------------


def section(headers: Sequence[ProfileHeader]) -> str:
    """Return the part of docs/validation.md between the marks."""
    found = figures(headers)
    parts = [_head(headers), _misses(found)]
    operators = dict.fromkeys(one.operator for one in found)
    parts += [_operator(operator, found) for operator in operators]
    parts.append(_lacking(headers))
    return "\n\n".join(part for part in parts if part) + "\n"


def _head(headers: Sequence[ProfileHeader]) -> str:
    dates = sorted({header.date for header in headers})
    engines = sorted({f"{header.engine} {header.engine_version}" for header in headers})
    sources = sorted({header.source_text.partition(" (")[0] for header in headers})
    made = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    versions = sorted({header.tonnage_version for header in headers})
    return (
        f"Profiles made on {made} by tonnage {', '.join(versions)} from {'; '.join(sources)}: "
        f"{', '.join(engines)}. A figure is `median / p90` of |predicted / measured - 1| in "
        "percent, over every row of the shapes that were held out whole. An asterisk marks a "
        f"figure above its target, which for p90 is {P90_TARGET:.0%} everywhere; extrapolation "
        "has none."
    )


def _operator(operator: str, found: Sequence[Figure]) -> str:
    own = [one for one in found if one.operator == operator]
    gpus = list(dict.fromkeys(one.gpu for one in own))
    heads = ["format", "regime", "engine", "target", *gpus]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    rows: dict[tuple[str, str, str], dict[str, Figure]] = {}
    for one in own:
        rows.setdefault((one.number_format, one.regime, one.engine), {})[one.gpu] = one
    for (number_format, regime, engine), by_gpu in rows.items():
        target = next(iter(by_gpu.values())).target
        cells = [_cell(by_gpu.get(gpu)) for gpu in gpus]
        wanted = "" if target is None else f"{target:.0%}"
        lines.append(f"| {' | '.join([number_format, regime, engine, wanted, *cells])} |")
    held = "; ".join(f"{regime}: {what}" for regime, what in _held_out(own))
    return "\n".join([f"### {operator}", "", f"Held out. {held}.", "", *lines])


def _held_out(own: Sequence[Figure]) -> list[tuple[str, str]]:
    """Return what was held out, by regime, each wording once."""
    found: dict[str, list[str]] = {}
    for one in own:
        words = found.setdefault(one.regime, [])
        if one.held_out not in words:
            words.append(one.held_out)
    return [(regime, ", or ".join(words)) for regime, words in found.items()]


def _cell(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    marks = {name: "*" if name in figure.misses else "" for name in ("median", "p90")}
    median, p90 = 100 * figure.median, 100 * figure.p90
    return f"{median:.1f}{marks['median']} / {p90:.0f}{marks['p90']}"


def _misses(found: Sequence[Figure]) -> str:
    judged = [one for one in found if one.target is not None]
    missed = [one for one in judged if one.misses]
    text = f"{len(judged) - len(missed)} of {len(judged)} figures with a target meet it."
    by_format: dict[tuple[str, str], list[Figure]] = {}
    for one in missed:
        by_format.setdefault((one.operator, one.number_format), []).append(one)
    lines = [
        f"- {operator} {number_format}: "
        + ", ".join(f"{one.gpu} {one.engine} {_miss(one)}" for one in ones)
        for (operator, number_format), ones in by_format.items()
    ]
    return text + (" Those that miss:\n\n" + "\n".join(lines) if lines else "")


def _miss(figure: Figure) -> str:
    return " and ".join(f"{name} {getattr(figure, name):.1%}" for name in figure.misses)


def _lacking(headers: Sequence[ProfileHeader]) -> str:
    lines = [f"- {one.name}: {', '.join(one.missing)}" for one in headers if one.missing]
    if not lines:
        return ""
    head = (
        "### What a profile lacks\n\nTaken from another profile or the datasheet, and labelled so."
    )
    return "\n".join([head, "", *lines])


def written_page(page: str, headers: Sequence[ProfileHeader]) -> str:
    """Return the page with the part between the marks written anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise BadInputError(f"docs/validation.md: has no part from {BEGIN} to {END}")
    return f"{before}{BEGIN}\n\n{section(headers)}\n{END}{after}"


def shipped_headers(folder: Path) -> list[ProfileHeader]:
    """Return the headers of the profiles in a folder, by name."""
    return [load_header(path.parent) for path in sorted(folder.glob(f"*{SUFFIX}/{HEADER_FILE}"))]


def main(arguments: Iterable[str] | None = None) -> None:
    """Write docs/validation.md from the shipped profiles."""
    parser = argparse.ArgumentParser(prog="python -m tonnage.calibrate.validate")
    parser.add_argument("--profiles", type=Path, default=Path("scenarios/profiles"))
    parser.add_argument("--page", type=Path, default=Path("docs/validation.md"))
    given = parser.parse_args(None if arguments is None else list(arguments))
    page = given.page.read_text(encoding="utf-8")
    headers = shipped_headers(given.profiles)
    given.page.write_text(written_page(page, headers), encoding="utf-8")


if __name__ == "__main__":
    main()
