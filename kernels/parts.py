"""Inputs, runs and references of the parts of a step that are torch's own."""

from __future__ import annotations

from functools import partial

import torch

from tonnage.kernels.execute.attention import batched, batched_type
from tonnage.kernels.execute.attention import put as write_slots
from tonnage.kernels.execute.mlp import Experts, routed
from tonnage.kernels.execute.place import place_on
from tonnage.kernels.execute.products import ExpertProduct
from tonnage.kernels.execute.small_ops import causal, gated, rms_norm, rope_angles, rotated
from tonnage.kernels.execute.weights import Weight, random_weight
from tonnage.kernels.paged_inputs import generator_of
from tonnage.kernels.part_specs import LATENT_NUMBERS
from tonnage.kernels.spec import Axes, Inputs, Outputs

ROPE_HEAD = 64
ROUTED_TO = 2
EMBEDDINGS = 4096  # rows of the table that `embed` looks up
CACHE_ROWS_LEAST = 1024


def _normal(shape: tuple[int, ...], random: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=random, device=random.device).bfloat16()


# --- operators on rows --------------------------------------------------------------------------


def _rows(axes: Axes, seed: int, device: str, halves: int = 1) -> Inputs:
    random = generator_of(seed, device)
    return {"x": _normal((axes["rows"], halves * axes["width"]), random)}


make_gate_inputs = make_sample_inputs = make_route_inputs = _rows


def make_norm_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return rows and a weight of ones."""
    weight = torch.ones(axes["width"], dtype=torch.bfloat16, device=device)
    return {**_rows(axes, seed, device), "weight": weight}


def make_rope_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return rows of heads of 64 and the angles of their positions."""
    random = generator_of(seed, device)
    heads = max(1, axes["width"] // ROPE_HEAD)
    cosine, sine = rope_angles(torch.arange(axes["rows"], device=device), ROPE_HEAD)
    x = _normal((axes["rows"], heads, ROPE_HEAD), random)
    return {"x": x, "cosine": cosine, "sine": sine}


def make_add_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return two sets of rows."""
    one, other = (_rows(axes, seed + turn, device)["x"] for turn in range(2))
    return {"x": one, "y": other}


def make_join_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return two halves of rows."""
    x = _rows(axes, seed, device)["x"]
    half = axes["width"] // 2
    return {"x": x[:, :half].contiguous(), "y": x[:, half:].contiguous()}


def make_embed_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return a table and which of its rows to look up."""
    random = generator_of(seed, device)
    tokens = torch.randint(EMBEDDINGS, (axes["rows"],), generator=random, device=device)
    return {"table": _normal((EMBEDDINGS, axes["width"]), random), "x": tokens}


def make_put_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return rows, a cache and the slots that they go to."""
    random = generator_of(seed, device)
    held = max(CACHE_ROWS_LEAST, axes["rows"])
    slots = torch.randperm(held, generator=random, device=device)[: axes["rows"]]
    cache = torch.zeros((held, 1, axes["width"]), dtype=torch.bfloat16, device=device)
    return {**_rows(axes, seed, device), "cache": cache, "slots": slots}


def norm(inputs: Inputs) -> Outputs:
    """Divide rows by their root mean square."""
    return {"out": rms_norm(inputs["x"], inputs["weight"])}


def rope(inputs: Inputs) -> Outputs:
    """Rotate the halves of heads."""
    return {"out": rotated(inputs["x"], (inputs["cosine"], inputs["sine"]))}


def gate(inputs: Inputs) -> Outputs:
    """Multiply one half of rows by the activation of the other."""
    return {"out": gated(inputs["x"])}


def add(inputs: Inputs) -> Outputs:
    """Add rows to rows."""
    return {"out": inputs["x"] + inputs["y"]}


def join(inputs: Inputs) -> Outputs:
    """Put rows beside rows."""
    return {"out": torch.cat((inputs["x"], inputs["y"]), -1)}


def route(inputs: Inputs) -> Outputs:
    """Choose experts by their logits; return their shares."""
    _, shares = routed(inputs["x"], ROUTED_TO)
    return {"out": shares}


def embed(inputs: Inputs) -> Outputs:
    """Look rows up."""
    return {"out": torch.nn.functional.embedding(inputs["x"], inputs["table"])}


def sample(inputs: Inputs) -> Outputs:
    """Find the largest of each row."""
    return {"out": inputs["x"].argmax(-1)}


def put(inputs: Inputs) -> Outputs:
    """Write rows to their slots."""
    write_slots(inputs["cache"], inputs["slots"], inputs["x"])
    return {"out": inputs["cache"]}


# --- routed experts -----------------------------------------------------------------------------


def _experts_inputs(axes: Axes, seed: int, device: str, weight_format: str) -> Inputs:
    place = place_on(device, seed=seed)
    hidden, inter, experts = axes["hidden"], axes["inter"], axes["experts"]
    shapes = {"up": (experts, 2 * inter, hidden), "down": (experts, hidden, inter)}
    weights = {name: random_weight(shape, weight_format, place) for name, shape in shapes.items()}
    ids = _expert_ids(axes, place.random)
    held: Inputs = {
        f"{name}.{key}": value for name, one in weights.items() for key, value in one.inputs.items()
    }
    return {
        "x": place.normal(axes["tokens"], hidden),
        "ids": ids,
        "shares": torch.full(ids.shape, 1 / axes["top_k"], device=device),
        "kernel": weights["up"].kernel,
        "shapes": shapes,
        "place": place,
        **held,
    }


make_bf16_experts = partial(_experts_inputs, weight_format="bf16")
make_fp8_experts = partial(_experts_inputs, weight_format="fp8")
make_fp8_block_experts = partial(_experts_inputs, weight_format="fp8_block")
make_int4_g32_experts = partial(_experts_inputs, weight_format="int4_g32")
make_int4_g128_experts = partial(_experts_inputs, weight_format="int4_g128")


def _expert_ids(axes: Axes, random: torch.Generator) -> torch.Tensor:
    """Return int32 `[tokens, top_k]`: all experts in turn, or distinct ones at random."""
    shape = (axes["tokens"], axes["top_k"])
    if axes["balanced"]:
        turns = torch.arange(shape[0] * shape[1], device=random.device)
        return (turns % axes["experts"]).int().view(shape)
    scores = torch.rand((shape[0], axes["experts"]), generator=random, device=random.device)
    return scores.topk(shape[1], -1).indices.int()


def run_experts(inputs: Inputs) -> Outputs:
    """Run a layer's experts as a step does."""
    products = [ExpertProduct(_weight_of(inputs, name), inputs["place"]) for name in ("up", "down")]
    experts = Experts(products[0], products[1], inputs["ids"].shape[1])
    return {"out": experts(inputs["x"], inputs["ids"], inputs["shares"])}


def _weight_of(inputs: Inputs, name: str) -> Weight:
    prefix = f"{name}."
    own = {key.removeprefix(prefix): inputs[key] for key in inputs if key.startswith(prefix)}
    return Weight(inputs["kernel"], own, inputs["shapes"][name], None)


def experts_reference(inputs: Inputs) -> Outputs:
    """Run them token by token with the same kernels: what routing must not change."""
    rows = []
    for token in range(len(inputs["x"])):
        one = {name: inputs[name][token : token + 1] for name in ("x", "ids", "shares")}
        rows.append(run_experts({**inputs, **one})["out"])
    return {"out": torch.cat(rows)}


# --- MLA ----------------------------------------------------------------------------------------


def make_latent_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return queries, attended latents, and the matrices into and out of the latent's space."""
    random = generator_of(seed, device)
    heads, rows, dtype = axes["heads"], axes["rows"], batched_type(device)
    into = _normal((heads, axes["nope"], LATENT_NUMBERS), random) * axes["nope"] ** -0.5
    out_of = _normal((heads, LATENT_NUMBERS, axes["value"]), random) * LATENT_NUMBERS**-0.5
    return {
        "queries": _normal((rows, heads, axes["nope"]), random),
        "attended": _normal((rows, heads, LATENT_NUMBERS), random),
        "into": into.to(dtype),
        "out_of": out_of.to(dtype),
    }


def latent_products(inputs: Inputs) -> Outputs:
    """Multiply by each head's matrix, before and after attention."""
    return {
        "absorbed": batched(inputs["queries"], inputs["into"]),
        "out": batched(inputs["attended"], inputs["out_of"]),
    }


def latent_products_reference(inputs: Inputs) -> Outputs:
    """Return the products in f64."""
    rows = {name: inputs[name].double() for name in ("queries", "attended", "into", "out_of")}
    return {
        "absorbed": torch.einsum("rhk,hkn->rhn", rows["queries"], rows["into"]),
        "out": torch.einsum("rhk,hkn->rhn", rows["attended"], rows["out_of"]),
    }


def make_mla_prefill_inputs(axes: Axes, seed: int, device: str) -> Inputs:
    """Return queries, keys and values of prompts, one after another."""
    random = generator_of(seed, device)
    new, heads = axes["batch"] * axes["new_tokens"], axes["heads"]
    held = axes["batch"] * (axes["new_tokens"] + axes["prefix_tokens"])
    return {
        "queries": _normal((new, heads, axes["key"]), random),
        "keys": _normal((held, heads, axes["key"]), random),
        "values": _normal((held, heads, axes["value"]), random),
        "prompts": axes["batch"],
    }


def mla_prefill(inputs: Inputs) -> Outputs:
    """Attend prompt by prompt."""
    parts = [inputs[name].chunk(inputs["prompts"]) for name in ("queries", "keys", "values")]
    scale = inputs["queries"].shape[-1] ** -0.5
    prompts = zip(*parts, strict=True)
    return {"out": torch.cat([causal(q, k, v, scale) for q, k, v in prompts])}


def mla_prefill_reference(inputs: Inputs) -> Outputs:
    """Attend in f64."""
    outs = []
    names = ("queries", "keys", "values")
    parts = [inputs[name].double().chunk(inputs["prompts"]) for name in names]
    for queries, keys, values in zip(*parts, strict=True):
        logits = torch.einsum("qhd,khd->hqk", queries, keys) * queries.shape[-1] ** -0.5
        new, held = logits.shape[1:]
        seen = torch.ones(new, held, dtype=torch.bool, device=logits.device).tril(held - new)
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        outs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return {"out": torch.cat(outs)}
