"""Read what a compiled kernel does from its PTX and from the disassembler's listing."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

# A matrix instruction of PTX up to what tells its kind, its shape and types left out.
_PTX_MATRIX = re.compile(
    r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma(?:\.cta_group::\d)?(?:\.kind::\w+)?(?:\.block_scale)?)"
)
# `/*0a30*/  @!P0 HMMA.16816.F32 R4, ...`: address, predicate, mnemonic.
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
_USAGE = re.compile(r"\bREG:(\d+) STACK:(\d+)\b")

_MATRIX = re.compile(r"[A-Z]*MMA(\.|$)")
_LOADS = ("LDG", "LDGSTS", "UTMALDG", "UBLKCP")
_STORES = ("STG", "UTMASTG", "RED", "REDG", "ATOMG", "ATOM")
_SPILLS = ("LDL", "STL")


def matrix_instructions(ptx: str) -> dict[str, int]:
    """Return how often each matrix instruction stands in PTX."""
    return dict(sorted(Counter(_PTX_MATRIX.findall(ptx)).items()))


def mnemonics(listing: str) -> Counter[str]:
    """Return how often each machine instruction stands in a disassembly."""
    return Counter(_INSTRUCTION.findall(listing))


def facts(ptx: str, listing: str) -> dict[str, Any]:
    """Return a record's figures that PTX and `cuobjdump -sass -res-usage` show."""
    found = mnemonics(listing)
    usage = _USAGE.search(listing)
    if usage is None:
        raise ValueError("no register and stack usage in the disassembler's listing")

    def count(roots: tuple[str, ...], wide: bool = False) -> int:
        return sum(
            number
            for name, number in found.items()
            if name.split(".")[0] in roots and (not wide or _is_wide(name))
        )

    return {
        "registers": int(usage[1]),
        "stack_bytes": int(usage[2]),
        "spills": count(_SPILLS),
        "instructions": sum(n for name, n in found.items() if name != "NOP"),
        "loads": count(_LOADS),
        "wide_loads": count(_LOADS, wide=True),
        "stores": count(_STORES),
        "matrix": matrix_instructions(ptx),
        "machine_matrix": _machine_matrix(found),
    }


def _is_wide(name: str) -> bool:
    return ".128" in name or name.startswith(("UTMALDG", "UBLKCP"))


def _machine_matrix(found: Mapping[str, int]) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for name, number in found.items():
        if _MATRIX.match(name):
            counts[name.split(".")[0]] += number
    return dict(sorted(counts.items()))
