"""Where KV lies beyond the GPU: host memory, NVMe, a store of the whole cluster. No clock.

Rules of SGLang 0.5.23 (`mem_cache/unified_radix_cache.py`, `storage_prefetch.py`): a block is
written to the host when it is first used, when it is used again, or when it is evicted, and goes
on from there to the tiers below; those are read into the host while a request waits, the host into
the GPU while its prompt is computed. What it does without asking, loading where computing again
were faster, is `loads="always"`.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from math import inf, sqrt
from typing import Literal

from tonnage.sim.serving.blocks import Block

TIERS = ("host", "nvme", "store")
WritePolicy = Literal["through", "selective", "back"]
PrefetchPolicy = Literal["best_effort", "wait_complete", "timeout"]
Ids = tuple[int, ...]
_HITS_TO_WRITE = {"through": 1, "selective": 2}


# --- loading or computing again -----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """Seconds to load a part of a prefix and to compute it again."""

    load_s: float
    recompute_s: float

    @property
    def loads(self) -> bool:
        """Whether loading is the faster of the two."""
        return self.load_s < self.recompute_s


def load_or_recompute(
    tokens: int,
    kv_bytes: float,
    bandwidth_bytes_per_s: float,
    latency_s: float,
    recompute_s: float,
) -> LoadChoice:
    """Compare loading `tokens` tokens, `kv_bytes` of KV, with computing them in `recompute_s`."""
    if not tokens:
        return LoadChoice(0.0, 0.0)
    return LoadChoice(latency_s + kv_bytes / bandwidth_bytes_per_s, recompute_s)


def crossover_tokens(
    kv_bytes_per_token: float,
    bandwidth_bytes_per_s: float,
    latency_s: float,
    recompute_s_per_token: float,
    recompute_s_per_token_squared: float = 0.0,
) -> float | None:
    """Return the length from which on loading is faster than computing; None if it never is.

    Loading n tokens takes ``l + n b / w``, computing them ``n c + n^2 d``: equal at the positive
    root of ``d n^2 + (c - b / w) n - l = 0``.
    """
    gain_s = recompute_s_per_token - kv_bytes_per_token / bandwidth_bytes_per_s
    if recompute_s_per_token_squared:
        root = sqrt(gain_s**2 + 4 * recompute_s_per_token_squared * latency_s)
        return (root - gain_s) / (2 * recompute_s_per_token_squared)
    return latency_s / gain_s if gain_s > 0 else None


# --- what there is ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TierSpec:
    """One tier: tokens of KV that it holds, and the time of a load without contention.

    Capacity and speed are those of one instance; of the store, those of the cluster and of the
    way to one instance. `kv_bytes_per_token`: what a token takes there.
    """

    capacity_tokens: int
    s_per_token: float = 0.0
    latency_s: float = 0.0
    kv_bytes_per_token: float = 0.0

    def load_s(self, tokens: int) -> float:
        """Return the seconds of one load."""
        return self.latency_s + tokens * self.s_per_token if tokens else 0.0


@dataclass(frozen=True, slots=True)
class PrefetchSpec:
    """How long a request waits for what is read from below the host.

    Defaults: SGLang 0.5.23 (`unified_radix_cache.py`, `hybrid_cache_controller.py`).
    """

    policy: PrefetchPolicy = "timeout"
    timeout_s: float = 1.0
    timeout_per_ki_token_s: float = 0.25
    threshold_tokens: int = 256  # fewer are computed

    def most_wait_s(self, tokens: int) -> float:
        """Return the longest that a request waits for a load of so many tokens."""
        if self.policy == "timeout":
            return self.timeout_s + self.timeout_per_ki_token_s * tokens / 1024
        return inf if self.policy == "wait_complete" else 0.0


@dataclass(frozen=True, slots=True)
class HierarchySpec:
    """The tiers below the GPU of one instance, when they are written, when they are read.

    `loads`: always, as the engines do, or only where that is faster than computing the tokens
    again, n of them in ``n c + n^2 d`` with c `recompute_s_per_token` and d its square's.
    """

    host: TierSpec
    nvme: TierSpec | None = None
    store: TierSpec | None = None
    write: WritePolicy = "through"
    prefetch: PrefetchSpec = PrefetchSpec()
    loads: Literal["always", "faster"] = "always"
    recompute_s_per_token: float = 0.0
    recompute_s_per_token_squared: float = 0.0

    def recompute_s(self, tokens: int) -> float:
        """Return what computing the first tokens of a prompt again takes."""
        return tokens * (self.recompute_s_per_token + tokens * self.recompute_s_per_token_squared)

    def tier(self, name: str) -> TierSpec:
        """Return one of the tiers that there are."""
        found = {"host": self.host, "nvme": self.nvme, "store": self.store}[name]
        assert found is not None
        return found

    @property
    def names(self) -> tuple[str, ...]:
        """The tiers that there are, the nearest first."""
        return tuple(name for name in TIERS if getattr(self, name) is not None)


class Tier:
    """Blocks by id, as many as fit; the one used the longest time ago goes first."""

    def __init__(self, name: str, capacity_tokens: int, books: TierBooks) -> None:
        """Make an empty tier."""
        self.name = name
        self._capacity_tokens = capacity_tokens
        self._books = books
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, block_id: int) -> bool:
        return block_id in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def refresh(self, block_ids: Iterable[int]) -> None:
        """Note that blocks are used, one after the other, as far as they are here."""
        blocks = self._blocks
        for block_id in block_ids:
            if block_id in blocks:
                blocks.move_to_end(block_id)

    def write(
        self, block_ids: Iterable[int], block_tokens: int, only: Container[int] | None = None
    ) -> set[int]:
        """Note that blocks are used, and take in those that are not here; return these.

        `only`: which of them can be taken in.
        """
        blocks, most = self._blocks, self._capacity_tokens // block_tokens
        new = set()
        for block_id in block_ids:
            if block_id in blocks:
                blocks.move_to_end(block_id)
            elif only is None or block_id in only:
                new.add(block_id)
                blocks[block_id] = None
                if len(blocks) > most:
                    blocks.popitem(last=False)
        self._books.written_tokens[self.name] += len(new) * block_tokens
        return new


@dataclass(slots=True)
class TierBooks:
    """What all instances of a run have written, in tokens by tier, and how their loads went.

    `slower_loads`: loads from a tier that took longer, without contention, than computing again.
    `spec`: the tiers, None if there is none beyond the GPU.
    """

    spec: HierarchySpec | None = None
    written_tokens: Counter[str] = field(default_factory=Counter)
    loads: Counter[str] = field(default_factory=Counter)
    slower_loads: Counter[str] = field(default_factory=Counter)
    cut_short: int = 0  # loads that ran out of time


class SharedTiers:
    """What the instances of one run have in common: the store of the cluster, and the books."""

    def __init__(self, spec: HierarchySpec | None) -> None:
        """Make an empty store."""
        self.books = TierBooks(spec)
        store = None if spec is None else spec.store
        self.store = None if store is None else Tier("store", store.capacity_tokens, self.books)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Blocks of a prefix to be brought to the host, in order, and the tier that each comes from.

    `most_wait_s`: how long the request waits for them, 0 if it does not.
    """

    block_ids: tuple[int, ...]
    tiers: tuple[str, ...]
    block_tokens: int
    most_wait_s: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens of all of them."""
        return len(self.block_ids) * self.block_tokens

    def tokens_by_tier(self) -> dict[str, int]:
        """Return the tokens that come from each tier."""
        return {name: n * self.block_tokens for name, n in Counter(self.tiers).items()}


# --- who decides --------------------------------------------------------------------------------


class Hierarchy:
    """The tiers of one rank: its own host memory, its instance's NVMe, the cluster's store.

    A block is used when a request ends that began with it, and that refreshes it wherever it is,
    the last block of a prompt before its first: so the ends of prompts go first.
    """

    def __init__(
        self,
        spec: HierarchySpec,
        host: Tier,
        nvme: Tier | None,
        store: Tier | None,
        books: TierBooks,
    ) -> None:
        """Look after these tiers."""
        self.spec = spec
        self._books = books
        self._host = host
        self._below = [tier for tier in (nvme, store) if tier is not None]
        self._hits_to_write = _HITS_TO_WRITE.get(spec.write)
        self._block_tokens = 0

    def set_block_tokens(self, block_tokens: int) -> None:
        """Take in the size of all blocks."""
        self._block_tokens = block_tokens

    # --- what the GPU tells, the last block of a prompt first ------------------------------------

    def stored(self, block_ids: Ids) -> None:
        """Take in that blocks are new on the GPU."""
        if self._hits_to_write == 1:
            self._write(block_ids)

    def used(self, block_ids: Ids, last: Block) -> None:
        """Take in that a request that began with these blocks, up to `last`, has ended."""
        if self._hits_to_write == 1:
            self._write(block_ids)
        elif self._hits_to_write is None:
            self._refresh(block_ids)
        else:
            for block in _path(last):
                keep = self._write if block.hits >= self._hits_to_write else self._refresh
                keep((block.block_id,))

    def evicted(self, block_id: int) -> None:
        """Take in that a block leaves the GPU."""
        if self._hits_to_write is None:
            self._write((block_id,))

    def _write(self, block_ids: Ids) -> None:
        new = self._host.write(block_ids, self._block_tokens)
        for tier in self._below:
            tier.write(block_ids, self._block_tokens, new)

    def _refresh(self, block_ids: Ids) -> None:
        self._host.refresh(block_ids)
        for tier in self._below:
            tier.refresh(block_ids)

    # --- loads ----------------------------------------------------------------------------------

    def on_host(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks, from the first on, the host holds and should load."""
        blocks = 0
        for block_id in block_ids:
            if block_id not in self._host:
                break
            blocks += 1
        return blocks if self._should_load("host", blocks * self._block_tokens) else 0

    def plan(self, block_ids: tuple[int, ...]) -> LoadPlan | None:
        """Return what to bring to the host of these blocks, up to the first that is nowhere.

        None if that is not worth a load: fewer tokens than the threshold, or slower than computing.
        """
        ids: list[int] = []
        tiers: list[str] = []
        for block_id in block_ids:
            if block_id in self._host:
                continue
            holder = next((tier for tier in self._below if block_id in tier), None)
            if holder is None:
                break
            ids.append(block_id)
            tiers.append(holder.name)
        tokens = len(ids) * self._block_tokens
        if not ids or tokens < self.spec.prefetch.threshold_tokens:
            return None
        most_wait_s = self.spec.prefetch.most_wait_s(tokens)
        plan = LoadPlan(tuple(ids), tuple(tiers), self._block_tokens, most_wait_s)
        by_tier = plan.tokens_by_tier()
        if not all(self._should_load(name, tokens) for name, tokens in by_tier.items()):
            return None
        for name, tokens in by_tier.items():
            self.note_load(name, tokens)
        return plan

    def landed(self, plan: LoadPlan, blocks: int) -> None:
        """Take in that the first `blocks` blocks of a plan are on the host."""
        self._books.cut_short += blocks < len(plan.block_ids)
        self._host.write(plan.block_ids[:blocks][::-1], self._block_tokens)

    def note_load(self, name: str, tokens: int) -> None:
        """Count a load, and whether computing would have been faster."""
        self._books.loads[name] += 1
        self._books.slower_loads[name] += not self._choice(name, tokens).loads

    def _should_load(self, name: str, tokens: int) -> bool:
        return self.spec.loads == "always" or self._choice(name, tokens).loads

    def _choice(self, name: str, tokens: int) -> LoadChoice:
        load_s = self.spec.tier(name).load_s(tokens)
        return LoadChoice(load_s, self.spec.recompute_s(tokens))


def _path(last: Block) -> Iterable[Block]:
    """Yield the blocks from `last` up to the first one of its prompt."""
    block = last
    while block.depth:
        yield block
        assert block.parent is not None
        block = block.parent
