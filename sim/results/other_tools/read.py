"""Which tool wrote a file of results, told from its fields, and its points."""

from __future__ import annotations

from pathlib import Path

from tonnage.sim.domain import BadInputError
from tonnage.sim.results.other_tools.aiperf import aiperf_point, is_aiperf
from tonnage.sim.results.other_tools.clients import (
    is_sglang,
    is_vllm,
    sglang_point,
    vllm_point,
)
from tonnage.sim.results.other_tools.guidellm import guidellm_points, is_guidellm
from tonnage.sim.results.other_tools.inference_perf import (
    inference_perf_point,
    is_inference_perf,
)
from tonnage.sim.results.other_tools.json_fields import Fields, read_objects
from tonnage.sim.results.other_tools.measured import MeasuredPoint

KNOWN = "sglang.bench_serving, vllm bench serve, guidellm, aiperf or inference-perf"
_STAGES = "stage_*_lifecycle_metrics.json"


def read_results(path: Path) -> list[MeasuredPoint]:
    """Return the points of a file, or of the stages in a folder of inference-perf.

    BadInputError names the file, and the field where one is wrong.
    """
    if path.is_dir():
        stages = sorted(path.glob(_STAGES))
        if not stages:
            raise BadInputError(f"{path}: is a folder without {_STAGES}; name a file of {KNOWN}")
        return [point for stage in stages for point in read_results(stage)]
    return [point for found in read_objects(path) for point in _points(found)]


def _points(found: Fields) -> list[MeasuredPoint]:
    if is_guidellm(found):
        return guidellm_points(found)
    if is_inference_perf(found):
        return [inference_perf_point(found)]
    if is_vllm(found):
        return [vllm_point(found)]
    if is_sglang(found):
        return [sglang_point(found)]
    if is_aiperf(found):
        return [aiperf_point(found)]
    raise BadInputError(f"{found.where}: is no result of {KNOWN}; its fields are of none of them")
