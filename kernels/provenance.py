"""Say on what a timing was measured: device, clocks, driver, versions, date, commit."""

from __future__ import annotations

import platform
import shutil
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

_FIELDS = "driver_version,clocks.sm,clocks.mem,power.draw,clocks_event_reasons.active"


@dataclass(frozen=True, slots=True)
class Provenance:
    """What stays the same while a program measures. None is unknown or does not apply."""

    device: str  # the GPU's or the CPU's name
    driver: str | None
    torch: str
    triton: str | None
    cuda: str | None
    threads: int | None  # of a CPU
    date: str  # ISO 8601, UTC, when the program began to measure
    commit: str | None


@dataclass(frozen=True, slots=True)
class GpuState:
    """What a GPU did while it was busy. None is unknown."""

    driver: str | None = None
    sm_clock_hz: float | None = None
    memory_clock_hz: float | None = None
    power_w: float | None = None
    throttle_reasons: str | None = None  # nvidia-smi's bit mask
    age_s: float | None = None  # when a row took it: clocks are read every few seconds


def provenance(device: str, threads: int | None = None) -> Provenance:
    """Return what is measured on, now."""
    on_gpu = torch.device(device).type == "cuda"
    return Provenance(
        device=torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        driver=gpu_state(device).driver if on_gpu else None,
        torch=torch.__version__,
        triton=_version("triton"),
        cuda=torch.version.cuda if on_gpu else None,
        threads=None if on_gpu else threads,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        commit=commit(),
    )


def cpu_name() -> str:
    """Return the processor's model, or its architecture where that is not told."""
    path = Path("/proc/cpuinfo")
    if path.is_file():
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the commit of the checkout this runs from, with a + if files differ from it."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    head = _output(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"])
    changed = _output(["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"])
    return head and head + ("+" if changed else "")


def gpu_state(device: str) -> GpuState:
    """Ask nvidia-smi, which takes tens of milliseconds; all unknown where it cannot tell."""
    if shutil.which("nvidia-smi") is None:
        return GpuState()
    uuid = torch.cuda.get_device_properties(device).uuid
    command = ["nvidia-smi", "-i", f"GPU-{uuid}", f"--query-gpu={_FIELDS}"]
    answer = _output([*command, "--format=csv,noheader,nounits"])
    return parsed_state(answer) if answer else GpuState()


def parsed_state(line: str) -> GpuState:
    """Read one line of nvidia-smi's answer: MHz and watts, `[N/A]` for what it does not know."""
    driver, sm, memory, power, reasons = (
        None if text.startswith("[") else text for text in map(str.strip, line.split(","))
    )
    return GpuState(driver, _number(sm, 1e6), _number(memory, 1e6), _number(power, 1.0), reasons)


def _number(text: str | None, unit: float) -> float | None:
    return None if text is None else float(text) * unit


def _output(command: list[str]) -> str | None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
