"""Compares published decode curves and prefill rates with what measured kernels predict.

Reads `shared/facts/published.yaml` beside the checkout or inside it; prints Markdown, or with
`--write` puts it into docs/validation.md. Nothing is fitted but the one overhead per deployment in
the column that says so.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import yaml

from tonnage.pools import built_pools, times_of
from tonnage.scenarios.load import load_scenario
from tonnage.sim.domain import PromptChunk, Step

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "validation.md"
_BEGIN, _END = "<!-- begin published -->", "<!-- end published -->"

CONTEXTS = (1_000, 4_000, 10_000, 21_000)
ROUTINGS = ("uniform", "power_law_1.2", "balanced")
FIXED = (4_000, "uniform")  # what the scenario files say, fixed beforehand
ANCHOR_REQUESTS = 8  # the point that sets the overhead of a deployment
CURVES = {  # (section, key in the published file): scenario
    ("kimi_k2_6_kv", "bf16"): "kimi-k2.6-h200-bf16",
    ("kimi_k2_6_kv", "fp8_e4m3"): "kimi-k2.6-h200",
    ("glm_5_2_weights", "fp8"): "glm-5.2-h200-fp8",
    ("glm_5_2_weights", "int4"): "glm-5.2-h200",
}
EXCEPTION = ("glm-5.2-h200-fp8", 1)  # off by half in every study, and nobody knows why
PREFILL_CHUNK_TOKENS = 8192
PREFILLS = {"fp8": "glm-5.2-h200-fp8", "int4": "glm-5.2-h200"}
_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Point:
    """One published point: so many tokens per second at so many requests."""

    scenario: str
    requests: int
    published_per_s: float


def published_file() -> Path | None:
    """Return the file of published figures, or None where there is no shared folder."""
    for folder in (ROOT.parent / "shared", ROOT / "shared"):
        path = folder / "facts" / "published.yaml"
        if path.is_file():
            return path
    return None


def published(path: Path) -> dict[str, Any]:
    """Return the published figures."""
    data: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return data


def points(data: dict[str, Any]) -> Iterator[Point]:
    """Yield the published decode points, curve by curve."""
    for (section, key), scenario in CURVES.items():
        for requests, per_s in data[section]["decode_output_tokens_per_s"][key].items():
            yield Point(scenario, int(requests), float(per_s))


def decode_step_s(scenario: str, requests: int, context_tokens: int, routing: str) -> float:
    """Return the predicted seconds of one decode step of equal contexts, no overhead added."""
    asked = load_scenario(scenario, [f"engine.routing={routing}"])
    predictor = times_of(asked, built_pools(asked))["decode"].executor
    contexts = np.full(requests, context_tokens, dtype=np.int64)
    step = Step(contexts, int(contexts.sum()), ())
    return float(predictor.run(step, 1)[0])


def prefill_per_s(scenario: str) -> float:
    """Return the predicted prompt tokens per second of one instance: whole chunks, no prefix."""
    asked = load_scenario(scenario, ["pools.decode.kv=fp8_e4m3"])
    predictor = times_of(asked, built_pools(asked))["decode"].executor
    step = Step(_NONE, 0, (PromptChunk(PREFILL_CHUNK_TOKENS, 0),))
    return PREFILL_CHUNK_TOKENS / float(predictor.run(step, 1)[0])


@dataclass(frozen=True)
class Errors:
    """Relative errors of the rates of all points, as predicted and with one overhead per curve."""

    plain: dict[Point, float]
    anchored: dict[Point, float]  # without the points that set the overhead

    @property
    def plain_mean(self) -> float:
        """Mean absolute error of all points, nothing fitted."""
        return mean(map(abs, self.plain.values()))

    @property
    def anchored_mean(self) -> float:
        """Mean absolute error of the other points, an overhead set from one point per curve."""
        return mean(map(abs, self.anchored.values()))


def errors(known: list[Point], context_tokens: int, routing: str) -> Errors:
    """Return the errors at one context and routing."""
    step_s = {
        point: decode_step_s(point.scenario, point.requests, context_tokens, routing)
        for point in known
    }
    plain = {p: p.requests / step_s[p] / p.published_per_s - 1 for p in known}
    overhead_s = {
        p.scenario: p.requests / p.published_per_s - step_s[p]
        for p in known
        if p.requests == ANCHOR_REQUESTS
    }
    anchored = {
        p: p.requests / (step_s[p] + overhead_s[p.scenario]) / p.published_per_s - 1
        for p in known
        if p.requests != ANCHOR_REQUESTS
    }
    return Errors(plain, anchored)


def report(data: dict[str, Any]) -> str:
    """Return the section of the document."""
    known = list(points(data))
    grid = {(c, r): errors(known, c, r) for r in ROUTINGS for c in CONTEXTS}
    fixed = grid[FIXED]
    lines = ["| point | published tok/s | predicted | error | with one overhead per curve |"]
    lines.append("|---|---|---|---|---|")
    for point in known:
        predicted = (1 + fixed.plain[point]) * point.published_per_s
        anchored = fixed.anchored.get(point)
        star = " *" if (point.scenario, point.requests) == EXCEPTION else ""
        lines.append(
            f"| {point.scenario} at {point.requests}{star} | {point.published_per_s:,.0f} | "
            f"{predicted:,.0f} | {fixed.plain[point]:+.1%} | "
            f"{'sets it' if anchored is None else format(anchored, '+.1%')} |"
        )
    lines += ["", "Mean absolute error by context and routing, nothing fitted on all 18 points /"]
    lines += ["one overhead per curve, set at 8 requests, on the other 14:", ""]
    lines.append("| routing | " + " | ".join(f"{c:,} tokens" for c in CONTEXTS) + " |")
    lines.append("|---|" + "---|" * len(CONTEXTS))
    for routing in ROUTINGS:
        cells = [
            f"{grid[c, routing].plain_mean:.1%} / {grid[c, routing].anchored_mean:.1%}"
            for c in CONTEXTS
        ]
        lines.append(f"| {routing} | " + " | ".join(cells) + " |")
    lines += ["", *_ratios(data), *_prefills(data)]
    return "\n".join(lines)


def _ratios(data: dict[str, Any]) -> list[str]:
    context, routing = FIXED
    large = 64 / decode_step_s("kimi-k2.6-h200", 64, context, routing)
    small = 32 / decode_step_s("kimi-k2.6-h200-bf16", 32, context, routing)
    gain = data["kimi_k2_6_kv"]["peak_throughput_gain"]
    return [
        f"Kimi, FP8 KV at 64 over BF16 KV at 32: {large / small:.3f} (published {1 + gain:.2f}); "
        f"the decode pool's cost per token falls by {1 - small / large:.1%}.",
        "",
    ]


def _prefills(data: dict[str, Any]) -> list[str]:
    lines = ["| GLM-5.2 prefill, chunks of 8,192 | published tok/s | predicted | error |"]
    lines.append("|---|---|---|---|")
    for key, per_s in data["glm_5_2_weights"]["prefill_input_tokens_per_s"].items():
        predicted = prefill_per_s(PREFILLS[key])
        lines.append(f"| {key} | {per_s:,} | {predicted:,.0f} | {predicted / per_s - 1:+.1%} |")
    return lines


def main() -> None:
    """Print the section, or write it into the document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true")
    path = published_file()
    if path is None:
        raise SystemExit("no shared/facts/published.yaml beside the checkout")
    text = report(published(path))
    if not parser.parse_args().write:
        print(text)
        return
    before, _, rest = DOCUMENT.read_text(encoding="utf-8").partition(_BEGIN)
    after = rest.partition(_END)[2]
    DOCUMENT.write_text(f"{before}{_BEGIN}\n{text}\n{_END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
