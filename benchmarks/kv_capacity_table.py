"""Compares the KV capacity that engines printed with what the configuration alone predicts.

Prints two Markdown tables; with `--write` it puts them into docs/memory.md instead. It reads
`shared/truth/kv_capacity.csv` beside the checkout or inside it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tonnage.scenarios.capacity_rows import CapacityRow, read_capacity_rows
from tonnage.scenarios.catalogue import load_model
from tonnage.sim.domain import EngineSpec, ParallelLayout
from tonnage.sim.model.engine_rules import GIB
from tonnage.sim.model.memory import PoolMemory
from tonnage.sim.model.vllm_groups import is_hybrid

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "memory.md"
MODELS = ROOT / "benchmarks" / "models"
_BEGIN, _END = "<!-- begin generated -->", "<!-- end generated -->"

# Rows whose printed figure is not what the model predicts, and why.
REMARKS = {
    "K006": "printed before SGLang charged the indexer: its log's own budget was 54.5 GiB",
    "K025": "taken as 169.98 decimal GB; if GiB, as in SGLang's pool log, +0.6 %",
    "K067": "the row's own items add up to a fraction of 0.95, not 0.9",
    "K096": "vLLM 0.7, older than the rules",
    "K098": "vLLM 0.2.4, older than the rules; its GPU was assumed",
    "V4090": "vllm_runs: 256 requests, 2,048 tokens a step",
    "R1": "ai-dynamo/aisimulate pull request 263: about 509,000; version assumed",
}


def capacity_file() -> Path | None:
    """Return the table of printed capacities, or None where there is no shared folder."""
    for folder in (ROOT.parent / "shared", ROOT / "shared"):
        path = folder / "truth" / "kv_capacity.csv"
        if path.is_file():
            return path
    return None


def compared_rows(path: Path) -> list[CapacityRow]:
    """Return the rows of the table, and two more starts that were published elsewhere."""
    rows = read_capacity_rows(path, MODELS)
    on_4090 = _row("V4090", "llama-3.1-8b", EngineSpec("vllm", "0.19.0", 0.9, "given"), 41408)
    on_h200 = _row("R1", "deepseek-r1", EngineSpec("sglang", "0.5.23", 0.82, "given"), 509000)
    return [*rows, on_4090, on_h200]


def _row(name: str, model: str, engine: EngineSpec, kv_tokens: float) -> CapacityRow:
    is_large = model == "deepseek-r1"
    return CapacityRow(
        id=name,
        source_url="",
        engine=engine,
        model=load_model(model),
        gpu="h200-sxm" if is_large else "rtx-4090",
        layout=ParallelLayout(tp=8 if is_large else 1),
        weights="native",
        kv_format="bf16",
        kv_tokens=kv_tokens,
        kv_bytes=None,
        weights_bytes=None,
        is_geometry_only=False,
        remark="",
    )


def byte_rate_table(rows: list[CapacityRow]) -> str:
    """Return the rows that print bytes and tokens: do bytes per token agree?"""
    lines = ["| row | model | GiB per GPU | tokens printed | from bytes | error |", _rule(6)]
    for row in rows:
        tokens = row.tokens_from_bytes()
        if tokens is None or row.kv_tokens is None or row.kv_bytes is None:
            continue
        if is_hybrid(row.model):  # `tonnage validate kv` counts those as the engine does
            continue
        error = tokens / row.kv_tokens - 1
        shown = f"{error:+.2%}" + (f", {REMARKS[row.id]}" if abs(error) > 0.005 else "")
        cells = (row.id, _name(row), f"{row.kv_bytes / GIB:.2f}", f"{row.kv_tokens:,.0f}")
        lines.append(_line(*cells, f"{tokens:,.0f}", shown))
    return "\n".join(lines)


def prediction_table(rows: list[CapacityRow]) -> str:
    """Return the rows that state a fraction: what does the configuration alone lead to?"""
    heads = "row", "model", "engine", "GPUs", "fraction", "weights GiB", "KV", "error", "remark"
    lines = [_line(*heads), _rule(len(heads))]
    for row in rows:
        memory = row.predicted()
        if memory is None or (row.weights_bytes is None and capacity_error(row, memory) is None):
            continue
        lines.append(_line(*_prediction_cells(row, memory)))
    return "\n".join(lines)


def capacity_error(row: CapacityRow, memory: PoolMemory) -> float | None:
    """Return the relative error of the predicted KV pool, by bytes if printed, else by tokens."""
    if row.kv_bytes is not None:
        return memory.kv_bytes_per_gpu / row.kv_bytes - 1
    if row.kv_tokens is not None:
        return memory.kv_tokens_per_rank / row.kv_tokens - 1
    return None


def _prediction_cells(row: CapacityRow, memory: PoolMemory) -> tuple[str, ...]:
    weights = f"{memory.weights_bytes_per_gpu / GIB:.2f}"
    if row.weights_bytes is not None:
        weights += f" / {row.weights_bytes / GIB:.2f}"
    if row.kv_bytes is not None:
        capacity = f"{memory.kv_bytes_per_gpu / GIB:.2f} / {row.kv_bytes / GIB:.2f} GiB"
    elif row.kv_tokens is not None:
        capacity = f"{memory.kv_tokens_per_rank:,} / {row.kv_tokens:,.0f} tokens"
    else:
        capacity = f"{memory.kv_bytes_per_gpu / GIB:.2f} / - GiB"
    error = capacity_error(row, memory)
    layout = row.layout
    parts = [f"{name} {getattr(layout, name)}" for name in ("tp", "pp", "attention_dp", "ep")]
    shown = [part for part in parts if not part.endswith(" 1")] or ["tp 1"]
    return (
        row.id,
        _name(row),
        f"{row.engine.name} {row.engine.version}" if row.version_is_stated else row.engine.name,
        f"{row.gpu}, {', '.join(shown)}",
        f"{row.engine.mem_fraction:g}",
        weights,
        capacity,
        "" if error is None else f"{error:+.1%}",
        REMARKS.get(row.id, ""),
    )


def _name(row: CapacityRow) -> str:
    return row.model.name + (" (geometry)" if row.is_geometry_only else "")


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _rule(columns: int) -> str:
    return "|" + "---|" * columns


def generated_section(path: Path) -> str:
    """Return the part of docs/memory.md that this program writes."""
    rows = compared_rows(path)
    return (
        "### Bytes per token\n\n"
        f"{byte_rate_table(rows)}\n\n"
        "### From the configuration alone\n\n"
        "Predicted / printed, per GPU; tokens per attention-DP rank.\n\n"
        f"{prediction_table(rows)}\n"
    )


def with_section(document: str, section: str) -> str:
    """Return the document with its generated part replaced."""
    before, rest = document.split(_BEGIN)
    return f"{before}{_BEGIN}\n{section}{_END}{rest.split(_END)[1]}"


def main() -> None:
    """Print the tables, or write them into the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write docs/memory.md")
    arguments = parser.parse_args()
    path = capacity_file()
    if path is None:
        parser.exit(2, "shared/truth/kv_capacity.csv is not there\n")
    section = generated_section(path)
    if arguments.write:
        DOCUMENT.write_text(with_section(DOCUMENT.read_text(), section))
    else:
        print(section)


if __name__ == "__main__":
    main()
