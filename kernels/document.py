"""The generated parts of `docs/kernels.md`: what kernels there are, and what they compile to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tonnage.kernels.compiled import MATRIX_FAMILIES, RELEASE_EXCEPTIONS, Compiled
from tonnage.kernels.spec import KernelSpec, LaunchConfig

DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "kernels.md"


def with_sections(text: str, sections: Mapping[str, str]) -> str:
    """Return a document with each text between the markers of its name."""
    for name, body in sections.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if begin not in text or end not in text:
            raise ValueError(f"the document has no {begin} and {end}")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{body}\n{end}{rest.partition(end)[2]}"
    return text


def write_sections(path: Path, sections: Mapping[str, str]) -> None:
    """Put texts into a document."""
    text = with_sections(path.read_text(encoding="utf-8"), sections)
    path.write_text(text, encoding="utf-8")


def catalogue(specs: Iterable[KernelSpec]) -> str:
    """Return one Markdown row per kernel of the registry."""
    lines = ["| kernel | what it does | runs on | sizes | error at most |", "|---|---|---|---|---|"]
    for spec in specs:
        bounds = {_bound(tolerance) for tolerance in spec.tolerances.values()}
        lines.append(
            f"| `{spec.name}` | {spec.summary} | {', '.join(spec.backends)} "
            f"| {', '.join(spec.axes) or '-'} | {', '.join(sorted(bounds))} |"
        )
    return "\n".join(lines)


def exceptions(configs: Iterable[LaunchConfig]) -> str:
    """Return a Markdown list of the configurations that may use stack, and why."""
    lines = {
        f"- {config.kernel.removesuffix('_kernel')} {config.name}: up to {config.stack_bytes_max} "
        f"bytes of stack. {config.exception}"
        for config in configs
        if config.stack_bytes_max
    }
    lines |= {
        f"- {label} {config} on sm_{architecture} with Triton {release}: up to {budget} bytes of "
        f"stack. {reason}"
        for (release, label, config, architecture), (budget, reason) in RELEASE_EXCEPTIONS.items()
    }
    return "\n".join(sorted(lines)) or "No configuration may use stack."


def _bound(tolerance: float) -> str:
    return "none: the same bytes" if tolerance == 0.0 else f"{tolerance:.3g}"


def table(records: Iterable[Compiled]) -> str:
    """Return one Markdown row per kernel, configuration and architecture, releases side by side."""
    rows: dict[tuple[str, str, int], dict[str, Compiled]] = {}
    for record in records:
        place = (record.label, record.config, record.architecture)
        rows.setdefault(place, {})[record.triton] = record
    releases = sorted({release for row in rows.values() for release in row}, reverse=True)
    both = " / ".join(releases)
    lines = [
        f"Columns with two figures are those of Triton {both}.",
        "",
        "| kernel | configuration | sm | matrix instruction | 128-bit loads | registers "
        "| stack, bytes | shared, bytes | tensor columns |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (label, config, architecture), row in sorted(rows.items()):
        lines.append(f"| {label} | {config} | {architecture} | {_figures(row, releases)} |")
    return "\n".join(lines)


def _figures(row: Mapping[str, Compiled], releases: list[str]) -> str:
    found = [row.get(release) for release in releases]

    def side_by_side(name: str) -> str:
        texts = [_text(getattr(r, name)) if r and not r.error else "none" for r in found]
        return texts[0] if len(set(texts)) == 1 else " / ".join(texts)

    names = ("matrix", "wide_loads", "registers", "stack_bytes", "shared_bytes", "tensor_columns")
    return " | ".join(map(side_by_side, names))


def _text(value: int | Mapping[str, int]) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{_short(name)} {count}" for name, count in value.items()) or "-"
    return f"{value:,}"


def _short(name: str) -> str:
    family = next(family for family in MATRIX_FAMILIES if name.startswith(family))
    return f"{family} block-scaled" if "block_scale" in name else family
