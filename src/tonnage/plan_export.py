"""`export`: a plan as launch commands, manifests, a table or a report."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml

from tonnage.scenarios.catalogue import load_gpu, load_model, model_names
from tonnage.sim.domain import BadInputError
from tonnage.sim.export.context import ExportContext, ModelFacts
from tonnage.sim.export.formats import FORMATS, Format, Rendered, rendered
from tonnage.sim.planning.fleet_plan import FleetPlan, PlannedPool

if TYPE_CHECKING:
    from tonnage.planner import PlanReport

Which = Literal["launchable", "best"]
_ROLES = ("prefill", "decode", "serve")
# What needs no quotes in YAML 1.1 and 1.2 alike; anything else is quoted.
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9./_-]*")
_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


@dataclass(frozen=True, slots=True)
class Exported:
    """A plan in one format: the text of its file, a name for it, and what to mind."""

    text: str
    file_name: str
    remarks: tuple[str, ...]


def export(
    plan: FleetPlan | PlanReport,
    to: Format,
    *,
    which: Which = "launchable",
    checkpoints: Mapping[str, str] | None = None,
) -> Exported:
    """Return a plan as sglang, vllm, dynamo, kubernetes, csv, markdown or html.

    `which` of the two plans of a report. `checkpoints`: what a pool loads, a path or a repository,
    by role, and its draft model by `role.draft`; without it the model's own where the format is
    its own. Raises BadInputError for what the engine cannot do.
    """
    if isinstance(plan, FleetPlan):
        return _exported(plan, to, checkpoints or {}, ())
    chosen = plan.best if which == "best" else plan.launchable
    if chosen is None:
        raise BadInputError(_NOT_LAUNCHABLE)
    front = plan.to_dict()["front"]
    return _exported(chosen, to, checkpoints or {}, front)


_NOT_LAUNCHABLE = (
    "launchable: there is none: no fleet that stock engines start met the objectives; export the "
    "best to csv, markdown or html (--which best)"
)


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A plan read from JSON, and the front that stood beside it."""

    plan: FleetPlan
    front: tuple[Mapping[str, Any], ...] = ()


def read_plan(path: Path, which: Which = "launchable") -> PlanFile:
    """Read what `tonnage plan` wrote: a report with best and launchable, or one plan alone.

    `-` is the standard input. BadInputError names the file, or the field in it, that is no plan's.
    """
    try:
        piped = str(path) == "-"
        data = json.loads(sys.stdin.read() if piped else path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise BadInputError(f"{path}: not JSON; write it with tonnage plan --json") from error
    if not isinstance(data, dict):
        raise BadInputError(f"{path}: not a plan; write it with tonnage plan --json")
    if "pools" in data:
        return PlanFile(FleetPlan.from_dict(data, str(path)))
    if "best" not in data:
        raise BadInputError(f"{path}: holds no plan; write it with tonnage plan --json")
    chosen = data.get(which)
    if not isinstance(chosen, dict):
        raise BadInputError(f"{path}: {_NOT_LAUNCHABLE}")
    front = tuple(one for one in data.get("front") or () if isinstance(one, dict))
    return PlanFile(FleetPlan.from_dict(chosen, f"{path}: {which}"), front)


def export_file(file: PlanFile, to: Format, checkpoints: Mapping[str, str]) -> Exported:
    """Return a plan read from a file in a format, as `export` does."""
    return _exported(file.plan, to, checkpoints, file.front)


def _exported(
    plan: FleetPlan,
    to: Format,
    checkpoints: Mapping[str, str],
    front: Sequence[Mapping[str, Any]],
) -> Exported:
    if to not in FORMATS:
        raise BadInputError(f"--to {to}: not a format; use one of {', '.join(FORMATS)}")
    file = rendered(plan, to, _context(plan, checkpoints), front)
    text = _yaml_text(file) if file.text is None else file.text
    return Exported(text, file.file_name, file.remarks)


def _context(plan: FleetPlan, checkpoints: Mapping[str, str]) -> ExportContext:
    known = [name for role in _ROLES for name in (role, f"{role}.draft")]
    for name, path in checkpoints.items():
        if name not in known:
            raise BadInputError(
                f"--checkpoint {name}: not a pool; use {', '.join(_ROLES)} or a role with .draft"
            )
        if not path:
            raise BadInputError(f"--checkpoint {name}: names no path")
    found = {f"{pool.role}.draft": _draft_checkpoint(pool) for pool in plan.pools}
    drafts = {name: draft for name, draft in found.items() if draft is not None}
    return ExportContext(
        native_checkpoint=_checkpoint(plan.model),
        checkpoints={**drafts, **checkpoints},
        model=_facts(plan.model),
        gpus_per_node={pool.gpu: load_gpu(pool.gpu).gpus_per_node for pool in plan.pools},
    )


def _checkpoint(model: str) -> str:
    """Return what an engine loads for a model: its repository, else the folder it lies in."""
    if model in model_names():
        file = resources.files("tonnage.scenarios") / "models" / f"{model}.json"
        return str(json.loads(file.read_text(encoding="utf-8"))["tonnage"]["hf_repo"])
    path = Path(model)
    return str(path.parent if path.name == "config.json" else path)


def _draft_checkpoint(pool: PlannedPool) -> str | None:
    """Return the checkpoint of a draft model; MTP has none, that of EAGLE-3 nobody knows."""
    if pool.speculation is None or pool.speculation.draft in ("mtp", "eagle3", "free"):
        return None
    return _checkpoint(pool.speculation.draft)


def _facts(model: str) -> ModelFacts | None:
    try:
        return ModelFacts.of(load_model(model))
    except BadInputError:  # a plan may be exported where the model does not lie
        return None


class _Dumper(yaml.SafeDumper):
    """Writes strings that YAML 1.1 or 1.2 may take for something else in double quotes."""

    def ignore_aliases(self, data: object) -> bool:
        """Write what occurs twice twice: anchors are no help to a reader."""
        return True


def _text_node(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    plain = _PLAIN.fullmatch(text) is not None and text.lower() not in _WORDS
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=None if plain else '"')


_Dumper.add_representer(str, _text_node)


def _yaml_text(file: Rendered) -> str:
    head = "".join(f"# {line}".rstrip() + "\n" for line in file.head)
    documents = yaml.dump_all(
        file.manifests, Dumper=_Dumper, sort_keys=False, width=10**6, explicit_start=True
    )
    return head + documents
