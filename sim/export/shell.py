"""One shell script per fleet: a role as its first word starts an instance, or the router."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from tonnage.sim.export.checks import refuse, remarks
from tonnage.sim.export.commands import (
    Routing,
    checked,
    engine_command,
    needs_router,
    router_command,
    routing,
)
from tonnage.sim.export.context import ExportContext
from tonnage.sim.export.flags import FlagTable, Option, flag_table
from tonnage.sim.export.summary import summary_lines
from tonnage.sim.planning.fleet_plan import FleetPlan, PlannedPool

_INDENT = "  "
_PRELUDE = """\
set -euo pipefail

fail() {
  printf 'error: %s\\n' "$*" >&2
  exit 2
}
"""


def shell_script(plan: FleetPlan, context: ExportContext) -> tuple[str, list[str]]:
    """Return the script and its remarks; BadInputError for what the engine cannot do."""
    table = flag_table(plan.engine, plan.engine_version)
    refuse(plan, table, context)
    route = routing(plan, table.data["router"]) if needs_router(plan) else Routing(())
    told = [*remarks(plan, table, context), *route.remarks]
    roles = [pool.role for pool in plan.pools] + (["router"] if needs_router(plan) else [])
    parts = ["#!/usr/bin/env bash"]
    parts += [f"# {line}".rstrip() for line in summary_lines(plan, told)]
    parts += ["#", *_usage(plan, context, roles), _PRELUDE]
    for pool in plan.pools:
        parts.append("\n".join(_start_pool(plan, pool, table, context)) + "\n")
    if needs_router(plan):
        parts.append("\n".join(_start_router(plan, table, route, context)) + "\n")
    parts.append("\n".join(_dispatch(roles)))
    return "\n".join(parts) + "\n", told


def _usage(plan: FleetPlan, context: ExportContext, roles: list[str]) -> Iterator[str]:
    yield f"# Usage: bash FILE {'|'.join(roles)} [further arguments of the engine]"
    for pool in plan.pools:
        nodes, shared = context.nodes(pool), context.per_node(pool)
        times = "once" if pool.instances == 1 else f"{pool.instances} times"
        runs = f"#   {pool.role}: run it {times}"
        if nodes > 1:
            yield f"{runs}, on {nodes} nodes each, with NODE_RANK 0 to {nodes - 1} and LEADER set"
        elif shared > 1 and pool.instances > 1:
            yield f"{runs}; up to {shared} share a node, with SLOT 0 to {shared - 1}"
        else:
            yield f"{runs}, on a node each" if pool.instances > 1 else runs


def _start_pool(
    plan: FleetPlan, pool: PlannedPool, table: FlagTable, context: ExportContext
) -> Iterator[str]:
    command = checked(engine_command(plan, pool, table, context), table.arguments)
    yield f"start_{pool.role}() {{"
    yield from _variables(plan, command.options)
    yield from _place(pool, table, context)
    yield f"{_INDENT}exec {' '.join(command.program)} \\"
    for option in [*command.options, *_local_options(pool, table, context)]:
        yield f"{_INDENT * 2}{_words(option)} \\"
    if context.nodes(pool) > 1 and table.data["nodes"]["follower"]:
        yield f'{_INDENT * 2}${{follower[@]+"${{follower[@]}}"}} \\'
    yield f'{_INDENT * 2}"$@"'
    yield "}"


def _variables(plan: FleetPlan, options: tuple[Option, ...]) -> Iterator[str]:
    """Yield the checkpoints: the environment's, else the plan's, else a refusal."""
    for option in options:
        if option.variable is None:
            continue
        name = option.variable
        if option.value is None:
            wanted = shlex.quote(f"set {name} to a checkpoint, a path or a repository")
            yield f'{_INDENT}[[ -n "${{{name}:-}}" ]] || fail {wanted}'
        else:
            yield f"{_INDENT}local checkpoint={shlex.quote(option.value)}"
            yield f'{_INDENT}local {name}="${{{name}:-$checkpoint}}"'


def _place(pool: PlannedPool, table: FlagTable, context: ExportContext) -> Iterator[str]:
    """Yield where an instance runs: a node's rank, or its share of a node's GPUs."""
    nodes, shared, gpus = context.nodes(pool), context.per_node(pool), pool.layout.gpus
    if shared == 1:
        yield f"{_INDENT}local slot=0"
    else:
        yield f'{_INDENT}local slot="${{SLOT:-0}}"'
        yield f"{_INDENT}(( slot >= 0 && slot < {shared} )) || fail 'SLOT: 0 to {shared - 1}'"
        first, last = f"$((slot * {gpus}))", f"$((slot * {gpus} + {gpus - 1}))"
        yield f'{_INDENT}CUDA_VISIBLE_DEVICES="$(seq -s, "{first}" "{last}")"'
        yield f"{_INDENT}export CUDA_VISIBLE_DEVICES"
    if nodes > 1:
        yield f'{_INDENT}local rank="${{NODE_RANK:-}}" leader="${{LEADER:-}}"'
        yield f"{_INDENT}[[ -n $rank ]] || fail 'NODE_RANK: 0 to {nodes - 1}'"
        yield f"{_INDENT}(( rank >= 0 && rank < {nodes} )) || fail 'NODE_RANK: 0 to {nodes - 1}'"
        yield f"{_INDENT}[[ -n $leader ]] || fail 'LEADER: the address of node 0'"
        if follower := table.data["nodes"]["follower"]:
            yield f"{_INDENT}local -a follower=()"
            yield f"{_INDENT}if (( rank > 0 )); then follower=({follower}); fi"
    transfer = table.data.get("transfer")
    if transfer is not None and pool.role != "serve":
        host, port = transfer["host_variable"], transfer["port_variable"]
        step = pool.layout.attention_dp
        own = '"${HOST_ADDRESS:-$(hostname -i)}"'
        yield f"{_INDENT}export {host}={own}  # as the other pool reaches this node"
        yield f'{_INDENT}export {port}="$(({transfer["port"]} + slot * {step}))"'


def _local_options(pool: PlannedPool, table: FlagTable, context: ExportContext) -> Iterator[Option]:
    """Yield the options that differ from node to node, as words of the shell."""
    yield Option("--host", None, None, ("0.0.0.0",))
    yield Option("--port", None, None, (f'"$(({table.data["port"]} + slot))"',))
    bootstrap = table.data.get("bootstrap")
    if bootstrap is not None and pool.role == "prefill":
        yield Option(bootstrap["flag"], None, None, (f'"$(({bootstrap["port"]} + slot))"',))
    nodes, flags = context.nodes(pool), table.data["nodes"]
    if nodes > 1:
        address = '"$leader"' if flags["port"] is None else f'"$leader:{flags["port"]}"'
        yield Option(flags["count"], str(nodes))
        yield Option(flags["rank"], None, None, ('"$rank"',))
        yield Option(flags["address"], None, None, (address,))


def _start_router(
    plan: FleetPlan, table: FlagTable, route: Routing, context: ExportContext
) -> Iterator[str]:
    data = table.data["router"]
    yield f"# {data['package']} {data['version']}: pip install {data['package']}=={data['version']}"
    yield "start_router() {"
    yield f"{_INDENT}local url"
    yield f"{_INDENT}local -a urls arguments=()"
    for pool in plan.pools:
        yield from _worker_urls(pool, table, context)
    disaggregated = [Option(data["disaggregated"])] if len(plan.pools) > 1 else []
    command = router_command(table, [*disaggregated, *route.options])
    yield f"{_INDENT}exec {' '.join(command.program)} \\"
    for option in command.options:
        yield f"{_INDENT * 2}{_words(option)} \\"
    yield f'{_INDENT * 2}--host 0.0.0.0 --port "${{PORT:-{data["port"]}}}" "${{arguments[@]}}" "$@"'
    yield "}"


def _worker_urls(pool: PlannedPool, table: FlagTable, context: ExportContext) -> Iterator[str]:
    variable, port = f"{pool.role.upper()}_URLS", table.data["port"]
    example = f"http://10.0.0.1:{port}"
    urls = "URL" if pool.instances == 1 else f"{pool.instances} URLs"
    wanted = f"{variable}: the {urls} of {pool.role}, such as {example}"
    yield f'{_INDENT}read -ra urls <<< "${{{variable}:-}}"'
    yield f"{_INDENT}(( ${{#urls[@]}} == {pool.instances} )) || fail '{wanted}'"
    if pool.role == "serve":
        yield f'{_INDENT}arguments+=(--worker-urls "${{urls[@]}}")'
        return
    words = f'--{pool.role} "$url"'
    if pool.role == "prefill" and table.data["router"]["takes_bootstrap_port"]:
        bootstrap = table.data["bootstrap"]["port"]
        shared = context.per_node(pool) > 1 and pool.instances > 1
        words += f' "$(({bootstrap} + ${{url##*:}} - {port}))"' if shared else f" {bootstrap}"
    yield f'{_INDENT}for url in "${{urls[@]}}"; do arguments+=({words}); done'


def _dispatch(roles: list[str]) -> Iterator[str]:
    yield 'role="${1:-}"'
    yield "shift || true"
    yield 'case "$role" in'
    for role in roles:
        yield f'{_INDENT}{role}) start_{role} "$@" ;;'
    yield f"{_INDENT}*) fail 'the first argument is one of: {' '.join(roles)}' ;;"
    yield "esac"


def _words(option: Option) -> str:
    """Return an option as the shell reads it; `values` are the shell's own words."""
    words = [option.flag] if option.flag else []
    if option.variable is not None:
        words.append(f'"${option.variable}"')
    elif option.value is not None:
        words.append(shlex.quote(option.value))
    return " ".join([*words, *option.values])
