"""The `cache` section: prefix caches on the GPUs, and the tiers of memory beyond them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, model_validator

from tonnage.scenarios.schema_base import (
    Bandwidth,
    Bytes,
    Seconds,
    Section,
    WholeOrZero,
    field_error,
    shown,
)
from tonnage.scenarios.schema_network import AutoBandwidth
from tonnage.sim.serving.tiers import PrefetchPolicy, PrefetchSpec, WritePolicy


def _yes_or_no(value: object) -> object:
    if not isinstance(value, bool):
        raise field_error("", f"{shown(value)} is not true or false")
    return value


class CacheSection(Section):
    """Prefix cache of the instances that compute prompts, and its tiers.

    `gpu`: whether free KV pages keep prefixes for later requests. `host` and `nvme`: bytes of one
    instance; `store`: bytes of the cluster. `policy`: what is evicted from the GPU. `write`: when a
    block goes to the host, and on from there. `prefetch`: how long a request waits for what is
    read from below the host; `prefetch_threshold`: tokens, fewer are computed. `load`: always, as
    the engines do, or only where it is faster than computing. `nvme_bandwidth`: of one instance;
    `store_bandwidth`: of one GPU, auto is that of its network.
    """

    gpu: Annotated[bool, BeforeValidator(_yes_or_no)] = False
    policy: Literal["lru", "lfu"] = "lru"
    host: Bytes = 0.0
    nvme: Bytes = 0.0
    store: Bytes = 0.0
    write: WritePolicy = "through"
    load: Literal["always", "faster"] = "always"
    prefetch: PrefetchPolicy = "timeout"
    prefetch_timeout: Seconds = 1.0
    prefetch_timeout_per_ki_token: Seconds = 0.25
    prefetch_threshold: WholeOrZero = 256
    host_latency: Seconds = 0.0
    nvme_bandwidth: Bandwidth = 7e9  # assumed: one drive with four lanes of PCIe 4.0
    nvme_latency: Seconds = 0.0
    store_bandwidth: AutoBandwidth = None
    store_latency: Seconds = 0.0

    @model_validator(mode="after")
    def _each_tier_needs_the_one_above(self) -> CacheSection:
        for name in ("nvme", "store"):
            if getattr(self, name) and not self.host:
                problem = "is read through host memory, of which there is none"
                raise field_error(name, f"{problem}; set host, such as 200GB")
        if self.host and not self.gpu:
            raise field_error("host", "there is no prefix cache on the GPU; set gpu to true")
        return self

    def prefetch_spec(self) -> PrefetchSpec:
        """Return how long requests wait for a load."""
        return PrefetchSpec(
            self.prefetch,
            self.prefetch_timeout,
            self.prefetch_timeout_per_ki_token,
            self.prefetch_threshold,
        )
