"""Number formats round-trip exactly, quantise to the nearest and cost what the planner counts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.interpreter import E4M3, encode_e4m3
from tonnage.kernels.ops.gemm_fp8_reference import Dequantiser, Quantiser
from tonnage.kernels.quantise import fp8, nvfp4
from tonnage.kernels.quantise.int4 import (
    Int4Weight,
    dequantise_int4,
    half_block,
    pack_int4,
    quantise_int4,
    unpack_int4,
)
from tonnage.sim.domain import BadInputError
from tonnage.sim.model.formats import number_format

few = settings(max_examples=15, deadline=None, database=None)
seeds = st.integers(0, 2**31)


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def levels(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(16, shape, generator=generator, dtype=torch.uint8)


# --- INT4 ---------------------------------------------------------------------------------------


@few
@given(
    seed=seeds,
    group=st.sampled_from([32, 64, 128, 256]),
    rows=st.integers(1, 4),
    groups=st.integers(1, 3),
    stack=st.sampled_from([(), (3,)]),
    with_zeros=st.booleans(),
)
def test_int4_packs_and_unpacks_exactly(
    seed: int, group: int, rows: int, groups: int, stack: tuple[int, ...], with_zeros: bool
) -> None:
    n, k = 16 * rows, 2 * group * groups
    q = levels(seed, *stack, n, k)
    scales = normal(seed, *stack, n, k // group).bfloat16()
    zeros = levels(seed + 1, *stack, n, k // group) if with_zeros else None
    packed = pack_int4(q, scales, zeros)
    assert (packed.n, packed.k, packed.group) == (n, k, group)
    unpacked = unpack_int4(packed)
    assert torch.equal(unpacked[0], q)
    assert torch.equal(unpacked[1], scales)
    assert unpacked[2] is zeros is None or torch.equal(unpacked[2], zeros)


@pytest.mark.parametrize("group", [32, 64, 128])
def test_a_byte_holds_two_levels_half_a_block_apart(group: int) -> None:
    q = levels(0, 16, 256)
    packed = pack_int4(q, torch.ones(16, 256 // group), None).packed
    half = half_block(group)
    for block in range(256 // (2 * half)):
        first = block * 2 * half
        run = packed[:, block * half : (block + 1) * half]
        assert torch.equal(run & 15, q[:, first : first + half])
        assert torch.equal(run >> 4, q[:, first + half : first + 2 * half])


@few
@given(seed=seeds, group=st.sampled_from([32, 64, 128]), symmetric=st.booleans())
def test_int4_is_within_half_a_level(seed: int, group: int, symmetric: bool) -> None:
    weight = normal(seed, 16, 256) * 10 ** (normal(seed + 1, 16, 1))
    weight[3, :group] = 0
    weight[4, :group] = weight[4, :group].abs() + 1  # one sign only
    stored = quantise_int4(weight, group, symmetric)
    error = (dequantise_int4(stored) - weight).abs().view(16, -1, group)
    assert bool((error <= 0.56 * unpack_int4(stored)[1].float()[..., None]).all())


def test_int4_keeps_what_it_can_hold() -> None:
    weight = (levels(5, 16, 256).float() - 8).clamp(-7) * 0.25
    weight[:, ::32] = 1.75  # seven levels: the scale is a quarter
    assert torch.equal(dequantise_int4(quantise_int4(weight, 32)), weight)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_int4_takes_the_bytes_that_the_planner_counts(group: int, symmetric: bool) -> None:
    stored = quantise_int4(normal(0, 48, 512), group, symmetric)
    assert isinstance(stored, Int4Weight)
    name = f"int4_g{group}" + ("" if symmetric else "_zp")
    assert stored.bytes == number_format(name).matrix_bytes(48, 512)


@pytest.mark.parametrize(
    ("n", "k", "group", "message"),
    [
        (16, 192, 128, "k = 192 must be a positive multiple of 128: INT4 in groups of 128"),
        (16, 64, 64, "k = 64 must be a positive multiple of 128"),
        (24, 128, 128, "n = 24 must be a positive multiple of 16"),
        (16, 96, 48, "group = 48 must be 32, 64 or a multiple of 128"),
    ],
)
def test_int4_refuses_what_it_cannot_pack(n: int, k: int, group: int, message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        quantise_int4(torch.ones(n, k), group)


# --- FP8 ----------------------------------------------------------------------------------------


def test_every_bf16_becomes_the_nearest_e4m3() -> None:
    values = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    wanted = encode_e4m3(values.float().numpy())
    found = fp8.to_e4m3(values).view(torch.uint8).numpy()
    number = ~values.isnan().numpy()
    assert (found[number] == wanted[number]).all()
    assert bool(fp8.to_e4m3(values[~torch.from_numpy(number)]).float().isnan().all())


@pytest.mark.parametrize(
    ("quantise", "dequantise"),
    [
        (fp8.quantise_tensor, fp8.dequantise_tensor),
        (fp8.quantise_rows, fp8.dequantise_rows),
        (fp8.quantise_groups, fp8.dequantise_groups),
        (fp8.quantise_blocks, fp8.dequantise_blocks),
    ],
)
def test_fp8_is_within_half_a_step_and_reaches_the_largest(
    quantise: Quantiser, dequantise: Dequantiser
) -> None:
    values = normal(0, 130, 384)
    values[:, :128] *= 100
    values[5] = 0
    values[6, 0] = 1e-42  # a scale that would be subnormal
    codes, scale = quantise(values)
    found = dequantise(codes, scale)
    # Half a step is 2^-4 of a normal number, and 2^-10 scales of a subnormal one.
    one = dequantise(torch.ones_like(codes.float()), scale)
    assert bool(((found - values).abs() <= torch.maximum(values.abs() / 16, one / 1024)).all())
    assert codes.float().abs().max() == 448
    assert torch.equal(quantise(found)[0].float(), codes.float())


@pytest.mark.parametrize(
    ("name", "quantise"),
    [
        ("fp8", fp8.quantise_tensor),
        ("fp8_channel", fp8.quantise_rows),
        ("fp8_block", fp8.quantise_blocks),
    ],
)
def test_fp8_takes_the_bytes_that_the_planner_counts(name: str, quantise: Quantiser) -> None:
    codes, scale = quantise(normal(0, 144, 256))
    assert codes.nbytes + scale.nbytes == number_format(name).matrix_bytes(144, 256)


def test_a_block_scale_is_of_its_own_128_by_128() -> None:
    weight = torch.zeros(2, 144, 256)
    weight[1, 128:, 128:] = 448 * 3.0
    scale = fp8.quantise_blocks(weight)[1]
    wanted = torch.ones(2, 2, 2)
    wanted[1, 1, 1] = 3
    assert torch.equal(scale, wanted)


@pytest.mark.parametrize("quantise", [fp8.quantise_groups, fp8.quantise_blocks])
def test_fp8_refuses_part_of_a_group(quantise: Quantiser) -> None:
    with pytest.raises(BadInputError, match="k = 192 must be a positive multiple of 128"):
        quantise(torch.ones(16, 192))


# --- NVFP4 --------------------------------------------------------------------------------------


def test_e2m1_codes_are_their_own_nearest() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(nvfp4.to_e2m1(nvfp4.from_e2m1(codes)), codes)


def test_e2m1_ties_go_to_the_even_code_and_large_values_to_six() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, torch.inf])
    wanted = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, 6.0])
    assert torch.equal(nvfp4.from_e2m1(nvfp4.to_e2m1(ties)), wanted)
    assert torch.equal(nvfp4.from_e2m1(nvfp4.to_e2m1(-ties)), -wanted)


@few
@given(value=st.floats(-6, 6, width=32))
def test_no_e2m1_is_nearer(value: float) -> None:
    found = float(nvfp4.from_e2m1(nvfp4.to_e2m1(torch.tensor([value]))))
    every = nvfp4.from_e2m1(torch.arange(16, dtype=torch.uint8))
    assert abs(found - value) == float((every.double() - value).abs().min())


@few
@given(seed=seeds, rows=st.sampled_from([1, 17, 128, 129, 300]), blocks=st.integers(1, 3))
def test_nvfp4_packs_and_unpacks_exactly(seed: int, rows: int, blocks: int) -> None:
    codes = levels(seed, rows, 64 * blocks)
    assert torch.equal(nvfp4.unpack_e2m1(nvfp4.pack_e2m1(codes)), codes)
    scales = normal(seed, rows, 4 * blocks).abs().to(torch.float8_e4m3fn)
    tiles = nvfp4.pack_scales(scales)
    assert tiles.shape == (-(-rows // 128), blocks, 32, 4, 4)
    assert torch.equal(nvfp4.unpack_scales(tiles, rows).float(), scales.float())


def test_a_scale_stands_where_the_tensor_core_looks() -> None:
    scales = torch.arange(256 * 8).remainder(127).to(torch.uint8).view(256, 8)
    tiles = nvfp4.pack_scales(scales.view(torch.float8_e4m3fn)).view(torch.uint8)
    for row, column in ((0, 0), (31, 3), (32, 0), (127, 7), (128, 4), (255, 7), (77, 5)):
        at = (row // 128, column // 4, row % 32, row % 128 // 32, column % 4)
        assert tiles[at] == scales[row, column]


@few
@given(seed=seeds)
def test_nvfp4_is_within_a_step_of_its_block(seed: int) -> None:
    values = normal(seed, 130, 128)
    values[7, :16] = 0
    matrix = nvfp4.quantise_nvfp4(values)
    error = (nvfp4.dequantise_nvfp4(matrix) - values).abs().view(130, -1, 16).amax(-1)
    # The widest gap, 4 to 6, halves to 1 of 6; an e4m3 scale is off by 2^-4, or 2^-10 of its unit.
    largest = values.abs().view(130, -1, 16).amax(-1)
    assert bool((error <= largest * (1 / 6 + 1 / 16) + 6 * matrix.tensor_scale / 1024).all())


def test_nvfp4_of_zeros_is_zeros() -> None:
    assert torch.equal(
        nvfp4.dequantise_nvfp4(nvfp4.quantise_nvfp4(torch.zeros(3, 64))), torch.zeros(3, 64)
    )


def test_nvfp4_takes_the_bytes_that_the_planner_counts() -> None:
    matrix = nvfp4.quantise_nvfp4(normal(0, 256, 128))
    input_scale_bytes = 4  # kept with the weight in checkpoints, with the activations here
    counted = number_format("nvfp4").matrix_bytes(256, 128)
    assert matrix.bytes + input_scale_bytes == counted


def test_nvfp4_refuses_part_of_a_scale_tile() -> None:
    with pytest.raises(BadInputError, match="k = 96 must be a positive multiple of 64"):
        nvfp4.quantise_nvfp4(torch.ones(16, 96))


def test_the_table_of_e4m3_is_torchs() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert ((values == E4M3) | ((values != values) & (E4M3 != E4M3))).all()
