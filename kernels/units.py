"""Every launch configuration that ships, and a digest of all that decides what it compiles to."""

from __future__ import annotations

import ast
import hashlib
import pkgutil
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from tonnage.kernels.compiled import ARCHITECTURES
from tonnage.kernels.registry import KERNELS
from tonnage.kernels.spec import LaunchConfig

OPS = "tonnage.kernels.ops"


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """One compilation: a module's launch configuration for one architecture."""

    module: str
    label: str
    config: LaunchConfig
    architecture: int

    @property
    def kernel(self) -> Any:
        """Return the jit function."""
        return getattr(import_module(self.module), self.config.kernel)


def modules(package: str) -> list[str]:
    """Return the modules of a package, or the module itself."""
    imported = import_module(package)
    if not hasattr(imported, "__path__"):
        return [package]
    return sorted(f"{package}.{found.name}" for found in pkgutil.iter_modules(imported.__path__))


def units(package: str = OPS) -> list[Unit]:
    """Return every launch configuration of the registry's kernels, then those of no kernel of its.

    Those are in tuples named `*CONFIGS`: second stages that a kernel launches after its own.
    """
    found: dict[str, Unit] = {}
    for label, module, configs in (*_registered(package), *_tuples(package)):
        for config in configs:
            home = _home(module, config, package)
            for architecture in sorted(config.instruction):
                unit = Unit(
                    home, label or config.kernel.removesuffix("_kernel"), config, architecture
                )
                found.setdefault(f"{home} {config} {architecture}", unit)
    return list(found.values())


Configs = tuple[LaunchConfig, ...]


def _registered(package: str) -> Iterator[tuple[str, str, Configs]]:
    for spec in KERNELS.values():
        if spec.configs_name and spec.configs_name.startswith(f"{package}."):
            yield spec.name, spec.configs_name.partition(":")[0], spec.configs()


def _tuples(package: str) -> Iterator[tuple[str, str, Configs]]:
    for module in modules(package):
        for name, value in vars(import_module(module)).items():
            if name.endswith("CONFIGS"):
                yield "", module, value


def _home(module: str, config: LaunchConfig, package: str) -> str:
    """Return the module that defines a configuration's kernel."""
    kernel = getattr(import_module(module), config.kernel, None)
    if kernel is not None:
        return str(kernel.fn.__module__)
    homes = [one for one in modules(package) if hasattr(import_module(one), config.kernel)]
    if not homes:
        raise ValueError(f"{config.name}: there is no {config.kernel} in {package}")
    return homes[0]


def code_of(kernel: Any) -> str:
    """Return a jit function's code and that of what it calls, without comments and docstrings."""
    texts: dict[str, str] = {}
    _collect(kernel, texts)
    return "\n".join(texts.values())


def _collect(kernel: Any, texts: dict[str, str]) -> None:
    place = f"{kernel.fn.__module__}.{kernel.fn.__qualname__}"
    if place in texts:
        return
    tree = ast.parse(textwrap.dedent(kernel.src))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    texts[place] = ast.unparse(tree)
    names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
    for name in names:
        value = kernel.fn.__globals__.get(name)
        if hasattr(value, "src") and not value.fn.__module__.startswith("triton."):
            _collect(value, texts)
        elif isinstance(value, int | float | str) or type(value).__name__ == "constexpr":
            texts[f"{place}:{name}"] = f"{name} = {value}"


def key_of(unit: Unit) -> str:
    """Return the digest of all that decides what a unit compiles to, Triton apart."""
    config = unit.config
    compiled_from = (
        code_of(unit.kernel),
        sorted(config.signature.items()),
        sorted((name, str(value)) for name, value in config.constants.items()),
        (config.num_warps, config.num_stages, sorted(config.aligned), unit.architecture),
    )
    return hashlib.sha256(repr(compiled_from).encode()).hexdigest()[:16]


def sample(all_units: list[Unit], every: int = 1) -> list[Unit]:
    """Return the last unit of one kernel in `every`, the architectures taking turns."""
    by_label: dict[str, list[Unit]] = {}
    for unit in all_units:
        by_label.setdefault(unit.label, []).append(unit)
    chosen = []
    for turn, of_label in enumerate(by_label.values()):
        wanted = ARCHITECTURES[turn % len(ARCHITECTURES)]
        last_first = reversed(of_label)
        chosen.append(next((u for u in last_first if u.architecture == wanted), of_label[-1]))
    return chosen[::every]
