"""Imports run one way: cli -> api -> calibrate, scenarios -> sim; in sim only engine has simpy.

`kernels` stands beside them: nobody imports it before it is needed, as it needs torch.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDERS = ("sim", "scenarios", "calibrate", "kernels", "dashboard")
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Return every module that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def forbidden_imports(path: Path) -> set[str]:
    """Return the imports of a file that break the order of the rooms."""
    room = path.relative_to(ROOT).parts
    names = imported_modules(path)
    banned = {"torch", "triton", "streamlit"}
    if room[0] == "sim":
        banned |= {"tonnage.scenarios", "tonnage.api", "tonnage.cli", "tonnage.kernels", "yaml"}
        banned |= {"tonnage.calibrate", "aiconfigurator_core"}
        if room[1] != "engine":
            banned |= {"simpy", "tonnage.sim.engine"}
        if room[1] in ("domain.py", "units.py"):
            banned |= {f"tonnage.sim.{name}" for name in ("model", "traffic", "serving", "cost")}
    if room[0] == "scenarios":
        banned |= {"simpy", "tonnage.api", "tonnage.cli", "tonnage.sim.engine"}
        banned |= {"tonnage.calibrate", "aiconfigurator_core"}
    if room[0] == "calibrate":
        banned |= {"simpy", "tonnage.api", "tonnage.cli", "tonnage.sim.engine"}
        banned |= {"aiconfigurator_core"}
    if room[0] == "kernels":
        banned = {"simpy", "tonnage.api", "tonnage.cli", "tonnage.sim.engine", "streamlit"}
        banned |= {"tonnage.calibrate", "tonnage.scenarios", "aiconfigurator_core"}
    if room[0] == "dashboard":
        banned = {"simpy", "torch", "triton", "tonnage.cli", "tonnage.kernels"}
        banned |= {f"tonnage.sim.{name}" for name in ("engine", "serving", "traffic", "model")}
    return {
        name for name in names if any(name == ban or name.startswith(f"{ban}.") for ban in banned)
    }


def imported_at_once(path: Path) -> set[str]:
    """Return what importing a file imports: nothing inside functions, nothing for types alone."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Try):
            names.add("imports inside a try")
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_room_may(path: Path) -> None:
    assert forbidden_imports(path) == set()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "calibrate").glob("*.py")), ids=lambda path: path.name
)
def test_calibrating_loads_kernels_when_it_measures_and_not_before(path: Path) -> None:
    assert not {name for name in imported_at_once(path) if name.startswith("tonnage.kernels")}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "sim" / "export").glob("*.py")), ids=lambda path: path.name
)
def test_exporting_loads_plotly_for_a_page_and_not_before(path: Path) -> None:
    assert not {name for name in imported_at_once(path) if name.startswith("plotly")}


def test_the_check_sees_an_import_inside_a_function(tmp_path: Path) -> None:
    offender = tmp_path / "clocked.py"
    offender.write_text("def wait() -> None:\n    import simpy\n", encoding="utf-8")
    assert "simpy" in imported_modules(offender)
