"""The widgets of a scenario: each shows one field of the text and edits it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import streamlit as st

from tonnage.dashboard import state
from tonnage.dashboard.frames import dig
from tonnage.scenarios.catalogue import gpu_names, model_names
from tonnage.scenarios.schema import ENGINE_VERSIONS, Scenario
from tonnage.scenarios.schema_pools import KvFormat, PoolSection, WeightFormat

_WAYS = (1, 2, 4, 8, 16, 32, 64)
_KINDS = ("closed", "resident", "poisson")
_SHAPES = ("together", "apart")


def deployment_fields(scenario: Scenario) -> None:
    """Draw model, GPU, engine and what is asked of them."""
    data = scenario.resolved()
    left, right = st.columns(2)
    with left:
        choice("Model", ("model",), data, model_names())
        choice("Engine", ("engine", "name"), data, tuple(ENGINE_VERSIONS), _engine_edits)
        text_field("TTFT p95 at most", ("slo", "ttft_p95"), data, "5s", _objective)
    with right:
        choice("GPU", ("gpu",), data, gpu_names())
        number("USD per GPU and hour", ("price", "gpu_hour_usd"), data, _price)
        text_field("TPOT p95 at most", ("slo", "tpot_p95"), data, "50ms", _objective)


def traffic_fields(scenario: Scenario) -> None:
    """Draw the load: its kind, its points, its lengths."""
    data = scenario.resolved()
    traffic = data["traffic"]
    left, right = st.columns(2)
    with left:
        kinds = _KINDS if traffic["kind"] in _KINDS else (*_KINDS, traffic["kind"])
        choice("Load", ("traffic", "kind"), data, kinds, _kind_edits)
        length("Prompt tokens", ("traffic", "input_tokens"), data)
    with right:
        if scenario.traffic.points_are == "rates":
            text_field("Requests per second", ("traffic", "rate_per_s"), data, "1, 2", _list)
        elif scenario.traffic.points_are == "users":
            name = ("traffic", "concurrency")
            text_field("Concurrent requests", name, data, "1, 8, 16", _list)
        else:
            number("Replay so many times as fast", ("traffic", "rate_scale"), data, None)
        length("Answer tokens", ("traffic", "output_tokens"), data)
    if traffic["kind"] not in ("trace", "sessions"):
        whole("Requests of a point", ("traffic", "requests"), data, step=64)


def pool_fields(scenario: Scenario) -> None:
    """Draw the pools: together or apart, and the layout and formats of each."""
    data = scenario.resolved()
    if scenario.traffic.kind != "resident":
        key = "field shape"
        st.session_state[key] = _SHAPES[0] if scenario.pools.serve else _SHAPES[1]
        st.segmented_control(
            "Prefill and decode", _SHAPES, key=key, required=True, on_change=_reshape, args=(key,)
        )
    for role in scenario.pools.named():
        st.markdown(f"**{role}**")
        path = ("pools", role)
        columns = st.columns([3, 3, 3, 4])
        with columns[0]:
            whole("Instances", (*path, "instances"), data)
            choice("Pipeline stages", (*path, "pp"), data, _WAYS)
        with columns[1]:
            choice("Tensor parallel", (*path, "tp"), data, _WAYS)
            choice("Expert parallel", (*path, "ep"), data, _WAYS)
        with columns[2]:
            choice("Attention DP", (*path, "attention_dp"), data, _WAYS)
            choice("Context parallel", (*path, "dcp"), data, _WAYS)
        with columns[3]:
            choice("Weights", (*path, "weights"), data, get_args(WeightFormat))
            choice("KV cache", (*path, "kv"), data, get_args(KvFormat))


# --- kinds of widget ----------------------------------------------------------------------------

Edits = Callable[[Sequence[str], Any], list[state.Edit]]


def _key(path: Sequence[str]) -> str:
    return f"field {'.'.join(path)}"


def _edited(path: Sequence[str], edits: Edits | None) -> None:
    value = st.session_state[_key(path)]
    state.edit(*(edits(path, value) if edits else [(path, value)]))


def choice(
    label: str,
    path: Sequence[str],
    data: dict[str, Any],
    options: Sequence[Any],
    edits: Edits | None = None,
) -> None:
    """Draw a field with known values; one that is not among them is shown too."""
    now = dig(data, ".".join(path))
    known = list(options) if now in options else [*options, now]
    st.session_state[_key(path)] = now
    st.selectbox(label, known, key=_key(path), on_change=_edited, args=(path, edits))


def whole(label: str, path: Sequence[str], data: dict[str, Any], step: int = 1) -> None:
    """Draw a whole number from 1."""
    st.session_state[_key(path)] = int(dig(data, ".".join(path)))
    st.number_input(
        label, min_value=1, step=step, key=_key(path), on_change=_edited, args=(path, None)
    )


def number(label: str, path: Sequence[str], data: dict[str, Any], edits: Edits | None) -> None:
    """Draw a number, empty where the scenario has none."""
    now = dig(data, ".".join(path))
    st.session_state[_key(path)] = None if now is None else float(now)
    st.number_input(
        label,
        min_value=0.0,
        value=None,
        step=0.1,
        key=_key(path),
        on_change=_edited,
        args=(path, edits),
    )


def text_field(
    label: str, path: Sequence[str], data: dict[str, Any], example: str, edits: Edits
) -> None:
    """Draw a field that is typed, such as a duration or a list."""
    now = dig(data, ".".join(path))
    if isinstance(now, list):
        now = ", ".join(f"{one:g}" for one in now)
    elif isinstance(now, float):
        now = f"{now * 1e3:g}ms" if now < 1 else f"{now:g}s"
    st.session_state[_key(path)] = now or ""
    st.text_input(label, key=_key(path), placeholder=example, on_change=_edited, args=(path, edits))


def length(label: str, path: Sequence[str], data: dict[str, Any]) -> None:
    """Draw a length that is one number; a distribution is told, and edited as YAML."""
    now = dig(data, ".".join(path))
    if data["traffic"]["kind"] in ("trace", "sessions"):
        st.text_input(label, "as the trace or the sessions say", disabled=True, key=_key(path))
    elif now["kind"] == "constant":
        st.session_state[_key(path)] = int(now["tokens"])
        st.number_input(
            label, min_value=1, step=256, key=_key(path), on_change=_edited, args=(path, None)
        )
    else:
        st.text_input(label, f"{now['kind']}: see the YAML", disabled=True, key=_key(path))


# --- what an edit means -------------------------------------------------------------------------


def _list(path: Sequence[str], typed: Any) -> list[state.Edit]:
    return [(path, [_number_or_text(part) for part in str(typed).split(",") if part.strip()])]


def _number_or_text(part: str) -> object:
    for kind in (int, float):
        try:
            return kind(part)
        except ValueError:
            continue
    return part.strip()


def _objective(path: Sequence[str], typed: Any) -> list[state.Edit]:
    """Set an objective; an empty one is removed."""
    scenario = state.scenario()
    objectives: dict[str, Any] = dict(scenario.slo) if scenario is not None else {}
    objectives.pop(path[-1], None)
    if str(typed).strip():
        objectives[path[-1]] = str(typed).strip()
    return [(path[:-1], objectives)]


def _price(path: Sequence[str], typed: Any) -> list[state.Edit]:
    return [(path, typed)]


def _engine_edits(path: Sequence[str], name: Any) -> list[state.Edit]:
    """Take another engine with the version whose rules are known, and its own fraction."""
    return [(path[:-1], {"name": name})]


def _kind_edits(path: Sequence[str], kind: Any) -> list[state.Edit]:
    """Take another kind of load, with a rate where it needs one."""
    scenario = state.scenario()
    traffic = scenario.traffic if scenario is not None else None
    edits: list[state.Edit] = []
    if kind == "poisson" and traffic is not None and not traffic.rate_per_s:
        edits.append((("traffic", "rate_per_s"), [1, 2, 4]))
    return [*edits, (path, kind)]


def _reshape(key: str) -> None:
    """Make one pool of two, or two of one, with the layout and formats that were there."""
    scenario = state.scenario()
    if scenario is None:
        return
    pools = scenario.pools
    source = pools.serve or pools.decode or PoolSection()
    told = source.model_dump(mode="json", exclude_unset=True) or {"instances": 1}
    if st.session_state[key] == _SHAPES[0]:
        state.edit((("pools",), {"serve": told}))
    else:
        prompts = {name: value for name, value in told.items() if name != "speculation"}
        state.edit((("pools",), {"prefill": prompts, "decode": told}))
