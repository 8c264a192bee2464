"""A logged run of vLLM: a folder with `meta.json`, `requests.jsonl` and perhaps `timeseries.csv`.

The shape is that of LLMServingSim's benchmark (`bench/`): settings as the engine resolved them, and
per request its lengths, when the client sent it, and the engine's own clock at its milestones.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tonnage.sim.domain import BadInputError
from tonnage.sim.results.other_tools.json_fields import Fields, read_objects

META, REQUESTS = "meta.json", "requests.jsonl"


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One request; times in seconds since the first one arrived, on the engine's clock."""

    id: str
    input_tokens: int
    output_tokens: int
    arrival_s: float
    first_token_s: float
    last_token_s: float

    @property
    def ttft_s(self) -> float:
        """From its arrival to its first token."""
        return self.first_token_s - self.arrival_s

    @property
    def e2e_s(self) -> float:
        """From its arrival to its last token."""
        return self.last_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float | None:
        """Mean gap between its tokens; None for a single one."""
        gaps = self.output_tokens - 1
        return (self.last_token_s - self.first_token_s) / gaps if gaps > 0 else None


@dataclass(frozen=True, slots=True)
class VllmSettings:
    """What the engine ran with; None is not stated. `kv_blocks`: without the null block."""

    model: str
    version: str
    gpu: str | None
    tp: int
    pp: int
    dp: int
    expert_parallel: bool
    chunk_tokens: int | None
    running_requests: int | None
    mem_fraction: float | None
    kv_dtype: str
    quantization: str | None
    kv_blocks: int | None
    block_tokens: int | None
    prefix_caching: bool | None


@dataclass(frozen=True, slots=True)
class VllmLog:
    """A run: its folder's name, its settings and its requests in order of arrival."""

    name: str
    settings: VllmSettings
    requests: tuple[LoggedRequest, ...]


def is_vllm_log(folder: Path) -> bool:
    """Tell whether a folder holds a logged run."""
    return (folder / META).is_file() and (folder / REQUESTS).is_file()


def read_vllm_log(folder: Path) -> VllmLog:
    """Return a logged run; BadInputError names the file, and the field or the line."""
    (meta,) = read_objects(folder / META)
    settings = _settings(meta)
    return VllmLog(folder.resolve().name, settings, _requests(read_objects(folder / REQUESTS)))


def _settings(meta: Fields) -> VllmSettings:
    asked = meta.section("engine_kwargs")
    cache, hardware = meta.optional_section("kv_cache"), meta.optional_section("hardware")
    model, version = meta.text("model"), meta.text("vllm_version")
    if model is None:
        raise meta.refuse("model", "is missing")
    if version is None:
        raise meta.refuse("vllm_version", "is missing")
    blocks = cache.whole("num_gpu_blocks")
    caching = cache.values.get("enable_prefix_caching")
    return VllmSettings(
        model=model,
        version=version,
        gpu=hardware.text("device_name"),
        tp=asked.whole("tensor_parallel_size") or 1,
        pp=asked.whole("pipeline_parallel_size") or 1,
        dp=asked.whole("data_parallel_size") or 1,
        expert_parallel=asked.values.get("enable_expert_parallel") is True,
        chunk_tokens=asked.whole("max_num_batched_tokens"),
        running_requests=asked.whole("max_num_seqs"),
        mem_fraction=cache.optional("gpu_memory_utilization")
        or asked.optional("gpu_memory_utilization"),
        kv_dtype=asked.text("kv_cache_dtype") or "auto",
        quantization=asked.text("quantization"),
        kv_blocks=None if blocks is None else blocks - 1,
        block_tokens=cache.whole("block_size"),
        prefix_caching=caching if isinstance(caching, bool) else None,
    )


def _requests(lines: list[Fields]) -> tuple[LoggedRequest, ...]:
    """Put arrivals (the client's clock) and token times (the engine's) on one clock.

    The clocks' difference is the least time by which a request was queued after its arrival.
    """
    clocks = [(line.number("arrival_time"), line.number("queued_ts")) for line in lines]
    offset_s = min(queued_s - arrival_s for arrival_s, queued_s in clocks)
    zero_s = min(arrival_s for arrival_s, _ in clocks) + offset_s
    found = [
        LoggedRequest(
            id=line.text("request_id") or str(index),
            input_tokens=_tokens(line, "input_toks"),
            output_tokens=_tokens(line, "output_toks"),
            arrival_s=arrival_s + offset_s - zero_s,
            first_token_s=line.number("first_token_ts") - zero_s,
            last_token_s=line.number("last_token_ts") - zero_s,
        )
        for index, (line, (arrival_s, _)) in enumerate(zip(lines, clocks, strict=True))
    ]
    return tuple(sorted(found, key=lambda request: request.arrival_s))


def _tokens(line: Fields, name: str) -> int:
    number = line.number(name)
    if number < 1 or number != int(number):
        raise BadInputError(f"{line.where}: {name}: {number:g} is not a whole number above 0")
    return int(number)
