"""Ahead-of-time compilation for Hopper and Blackwell: every shipped configuration is sound.

All records in `docs/kernels_compiled.jsonl` must be of today's code and sound, both of the pinned
Triton and of the one of GPU hosts, which `make setup` does not install: `make test` puts it into
`.triton-3.6`. One configuration of each kernel is compiled afresh and must give its record; with
the second Triton, of every third kernel, for the time's sake.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tonnage.kernels.compile import RECORDS, ROOT
from tonnage.kernels.compiled import (
    SHARED_BYTES_MAX,
    TENSOR_COLUMNS_MAX,
    Compiled,
    faults,
    read_records,
    write_records,
)
from tonnage.kernels.document import exceptions, table, write_sections
from tonnage.kernels.machine_code import facts, mnemonics
from tonnage.kernels.spec import LaunchConfig

OTHER = Path(os.environ.get("TONNAGE_TRITON_3_6", ROOT / ".triton-3.6"))
PINNED = pytest.param((), id="pinned")
OLDER = pytest.param(
    ("--triton-path", str(OTHER)),
    id="3.6.0",
    marks=pytest.mark.skipif(
        not (OTHER / "triton").is_dir(),
        reason="no Triton 3.6.0 in .triton-3.6 or $TONNAGE_TRITON_3_6",
    ),
)


def run(*arguments: str) -> tuple[int, str]:
    """Run the compiler's program; return its status and what it printed."""
    command = [sys.executable, "-m", "tonnage.kernels.compile", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("release", [PINNED, OLDER])
def test_the_document_has_a_sound_record_of_every_configuration(release: tuple[str, ...]) -> None:
    status, said = run("--check", *release)
    assert status == 0, f"{said}\n`make kernels-table` compiles what has changed"


@pytest.mark.parametrize(
    ("release", "every"),
    [
        pytest.param((), 1, id="pinned"),
        pytest.param(*OLDER.values, 3, id="3.6.0", marks=OLDER.marks),
    ],
)
def test_compiling_afresh_gives_the_records(
    release: tuple[str, ...], every: int, tmp_path: Path
) -> None:
    file = tmp_path / "sample.jsonl"
    asked = ("--fresh", "--sample", str(every), "--jobs", "2", "--json", str(file))
    status, said = run(*asked, *release)
    assert status == 0, said
    fresh = read_records(file)
    assert len(fresh) > 15 / every
    kept = {(record.triton, record.key): record for record in read_records(RECORDS)}
    assert [kept.get((record.triton, record.key)) for record in fresh] == fresh


def test_a_folder_without_triton_is_refused(tmp_path: Path) -> None:
    status, said = run("--check", "--triton-path", str(tmp_path))
    assert (status, "no triton there" in said) == (2, True)


def test_sections_are_replaced_and_the_rest_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    page = "# A\n<!-- begin x -->\n{}\n<!-- end x -->\n# B\n"
    path.write_text(page.format("old\nolder"), encoding="utf-8")
    write_sections(path, {"x": "new"})
    assert path.read_text(encoding="utf-8") == page.format("new")
    with pytest.raises(ValueError, match="begin y"):
        write_sections(path, {"y": "new"})


def test_kernels_that_are_not_what_they_promise_are_told(tmp_path: Path) -> None:
    file = tmp_path / "unsound.jsonl"
    package = ("--package", "tests.kernels.unsound", "--fresh", "--json", str(file))
    status, said = run(*package, "--jobs", "1")
    assert status == 1
    for architecture in (90, 100):
        found = [line for line in said.splitlines() if f"sm_{architecture}: " in line]
        expected = (
            ("copy does not compile", "did not compile: "),
            ("copy loads narrowly", "no 128-bit load"),
            ("nothing stores nothing", "compiled to nothing"),
            ("nothing stores nothing", "no 128-bit load"),
            ("product hopes for wgmma", "no wgmma, but mma.sync"),
            ("product should not multiply", "unexpected mma.sync"),
            ("softmax spills", "bytes of stack a thread, 0 allowed"),
        )
        assert len(found) == len(expected), said
        for line, (name, fault) in zip(sorted(found), expected, strict=True):
            assert line.startswith(name), said
            assert fault in line
    sound = [record for record in read_records(file) if record.config == "sound"]
    assert len(sound) == 4
    assert all(record.instructions > 10 and record.registers > 0 for record in sound)


CONFIG = LaunchConfig(
    kernel="k",
    name="n",
    signature={"x": "*bf16"},
    constants={},
    num_warps=4,
    num_stages=1,
    aligned=("x",),
    instruction={90: "wgmma", 100: None},
)
SOUND = Compiled(
    label="k",
    config="n",
    architecture=90,
    triton="3.9.0",
    key="0",
    registers=64,
    shared_bytes=SHARED_BYTES_MAX,
    tensor_columns=TENSOR_COLUMNS_MAX,
    instructions=100,
    loads=3,
    wide_loads=1,
    stores=1,
    matrix={"wgmma.mma_async": 4},
    machine_matrix={"HGMMA": 4},
)


def test_a_sound_record_has_no_fault() -> None:
    assert faults(CONFIG, SOUND) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"stores": 0}, "compiled to nothing"),
        ({"shared_bytes": SHARED_BYTES_MAX + 1}, "shared memory"),
        ({"tensor_columns": TENSOR_COLUMNS_MAX + 1}, "tensor memory"),
        ({"stack_bytes": 8}, "8 bytes of stack"),
        ({"wide_loads": 0}, "no 128-bit load"),
        ({"matrix": {}}, "no wgmma, but no matrix instruction"),
        ({"machine_matrix": {}}, "no matrix instruction in machine code"),
        ({"error": "no"}, "did not compile: no"),
        ({"architecture": 100}, "unexpected wgmma"),
    ],
)
def test_each_fault_is_found_alone(change: dict[str, object], fault: str) -> None:
    (found,) = faults(CONFIG, replace(SOUND, **change))  # type: ignore[arg-type]
    assert fault in found


def test_a_stack_budget_is_kept_to() -> None:
    generous = replace(CONFIG, stack_bytes_max=16, exception="two registers, outside the loop")
    assert faults(generous, replace(SOUND, stack_bytes=16)) == []
    assert len(faults(generous, replace(SOUND, stack_bytes=24))) == 1


def test_records_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    records = [SOUND, replace(SOUND, architecture=100, error="no")]
    write_records(path, reversed(records))
    assert read_records(path) == records


def test_exceptions_are_listed_with_their_reasons() -> None:
    generous = replace(CONFIG, stack_bytes_max=16, exception="Outside the loop.")
    assert exceptions([CONFIG, generous]) == "- k n: up to 16 bytes of stack. Outside the loop."
    assert exceptions([CONFIG]) == "No configuration may use stack."


def test_the_table_puts_releases_side_by_side() -> None:
    older = replace(SOUND, triton="3.6.0", registers=70)
    last = table([older, SOUND]).splitlines()[-1]
    assert "| k | n | 90 | wgmma 4 | 1 | 64 / 70 | 0 | 232,448 | 512 |" in last
    assert table([SOUND]) != table([older])


LISTING = """
 Function k:
  REG:32 STACK:8 SHARED:0 LOCAL:0 CONSTANT[0]:640
        /*0000*/                   LDC R1, c[0x0][0x37c] ;   /* 0x0000df00ff017b82 */
                                                             /* 0x000e220000000800 */
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0020*/             @!UP0 UTMALDG.2D [UR8], [UR6] ;
        /*0030*/                   LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64] ;
        /*0040*/                   LDGSTS.E.64 [R9], desc[UR4][R2.64] ;
        /*0050*/                   STL [R1], R4 ;
        /*0060*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0070*/                   QGMMA.64x128x32.F32.E4M3.E4M3 R24, gdesc[UR4] ;
        /*0080*/                   STG.E desc[UR4][R2.64], R4 ;
        /*0090*/                   NOP;
"""


def test_a_listing_is_counted() -> None:
    assert mnemonics(LISTING).total() == 10
    found = facts("mma.sync.aligned.m16n8k16 a; wgmma.mma_async.sync.aligned.m64 b;", LISTING)
    assert found == {
        "registers": 32,
        "stack_bytes": 8,
        "spills": 1,
        "instructions": 9,
        "loads": 4,
        "wide_loads": 3,
        "stores": 1,
        "matrix": {"mma.sync": 1, "wgmma.mma_async": 1},
        "machine_matrix": {"HMMA": 1, "QGMMA": 1},
    }


def test_a_block_scaled_instruction_keeps_its_kind() -> None:
    ptx = "tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::4X [r], d;"
    found = facts(ptx, LISTING)["matrix"]
    assert found == {"tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale": 1}
