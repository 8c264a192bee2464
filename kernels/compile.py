"""Compile every shipped launch configuration to machine code, without a GPU, and judge the result.

`python -m tonnage.kernels.compile` compiles what `docs/kernels_compiled.jsonl` has no record of and
ends with 1 if a kernel is not what its configuration promises (`compiled.faults`).

  --check             compile nothing: every configuration must have a sound record of its code,
                      and docs/kernels.md must hold them
  --fresh             compile what has a record, too
  --sample N          take one configuration of every N-th kernel
  --triton-path DIR   use the Triton in DIR, as `pip install --target DIR` puts it there
  --json FILE         write the records there too
  --write             keep the records and put the table into docs/kernels.md

Triton decides at its import whether to interpret, so all of this runs in processes of its own
without TRITON_INTERPRET.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from tonnage.kernels.compiled import (
    Compiled,
    faults,
    read_records,
    write_records,
)
from tonnage.kernels.document import (
    DOCUMENT,
    catalogue,
    exceptions,
    table,
    with_sections,
    write_sections,
)
from tonnage.kernels.registry import KERNELS
from tonnage.kernels.units import OPS, Unit, key_of, sample, units

ROOT = Path(__file__).resolve().parents[1]
RECORDS = ROOT / "docs" / "kernels_compiled.jsonl"
_ERROR_LENGTH = 200


def compiled(unit: Unit) -> Compiled:
    """Compile a unit and say what it became."""
    import triton

    place = (unit.label, unit.config.name, unit.architecture, triton.__version__, key_of(unit))
    try:
        return Compiled(*place, **_figures(unit))
    except Exception as error:  # the compiler's passes raise what they like
        said = " ".join(str(error.__cause__ or error).split())
        return Compiled(*place, error=said[:_ERROR_LENGTH] or type(error).__name__)


def _figures(unit: Unit) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tonnage.kernels.machine_code import facts

    kernel, config = unit.kernel, unit.config
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    signature = {name: config.signature.get(name, "constexpr") for name in places}
    constants = {places[name]: value for name, value in config.constants.items()}
    attributes = {places[name]: [["tt.divisibility", 16]] for name in config.aligned}
    built = triton.compile(
        ASTSource(kernel, signature, constants, attributes),
        target=GPUTarget("cuda", unit.architecture, 32),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
    return {
        **facts(built.asm["ptx"], _listing(built.asm["cubin"])),
        "shared_bytes": built.metadata.shared,
        "tensor_columns": getattr(built.metadata, "tmem_size", 0) or 0,
    }


def _listing(cubin: bytes) -> str:
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "-sass", "-res-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def compile_all(todo: list[Unit], jobs: int) -> Iterator[Compiled]:
    """Compile units in processes of their own, yielding each as it is done, in order."""
    if not todo:
        return
    with ProcessPoolExecutor(min(jobs, len(todo)), mp_context=get_context("spawn")) as pool:
        yield from pool.map(compiled, todo)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tonnage.kernels.compile")
    parser.add_argument("--check", action="store_true", help="compile nothing")
    parser.add_argument("--fresh", action="store_true", help="compile what has a record, too")
    parser.add_argument("--sample", type=int, metavar="N", help="one of each N-th kernel's")
    parser.add_argument("--only", default="", help="kernels whose label holds this text")
    parser.add_argument("--package", default=OPS, help="where the configurations are")
    parser.add_argument("--triton-path", type=Path)
    parser.add_argument("--json", type=Path, help="write the records there")
    parser.add_argument("--write", action="store_true", help="keep the records and the table")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    return parser


def _again_with(triton_path: Path) -> int:
    arguments = sys.argv[1:]
    at = next(i for i, text in enumerate(arguments) if text.startswith("--triton-path"))
    del arguments[at : at + (1 if "=" in arguments[at] else 2)]
    return _run_clean(arguments, {"PYTHONPATH": str(triton_path.resolve())})


def _run_clean(arguments: list[str], extra: dict[str, str]) -> int:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tonnage.kernels.compile", *arguments]
    return subprocess.run(command, env={**environment, **extra}, check=False).returncode


def main() -> int:
    """Compile or check; return 1 if a kernel is not what its configuration promises."""
    parser = _arguments()
    asked = parser.parse_args()
    if asked.triton_path:
        if not (asked.triton_path / "triton").is_dir():
            parser.error(
                f"--triton-path {asked.triton_path}: no triton there; `make kernels-table`"
            )
        return _again_with(asked.triton_path)
    if "TRITON_INTERPRET" in os.environ:
        return _run_clean(sys.argv[1:], {})
    # 3.9 warns unless told, and 3.10 turns it off: a product and its sum become one instruction
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    import triton

    release = triton.__version__
    every = units(asked.package)
    wanted = [unit for unit in every if asked.only in unit.label]
    wanted = sample(wanted, asked.sample) if asked.sample else wanted
    kept = {} if asked.fresh else {r.key: r for r in read_records(RECORDS) if r.triton == release}
    known = {
        unit: replace(kept[key], label=unit.label, config=unit.config.name)
        for unit in wanted
        if (key := key_of(unit)) in kept
    }
    todo = [] if asked.check else [unit for unit in wanted if unit not in known]
    for number, (unit, record) in enumerate(zip(todo, compile_all(todo, asked.jobs), strict=True)):
        known[unit] = record
        print(f"{number + 1}/{len(todo)} {record.name}", file=sys.stderr, flush=True)
    if asked.write:
        _keep(every, known.values())
    wrong = _stale_document(every) if asked.check and len(wanted) == len(every) else []
    wrong += [
        f"{unit.label} {unit.config.name} sm_{unit.architecture}: {fault}"
        for unit in wanted
        for fault in (faults(unit.config, known[unit]) if unit in known else ["no record"])
    ]
    if asked.json:
        write_records(asked.json, known.values())
    print(f"Triton {release}: {len(wanted)} compilations, {len(wrong)} faults")
    print("\n".join(wrong), end="\n" if wrong else "")
    return int(bool(wrong))


def _keep(every: list[Unit], new: Iterable[Compiled]) -> None:
    """Keep new records, and old ones of units that still exist; write the document's tables."""
    units_by_key = {key_of(unit): unit for unit in every}
    merged = {(r.triton, r.key): r for r in (*read_records(RECORDS), *new)}
    records = [
        replace(record, label=unit.label, config=unit.config.name)
        for record in merged.values()
        if (unit := units_by_key.get(record.key)) is not None
    ]
    write_records(RECORDS, records)
    write_sections(DOCUMENT, _sections(every))


def _sections(every: list[Unit]) -> dict[str, str]:
    specs = KERNELS.values()
    allowed = exceptions(unit.config for unit in every)
    made = table(read_records(RECORDS))
    return {"catalogue": catalogue(specs), "compiled": f"{allowed}\n\n{made}"}


def _stale_document(every: list[Unit]) -> list[str]:
    text = DOCUMENT.read_text(encoding="utf-8")
    stale = with_sections(text, _sections(every)) != text
    return [f"{DOCUMENT.name} does not hold today's tables"] if stale else []


if __name__ == "__main__":
    sys.exit(main())
