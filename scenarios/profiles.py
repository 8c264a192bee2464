"""Which profile a scenario's `profile` means: auto, datasheet, a name, or a path."""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tonnage.scenarios.catalogue import gpu_names, load_gpu, unknown_name
from tonnage.sim.cost.profile import (
    HEADER_FILE,
    SUFFIX,
    Profile,
    ProfileHeader,
    load_header,
    load_profile,
)
from tonnage.sim.domain import BadInputError, GpuSpec

AUTO, DATASHEET = "auto", "datasheet"
_PRODUCTS = "gemm"
BACK_FILL_ENGINE = "trtllm"  # its kernels stand in for operators that an engine's tables lack

_SHIPPED = Path(__file__).parent / "profiles"
_PATH_LIKE = re.compile(rf"[/\\]|{re.escape(SUFFIX)}$")


@dataclass(frozen=True, slots=True)
class ProfileChoice:
    """The profile that a pool's predictions rest on; `why` is for the reader of the result.

    `path` None: the datasheet. `source`: measured, imported, scaled or datasheet. `scaled_from`:
    the GPU that was timed where it is another one, whose times go by the ratio of the rooflines.
    `back_fill`: profiles of the same GPU for operators that this one lacks, best first.
    """

    path: Path | None
    source: str
    why: str
    scaled_from: str | None = None
    back_fill: tuple[Path, ...] = ()

    def load(self) -> Profile | None:
        """Read the profile; None where there is none."""
        return None if self.path is None else load_profile(self.path)


def choose_profile(wanted: str, gpu: GpuSpec, engine: str, folder: Path) -> ProfileChoice:
    """Return the profile for a GPU and an engine; relative paths start from `folder`.

    `auto` takes, in this order: one measured on this machine; one imported on it for GPU and
    engine; the shipped one for GPU and engine; the GPU's under another engine; that of the nearest
    GPU of the same compute capability, scaled; the datasheet.
    """
    if wanted == DATASHEET:
        return ProfileChoice(None, DATASHEET, "the datasheet, as asked")
    if wanted != AUTO:
        return _named(wanted, gpu, engine, folder)
    own = _own(gpu, engine)
    if own is not None:
        return own
    shipped = _SHIPPED / f"{gpu.name}-{engine}{SUFFIX}"
    if shipped.is_dir():
        return _choice(shipped, gpu, engine, f"the shipped profile for {gpu.name} and {engine}")
    return _nearest(gpu, engine)


def profile_paths() -> dict[str, Path]:
    """Return the profiles that have a name: the user's own, which come first, and the shipped."""
    named = {path.name.removesuffix(SUFFIX): path for path in _folders_in(_SHIPPED)}
    own = {path.name.removesuffix(SUFFIX): path for path in _folders_in(state_folder())}
    return dict(sorted({**named, **own}.items()))


def find_profile(name_or_path: str, folder: Path = Path()) -> Path:
    """Return the folder of a profile given by name or path; BadInputError where there is none."""
    if is_path(name_or_path):
        for place in (folder / name_or_path, Path(name_or_path)):
            if (place / HEADER_FILE).is_file():
                return place
        raise BadInputError(f"profile: {name_or_path}: no profile there; check the path")
    named = profile_paths()
    if name_or_path not in named:
        raise BadInputError(unknown_name("profile", name_or_path, list(named)))
    return named[name_or_path]


def is_path(wanted: str) -> bool:
    """Tell whether the text is a path to a profile rather than a name."""
    return _PATH_LIKE.search(wanted) is not None


def is_shipped(path: Path) -> bool:
    """Tell whether a profile came with the package."""
    return path.parent == _SHIPPED


def state_folder() -> Path:
    """Return where this user's profiles lie: the XDG state folder, or what the system has for it.

    XDG Base Directory Specification 0.8: $XDG_STATE_HOME, else ~/.local/state.
    """
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Application Support"
    else:
        named = os.environ.get("XDG_STATE_HOME", "")
        base = Path(named) if Path(named).is_absolute() else Path.home() / ".local" / "state"
    return base / "tonnage" / "profiles"


def _folders_in(place: Path) -> Iterator[Path]:
    yield from sorted(path.parent for path in place.glob(f"*{SUFFIX}/{HEADER_FILE}"))


def _named(wanted: str, gpu: GpuSpec, engine: str, folder: Path) -> ProfileChoice:
    path = find_profile(wanted, folder)
    return _choice(path, gpu, engine, f"the profile {wanted}, as asked")


def _choice(path: Path, gpu: GpuSpec, engine: str, why: str) -> ProfileChoice:
    """Describe what a profile is good for on this GPU and engine."""
    header = _header(path)
    words = [why]
    if header.engine != engine:
        words.append(f"its kernels are those of {header.engine}")
    scaled_from = None if header.gpu == gpu.name else header.gpu
    if scaled_from is not None:
        words.append(f"timed on {header.gpu}, scaled by the datasheets to {gpu.name}")
    source = header.source if scaled_from is None else "scaled"
    return ProfileChoice(path, source, "; ".join(words), scaled_from, _back_fill(header, path))


def _back_fill(header: ProfileHeader, path: Path) -> tuple[Path, ...]:
    """Return the shipped profiles of the same GPU that may stand in, the path itself left out."""
    engines = (header.engine, BACK_FILL_ENGINE)
    places = (_SHIPPED / f"{header.gpu}-{engine}{SUFFIX}" for engine in dict.fromkeys(engines))
    return tuple(place for place in places if place != path and place.is_dir())


def _own(gpu: GpuSpec, engine: str) -> ProfileChoice | None:
    """Return the user's newest profile of the GPU: measured ones first, whatever their engine."""
    found = [(path, _header(path)) for path in _folders_in(state_folder())]
    usable = [
        (header.source == "measured", header.engine == engine, header.date, path)
        for path, header in found
        if header.gpu == gpu.name and (header.source == "measured" or header.engine == engine)
    ]
    if not usable:
        return None
    is_measured, _, date, path = max(usable)
    how = "measured on this machine" if is_measured else "imported on this machine"
    return _choice(path, gpu, engine, f"the profile {how} on {date} ({path})")


def _nearest(gpu: GpuSpec, engine: str) -> ProfileChoice:
    """Return the nearest profile of the GPU or of its compute capability, else the datasheet."""
    ranked = []
    for path in profile_paths().values():
        header = _header(path)
        if _PRODUCTS in header.missing:  # a part of a profile, to be asked for by name
            continue
        is_other = header.gpu != gpu.name
        other = load_gpu(header.gpu) if is_other and header.gpu in gpu_names() else gpu
        if (other is gpu and is_other) or other.compute_capability != gpu.compute_capability:
            continue
        ranked.append((is_other, header.engine != engine, _distance(gpu, other), path))
    missing = f"no profile for {gpu.name} and {engine}"
    if not ranked:
        return ProfileChoice(None, DATASHEET, f"the datasheet: {missing}, nor for its family")
    return _choice(min(ranked)[-1], gpu, engine, missing)


def _distance(one: GpuSpec, other: GpuSpec) -> float:
    """Return how far two GPUs are apart: the logarithms of their ratios of bandwidth and FLOP/s."""
    bandwidths = one.memory_bandwidth_bytes_per_s / other.memory_bandwidth_bytes_per_s
    rates = one.dense_flops_per_s["bf16"] / other.dense_flops_per_s["bf16"]
    return abs(math.log(bandwidths)) + abs(math.log(rates))


def _header(path: Path) -> ProfileHeader:
    return _read_header(path, (path / HEADER_FILE).stat().st_mtime_ns)


@cache
def _read_header(path: Path, mtime_ns: int) -> ProfileHeader:
    return load_header(path)
