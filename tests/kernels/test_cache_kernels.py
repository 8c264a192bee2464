"""Caches are written and copied byte for byte, where they should be and nowhere else."""

from __future__ import annotations

import pytest
import torch

from tonnage.kernels.compare import same_bytes
from tonnage.kernels.paged_inputs import E4M3
from tonnage.kernels.registry import kernel

GQA_AXES = {"tokens": 65, "page_tokens": 16, "kv_heads": 2, "head_dim": 64}


@pytest.mark.parametrize("scale", [1.0, 0.3], ids=["unit", "scaled"])
def test_every_finite_bf16_is_quantised_as_torch_does(scale: float) -> None:
    spec = kernel("gqa_write_fp8")
    axes = {"tokens": 64, "page_tokens": 64, "kv_heads": 8, "head_dim": 128}
    inputs = spec.make_inputs(axes, seed=0)
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    values = torch.where(bits.isfinite(), bits, 0.0)
    inputs["keys"] = values.reshape(64, 8, 128)
    inputs["key_scale"] = torch.tensor([scale])
    inputs["slots"] = torch.arange(64)
    written = spec.run(inputs)["key_cache"].flatten(0, 1)[:64]
    expected = (inputs["keys"].float() / scale).clamp(-448, 448).to(E4M3)
    assert same_bytes(written, expected)


@pytest.mark.parametrize("name", ["gqa_write_fp8", "mla_write_fp8", "dsa_write_fp8"])
def test_only_the_given_slots_are_written(name: str) -> None:
    spec = kernel(name)
    axes = {axis: GQA_AXES[axis] for axis in spec.axes}
    inputs = spec.make_inputs(axes, seed=1)
    caches = [key for key in inputs if key.endswith("cache")]
    for key in caches:
        inputs[key].view(torch.uint8).fill_(0xA5)
    outputs = spec.run(inputs)
    slots = inputs["slots"]
    assert (slots < 0).any()
    for key in caches:
        rows = outputs[key].flatten(0, 1).view(torch.uint8).flatten(1)
        untouched = torch.ones(len(rows), dtype=torch.bool)
        untouched[slots[slots >= 0]] = False
        assert bool((rows[untouched] == 0xA5).all())
        assert not (rows[~untouched] == 0xA5).all(1).any()


def test_a_dsa_row_is_512_codes_4_scales_and_64_bf16() -> None:
    spec = kernel("dsa_write_fp8")
    inputs = spec.make_inputs({"tokens": 1, "page_tokens": 4}, seed=2)
    latent = torch.arange(512).remainder(128).bfloat16()
    latent[128:256] *= -2
    inputs["latents"] = latent[None]
    slot = int(inputs["slots"][0])
    row = spec.run(inputs)["cache"].flatten(0, 1)[slot]
    codes, scales = row[:512].view(E4M3).float(), row[512:528].view(torch.float32)
    torch.testing.assert_close(scales, torch.tensor([127, 254, 127, 127]) / 448)
    assert codes.unflatten(0, (4, 128))[:, 127].tolist() == [448.0, -448.0, 448.0, 448.0]
    assert torch.equal(row[528:].view(torch.bfloat16), inputs["rope_keys"][0])


def test_a_handed_over_latent_has_the_bytes_of_a_fresh_write() -> None:
    copy, write = kernel("kv_copy_fp8"), kernel("mla_write_fp8")
    axes = {"requests": 2, "tokens": 33, "row": 576, "page_tokens": 16, "target_page_tokens": 64}
    inputs = copy.make_inputs({**axes, "ragged": 0}, seed=3)
    copied = copy.run(inputs)["target"]
    position = torch.arange(33)
    slots = [
        {
            name: table[request].long()[position // page] * page + position % page
            for name, table, page in (
                ("source", inputs["source_table"], 16),
                ("target", inputs["target_table"], 64),
            )
        }
        for request in range(2)
    ]
    rows = torch.cat([inputs["source"].flatten(0, 1)[slot["source"]] for slot in slots])
    fresh = write.run(
        {
            "latents": rows[:, :512].contiguous(),
            "rope_keys": rows[:, 512:].contiguous(),
            "cache": torch.zeros_like(copied),
            "scale": inputs["scale"],
            "slots": torch.cat([slot["target"] for slot in slots]),
        }
    )["cache"]
    assert same_bytes(copied, fresh)
