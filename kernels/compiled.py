"""What a kernel became for a GPU: the record, what is wrong with it, and the table of all of them.

Imports neither torch nor triton.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from tonnage.kernels.spec import LaunchConfig

ARCHITECTURES = (90, 100)
# Shared memory of a block and columns of tensor memory of an SM, on Hopper and Blackwell (CUDA C++
# programming guide, compute capabilities; PTX ISA, tcgen05.alloc). Triton compiles beyond both.
SHARED_BYTES_MAX = 232_448
TENSOR_COLUMNS_MAX = 512
MATRIX_FAMILIES = ("mma.sync", "wgmma", "tcgen05.mma")  # as PTX spells them, narrow to wide

# Spills of one Triton release that another does not have: (release, label, configuration,
# architecture) -> bytes of stack, and why they are borne.
RELEASE_EXCEPTIONS: Mapping[tuple[str, str, str, int], tuple[int, str]] = {}


@dataclass(frozen=True, slots=True)
class Compiled:
    """One launch configuration compiled for one architecture by one release of Triton."""

    label: str
    config: str
    architecture: int
    triton: str
    key: str  # digest of the kernel's code, the configuration and the architecture
    error: str = ""  # what the compiler said, if it gave nothing
    registers: int = 0  # of a thread
    stack_bytes: int = 0  # of a thread
    spills: int = 0  # instructions that load from or store to the stack
    shared_bytes: int = 0  # of a block
    tensor_columns: int = 0
    instructions: int = 0
    loads: int = 0  # of global memory, by threads, asynchronous copies or TMA
    wide_loads: int = 0  # of which 128 bits a thread, or TMA
    stores: int = 0  # to global memory, atomics included
    matrix: Mapping[str, int] = field(default_factory=dict)  # matrix instruction in PTX -> count
    machine_matrix: Mapping[str, int] = field(default_factory=dict)  # the same in SASS

    @property
    def name(self) -> str:
        """Return which compilation this is, in words."""
        return f"{self.label} {self.config} sm_{self.architecture} triton {self.triton}"


def stack_budget(config: LaunchConfig, record: Compiled) -> int:
    """Return the bytes of stack a thread may use: none without an argued exception."""
    place = (record.triton, record.label, record.config, record.architecture)
    return max(config.stack_bytes_max, RELEASE_EXCEPTIONS.get(place, (0, ""))[0])


def faults(config: LaunchConfig, record: Compiled) -> list[str]:
    """Return everything in which a compiled kernel is not what its configuration promises."""
    if record.error:
        return [f"did not compile: {record.error}"]
    found = []
    if not record.stores:
        found.append("compiled to nothing: it stores nothing")
    if record.shared_bytes > SHARED_BYTES_MAX:
        found.append(f"{record.shared_bytes} bytes of shared memory of {SHARED_BYTES_MAX}")
    if record.tensor_columns > TENSOR_COLUMNS_MAX:
        found.append(f"{record.tensor_columns} tensor memory columns of {TENSOR_COLUMNS_MAX}")
    if record.stack_bytes > (budget := stack_budget(config, record)):
        found.append(f"{record.stack_bytes} bytes of stack a thread, {budget} allowed")
    if config.vector_loads and not record.wide_loads:
        found.append("no 128-bit load of global memory")
    return found + _matrix_faults(config.instruction[record.architecture], record)


def _matrix_faults(wanted: str | None, record: Compiled) -> list[str]:
    if wanted is None:
        return [f"unexpected {name}" for name in record.matrix]
    if not any(name.startswith(wanted) for name in record.matrix):
        return [f"no {wanted}, but {', '.join(record.matrix) or 'no matrix instruction'}"]
    if not record.machine_matrix:
        return [f"{wanted} in PTX, but no matrix instruction in machine code"]
    return []


def read_records(path: Path) -> list[Compiled]:
    """Return the records of a file that has one JSON object a line; none if there is no file."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines()
    return [Compiled(**json.loads(line)) for line in lines]


def write_records(path: Path, records: Iterable[Compiled]) -> None:
    """Write records in order, one JSON object a line, those that hold their default left out."""
    ordered = sorted(records, key=lambda r: (r.label, r.config, r.architecture, r.triton))
    path.write_text("".join(f"{_line(record)}\n" for record in ordered), encoding="utf-8")


def _line(record: Compiled) -> str:
    values = {name: dict(v) if isinstance(v, Mapping) else v for name, v in asdict(record).items()}
    kept = {
        f.name: values[f.name]
        for f in fields(record)
        if f.name in ("label", "config", "architecture", "triton", "key") or values[f.name]
    }
    return json.dumps(kept)
