"""Links that somebody measured, by name: what a scenario's `link.preset` stands for."""

from __future__ import annotations

from dataclasses import dataclass

_TRANSFER_ENGINE = (
    "Mooncake Transfer Engine, 40 GB between two hosts: kvcache-ai.github.io/Mooncake, performance"
)
# Its sizes are in GiB (32,768 tokens of Qwen3-8B are 4.83e9 bytes, "4.50 GB"), so that the "71 %"
# of 200 GB/s are 76 %.
_VLLM_BENCHMARK = (
    "least squares of relative errors over the nine prompt lengths, 128 to 32,768 tokens, of "
    "kvcache-ai.github.io/Mooncake/performance/vllm-v1-support-benchmark: within 7 % of each time"
)


@dataclass(frozen=True, slots=True)
class LinkPreset:
    """A measured link: bandwidth of a whole host, shared by its GPUs, and what a transfer waits."""

    kind: str
    node_bandwidth_bytes_per_s: float
    setup_s: float
    source: str


LINK_PRESETS: dict[str, LinkPreset] = {
    "mooncake-rdma-4x200g": LinkPreset("rdma", 87e9, 0.0, _TRANSFER_ENGINE),
    "mooncake-rdma-8x400g": LinkPreset("rdma", 190e9, 0.0, _TRANSFER_ENGINE),
    "mooncake-tcp-4x200g": LinkPreset("tcp", 36e9, 0.0, _TRANSFER_ENGINE),
    "mooncake-tcp-8x400g": LinkPreset("tcp", 41e9, 0.0, _TRANSFER_ENGINE),
    "vllm-mooncake-8x200g": LinkPreset("rdma", 146e9, 0.4e-3, _VLLM_BENCHMARK),
}
