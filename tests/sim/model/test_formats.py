"""Bytes of the number formats, by hand-made arithmetic."""

from __future__ import annotations

import pytest

from tonnage.sim.domain import BadInputError, Role, Shard, WeightTensor
from tonnage.sim.model.formats import FORMATS, compute_format, kv_element_bytes, weight_bytes


def tensor(stored: str, out: int = 512, inside: int = 256, copies: int = 1) -> WeightTensor:
    return WeightTensor("w", Role.ATTENTION, out, inside, stored, Shard.ATTENTION, copies)


N = 512 * 256


@pytest.mark.parametrize(
    ("stored", "expected_bytes"),
    [
        ("fp32", 4 * N),
        ("bf16", 2 * N),
        ("fp16", 2 * N),
        ("fp8", N + 4),
        ("fp8_channel", N + 4 * 512),
        ("fp8_block", N + 4 * (4 * 2)),
        ("int8", N + 4 * 512),
        ("int4_g32", N // 2 + 2 * N // 32),
        ("int4_g64", N // 2 + 2 * N // 64),
        ("int4_g128", N // 2 + 2 * N // 128),
        ("int4_g128_zp", N // 2 + 2 * N // 128 + N // 128 // 2),
        ("mxfp4", N // 2 + N // 32),
        ("nvfp4", N // 2 + N // 16 + 8),
        ("nvfp4_w4a16", N // 2 + N // 16 + 4),
        ("bf16_lossless", round(2 * N * 0.7)),
    ],
)
def test_bytes_of_one_matrix(stored: str, expected_bytes: int) -> None:
    assert weight_bytes(tensor(stored)) == pytest.approx(expected_bytes, abs=1)


def test_scales_of_a_ragged_matrix_are_rounded_up_to_whole_blocks() -> None:
    assert weight_bytes(tensor("fp8_block", 576, 7168)) == 576 * 7168 + 4 * (5 * 56)
    assert weight_bytes(tensor("int4_g32", 10, 33)) == 165 + 10 * 2 * 2


def test_copies_multiply_the_bytes_of_one() -> None:
    assert weight_bytes(tensor("int4_g32", copies=384)) == 384 * weight_bytes(tensor("int4_g32"))


def test_every_format_takes_no_more_than_the_next_wider_one() -> None:
    sizes = {name: weight_bytes(tensor(name)) for name in FORMATS}
    assert sizes["int4_g128"] < sizes["int4_g64"] < sizes["int4_g32"] < sizes["fp8"]
    assert sizes["fp8_channel"] < sizes["bf16_lossless"] < sizes["bf16"] < sizes["fp32"]


def test_an_unknown_format_is_refused_with_the_valid_names() -> None:
    with pytest.raises(BadInputError, match=r"'int3'.*bf16.*int4_g32.*nvfp4"):
        weight_bytes(tensor("int3"))
    with pytest.raises(BadInputError, match=r"'int8'.*bf16, fp16, fp8_e4m3"):
        kv_element_bytes("int8")


def test_kv_element_bytes() -> None:
    assert [kv_element_bytes(kv) for kv in ("bf16", "fp16", "fp8_e4m3")] == [2, 2, 1]


@pytest.mark.parametrize(
    ("stored", "hopper", "ampere"),
    [
        ("bf16", "bf16", "bf16"),
        ("int4_g32", "bf16", "bf16"),
        ("fp8_block", "fp8", "bf16"),
        ("nvfp4", "bf16", "bf16"),
        ("int8", "int8", "int8"),
    ],
)
def test_a_format_runs_in_the_best_precision_that_the_gpu_has(
    stored: str, hopper: str, ampere: str
) -> None:
    assert compute_format(stored, {"bf16", "fp8", "int8"}) == hopper
    assert compute_format(stored, {"bf16", "int8"}) == ampere


def test_nvfp4_runs_in_fp4_where_there_is_fp4() -> None:
    assert compute_format("nvfp4") == "fp4"
    assert compute_format("nvfp4", {"bf16", "fp8", "fp4"}) == "fp4"
    with pytest.raises(BadInputError, match="needs fp4 or bf16"):
        compute_format("nvfp4", {"fp64"})
