"""The `export` verb: a plan as commands, manifests, a table or a report."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tonnage.sim.domain import BadInputError


class _To(StrEnum):
    SGLANG = "sglang"
    VLLM = "vllm"
    DYNAMO = "dynamo"
    KUBERNETES = "kubernetes"
    CSV = "csv"
    MARKDOWN = "markdown"
    HTML = "html"


class _Which(StrEnum):
    LAUNCHABLE = "launchable"
    BEST = "best"


def export(
    plan: Annotated[Path, typer.Argument(metavar="PLAN|-", help="JSON that tonnage plan wrote.")],
    to: Annotated[_To, typer.Option("--to", help="The format.")],
    which: Annotated[
        _Which, typer.Option("--which", help="Of the two plans of a report.")
    ] = _Which.LAUNCHABLE,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE|DIR", help="Write it there instead of printing it."),
    ] = None,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            "--checkpoint",
            metavar="POOL=PATH",
            help="What a pool loads (decode=..., decode.draft=...), as often as needed.",
        ),
    ] = None,
) -> None:
    """Write a plan as what starts it, or as what tells of it.

    sglang and vllm: a shell script that starts every role and the router. dynamo, kubernetes:
    manifests. csv, markdown, html: what was planned and found. What an engine cannot do is refused,
    or stands in the file as a remark and on standard error.

    \b
    Examples:
      tonnage export plan.json --to sglang --out kimi.sh
      tonnage export plan.json --to kubernetes > fleet.yaml
      tonnage plan kimi-agents --json - | tonnage export - --to sglang --out kimi.sh
      tonnage export plan.json --to html --which best --out reports/
      tonnage export plan.json --to sglang --checkpoint decode=/models/glm-5.2-int4
    """
    from tonnage.output import write_text
    from tonnage.plan_export import export_file, read_plan

    target = None if out is None else _target(out)
    file = read_plan(plan, which.value)
    found = export_file(file, to.value, _checkpoints(checkpoint or []))
    for remark in found.remarks:
        print(f"note: {remark}", file=sys.stderr)
    if target is None:
        print(found.text, end="")
        return
    if target.is_dir():
        target /= found.file_name
    write_text(target, found.text)


def _target(out: Path) -> Path:
    """Return the file or the folder to write to, making a folder that is named as one."""
    from tonnage.output import check_destinations, make_folder

    if out.is_dir():
        check_destinations(None, out)
    elif not out.suffix:
        check_destinations(None, out)
        make_folder(out)
    elif not out.parent.is_dir():
        raise BadInputError(f"--out {out}: there is no folder {out.parent}")
    return out


def _checkpoints(given: list[str]) -> dict[str, str]:
    pairs = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals:
            raise BadInputError(
                f"--checkpoint {text}: write it as POOL=PATH, like decode=/models/x"
            )
        pairs[name] = path
    return pairs
