"""GEMMs by quantised weights against f64, at odd sizes, split or not, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tonnage.kernels.compare import output_errors, row_error
from tonnage.kernels.gemm_specs import GEMM_KERNELS, OUT_ERROR
from tonnage.kernels.ops import gemm_fp8, gemm_int4, gemm_nvfp4
from tonnage.kernels.ops.dequantise_int4 import dequantise
from tonnage.kernels.ops.fp8_scales import Fp8Operands
from tonnage.kernels.ops.gemm_fp8_persistent import gemm_fp8_persistent
from tonnage.kernels.ops.gemm_int4_reference import make_inputs_g128_zp, prepare
from tonnage.kernels.ops.gemm_nvfp4_reference import matrix_of
from tonnage.kernels.ops.gemm_tiles import Tile, pick_tile, splits_of_k, workspace
from tonnage.kernels.ops.split_counts import arrivals_for
from tonnage.kernels.quantise.int4 import Int4Weight, dequantise_int4, quantise_int4
from tonnage.kernels.spec import Axes, Inputs, KernelSpec
from tonnage.sim.domain import BadInputError

SPECS = {spec.name: spec for spec in GEMM_KERNELS if spec.name.startswith("gemm")}
CASES = [
    pytest.param(spec, axes, id=f"{spec.name}-{axes['m']}x{axes['n']}x{axes['k']}")
    for spec in SPECS.values()
    for axes in spec.examples
]


def axes_of(m: int, n: int, k: int) -> Axes:
    return {"m": m, "n": n, "k": k}


def prepared(name: str, m: int, n: int, k: int, seed: int = 0) -> Inputs:
    spec = SPECS[name]
    return spec.prepare(spec.make_inputs(axes_of(m, n, k), seed), "triton")


@pytest.mark.parametrize(("spec", "axes"), CASES)
def test_the_product_is_that_of_the_reference(spec: KernelSpec, axes: Axes) -> None:
    inputs = spec.prepare(spec.make_inputs(axes, seed=3), "triton")
    errors = output_errors(spec, spec.run(inputs), spec.reference(inputs))
    assert errors["out"] <= spec.tolerances["out"]


@pytest.mark.parametrize("name", SPECS)
def test_no_rows_give_no_rows(name: str) -> None:
    inputs = prepared(name, 1, 32, 256)
    for key in ("x", "x_packed"):
        if key in inputs:
            inputs[key] = inputs[key][:0]
    inputs |= {"x_scale": torch.empty(0)} if name.endswith("row") else {}
    inputs |= {"x_scale": torch.empty(2, 0)} if name.endswith("block") else {}
    assert SPECS[name].run(inputs)["out"].shape == (0, 32)


@pytest.mark.parametrize("name", SPECS)
def test_bytes_are_those_of_the_tensors(name: str) -> None:
    inputs = prepared(name, 48, 64, 256)
    unread = {"levels", "scales", "zeros", "arrivals"}
    moved = sum(tensor.nbytes for key, tensor in inputs.items() if key not in unread)
    assert SPECS[name].bytes(axes_of(48, 64, 256)) == moved + 2 * 48 * 64


# --- splits of K --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gemm_int4_g32", "gemm_fp8_row", "gemm_fp8_block", "gemm_nvfp4"])
@pytest.mark.parametrize("splits", [1, 5])
def test_splitting_k_changes_only_the_order_of_sums(
    name: str, splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"gemm_int4_g32": gemm_int4, "gemm_nvfp4": gemm_nvfp4}.get(name, gemm_fp8)
    launch = module.launch

    def checked(kernel: object, grid: tuple[int, ...], *rest: object, **arguments: object) -> None:
        assert grid[1] == splits
        launch(kernel, grid, *rest, **arguments)
        # whoever arrives last leaves the counts as it found them
        assert not bool(arguments["arrivals_ptr"].any())

    monkeypatch.setattr(module, "launch", checked)
    monkeypatch.setattr(module, "splits_of_k", lambda *arguments: splits)
    inputs = prepared(name, 5, 48, 2048)  # of 8 to 32 steps: the last of five runs may be empty
    out = SPECS[name].run(inputs)["out"]
    assert row_error(out, SPECS[name].reference(inputs)["out"]) <= OUT_ERROR


@pytest.mark.parametrize("m", [1, 16, 17, 33, 64, 65, 128, 129, 1023])
def test_prepared_counters_suffice_for_every_tile(m: int) -> None:
    n = 1040
    counters = arrivals_for(m, n, torch.device("cpu")).numel()
    for tiles in (gemm_fp8.TILES, gemm_int4.tiles_for(32), gemm_int4.tiles_for(128)):
        assert pick_tile(tiles, m).count(m, n) <= counters
    assert m > gemm_nvfp4.SPLIT_M_MAX or gemm_nvfp4.SPLIT_TILE.count(m, n) <= counters


def test_too_few_counters_are_refused() -> None:
    out = torch.empty(4, 32)
    assert workspace(1, 9, out, None).arrivals.numel() == 0
    with pytest.raises(BadInputError, match="arrivals must be int32 zeros, one for each of 9"):
        workspace(2, 9, out, torch.zeros(8, dtype=torch.int32))


def test_k_is_split_to_fill_the_gpu_and_no_further() -> None:
    tile = Tile(None, 16, 64, 128, num_warps=4, num_stages=4, programs_per_sm=4)
    assert splits_of_k(tile, m=1, n=8192, steps=64, processors=132) == 4  # 128 tiles
    assert splits_of_k(tile, m=1, n=65536, steps=64, processors=132) == 1  # tiles enough
    assert splits_of_k(tile, m=1, n=64, steps=16, processors=132) == 4  # four steps each
    assert splits_of_k(tile, m=1, n=64, steps=1, processors=132) == 1


@pytest.mark.parametrize(
    "tiles", [gemm_fp8.TILES, gemm_int4.tiles_for(32), gemm_int4.tiles_for(128)]
)
def test_there_is_a_tile_for_every_m(tiles: tuple[Tile, ...]) -> None:
    for m in (1, 16, 17, 64, 65, 129, 100_000):
        tile = pick_tile(tiles, m)
        assert tile.m_max is None or m <= tile.m_max
        assert tile.block_m < 2 * max(m, 16)


# --- INT4 ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SPECS if "int4" in name])
def test_both_ways_of_int4_agree_at_129_rows(name: str) -> None:
    inputs = prepared(name, 129, 80, 256)
    weight = gemm_int4.weight_of(inputs)
    expected = SPECS[name].reference(inputs)["out"]
    fused = gemm_int4.gemm_int4_fused(inputs["x"], weight)
    assert row_error(fused, expected) <= OUT_ERROR
    assert row_error(gemm_int4.gemm_int4(inputs["x"], weight), expected) <= 2**-6


def test_dequantising_rounds_once() -> None:
    weight = gemm_int4.weight_of(prepare(make_inputs_g128_zp(axes_of(1, 80, 384), 1, "cpu")))
    assert torch.equal(dequantise(weight), dequantise_int4(weight, torch.bfloat16))


@pytest.mark.parametrize(
    ("group", "symmetric"), [(32, False), (64, False), (256, False), (512, True)]
)
def test_formats_that_do_not_ship_run_too(group: int, symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = quantise_int4(torch.randn(32, 512, generator=generator), group, symmetric)
    x = torch.randn(3, 512, generator=generator).bfloat16()
    expected = x.double() @ dequantise_int4(weight).double().mT
    assert row_error(gemm_int4.gemm_int4(x, weight), expected) <= OUT_ERROR
    assert torch.equal(dequantise(weight), dequantise_int4(weight, torch.bfloat16))


# --- FP8 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("scales", gemm_fp8.SCALES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 144, 256), (129, 272, 128), (300, 16, 128)])
def test_the_persistent_kernel_agrees(scales: str, m: int, n: int, k: int) -> None:
    name = f"gemm_fp8_{scales}"
    inputs = prepared(name, m, n, k)
    out = gemm_fp8_persistent(Fp8Operands.of(inputs, scales))
    assert row_error(out, SPECS[name].reference(inputs)["out"]) <= OUT_ERROR


def test_many_rows_take_the_persistent_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_fp8, "gemm_fp8_persistent", lambda *arguments: "persistent")
    monkeypatch.setattr(gemm_fp8, "gemm_fp8_tiled", lambda *arguments: "tiled")
    for m, wanted in ((gemm_fp8.PERSISTENT_M_MIN - 1, "tiled"), (1024, "persistent")):
        inputs = prepared("gemm_fp8_tensor", m, 16, 16)
        assert gemm_fp8.gemm_fp8(Fp8Operands.of(inputs, "tensor")) == wanted


@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("multiply", [gemm_fp8.gemm_fp8_tiled, gemm_fp8_persistent])
def test_k_may_end_inside_a_step(
    scales: str, multiply: Callable[[Fp8Operands], torch.Tensor]
) -> None:
    inputs = prepared(f"gemm_fp8_{scales}", 17, 48, 208)
    expected = SPECS[f"gemm_fp8_{scales}"].reference(inputs)["out"]
    assert row_error(multiply(Fp8Operands.of(inputs, scales)), expected) <= OUT_ERROR


# --- refusals -----------------------------------------------------------------------------------


def refused_fp8(scales: str, **changed: torch.Tensor) -> None:
    inputs = {**prepared("gemm_fp8_block", 4, 32, 256), **changed}
    gemm_fp8.gemm_fp8(Fp8Operands.of(inputs, scales))


E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize(
    ("scales", "changed", "message"),
    [
        ("channel", {}, "scales = 'channel': use tensor, row, block"),
        ("block", {"x": torch.ones(4, 128).to(E4M3)}, "x has k = 128, w has 256"),
        ("block", {"x": torch.ones(4, 256)}, "x must be contiguous float8_e4m3fn"),
        ("block", {"w": torch.ones(256, 32).to(E4M3).mT}, "w must be contiguous float8_e4m3fn"),
        ("row", {}, r"x_scale must be contiguous float32 \[4\], not \[2, 4\]"),
        (
            "block",
            {"x": torch.ones(4, 192).to(E4M3), "w": torch.ones(32, 192).to(E4M3)},
            "k = 192 must be a positive multiple of 128",
        ),
        ("block", {"w": torch.ones(20, 256).to(E4M3)}, "n = 20 must be a positive multiple of 16"),
    ],
)
def test_fp8_refuses(scales: str, changed: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(BadInputError, match=message):
        refused_fp8(scales, **changed)


def test_int4_refuses_other_activations() -> None:
    weight = quantise_int4(torch.ones(16, 256))
    with pytest.raises(BadInputError, match="x has k = 128, the INT4 weight has 256"):
        gemm_int4.gemm_int4(torch.ones(2, 128).bfloat16(), weight)
    with pytest.raises(BadInputError, match=r"x must be contiguous bfloat16 .*, not torch.float32"):
        gemm_int4.gemm_int4(torch.ones(2, 256), weight)


def test_int4_refuses_a_weight_beyond_its_offsets() -> None:
    rows = torch.empty(1, dtype=torch.uint8).expand(2**20, 2**11)
    scales = torch.empty(1, dtype=torch.bfloat16).expand(2**5, 2**20)
    with pytest.raises(BadInputError, match=r"n \* k / 2 = 2147483648 must be below 2\^31"):
        gemm_int4.gemm_int4(torch.ones(1, 4096).bfloat16(), Int4Weight(rows, scales, None))


def test_nvfp4_refuses_operands_that_do_not_meet() -> None:
    x = matrix_of(prepared("gemm_nvfp4", 2, 16, 128), "x")
    w = matrix_of(prepared("gemm_nvfp4", 2, 16, 64), "w")
    with pytest.raises(BadInputError, match="x has k = 128, w has 64"):
        gemm_nvfp4.gemm_nvfp4(x, w)
    w = matrix_of(prepared("gemm_nvfp4", 2, 24, 128), "w")
    with pytest.raises(BadInputError, match="n = 24 must be a positive multiple of 16"):
        gemm_nvfp4.gemm_nvfp4(x, w)


# --- what ships ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SPECS)
def test_what_ships_uses_the_wide_instructions_from_64_rows(name: str) -> None:
    for config in SPECS[name].configs():
        narrow = config.constants["BLOCK_M"] < 64
        assert all((found == "mma.sync") == narrow for found in config.instruction.values())
        assert set(config.instruction) == ({100} if "nvfp4" in name else {90, 100})
        assert math.log2(config.constants["BLOCK_N"]).is_integer()
