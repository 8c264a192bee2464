"""What a device is called in the catalogue of GPUs."""

from __future__ import annotations

import re

from tonnage.scenarios.catalogue import gpu_names, unknown_name
from tonnage.sim.domain import BadInputError

DEVICES = ("cpu", "cuda")
_DEVICE = re.compile(r"cpu|cuda(:\d+)?")
# What a name that the driver gives holds -> the catalogue's name; the first that fits.
_NAMES = (
    ("GB300", "gb300"),
    ("GB200", "gb200"),
    ("B300", "b300-sxm"),
    ("B200", "b200-sxm"),
    ("H200", "h200-sxm"),
    ("H100", "h100-sxm"),
    ("H20", "h20"),
    ("A100", "a100-80g"),
    ("L40S", "l40s"),
    ("RTX 4090", "rtx-4090"),
    ("RTX 5090", "rtx-5090"),
    ("RTX PRO 6000", "rtx-pro-6000"),
)


def device_kind(device: str) -> str:
    """Return `cpu` or `cuda`; raises BadInputError for anything else."""
    if _DEVICE.fullmatch(device) is None:
        raise BadInputError(f"device: {device!r}: use cpu, cuda, or cuda:1 for the second GPU")
    return device.partition(":")[0]


def catalogue_name(device: str, device_name: str, given: str | None = None) -> str:
    """Return the GPU that a profile is of: the one given, `cpu`, or what the driver's name says."""
    if given is not None:
        if given not in gpu_names():
            raise BadInputError(unknown_name("gpu", given, gpu_names()))
        return given
    if device_kind(device) == "cpu":
        return "cpu"
    for part, name in _NAMES:
        if part in device_name:
            return name
    known = ", ".join(gpu_names())
    raise BadInputError(f"gpu: {device_name} is not in the catalogue; say --gpu NAME, of {known}")
