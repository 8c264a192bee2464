"""What a command was asked to run: a scenario, or its variants, and their joint report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tonnage.scenarios.load import load_scenario, load_variants
from tonnage.scenarios.schema import Scenario

BASE = "base"  # the label of the scenario itself when it stands beside its variants


@dataclass(frozen=True, slots=True)
class Asked:
    """Scenarios by label; the one under `main` is the file itself, without a variant's changes."""

    main: str
    scenarios: Mapping[str, Scenario]

    def joint(self, reports: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        """Return the main report, with all of them under `variants` where there are several."""
        main = reports[self.main]
        return main if len(reports) == 1 else {**main, "variants": dict(reports)}


def one_scenario(scenario: Scenario) -> Asked:
    """Ask for a scenario without variants; its label is empty."""
    return Asked("", {"": scenario})


def asked_for(path: str, overrides: Sequence[str]) -> Asked:
    """Load a scenario and its variants; a variant that changes nothing is the scenario itself."""
    base = load_scenario(path, overrides)
    variants = load_variants(path, overrides)
    if not variants:
        return one_scenario(base)
    for label, variant in variants.items():
        if variant.resolved() == base.resolved():
            return Asked(label, variants)
    return Asked(BASE, {BASE: base, **variants})
