"""Keys of points: the same key means the same result, so that it need not be computed again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

from tonnage.scenarios.schema import Scenario


@dataclass(frozen=True, slots=True)
class Digests:
    """Keys of scenarios; what many of them read is read once."""

    files: dict[Path, str] = field(default_factory=dict)
    models: dict[tuple[str, Path], str] = field(default_factory=dict)
    version: str = field(default_factory=lambda: version("tonnage"))

    def key(self, scenario: Scenario) -> str:
        """Return a digest of all that the result of a run follows from."""
        parts = [self.version, scenario.resolved(), list(self._inputs(scenario))]
        return _digest(json.dumps(parts, sort_keys=True))

    def _inputs(self, scenario: Scenario) -> Iterator[str]:
        """Yield digests of what the fields only name: an edited file makes another point."""
        _, folder = scenario.origin()
        yield from (self._file(folder / name) for name in scenario.traffic.files())
        yield from (self._file(path) for path in scenario.traffic_spec().files())
        for role in scenario.pools.named():
            yield _digest(repr(scenario.gpu_spec(role)))
            yield _digest(repr(scenario.speculation_spec(role)))  # it holds the draft's geometry
        model = (scenario.model, folder)
        if model not in self.models:
            self.models[model] = _digest(repr(scenario.model_spec()))
        yield self.models[model]

    def _file(self, path: Path) -> str:
        if path not in self.files:
            with path.open("rb") as file:
                self.files[path] = hashlib.file_digest(file, "sha256").hexdigest()
        return self.files[path]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
