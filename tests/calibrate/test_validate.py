"""docs/validation.md says what the shipped profiles say, and names what misses its target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tonnage.calibrate.validate import (
    BEGIN,
    END,
    figures,
    main,
    section,
    shipped_headers,
    target_of,
    written_page,
)
from tonnage.sim.cost.profile import Profile, ProfileHeader, write_profile
from tonnage.sim.domain import BadInputError

ROOT = Path(__file__).parent.parent.parent
SHIPPED = ROOT / "scenarios" / "profiles"


def error(median: float, p90: float, **changed: Any) -> dict[str, Any]:
    fields = {"held_out": "(n, k) pairs", "n": 100, "interval": [0.9, 1.1]}
    return {"regime": "interpolation", "median": median, "p90": p90, **fields, **changed}


def header(gpu: str = "h200-sxm", **errors: Any) -> ProfileHeader:
    return ProfileHeader(
        name=f"{gpu}-sglang",
        gpu=gpu,
        engine="sglang",
        engine_version="0.5.14",
        source="imported",
        source_text="kernel timings of a package (somebody), changed",
        date="2026-11-30",
        tonnage_version="0.1.0",
        errors=errors,
        missing=("moe",),
    )


@pytest.mark.parametrize(
    ("operator", "number_format", "target"),
    [
        ("gemm", "fp8_block", 0.06),
        ("moe", "int4", 0.08),
        ("attention_decode", "gqa/bf16", 0.08),
        ("attention_decode", "gqa/fp8_e4m3", 0.12),
        ("attention_decode", "mla/fp8_e4m3", 0.08),
        ("attention_prefill", "gqa/fp8_e4m3", 0.08),
        ("all_reduce", "graph", None),
    ],
)
def test_targets(operator: str, number_format: str, target: float | None) -> None:
    assert target_of(operator, number_format) == target


def test_a_miss_is_marked_and_named_and_extrapolation_has_no_target() -> None:
    beyond = error(0.3, 0.6, regime="extrapolation", held_out="wider pairs")
    of_h200 = {"bf16": error(0.03, 0.1), "fp8": {**error(0.07, 0.3), "extrapolation": beyond}}
    text = section([header(gemm=of_h200), header("h100-sxm", gemm={"bf16": error(0.05, 0.26)})])
    assert "1 of 3 figures with a target meet it" in text
    assert "- gemm bf16: h100-sxm sglang p90 26.0%" in text
    assert "- gemm fp8: h200-sxm sglang median 7.0% and p90 30.0%" in text
    assert "| bf16 | interpolation | sglang | 6% | 5.0 / 26* | 3.0 / 10 |" in text
    assert "| fp8 | interpolation | sglang | 6% | - | 7.0* / 30* |" in text
    assert "| fp8 | extrapolation | sglang |  | - | 30.0 / 60 |" in text
    assert "interpolation: (n, k) pairs; extrapolation: wider pairs" in text
    assert "- h200-sxm-sglang: moe" in text


def test_only_the_part_between_the_marks_is_written(tmp_path: Path) -> None:
    write_profile(Profile(header(gemm={"bf16": error(0.03, 0.1)}), {}), tmp_path / "a.profile")
    page = tmp_path / "page.md"
    page.write_text(f"# Mine\n\n{BEGIN}\nold\n{END}\n\n## Curves\n\nkept\n")
    for _ in range(2):
        main(["--profiles", str(tmp_path), "--page", str(page)])
        text = page.read_text()
        assert text.startswith(f"# Mine\n\n{BEGIN}\n\nProfiles made on 2026-11-30")
        assert text.endswith(f"\n{END}\n\n## Curves\n\nkept\n")
        assert "old" not in text
    with pytest.raises(BadInputError, match="has no part from"):
        written_page("# Mine\n", [])


def test_the_page_is_that_of_the_shipped_profiles() -> None:
    page = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
    assert page == written_page(page, shipped_headers(SHIPPED))


def test_every_operator_of_every_shipped_profile_has_a_figure() -> None:
    for one in shipped_headers(SHIPPED):
        judged = {figure.operator for figure in figures([one])}
        asked = {"gemm", "moe", "attention_decode", "attention_prefill", "all_reduce"}
        assert asked - set(one.missing) <= judged, one.name
