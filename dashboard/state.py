"""The scenario of a browser's session: its text, the address that holds it, and the way back.

The text is the one truth. Widgets show it and edit it; pages and addresses are made from it.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import streamlit as st

from tonnage.dashboard.links import LONGEST_LINK, decoded, encoded
from tonnage.dashboard.reading import read_scenario
from tonnage.dashboard.runs import Job, Runs
from tonnage.dashboard.work import RunView, simulated
from tonnage.dashboard.yaml_edit import with_value
from tonnage.scenarios.catalogue import scenario_names, scenario_path
from tonnage.scenarios.schema import Scenario
from tonnage.sim.domain import TonnageError

DEFAULT = "kimi-k2.6-h200"
_UNDO_STEPS = 30
Edit = tuple[Sequence[str], object]


@st.cache_resource(show_spinner=False)
def runs() -> Runs:
    """Return the queue that all sessions share."""
    return Runs()


def folder() -> Path:
    """Return the folder whose files scenarios may name: where the server was started."""
    return Path.cwd()


def session() -> str:
    """Return a name for this session in the queue."""
    state = st.session_state
    if "session" not in state:
        state["session"] = secrets.token_hex(8)
    name: str = state["session"]
    return name


# --- the text -----------------------------------------------------------------------------------


@st.cache_data(show_spinner=False)
def shipped_text(name: str) -> str:
    """Return the file of a shipped scenario."""
    return scenario_path(name).read_text(encoding="utf-8")


def begin() -> None:
    """Take the scenario from the address when a session begins; keep the address up to date."""
    state = st.session_state
    if "text" not in state:
        state["text"] = _text_of_address()
        state["undo"] = []
    _write_address()


def _text_of_address() -> str:
    asked, packed = st.query_params.get("scenario"), st.query_params.get("s")
    try:
        if packed is not None:
            return decoded(packed)
        if asked is not None and asked not in scenario_names():
            known = ", ".join(scenario_names())
            st.session_state["notice"] = f"link: no scenario is named {asked!r}; known: {known}"
    except TonnageError as error:
        st.session_state["notice"] = f"{error}. This is the scenario {DEFAULT} instead."
    return shipped_text(asked if asked in scenario_names() else DEFAULT)


def _write_address() -> None:
    name, text = shipped_name(), st.session_state["text"]
    wanted = {"scenario": name} if name is not None else {"s": encoded(text)}
    if len(wanted.get("s", "")) > LONGEST_LINK:
        wanted = {}
    if st.query_params.to_dict() != wanted:
        st.query_params.from_dict(wanted)


def text() -> str:
    """Return the text of the scenario."""
    found: str = st.session_state["text"]
    return found


def shipped_name() -> str | None:
    """Return the name of the shipped scenario that the text still is."""
    return next((name for name in scenario_names() if shipped_text(name) == text()), None)


def set_text(new: str) -> None:
    """Take another text; what was there can be brought back."""
    state = st.session_state
    state.pop("refused", None)
    if new != state["text"]:
        state["undo"] = [*state["undo"], state["text"]][-_UNDO_STEPS:]
        state["text"] = new


def undo() -> None:
    """Bring back the text before the last change."""
    state = st.session_state
    if state["undo"]:
        *state["undo"], state["text"] = state["undo"]
        state.pop("refused", None)


def edit(*edits: Edit) -> None:
    """Change fields of the text; a change that makes no scenario is told and not made."""
    try:
        changed = text()
        for path, value in edits:
            changed = with_value(changed, path, value)
        read_scenario(changed, folder())
    except TonnageError as error:
        st.session_state["refused"] = f"Not changed. {error}"
        return
    set_text(changed)


def scenario() -> Scenario | None:
    """Return the scenario that the text says, None where it says none; `problem()` tells why."""
    found = _read(text(), str(folder()))
    return None if isinstance(found, str) else found


def problem() -> str | None:
    """Return what is wrong with the text."""
    found = _read(text(), str(folder()))
    return found if isinstance(found, str) else None


@st.cache_resource(show_spinner=False, max_entries=64)
def _read(text: str, root: str) -> Scenario | str:
    try:
        return read_scenario(text, Path(root))
    except TonnageError as error:
        return str(error)


# --- its run ------------------------------------------------------------------------------------


def key_of(kind: str, asked: Scenario, *more: Any) -> str:
    """Return what a result is kept under: equal scenarios share it, however they are written."""
    data = json.dumps([kind, asked.resolved(), *more], sort_keys=True, default=str)
    return f"{kind} {hashlib.sha256(data.encode()).hexdigest()}"


def run_key(asked: Scenario) -> str:
    """Return the key of a scenario's simulation."""
    return key_of("simulate", asked)


def ask_run(asked: Scenario, its_text: str) -> Job:
    """Have a scenario simulated, and remember it for Compare."""
    key = run_key(asked)
    job = runs().submit(session(), key, simulated, its_text, folder())
    known: list[str] = st.session_state.setdefault("asked", [])
    if key not in known:
        known.append(key)
    return job


def finished_run(asked: Scenario) -> RunView | None:
    """Return the simulation of a scenario where there is one, whoever asked for it."""
    job = runs().get(run_key(asked))
    if job is None or job.state != "done":
        return None
    known: list[str] = st.session_state.setdefault("asked", [])
    if job.key not in known:
        known.append(job.key)
    view: RunView = job.result
    return view


def session_runs() -> dict[str, RunView]:
    """Return the finished runs of this session by a name that tells them apart."""
    views: dict[str, RunView] = {}
    for key in st.session_state.get("asked", []):
        job = runs().get(key)
        if job is not None and job.state == "done":
            name = job.result.name
            count = sum(one.split(" #")[0] == name for one in views)
            views[f"{name} #{count + 1}" if count else name] = job.result
    return views
